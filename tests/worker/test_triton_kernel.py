"""The kernel for small pages: its bytes by triton's interpreter, its machine code by the compiler.

Neither needs a GPU. On one, `test_cuda_engine.py` runs it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvcache.base.arrays import int32_array
from kvcache.worker.copies.cuda import as_words, word_bytes_of
from tests.worker.worker_support import random_bytes

HOPPER = 90


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, if triton is installed. Its kernels are interpreted."""
    pytest.importorskip("triton", reason="NO TRITON: the kernel for small pages is NOT TESTED")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    from kvcache.worker.copies import triton_kernel

    return triton_kernel


def rows_of(rng: np.random.Generator, num_rows: int, width: int, gap: int = 0) -> torch.Tensor:
    whole = random_bytes(rng, num_rows, width + gap)
    return whole.as_strided((num_rows, width), (width + gap, 1), 0)


@pytest.mark.parametrize("gap", [0, 16, 5])
@pytest.mark.parametrize("width", [1, 16, 24, 513, 2048, 8192, 8208, 20000])
def test_the_kernel_equals_the_naive_model(engine: Any, width: int, gap: int) -> None:
    kernel = engine.RowKernel()
    for seed in range(3):
        print("seed", seed)
        rng = np.random.default_rng(seed)
        sources, destinations = rows_of(rng, 12, width, gap), rows_of(rng, 10, width, gap * seed)
        count = int(rng.integers(1, 10))
        from_ids = int32_array(rng.integers(0, 12, count))
        to_ids = int32_array(rng.permutation(10)[:count])
        expected = destinations.clone()
        expected[to_ids.tolist()] = sources[from_ids.tolist()]
        kernel.copy(sources, torch.from_numpy(from_ids), destinations, torch.from_numpy(to_ids))
        assert torch.equal(destinations, expected)


def test_what_lies_between_rows_is_not_touched(engine: Any) -> None:
    rng = np.random.default_rng(0)
    whole = random_bytes(rng, 8, 64)
    before = whole.clone()
    rows = whole.as_strided((8, 32), (64, 1), 16)
    order = torch.arange(8, dtype=torch.int32)
    engine.RowKernel().copy(random_bytes(rng, 8, 32), order, rows, order)
    changed = (whole != before).any(dim=0).nonzero().flatten().tolist()
    assert changed == list(range(16, 48))


def test_more_rows_than_programs_all_arrive(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "MAX_PROGRAMS", 3)
    sources = random_bytes(np.random.default_rng(1), 50, 16)
    destinations, order = torch.zeros_like(sources), torch.randperm(50, dtype=torch.int32)
    engine.RowKernel().copy(sources, order, destinations, torch.arange(50, dtype=torch.int32))
    assert torch.equal(destinations, sources[order.long()])


def test_nothing_to_copy_launches_nothing(engine: Any) -> None:
    rows, nothing = torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(0, dtype=torch.int32)
    kernel = engine.RowKernel()
    kernel._kernel = None  # a launch would fail
    kernel.copy(rows, nothing, rows, nothing)
    kernel.copy(rows[:, :0], nothing[:1], rows[:, :0], nothing[:1])


@pytest.mark.parametrize(
    ("element", "unit", "loads", "stores"),
    [("i64", 2, "ld.global.v2.b64", "st.global.v2.b64"), ("u8", 1, "ld.global", "st.global")],
)
def test_the_kernel_compiles_for_hopper_to_wide_loads_and_stores(
    element: str, unit: int, loads: str, stores: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accesses have 16 bytes, although the compiler knows no widths and strides."""
    triton: Any = pytest.importorskip("triton", reason="NO TRITON: the kernel is NOT COMPILED")
    if "nvidia" not in triton.backends.backends:
        pytest.skip("NO NVIDIA BACKEND IN TRITON: the kernel is NOT COMPILED")
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # unset, some versions warn
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvcache.worker.copies import triton_kernel

    numbers = dict.fromkeys(triton_kernel._NUMBERS, "i32")
    source = ASTSource(
        fn=triton.jit(triton_kernel._copy_rows),
        signature={
            "sources": f"*{element}",
            "destinations": f"*{element}",
            "source_ids": "*i32",
            "destination_ids": "*i32",
            **numbers,
            "UNIT": "constexpr",
            "BLOCK": "constexpr",
        },
        constexprs={"UNIT": unit, "BLOCK": triton_kernel.BLOCK_ELEMENTS},
        attrs={(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]},
    )
    assembly = triton.compile(source, target=GPUTarget("cuda", HOPPER, 32)).asm
    assert len(assembly["cubin"]) > 0
    assert (loads in assembly["ptx"], stores in assembly["ptx"]) == (True, True)


@pytest.mark.parametrize(
    ("width", "gap", "start", "word_bytes"),
    [(64, 0, 0, 8), (64, 8, 8, 8), (20, 0, 0, 4), (64, 2, 0, 2), (64, 0, 1, 1), (7, 1, 0, 1)],
)
def test_rows_are_seen_as_the_widest_words_they_are_made_of(
    width: int, gap: int, start: int, word_bytes: int
) -> None:
    whole = torch.zeros(8 * (width + gap) + 8, dtype=torch.uint8)
    rows = whole.as_strided((8, width), (width + gap, 1), start)
    assert word_bytes_of(rows) == word_bytes
    assert as_words(rows).shape == (8, width // word_bytes)
    as_words(rows).index_fill_(0, torch.tensor([3]), -1 if word_bytes > 1 else 255)
    assert rows.sum(dim=1).tolist() == [0, 0, 0, width * 255, 0, 0, 0, 0]

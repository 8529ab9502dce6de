"""vLLM's tensors as rows of bytes, in every layout that vLLM 0.32 has."""

from __future__ import annotations

from itertools import permutations
from math import prod
from typing import Any

import numpy as np
import pytest
import torch

from kvcache.base.errors import ConfigurationError
from kvcache.integrations.vllm.layer_rows import layer_rows

L, B, H, N, C = 3, 5, 2, 4, 32
LAYOUTS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""The order of the dimensions in memory."""

NUM_ROWS = {"LBHNC": L, "LBNHC": L, "LHBNC": L * H, "BLHNC": 1, "BLNHC": 1, "BHLNC": 1}


def views(
    layout: str, num_blocks: int = B, per_block: int = 1, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """A view per layer of one allocation, with numbers of its own in each element."""
    shape = (L, num_blocks * per_block, H, N, C)
    order = LAYOUTS[layout]
    numbers = torch.arange(prod(shape), dtype=torch.float32, device=device)
    raw = numbers.reshape([shape[dim] for dim in order])
    logical = raw.permute([order.index(dim) for dim in range(5)])
    return {f"layer{i}": logical[i] for i in range(L)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_has_every_byte_of_its_block_once_and_no_other(layout: str) -> None:
    found = layer_rows(views(layout), B)
    assert len(found.rows) == NUM_ROWS[layout]
    assert {len(rows) for rows in found.rows} == {B}
    for block in range(B):
        held = np.concatenate([rows[block].numpy() for rows in found.rows]).view(np.float32)
        wanted = torch.cat([view[block].flatten() for view in views(layout).values()])
        assert sorted(held.tolist()) == sorted(wanted.tolist())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_copied_as_rows_are_copied_in_every_layer(layout: str) -> None:
    tensors = views(layout)
    for rows in layer_rows(tensors, B).rows:
        rows[3] = rows[1].clone()
    for layer, before in views(layout).items():
        expected = before.clone()
        expected[3] = before[1]
        assert torch.equal(tensors[layer], expected)


def test_kernel_blocks_of_one_block_are_one_row() -> None:
    found = layer_rows(views("LBNHC", B, 2), B)
    assert [tuple(rows.shape) for rows in found.rows] == [(B, 2 * H * N * C * 4)] * L


def test_padding_between_pages_is_not_copied() -> None:
    page, padded = N * C * 4, N * C * 4 + 64
    raw = torch.zeros(B * 2 * padded, dtype=torch.uint8)
    layers = {f"layer{i}": raw.as_strided((B, page), (2 * padded, 1), i * padded) for i in range(2)}
    found = layer_rows(layers, B)
    assert [tuple(rows.shape) for rows in found.rows] == [(B, page)] * 2


def test_layers_that_share_memory_are_rows_once_as_long_as_the_longer() -> None:
    raw = torch.zeros(B, 512, dtype=torch.uint8)
    found = layer_rows({"full": raw, "window": raw[:, :384]}, B)
    assert [tuple(rows.shape) for rows in found.rows] == [(B, 512)]


def test_the_description_is_that_of_the_layout_and_not_of_the_number_of_blocks() -> None:
    told = {layout: layer_rows(views(layout), B).description for layout in LAYOUTS}
    assert len(set(told.values())) == len(LAYOUTS)
    for layout, description in told.items():
        assert layer_rows(views(layout, 9), 9).description == description
    split = layer_rows(views("LBNHC", B, 2), B).description
    assert split != told["LBNHC"]


OVERLAPPING = torch.zeros(4096, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (((B, 128), (128, 1), 0), ((B, 128), (128, 1), 128)),  # a block further
        (((B, 128), (128, 1), 0), ((B, 256), (256, 1), 0)),  # another distance
        (((B, 128), (256, 1), 0), ((B, 192), (256, 1), 128)),  # into the next block
    ],
)
def test_blocks_that_overlap_are_refused(first: Any, second: Any) -> None:
    layers = {"a": OVERLAPPING.as_strided(*first), "b": OVERLAPPING.as_strided(*second)}
    with pytest.raises(ConfigurationError, match=r"^blocks of vLLM's KV cache overlap: "):
        layer_rows(layers, B)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, B, N, 64),
        torch.zeros(B, 64, 64).transpose(1, 2)[:, :1],
        torch.zeros(B, 1).expand(B, 64),
        torch.zeros(0, 4),
        torch.tensor(1.0),
        [torch.zeros(B, 4)],
    ],
    ids=["blocks second", "scattered", "expanded", "empty", "a number", "a list"],
)
def test_what_cannot_be_moved_is_refused_with_its_layout(tensor: object) -> None:
    with pytest.raises(ConfigurationError, match=r"^the KV cache of layer x is .* of 5 blocks"):
        layer_rows({"x": tensor}, B)


def test_tensors_on_several_devices_are_refused() -> None:
    layers = {"x": torch.zeros(B, 64), "y": torch.zeros(B, 64, device="meta")}
    with pytest.raises(ConfigurationError, match=r"are not on one device"):
        layer_rows(layers, B)


def test_every_order_of_dimensions_is_moved_or_refused_whole() -> None:
    for order in permutations(range(3)):
        shape = (B, 3, 64)
        raw = torch.arange(prod(shape), dtype=torch.float32).reshape([shape[dim] for dim in order])
        view = raw.permute([order.index(dim) for dim in range(3)])
        try:
            rows = layer_rows({"x": view}, B).rows
        except ConfigurationError:
            assert order[-1] != 2
            continue
        for each in rows:
            each[0] = each[4].clone()
        assert torch.equal(view[0], view[4])

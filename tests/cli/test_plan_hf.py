"""`kvcache plan` of a published model: numbers, and options next to a file."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import run as run_command
from tests.planner import public_models as public

ROOT = Path(__file__).resolve().parents[2]
CPU_TP2 = ROOT / "configs" / "cpu_tp2.yaml"


run = partial(run_command, "plan")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write(tmp_path, public.LLAMA_3_70B)


def write(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def test_a_published_model_is_shown_in_numbers(llama: Path) -> None:
    shown, _ = run("--hf-config", llama, "--tp", "4", "--pp", "2", "--memory", "60GiB")
    # 40 layers of 16 KiB a rank: 98304 blocks, one of them the null block
    for text in (
        "plan of llama",
        "98,303 and the null block",
        "1,572,848 tokens",
        "131,072 tokens",
        "1,572,848 tokens fit",
        "12.00 requests of full length",
        "327,680.0 bytes, all ranks",
        "of full length, with 0 B (0.0%) of padding",
    ):
        assert text in shown


def test_kinds_and_warnings_are_shown_in_full_however_narrow(tmp_path: Path) -> None:
    path = write(tmp_path, public.GEMMA_3_27B)
    shown, _ = run("--hf-config", path, "--tp", "2", "--memory", "40GiB")
    assert shown.count("sliding_window") == 6
    assert "…" not in shown


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_configuration_that_is_handed_out_is_planned_alike_as_table_and_json(
    path: Path,
) -> None:
    shown, _ = run("--config", path)
    as_json, _ = run("--config", path, "--json")
    report = json.loads(as_json)
    for text in (
        f"plan of {report['name']}\n",
        f"{report['num_usable_blocks']:,} and the null block",
        f"{report['capacity_tokens']:,} tokens",
        f"{report['largest_model_len']:,} tokens fit",
        f"{report['max_concurrency']:.2f} requests of full length",
        f"{report['bytes_per_token']:,.1f} bytes, all ranks",
        report["fingerprint"][:16],
    ):
        assert text in shown
    assert shown.count("warning: ") == len(report["warnings"])


def test_padding_is_shown_with_the_pages_it_is_in(tmp_path: Path) -> None:
    path = write(tmp_path, public.JAMBA)
    shown, _ = run("--hf-config", path, "--tp", "2", "--memory", "20GiB")
    for text in ("95.0%", "80 tokens", "warning: pages of 28 layers like layers.0 are padded"):
        assert text in shown


def test_every_choice_reaches_the_plan(tmp_path: Path) -> None:
    shown, _ = run(
        *("--hf-config", write(tmp_path, public.JAMBA), "--tp", "2", "--pp", "2"),
        *("--memory", "20GiB", "--block-size", "32", "--max-model-len", "5000"),
        *("--max-num-batched-tokens", "100", "--dtype", "int8", "--mamba-cache-mode", "align"),
        "--json",
    )
    report = json.loads(shown)
    # 32 tokens: 2 * 32 * 4 * 128 bytes are 32 KiB, the state is 152 KiB: five blocks
    assert {group["block_size_tokens"] for group in report["groups"]} == {160}
    assert (report["num_ranks"], report["max_model_len"]) == (4, 5000)
    assert report["max_num_batched_tokens"] == 100
    assert report["can_prefix_cache"]
    assert report["request_padding_bytes"] > 0
    assert report["largest_model_len"] > 262144


def test_the_same_numbers_come_from_a_configuration_that_says_the_same(llama: Path) -> None:
    by_model, _ = run("--hf-config", llama, "--memory", "128GiB", "--json")
    text = (ROOT / "configs" / "llama3_8b_h100_tp4.yaml").read_text(encoding="utf-8")
    for old, new in (("count: 32", "count: 80"), ("size: 4", "size: 1"), ("64GiB", "128GiB")):
        text = text.replace(old, new)
    path = llama.with_suffix(".yaml")
    path.write_text(text, encoding="utf-8")
    by_file, _ = run("--config", path, "--json")
    assert {**json.loads(by_file), "name": "llama"} == json.loads(by_model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (),
            "nothing to plan, or two things: give --config FILE for a configuration, or "
            "--hf-config FILE for the config.json of a model",
        ),
        (
            ("--config", str(CPU_TP2), "--hf-config", "LLAMA"),
            "nothing to plan, or two things: give --config FILE for a configuration, or "
            "--hf-config FILE for the config.json of a model",
        ),
        (
            ("--config", str(CPU_TP2), "--tp", "3", "--block-size", "8"),
            f"--tp, --block-size cannot be combined with --config: set them in {CPU_TP2}",
        ),
        (
            ("--hf-config", "LLAMA"),
            "a config.json does not say how much memory a rank has: give --memory, such as 60GiB",
        ),
        (
            ("--hf-config", "LLAMA", "--memory", "60"),
            "LLAMA: cache.memory_per_rank: '60' is not an amount of memory: write a number and one "
            "of B, KiB, MiB, GiB, TiB",
        ),
        (
            ("--hf-config", "LLAMA", "--memory", "60GiB", "--max-model-len", "long"),
            "LLAMA: model.max_model_len: 'long' is no length: write a number of tokens from 1 to "
            "2147483647, or auto",
        ),
        (
            ("--hf-config", "LLAMA", "--memory", "60GiB", "--tp", "3"),
            "LLAMA: num_attention_heads is 64, which 3 tensor-parallel ranks cannot divide evenly: "
            "choose a tensor-parallel size that divides 64",
        ),
        (
            ("--hf-config", "LLAMA", "--memory", "60GiB", "--mamba-cache-mode", "all"),
            "mamba_cache_mode is 'all': use one of none, align",
        ),
        (
            ("--hf-config", "LLAMA", "--memory", "1GiB", "--max-model-len", "131072"),
            # 80 layers of 64 KiB are 5 MiB: 204 blocks
            "rank 0: a request of 131072 tokens needs 42954915840 bytes (8193 blocks of 5242880 "
            "bytes, the null block included), available are 1073741824 bytes (204 blocks): lower "
            "max_model_len to at most 3248 tokens, or give rank 0 more memory",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(
    llama: Path, arguments: tuple[str, ...], message: str
) -> None:
    typed = [str(llama) if argument == "LLAMA" else argument for argument in arguments]
    shown, error = run(*typed, exit_code=2)
    assert shown == ""
    assert error == f"kvcache: {message.replace('LLAMA', str(llama))}\n"


def test_the_directory_of_a_model_is_not_its_file(tmp_path: Path) -> None:
    _, error = run("--hf-config", str(tmp_path), "--memory", "1GiB", exit_code=2)
    assert error == f"kvcache: {tmp_path}: cannot be read (Is a directory): give its config.json\n"


def test_an_unknown_model_is_one_line_with_the_missing_fields(tmp_path: Path) -> None:
    path = write(tmp_path, {"model_type": "novel", "num_hidden_layers": 3})
    _, error = run("--hf-config", path, "--memory", "1GiB", exit_code=2)
    assert error.startswith(
        f"kvcache: {path}: model_type novel is not known, and of the fields that would say what "
        "its layers keep num_attention_heads, max_position_embeddings, num_key_value_heads, "
        "head_dim, layer_types are missing: add them, or "
    )

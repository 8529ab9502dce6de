"""Commands that change a running cluster's cache: `pin`, `unpin`, `pins`, `prefetch`, `clear`.

A pin keeps a prefix cached for a while. `prefetch` raises one from the tiers. `clear` empties the
cache. It asks first, and refuses if there is no terminal to ask on. For weights that have changed,
`--drain` advances the model epoch when the running requests have finished, and `--new-weights` at
once.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from actors.cli.clusters import open_cluster
from actors.cli.command import (
    JsonOption,
    NameOption,
    VllmOption,
    command,
    print_json,
    print_table,
    require_positive,
    say,
)
from kvcache.base.errors import (
    ConfigurationError,
    DeadlineError,
    ExhaustedError,
    NotRunningError,
    RequestError,
    shown,
)

if TYPE_CHECKING:
    from actors.clusters.cluster import KVCacheCluster
    from kvcache.base.arrays import Int32Array
    from kvcache.manager.statistics import ManagerStatistics
    from kvcache.metrics.inspection import PinStatus

ADMIN_CLIENT = "admin"
POLL_S = 0.2
HUB_TIMEOUT_S = 5.0

TokensOption = Annotated[
    str | None, typer.Option("--tokens", help="Token ids, separated by commas.")
]
TokenFileOption = Annotated[
    Path | None, typer.Option("--token-file", help="A file of token ids, or a JSON list.")
]
TextOption = Annotated[
    Path | None, typer.Option("--text", help="Tokenize this text file; needs --tokenizer.")
]
TokenizerOption = Annotated[
    str | None, typer.Option(help="With --text: directory or name of a transformers tokenizer.")
]
LoraOption = Annotated[str | None, typer.Option(help="Adapter of the prefix's requests.")]
SaltOption = Annotated[str | None, typer.Option(help="Cache salt of the prefix's requests.")]
TenantOption = Annotated[str | None, typer.Option(help="Tenant of the prefix's requests.")]


@command
def pin(
    name: NameOption = None,
    *,
    tokens: TokensOption = None,
    token_file: TokenFileOption = None,
    text: TextOption = None,
    tokenizer: TokenizerOption = None,
    ttl: Annotated[float, typer.Option("--ttl", help="Seconds until the pin ends.")] = 3600.0,
    lora: LoraOption = None,
    salt: SaltOption = None,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Protect the cached part of a prefix from eviction for a while."""
    from kvcache.requests.request import LoRARequest

    require_positive(ttl=ttl)
    token_ids = read_tokens(tokens, token_file, text, tokenizer)
    adapter = None if lora is None else LoRARequest(lora, "")
    with open_cluster(name) as cluster, cluster.client(ADMIN_CLIENT) as client:
        made = client.pin_prefix(token_ids, ttl, lora=adapter, cache_salt=salt, tenant=tenant)
        if not made.num_tokens:
            client.unpin_prefix(made)
            raise RequestError(
                f"no prefix of these {len(token_ids)} tokens is cached in {cluster.name}: let a "
                "request compute them first, and pass its adapter, salt and tenant"
            )
    if as_json:
        values = {"pin_id": made.pin_id, "num_tokens": made.num_tokens, "ttl_s": ttl}
        print_json({"name": cluster.name, **values, "num_blocks": made.num_blocks}, indent=None)
        return
    print(
        f"pin {made.pin_id} holds {made.num_tokens:,} of {len(token_ids):,} tokens, "
        f"{made.num_blocks:,} blocks, for {ttl:g} s"
    )


@command
def unpin(
    pin_id: Annotated[int, typer.Argument(help="Number of the pin; `kvcache pins` shows them.")],
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a pin early."""
    from kvcache.manager.pins import Pin

    with open_cluster(name) as cluster, cluster.client(ADMIN_CLIENT) as client:
        if not client.unpin_prefix(Pin(pin_id, 0, 0, 0.0)):
            held = ", ".join(str(each.pin_id) for each in cluster.inspect().pins)
            raise RequestError(f"no pin {pin_id} in {cluster.name}: the pins are: {held or 'none'}")
    if as_json:
        print_json({"name": cluster.name, "unpinned": pin_id}, indent=None)
        return
    say(f"pin {pin_id} has ended")


@command
def pins(name: NameOption = None, as_json: JsonOption = False) -> None:
    """Show the pins of a running cluster."""

    with open_cluster(name) as cluster:
        held = cluster.inspect().pins
    if as_json:
        rows = [asdict(each) for each in held]
        print_json({"name": cluster.name, "pins": rows})
        return
    if not held:
        print(f"nothing is pinned in {cluster.name}")
        return
    print_table(f"{cluster.name}: pins", _table(held))


@command
def prefetch(
    name: NameOption = None,
    *,
    tokens: TokensOption = None,
    token_file: TokenFileOption = None,
    text: TextOption = None,
    tokenizer: TokenizerOption = None,
    lora: LoraOption = None,
    salt: SaltOption = None,
    tenant: TenantOption = None,
    as_json: JsonOption = False,
) -> None:
    """Raise a prefix from host memory or files to the device, ahead of its next request."""
    from kvcache.requests.request import LoRARequest

    token_ids = read_tokens(tokens, token_file, text, tokenizer)
    adapter = None if lora is None else LoRARequest(lora, "")
    with open_cluster(name) as cluster, cluster.client(ADMIN_CLIENT) as client:
        count = client.prefetch_prefix(token_ids, lora=adapter, cache_salt=salt, tenant=tenant)
    if as_json:
        print_json({"name": cluster.name, "num_loading_tokens": count}, indent=None)
        return
    if count:
        print(f"{count:,} of {len(token_ids):,} tokens are being loaded")
    else:
        print("nothing to load: tiers hold no more of this prefix than the device, or have no room")


@command
def clear(
    name: NameOption = None,
    *,
    drain: Annotated[
        bool,
        typer.Option("--drain", help="Wait for running requests, then start the next model epoch."),
    ] = False,
    new_weights: Annotated[
        bool,
        typer.Option(
            "--new-weights",
            help="Start the next model epoch at once. Requests go on running and cache no more.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    timeout: Annotated[
        float,
        typer.Option(help="With --drain: seconds to wait. The drain itself has no limit.", min=0),
    ] = 600.0,
    vllm: VllmOption = None,
    as_json: JsonOption = False,
) -> None:
    """Empty the prefix cache of a running cluster; asks first."""
    if vllm is not None:
        from actors.cli.engines import clear_engine

        if drain or new_weights:
            raise ConfigurationError(
                "--drain and --new-weights are for clusters, not for --vllm: after a change of "
                "weights, call reset_prefix_cache(reset_connector=True) of the engine"
            )
        clear_engine(vllm, yes, as_json)
        return

    if drain and new_weights:
        raise ConfigurationError(
            "--drain waits for running requests, --new-weights does not: pass one of them"
        )
    with open_cluster(name) as cluster:
        manager = _manager(cluster)
        if not yes:
            confirm(cluster.name, manager, begins_epoch=drain or new_weights)
        with cluster.client(ADMIN_CLIENT) as client:
            if new_weights:
                client.begin_model_epoch()
            elif client.reset_prefix_cache(drain=drain):
                pass
            elif not drain:
                raise ExhaustedError(
                    f"{cluster.name} is not cleared: {_manager(cluster).users()}: let them end, or "
                    "pass --drain, which waits for them and ends pins, or --new-weights"
                )
            else:
                _await_drained(cluster, manager.model_epoch, timeout)
        after = _manager(cluster)
    if as_json:
        epochs = {"model_epoch_before": manager.model_epoch, "model_epoch": after.model_epoch}
        forgotten = {"num_forgotten_blocks": manager.core.num_cached_blocks}
        print_json({"name": cluster.name, **forgotten, **epochs}, indent=None)
        return
    print(
        f"{cluster.name} is cleared: {manager.core.num_cached_blocks:,} blocks dropped, model "
        f"epoch {after.model_epoch}"
    )


def read_tokens(
    tokens: str | None, token_file: Path | None, text: Path | None, tokenizer: str | None
) -> Int32Array:
    """Return the token ids; raises ConfigurationError unless exactly one source is given."""
    given = [value for value in (tokens, token_file, text) if value is not None]
    if len(given) != 1:
        raise ConfigurationError(
            f"{len(given)} prefixes were given: pass one of --tokens, --token-file and --text"
        )
    if text is not None:
        return _tokenized(text, tokenizer)
    if token_file is None:
        return _checked(_numbers(tokens or "", "--tokens"), "--tokens")
    return _checked(_numbers(_read(token_file), str(token_file)), str(token_file))


def _numbers(text: str, where: str) -> list[int]:
    """Return integers separated by commas or white space, or a JSON list of them."""
    text = text.strip()
    if text.startswith("[") != text.endswith("]"):
        raise ConfigurationError(
            f"{where}: one bracket of a JSON list is missing: check that the file is complete"
        )
    words = re.split(r"[\s,]+", text.removeprefix("[").removesuffix("]").strip(" ,\n"))
    wrong = [word for word in words if word and not re.fullmatch(r"[+-]?[0-9]{1,18}", word)]
    if wrong:
        raise ConfigurationError(
            f"{where}: {shown(wrong[0])} is not a token id: separate token ids by commas or spaces"
        )
    return [int(word) for word in words if word]


def _checked(numbers: list[int], where: str) -> Int32Array:
    import numpy as np

    from kvcache.config.sections import MAX_COUNT

    wrong = [number for number in numbers if not 0 <= number <= MAX_COUNT]
    if wrong or not numbers:
        what = f"{wrong[0]} is not a token id" if wrong else "there are no token ids"
        raise ConfigurationError(f"{where}: {what}: write numbers from 0 to {MAX_COUNT}")
    return np.array(numbers, dtype=np.int32)


def _tokenized(path: Path, tokenizer: str | None) -> Int32Array:
    if tokenizer is None:
        raise ConfigurationError(
            f"{path} is text and needs the model's tokenizer: pass --tokenizer, "
            "a directory or a name that transformers can load, or pass token ids"
        )
    try:
        from huggingface_hub import HfApi
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigurationError(
            "--tokenizer needs transformers: pip install 'kvcache[transformers]', or pass token ids"
        ) from error
    text = _read(path)
    refused: Exception | None = None
    if not Path(tokenizer).is_dir():
        try:  # transformers itself would try for most of a minute
            HfApi().model_info(tokenizer, timeout=HUB_TIMEOUT_S)
        except Exception as error:  # also of the hub's HTTP library, which differs by version
            refused = error
    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=refused is not None)
        ids = loaded(text)["input_ids"]
    except (OSError, ValueError) as error:
        why = (str(refused or error).splitlines() or ["without a reason"])[0].rstrip(".: ")
        where = ", neither from this node nor from the Hugging Face hub" if refused else ""
        raise ConfigurationError(
            f"tokenizer {tokenizer} cannot be loaded{where}: {why}: pass a directory with the "
            "tokenizer's files, or token ids"
        ) from error
    return _checked(list(ids), str(path))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigurationError(f"{path} cannot be read ({why}): pass a text file") from error


def _table(pins: tuple[PinStatus, ...]) -> Table:
    table = Table("pin", "tokens", "blocks", "ends in")
    for each in pins:
        cells = (f"{each.num_tokens:,}", f"{each.num_blocks:,}", f"{each.remaining_s:,.0f} s")
        table.add_row(str(each.pin_id), *cells)
    return table


def _manager(cluster: KVCacheCluster) -> ManagerStatistics:
    statistics = cluster.coordinator_statistics()
    if statistics is None or statistics.manager is None:
        raise NotRunningError(f"{cluster.name} has no cache at the moment: wait until it is ready")
    return statistics.manager


def confirm(name: str, manager: ManagerStatistics, *, begins_epoch: bool) -> None:
    """Ask on the terminal. Raises ConfigurationError unless the answer is yes, and if there is no
    terminal."""
    more = ", ends all pins, and advances the model epoch" if begins_epoch else ""
    ask_on_terminal(name, f"{manager.core.num_cached_blocks:,} cached blocks of {name}{more}")


def ask_on_terminal(name: str, what: str) -> None:
    """Ask whether to drop `what`. Raises ConfigurationError as `confirm` does."""
    if not sys.stdin.isatty():
        raise ConfigurationError(
            f"clearing {name} drops {what}, and there is no terminal to ask on: pass --yes"
        )
    say(f"this drops {what}")
    print("continue? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise ConfigurationError(f"{name} is unchanged: the answer was not yes")


def _await_drained(cluster: KVCacheCluster, epoch_before: int, timeout_s: float) -> None:
    """Wait until the running requests have left, and the cache is empty."""
    say(f"{cluster.name} drains: requests find no cached prefix, and running requests finish")
    give_up_s = time.monotonic() + timeout_s
    while (manager := _manager(cluster)).is_draining or manager.model_epoch == epoch_before:
        if time.monotonic() > give_up_s:
            raise DeadlineError(
                f"{cluster.name} still drains after {timeout_s:g} s, {manager.users()}: it "
                "continues by itself, check with `kvcache status`"
            )
        time.sleep(POLL_S)

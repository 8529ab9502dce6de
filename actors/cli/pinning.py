"""`kvcache pin`, `unpin`, `pins`: prefixes that must stay cached for a while."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from actors.cli.clusters import open_cluster
from actors.cli.launching import say
from actors.cli.tables import print_json, print_table
from kvcache.base.arrays import Int32Array
from kvcache.base.errors import ConfigurationError, RequestError, shown
from kvcache.config.sections import MAX_COUNT
from kvcache.manager.pins import Pin
from kvcache.metrics.inspection import PinStatus
from kvcache.requests.request import LoRARequest

ADMIN_CLIENT = "admin"


@dataclass(frozen=True)
class PrefixChoice:
    """Which prefix was meant: exactly one of the first three, and what sets it apart.

    `text` needs a `tokenizer`: a directory, or a name, that `transformers` can load.
    """

    tokens: str | None = None
    token_file: Path | None = None
    text: Path | None = None
    tokenizer: str | None = None
    lora: str | None = None
    salt: str | None = None
    tenant: str | None = None


def pin(name: str | None, choice: PrefixChoice, ttl_s: float, as_json: bool) -> None:
    """Pin what is cached of a prefix and print the pin.

    Raises NotRunningError if there is no cluster, ConfigurationError for tokens that cannot be
    read, PinLimitError if too much is pinned, RequestError where nothing of the prefix is cached.
    """
    token_ids = read_tokens(choice)
    lora = None if choice.lora is None else LoRARequest(choice.lora, "")
    with open_cluster(name) as cluster, cluster.client(ADMIN_CLIENT) as client:
        made = client.pin_prefix(
            token_ids, ttl_s, lora=lora, cache_salt=choice.salt, tenant=choice.tenant
        )
        if not made.num_tokens:
            client.unpin_prefix(made)
            raise RequestError(
                f"nothing of these {len(token_ids)} tokens is cached in {cluster.name}: let a "
                "request compute them first; adapter, salt and tenant must be its own"
            )
    if as_json:
        values = {"pin_id": made.pin_id, "num_tokens": made.num_tokens, "ttl_s": ttl_s}
        print_json(json.dumps({"name": cluster.name, **values, "num_blocks": made.num_blocks}))
        return
    print(
        f"pin {made.pin_id} holds {made.num_tokens:,} of {len(token_ids):,} tokens, "
        f"{made.num_blocks:,} blocks, for {ttl_s:g} s"
    )


def unpin(name: str | None, pin_id: int, as_json: bool) -> None:
    """End a pin. Raises RequestError, naming those that hold, if there is no such pin."""
    with open_cluster(name) as cluster, cluster.client(ADMIN_CLIENT) as client:
        if not client.unpin_prefix(Pin(pin_id, 0, 0, 0.0)):
            held = ", ".join(str(each.pin_id) for each in cluster.inspect().pins)
            raise RequestError(f"no pin {pin_id} in {cluster.name}: those that hold: {held or '-'}")
    if as_json:
        print_json(json.dumps({"name": cluster.name, "unpinned": pin_id}))
        return
    say(f"pin {pin_id} has ended")


def show_pins(name: str | None, as_json: bool) -> None:
    """Print the pins that hold."""
    with open_cluster(name) as cluster:
        pins = cluster.inspect().pins
    if as_json:
        rows = [asdict(each) for each in pins]
        print_json(json.dumps({"name": cluster.name, "pins": rows}, indent=2))
        return
    if not pins:
        print(f"nothing is pinned in {cluster.name}")
        return
    print_table(Console(file=sys.stdout), f"{cluster.name}: pins", _table(pins))


def read_tokens(choice: PrefixChoice) -> Int32Array:
    """Return the token ids that were meant; raises ConfigurationError."""
    given = [
        value for value in (choice.tokens, choice.token_file, choice.text) if value is not None
    ]
    if len(given) != 1:
        raise ConfigurationError(
            f"{len(given)} prefixes were given: pass one of --tokens, --token-file and --text"
        )
    if choice.text is not None:
        return _tokenized(choice.text, choice.tokenizer)
    if choice.token_file is None:
        return _checked(_numbers(choice.tokens or "", "--tokens"), "--tokens")
    path = choice.token_file
    return _checked(_numbers(_read(path), str(path)), str(path))


def _numbers(text: str, where: str) -> list[int]:
    """Return integers separated by commas or white space, or a JSON list of them."""
    text = text.strip()
    if text.startswith("[") != text.endswith("]"):
        raise ConfigurationError(
            f"{where}: a list begins or ends there, and not both: is the file whole?"
        )
    words = re.split(r"[\s,]+", text.removeprefix("[").removesuffix("]").strip(" ,\n"))
    wrong = [word for word in words if word and not re.fullmatch(r"[+-]?[0-9]{1,18}", word)]
    if wrong:
        raise ConfigurationError(
            f"{where}: {shown(wrong[0])} is no token id: write token ids, separated by commas or "
            "spaces"
        )
    return [int(word) for word in words if word]


def _checked(numbers: list[int], where: str) -> Int32Array:
    wrong = [number for number in numbers if not 0 <= number <= MAX_COUNT]
    if wrong or not numbers:
        what = f"{wrong[0]} is no token id" if wrong else "there are no token ids"
        raise ConfigurationError(f"{where}: {what}: write numbers from 0 to {MAX_COUNT}")
    return np.array(numbers, dtype=np.int32)


def _tokenized(path: Path, tokenizer: str | None) -> Int32Array:
    if tokenizer is None:
        raise ConfigurationError(
            f"{path} is text, and only the model's tokenizer makes tokens of it: pass --tokenizer, "
            "a directory or a name that transformers can load, or pass token ids"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigurationError(
            "--tokenizer needs transformers: pip install 'kvcache[transformers]', or pass token ids"
        ) from error
    text = _read(path)
    try:
        ids = AutoTokenizer.from_pretrained(tokenizer)(text)["input_ids"]
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigurationError(f"tokenizer {tokenizer} cannot be loaded: {first}") from error
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

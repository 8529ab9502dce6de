"""Breaks valid input: byte by byte, and value by value inside msgpack and JSON."""

from __future__ import annotations

import json
import random
from typing import Any

import msgpack

ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    1,
    -1,
    2**31 - 1,
    2**31,
    -(2**63),
    2**63 - 1,
    2**64 - 1,
    0.0,
    -0.0,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\0",
    "\u2603" * 300,
    b"",
    b"\0",
    b"\xff" * 64,
    [],
    {},
    [[[[[]]]]],
    {"": None},
)

MAX_BYTES = 1 << 16


def mutate_bytes(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Return `data` with one to four mutations; `others` is spliced in."""
    found = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(found) + 1)
        match chance.randrange(6):
            case 0 if found:
                found[place % len(found)] ^= 1 << chance.randrange(8)
            case 1:
                del found[place:]
            case 2:
                found[place:place] = chance.randbytes(chance.randint(1, 8))
            case 3 if found:
                found[place % len(found)] = chance.choice((0, 0x7F, 0x80, 0xC1, 0xDD, 0xDF, 0xFF))
            case 4:
                other = chance.choice(others)
                found[place:] = other[chance.randrange(len(other) + 1) :]
            case 5:
                end = min(len(found), place + chance.randint(1, 32))
                found[place:place] = found[place:end] * chance.randint(1, 4)
    return bytes(found[:MAX_BYTES])


def mutate_value(value: Any, chance: random.Random) -> Any:
    """Return a plain value in which one part, however deep, is different."""
    if isinstance(value, list | tuple) and value and chance.random() < 0.85:
        changed = list(value)
        place = chance.randrange(len(changed))
        match chance.randrange(8):
            case 0:
                del changed[place]
            case 1:
                changed.insert(place, chance.choice(changed))
            case _:
                changed[place] = mutate_value(changed[place], chance)
        return changed
    if isinstance(value, dict) and value and chance.random() < 0.85:
        table = dict(value)
        key = chance.choice(list(table))
        match chance.randrange(8):
            case 0:
                del table[key]
            case 1:
                table[f"{key}?"] = table[key]
            case _:
                table[key] = mutate_value(table[key], chance)
        return table
    if isinstance(value, bytes) and chance.random() < 0.5:
        return mutate_bytes(value, [value], chance)
    if type(value) is int and chance.random() < 0.5:
        return value + chance.choice((-1, 1, 1 << 16, -(1 << 33)))
    return chance.choice(ODD_VALUES)


def mutate_msgpack(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Return msgpack of another value, sometimes invalid or far too deep."""
    if chance.random() < 0.02:
        return b"\x91" * chance.choice((500, 100_000)) + data
    if chance.random() < 0.3:
        return mutate_bytes(data, others, chance)
    value = msgpack.unpackb(data, strict_map_key=False)
    for _ in range(chance.randint(1, 3)):
        value = mutate_value(value, chance)
    try:
        packed: bytes = msgpack.packb(value)
    except (OverflowError, ValueError, TypeError):
        return data
    return packed


def mutate_json(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """Return JSON of another value, sometimes invalid or far too deep."""
    if chance.random() < 0.02:
        return b"[" * chance.choice((900, 100_000)) + data
    if chance.random() < 0.3:
        return mutate_bytes(data, others, chance)
    value = json.loads(data)
    for _ in range(chance.randint(1, 3)):
        value = mutate_value(value, chance)
    try:
        return json.dumps(value).encode()
    except (TypeError, ValueError):
        return data

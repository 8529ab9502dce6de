"""Token ids that follow from a name alone, so that a replay is the same every time.

Workloads make prompts of these ids, and the replay engine "samples" the same ids that a later turn
of the conversation quotes. Everything is a function of its arguments, without a random source.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from kvcache.base.arrays import Int32Array, Int64Array, mix

_STEP = np.uint64(0x9E3779B97F4A7C15)
_LARGEST_TOKEN_ID = np.uint64(2**31 - 1)

TokenSeeds = NDArray[np.uint64]
"""One seed per stream of tokens. Shape `(n,)`."""


def token_seed(*names: str | int) -> int:
    """Return the seed of the stream called `names`: 64 bits, the same on every machine."""
    text = "\x1f".join(f"{type(name).__name__}:{name}" for name in names)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def output_token_ids(seeds: TokenSeeds, positions: Int64Array) -> Int32Array:
    """Return the token that stream `seeds[i]` has at `positions[i]`; shapes `(n,)`, `(n,)`."""
    mixed = mix(seeds + (positions.astype(np.uint64) + np.uint64(1)) * _STEP)
    tokens: Int32Array = (mixed & _LARGEST_TOKEN_ID).astype(np.int32)
    return tokens


def token_stream(seed: int, num_tokens: int) -> Int32Array:
    """Return the first `num_tokens` tokens of stream `seed`."""
    return output_token_ids(np.array([seed], np.uint64), np.arange(num_tokens))


def answer_seed(request_id: str) -> int:
    """Return the seed of the replayed model's answer to request `request_id`."""
    return token_seed("answer", request_id)


def answer_token_ids(request_id: str, num_tokens: int) -> Int32Array:
    """Return the first `num_tokens` tokens of the replayed model's answer to `request_id`."""
    return token_stream(answer_seed(request_id), num_tokens)


def num_encoder_tokens(request_id: str, most: int) -> int:
    """Return the number of encoder tokens, 1 to `most`, of the replayed request `request_id`."""
    return 1 + token_seed("encoder", request_id) % most


def block_token_ids(block_names: Int64Array, block_size: int) -> Int32Array:
    """Return `block_size` tokens for each named block, joined.

    The name's 62 mixed bits enter the even and the odd positions, so that two blocks of a trace
    never have the same tokens. Blocks of one token have only half of the bits.
    """
    mixed = mix((block_names.astype(np.uint64) + np.uint64(1)) * _STEP)
    even = (mixed & _LARGEST_TOKEN_ID).astype(np.int32)
    odd = (mixed >> np.uint64(33)).astype(np.int32)
    tokens = np.empty((len(block_names), block_size), np.int32)
    pattern = token_stream(token_seed("block", block_size), block_size)
    np.bitwise_xor(even[:, None], pattern[0::2], out=tokens[:, 0::2])
    np.bitwise_xor(odd[:, None], pattern[1::2], out=tokens[:, 1::2])
    return tokens.reshape(-1)

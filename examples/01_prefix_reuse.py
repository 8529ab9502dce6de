"""Prefix reuse in one process: no Ray, no tensors, only the tables of a KV cache.

A KV cache is cut into *blocks* of a few tokens each. A request holds a list of block ids, its
*block table*. A full block is identified by a hash of its tokens and of all tokens before it. A
second request that starts with the same tokens finds the first one's blocks and need not compute
them again.

`KVCacheManager` keeps these tables. This example plans a tiny cache of 15 blocks, then shows

    1. a first request, which finds nothing,
    2. a second one with the same beginning: the hit, and why it has exactly this length,
    3. what happens when there is no room,
    4. eviction: unused blocks stay cached until another request needs them,
    5. pins, which keep a prefix from being evicted.

    .venv/bin/python examples/01_prefix_reuse.py

Where the model would run, there is a comment: see 03_embed_in_your_engine.py for one that does.
"""

from __future__ import annotations

import sys

from kvcache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheManager,
    PlanOptions,
    Request,
    VirtualClock,
    get_kv_cache_config,
)

BLOCK_SIZE_TOKENS = 4
MAX_MODEL_LEN = 32
MEMORY_BYTES = 8 * 1024

SYSTEM_PROMPT = list(range(100, 116))
"""The start of every conversation here: 16 tokens, four full blocks."""


def main() -> None:
    config = plan_cache()
    clock = VirtualClock()  # pins expire by this clock; the default is the system's
    manager = KVCacheManager(config, MAX_MODEL_LEN, clock=clock)

    first_request_finds_nothing(manager)
    second_request_hits(manager)
    no_room(manager)
    pressure_evicts(manager)
    pins_survive_pressure(manager, clock)

    manager.check()  # raises if any reference or block is not accounted for
    promise(manager.usage == 0.0, "every block came back")
    print("\nAll as promised.")


def plan_cache() -> KVCacheConfig:
    """Return the plan for a model of two layers in `MEMORY_BYTES`."""
    layer = FullAttentionSpec(block_size=BLOCK_SIZE_TOKENS, num_kv_heads=2, head_size=8)
    specs = {"layers.0": layer, "layers.1": layer}
    config = get_kv_cache_config(PlanOptions(max_model_len=MAX_MODEL_LEN), specs, MEMORY_BYTES)

    print("The plan")
    print(f"  a block: {BLOCK_SIZE_TOKENS} tokens in {len(specs)} layers = ", end="")
    print(f"{config.block_size_bytes} bytes")
    print(f"  {MEMORY_BYTES} bytes = {config.num_blocks} blocks; block 0 is never given out")
    promise(config.num_blocks == 16, "8 KiB are 16 blocks of 512 bytes")
    return config


def first_request_finds_nothing(manager: KVCacheManager) -> None:
    print("\n1. The first request")
    request = Request("first", [*SYSTEM_PROMPT, 1, 2, 3, 4, 5, 6])
    num_hit = start(manager, request)
    promise(num_hit == 0, "an empty cache has nothing to offer")

    # Decoding: the sampled token joins the request, and the next forward computes it.
    for token in (7, 8, 9):
        request.append_output_token_ids([token])
        blocks = manager.allocate_slots(request, num_new_tokens=1)
        promise(blocks is not None, "there is room for one more token")
        request.num_computed_tokens += 1
    print(f"  after 3 decoded tokens its table is {manager.get_block_ids('first')[0]}")

    manager.free(request)
    print("  finished: no block is in use, but what they hold can still be found")
    promise(manager.usage == 0.0, "a finished request holds nothing")
    promise(manager.statistics().core.num_cached_blocks == 6, "25 tokens filled 6 blocks")


def second_request_hits(manager: KVCacheManager) -> None:
    print("\n2. A second request with the same beginning")
    second = Request("second", [*SYSTEM_PROMPT, 1, 2, 50, 51, 52])
    num_hit = start(manager, second)
    promise(num_hit == 16, "the system prompt is found")
    print("  the next two tokens are equal too, but only whole blocks are shared")

    print("  While it runs, a third one, whose every token is cached:")
    third = Request("third", [*SYSTEM_PROMPT, 1, 2, 3, 4])
    num_hit = start(manager, third)
    promise(num_hit == 16, "the last token is always computed")
    print(
        "  the last token is always computed, to sample the next one from it, so its block is too"
    )

    tables = [manager.get_block_ids(name)[0] for name in ("second", "third")]
    promise(tables[0][:4] == tables[1][:4], "both tables start with the same blocks")
    print(f"  both hold the blocks {tables[0][:4]} at once: they are in memory only once")
    manager.free(second)
    manager.free(third)


def no_room(manager: KVCacheManager) -> None:
    print("\n3. No room")
    large = Request("large", list(range(200, 232)))
    start(manager, large)
    other = Request("other", list(range(300, 332)))
    blocks = manager.allocate_slots(other, num_new_tokens=other.num_tokens)
    promise(blocks is None, "8 of 15 blocks are in use, so 8 more cannot be had")
    print("  another request of 32 tokens gets None, and nothing was changed:")
    print("  the engine lets it wait, or frees a running request first (preemption)")
    manager.free(large)


def pressure_evicts(manager: KVCacheManager) -> None:
    print("\n4. Eviction")
    promise(hit_tokens(manager) == 16, "the place of the system prompt was not needed yet")
    num_before = manager.statistics().core.num_evictions
    fill(manager, first_token=1000)
    num_evicted = manager.statistics().core.num_evictions - num_before
    print(f"  two large requests came and went; {num_evicted} blocks lost their content to them")
    promise(hit_tokens(manager) == 0, "the system prompt was evicted")
    print("  the system prompt was not used for longest: it is gone")


def pins_survive_pressure(manager: KVCacheManager, clock: VirtualClock) -> None:
    print("\n5. Pins")
    request = Request("again", [*SYSTEM_PROMPT, 1])
    start(manager, request)
    manager.free(request)
    pin = manager.pin_prefix(SYSTEM_PROMPT, ttl_s=60.0)
    print(f"  {pin.num_tokens} tokens in {pin.num_blocks} blocks are pinned for 60 s")
    fill(manager, first_token=2000)
    promise(hit_tokens(manager) == 16, "pinned blocks survive")
    print("  the same pressure as before: the system prompt is still there")

    clock.advance(61.0)
    fill(manager, first_token=3000)
    promise(hit_tokens(manager) == 0, "a pin ends with its time limit")
    promise(not manager.unpin_prefix(pin), "there is nothing left to unpin")
    print("  after its 60 s the pin has ended, and the next pressure evicted the prompt")


def start(manager: KVCacheManager, request: Request) -> int:
    """Admit a request and compute its prompt; return how many tokens were found in the cache."""
    hit_blocks, num_hit = manager.get_computed_blocks(request)
    num_new = request.num_tokens - num_hit
    blocks = manager.allocate_slots(request, num_new, num_hit, hit_blocks)
    if blocks is None:
        sys.exit(f"not as promised: no room for {request.request_id}")
    # Here the model computes positions [num_hit, num_tokens) and writes their keys and values
    # into the blocks of the table.
    request.num_computed_tokens = request.num_tokens
    table = manager.get_block_ids(request.request_id)[0]
    print(
        f"  {request.request_id}: {num_hit} of {request.num_tokens} tokens found, {num_new} ",
        end="",
    )
    print(f"computed; block table {table}")
    return num_hit


def fill(manager: KVCacheManager, first_token: int) -> None:
    """Bring two requests, one after the other, that share nothing and need 8 and 7 blocks."""
    for num_tokens in (32, 28):
        tokens = list(range(first_token, first_token + num_tokens))
        first_token += num_tokens
        request = Request(f"filler-{tokens[0]}", tokens)
        start(manager, request)
        manager.free(request)


def hit_tokens(manager: KVCacheManager) -> int:
    """Return how many tokens of the system prompt a request would hit now. Changes nothing."""
    _, num_hit = manager.get_computed_blocks(Request("probe", [*SYSTEM_PROMPT, 0]))
    return num_hit


def promise(holds: bool, what: str) -> None:
    """End the example with exit status 1 unless the promise `what` holds."""
    if not holds:
        sys.exit(f"not as promised: {what}")


if __name__ == "__main__":
    main()

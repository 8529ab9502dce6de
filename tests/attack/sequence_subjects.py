"""Part of the table: sequence allocators, their blocks and trackers, and hashing."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache import (
    ComputedBlocksTracker,
    LastAccessBlocksTracker,
    LoRARequest,
    PrefixCachingBlock,
    PrefixCachingBlockAllocator,
    Request,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    get_hash_fn,
    get_hash_value,
    get_request_block_hasher,
    hash_block_tokens,
    init_none_hash,
    make_block_hash_with_group_id,
    need_extra_keys,
)
from tests.attack.argument_kinds import (
    BOOL,
    BYTES,
    COUNT,
    HASHABLE,
    ID,
    IDS,
    NAME,
    NO_LIST,
    NUMBER,
    OPTIONAL_THING,
    POSITIVE,
    THING,
    TOKENS,
    Kind,
    instance_of,
    list_of,
)
from tests.attack.type_table import Arguments, Builder, Subject, function_case

# --- hashing -------------------------------------------------------------------------------------


def hashing_subject() -> Subject:
    hash_fn = get_hash_fn("sha256")
    none_hash = init_none_hash(hash_fn)

    def request(world: object) -> Arguments:
        return {"request": Request("r", list(range(9)), lora=LoRARequest("a", "b"))}

    key = make_block_hash_with_group_id(none_hash, 1)
    cases = (
        function_case(get_hash_fn, {"name": "sha256"}, name=NAME),
        function_case(init_none_hash, {"hash_fn": hash_fn, "seed": "seed"}),
        function_case(
            get_request_block_hasher, {"block_size": 4, "hash_fn": hash_fn, "seed": "seed"}
        ),
        function_case(
            hash_block_tokens,
            {
                "hash_fn": hash_fn,
                "parent": none_hash,
                "tokens": [1, 2],
                "extra_keys": (("lora", "a", "b"),),
            },
            parent=BYTES,
            tokens=TOKENS.also([]),
            extra_keys=list_of("keys", [("lora",)], [("lora", 1.5)], [(1, 2)]).without(None),
        ),
        function_case(need_extra_keys, request),
        function_case(
            generate_block_hash_extra_keys,
            lambda world: {
                **request(world),
                "start_token": 0,
                "end_token": 4,
                "start_mm_idx": 0,
            },
            start_token=COUNT,
            end_token=COUNT,
            start_mm_idx=COUNT,
        ),
        function_case(
            make_block_hash_with_group_id,
            {"block_hash": none_hash, "group_id": 1},
            group_id=COUNT.also(2**32),
        ),
        function_case(get_block_hash, {"key": key}, key=BYTES.also(b"1234")),
        function_case(get_hash_value, {"key": key}, key=BYTES.also(b"1234")),
        function_case(get_group_id, {"key": key}, key=BYTES.also(b"1234")),
    )
    return Subject("hashing", cases=cases)


# --- sequences -----------------------------------------------------------------------------------


@dataclass
class SequenceWorld:
    """An allocator with a chain of two full blocks and one that is not full, and trackers."""

    allocator: PrefixCachingBlockAllocator
    chain: list[PrefixCachingBlock]
    accesses: LastAccessBlocksTracker
    computed: ComputedBlocksTracker

    @property
    def last(self) -> PrefixCachingBlock:
        return self.chain[-1]


def make_sequences() -> SequenceWorld:
    allocator = PrefixCachingBlockAllocator(8, 4)
    chain = allocator.allocate_immutable_blocks(None, [[1, 2, 3, 4], [5, 6, 7, 8]])
    last = allocator.allocate_mutable_block(chain[-1])
    last.append_token_ids([9, 10])
    accesses = LastAccessBlocksTracker(allocator)
    accesses.add_seq("s")
    accesses.update_last_access("s", 1.0)
    return SequenceWorld(
        allocator, [*chain, last], accesses, ComputedBlocksTracker(allocator, 4, True)
    )


def state_of_sequences(world: SequenceWorld) -> object:
    allocator = world.allocator
    held = allocator._held
    return (
        allocator.statistics(),
        [(b.block_id, b.token_ids, b.content_hash, b.extra_hash) for b in world.chain],
        [allocator.get_num_references(i) for i in range(8)],
        [(t.active, t.last_accessed, t.computed) for t in held._trackers],
        sorted(held._uncomputed),
        held.pool.get_all_free_blocks(),
        dict(world.accesses._last_access),
        {
            key: (known.digests, known.num_cached_tokens)
            for key, known in world.computed._known.items()
        },
    )


BLOCK = instance_of(PrefixCachingBlock)
BLOCKS = list_of("blocks", [PrefixCachingBlock])


def sequence_subject() -> Subject:
    of = Builder(
        PrefixCachingBlockAllocator,
        lambda world: world.allocator,
        {"block_id": ID, "block": BLOCK, "blocks": BLOCKS},
    )
    of.made(
        {
            "num_blocks": 4,
            "block_size": 4,
            "block_ids": [3, 2, 1, 0],
            "eviction_policy": "lru",
            "caching_hash_algo": "sha256",
            "hash_seed": "seed",
            "merge_duplicates": True,
            "block_bytes": 4,
        },
        num_blocks=POSITIVE,
        block_ids=Kind("ids", IDS.wrong, IDS.forms).without(None, [10**9]),
    )
    previous = BLOCK.without(None)
    of.method(
        "allocate_mutable_block",
        lambda world: {"prev_block": world.chain[1], "extra_hash": 5},
        prev_block=previous,
    )
    of.method(
        "allocate_immutable_block",
        lambda world: {"prev_block": world.chain[1], "token_ids": [1, 2, 3, 4], "extra_hash": 5},
        prev_block=previous,
        token_ids=TOKENS.also([]),
    )
    of.method(
        "allocate_immutable_blocks",
        lambda world: {
            "prev_block": world.chain[1],
            "block_token_ids": [[1, 2, 3, 4]],
            "extra_hash": 5,
        },
        prev_block=previous,
        block_token_ids=list_of("tokens", [["1"] * 4], [[1.5] * 4], [[True] * 4], ["1234"]),
    )
    of.method("promote_to_immutable_block", lambda world: {"block": world.chain[0]})
    of.method("fork", lambda world: {"last_block": world.last}, last_block=BLOCK)
    of.method("free", lambda world: {"block": world.last})
    of.method("cow_block_if_not_appendable", lambda world: {"block": world.last})
    of.method("swap_out", lambda world: {"blocks": world.chain}, ("blocks",))
    of.method("swap_in", {"blocks": []})
    of.method("get_physical_block_id", {"absolute_id": 3}, absolute_id=ID)
    of.method("get_num_references", {"block_id": 1})
    of.method("is_block_cached", lambda world: {"block": world.last})
    of.method(
        "find_cached_blocks_prefix", lambda world: {"block_hashes": [world.chain[0].content_hash]}
    )
    of.method(
        "get_common_computed_block_ids",
        {"computed_seq_block_ids": [[0, 1], [0]]},
        computed_seq_block_ids=Kind(
            "ids of sequences", (*NO_LIST, [1], ["1"], [[1.5]], [[0], [None]], [[True]], [[10**9]])
        ),
    )
    of.method("mark_blocks_as_accessed", {"block_ids": [0, 1], "now": 2.0}, now=NUMBER)
    of.method("mark_blocks_as_computed", {"block_ids": [0, 1]})
    of.method("block_is_computed", {"block_id": 1})
    of.method("get_num_full_blocks_touched", lambda world: {"blocks": world.chain})

    block = Builder(PrefixCachingBlock, lambda world: world.last)
    block.made(
        lambda world: {
            "prev_block": world.chain[1],
            "token_ids": [1, 2],
            "block_size": 4,
            "allocator": world.allocator,
            "extra_hash": 5,
            "hasher": world.allocator.hasher,
        },
        prev_block=previous,
        allocator=THING,
        hasher=OPTIONAL_THING,
    )
    block.method("append_token_ids", {"token_ids": [1]})
    block.method(
        "hash_block_tokens",
        lambda world: {
            "is_first_block": False,
            "prev_block_hash": world.chain[0].content_hash,
            "cur_block_token_ids": [1, 2],
            "extra_hash": 5,
            "hasher": world.allocator.hasher,
        },
        is_first_block=BOOL,
        prev_block_hash=BYTES,
        cur_block_token_ids=TOKENS.also([]),
        hasher=OPTIONAL_THING,
    )
    access = Builder(LastAccessBlocksTracker, lambda world: world.accesses, {"seq_id": HASHABLE})
    access.made(
        lambda world: {"allocator": world.allocator},
        allocator=instance_of(PrefixCachingBlockAllocator),
    )
    access.method("add_seq", {"seq_id": "t"})
    access.method("remove_seq", {"seq_id": "s"})
    access.method("update_last_access", {"seq_id": "s", "time": 2.0}, time=NUMBER)
    access.method("update_seq_blocks_last_access", {"seq_id": "s", "block_ids": [0, 1]})
    computed = Builder(ComputedBlocksTracker, lambda world: world.computed)
    computed.made(
        lambda world: {"allocator": world.allocator, "block_size": 4, "enable_caching": True},
        allocator=instance_of(PrefixCachingBlockAllocator),
    )
    computed.method(
        "get_num_cached_tokens",
        {"seq": Request("r", [1, 2, 3, 4, 5])},
        seq=THING,
    )
    computed.method("remove_seq", {"seq_id": "s"}, seq_id=HASHABLE)
    return Subject(
        "sequences",
        make_sequences,
        state_of_sequences,
        lambda world: world.allocator.check(),
        (*of.cases, *block.cases, *access.cases, *computed.cases),
    )


SEQUENCE_SUBJECTS = (hashing_subject(), sequence_subject())

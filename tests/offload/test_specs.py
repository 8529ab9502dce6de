"""Both ends of a copy."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.base.errors import InvalidInputError
from kvcache.offload import (
    FileLoadStoreSpec,
    GPULoadStoreSpec,
    HostLoadStoreSpec,
    OffloadKey,
    ReqContext,
    make_offload_key,
)


def test_without_sizes_all_blocks_are_of_one_group() -> None:
    spec = GPULoadStoreSpec([4, 2, 9])
    assert spec.medium() == "device"
    assert len(spec) == 3
    assert spec.group_sizes.tolist() == [3]
    assert spec.block_indices.tolist() == [0]


def test_sizes_that_do_not_sum_to_the_ids_are_refused() -> None:
    with pytest.raises(InvalidInputError) as caught:
        GPULoadStoreSpec([1, 2, 3], group_sizes=[1, 1])
    assert str(caught.value) == (
        "group sizes [1, 1] sum to 2, but there are 3 block ids: say of every id which group it "
        "is of"
    )


@pytest.mark.parametrize("indices", [[], [0], [0, 0, 0]])
def test_each_group_needs_its_block_index(indices: list[int]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        GPULoadStoreSpec([1, 2], group_sizes=[1, 1], block_indices=indices)
    assert str(caught.value) == (
        f"{len(indices)} block indices for 2 groups: pass the index of each group's first block"
    )


@pytest.mark.parametrize("ids", [[1.5], [[1, 2]], ["a"], [True], [[1], [2, 3]]])
def test_ids_that_are_no_flat_integers_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidInputError, match=r"pass .*integer"):
        HostLoadStoreSpec(ids)


@pytest.mark.parametrize(("ids", "wrong"), [([3, -1], -1), ([2**31], 2**31)])
def test_ids_out_of_range_are_refused(ids: list[int], wrong: int) -> None:
    with pytest.raises(InvalidInputError) as caught:
        HostLoadStoreSpec(ids)
    place = ids.index(wrong)
    limits = "pass integers from 0 to 2147483647"
    assert str(caught.value) == f"block_ids[{place}] is {wrong}: {limits}"
    with pytest.raises(InvalidInputError, match=rf"group_sizes\[{place}\] is {wrong}"):
        GPULoadStoreSpec([0], group_sizes=ids)


def test_a_spec_keeps_its_own_copy() -> None:
    ids = np.array([1, 2])
    spec = HostLoadStoreSpec(ids)
    ids[0] = 7
    assert spec.block_ids.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        spec.block_ids[0] = 7
    assert repr(spec) == "HostLoadStoreSpec([1, 2])"


def test_files_are_named_by_keys_of_one_length() -> None:
    keys = [make_offload_key(bytes([i]) * 16, 0) for i in range(2)]
    spec = FileLoadStoreSpec(keys)
    assert (spec.medium(), len(spec), spec.keys) == ("file", 2, tuple(keys))
    with pytest.raises(InvalidInputError, match="offload keys of 20, 36 bytes: pass keys of one"):
        FileLoadStoreSpec([keys[0], make_offload_key(bytes(32), 0)])
    with pytest.raises(InvalidInputError, match="offload keys of 4 bytes"):
        FileLoadStoreSpec([OffloadKey(bytes(4))])


def test_a_context_names_its_request() -> None:
    assert ReqContext("r").params == {}
    with pytest.raises(InvalidInputError, match="req_id is '': pass a non-empty str"):
        ReqContext("")

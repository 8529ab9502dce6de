"""An external tier: a spec with its manager and its handlers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from kvcache.base.errors import ConfigurationError
from kvcache.offload import (
    ByteRows,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    HandlerRoute,
    HostLoadStoreSpec,
    OffloadAnswer,
    OffloadingHandler,
    OffloadingManager,
    OffloadingSpec,
    ReqContext,
    TierManager,
    TierOptions,
    TransferResult,
    TransferSpec,
    make_offload_key,
)


@dataclass(frozen=True, eq=False)
class Pages:
    """The necessary part of a tensor."""

    array: npt.NDArray[np.int8]

    @property
    def shape(self) -> Sequence[int]:
        return self.array.shape

    def element_size(self) -> int:
        return self.array.itemsize


class ArrayHandler(OffloadingHandler):
    """Copies at once, between a device array and a list of slots."""

    def __init__(self, device: npt.NDArray[np.int8], slots: dict[int, bytes]) -> None:
        self.device, self.slots = device, slots
        self.ended: list[TransferResult] = []

    def transfer_async(self, job_id: int, spec: TransferSpec) -> bool:
        source, destination = spec.source, spec.destination
        assert isinstance(source, GPULoadStoreSpec | HostLoadStoreSpec)
        assert isinstance(destination, GPULoadStoreSpec | HostLoadStoreSpec)
        pairs = zip(source.block_ids.tolist(), destination.block_ids.tolist(), strict=True)
        for come_from, go_to in pairs:
            if isinstance(source, GPULoadStoreSpec):
                self.slots[go_to] = self.device[come_from].tobytes()
            else:
                self.device[go_to] = np.frombuffer(self.slots[come_from], np.int8)
        self.ended.append(TransferResult(job_id, success=True, num_bytes=self.device[0].nbytes))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self.ended = self.ended, []
        return ended

    def wait(self, job_ids: Sequence[int]) -> None:
        assert {result.job_id for result in self.ended} >= set(job_ids)


class ArraySpec(OffloadingSpec):
    """Slots in a dict."""

    def __init__(self, device: npt.NDArray[np.int8]) -> None:
        self.device = device

    def get_manager(self) -> OffloadingManager:
        return TierManager(TierOptions("host", 2))

    def get_handlers(self, kv_caches: CanonicalKVCaches[ByteRows]) -> Iterator[HandlerRoute]:
        assert kv_caches.num_blocks == len(self.device)
        handler = ArrayHandler(self.device, {})
        yield HandlerRoute(GPULoadStoreSpec, HostLoadStoreSpec, handler)
        yield HandlerRoute(HostLoadStoreSpec, GPULoadStoreSpec, handler)


def make_caches(array: npt.NDArray[np.int8]) -> CanonicalKVCaches[Pages]:
    tensor = CanonicalKVCacheTensor(Pages(array))
    return CanonicalKVCaches((tensor,), ((CanonicalKVCacheRef(0, array.shape[1]),),))


def test_a_block_goes_to_a_tier_and_comes_back() -> None:
    device = np.arange(4 * 8, dtype=np.int8).reshape(4, 8)
    expected = device[1].copy()
    spec = ArraySpec(device)
    manager = spec.get_manager()
    routes = {
        (r.source_type, r.destination_type): r for r in spec.get_handlers(make_caches(device))
    }
    context, key = ReqContext("r1"), make_offload_key(b"digest", 0)
    manager.on_new_request(context)
    assert manager.lookup(key, context) is OffloadAnswer.MISS

    prepared = manager.prepare_store([key], context)
    assert prepared is not None
    down = routes[GPULoadStoreSpec, HostLoadStoreSpec].handler
    assert down.transfer_async(1, TransferSpec(GPULoadStoreSpec([1]), prepared.store_spec))
    down.wait([1])
    assert [result.job_id for result in down.get_finished()] == [1]
    manager.complete_store(prepared.keys_to_store)

    device[:] = 0
    up = routes[HostLoadStoreSpec, GPULoadStoreSpec].handler
    assert up.transfer_async(2, TransferSpec(manager.prepare_load([key]), GPULoadStoreSpec([3])))
    manager.complete_load([key])
    assert device[3].tolist() == expected.tolist()
    manager.on_request_finished(context)
    manager.on_schedule_end()
    manager.reset_cache()
    assert manager.lookup(key) is OffloadAnswer.MISS
    manager.shutdown()


@pytest.mark.parametrize(
    "array",
    [np.zeros(4, np.int8), np.zeros((4, 8), np.int16), np.zeros((4, 0), np.int8)],
)
def test_a_tensor_that_is_not_rows_of_bytes_is_refused(array: npt.NDArray[np.int8]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"pass a view of shape \(num_blocks, page_bytes\)"
    ):
        CanonicalKVCacheTensor(Pages(array))


def test_references_to_missing_tensors_are_refused() -> None:
    tensor = CanonicalKVCacheTensor(Pages(np.zeros((4, 8), np.int8)))
    other = CanonicalKVCacheTensor(Pages(np.zeros((5, 8), np.int8)))
    with pytest.raises(ConfigurationError) as caught:
        CanonicalKVCaches((tensor,), ((CanonicalKVCacheRef(1, 8),),))
    assert str(caught.value) == "group 0 refers to tensor 1, there are 1"
    with pytest.raises(ConfigurationError) as caught:
        CanonicalKVCaches((tensor,), ((), (CanonicalKVCacheRef(0, 9),)))
    assert str(caught.value) == ("group 1 has pages of 9 bytes in tensor 0, whose pages have 8")
    with pytest.raises(ConfigurationError, match="canonical tensors of 4, 5 blocks"):
        CanonicalKVCaches((tensor, other), ())
    with pytest.raises(ConfigurationError, match="tensor_idx is -1: pass an integer of at least 0"):
        CanonicalKVCacheRef(-1, 0)

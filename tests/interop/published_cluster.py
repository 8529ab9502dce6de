"""A publishing cluster under load, and our own state of it, with which routers are compared.

Coordinator, ranks and client are in this thread; the publisher is a process with real sockets. A
list of prompts says what can be queried: all played prompts, with all names that they might be
confused with. Makes no comparisons itself.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from actors import KVCacheClient
from actors.local import LocalCluster
from kvcache import NewRequest, StepRequest
from kvcache.config import parse_config
from kvcache.events.mirror import CacheMirror
from kvcache.events.prefix_index import PrefixIndex
from kvcache.events.subscriber import KVEventSubscriber
from kvcache.events.subscription import Update
from kvcache.events.wire_events import StoredEvent

BLOCK: Final = 16
MEDIA: Final = ("GPU", "CPU", "STORAGE")
BLOCK_BYTES: Final = 2 * BLOCK * 2 * 8 * 2
"""Keys and values of `BLOCK` tokens, two heads of eight halves."""
MODEL: Final = "tiny"
ANY_PORT: Final = "tcp://127.0.0.1:0"
PATIENCE_S: Final = 120.0
SALTS: Final = (None, None, "pepper", "cumin")
ADAPTERS: Final = (None, None, "poet", "lawyer")
_HERE: Final = "here"


@dataclass(frozen=True, eq=False)
class Prompt:
    """A request's prompt: tokens, shape `(n,)`, and the names that distinguish it."""

    token_ids: NDArray[np.int32] = field(repr=False)
    lora_name: str | None = None
    cache_salt: str | None = None

    def others(self) -> Iterable[Prompt]:
        """Return this prompt, and those that must not be confused with it."""
        for lora in dict.fromkeys(ADAPTERS):
            for salt in dict.fromkeys(SALTS):
                yield Prompt(self.token_ids, lora, salt)
        yield Prompt(self.token_ids[: len(self.token_ids) // 2], self.lora_name, self.cache_salt)
        yield Prompt(self.token_ids[BLOCK:], self.lora_name, self.cache_salt)


@dataclass(frozen=True)
class Answer:
    """Leading tokens of a prompt: on the device, there or in host memory, anywhere."""

    device: int
    host: int
    storage: int


def free_endpoint() -> str:
    """Return a free address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


def fixed_places() -> dict[str, str]:
    """Return addresses for a publisher that is found again after a restart."""
    return {"endpoint": free_endpoint(), "replay_endpoint": free_endpoint()}


class PublishedCluster:
    """The cluster, its one client, and a kvcache subscriber."""

    def __init__(
        self,
        seed: int,
        *,
        num_blocks: int = 64,
        num_host_blocks: int = 0,
        directory: str | None = None,
        num_disk_blocks: int = 400,
        hash_algorithm: str = "sha256",
        block_size: int = BLOCK,
        salts: Sequence[str | None] = SALTS,
        **events: Any,
    ) -> None:
        """Start. Sizes are in blocks of one rank; `directory` is for files, None for none.

        Prompts have random `salts` of these; other arguments go into the section `events`.
        """
        self.salts = salts
        self.choice = random.Random(seed)
        published = {
            "enabled": True,
            "endpoint": ANY_PORT,
            "replay_endpoint": ANY_PORT,
            "heartbeat_s": 0.1,
            **events,
        }
        block = BLOCK_BYTES * block_size // BLOCK
        plain: dict[str, Any] = {
            "name": f"interop-{seed}",
            "model": {
                "name": MODEL,
                "max_model_len": 50 * block_size,
                "layers": [{"kind": "full", "num_kv_heads": 2, "head_size": 8}],
            },
            "cache": {
                "memory_per_rank": (num_blocks + 1) * block,
                "block_size": block_size,
                "hash_algorithm": hash_algorithm,
            },
            "events": published,
            "deadlines": {"startup_s": 4 * PATIENCE_S, "step_s": PATIENCE_S},
        }
        if num_host_blocks:
            plain["offload"] = {"host_memory_per_rank": num_host_blocks * block}
        if directory is not None:
            disk = {"directory": directory, "capacity_per_rank": num_disk_blocks * block}
            plain["offload"]["disk"] = disk
        self.block_size = block_size
        self.cluster = LocalCluster(parse_config(plain, "interop"))
        there = self.statistics()
        self.endpoint: str = there["endpoint"]
        self.replay_endpoint: str = there["replay_endpoint"]
        self.client: KVCacheClient = self.cluster.client()
        self.index = PrefixIndex()
        self.mirror = CacheMirror()
        self.published: list[Prompt] = []
        self._num_played = 0
        self._names: dict[tuple[int | None, bytes, str | None, str | None], int] = {}
        self._checksums: dict[int, int] = {}
        self._beats_s: list[float] = []
        self.subscriber = KVEventSubscriber(
            self.endpoint, self.replay_endpoint, on_update=self._on_update
        )

    def __enter__(self) -> PublishedCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.subscriber.close()
        self.client.close()
        self.cluster.close()

    def statistics(self) -> dict[str, Any]:
        """Return the publisher's last statistics."""
        found = self.cluster.coordinator.statistics().events
        assert found is not None
        return found

    def first_number(self) -> bytes:
        """Return the number of the first batch, as a request names it."""
        there = self.statistics()
        return (there["last_seq"] - there["num_batches"] + 1).to_bytes(8, "big")

    def play(self, *prompts: Prompt) -> None:
        """Admit requests, compute them in one step, and end them; all their blocks are sealed."""
        names = [f"r{self._num_played + i}" for i in range(len(prompts))]
        self._num_played += len(prompts)
        self.published += prompts
        waiting = dict(zip(names, prompts, strict=True))
        completed = -1
        give_up_s = time.monotonic() + PATIENCE_S
        while waiting:
            new = tuple(_new_request(name, prompt) for name, prompt in waiting.items())
            step = self.client.submit(StepRequest(new=new, completed_step=completed))
            result = self.client.wait_result(step)
            self.client.wait_finished(step)
            completed = step
            slots = result.admitted_slots.tolist()
            running = [n for n, slot in zip(list(waiting), slots, strict=True) if slot >= 0]
            for name in running:
                del waiting[name]
            ended = StepRequest(finished=tuple(running), completed_step=completed)
            completed = self.client.submit(ended)
            self.client.wait_finished(completed)
            assert time.monotonic() < give_up_s, f"{list(waiting)} are not admitted"
        self.client.wait_finished(self.client.submit(StepRequest(completed_step=completed)))

    def load(self, num_steps: int) -> None:
        """Play random prompts: old ones, extensions of old ones, and new ones."""
        for _ in range(num_steps):
            count = self.choice.choice((1, 1, 2, 3))
            self.play(*(self.random_prompt() for _ in range(count)))

    def random_prompt(self) -> Prompt:
        """Return a prompt that may share a prefix with earlier ones."""
        choice = self.choice
        if self.published and choice.random() < 0.6:
            old = choice.choice(self.published[-20:])
            kept = old.token_ids[: choice.randint(1, len(old.token_ids))]
            tail = self._random_tokens(choice.randint(1, 6 * self.block_size))
            tokens = np.concatenate([kept, tail])[: 20 * self.block_size]
            if choice.random() < 0.8:
                return Prompt(tokens, old.lora_name, old.cache_salt)
        else:
            tokens = self._random_tokens(choice.randint(1, 12 * self.block_size))
        return Prompt(tokens, choice.choice(ADAPTERS), choice.choice(self.salts))

    def settle(self) -> None:
        """Wait until nothing is in transit, and our own index matches the publisher.

        A heartbeat of the publisher shows that it has read everything from before the last one.
        """
        self.wait_until(self._is_idle, "no job is open")
        self.pump()
        idle_s, self._beats_s = time.time(), []
        self.wait_until(
            lambda: len([s for s in self._beats_s if s > idle_s]) >= 2 and self.subscriber.is_exact,
            "we know all that was published",
        )
        known = self.subscriber.last_seq
        self.wait_until(lambda: self._is_compared(known), "the publisher tells its checksum")
        self.wait_until(self._is_all_published, "published and cached blocks are the same")

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Give all parts turns until `holds`."""
        give_up_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < give_up_s, f"not so in time: {what}; {self.statistics()}"
            self.pump()

    def pump(self) -> None:
        """Give all parts a turn."""
        self.cluster.pump()
        self.subscriber.poll(0.01)

    def expected(self, prompt: Prompt) -> Answer:
        """Return our own index's answer for a prompt."""
        found = self.index.match(
            prompt.token_ids, lora_name=prompt.lora_name, cache_salt=prompt.cache_salt
        )
        counts = [(m.device_blocks, m.host_blocks, m.storage_blocks) for m in found] or [(0, 0, 0)]
        return Answer(*(self.block_size * count for count in counts[0]))

    def in_order(self, prompt: Prompt) -> Answer:
        """Return the hit of a search on the device, then in host memory, then in files.

        It never goes back: it finds no blocks in host memory after one that is only in a file.
        Dynamo searches like this. It finds as much as our own index if blocks are in that order,
        and never more.
        """
        size, parent = self.block_size, None
        found = [0, 0, 0]
        place = 0
        for start in range(0, len(prompt.token_ids) - size + 1, size):
            tokens = prompt.token_ids[start : start + size].tobytes()
            parent = self._names.get((parent, tokens, prompt.lora_name, prompt.cache_salt))
            if parent is None:
                break
            while place < len(MEDIA) and not self.mirror.contains(parent, MEDIA[place]):
                place += 1
            for medium in range(place, len(MEDIA)):
                found[medium] += size
        answer, ours = Answer(*found), self.expected(prompt)
        assert (answer.device, answer.host) == (ours.device, ours.host)
        assert answer.storage <= ours.storage
        return answer

    def questions(self) -> list[Prompt]:
        """Return prompts to query: the last ones played, and those not to be confused with them."""
        asked = [*self.published[-25:], *self.published[:5]]
        return [other for prompt in asked for other in prompt.others()]

    def hashes(self) -> dict[str, set[int]]:
        """Return our own hashes of all blocks of each medium that has any."""
        found: dict[str, set[int]] = {}
        for event in self.mirror.state():
            if isinstance(event, StoredEvent):
                found.setdefault(event.medium, set()).update(event.block_hashes.tolist())
        return found

    def num_cached(self) -> dict[str, int]:
        """Return the number of blocks in each medium by the coordinator's own state."""
        manager = self.cluster.coordinator.manager
        counts = {"GPU": manager.statistics().core.num_sealed_blocks}
        offload = self.cluster.coordinator.statistics().offload
        if offload is not None:
            counts["CPU"] = offload.tiers.host.num_ready
            if offload.tiers.disk is not None:
                counts["STORAGE"] = offload.tiers.disk.num_ready
        return {medium: count for medium, count in counts.items() if count}

    def _random_tokens(self, count: int) -> NDArray[np.int32]:
        return np.array([self.choice.randrange(100_000) for _ in range(count)], np.int32)

    def _on_update(self, update: Update) -> None:
        self.index.follow(_HERE, update)
        self.mirror.apply(update.batch.events)
        for event in update.batch.events:
            if isinstance(event, StoredEvent):
                self._note(event)
        self._checksums[update.seq] = self.mirror.checksum
        if not update.batch.events:
            self._beats_s.append(update.batch.time_s)

    def _note(self, event: StoredEvent) -> None:
        """Remember the contents of hashes permanently: a hash always has the same content."""
        parent, size = event.parent_block_hash, event.block_size
        for i, value in enumerate(event.block_hashes.tolist()):
            tokens = event.token_ids[i * size : (i + 1) * size].tobytes()
            self._names[parent, tokens, event.lora_name, event.cache_salt] = value
            parent = value

    def _is_idle(self) -> bool:
        statistics = self.cluster.coordinator.statistics()
        tiers = {} if statistics.offload is None else statistics.offload.tiers.open_jobs
        return not statistics.num_open_jobs and not any(tiers.values())

    def _is_all_published(self) -> bool:
        found = {medium: len(hashes) for medium, hashes in self.hashes().items()}
        for medium, count in self.statistics()["num_orphans"].items():
            found[medium] = found.get(medium, 0) + count
        return found == self.num_cached()

    def _is_compared(self, known: int | None) -> bool:
        """Compare our state with that in the publisher's statistics; return False if they are from
        before number `known`."""
        there = self.statistics()
        seq = there.get("last_seq", -1)
        if seq not in self._checksums or known is None or seq < known:
            return False
        assert self._checksums[seq] == there["checksum"], f"another state at {seq}"
        return True


def _new_request(name: str, prompt: Prompt) -> NewRequest:
    return NewRequest(
        name,
        prompt.token_ids,
        max_new_tokens=len(prompt.token_ids),
        lora_name=prompt.lora_name,
        lora_path=None if prompt.lora_name is None else f"/adapters/{prompt.lora_name}",
        cache_salt=prompt.cache_salt,
    )

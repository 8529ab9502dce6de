"""Runs in the routers' environment: parts of Dynamo in this process, controlled over a pipe.

A line of JSON in, `[command, {arguments}]`, a line of JSON out. Knows only the address of the
project's publisher and the format of its events.

    SelectionService    subscribes by itself, as in Ray Serve's KV-aware router
    RadixTree           is fed from a SUB and a DEALER here, through vLLM's typed decoder
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from dynamo.llm import RadixTree, SelectionService, compute_block_hash_for_seq
from vllm_structs import BATCHES, MapBatch

WORKER = 1
END = b"\xff" * 8


class TypedFollower:
    """The device's blocks in a RadixTree: decoded with vLLM's types, hashed by Dynamo."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        context = zmq.asyncio.Context.instance()
        self.tree = RadixTree()
        self.last_seq = -1
        self.problem = ""
        self._decoder = msgspec.msgpack.Decoder(MapBatch)
        self._live = context.socket(zmq.SUB)
        self._live.connect(endpoint)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._replay = context.socket(zmq.DEALER)
        self._replay.connect(replay_endpoint)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while True:
                _, number, payload = await self._live.recv_multipart()
                seq = int.from_bytes(number, "big")
                if seq != self.last_seq + 1:
                    await self._catch_up()
                if seq > self.last_seq:
                    self._apply(seq, payload)
        except Exception as error:
            self.problem = repr(error)

    async def _catch_up(self) -> None:
        await self._replay.send_multipart([b"", (self.last_seq + 1).to_bytes(8, "big")])
        while True:
            _, _, number, payload = await self._replay.recv_multipart()
            if number == END:
                return
            self._apply(int.from_bytes(number, "big"), payload)

    def _apply(self, seq: int, payload: bytes) -> None:
        for event in self._decoder.decode(payload).events:
            kind = type(event).__struct_config__.tag
            if kind == "AllBlocksCleared":
                self._tell("cleared")
            elif event.medium == "GPU":
                self._tell(self._stored(event) if kind == "BlockStored" else self._removed(event))
        self.last_seq = seq

    def _tell(self, data: Any) -> None:
        event = {"event_id": 0, "data": data, "dp_rank": 0}
        self.tree.apply_event(WORKER, json.dumps(event).encode())

    def _stored(self, event: Any) -> dict[str, Any]:
        salts = [key for key in (event.extra_keys or [None])[0] or () if key != event.lora_name]
        # vLLM's types have no salt: only the first block of a prompt has it.
        salt = salts[0] if salts and event.parent_block_hash is None else None
        hashes = compute_block_hash_for_seq(
            event.token_ids, event.block_size, lora_name=event.lora_name, cache_namespace=salt
        )
        blocks = [
            {"block_hash": block, "tokens_hash": tokens, "mm_extra_info": None}
            for block, tokens in zip(event.block_hashes, hashes, strict=True)
        ]
        parent = event.parent_block_hash
        return {"stored": {"parent_hash": parent, "start_position": None, "blocks": blocks}}

    def _removed(self, event: Any) -> dict[str, Any]:
        return {"removed": {"block_hashes": event.block_hashes}}

    def num_blocks(self, token_ids: list[int], block_size: int, lora_name: str | None) -> int:
        """Return the leading blocks of a prompt without a salt."""
        if len(token_ids) < block_size:
            return 0
        hashes = compute_block_hash_for_seq(token_ids, block_size, lora_name=lora_name)
        return int(self.tree.find_matches(hashes).scores.get((WORKER, 0), 0))


class Host:
    """The commands."""

    def __init__(self) -> None:
        self.service = SelectionService(indexer_threads=2)
        self.follower: TypedFollower | None = None

    async def subscribe(self, worker: dict[str, Any]) -> Any:
        """Let the service subscribe."""
        return await self.service.upsert_worker(worker)

    async def forget(self, worker_id: int) -> Any:
        """Let the service forget a worker."""
        return await self.service.delete_worker(worker_id)

    async def overlap(self, requests: list[dict[str, Any]]) -> list[Any]:
        """Ask the service for the overlap of prompts."""
        return [await self.service.overlap_scores(request) for request in requests]

    async def select(self, request: dict[str, Any]) -> Any:
        """Ask the service which worker it would take."""
        return await self.service.select(request)

    async def follow(self, endpoint: str, replay_endpoint: str) -> None:
        """Start feeding a tree."""
        self.follower = TypedFollower(endpoint, replay_endpoint)

    async def leading(self, prompts: list[dict[str, Any]]) -> dict[str, Any]:
        """Ask the tree for leading blocks of prompts, and for its progress."""
        follower = self.follower
        assert follower is not None, "follow first"
        counts = [follower.num_blocks(**prompt) for prompt in prompts]
        return {"counts": counts, "last_seq": follower.last_seq, "problem": follower.problem}

    async def decode(self, encoding: str, payloads: list[str]) -> list[Any]:
        """Decode payloads, in hex, with vLLM's types; return them as plain values."""
        decoder = msgspec.msgpack.Decoder(BATCHES[encoding])
        return [msgspec.to_builtins(decoder.decode(bytes.fromhex(p))) for p in payloads]


async def main() -> None:
    """Answer until the pipe is closed."""
    host = Host()
    print(json.dumps("ready"), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        command, arguments = json.loads(line)
        try:
            answer = {"answer": await getattr(host, command)(**arguments)}
        except Exception as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)
    host.service.shutdown()


if __name__ == "__main__":
    asyncio.run(main())

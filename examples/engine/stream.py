"""An iterator over one request's outputs, for a loop or an asyncio task.

A reader that waits for the next output steps the engine. One that goes away aborts the request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from examples.engine.outputs import Output

if TYPE_CHECKING:
    from examples.engine.engine import Engine


class TokenStream:
    """Iterate it with `for` or `async for`, until every sample of the request has ended."""

    def __init__(self, engine: Engine, request_id: str, unread: deque[Output]) -> None:
        """Use `Engine.stream`."""
        self._engine = engine
        self._request_id = request_id
        self._unread = unread

    def __iter__(self) -> TokenStream:
        return self

    def __next__(self) -> Output:
        output = self._next()
        if output is None:
            raise StopIteration
        return output

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Output:
        try:
            output = await asyncio.to_thread(self._next)
        except asyncio.CancelledError:
            self.close()
            raise
        if output is None:
            raise StopAsyncIteration
        return output

    def close(self) -> None:
        """Stop reading; abort the request unless it has ended. Repeatable."""
        if self._engine.runs(self._request_id, self._unread):
            self._engine.abort(self._request_id)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if self._engine.runs(self._request_id, self._unread):
            self._engine.abandon(self._request_id)

    def _next(self) -> Output | None:
        """Step until there is an output; return None if the request has ended."""
        while not self._unread and self._engine.runs(self._request_id, self._unread):
            self._engine.step()
        return self._unread.popleft() if self._unread else None

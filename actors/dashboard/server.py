"""Serves the page on loopback, with the web library of Ray's own dashboard.

    GET /               the page         GET /state.json   the newest picture
    GET /dashboard.js   its code         GET /stream       a picture a second, as server-sent events

Reads only. Answers only requests that use this machine's own name, so that no foreign page can make
a browser ask for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from actors.dashboard.observer import Observer
from kvcache.base.errors import ClusterError
from kvcache.base.logs import get_logger

PAGE = Path(__file__).parent / "page"
MAX_STREAMS = 16
KEEP_ALIVE_S = 5.0

_FILES = {
    "/": ("index.html", "text/html"),
    "/dashboard.js": ("dashboard.js", "text/javascript"),
    "/dashboard.css": ("dashboard.css", "text/css"),
}
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
logger = get_logger(__name__)
logger.addFilter(lambda record: not (record.exc_info and _is_malformed(record.exc_info[1])))

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _is_malformed(error: BaseException | None) -> bool:
    """Whether the data is no valid request; it is answered with 400, without a traceback."""
    return isinstance(error, HttpProcessingError)


class DashboardServer:
    """The page of one observer. `serve` runs until it is cancelled.

    A stream whose reader accepts nothing for `stalled_s` is ended and its place freed.
    """

    stalled_s = 15.0

    def __init__(self, observer: Observer, host: str, port: int) -> None:
        """Set up without listening; port 0 lets the system choose."""
        self._observer = observer
        self._host, self._port = host, port
        self._num_streams = 0
        self._waiters = ThreadPoolExecutor(MAX_STREAMS, thread_name_prefix="dashboard-stream")

    async def serve(self, tell: Callable[[str], None]) -> None:
        """Serve until cancelled; `tell` gets the address once the server listens.

        Raises ClusterError if it cannot listen there.
        """
        app = web.Application(middlewares=[self._guard])
        for path in _FILES:
            app.router.add_get(path, self._file)
        app.router.add_get("/state.json", self._state)
        app.router.add_get("/stream", self._stream)
        runner = web.AppRunner(app, access_log=None, logger=logger, shutdown_timeout=1.0)
        await runner.setup()
        try:
            site = web.TCPSite(runner, self._host, self._port)
            try:
                await site.start()
            except OSError as error:
                raise ClusterError(
                    f"cannot listen on {self._host}:{self._port} ({error.strerror or error}): "
                    "choose another --port, or 0 for any"
                ) from error
            host, port = runner.addresses[0][:2]
            tell(f"http://{host}:{port}/")
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()
            self._waiters.shutdown(wait=False, cancel_futures=True)

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Refuse requests that do not use this machine's own name."""
        name = request.host.rsplit(":", 1)[0].strip("[]")
        if name not in ("127.0.0.1", "localhost", "::1", self._host):
            raise web.HTTPForbidden(text=f"this page is not served as {name}")
        return await handler(request)

    async def _file(self, request: web.Request) -> web.Response:
        name, kind = _FILES[request.path]
        text = (PAGE / name).read_text("utf-8")
        return web.Response(text=text, content_type=kind, headers=_HEADERS)

    async def _state(self, request: web.Request) -> web.Response:
        _, text = self._observer.newest()
        return web.Response(text=text, content_type="application/json", headers=_HEADERS)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if self._num_streams >= MAX_STREAMS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_STREAMS} pages are open: close one")
        self._num_streams += 1
        try:
            response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream"})
            await response.prepare(request)
            number, loop = 0, asyncio.get_running_loop()
            while True:
                newer, text = await loop.run_in_executor(
                    self._waiters, self._observer.wait_newer, number, KEEP_ALIVE_S
                )
                line = f"data: {text}\n\n" if newer > number else ": still here\n\n"
                number = newer
                await asyncio.wait_for(response.write(line.encode()), self.stalled_s)
        except (
            ConnectionResetError,
            asyncio.TimeoutError,
        ):  # the page was closed, or does not read
            if request.transport is not None:
                request.transport.abort()
            return response
        finally:
            self._num_streams -= 1

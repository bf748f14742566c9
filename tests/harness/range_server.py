"""A web server of a folder with range requests, versions (ETag, If-Match) and lists of files, by aiohttp, that can fail."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["RangeServer", "serving_ranges"]


@dataclass
class RangeServer:
    """Attributes:
    url: of the folder, without "/" at the end.
    gets: the number of GET requests by path.
    sent: bytes of their answers by path.
    behave: by path: a status; or "cut", "cut once" (half of the wanted bytes, then the connection ends), "stall" or "slow".
    """

    url: str
    gets: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    behave: dict[str, int | str] = field(default_factory=dict)

    def within(self, name: str) -> RangeServer:
        """Return the same server, as that of a folder in its folder."""
        return RangeServer(f"{self.url}/{name}", self.gets, self.sent, self.behave)

    def path(self, below: str) -> str:
        """Return the path of a request of a path below the folder."""
        return "/" + f"{self.url}{below}".split("/", 3)[3]

    def fail(self, folder: Path, behaviour: int | str) -> None:
        """Set the behaviour for the files of a folder in the served one."""
        self.gets.clear()
        self.behave.update({self.path(f"/{folder.name}/{path.name}"): behaviour for path in folder.iterdir()})


@contextlib.contextmanager
def serving_ranges(folder: Path) -> Iterator[RangeServer]:
    """Serve a folder for as long as the context lasts."""
    from aiohttp import web

    state = RangeServer("")

    @web.middleware
    async def failing(request: web.Request, handler: Any) -> web.StreamResponse:
        behaviour = state.behave.get(request.path)
        if request.method == "GET":
            state.gets[request.path] += 1
        if isinstance(behaviour, int):
            raise _error(web, behaviour)
        if behaviour == "slow":
            await asyncio.sleep(0.2)
        if request.method == "GET" and (
            behaviour in ("cut", "stall") or (behaviour == "cut once" and state.gets[request.path] == 1)
        ):
            whole = (folder / request.path[1:]).read_bytes()
            wanted = request.http_range
            part = whole[wanted]
            headers = {"Content-Length": str(len(part))}
            if wanted.start is not None:
                headers["Content-Range"] = f"bytes {wanted.start}-{wanted.start + len(part) - 1}/{len(whole)}"
            answer = web.StreamResponse(status=200 if wanted.start is None else 206, headers=headers)
            await answer.prepare(request)
            await answer.write(part[: len(part) // 2])
            if behaviour == "stall":
                await asyncio.sleep(5)
            if request.transport is not None:
                request.transport.close()
            return answer
        answer = await handler(request)
        if request.method == "GET":
            wanted = request.http_range
            path = folder / request.path[1:]
            size = path.stat().st_size if path.is_file() else 0
            state.sent[request.path] += len(range(size)[wanted])
        return answer

    ready, loop = threading.Event(), asyncio.new_event_loop()

    async def start() -> Any:
        app = web.Application(middlewares=[failing])
        app.router.add_static("/", folder, show_index=True)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        state.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        return runner

    def serve() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        left = asyncio.all_tasks(loop)
        for task in left:  # that stall
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(20)
    try:
        yield state
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)


def _error(web: Any, status: int) -> Exception:
    kinds = {
        404: web.HTTPNotFound,
        403: web.HTTPForbidden,
        500: web.HTTPInternalServerError,
        503: web.HTTPServiceUnavailable,
    }
    error: Exception = kinds[status]()
    return error

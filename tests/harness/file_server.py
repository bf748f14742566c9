"""A web server of a folder, in a thread, that counts requests and can fail in several ways."""

from __future__ import annotations

import contextlib
import functools
import http.server
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["FileServer", "serving"]


@dataclass
class FileServer:
    """Attributes:
    url: of the folder, without "/" at the end.
    gets: the number of GET requests by path.
    behave: by path: a status, or "cut", "cut once", "stall", "short" (a whole answer with half the bytes), "slow", "no size".
    """

    url: str
    gets: Counter[str] = field(default_factory=Counter)
    behave: dict[str, int | str] = field(default_factory=dict)


class _Handler(http.server.SimpleHTTPRequestHandler):
    def __init__(self, *args: Any, server_state: FileServer, **options: Any) -> None:
        self.state = server_state
        super().__init__(*args, **options)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def send_header(self, keyword: str, value: str) -> None:
        if not (self.state.behave.get(self.path) == "no size" and keyword == "Content-Length"):
            super().send_header(keyword, value)

    def do_HEAD(self) -> None:
        status = self.state.behave.get(self.path)
        if isinstance(status, int):
            self.send_error(status)
        else:
            super().do_HEAD()

    def do_GET(self) -> None:
        self.state.gets[self.path] += 1
        behaviour = self.state.behave.get(self.path)
        if behaviour == "slow":
            time.sleep(0.3)
        if isinstance(behaviour, int):
            self.send_error(behaviour)
        elif behaviour in ("cut", "stall", "short") or (behaviour == "cut once" and self.state.gets[self.path] == 1):
            whole = Path(self.translate_path(self.path)).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(whole) // 2 if behaviour == "short" else len(whole)))
            self.end_headers()
            self.wfile.write(whole[: len(whole) // 2])
            self.wfile.flush()
            if behaviour == "stall":
                time.sleep(30)
        else:
            super().do_GET()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # clients that leave


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[FileServer]:
    """Serve a folder for as long as the context lasts."""
    state = FileServer("")
    handler = functools.partial(_Handler, server_state=state, directory=str(folder))
    server = _Server(("127.0.0.1", 0), handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

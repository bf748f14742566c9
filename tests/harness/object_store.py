"""A server that speaks S3, with versions: moto's. Tests are skipped without it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

BUCKET = "bucket"


@contextlib.contextmanager
def s3_server() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Run a server with one bucket; yield fsspec's file system of it, and the arguments that make one."""
    pytest.importorskip("s3fs")
    fsspec = pytest.importorskip("fsspec")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        options = {"key": "a", "secret": "b", "client_kwargs": {"endpoint_url": f"http://{host}:{port}"}}
        system = fsspec.filesystem("s3", **options)
        system.call_s3("create_bucket", Bucket=BUCKET)
        yield system, options
    finally:
        server.stop()

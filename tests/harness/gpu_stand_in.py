"""The stand-in for CuPy in tests of one process or of ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from mpistrat.comm.gpu import nccl_available
from tests.models import honest_cupy


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the stand-in, with two GPUs that each rank sees; for a fixture."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("FAKE_GPUS", "2")
    for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"):
        monkeypatch.setitem(sys.modules, name, sys)  # after the test they are as before
    nccl_available.cache_clear()
    yield honest_cupy.install()
    nccl_available.cache_clear()

"""Steps on their way to devices: copies begin as steps are read, ahead of need, and end as they are handed out."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

from mpistrat.comm.gpu import DeviceCopy
from mpistrat.data import DistributedDataset, from_arrays
from mpistrat.data.feed.distributed import distribute
from mpistrat.data.feed.from_function import FunctionPlan
from mpistrat.data.feed.plan import Workers
from tests.models.fake_gpu import FakeGpu


class Marked:
    """A device that adds a number, and notes what it is told and by which thread."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: list[tuple[str, int]] = []
        self.threads: dict[str, set[int]] = {}

    def _note(self, call: str, value: int = -1) -> None:
        self.calls.append((call, value))
        self.threads.setdefault(call, set()).add(threading.get_ident())

    def start(self, array: np.ndarray) -> Any:
        self._note("start", int(array[0]) if array.size else -1)
        return ("started", array)

    def finish(self, started: Any) -> np.ndarray:
        assert started[0] == "started"
        self._note("finish", int(started[1][0]) if started[1].size else -1)
        return started[1] + self.number

    def reclaim(self) -> None:
        self._note("reclaim")


def test_each_replica_gets_its_arrays_on_its_device() -> None:
    devices = [Marked(100), None, Marked(300)]
    part = distribute(from_arrays({"x": np.arange(6)}).batch(6), Workers([3]), devices=devices)
    assert [values.tolist() for values in next(iter(part))["x"].values] == [[100, 101], [2, 3], [304, 305]]


def test_copies_begin_ahead_of_need() -> None:
    """Three steps wait ready and one more may be on its way, whatever the loop does."""
    device = Marked(0)
    part = distribute(from_arrays(np.arange(10)).batch(1), Workers(), devices=[device], buffer_size=3)
    iterator = iter(part)
    assert next(iterator).tolist() == [0]
    deadline = time.monotonic() + 5
    while len(device.calls) < 7 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert [value for call, value in device.calls if call == "start"] == [0, 1, 2, 3, 4]
    assert [value for call, value in device.calls if call == "finish"] == [0]
    assert device.threads["finish"] == device.threads["reclaim"] == {threading.get_ident()}
    assert threading.get_ident() not in device.threads["start"]
    iterator.close()


def test_without_a_buffer_there_is_no_thread() -> None:
    device = Marked(0)
    iterator = iter(distribute(from_arrays(np.arange(3)).batch(1), Workers(), devices=[device], buffer_size=0))
    next(iterator)
    next(iterator)
    assert device.calls == [("reclaim", -1), ("start", 0), ("finish", 0), ("reclaim", -1), ("start", 1), ("finish", 1)]


def test_the_user_s_prefetch_says_how_far() -> None:
    dataset = from_arrays(np.arange(3)).batch(1).prefetch(0)
    before = threading.active_count()
    iterator = iter(distribute(dataset, Workers(), buffer_size=5))
    next(iterator)
    assert threading.active_count() == before


def test_zero_rows_are_moved_too() -> None:
    device = Marked(0)
    steps = FunctionPlan([[np.arange(2)]], Workers([1, 1]))
    more = [1, 1, 0]
    part = DistributedDataset(steps, devices=[device], sum_over_ranks=lambda counts: np.add(counts, [more.pop(0), 1]))
    assert [(rows.tolist(), rows.dtype) for rows in part] == [([0, 1], np.int64), ([], np.int64)]
    assert [call for call, _ in device.calls if call == "finish"] == ["finish"] * 2


def test_through_streams_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(40):
        gpu = FakeGpu(seed)
        monkeypatch.setitem(sys.modules, "cupy", gpu.module)
        part = distribute(
            from_arrays(np.arange(50)).batch(7), Workers([2]), devices=[DeviceCopy(0), DeviceCopy(0)], buffer_size=0
        )
        found: list[np.ndarray] = []
        for step in part:
            for array in step.values:
                values = array.values
                gpu.compute(lambda found=found, values=values: found.append(values.copy()))
            del array
        gpu.drain()
        assert np.concatenate(found).tolist() == list(range(50))

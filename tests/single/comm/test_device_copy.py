"""Copies to a GPU that overlap what it computes: the order of events, on a GPU of the imagination and on a real one."""

from __future__ import annotations

import sys
from collections import deque

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mpistrat.comm.gpu import DeviceCopy
from tests.models.fake_gpu import FakeGpu


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    ahead=st.integers(0, 3),
    kept=st.integers(0, 3),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30),
)
def test_nothing_is_read_early_or_overwritten(
    monkeypatch: pytest.MonkeyPatch, seed: int, ahead: int, kept: int, sizes: list[int]
) -> None:
    """Steps computed late, arrays that the program keeps for a while, host arrays overwritten at once."""
    gpu = FakeGpu(seed)
    monkeypatch.setitem(sys.modules, "cupy", gpu.module)
    copy = DeviceCopy(0)
    found: list[tuple[int, np.ndarray]] = []
    started = deque()
    held: deque = deque(maxlen=kept + 1)

    def begin(step: int) -> None:
        host = np.full(sizes[step], step, np.int64)
        started.append(copy.start(host))
        host[:] = -1  # the source's memory is used again

    for step in range(min(ahead, len(sizes))):
        begin(step)
    for step in range(len(sizes)):
        copy.reclaim()
        if step + ahead < len(sizes):
            begin(step + ahead)
        array = copy.finish(started.popleft())
        values = array.values  # the kernel knows an address, and keeps nothing alive
        gpu.compute(lambda step=step, values=values: found.append((step, values.copy())))
        held.append(array)
        del array
    gpu.drain()
    assert [step for step, _ in found] == list(range(len(sizes)))
    for step, values in found:
        assert values.tolist() == [step] * sizes[step]


def test_the_steady_state_allocates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setitem(sys.modules, "cupy", gpu.module)
    copy = DeviceCopy(0)
    started = deque([copy.start(np.zeros(100))])
    for step in range(50):
        copy.reclaim()
        started.append(copy.start(np.zeros(100)))
        array = copy.finish(started.popleft())
        gpu.compute(lambda: None)
        gpu.drain()
        if step == 5:
            gpu.log.clear()
    assert {word for word in gpu.log if word in ("alloc", "pin")} == set()
    assert array.shape == (100,)


def test_copies_overlap_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of a step waits for the step before the one that computes, never for that one itself."""
    gpu = FakeGpu()
    monkeypatch.setitem(sys.modules, "cupy", gpu.module)
    monkeypatch.setattr(gpu, "run_some", lambda: None)
    copy = DeviceCopy(0)
    started = deque([copy.start(np.zeros(8))])
    array = None
    for _ in range(6):
        gpu.drain()
        copy.reclaim()
        array = copy.finish(started.popleft())
        gpu.compute(lambda: None)
        started.append(copy.start(np.zeros(8)))  # while the step computes
        while len(gpu.default.waiting) > 1:  # all that comes before this step
            gpu.default.waiting.popleft()[1]()
        copies = gpu.streams[1]
        while copies.waiting:
            assert copies.waiting[0][0](), "the copy waits for the step that computes"
            copies.waiting.popleft()[1]()
    assert array is not None


def test_nothing_and_objects_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setitem(sys.modules, "cupy", gpu.module)
    copy = DeviceCopy(0)
    words = np.array(["a", "b"], object)
    assert copy.finish(copy.start(words)) is words
    empty = copy.finish(copy.start(np.zeros((0, 3), np.float32)))
    assert (empty.shape, empty.dtype) == ((0, 3), np.float32)
    copy.reclaim()
    assert gpu.log == []


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    import cupy

    copy = DeviceCopy(0)
    started = deque([copy.start(np.full(1 << 20, 0.0))])
    sums = []
    for step in range(20):
        copy.reclaim()
        started.append(copy.start(np.full(1 << 20, step + 1.0)))
        array = copy.finish(started.popleft())
        assert isinstance(array, cupy.ndarray)
        sums.append((array * 1.0).sum())
    assert [float(total) for total in sums] == [step * float(1 << 20) for step in range(20)]

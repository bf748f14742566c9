"""Threads of the compiled loops: the same bits with any number, errors of all of them, forks, several callers at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.base import cores, loops
from mpistrat.comm.arrays import as_buffer
from mpistrat.optimizers.kernels import Around
from tests.single.base.test_loops import assert_same_bits, compiled, errors_of, numbers

COUNTS = [1, 2, 3, 7]
SIZES = [8191, 16384, 16385, 70_001, 300_000]


@pytest.fixture(autouse=True)
def _one_again() -> Iterator[None]:
    yield
    loops.set_threads(1)


def adam(parts: list[np.ndarray], dtype: type) -> list[np.ndarray]:
    size = len(parts[0])
    weights, slots = np.zeros(size, dtype), [np.full(size, 0.5, np.float32) for _ in range(2)]
    numbers = 1e-3, 0.1, 0.001, 1e-7
    assert loops.update("adam", numbers, [*map(as_buffer, parts)], as_buffer(weights), (*slots, None), Around())
    return [weights, *slots]


@compiled
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_any_number_of_threads_gives_the_same_bits(dtype, size) -> None:
    random = np.random.default_rng(size)
    parts = [random.normal(size=size).astype(dtype) for _ in range(3)]
    found = []
    for count in COUNTS:
        loops.set_threads(count)
        assert loops.threads() == count
        total, narrowed = np.empty(size, np.float32), np.empty(size, np.float16)
        assert loops.add(total, [*map(as_buffer, parts)])
        with np.errstate(over="ignore"):
            assert loops.narrow(narrowed, total)
        found.append([*adam(parts, dtype), total, narrowed, np.array(loops.squares(total))])
    for others in found[1:]:
        for mine, first in zip(others, found[0], strict=True):
            assert_same_bits(mine, first)


@compiled
@pytest.mark.parametrize("at", [0, 8192, 99_999, 150_000, 299_999])
@pytest.mark.parametrize("count", COUNTS)
def test_errors_of_every_thread_are_reported(count, at) -> None:
    loops.set_threads(count)
    values, out = np.ones(300_000, np.float32), np.empty(300_000, np.float32)
    values[at] = 3e38
    assert errors_of(loops.add, out, [values, values]) == {"overflow"}
    assert errors_of(loops.narrow, np.empty(300_000, np.float16), values) == {"overflow"}
    values[at] = np.inf
    assert errors_of(loops.add, out, [values, -values]) == {"invalid value"}
    values[at] = 1
    assert errors_of(loops.add, out, [values, values]) == set()


@compiled
def test_a_forked_child_goes_on_without_threads() -> None:
    loops.set_threads(3)
    values, out = np.ones(300_000, np.float32), np.empty(300_000, np.float32)
    assert loops.add(out, [values, values])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        alone = loops.threads() == 1 and loops.add(out, [values, values, values]) and bool((out == 3).all())
        loops.set_threads(2)  # which it may have of its own
        again = loops.add(out, [values, values]) and bool((out == 2).all())
        os.write(writer, b"done" if alone and again else b"wrong")
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"done"
    os.waitpid(child, 0)
    assert loops.threads() == 3 and loops.add(out, [values, values]) and (out == 2).all()


@compiled
def test_threads_take_their_own_faults_alone() -> None:
    code = """if True:
        import os, time
        import numpy as np
        from mpistrat.base import loops

        before = set(os.listdir("/proc/self/task"))
        loops.set_threads(3)
        one = np.ones(300_000)
        loops.add(one, [one, one])
        time.sleep(0.5)  # the C library blocks all signals until a thread begins
        for task in set(os.listdir("/proc/self/task")) - before:
            with open(f"/proc/self/task/{task}/status") as status:
                print(*(line.split()[1] for line in status if line.startswith("SigBlk")))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    blocked = [int(mask, 16) for mask in done.stdout.split()]
    assert len(blocked) == 2
    for number, is_blocked in [
        (signal.SIGINT, True),
        (signal.SIGTERM, True),
        (signal.SIGSEGV, False),
        (signal.SIGBUS, False),
    ]:
        assert [bool(mask >> (number - 1) & 1) for mask in blocked] == [is_blocked] * 2


@compiled
def test_several_callers_at_once() -> None:
    loops.set_threads(3)
    wrong: list[object] = []

    def call(number: int) -> None:
        values, out = np.full(100_000 + number, float(number), np.float32), np.empty(100_000 + number, np.float32)
        for turn in range(100):
            out[:] = 0
            if not loops.add(out, [values] * 3) or not (out == 3 * number).all():
                wrong.append((number, turn))

    callers = [threading.Thread(target=call, args=(number,)) for number in range(5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@compiled
def test_numbers_of_threads() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        loops.set_threads(0)
    with pytest.raises(TypeError):
        loops.set_threads("two")
    loops.set_threads(100_000)
    assert loops.threads() == 256


@compiled
@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([np.float32, np.float64]),
    st.integers(0, 40_000),
    st.sampled_from(COUNTS),
    st.integers(0, 2**32 - 1),
)
def test_sums_of_squares_have_numpys_bits(dtype, size, count, seed) -> None:
    values = numbers(np.random.default_rng(seed), size, dtype, 0.0)
    loops.set_threads(count)
    found = loops.squares(values)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loops, "_squares", loops.leave_to_numpy)
        assert loops.squares(values) == found
    exact = float(np.sum(values.astype(np.longdouble) ** 2))
    assert found == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(
    ("own", "node", "ranks", "variables", "expected"),
    [
        (64, 64, 1, {}, 64),
        (64, 64, 8, {}, 8),
        (64, 64, 100, {}, 1),
        (8, 64, 1, {}, 8),  # bound to some cores of its node
        (64, 64, 1, {"OMP_NUM_THREADS": "4"}, 4),
        (8, 8, 1, {"OMP_NUM_THREADS": "12"}, 8),
        (8, 8, 1, {"OMP_NUM_THREADS": "1"}, 1),
    ],
)
def test_a_rank_has_a_thread_for_each_core_of_its_share(monkeypatch, own, node, ranks, variables, expected) -> None:
    for name in cores.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cores, "usable_cores", lambda: own)
    assert cores.loop_threads(ranks, node) == expected

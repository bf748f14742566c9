"""Signals and time limits as one process sees them: caught when asked, passed on, given back; and the time that is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import mpistrat as ms
from mpistrat.strategy import preemption
from mpistrat.strategy.preemption import last_moment
from tests.harness.strategies import without_mpi
from tests.launch.launcher import ROOT


@pytest.fixture(autouse=True)
def _signals():
    runner = [(number, signal.signal(number, signal.SIG_DFL)) for number in preemption.SIGNALS]
    yield
    preemption.release_signals()
    left = [signal.getsignal(number) for number in preemption.SIGNALS]
    for number, handler in runner:
        signal.signal(number, handler)
    assert left == [signal.SIG_DFL] * 2


def test_the_exit_status_is_tensorflows():
    assert ms.RESTART_EXIT_CODE == 42


@pytest.mark.parametrize("number", preemption.SIGNALS)
def test_a_signal_is_heard_once_and_for_all(number):
    with without_mpi() as strategy:
        assert not strategy.should_stop()
        os.kill(os.getpid(), number)
        assert strategy.should_stop()
        assert strategy.should_stop()


def test_nothing_is_caught_before_somebody_asks():
    with without_mpi() as strategy:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        strategy.should_stop()
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_signal_before_the_strategy_counts():
    ms.catch_stop_signals()
    os.kill(os.getpid(), signal.SIGUSR1)
    with without_mpi() as strategy:
        assert strategy.should_stop()


def test_the_last_strategy_that_was_asked_gives_the_signals_back():
    first, second, third = without_mpi(), without_mpi(), without_mpi()
    first.should_stop()
    second.should_stop()
    first.close()
    third.close()
    assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    second.close()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


def test_who_was_told_to_stop_may_be_told_again_after_closing():
    with without_mpi() as strategy:
        strategy.should_stop()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert strategy.should_stop()
    os.kill(os.getpid(), signal.SIGUSR1)  # would end the process


def test_a_handler_of_the_programs_own_is_called_and_comes_back():
    heard = []
    signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    own = signal.getsignal(signal.SIGUSR1)
    try:
        with without_mpi() as strategy:
            strategy.should_stop()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert strategy.should_stop()
            assert heard == [signal.SIGUSR1]
        preemption.release_signals()
        assert signal.getsignal(signal.SIGUSR1) is own
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_handler_that_the_program_sets_later_stays():
    try:
        with without_mpi() as strategy:
            strategy.should_stop()
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_other_threads_cannot_catch_signals_and_say_so(caplog):
    answers = []
    with without_mpi() as strategy:
        thread = threading.Thread(target=lambda: answers.append(strategy.should_stop()))
        thread.start()
        thread.join()
        assert answers == [False]
        assert "ms.catch_stop_signals() in the main thread" in caplog.text


def test_not_in_a_step():
    with without_mpi() as strategy, pytest.raises(ms.errors.ContextError, match="should_stop"):
        strategy.run(strategy.should_stop)


def test_not_after_closing():
    strategy = without_mpi()
    strategy.close()
    with pytest.raises(ms.errors.ClosedError):
        strategy.should_stop()


# Programs of their own: (what they do, the exit status; negative for a signal).
PROGRAMS = {
    "never asked": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "twice, the same one passed on by two": (
        "ms.catch_stop_signals(); os.kill(os.getpid(), signal.SIGTERM); os.kill(os.getpid(), signal.SIGTERM)", 0,
    ),
    "insists": (
        "ms.catch_stop_signals(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(1.1); os.kill(os.getpid(), signal.SIGTERM)",
        -signal.SIGTERM,
    ),
    "the end of the time after a warning": (
        "ms.catch_stop_signals(); os.kill(os.getpid(), signal.SIGUSR1); time.sleep(1.1); os.kill(os.getpid(), signal.SIGTERM)", 0,
    ),
    "Ctrl-C": ("ms.catch_stop_signals(); os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    "ignored by whoever started it": (
        """signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ms.catch_stop_signals()
        os.kill(os.getpid(), signal.SIGTERM)
        sys.exit(5 * ms.get_strategy().should_stop())""", 5,
    ),
    "a forked child": (
        """ms.catch_stop_signals()
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid: os.write(writer, b"x"); time.sleep(20); os._exit(1)
        os.read(reader, 1)  # Python drops signals that come to a child while it is being made
        os.kill(pid, signal.SIGTERM)
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) + 20)""", 5,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    text, status = PROGRAMS[name]
    program = "import os, signal, sys, time\nimport mpistrat as ms\n" + text.replace("\n        ", "\n")
    started = time.monotonic()
    assert subprocess.run([sys.executable, "-c", program], timeout=30, stderr=subprocess.PIPE).returncode == status
    assert time.monotonic() - started < 15


MAPPED = """
import os, signal
import numpy as np
import mpistrat as ms

if __name__ == "__main__":
    ms.catch_stop_signals()
    rows = 0
    for row in ms.data.from_arrays(np.arange(20_000.0)).map(np.sqrt, processes=True, num_parallel_calls=2):
        rows += 1
        if rows == 50:
            os.killpg(0, signal.SIGUSR1)
    print(rows, ms.get_strategy().should_stop())
"""


def test_a_signal_to_all_processes_leaves_those_of_a_map_alone(tmp_path):
    """Schedulers and launchers may send it to the rank's whole group."""
    (tmp_path / "program.py").write_text(MAPPED)
    command = [sys.executable, str(tmp_path / "program.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    reply = subprocess.run(command, env=environment, timeout=60, start_new_session=True, capture_output=True, text=True)
    assert reply.stdout.split() == ["20000", "True"], reply.stderr


# the time limit

HOUR = 3600.0


@pytest.mark.parametrize(
    ("end", "margin", "env", "expected"),
    [
        (None, None, {}, None),
        (HOUR, None, {}, HOUR - 60),
        (100.0, None, {}, 90.0),  # a tenth
        (HOUR, 600.0, {}, HOUR - 600),
        (None, None, {"SLURM_JOB_END_TIME": "7200"}, 7140.0),
        (HOUR, None, {"SLURM_JOB_END_TIME": "7200"}, HOUR - 60),  # what is said for us counts
        (-5.0, None, {}, -5.0),  # over
    ],
)
def test_last_moment(end, margin, env, expected):
    assert last_moment(end, margin, env, now=0.0) == expected


def test_what_slurm_says_must_be_a_number():
    with pytest.raises(ValueError, match="SLURM_JOB_END_TIME"):
        last_moment(None, None, {"SLURM_JOB_END_TIME": "tomorrow"}, 0.0)


def test_the_time_limit_stops(monkeypatch):
    now = time.time()
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(now) + 1000))
    with without_mpi() as strategy:
        assert not strategy.should_stop()
        monkeypatch.setattr(preemption.time, "time", lambda: now + 930)
        assert not strategy.should_stop()
        monkeypatch.setattr(preemption.time, "time", lambda: now + 945)
        assert strategy.should_stop()


def test_the_time_of_a_save_is_counted_before_the_time_limit(monkeypatch, tmp_path):
    now, fsync = time.time(), os.fsync
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(now + 1000))
    monkeypatch.setattr(os, "fsync", lambda descriptor: (time.sleep(0.2), fsync(descriptor))[1])
    with without_mpi() as strategy:
        assert not strategy.should_stop()
        monkeypatch.setattr(preemption.time, "time", lambda: now + 939.5)
        assert not strategy.should_stop()
        strategy.begin_save(tmp_path / "x.h5").wait()
        assert strategy.should_stop()

"""What the launchers make of it: signals that they pass on, and the exit status that they end with."""

from __future__ import annotations

import pytest

LAUNCHER = """
import os, signal, sys, time
import mpistrat as ms
from mpistrat.examples import digits

def launcher():
    pid, found = os.getpid(), None
    while pid > 1:
        with open(f"/proc/{pid}/stat") as stat:
            pid = int(stat.read().rsplit(")", 1)[1].split()[1])
        with open(f"/proc/{max(pid, 1)}/comm") as comm:
            if comm.read().startswith(("mpiexec", "mpirun", "prterun")):
                found = pid
    return found

def counted(strategy, calls=[0]):
    calls[0] += 1
    if calls[0] == 5 and strategy.rank == TOLD:
        os.kill(launcher() if WHO == "launcher" else os.getpid(), signal.SIGUSR1)
    return should_stop(strategy)

should_stop = ms.Strategy.should_stop
ms.Strategy.should_stop = counted
digits.main([*WORDS])
"""


def program(folder, who="rank", told=1, *words) -> str:
    words = ("--epochs", "2", "--progress", "none", "--output", str(folder), *words)
    return f"WHO, TOLD, WORDS = {who!r}, {told}, {words!r}\n" + LAUNCHER


@pytest.mark.parametrize("who", ["launcher", "rank"])
def test_stopped_and_gone_on(mpi_run, tmp_path, who):
    assert mpi_run(program(tmp_path, who), 2, timeout=100).returncode == 42
    assert list((tmp_path / "checkpoints").glob("step-*.h5"))
    again = ["-m", "mpistrat.examples.digits", "--epochs", "2", "--output", str(tmp_path)]
    assert mpi_run(again, 2, timeout=100).returncode == 0
    assert (tmp_path / "weights.h5").exists()


def test_over_two_hosts(mpi_run, tmp_path, hosts):
    text = program(tmp_path, "rank", 2, "--strategy", "multi_worker_mirrored")
    assert mpi_run(text, 4, timeout=100, hosts=hosts).returncode == 42
    assert list((tmp_path / "checkpoints").glob("step-*.h5"))

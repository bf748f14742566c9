"""A rank that dies without a word is named, with its role; nobody else is, and nothing is left behind."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

MIRRORED = """
import os, signal, sys, time
import numpy as np
import mpistrat as ms

strategy = ms.MultiWorkerMirroredStrategy()
with strategy.scope():
    variable = ms.Variable(np.zeros(10))
print("ready", flush=True)
started = time.monotonic()
while True:
    variable.assign(np.ones(10))
    if time.monotonic() - started > 0.5 and strategy.rank == VICTIM:
        END
"""

SERVED = """
import os, signal, sys, threading, time
import numpy as np
import mpistrat as ms

strategy = ms.ParameterServerStrategy(num_ps=1)
with strategy.scope():
    variable = ms.Variable(np.zeros(10))
    optimizer = ms.optimizers.SGD(0.1)

def end():
    END

data = strategy.distribute_dataset(ms.data.from_arrays(np.arange(1000)).batch(1).repeat())
if strategy.rank == VICTIM:
    threading.Timer(0.5, end).start()
for row in data:
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(10), variable)]))
    time.sleep(1e-3)
"""

KILL = "os.kill(os.getpid(), signal.SIGKILL)"


def program(text: str, victim: int, end: str) -> str:
    return text.replace("VICTIM", str(victim)).replace("END", end)


def named(result) -> list[str]:
    """The lines that name somebody."""
    return [line for line in result.stderr.splitlines() if "mpistrat: rank" in line]


@pytest.mark.parametrize("end", [KILL, "raise ValueError('mine')"], ids=["killed", "raised"])
def test_nothing_is_left_in_shared_memory(mpi_run, end):
    """What an MPI keeps in /dev/shm while ranks run is gone when they were killed, or ended the job."""
    files = "print(*{line.split()[-1] for line in open('/proc/self/maps') if ' /dev/shm/' in line and 'deleted' not in line})"
    result = mpi_run(program(MIRRORED, 1, end).replace("started =", f"{files}\nstarted ="), 2, timeout=100)
    assert result.returncode not in (0, None), result
    made = {Path(word) for word in result.stdout.split() if word.startswith("/dev/shm/")}
    until = time.monotonic() + 4  # a test run itself removes what is older than 5 s
    while any(path.exists() for path in made) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [path for path in made if path.exists()]


@pytest.mark.parametrize(("victim", "role"), [(0, "worker 0"), (1, "worker 1"), (2, "ps 0")])
def test_roles_of_parameter_servers(mpi_run, victim, role):
    result = mpi_run(program(SERVED, victim, KILL), 3, timeout=100)
    assert result.returncode not in (0, None), result
    (line,) = named(result)
    assert f"rank {victim} of 3 ({role}) on " in line


ENDS = {
    KILL: ("SIGKILL", "killed, crashed, or ended by os._exit"),
    "os.kill(os.getpid(), signal.SIGSEGV)": ("SIGSEGV", "killed, crashed, or ended by os._exit"),
    "os._exit(3)": ("ended with status 3", "ended by os._exit"),
}


@pytest.mark.parametrize("end", ENDS)
def test_how_it_ended(mpi_run, end):
    result = mpi_run(program(MIRRORED, 1, end), 3, timeout=100)
    assert result.returncode not in (0, None), result
    (line,) = named(result)
    assert "rank 1 of 3 (worker 1) on " in line
    assert any(words in line for words in ENDS[end]), line


def test_what_ranks_did_last(mpi_run):
    """Below the line of the rank that died are its last events, and what the others of its node were doing."""
    result = mpi_run(program(MIRRORED, 1, KILL), 3, timeout=100)
    lines = [line.strip() for line in result.stderr.splitlines() if ", last: " in line]
    assert [line[:11] for line in lines][:1] == ["rank 1 of 3"] and len({line[:11] for line in lines}) == 3, result
    assert all(re.search(r"\(\d.* ms\)|for \d.* s", line) for line in lines), lines


@pytest.mark.parametrize("text", [MIRRORED, SERVED], ids=["mirrored", "served"])
@pytest.mark.parametrize("end", ["raise ValueError('mine')", "sys.exit(3)"])
def test_who_says_it_himself_is_not_named(mpi_run, text, end):
    end = end if text is MIRRORED or "raise" in end else "os.kill(os.getpid(), signal.SIGINT)"
    result = mpi_run(program(text, 1, end), 3, timeout=100)
    assert result.returncode not in (0, None), result
    assert named(result) == []


def test_a_good_end(mpi_run):
    result = mpi_run(program(MIRRORED, 1, "pass").replace("while True:", "for _ in range(20):"), 3, timeout=100)
    assert result.returncode == 0, result
    assert named(result) == []


def test_ctrl_c(mpi_run):
    result = mpi_run(program(MIRRORED, 1, "pass"), 3, timeout=100, interrupt_at="ready")
    assert result.returncode not in (0, None), result
    assert named(result) == []


@pytest.mark.parametrize("victim", [0, 3])
def test_over_two_hosts(mpi_run, hosts, victim):
    """A host that has lost its ranks later may say so: then both lines tell when."""
    result = mpi_run(program(MIRRORED, victim, KILL), 4, timeout=100, hosts=hosts)
    assert result.returncode not in (0, None), result
    lines = named(result)
    host = "h1" if victim == 0 else "h2"
    (line,) = [line for line in lines if f" on {host}, " in line]
    assert f"rank {victim} of 4 (worker {victim}) on {host}" in line
    assert all("the earliest time counts" in other for other in lines)


def test_without_an_interpreter_or_sockets_there_is_none(mpi_run):
    text = "import sys; sys.executable = '/nowhere'\n" + program(MIRRORED, 1, "pass").replace(
        "while True:", "for _ in range(20):"
    )
    result = mpi_run(text, 2, timeout=100, env={"MPISTRAT_LOG": "debug"})
    assert result.returncode == 0, result
    assert "a killed rank will not be named" in result.stderr


def test_a_rank_killed_after_another_has_finished_is_named(mpi_run):
    """Of two ranks the first ends with status 0; half a second later, which is soon, the second is killed."""
    text = f"import mpistrat, os, signal, time\nif mpistrat.MirroredStrategy().rank:\n    time.sleep(0.5)\n    {KILL}"
    result = mpi_run(text, 2, timeout=60)
    assert result.returncode not in (0, None), result
    (line,) = named(result)
    assert "rank 1 of 2 (worker 1) on " in line, result

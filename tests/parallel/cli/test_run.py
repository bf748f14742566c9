"""`mpistrat run` under each MPI: ranks that find each other, their environment, exit statuses, signals."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from launcher import job_environment
from mpistrat.cluster.cores import usable_cores

PROGRAM = """
import os, signal, sys, time
import mpistrat as ms
strategy = ms.strategy_from_environment()
said = [os.environ["OMP_NUM_THREADS"], type(strategy).__name__, getattr(strategy, "servers", None), sys.argv[1:]]
sys.stdout.write(f"{strategy.rank}/{strategy.size} {said}\\n")
sys.stdout.flush()
caught = []
signal.signal(signal.SIGUSR1, lambda *_: caught.append(1))
strategy.comm.Barrier()
if "wait" in sys.argv:
    sys.stdout.write(f"ready\\n")
    sys.stdout.flush()
    until = time.monotonic() + 30
    while not caught and time.monotonic() < until:
        time.sleep(0.05)
strategy.close()
sys.exit(42 if caught else int(sys.argv[1]))
"""


@pytest.fixture
def start(mpi, tmp_path):
    """Start `mpistrat run` on the program; it is killed at the end."""
    (tmp_path / "train.py").write_text(PROGRAM)
    started = []

    def run(*words):
        env = job_environment("none", tmp_path, {"OMP_NUM_THREADS": None, "PATH": "/usr/bin:/bin"})
        command = [mpi.python, "-m", "mpistrat", "run", *words]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, env=env, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def test_ranks_find_each_other_and_their_roles(start):
    process = start("-n", "3", "--ps", "1", "train.py", "0", "a b; $c")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    expected = f"['{max(1, usable_cores() // 3)}', 'ParameterServerStrategy', (2,), ['0', 'a b; $c']]"
    assert sorted(out.splitlines()) == [f"{rank}/3 {expected}" for rank in range(3)]


def test_the_exit_status_is_the_programs(start):
    process = start("-n", "2", "--strategy", "mirrored", "train.py", "17")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 17
    assert out.count("MirroredStrategy") == 2


def test_sigusr1_reaches_the_ranks(start):
    process = start("-n", "2", "train.py", "0", "wait")
    ready, until = 0, time.monotonic() + 60
    while ready < 2 and time.monotonic() < until:
        ready += process.stdout.readline().strip() == "ready"
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=60)
    assert process.returncode == 42


def test_sigterm_ends_the_job(start):
    process = start("-n", "2", "train.py", "0", "wait")
    while process.stdout.readline().strip() != "ready":
        pass
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no /dev/shm")
def test_what_killed_ranks_leave_in_shared_memory_is_removed(start, tmp_path):
    """A rank that is killed removes nothing, and its launcher kills the others."""
    (tmp_path / "killed.py").write_text(
        "import os, signal; from mpi4py import MPI\n"
        "window = MPI.Win.Allocate_shared(4096, comm=MPI.COMM_WORLD)\n"
        "files = {line.split()[-1] for line in open('/proc/self/maps') if ' /dev/shm/' in line and 'deleted' not in line}\n"
        "open(f'files{MPI.COMM_WORLD.rank}', 'w').write(' '.join(files))\n"
        "MPI.COMM_WORLD.Barrier()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    _, err = (process := start("-n", "2", "killed.py")).communicate(timeout=60)
    made = {name for rank in range(2) for name in (tmp_path / f"files{rank}").read_text().split()}
    assert process.returncode != 0 and made, err
    until = time.monotonic() + 4.5  # what is older the tests remove themselves
    while (left := [name for name in made if Path(name).exists()]) and time.monotonic() < until:
        time.sleep(0.1)
    assert left == []

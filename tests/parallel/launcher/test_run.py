"""`mpistrat run` under each MPI: ranks that find each other, their environment, exit statuses, signals."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path

import pytest

from mpistrat.base.cores import usable_cores
from tests.launch.launcher import job_environment

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


ODD = [
    ":",
    "touch",
    "planted",
    ":",
    "",
    "=",
    "--map-by",
    "--rank-by",
    "--bind-to",
    "--runtime-options",
    "-n",
    "9",
    "%d",
    "*",
]


@pytest.mark.parametrize("options", [[], ["--tag"]])
def test_a_program_gets_its_words_as_they_are(start, tmp_path, options):
    process = start(*options, "-n", "2", "--strategy", "mirrored", "train.py", "0", *ODD)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and not (tmp_path / "planted").exists(), err
    assert out.count(f"{['0', *ODD]}]\n") == 2, out


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


TALK = """
import os, sys
sys.stdout.reconfigure(write_through=True)
rank = next(os.environ[name] for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK") if name in os.environ)
for number in range(300):
    print("line", number, "of", rank, rank * 60)    # several writes a line
print("long", rank * 9000)
sys.stderr.write("no end of line")
sys.stderr.flush()
if sys.argv[1:]:
    os._exit(5)  # Open MPI throws away what it has not printed yet when a rank fails
"""


def test_tagged_lines_are_whole_and_each_rank_has_a_file(start, tmp_path):
    (tmp_path / "talk.py").write_text(TALK)
    process = start("-n", "3", "--tag", "--log-dir", "logs/new", "talk.py")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    for rank in "012":
        mine = [f"line {number} of {rank} {rank * 60}" for number in range(300)]
        tagged = [line.removeprefix(f"[{rank}] ") for line in out.splitlines() if line.startswith(f"[{rank}] ")]
        assert tagged[:300] == mine and "".join(tagged[300:]) == "long " + rank * 9000
        assert f"[{rank}] no end of line\n" in err
        written = (tmp_path / f"logs/new/rank-{rank}.txt").read_text()
        assert written.replace("no end of line", "").splitlines() == [*mine, "long " + rank * 9000]
    process = start("-n", "2", "--log-dir", "logs", "talk.py", "fail")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 5 and "line" not in out + err.replace("pipeline", ""), out + err
    assert (tmp_path / "logs/rank-1.txt").read_text().startswith("line 0 of 1 1")


@pytest.mark.parametrize(("columns", "words"), [(80, ()), (120, ()), (80, ("--tag",))])
def test_a_bar_through_the_launcher(mpi, tmp_path, columns, words):
    """Steps and the time left are on each line, which is as wide as the terminal; behind a tag nothing is drawn over."""
    (tmp_path / "bar.py").write_text(
        "import time\nimport mpistrat as ms\n"
        "loop, progress = ms.train.Loop(ms.get_strategy()), ms.train.Progress(3)\n"
        "for loop.epoch in range(2):\n"
        "  progress.on_epoch_begin(loop)\n"
        "  for step in range(3):\n"
        "    time.sleep(0.15); loop.step += 1; progress.on_step_end(loop)\n"
        "  progress.on_epoch_end(loop, {'loss': 0.5, 'a result with a name of many words ' * 3: 1.0})\n"
        "progress.on_train_end(loop)"
    )
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = job_environment("none", tmp_path, {"COLUMNS": None, "LINES": None, "TERM": "xterm"})
    command = [mpi.python, "-m", "mpistrat", "run", "-n", "1", *words, "bar.py"]
    with subprocess.Popen(
        command, env=env, cwd=tmp_path, stdout=follower, stderr=follower, stdin=subprocess.DEVNULL
    ) as process:
        os.close(follower)
        said = b""
        try:
            while part := os.read(leader, 1 << 16):
                said += part
        except OSError:  # the other end is closed
            pass
    os.close(leader)
    assert process.returncode == 0, said
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said.decode().replace("\x1b[2K", "\n"))
    bars = [line for line in re.split(r"[\r\n]+", text) if "━" in line]
    if words:
        assert not bars and "[0] epoch 1: loss 0.5" in text
        return
    assert re.search(r"epoch 2 ━+ 3/3 0:00:00 \d+ samples/s, loss 0\.5, a", bars[-1]), bars
    assert max(map(len, bars)) == columns


def test_the_launcher_of_another_mpi_is_told_once(mpi, tmp_path, pytestconfig):
    """Before MPI starts, which would leave each rank alone (Open MPI), or end without a word of ours (MPICH)."""
    from tests.launch.launcher_plugin import ENVS

    others = [env for env in pytestconfig.stash[ENVS].all.values() if env.vendor != mpi.vendor]
    if not others or {mpi.vendor, others[0].vendor} != {"MPICH", "Open MPI"}:
        pytest.skip("this run has one MPI: give another --mpi-env")
    (tmp_path / "program.py").write_text("import mpistrat as ms; print(ms.MultiWorkerMirroredStrategy().size)")
    command = [*others[0].command(3), mpi.python, str(tmp_path / "program.py")]
    env = job_environment("none", tmp_path, None)
    reply = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    said = f"expected the mpiexec of {mpi.vendor}, the MPI that mpi4py loads, got that of {others[0].vendor}"
    assert reply.returncode != 0 and reply.stdout.strip() == "" and reply.stderr.count(said) == 1, reply

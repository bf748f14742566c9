"""Another user of the machine can neither hang, end, signal nor read a job, whatever he puts into /dev/shm. Needs root.

The job is one of a user that is not root either, who could remove what others have put there; where only root has a Python that
this MPI's launcher can start, it is root's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket
import subprocess
import time
import traceback
from pathlib import Path

import pytest

from mpistrat.base.programs import program
from mpistrat.comm.monitor.leftovers import mapped_by
from tests.launch.launcher import job_environment

USER, OTHER = 65532, 65533  # ids that no account has
KEY = "00000000deadbeef"
CONNECTIONS = 1500  # more than a process may usually have open

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users"),
    pytest.mark.timeout(150),
]

PROGRAM = """
import os, signal, time
import numpy as np
import mpistrat as ms
strategy = ms.MultiWorkerMirroredStrategy()
with strategy.scope():
    w = ms.Variable(np.zeros(3), name="w", aggregation=ms.VariableAggregation.SUM)
checkpoints = ms.train.Checkpoints(strategy, "checkpoints", snapshot_seconds=0.05)
notes = checkpoints.restore_latest() or {"step": 0}
generation = os.environ.get("MPISTRAT_GENERATION", "0")
for step in range(notes["step"] + 1, 101):
    strategy.run(lambda: w.assign_add(np.ones(3)))
    checkpoints.step(step)
    time.sleep(0.05)
    if strategy.rank == 0 and step == 20 and generation == "0":
        print("runs", flush=True)
    if strategy.rank == 1 and step == 60 and generation == "0":
        os.kill(os.getpid(), signal.SIGKILL)
if strategy.rank == 0:
    print("end", w.numpy()[0], flush=True)
"""


@pytest.fixture
def user(mpi):
    """The id of the job's user."""
    can_start = subprocess.run(["test", "-x", os.path.realpath(mpi.python)], user=USER, group=USER, extra_groups=[])
    return USER if can_start.returncode == 0 or "Open MPI" not in mpi.vendor else 0


@pytest.fixture
def job(mpi, user, tmp_path):
    """Start `mpistrat` as that user; the process and its children are killed at the end."""
    os.chown(tmp_path, user, user)
    (tmp_path / "train.py").write_text(PROGRAM)
    started = []

    def run(*words):
        # The files of Python may lie where only root may look.
        as_user = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        as_user += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"] if user else []
        env = job_environment(
            "none", tmp_path, {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
        )
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [*as_user, *program("mpistrat", *words, python=mpi.python)], env=env, cwd=tmp_path, stdout=pipe, stderr=pipe,
            text=True, start_new_session=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield run
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def other_user():
    """Call a function as another user, in a process that stays until the test ends; what it prints is its failure."""
    children = []

    def call(function, *arguments):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                resource.setrlimit(resource.RLIMIT_NOFILE, (2 * CONNECTIONS, 2 * CONNECTIONS))
                os.setgroups([])
                os.setresgid(OTHER, OTHER, OTHER)
                os.setresuid(OTHER, OTHER, OTHER)
                os.umask(0)
                function(*arguments)
                os.write(write, b"done")
            except BaseException:
                os.write(write, traceback.format_exc().encode())
            signal.pause()
        children.append(child)
        os.close(write)
        with open(read, "rb", buffering=0) as answer:
            text = answer.read(1 << 16)
        assert text == b"done", text.decode()

    yield call
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.fixture
def planted(user):
    """The names that the other user takes; they are removed at the end."""
    names = [f"/dev/shm/mpistrat-job-{user}-{KEY}{ending}" for ending in ("", ".lock", ".state", ".s00000000.g0.0.r0")]
    yield names
    for name in names:
        if os.path.isdir(name) and not os.path.islink(name):
            for file in os.listdir(name):
                os.unlink(f"{name}/{file}")
            os.rmdir(name)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)


def finish(process, seconds=60):
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


def folder_with_lock(name, pid):
    """A lock that names a process, where a job of the user would have it, and at the place itself."""
    os.mkdir(name, 0o777)
    for path in (f"{name}/lock", f"{name}.lock"):
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        os.write(file, b"%d\n" % pid)
        fcntl.flock(file, fcntl.LOCK_EX)
        os.set_inheritable(file, True)


PLANTS = {
    "pipe": os.mkfifo,
    "empty file": lambda name: Path(name).touch(),
    "link": lambda name: os.symlink("/dev/zero", name),
    "socket": lambda name: socket.socket(socket.AF_UNIX).bind(name),
}


@pytest.mark.parametrize("what", PLANTS)
def test_names_that_are_taken_neither_hang_nor_end_a_job(job, other_user, planted, what):
    other_user(lambda: [PLANTS[what](name) for name in planted])
    status, out, err = finish(job("run", "-n", "1", "--restarts", "1", "echo", "it runs"))
    assert (status, out) == (0, "it runs\n"), err
    status, out, err = finish(job("resize", "3"))
    assert status == 1 and "name one job: there is none here" in err


def test_a_process_that_somebody_else_names_gets_no_signal(job, other_user, planted, user):
    victim = subprocess.Popen(["sleep", "100"], user=user)
    try:
        other_user(folder_with_lock, planted[0], victim.pid)
        status, _, err = finish(job("resize", "3"))
        assert status == 1 and "name one job: there is none here" in err
        time.sleep(0.2)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def sockets():
    marks = [line.rsplit(b" ", 1)[-1] for line in Path("/proc/net/unix").read_bytes().splitlines()[1:]]
    return {b"\0" + mark[1:] for mark in marks if mark.startswith(b"@") and b"mpistrat" in mark}


def disturb(folder, of_job, memory):
    """Connect to all sockets of the job, and stay; listen under such names; look at and change what is in /dev/shm."""
    kept = []
    for number in range(20):
        kept.append(socket.socket(socket.AF_UNIX))
        kept[-1].bind(b"\0mpistrat%024x" % number)
        kept[-1].listen(0)
    for name in of_job:
        for _ in range(CONNECTIONS // len(of_job)):
            kept.append(socket.socket(socket.AF_UNIX))
            kept[-1].setblocking(False)
            with contextlib.suppress(BlockingIOError):
                kept[-1].connect(name)
    disturb.kept = kept
    for call in (os.listdir, os.rmdir, lambda path: os.rename(path, f"{path}x"), lambda path: os.chmod(path, 0o777)):
        with pytest.raises(PermissionError):
            call(folder)
    for name in ("lock", "state", "new"):
        with pytest.raises(PermissionError):
            os.open(f"{folder}/{name}", os.O_RDWR | os.O_CREAT)
    readable = [path for path in memory if os.access(path, os.R_OK)]
    assert memory and not readable, readable


def memory_of(supervisor):
    """Return the folder of a job, a rank, and the files of /dev/shm that the job's processes have mapped under a name."""
    (lock,) = [path for path in Path("/dev/shm").glob("mpistrat-job-*/lock") if path.read_text() == f"{supervisor}\n"]
    mark = f"MPISTRAT_JOB={lock.parent.name.rpartition('-')[2]}".encode()
    found = {}
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environment.read_bytes().split(b"\0"):
                found[environment.parent.name] = mapped_by(environment.with_name("maps"))
    rank = next(process for process, files in found.items() if any(f"{lock.parent}/s" in file for file in files))
    return lock.parent, rank, sorted(set().union(*found.values()))


def test_a_job_goes_on_whatever_another_user_does(job, other_user, user):
    process = job("run", "-n", "2", "--restarts", "2", "--standby", "train.py")
    assert (line := process.stdout.readline()) == "runs\n", (line, process.stderr.read())
    until = time.monotonic() + 20
    while not any(b"standby" in name for name in sockets()) and time.monotonic() < until:
        time.sleep(0.05)
    folder, rank, memory = memory_of(process.pid)
    other_user(disturb, folder, of_job := sockets(), memory)
    assert any(b"standby" in name for name in of_job) and len(of_job) > 1
    status, out, err = finish(job("top", rank, "--once", "--json", "--seconds", "0.5"), 20)
    assert status == 0 and out.count('"rank"') == 2, err
    status, out, err = finish(process)
    assert status == 0 and out.splitlines()[-1] == "end 200.0", err
    assert err.count("started again from step") == 1 and "Traceback" not in err

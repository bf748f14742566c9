"""Fixtures of the tests in which ranks die."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading

import pytest

from mpistrat.comm import job_files
from tests.launch.launcher import job_environment


class JobFiles:
    """What jobs with restarts leave in /dev/shm: those of some supervisors, as others may run on this machine."""

    def __init__(self):
        self._processes, self._keys, self._ended = set(), set(), threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def watch(self, process):
        """Note the keys of a process's jobs while it lives, and return the process."""
        self._processes.add(process.pid)
        return process

    def _look(self):
        while not self._ended.wait(0.05):
            self._keys |= {job for process, job in job_files.supervisors().items() if process in self._processes}

    def end(self):
        """Return the keys of the jobs that have left files, and look no more."""
        self._ended.set()
        return sorted(self._keys.intersection(job_files.unsupervised()))


@pytest.fixture
def left_files():
    """The files that jobs of the test leave; at its end there must be none."""
    files = JobFiles()
    yield files
    assert not files.end()


@pytest.fixture
def mpistrat_run(mpi, tmp_path, left_files):
    """Run a program by `mpistrat run` to its end; return the ended process, and check its status and what it has left."""

    def run(program, ranks, *options, status=0, limit=60, **env):
        (tmp_path / "train.py").write_text(program)
        words = [mpi.python, "-m", "mpistrat", "run", "-n", str(ranks), *options, "train.py"]
        environment = job_environment("none", tmp_path, {"PATH": "/usr/bin:/bin", **env})
        done = _to_the_end(words, environment, tmp_path, limit, left_files.watch)
        assert done.returncode == status if status >= 0 else done.returncode, done.stderr
        return done

    return run


@pytest.fixture
def to_the_end():
    """The function that runs a command, with an environment, in a folder."""
    return _to_the_end


def _to_the_end(words, environment, folder, limit=60, started=lambda process: None):
    """Run a command, whose process group ends with it. `started` is called with the process."""
    process = subprocess.Popen(
        words, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    started(process)
    try:
        out, err = process.communicate(timeout=limit)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return subprocess.CompletedProcess(words, process.returncode, out, err)

"""Fixtures of the tests in which ranks die."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

import pytest

from mpistrat.comm import job_files
from tests.launch.launcher import job_environment


@pytest.fixture
def mpistrat_run(mpi, tmp_path):
    """Run a program by `mpistrat run` to its end; return the ended process, and check its status and what it has left."""

    def run(program, ranks, *options, status=0, limit=60, **env):
        (tmp_path / "train.py").write_text(program)
        words = [mpi.python, "-m", "mpistrat", "run", "-n", str(ranks), *options, "train.py"]
        environment = job_environment("none", tmp_path, {"PATH": "/usr/bin:/bin", **env})
        before = job_files.unsupervised()
        done = _to_the_end(words, environment, tmp_path, limit)
        assert done.returncode == status if status >= 0 else done.returncode, done.stderr
        assert job_files.unsupervised() == before
        return done

    return run


@pytest.fixture
def to_the_end():
    """The function that runs a command, with an environment, in a folder."""
    return _to_the_end


def _to_the_end(words, environment, folder, limit=60):
    """Run a command, whose process group ends with it."""
    process = subprocess.Popen(
        words, env=environment, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=limit)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return subprocess.CompletedProcess(words, process.returncode, out, err)

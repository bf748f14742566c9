"""What happens to a test on ranks that fails, hangs, dies or is skipped: a report with the rank, and never a stuck run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.launch.launcher import ROOT, launch, mpi_env, with_variable

FILE = """
import os, sys, time
import pytest

def rank():
    from mpi4py import MPI
    return MPI.COMM_WORLD.rank

{body}
"""


@pytest.fixture
def run_file(tmp_path: Path, request):
    """Run a file of tests in a pytest of its own, under the MPI of this interpreter; its text output comes back."""
    try:
        mpi_env(sys.executable)
    except LookupError as error:
        pytest.skip(str(error))

    def run(
        body: str, limit: float = 20, start: dict[str, str] | None = None, words: Sequence[str] = ()
    ) -> str | subprocess.Popen:
        (tmp_path / "test_it.py").write_text(FILE.format(body=body))
        (tmp_path / "pytest.ini").write_text(f"[pytest]\nranks_timeout = {limit}\n")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.launch.launcher_plugin",
            "-rA",
            "-v",
            *words,
            "test_it.py",
        ]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        if start:
            return subprocess.Popen(command, cwd=tmp_path, env={**env, **start}, stdout=subprocess.DEVNULL)
        reply = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150)
        return reply.stdout + reply.stderr

    return run


def test_failures_and_skips_name_their_rank(run_file):
    text = run_file(
        """
@pytest.mark.ranks(2)
def test_one_rank_fails():
    print("words of rank", rank())
    assert rank() == 0, "this rank is wrong"

@pytest.mark.ranks(2)
def test_all_ranks_fail():
    assert rank() == 7

@pytest.mark.ranks(2)
def test_skips():
    pytest.skip("the reason for it")

@pytest.mark.ranks(2)
def test_ranks_disagree():
    if rank() == 1:
        pytest.skip("only here")

@pytest.mark.ranks(2)
@pytest.mark.xfail(reason="known", strict=True)
def test_expected_failure():
    assert rank() < 0

@pytest.fixture
def broken():
    yield
    assert rank() == 1, "left a mess"

@pytest.mark.ranks(2)
def test_teardown(broken):
    pass
"""
    )
    assert "3 failed, 1 passed, 1 skipped, 1 xfailed, 1 error" in text
    assert "AssertionError: this rank is wrong" in text
    assert "- rank 1: A" in text  # the short summary, cut by the width of the terminal
    assert "rank 1 of 2 failed" in text
    assert "words of rank 1" in text
    assert "rank 1 of 2 failed too" in text
    assert "the reason for it" in text
    assert "the ranks do not agree on whether this test runs" in text
    assert "AssertionError: left a mess" in text
    assert "rank 0 of 2 failed" in text


def test_a_hang_shows_all_stacks_and_spares_the_next_test(run_file):
    text = run_file(
        """
def first_place():
    time.sleep(100)

def second_place():
    from mpi4py import MPI
    MPI.COMM_WORLD.Barrier()

@pytest.mark.ranks(2)
def test_hangs():
    first_place() if rank() == 0 else second_place()

@pytest.mark.ranks(2)
def test_next():
    pass
""",
        limit=2,
    )
    assert "1 failed, 1 passed" in text
    assert "a hang: not finished after 2 s; rank 0 in it, rank 1 in it" in text
    assert "in first_place" in text
    assert "in second_place" in text


UNNOTICED = "os.kill(os.getppid(), 19); os._exit(3)"  # its launcher is stopped: MPICH's misses an end now and then


@pytest.mark.parametrize("death", ["os._exit(3)", "os.kill(os.getpid(), 11)", UNNOTICED])
def test_a_death_is_a_failure_and_spares_the_next_test(run_file, death):
    text = run_file(
        f"""
@pytest.mark.ranks(2)
def test_before():
    pass

@pytest.mark.ranks(2)
def test_dies():
    from mpi4py import MPI
    if rank() == 1:
        print("last words", flush=True)
        {death}
    MPI.COMM_WORLD.Barrier()

@pytest.mark.ranks(2)
def test_next():
    pass
"""
    )
    assert "1 failed, 2 passed" in text
    assert "a rank died: mpiexec " in text
    assert "last words" in text


def test_a_failure_that_others_wait_for_is_not_hidden_by_the_wait(run_file, monkeypatch):
    text = run_file(
        """
@pytest.mark.ranks(2)
def test_waits():
    from mpi4py import MPI
    assert rank() == 0, "why the others wait"
    MPI.COMM_WORLD.Barrier()
    MPI.COMM_WORLD.Barrier()
""",
        limit=15,
    )
    assert "1 failed" in text
    assert "why the others wait" in text


def test_a_second_process_runs_tests_without_ranks(run_file):
    """It reports as the first would, and what ends it is a failure of the test that does."""
    body = f"""
def test_passes(tmp_path):
    tmp_path.joinpath("file").write_text("")
    assert os.environ.get("OMP_NUM_THREADS") == {os.environ.get("OMP_NUM_THREADS")!r}

def test_is_elsewhere():
    assert os.getppid() != {os.getpid()} and "launcher_rank" in sys.argv[0]

def test_fails():
    print("words of it")
    assert 1 == 2, "as it should"

def test_skips():
    pytest.skip("the reason for it")

@pytest.mark.xfail(reason="known", strict=True)
def test_expected_failure():
    assert 1 == 2

def test_dies():
    os._exit(3)

def test_next():
    pass
"""
    text = run_file(body, words=["--beside"])
    assert "2 failed, 3 passed, 1 skipped, 1 xfailed" in text
    assert "AssertionError: as it should" in text and "words of it" in text and "the reason for it" in text
    assert "test_dies - a rank died" in text
    assert "rank 0" not in text.split("test_dies - a rank died")[0].split("short test summary")[1]
    again = run_file(body.replace("1 == 2, ", "1 == 1, "), words=["--beside", "--last-failed", "-x"])
    assert "1 failed, 1 passed" in again


def test_ranks_that_do_not_end_are_reported(run_file):
    text = run_file(
        """
@pytest.mark.ranks(1)
def test_leaves_a_bad_exit():
    import atexit
    atexit.register(os._exit, 5)
"""
    )
    assert "but then mpiexec ended with status 5" in text


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGTERM, []), (signal.SIGKILL, []), (signal.SIGINT, ["--beside"])]
)
def test_ranks_end_with_the_pytest_that_started_them(run_file, tmp_path, number, words):
    mark = "" if words else "@pytest.mark.ranks(2)"
    process = run_file(
        f"""
{mark}
def test_writes_then_waits():
    open(f"{{rank()}}.here", "w").close()
    if {bool(words)}:
        open("1.here", "w").close()
    time.sleep(100)
""",
        start={"MPISTRAT_TEST_RUN": tmp_path.name},
        words=words,
    )
    until = time.monotonic() + 60
    while not all((tmp_path / f"{rank}.here").exists() for rank in range(2)):
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(number)
    process.wait(10)
    while with_variable(f"MPISTRAT_TEST_RUN={tmp_path.name}"):
        assert time.monotonic() < until + 20
        time.sleep(0.05)


def test_launch_runs_a_script_on_ranks(mpi):
    result = launch("from mpi4py import MPI\nprint('rank', MPI.COMM_WORLD.rank, 'of', MPI.COMM_WORLD.size)", 2, mpi)
    assert result.returncode == 0
    assert result.out == ["rank 0 of 2\n", "rank 1 of 2\n"]
    assert not result.leftover


def test_launch_kills_what_does_not_end(mpi):
    result = launch("from mpi4py import MPI\nimport time\ntime.sleep(100)", 2, mpi, timeout=4)
    assert result.timed_out
    assert result.returncode is None
    assert all("line 3 in <module>" in err for err in result.err)


def test_mpi_run_takes_arguments_and_variables(mpi_run):
    program = "import os; print(os.environ['X'], os.environ.get('OMP_NUM_THREADS')); raise SystemExit(4)"
    result = mpi_run(["-c", program], 2, env={"X": "y", "OMP_NUM_THREADS": None})
    assert result.out == ["y None\n"] * 2
    assert result.returncode == 4


def test_a_ctrl_c_reaches_the_job(mpi_run):
    program = "from mpi4py import MPI\nimport time\nprint('ready')\ntime.sleep(100)"
    result = mpi_run(program, 2, timeout=20, interrupt_at="ready")
    assert not result.timed_out
    assert result.returncode != 0

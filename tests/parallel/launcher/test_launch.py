"""ms.launch: a function on ranks that it starts, and what they return, in a process that is no rank."""

import os
import subprocess
import sys
import textwrap
import time

import pytest

from tests.launch.launcher import ROOT


def run(mpi, program, timeout=60):
    text = textwrap.dedent(program)
    return subprocess.run([mpi.python, "-c", text], capture_output=True, text=True, timeout=timeout, cwd=ROOT / "tests")


def test_what_ranks_return(mpi):
    result = run(
        mpi,
        """
        import numpy as np
        import mpistrat as ms

        offset = 10  # of this program

        def train(steps, scale=1.0):
            with ms.MultiWorkerMirroredStrategy() as strategy:
                print("here is rank", strategy.rank)
                with strategy.scope():
                    w = ms.Variable(np.zeros(2), name="w")
                    optimizer = ms.optimizers.SGD(scale)
                for _ in range(steps):
                    strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), w)]))
                return strategy.rank + offset, w.numpy()

        for ranks in (1, 3):
            values = ms.launch(train, (2,), {"scale": 0.5}, ranks=ranks)
            assert [rank for rank, _ in values] == list(range(10, 10 + ranks)), values
            assert all(np.array_equal(w, [-1.0 * ranks] * 2) for _, w in values), values
        print("all well")
        """,
    )
    assert result.returncode == 0, result
    assert result.stdout.count("here is rank") == 4, result
    assert "all well" in result.stdout


@pytest.mark.parametrize("options", ["", ", restarts=1"])
def test_nothing_is_imported_from_the_working_directory(mpi, tmp_path, options):
    """The program lies elsewhere, so the working directory is not on its path."""
    for name in ("json", "ctypes", "runpy", "mpi4py", "numpy", "cloudpickle", "mpistrat"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path)!r} + '/ran_{name}', 'w')\nraise SystemExit(77)\n")
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "train.py").write_text(
        "import mpistrat as ms\n"
        "def rank():\n"
        "    with ms.MultiWorkerMirroredStrategy() as strategy:\n"
        "        return strategy.rank\n"
        f"with ms.MultiProcessRunner(rank, ranks=2{options}) as runner:\n"
        "    print([result.return_value for result in runner.join(60)])\n"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(
        [mpi.python, "programs/train.py"], cwd=tmp_path, env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert result.stdout == "[0, 1]\n" and not list(tmp_path.glob("ran_*")), result


@pytest.mark.parametrize(("ranks", "error"), [(0, "ValueError"), (-1, "ValueError"), (1.5, "TypeError")])
def test_a_number_of_ranks_that_cannot_be(mpi, ranks, error):
    result = run(mpi, f"import mpistrat as ms\nms.launch(print, ranks={ranks})")
    assert result.returncode == 1 and result.stderr.splitlines()[-1].startswith(f"{error}: ms.launch: ranks: expected")


def test_a_rank_that_fails_is_told_with_its_traceback(mpi):
    result = run(
        mpi,
        """
        import mpistrat as ms

        def wrong():
            with ms.MultiWorkerMirroredStrategy() as strategy:
                strategy.barrier()
                if strategy.rank:
                    raise KeyError("mine")
                strategy.barrier()

        try:
            ms.launch(wrong, ranks=2)
        except ms.errors.MpistratError as error:
            assert "rank 1 failed" in str(error) and "KeyError: 'mine'" in str(error), error
            print("told")
        try:
            ms.launch(lambda: (_ for _ in ()), ranks=1)
        except ms.errors.MpistratError as error:
            assert "pickle" in str(error), error
            print("told")
        import os, signal
        try:
            ms.launch(lambda: os.kill(os.getpid(), signal.SIGKILL), ranks=2)
        except ms.errors.MpistratError as error:
            assert "expected all ranks to return" in str(error), error
            print("told")
        """,
    )
    assert result.stdout.count("told") == 3, result


def test_a_time_limit_ends_all_ranks(mpi):
    began = time.monotonic()
    result = run(
        mpi,
        """
        import time
        import mpistrat as ms

        try:
            ms.launch(time.sleep, (300,), ranks=2, timeout=4)
        except TimeoutError as error:
            print(error)
        """,
    )
    assert "within 4 s, got ranks 0, 1 that still ran; they were ended" in result.stdout, result
    assert time.monotonic() - began < 30
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert "mpistrat.launcher.launched" not in left


@pytest.mark.ranks(2)
def test_a_rank_is_told_that_it_is_one():
    import mpistrat as ms

    with pytest.raises(ValueError, match="expected to start the ranks, got one of 2 processes"):
        ms.launch(sys.exit, ranks=2)

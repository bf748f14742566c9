"""`mpistrat shadow`: one process, then several ranks."""

import os
import subprocess
import sys

import pytest

from mpistrat.cli.main import main
from tests.launch.launcher import ROOT

PROGRAM = """
import sys
import numpy as np
import mpistrat as ms

batch, wrong = int(sys.argv[1]), sys.argv[2:]
x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
strategy = ms.MultiWorkerMirroredStrategy()
with strategy.scope():
    w = ms.Variable(np.ones(3, np.float32), name="w")
    optimizer = ms.optimizers.SGD(0.1)

def step(x):
    total = batch if wrong else batch * strategy.size
    optimizer.apply_gradients([(x.T @ (x @ w.array) / total, w)])

for number in range(5):
    low = number * batch * strategy.size + strategy.rank * batch
    strategy.run(step, args=(x[low : low + batch],))
"""


def shadowed(tmp_path, program, *words):
    """Run the command, and return its end and what it printed."""
    (tmp_path / "train.py").write_text(program)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI"))}
    done = subprocess.run(
        [sys.executable, "-m", "mpistrat", "shadow", *words], cwd=tmp_path, env=env | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_program_that_fails_on_ranks_is_not_said_to_be_equal(tmp_path):
    failing = PROGRAM.replace("for number", "if strategy.size > 1: raise ValueError('only here')\nfor number")
    status, said = shadowed(tmp_path, failing, "-n", "2", "--steps", "3", "train.py", "4")
    assert status == 1 and "only here" in said and "equal the recorded run" not in said


@pytest.mark.parametrize("wrong", [[], ["wrong"]])
def test_a_program_whose_batches_are_those_of_a_rank(wrong, tmp_path):
    words = ["-n", "2", "--reference", " ".join(["8", *wrong]), "--steps", "3", "train.py", "4", *wrong]
    status, said = shadowed(tmp_path, PROGRAM, *words)
    if wrong:
        assert status == 1, said
        assert "DifferenceError: ms.shadow: step 1, ranks 0, 1, gradient of w: differs by" in said
        assert "Each rank divides by its own rows, not those of the global batch" in said
    else:
        assert status == 0, said
        assert "mpistrat shadow: 3 steps on 2 ranks equal the recorded run on one process: 9 tensors compared" in said


def test_an_error_of_shadow_has_no_traceback(tmp_path):
    two = PROGRAM.replace("WorkerMirroredStrategy()", "WorkerMirroredStrategy(devices=['cpu:0', 'cpu:1'])")
    status, said = shadowed(tmp_path, two, "-n", "2", "train.py", "4")
    assert status == 1 and "expected one replica on each rank, got 2 on 1 ranks" in said and "Traceback" not in said, (
        said
    )


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["true"], "program: expected a program of Python"),
        (["none.py"], "mpistrat shadow: program: expected a file that is there, got none.py"),
        ([], "mpistrat shadow: program: expected a program, or -m and a module, got none"),
    ],
)
def test_wrong_use(words, text, capsys):
    assert main(["shadow", *words]) == 2
    assert text in capsys.readouterr().err

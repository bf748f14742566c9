"""Jobs with an evaluator of its own, as `mpistrat run --evaluator` starts them: stopped, gone on, and with a rank that dies."""

import json
import re

import pytest

PROGRAM = """
import os, signal, sys, time
import numpy as np
import mpistrat as ms
from mpistrat.estimator import Estimator, EstimatorSpec, EvalSpec, RunConfig, TrainSpec, train_and_evaluate

FOLDER, ACT, STEP = sys.argv[1], sys.argv[2], int(sys.argv[3])

def model_fn(features, labels, mode):
    w = ms.Variable(np.zeros(3), name="w")
    optimizer = ms.optimizers.SGD(0.1)
    loss = ms.train.MeanSquaredError("loss")

    def test_step(x, y):
        loss.update_state(y, x @ w.array)

    def train_step(x, y):
        time.sleep(0.01)
        test_step(x, y)
        optimizer.apply_gradients([(2 * (x @ w.array - y) @ x / ms.global_batch_size(), w)])

    return EstimatorSpec(mode, train_step, test_step, optimizer=optimizer, metrics=[loss])

def data():
    x = np.random.default_rng(0).normal(size=(60, 3))
    return ms.data.from_arrays((x, x @ np.arange(3.0))).batch(12).repeat()

class Act(ms.train.Callback):
    def on_step_end(self, loop):
        if loop.step == STEP and loop.tells:
            if ACT == "stop":
                os.kill(os.getpid(), signal.SIGUSR1)
            elif ACT == "kill":
                os.kill(os.getpid(), signal.SIGKILL)

ms.catch_stop_signals()
estimator = Estimator(model_fn, config=RunConfig(FOLDER, save_checkpoints_steps=10))
results, _ = train_and_evaluate(
    estimator,
    TrainSpec(data, max_steps=100, hooks=[Act()]),
    EvalSpec(data, steps=5, start_delay_secs=0, throttle_secs=0),
)
stopped = estimator.strategy.should_stop()
if estimator.split.is_evaluator:
    print("evaluated", results["global_step"] if results else None, flush=True)
estimator.close()
sys.exit(ms.RESTART_EXIT_CODE if stopped else 0)
"""


def start(mpi_run, folder, act, step=0):
    return mpi_run(
        [str(folder / "train.py"), str(folder / "run"), act, str(step)], 3, timeout=100, env={"MPISTRAT_EVALUATOR": "1"}
    )


@pytest.fixture
def program(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def test_stopped_and_gone_on(mpi_run, program):
    """The trainers save and end, and the evaluator with them; the same command goes on, and evaluates the last checkpoint."""
    result = start(mpi_run, program, "stop", 35)
    assert result.returncode == 42, result
    assert json.loads((program / "run/ended.json").read_text())["finished"] is False
    result = start(mpi_run, program, "go on")
    assert result.returncode == 0, result
    assert "evaluated 100" in result.stdout, result
    lines = [json.loads(line) for line in (program / "run/eval/results.jsonl").read_text().splitlines()]
    assert lines[-1]["global_step"] == 100 and lines[-1]["loss"] < 1e-3


def test_a_trainer_that_dies_ends_the_job(mpi_run, program):
    result = start(mpi_run, program, "kill", 35)
    assert result.returncode not in (0, None), result
    assert re.search(
        "was ended by SIGKILL|ended without a message", result.stderr
    )  # as what the launcher leaves of it says

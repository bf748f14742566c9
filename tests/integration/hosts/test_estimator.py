"""An Estimator whose workers are on two hosts, and its evaluator on one of them."""

import json
import time

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.estimator import Estimator, EvalSpec, RunConfig, TrainSpec, train_and_evaluate
from tests.harness.linear_trainer import dataset, held_out, model_fn, rows


class Slow(ms.train.Callback):
    """Takes time for each step, so that the evaluator sees several checkpoints."""

    def on_step_end(self, loop):
        time.sleep(0.03)


@pytest.mark.hosts(2, ranks_per_host=2)
@pytest.mark.parametrize("strategy", ["multi_worker_mirrored", "parameter_server"])
def test_the_evaluators_numbers_are_those_of_the_files(mpi_tmp_path, monkeypatch, strategy):
    from mpi4py import MPI

    monkeypatch.setenv("MPISTRAT_EVALUATOR", "1")
    monkeypatch.setenv("MPISTRAT_STRATEGY", strategy)
    of = Estimator(model_fn, config=RunConfig(mpi_tmp_path, save_checkpoints_steps=5, keep_checkpoint_max=0))
    train = TrainSpec(lambda: dataset().repeat(), max_steps=40, hooks=[Slow()])
    results, _ = train_and_evaluate(of, train, EvalSpec(held_out, steps=None, start_delay_secs=0, throttle_secs=0))
    of.close()
    if MPI.COMM_WORLD.rank < 3:
        assert results is None and of.strategy.size == 3
        return
    found = [json.loads(line) for line in (mpi_tmp_path / "eval" / "results.jsonl").read_text().splitlines()]
    assert found[-1] == results and results["global_step"] == 40 and len(found) > 1
    x, y = rows()
    for line in found:
        with h5py.File(of.checkpoints.path(line["global_step"])) as file:
            assert line["loss"] == pytest.approx(np.mean((x @ file["variables/w"][()] - y) ** 2), rel=1e-12)

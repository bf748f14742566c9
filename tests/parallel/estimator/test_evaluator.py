"""The evaluator: a rank of its own that follows checkpoints, with the numbers of an evaluation in place, and stops nobody."""

import json
import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.estimator import Estimator, EvalSpec, RunConfig, TrainSpec, train_and_evaluate
from tests.harness.linear_trainer import dataset, held_out, model_fn, rows

pytestmark = pytest.mark.ranks(2, 3)


class Slow(ms.train.Callback):
    """Takes time for each step, so that the evaluator sees several checkpoints."""

    def on_step_end(self, loop):
        time.sleep(0.03)


def train_spec(max_steps=40, *hooks):
    return TrainSpec(lambda: dataset().repeat(), max_steps=max_steps, hooks=[Slow(), *hooks])


def eval_spec(**settings):
    settings = {"steps": None, "start_delay_secs": 0, "throttle_secs": 0, **settings}
    return EvalSpec(settings.pop("input_fn", held_out), **settings)


def estimator(folder, **settings):
    config = RunConfig(folder, save_checkpoints_steps=5, keep_checkpoint_max=0, **settings)
    return Estimator(model_fn, config=config)


def lines(folder, name="eval"):
    return [json.loads(line) for line in (folder / name / "results.jsonl").read_text().splitlines()]


def in_place(path):
    """The results of a checkpoint, by arithmetic."""
    import h5py

    x, y = rows()
    with h5py.File(path) as file:
        return np.mean((x @ file["variables/w"][()] - y) ** 2)


def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def evaluates():
    return world().rank == world().size - 1


@pytest.fixture
def with_evaluator(monkeypatch):
    monkeypatch.setenv("MPISTRAT_EVALUATOR", "1")


@pytest.mark.parametrize("strategy", ["mirrored", "parameter_server"])
def test_its_numbers_are_those_of_an_evaluation_in_place(with_evaluator, mpi_tmp_path, monkeypatch, strategy):
    if strategy == "parameter_server" and world().size < 3:
        pytest.skip("a worker, a server and the evaluator are three")
    monkeypatch.setenv("MPISTRAT_STRATEGY", strategy)
    of = estimator(mpi_tmp_path)
    results, _ = train_and_evaluate(of, train_spec(), eval_spec(name="held_out"))
    assert type(of.strategy).__name__ == ("OneDeviceStrategy" if evaluates() else {
        "mirrored": "MirroredStrategy", "parameter_server": "ParameterServerStrategy"
    }[strategy])  # fmt: skip
    of.close()
    assert (results is not None) == evaluates()
    if evaluates():
        found = lines(mpi_tmp_path, "eval_held_out")
        assert found[-1] == results and results["global_step"] == 40 and len(found) > 1
        for line in found:
            assert line["loss"] == pytest.approx(in_place(of.checkpoints.path(line["global_step"])), rel=1e-12)


def test_it_ends_after_an_early_stop_and_evaluates_the_last_checkpoint(with_evaluator, mpi_tmp_path):
    pytest.importorskip("safetensors")

    class Stop(ms.train.Callback):
        def on_epoch_end(self, loop, logs):
            loop.stop_training = loop.step == 10

    of = estimator(mpi_tmp_path)
    results, exports = train_and_evaluate(
        of, train_spec(1000, Stop()), eval_spec(throttle_secs=1000, exporters=[ms.estimator.FinalExporter()])
    )
    of.close()
    if evaluates():
        assert results["global_step"] == 10
        assert [path.name for path in exports] == ["step-0000000010.safetensors"]


def test_its_failure_stops_nobody(with_evaluator, mpi_tmp_path, caplog):
    def broken():
        raise RuntimeError("no such file of held-out rows")

    of = estimator(mpi_tmp_path)
    assert train_and_evaluate(of, train_spec(10), eval_spec(input_fn=broken)) == (None, [])
    of.close()
    if evaluates():
        assert "no such file of held-out rows" in caplog.text
    else:
        assert of.checkpoints.steps() == [5, 10]


def test_a_checkpoint_that_is_removed_before_it_is_read_is_no_error(with_evaluator, mpi_tmp_path, monkeypatch, caplog):
    latest, caught = ms.train.Checkpoints.latest, []

    def removed_once(checkpoints):
        found = latest(checkpoints)
        if found is None or caught or not evaluates():
            return found
        caught.append(checkpoints.path(4))
        return caught[0]

    monkeypatch.setattr(ms.train.Checkpoints, "latest", removed_once)
    monkeypatch.setenv("MPISTRAT_LOG", "info")
    of = estimator(mpi_tmp_path)
    results, _ = train_and_evaluate(of, train_spec(10), eval_spec())
    of.close()
    if evaluates():
        assert results["global_step"] == 10
        assert f"{caught[0]} was removed before it was evaluated" in caplog.text
        assert "Traceback" not in caplog.text


def test_a_task_of_tf_config_is_the_role(monkeypatch, mpi_tmp_path):
    comm = world()
    number = comm.size - 1
    task = {"type": "evaluator", "index": 0} if comm.rank == 0 else {"type": "worker", "index": comm.rank - 1}
    cluster = {"worker": [f"here:{2222 + i}" for i in range(number)]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
    of = estimator(mpi_tmp_path)
    results, _ = train_and_evaluate(of, train_spec(10), eval_spec())
    assert of.strategy.size == (1 if comm.rank == 0 else number)
    of.close()
    assert (results is not None) == (comm.rank == 0)
    assert results is None or results["global_step"] == 10


def test_two_evaluators_are_refused(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"task": {"type": "evaluator", "index": 0}}))
    with pytest.raises(
        ms.errors.ClusterError, match=r"split_evaluator: comm: expected one evaluator at most, got ranks 0, 1"
    ):
        ms.estimator.split_evaluator()


def test_a_strategy_over_all_ranks_would_train_on_the_evaluator(with_evaluator):
    with pytest.raises(ms.errors.ClusterError, match=r"the communicator of the ranks that train"):
        ms.MultiWorkerMirroredStrategy()


def test_a_strategy_that_is_made_already_has_no_evaluator(with_evaluator, mpi_tmp_path):
    from mpi4py import MPI

    with ms.OneDeviceStrategy(comm=MPI.COMM_SELF) as strategy:
        of = estimator(mpi_tmp_path, train_distribute=strategy, eval_distribute=strategy)
        with pytest.raises(ValueError, match=r"expected a function of the communicator, in a job with an evaluator"):
            of.strategy  # noqa: B018

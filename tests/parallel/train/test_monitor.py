"""Monitor: one rank writes results and the page, which names ranks, hosts, the slow one and warnings of all."""

import json
import logging
import re
import shutil
import sys
import time

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.linear_trainer import dataset, trainer


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.ranks(1, 2, 3)
def test_a_run_by_fit(mpi_tmp_path):
    class Late(ms.train.Callback):
        def on_step_end(self, loop):
            if loop.epoch == 0:  # a busy machine takes too long for a second look at the times
                loop.strategy.barrier()
                time.sleep(0.1 * (loop.strategy.rank == 1))  # longer than it stops another rank in each step

        def on_epoch_end(self, loop, logs):
            if loop.epoch == 1 and loop.strategy.rank == loop.strategy.size - 1:
                logging.getLogger("mpistrat").warning("<strange> & rare")

    folder = mpi_tmp_path / "run"
    with ms.MultiWorkerMirroredStrategy() as strategy:
        watch = ms.monitor(folder, config={"rate": 0.1}, tensorboard=False, progress=False)
        work, _ = trainer(strategy, callbacks=[Late(), watch])
        data = strategy.distribute_dataset(dataset())
        history = work.fit(data, 4, validation_data=strategy.distribute_dataset(dataset(shuffle=False)))
        strategy.barrier()
        found, page = lines(folder), (folder / "run.html").read_text()
        assert [line["val_loss"] for line in found] == history["val_loss"]
        assert all(line["samples_per_second"] > 0 for line in found) and found[-1]["step"] == 20
        assert "ended: 4 epochs, 20 steps" in page and '<th scope="row">rate</th><td>0.1</td>' in page
        assert page.count("&lt;strange&gt; &amp; rare") == 1 and "<strange>" not in page
        shares = page.partition("Shares of time by rank</caption>")[2].partition("</table>")[0]
        assert re.findall(r'<th scope="row">(\d+)<', shares) == [str(rank) for rank in range(strategy.size)]
        assert "src=" not in page and "http" not in page, "nothing beside it"
        hosts = page.partition("Hosts</caption>")[2].partition("</table>")[0]
        peaks = [int(peak) for peak in re.findall(r"(\d+) MB \(rank \d+\)", hosts)]
        assert peaks and all(20 < peak < 4000 for peak in peaks), "a rank with NumPy"
        assert '<a href="./metrics.jsonl">metrics.jsonl</a>' in page
        if strategy.size > 1:
            table = page.partition("Stragglers</caption>")[2].partition("</table>")[0]
            rows = re.findall(r"rank (\d+) on .*?>(\d+) of \d+</td>.*?>([\d.e-]+) s<", table)
            costs = {int(rank): float(cost) for rank, _, cost in rows}  # rank 0 too, where the machine has stopped it
            assert list(costs.values()) == sorted(costs.values(), reverse=True)
            assert costs[1] > 0.01, "what one sleep takes"
        assert watch.record.epochs == strategy.broadcast_object(watch.record.epochs)


@pytest.mark.ranks(2)
def test_a_run_beside_its_plan(mpi_tmp_path):
    plan = mpi_tmp_path / "plan.json"
    with ms.MultiWorkerMirroredStrategy() as strategy:
        for nodes, ranks in ((1, 2), (8, 2)):
            if strategy.rank == 0:
                plan.write_text(json.dumps({"steps": [{"nodes": nodes, "ranks": ranks, "step": [1e-3, 0.25]}]}))
            strategy.barrier()
            watch = ms.monitor(mpi_tmp_path / f"run-{nodes}", tensorboard=False, progress=False, plan=plan)
            work, _ = trainer(strategy, callbacks=[watch])
            work.fit(strategy.distribute_dataset(dataset()), 2)
            strategy.barrier()
        page = (mpi_tmp_path / "run-1" / "run.html").read_text()
        assert re.search(r"[\d.]+ [mµ]?s in epoch 2; 1.0 ms to 250.0 ms planned for 1 node with 2 ranks", page)
        assert "nothing planned for 1 node with 2 ranks" in (mpi_tmp_path / "run-8" / "run.html").read_text()


@pytest.mark.ranks(1, 2)
def test_a_loop_of_ones_own(mpi_tmp_path):
    pytest.importorskip("tensorboardX")
    folder = mpi_tmp_path / "run"
    with ms.MultiWorkerMirroredStrategy() as strategy, ms.monitor(folder, strategy, progress=False) as run:
        for epoch in range(2):
            for _ in range(3):
                run.step()
            run.histogram("weights", np.arange(10.0))
            run.text("note", "early")
            run.image("digit", np.zeros((8, 8)))
            run.scalar("norm", 3.0)
            run.epoch({"loss": 1.0 / (epoch + 1)})
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    assert [(line["epoch"], line["step"], line["loss"]) for line in lines(folder)] == [(0, 3, 1.0), (1, 6, 0.5)]
    (events,) = (folder / "tensorboard").iterdir()
    data = events.read_bytes()
    assert all(name in data for name in (b"weights", b"note", b"digit", b"norm", b"loss"))


@pytest.mark.ranks(2)
def test_a_run_that_fails_says_so(mpi_tmp_path):
    folder = mpi_tmp_path / "run"
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with pytest.raises(KeyError), ms.monitor(folder, strategy, progress=False, tensorboard=False):
            raise KeyError("weights")
        strategy.barrier()
        assert "ended by KeyError" in (folder / "run.html").read_text()


@pytest.mark.ranks(1, 2)
def test_a_run_that_goes_on_keeps_what_was(mpi_tmp_path):
    def fit(epochs):
        with ms.MultiWorkerMirroredStrategy() as strategy:
            watch = ms.monitor(mpi_tmp_path / "run", progress=False, tensorboard=False)
            checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path / "saved")
            work, _ = trainer(strategy, callbacks=[watch], checkpoints=checkpoints)
            work.fit(strategy.distribute_dataset(dataset()), epochs)
            strategy.barrier()
            return watch.record.epochs

    first, second = fit(2), fit(4)
    assert second[:2] == first and [one["epoch"] for one in second] == [0, 1, 2, 3]
    assert len(lines(mpi_tmp_path / "run")) == 4


@pytest.mark.ranks(2, 3)
def test_workers_of_servers(mpi_tmp_path):
    with ms.ParameterServerStrategy(num_ps=1, max_staleness=0) as strategy:
        watch = ms.monitor(mpi_tmp_path / "run", progress=False, tensorboard=False)
        work, _ = trainer(strategy, 0.05, callbacks=[watch, ms.train.Timeline(mpi_tmp_path / "trace.json.gz")])
        work.fit(strategy.distribute_dataset(dataset()), 2)
        strategy.barrier()
        assert len(lines(mpi_tmp_path / "run")) == 2 and (mpi_tmp_path / "trace.json.gz").exists()


class Tracker:
    """Stands for the module mlflow, whose server is not there for some calls."""

    def __init__(self):
        self.metrics, self.calls, self.ended = {}, 0, None

    def start_run(self, run_name):
        pass

    def log_params(self, params):
        pass

    def log_metrics(self, values, step):
        self.calls += 1
        if self.calls in (2, 3):
            raise ConnectionError("connection refused")
        self.metrics[step] = values["loss"]

    def log_artifact(self, path):
        raise ConnectionError("connection refused")

    def end_run(self, status):
        self.ended = status


@pytest.mark.ranks(1, 2)
def test_a_tracker_that_fails_does_not_end_training(mpi_tmp_path, monkeypatch, caplog):
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, "mlflow", tracker)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        watch = ms.monitor(mpi_tmp_path / "run", tensorboard=False, progress=False, mlflow=True)
        work, _ = trainer(strategy, callbacks=[watch])
        history = work.fit(strategy.distribute_dataset(dataset()), 4)
        told = [record.getMessage() for record in caplog.records if "MLflow" in record.getMessage()]
        if strategy.rank == 0:
            assert tracker.metrics == {0: history["loss"][0], 3: history["loss"][3]}
            assert tracker.ended == "FINISHED"
            assert len(told) == 1 and "ConnectionError: connection refused; training continues" in told[0]
        else:
            assert not told and not tracker.calls


@pytest.mark.ranks(1)
def test_a_page_that_cannot_be_written_does_not_end_training(mpi_tmp_path, caplog):
    class Gone(ms.train.Callback):
        def on_epoch_end(self, loop, logs):
            if loop.epoch == 1:
                shutil.rmtree(mpi_tmp_path / "run")
                (mpi_tmp_path / "run").write_text("a file where the folder was")

    with ms.OneDeviceStrategy() as strategy:
        watch = ms.monitor(mpi_tmp_path / "run", tensorboard=False, progress=False)
        work, _ = trainer(
            strategy, callbacks=[Gone(), watch, ms.train.Timeline(mpi_tmp_path / "run" / "trace.gz", 10**6)]
        )
        assert len(work.fit(strategy.distribute_dataset(dataset()), 4)["loss"]) == 4
        for what in ("JSONLogger", "the page in", "Timeline"):
            assert sum(what in record.getMessage() for record in caplog.records) == 1


@pytest.mark.ranks(1)
def test_what_is_missing_is_named(mpi_tmp_path):
    with pytest.raises(ms.errors.MissingDependencyError, match="pip install mlflow"):
        ms.monitor(mpi_tmp_path, mlflow=True)
    with pytest.raises(ms.errors.ContextError, match=r"Monitor.step: expected a started run, got no run"):
        ms.monitor(mpi_tmp_path).step()
    with (
        ms.OneDeviceStrategy() as strategy,
        ms.monitor(mpi_tmp_path, strategy, tensorboard=False) as run,
        pytest.raises(ms.errors.MissingDependencyError, match="expected TensorBoard's files, got no files"),
    ):
        run.text("note", "early")


@pytest.mark.ranks(1, 2)
def test_a_trace_after_a_step(mpi_tmp_path):
    path = mpi_tmp_path / "trace.json.gz"
    with ms.MultiWorkerMirroredStrategy() as strategy:
        work, _ = trainer(strategy, callbacks=[ms.train.Timeline(path, step=7)])
        data = strategy.distribute_dataset(dataset())
        work.fit(data, 1)
        strategy.barrier()
        before = path.stat().st_mtime_ns
        strategy.barrier()
        work.fit(data, 3)
        strategy.barrier()
        assert path.stat().st_mtime_ns > before

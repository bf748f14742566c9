"""EarlyStopping ends with the weights of the best epoch, whatever ends training, and after a restart."""

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.interruptions import Interrupt, Stop
from tests.harness.linear_trainer import dataset, trainer

LOSSES = [5.0, 3.0, 4.0, 2.0, 6.0, 7.0, 8.0]  # the best one is that of epoch 3


class Losses(ms.train.Callback):
    """Results as given, and a record of the weights after each epoch."""

    def __init__(self, losses):
        self.losses, self.weights = losses, {}

    def on_epoch_end(self, loop, logs):
        logs["given"] = self.losses[loop.epoch]
        (w,) = (one for one in loop.strategy.extended.variables if one.name == "w")
        self.weights[loop.epoch] = w.numpy()


def run(make, folder=None, losses=LOSSES, stop=None, epochs=7, patience=2):
    with make() as strategy:
        record, best = Losses(losses), ms.train.EarlyStopping("given", patience=patience, restore_best_weights=True)
        checkpoints = None if folder is None else ms.train.Checkpoints(strategy, folder)
        work, w = trainer(strategy, callbacks=[record, best, Stop(stop)], checkpoints=checkpoints)
        work.fit(strategy.distribute_dataset(dataset()), epochs)
        return work.loop.epoch, best.best_epoch, record.weights, w.numpy()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("in_files", [False, True])
def test_the_best_weights_are_there_at_the_end(in_files, mpi_tmp_path):
    folder = mpi_tmp_path if in_files else None
    for number, (patience, last) in enumerate([(2, 5), (9, 6)]):  # it stops early, and it does not
        here = folder and folder / str(number)
        epoch, best, weights, found = run(ms.MultiWorkerMirroredStrategy, here, patience=patience)
        assert (epoch, best) == (last, 3)
        np.testing.assert_array_equal(found, weights[3])
        assert not np.array_equal(weights[3], weights[last])
    if in_files:
        with pytest.raises(Interrupt):
            run(ms.MultiWorkerMirroredStrategy, folder / "cut", stop=23)  # within epoch 4
        epoch, best, weights, found = run(ms.MultiWorkerMirroredStrategy, folder / "cut")
        assert (epoch, best, sorted(weights)[-2:]) == (5, 3, [4, 5])  # the newest checkpoint may be that of epoch 2
        expected = run(ms.MultiWorkerMirroredStrategy)[3]
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        found = run(ms.MultiWorkerMirroredStrategy, folder / "cut")[3]  # a run that has ended
        np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.ranks(2, 3)
def test_servers_and_local_steps_and_shards(mpi_tmp_path):
    for here in (None, mpi_tmp_path):
        _, best, weights, found = run(lambda: ms.ParameterServerStrategy(num_ps=1, max_staleness=0), here)
        assert best == 3
        np.testing.assert_array_equal(found, weights[3])
    # the first epoch is the best one: its weights are those of the next outer step
    for patience, epochs in ((1, 5), (9, 5)):
        made = run(lambda: ms.MultiWorkerMirroredStrategy(local_steps=5), None, [1.0, *LOSSES], None, epochs, patience)
        assert made[1] == 0 and not np.array_equal(made[3], np.zeros(3))

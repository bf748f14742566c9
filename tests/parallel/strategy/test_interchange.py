"""Files go from any strategy to any other and back, bit for bit, and plain h5py reads them."""

import h5py
import numpy as np
import pytest

import mpistrat as ms

SHAPE = (37, 129)


def mirrored():
    return ms.MultiWorkerMirroredStrategy()


def central():
    return ms.CentralStorageStrategy(["cpu:0", "cpu:1"])


def two_devices():
    return ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])


def servers():
    return ms.ParameterServerStrategy(num_ps=1)


def sharded_servers():
    return ms.ParameterServerStrategy(num_ps=2, variable_partitioner=ms.partitioners.FixedShardsPartitioner(3))


def waiting_servers():
    return ms.ParameterServerStrategy(num_ps=1, max_staleness=0)


KINDS = (mirrored, central, two_devices, servers, sharded_servers, waiting_servers)


class Model:
    """Variables of several dtypes and an optimizer with slots."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.w = ms.Variable(np.zeros(SHAPE), name="dense/w")
            self.b = ms.Variable(np.zeros(5000, np.float32), name="b")
            self.n = ms.Variable(np.zeros((), np.int64), name="n", trainable=False)
            self.optimizer = ms.optimizers.Adam(0.1)

    def train(self):
        rng = np.random.default_rng(3)
        gradients = [rng.normal(size=SHAPE), rng.normal(size=5000).astype(np.float32)]

        def step():
            pairs = [(gradient / 3, variable) for gradient, variable in zip(gradients, (self.w, self.b), strict=True)]
            self.optimizer.apply_gradients(pairs)

        served = isinstance(self.strategy, ms.ParameterServerStrategy)
        if not served or not self.strategy.is_server:
            for _ in range(2):
                self.strategy.run(step)
            if served:
                self.strategy.flush()
            if self.strategy.rank == 0 or not served:
                self.n.assign(7)
        self.strategy.barrier()


def contents(path):
    """All arrays and what is known of the optimizers."""
    found = {}
    with h5py.File(path) as file:
        for index, group in file["optimizers"].items():
            found[index, "iterations"] = int(group.attrs["iterations"])

        def note(key, item):
            if isinstance(item, h5py.Dataset) and key not in ("digests", "extra"):
                found[key] = item[()].tobytes(), item.dtype, item.shape

        file.visititems(note)
    return found


def elsewhere(kind, path, copy):
    with kind() as strategy:
        Model(strategy)
        extra = strategy.restore(path)
        strategy.begin_save(copy, extra).wait()
        return extra


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_from_one_strategy_to_all_others(kind, mpi_tmp_path):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    path = mpi_tmp_path / "x.h5"
    with kind() as strategy:
        Model(strategy).train()
        strategy.save(path, {"epoch": 4})
    expected = contents(path)
    assert len(expected) == 3 + 2 * 2 + 1
    assert np.frombuffer(expected["variables/dense%2Fw"][0]).any()
    for other in KINDS:
        copy = mpi_tmp_path / f"{other.__name__}.h5"
        assert elsewhere(other, path, copy) == {"epoch": 4}
        assert contents(copy) == expected, other
    copy = mpi_tmp_path / "alone.h5"
    if world.rank == 0:
        with ms.OneDeviceStrategy(comm=MPI.COMM_SELF) as strategy:
            Model(strategy)
            strategy.restore(path)
            strategy.save(copy)
        assert contents(copy) == expected
    world.Barrier()


@pytest.mark.ranks(1, 3)
def test_a_strategy_without_shared_memory(mpi_tmp_path, monkeypatch):
    path, copy = mpi_tmp_path / "x.h5", mpi_tmp_path / "copy.h5"
    with mirrored() as strategy:
        Model(strategy).train()
        strategy.save(path)
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")
    elsewhere(mirrored, path, copy)
    assert contents(copy) == contents(path)


@pytest.mark.ranks(2, 3)
def test_ranks_that_do_not_reach_the_file_write_nothing(mpi_tmp_path, monkeypatch):
    """As where the folder is one node's own: the others' parts come from rank 0, or by messages to it."""
    import os

    path = mpi_tmp_path / "x.h5"
    access = os.access
    for kind in (mirrored, servers):
        with kind() as strategy:
            Model(strategy).train()
            strategy.save(path)
            expected = contents(path)
            if strategy.rank:
                monkeypatch.setattr(os, "access", lambda *_: False)
                monkeypatch.setattr(os, "pwrite", None)
            strategy.save(path)
            assert contents(path) == expected
            monkeypatch.undo()
    assert os.access is access

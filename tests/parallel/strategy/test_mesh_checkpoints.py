"""Checkpoints go from any mesh to any other, and to and from strategies without one, bit for bit."""

import h5py
import numpy as np
import pytest

import mpistrat as ms
from tests.harness import meshes


def equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert np.array_equal(found[name], array), name


def other_values():
    return {name: value + 1 for name, value in meshes.start().items()}


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("applied", [False, True])
def test_every_mesh_restores_every_other(mpi_tmp_path, applied):
    from mpi4py import MPI

    every = meshes.meshes(MPI.COMM_WORLD.size)
    for number, axes in enumerate(every):
        with ms.MeshStrategy(axes=axes) as strategy:
            network = meshes.Network(strategy)
            network.train()
            wanted = network.wholes()
            strategy.save(mpi_tmp_path / f"{number}.h5", extra={"mesh": number})
        for other in every:
            with ms.MeshStrategy(axes=other) as strategy:
                network = meshes.Network(strategy, other_values())
                if applied:
                    network.train()
                assert strategy.restore(mpi_tmp_path / f"{number}.h5") == {"mesh": number}
                equal(network.wholes(), wanted)
                assert network.optimizer.iterations == meshes.STEPS
                strategy.save(mpi_tmp_path / "again.h5")  # what waits for the first step is in it, too
            with ms.MeshStrategy(axes=other) as strategy:
                network = meshes.Network(strategy, other_values())
                strategy.restore(mpi_tmp_path / "again.h5")
                equal(network.wholes(), wanted)


@pytest.mark.ranks(4)
def test_a_mesh_of_other_ranks_restores_it(mpi_tmp_path):
    """Files of every mesh of 1, 2 and 4 ranks, restored on every one of the other numbers."""
    from mpi4py import MPI

    wanted = {}
    for size in (1, 2, 4):
        comm = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < size else MPI.UNDEFINED)
        if comm != MPI.COMM_NULL:
            for number, axes in enumerate(meshes.meshes(size)):
                with ms.MeshStrategy(axes=axes, comm=comm) as strategy:
                    network = meshes.Network(strategy)
                    network.train()
                    wanted[size, number] = network.wholes()
                    strategy.save(mpi_tmp_path / f"{size}-{number}.h5")
            comm.Free()
        MPI.COMM_WORLD.Barrier()
    wanted = MPI.COMM_WORLD.bcast(wanted)
    for size in (1, 2, 4):
        comm = MPI.COMM_WORLD.Split(0 if MPI.COMM_WORLD.rank < size else MPI.UNDEFINED)
        if comm != MPI.COMM_NULL:
            for axes in meshes.meshes(size):
                for (saved, number), whole in wanted.items():
                    if saved != size:
                        with ms.MeshStrategy(axes=axes, comm=comm) as strategy:
                            network = meshes.Network(strategy, other_values())
                            strategy.restore(mpi_tmp_path / f"{saved}-{number}.h5")
                            equal(network.wholes(), whole)
            comm.Free()
        MPI.COMM_WORLD.Barrier()


@pytest.mark.hosts(2, ranks_per_host=2)
@pytest.mark.parametrize("model", [1, 2])
def test_two_hosts(mpi_tmp_path, model):
    with ms.MeshStrategy(axes={"data": -1, "model": model}) as strategy:
        network = meshes.Network(strategy)
        network.train()
        wanted = network.wholes()
        strategy.save(mpi_tmp_path / "a.h5")
    with ms.MeshStrategy(axes={"data": -1, "model": 3 - model}) as strategy:
        network = meshes.Network(strategy, other_values())
        strategy.restore(mpi_tmp_path / "a.h5")
        equal(network.wholes(), wanted)


class Plain:
    """The variables of the network, whole, under a strategy without a mesh."""

    def __init__(self, strategy, values):
        with strategy.scope():
            self.variables = {name: ms.Variable(value, name=name) for name, value in values.items()}
            self.optimizer = ms.optimizers.Adam(0.01, global_clipnorm=meshes.CLIP)
        self.strategy = strategy

    def step(self):
        rng = np.random.default_rng(4)
        self.optimizer.apply_gradients([(rng.normal(size=v.shape), v) for v in self.variables.values()])

    def wholes(self):
        found = {name: variable.numpy() for name, variable in self.variables.items()}
        for name, variable in self.variables.items():
            found.update({f"{name} {slot}": array for slot, array in self.optimizer.slots(variable).items()})
        return found


@pytest.mark.ranks(4)
def test_with_strategies_without_a_mesh(mpi_tmp_path):
    from mpi4py import MPI

    with ms.MultiWorkerMirroredStrategy() as strategy:
        plain = Plain(strategy, other_values())
        strategy.run(plain.step)
        wanted = plain.wholes()
        strategy.save(mpi_tmp_path / "plain.h5")
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        network = meshes.Network(strategy)
        strategy.restore(mpi_tmp_path / "plain.h5")
        equal(network.wholes(), wanted)
        network.train()
        wanted = network.wholes()
        strategy.save(mpi_tmp_path / "mesh.h5")
        strategy.begin_save(mpi_tmp_path / "begun.h5").wait()
    for file in ("mesh.h5", "begun.h5"):
        with ms.OneDeviceStrategy(comm=MPI.COMM_SELF) as strategy:
            plain = Plain(strategy, meshes.start())
            strategy.restore(mpi_tmp_path / file)
            equal(plain.wholes(), wanted)
        with h5py.File(mpi_tmp_path / file) as opened:
            assert np.array_equal(opened["variables/w1"], wanted["w1"])


@pytest.mark.ranks(4)
def test_columns_of_more_than_a_page(mpi_tmp_path):
    """Each rank writes whole pages of rows, whatever it holds of them."""
    whole = np.random.default_rng(5).normal(size=(300, 40, 6))
    with ms.MeshStrategy(axes={"rows": 2, "columns": 2}) as strategy:
        with strategy.scope():
            ms.Variable(whole, layout=(None, "columns", "rows"), name="a")
            ms.Variable(whole, layout=("columns", None, None), name="b")
        strategy.save(mpi_tmp_path / "a.h5")
    with h5py.File(mpi_tmp_path / "a.h5") as opened:
        assert np.array_equal(opened["variables/a"], whole)
        assert np.array_equal(opened["variables/b"], whole)


@pytest.mark.hosts(2, ranks_per_host=2)
def test_slots_that_hosts_divide(mpi_tmp_path):
    """Along "data" each host keeps the slots of a piece of what it has; files have them whole."""
    shapes, found = {"a": ((400, 400), (None, "model")), "b": ((300, 100), None)}, []
    for model in (2, 1):
        with ms.MeshStrategy(axes={"data": -1, "model": model}) as strategy:
            with strategy.scope():
                variables = {n: ms.Variable(np.ones(s), name=n, layout=layout) for n, (s, layout) in shapes.items()}
                optimizer = ms.optimizers.Adam(0.1)

            def step(variables=variables, optimizer=optimizer, replicas=strategy.num_replicas_in_sync):
                rng = np.random.default_rng(6)
                gradients = {name: rng.integers(1, 9, shape) / replicas for name, (shape, _) in shapes.items()}
                optimizer.apply_gradients([(gradients[n][v.part.slices], v) for n, v in variables.items()])

            strategy.run(step)
            assert variables["a"].arena.sharded
            found.append({name: variable.gathered() for name, variable in variables.items()})
            strategy.save(mpi_tmp_path / f"{model}.h5")
            if model == 1:
                strategy.restore(mpi_tmp_path / "2.h5")
                equal({name: variable.gathered() for name, variable in variables.items()}, found[0])
    equal(found[1], found[0])  # sums of whole numbers are exact
    with h5py.File(mpi_tmp_path / "1.h5") as one, h5py.File(mpi_tmp_path / "2.h5") as two:
        for name in shapes:
            for slot in ("momentum", "velocity"):
                key = f"optimizers/0/slots/{name}/{slot}"
                assert np.array_equal(one[key], two[key])
                assert np.asarray(one[key]).all()


@pytest.mark.ranks(4)
def test_what_waits_for_an_optimizer_that_is_made_later_is_whole(mpi_tmp_path):
    """A file is restored and saved before the optimizer is made, and goes on in another mesh."""
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        network = meshes.Network(strategy)
        network.train()
        strategy.save(mpi_tmp_path / "0.h5")
        network.train()
        wanted = network.wholes()
    for number, axes in enumerate(meshes.meshes(4)):
        with ms.MeshStrategy(axes=axes) as strategy:
            network = meshes.Network(strategy, other_values(), trained=False)
            strategy.restore(mpi_tmp_path / f"{number}.h5")
            strategy.save(mpi_tmp_path / f"{number + 1}.h5")
            network.make_optimizer()
            network.train()
            found = network.wholes()
            for name, array in wanted.items():
                np.testing.assert_allclose(found[name], array, rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("averages", [False, True])
def test_states_of_optimizers_are_whole(averages):
    """What one mesh's optimizer gives another's takes, before its first step and after, averages of weights too."""

    def network_of(strategy):
        network = meshes.Network(strategy, trained=False)
        network.make_optimizer(use_ema=averages)
        return network

    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        network = network_of(strategy)
        network.train()
        state = network.optimizer.get_state()
        shapes = {slot: array.shape for slot, array in state["slots"]["w1"].items()}
        assert set(shapes.values()) == {(12, 16)}
    for applied in (False, True):
        with ms.MeshStrategy(axes={"model": 4}) as strategy:
            network = network_of(strategy)
            if applied:
                network.train()
            network.optimizer.set_state(state)
            equal(network.optimizer.get_state()["slots"]["w1"], state["slots"]["w1"])
            if applied:
                for name, variable in network.variables.items():
                    network.optimizer.set_slots(variable, state["slots"][name])
            network.train()  # set_slots has made no difference between ranks
            if averages:
                average = network.optimizer.slots(network.variables["w1"])["average"]
                network.optimizer.finalize_variable_values(network.variables.values())
                equal({"w1": network.variables["w1"].gathered()}, {"w1": average})

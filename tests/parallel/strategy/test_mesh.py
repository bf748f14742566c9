"""MeshStrategy: the same numbers on every mesh, layouts, and what ranks of a mesh that differ are told."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import ClosedError, CollectiveMismatchError, ContextError, LayoutError
from tests.harness import meshes


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.hosts(2, ranks_per_host=2)
@pytest.mark.parametrize("model", [1, 2, 4])
def test_every_mesh_gives_the_numbers_of_one_process(model):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    nodes = comm.Split_type(MPI.COMM_TYPE_SHARED)
    fits = comm.size % model == 0 and (model == 1 or nodes.size % model == 0)
    nodes.Free()
    if not fits:
        pytest.skip("ranks along the last axis share a node")
    loss, weights = meshes.expected()
    with ms.MeshStrategy(axes={"data": -1, "model": model}) as strategy:
        assert strategy.num_replicas_in_sync == comm.size // model
        network = meshes.Network(strategy)
        np.testing.assert_allclose(network.train(), loss, rtol=1e-9)
        for name, variable in network.variables.items():
            np.testing.assert_allclose(variable.gathered(), weights[name], rtol=1e-9, atol=1e-12)
            assert np.array_equal(variable.gathered()[variable.part.slices], variable.array)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("model", [1, 2, 4])
def test_parts(model):
    whole = np.arange(6 * 8 * 4.0).reshape(6, 8, 4)
    with ms.MeshStrategy(axes={"data": -1, "model": model}) as strategy:
        at = strategy.mesh.at["model"]
        with strategy.scope():
            middle = ms.Variable(whole, layout=(None, "model", None))
            last = ms.Variable(lambda: whole, layout=(None, None, "model"))
            every = ms.Variable(whole)
        width = 8 // model
        assert np.array_equal(middle.array, whole[:, at * width : (at + 1) * width])
        assert (middle.nbytes, middle.grad.nbytes) == (whole.nbytes // model,) * 2
        assert np.array_equal(last.array, np.split(whole, model, axis=2)[at])
        assert np.array_equal(every.array, whole)
        assert last.part.whole_shape == whole.shape
        assert last.part.layout == (None, None, "model")
        for variable in (middle, last, every):
            assert np.array_equal(variable.gathered(), whole)


@pytest.mark.ranks(4)
def test_memory_of_a_split_variable_is_divided():
    """The arenas of all replicas of a node together have what is one replica's, once for each coordinate of data."""
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        with strategy.scope():
            ms.Variable(np.zeros((64, 4096)), layout=(None, "model"))
        (arena,) = strategy.extended.placement.arenas.arenas
        assert arena.used * arena.dtype.itemsize == 64 * 4096 * 8 // 2


@pytest.mark.ranks(4)
def test_two_axes_of_a_replica():
    """A variable that is split over one axis and replicated over the other, and one that is split over both."""
    whole = np.arange(48.0).reshape(4, 12)
    with ms.MeshStrategy(axes={"rows": 2, "columns": 2}) as strategy:
        assert strategy.mesh.sizes == {"data": 1, "rows": 2, "columns": 2}
        assert (strategy.num_replicas_in_sync, strategy.mesh.at["rows"]) == (1, strategy.rank // 2)
        with strategy.scope():
            both = ms.Variable(whole, layout=("rows", "columns"))
            one = ms.Variable(whole, layout=(None, "columns"))
            optimizer = ms.optimizers.SGD(1.0, global_clipnorm=1.0)
        rng = np.random.default_rng(2)
        gradients = rng.normal(size=whole.shape), rng.normal(size=whole.shape)

        def step():
            pairs = zip(gradients, (both, one), strict=True)
            optimizer.apply_gradients([(g[v.part.slices], v) for g, v in pairs])

        strategy.run(step)
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        np.testing.assert_allclose(both.gathered(), whole - gradients[0] / norm, rtol=1e-12)
        np.testing.assert_allclose(one.gathered(), whole - gradients[1] / norm, rtol=1e-12)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("limit", ["clipnorm", "clipvalue"])
def test_clipping_of_parts_is_that_of_the_whole(limit):
    gradient = np.random.default_rng(3).normal(size=(4, 8))
    wanted = gradient / np.linalg.norm(gradient) if limit == "clipnorm" else np.clip(gradient, -1.0, 1.0)
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        with strategy.scope():
            v = ms.Variable(np.zeros((4, 8)), layout=(None, "model"))
            optimizer = ms.optimizers.SGD(1.0, **{limit: 1.0})
        strategy.run(lambda: optimizer.apply_gradients([(gradient[v.part.slices] / 2, v)]))
        np.testing.assert_allclose(v.gathered(), -wanted, rtol=1e-12)


@pytest.mark.ranks(4)
def test_a_part_that_is_not_finite_refuses_the_step_on_all_ranks():
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        with strategy.scope():
            v = ms.Variable(np.zeros(8), layout=("model",), name="v")
            optimizer = ms.optimizers.SGD(1.0, check_numerics=True)
        gradient = np.full(4, np.nan if strategy.mesh.at["model"] else 1.0)
        with pytest.raises(FloatingPointError, match="'?v'?: expected finite|part of a variable that lies on other"):
            strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))
        assert v.numpy().tolist() == [0.0] * 4


@pytest.mark.ranks(4)
def test_ranks_of_a_replica_read_the_same_and_replicas_divide_it():
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        rows = strategy.distribute_dataset(ms.data.from_arrays(np.arange(10)).batch(4))
        low = 2 * strategy.mesh.at["data"]
        wanted = [[low, low + 1], [4 + low, 5 + low], [8 + strategy.mesh.at["data"]]]
        assert [batch.tolist() for batch in rows] == wanted
        given = []
        strategy.distribute_datasets_from_function(lambda context: given.append(context) or [np.zeros(1)])
        assert [(c.num_input_pipelines, c.input_pipeline_id) for c in given] == [(2, strategy.mesh.at["data"])]
        found = strategy.run(lambda: ms.get_replica_context().replica_id_in_sync_group)
        assert found == strategy.mesh.at["data"]
        assert strategy.extended.num_input_pipelines == 2


# errors


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("axes", "error", "text"),
    [
        ({"data": -1, "model": 3}, LayoutError, "expected 3 ranks or a multiple of it, got 4"),
        ({"data": 2, "model": 1}, LayoutError, "expected 2 ranks, got 4"),
        ({"data": -1, "model": -1}, ValueError, "-1 for one axis at most"),
        ({"data": 0}, ValueError, "at least 1"),
        ({"data": 2.0}, TypeError, "a whole number"),
        ({}, TypeError, "a dict of names"),
    ],
)
def test_axes_that_do_not_fit_are_told_on_all_ranks(axes, error, text):
    with pytest.raises(error, match=text):
        ms.MeshStrategy(axes=axes)


@pytest.mark.ranks(2)
def test_other_axes_on_some_ranks_are_told_on_all():
    from mpi4py import MPI

    axes = {"data": -1, "model": 1 + MPI.COMM_WORLD.rank}
    with pytest.raises(CollectiveMismatchError, match="'model': 1.*'model': 2"):
        ms.MeshStrategy(axes=axes)


@pytest.mark.hosts(2, ranks_per_host=2)
def test_the_last_axis_stays_on_a_node():
    with pytest.raises(LayoutError, match=r"axis 'model'.*on one node, got ranks 0, 1, 2, 3 on nodes 0, 1"):
        ms.MeshStrategy(axes={"data": 1, "model": 4})


@pytest.mark.ranks(2)
def test_layouts_that_do_not_fit():
    with ms.MeshStrategy(axes={"data": 1, "model": 2}) as strategy, strategy.scope():
        for layout, error, text in [
            (("model",), ValueError, "Pad it to 4"),
            (("data",), ValueError, "axes of a replica"),
            (("modle",), ValueError, "axes of the mesh"),
            ((None, "model"), ValueError, "each of the 1 dimensions"),
            ("model", TypeError, "a tuple of names"),
        ]:
            with pytest.raises(error, match=text):
                ms.Variable(np.zeros(3), layout=layout)
        with pytest.raises(ValueError, match="axes of the mesh, each once"):
            ms.Variable(np.zeros((2, 2)), layout=("model", "model"))
        with pytest.raises(ValueError, match="function of the whole array"):
            ms.Variable(np.zeros(2), layout=("model",), constraint=np.abs)
        with pytest.raises(CollectiveMismatchError, match="model"):
            ms.Variable(np.zeros((2, 2)), layout=("model", None) if strategy.rank else (None, "model"))


@pytest.mark.ranks(1)
def test_other_strategies_have_no_mesh():
    with ms.OneDeviceStrategy() as strategy:
        with pytest.raises(ContextError, match="a MeshStrategy"):
            strategy.run(lambda: ms.get_replica_context().mesh)
        with strategy.scope(), pytest.raises(ValueError, match="a strategy with a mesh"):
            ms.Variable(np.zeros(2), layout=("model",))


@pytest.mark.ranks(4)
def test_gradients_that_differ_in_a_replica_are_told():
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        with strategy.scope():
            v = ms.Variable(np.zeros(3), name="v")
            optimizer = ms.optimizers.SGD(1.0)
        gradient = np.full(3, float(strategy.mesh.at["model"]))
        with pytest.raises(CollectiveMismatchError, match=r"v: expected the same gradient.*mesh.all_reduce"):
            strategy.run(lambda: optimizer.apply_gradients([(gradient, v)]))


@pytest.mark.ranks(4)
def test_values_that_differ_in_a_replica_are_told():
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        with strategy.scope():
            v = ms.Variable(np.zeros(3), name="v")
            optimizer = ms.optimizers.SGD(1.0)
        v.assign(np.full(3, float(strategy.mesh.at["model"])))
        with pytest.raises(CollectiveMismatchError, match=r"v: expected the same value"):
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), v)]))


@pytest.mark.ranks(4)
def test_another_rate_on_some_ranks_of_a_replica_is_told():
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        with strategy.scope():
            v = ms.Variable(np.zeros(3), name="v")
            optimizer = ms.optimizers.SGD(1.0 + strategy.mesh.at["model"])
        with pytest.raises(CollectiveMismatchError, match=r"rate 1.0.*rate 2.0"):
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), v)]))


# the rest of its life


@pytest.mark.ranks(4)
def test_a_request_on_one_rank_stops_all_at_the_same_step():
    import os
    import signal

    from mpistrat.strategy import preemption

    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        found = []
        for number in range(6):
            if number == 2 and strategy.rank == 3:
                os.kill(os.getpid(), signal.SIGUSR1)
            strategy.barrier()
            found.append(strategy.should_stop())
        assert strategy.all_gather_object(found) == [found] * 4
        assert not any(found[:2])
        assert all(found[4:])
    preemption.release_signals()  # the next test of this start was told nothing


@pytest.mark.ranks(4)
def test_after_close_and_the_texts():
    strategy = ms.MeshStrategy(axes={"data": 2, "model": 2})
    with strategy.scope():
        v = ms.Variable(np.zeros(4), layout=("model",))
    assert repr(strategy) == "<MeshStrategy data 2 x model 2, 1 node>"
    assert f"model {strategy.mesh.at['model']} of 2" in repr(strategy.mesh)
    assert "data 2, model 2" in ms.show_config(strategy)
    strategy.close()
    for use in (v.numpy, strategy.barrier, lambda: strategy.mesh.all_reduce("SUM", 1.0, mesh_axis="model")):
        with pytest.raises(ClosedError):
            use()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", [{"data": 2, "model": 2}, {"model": 4}])
def test_without_shared_memory(monkeypatch, axes):
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")
    loss, weights = meshes.expected()
    with ms.MeshStrategy(axes=axes) as strategy:
        network = meshes.Network(strategy)
        np.testing.assert_allclose(network.train(), loss, rtol=1e-9)
        for name, value in network.wholes().items():
            if name in weights:
                np.testing.assert_allclose(value, weights[name], rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(4)
def test_on_read_variables_are_those_of_replicas():
    """The ranks of a replica count the same, and the sum is over replicas."""
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        with strategy.scope():
            steps = ms.Variable(
                0,
                synchronization=ms.VariableSynchronization.ON_READ,
                aggregation=ms.VariableAggregation.SUM,
            )
            with pytest.raises(ValueError, match="none for an ON_READ variable"):
                ms.Variable([0, 0], synchronization=ms.VariableSynchronization.ON_READ, layout=("model",))
        for _ in range(3):
            strategy.run(lambda: steps.assign_add(1))
        assert int(steps) == 6


@pytest.mark.ranks(4)
def test_on_a_communicator():
    """Two meshes side by side, each on half of the ranks."""
    from mpi4py import MPI

    half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
    with ms.MeshStrategy(axes={"model": -1}, comm=half) as strategy:
        assert (strategy.size, strategy.mesh.sizes) == (2, {"data": 1, "model": 2})
        total = strategy.mesh.all_reduce("SUM", MPI.COMM_WORLD.rank, mesh_axis="model")
        assert total == 2 + 2 * (MPI.COMM_WORLD.rank % 2)
    half.Free()


@pytest.mark.ranks(4)
def test_ratios_of_norms_are_those_of_the_whole():
    whole = np.arange(32.0).reshape(4, 8)
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        with strategy.scope():
            v = ms.Variable(whole, layout=(None, "model"))
            optimizer = ms.optimizers.Lamb(0.5, epsilon=1e-15)
        strategy.run(lambda: optimizer.apply_gradients([(np.full((4, 4), 3.0), v)]))
        ratio = np.linalg.norm(whole) / np.sqrt(32)  # the direction is the gradient's sign
        np.testing.assert_allclose(v.gathered(), whole - 0.5 * ratio, rtol=1e-12)

"""What wrong use of JAX under strategies gets: an error with the name and the remedy, on every rank where they could differ."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: make test-frameworks")

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import mpistrat as ms  # noqa: E402
from tests.harness.jax_training import put, rows  # noqa: E402


@pytest.mark.ranks(1, 2)
def test_gradients_that_are_handed_over_are_refused():
    refused = pytest.raises(ms.errors.LayoutError, match="got one with sharded_gradients=True")
    with ms.MultiWorkerMirroredStrategy(sharded_gradients=True) as strategy, strategy.scope(), refused:
        ms.jax.distribute({"w": jnp.ones(3)})


@pytest.mark.ranks(1, 2)
def test_what_cannot_be_distributed_is_refused():
    tree = {"w": jnp.ones(3)}
    with pytest.raises(ms.errors.ContextError, match="scope"):
        ms.jax.distribute(tree)
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        with pytest.raises(ValueError, match="mean"):
            ms.jax.distribute(tree, loss="max")
        with pytest.raises(ValueError, match="floating arrays"):
            ms.jax.distribute({"n": np.arange(3)})
        with pytest.raises(TypeError, match="complex128"):
            ms.jax.distribute({"w": jnp.ones(3, "complex128")})
        params = ms.jax.distribute(tree)
        with pytest.raises(RuntimeError, match="w: expected a plain array"):
            ms.jax.distribute(params)


@pytest.mark.ranks(1, 2)
def test_float64_is_not_cut_in_silence():
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        jax.config.update("jax_enable_x64", False)
        try:
            with pytest.raises(TypeError, match="jax_enable_x64"):
                ms.jax.distribute({"w": np.ones(3)})
        finally:
            jax.config.update("jax_enable_x64", True)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"w": np.ones(3), "c": np.ones(2)}, id="name"),
        pytest.param({"w": np.ones(3), "b": np.ones(2, np.float32)}, id="dtype"),
        pytest.param({"w": np.ones(4), "b": np.ones(2)}, id="shape"),
        pytest.param({"w": np.ones(3), "b": np.ones(2), "n": np.arange(2)}, id="integers"),
    ],
)
def test_another_tree_on_one_rank_is_told_on_all(other):
    from mpi4py import MPI

    tree = {"w": np.ones(3), "b": np.ones(2)}
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        with pytest.raises(ms.errors.CollectiveMismatchError, match="float"):
            ms.jax.distribute(other if MPI.COMM_WORLD.rank == 1 else tree)
        assert ms.jax.distribute(tree)["w"].tolist() == [1.0] * 3  # and all can go on


@pytest.mark.ranks(2, 3)
def test_an_error_on_one_rank_is_told_on_all():
    from mpi4py import MPI

    tree = {"w": jnp.ones(3, complex if MPI.COMM_WORLD.rank == 1 else float)}
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope(), pytest.raises(TypeError, match="complex"):
        ms.jax.distribute(tree)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("donated", ["one_output", "two_outputs"])
def test_donated_parameters_are_named(donated):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            params, optimizer = ms.jax.distribute({"a": jnp.ones(3), "w": jnp.ones(3)}), ms.optimizers.SGD(0.1)
        loss = (lambda p: p["w"].sum() + p["a"].sum()) if donated == "two_outputs" else None
        function = jax.value_and_grad(loss) if loss else lambda p: jax.tree.map(lambda leaf: 2 * leaf, p)
        result = jax.jit(function, donate_argnums=0)(params)
        grads = result[1] if loss else result
        with pytest.raises(RuntimeError, match=r"(a|w): expected .* donate_argnums"):
            ms.jax.apply(optimizer, grads, params)
        assert ms.jax.current(params)["w"].tolist() == [1.0] * 3  # a donated argument is not written to


@pytest.mark.ranks(1, 2)
def test_arrays_that_are_not_the_parameters_are_named():
    with put() as (_, params, step, optimizer):
        grads = step(params, *rows())[1]
        with pytest.raises(RuntimeError, match=r"first/b: .* of another origin"):
            ms.jax.apply(optimizer, grads, jax.tree.map(lambda leaf: leaf + 0, params))
        after = ms.jax.apply(optimizer, grads, params)
        with pytest.raises(RuntimeError, match=r"first/b: .* consumed"):
            ms.jax.apply(optimizer, grads, params)
        with pytest.raises(RuntimeError, match="deleted"):
            step(params, *rows())
        ms.jax.apply(optimizer, grads, after)


@pytest.mark.ranks(1, 2)
def test_gradients_that_do_not_fit_are_named():
    with put() as (_, params, step, optimizer):
        grads = step(params, *rows())[1]
        with pytest.raises(ValueError, match="one without second/w"):
            ms.jax.apply(optimizer, {**grads, "second": {"b": 1, "none": None}}, params)
        with pytest.raises(ValueError, match="one with third"):
            ms.jax.apply(optimizer, {**grads, "third": jnp.ones(1)}, params)
        for wrong in (jnp.ones((16, 10)), jnp.ones((10, 16), np.float32), 1.0):
            with pytest.raises(ValueError, match=r"first/w: expected a gradient float64\(10, 16\)"):
                ms.jax.apply(optimizer, {**grads, "first": {**grads["first"], "w": wrong}}, params)
        with pytest.raises(TypeError, match="of ms.optimizers"):
            ms.jax.apply("sgd", grads, params)
        with pytest.raises(TypeError, match="outside of it"):
            jax.jit(lambda g: ms.jax.apply(optimizer, g, params))(grads)
        ms.jax.apply(optimizer, grads, params)


@pytest.mark.ranks(2, 3)
def test_a_gradient_that_is_missing_on_one_rank_is_told_on_all():
    with put() as (strategy, params, step, optimizer):
        grads = step(params, *rows())[1]
        if strategy.rank == 1:
            grads["second"]["b"] = None
        with pytest.raises(ms.errors.CollectiveMismatchError, match="second/b"):
            ms.jax.apply(optimizer, grads, params)


@pytest.mark.ranks(1, 2)
def test_several_local_replicas_need_run():
    strategy = ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])
    with (
        put(strategy=strategy) as (_, params, step, optimizer),
        pytest.raises(ms.errors.ContextError, match="strategy.run"),
    ):
        ms.jax.apply(optimizer, step(params, *rows())[1], params)


@pytest.mark.ranks(1)
def test_an_optimizer_of_another_strategy():
    with put() as (_, params, step, optimizer):
        ms.jax.apply(optimizer, step(params, *rows())[1], params)
    with put() as (_, params, step, _), pytest.raises(ValueError, match="another"):
        ms.jax.apply(optimizer, step(params, *rows())[1], params)


@pytest.mark.ranks(1)
def test_a_view_that_is_kept_is_named(monkeypatch):
    monkeypatch.setattr(ms.jax.arrays, "_PATIENCE", 0.2)
    with put() as (_, params, step, optimizer):
        grads = step(params, *rows())[1]
        view = np.asarray(params["second"]["w"])
        with pytest.raises(RuntimeError, match=r"second/w: .* np.array\(leaf\)"):
            ms.jax.apply(optimizer, grads, params)
        del view
        ms.jax.apply(optimizer, grads, ms.jax.current(params))


@pytest.mark.ranks(3)
def test_a_norm_over_gradients_that_workers_send_apart_is_refused():
    params = {"w": np.ones(3, np.float32)}
    strategy = ms.ParameterServerStrategy(num_ps=1, max_staleness=0)
    with strategy.scope(), pytest.raises(ValueError, match="max_norm: expected None, where servers sum"):
        ms.jax.distribute(params, optax.sgd(0.1), max_norm=1.0)
    strategy.close()


@pytest.mark.ranks(1)
def test_masked_numbers_are_refused():
    masked, plain = np.ma.masked_array(np.ones(3, np.float32), mask=[0, 1, 0]), np.ones(3, np.float32)
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        with pytest.raises(TypeError, match="w: expected no masked numbers, got 1 masked"):
            ms.jax.distribute({"w": masked}, optax.sgd(0.1))
        params, optimizer = ms.jax.distribute({"w": plain}, optax.sgd(0.1))
        with pytest.raises(TypeError, match="ms.jax.apply: w: expected no masked numbers"):
            ms.jax.apply(optimizer, {"w": masked}, params)
        with pytest.raises(TypeError, match="w: expected no masked numbers"):
            ms.jax.assign(params, {"w": masked})

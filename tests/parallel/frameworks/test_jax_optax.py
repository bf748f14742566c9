"""optax's transformations under strategies: the numbers of plain optax in one process, from state divided over the ranks."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: make test-frameworks")

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402
from jax_training import BATCH, arrays, dict_tree, difference, plain, rows, schedule, train, train_by_run  # noqa: E402

import mpistrat as ms  # noqa: E402

CHAINS = {
    "adamw": lambda: optax.adamw(schedule(), weight_decay=0.1),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: optax.rmsprop(0.01, centered=True, momentum=0.5),
    "adagrad": lambda: optax.adagrad(0.1),
    "lion": lambda: optax.lion(0.01),
    "clipped": lambda: optax.chain(optax.clip(0.05), optax.nadam(0.01)),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.01), 3).gradient_transformation(),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(schedule()),
}
WHOLE = {
    "global_norm": lambda: optax.chain(optax.clip_by_global_norm(1e4), optax.adam(0.01)),
    "lamb": lambda: optax.lamb(0.01),
    "lars": lambda: optax.lars(0.01),
    "adafactor": lambda: optax.adafactor(0.01),
    "novograd": lambda: optax.novograd(0.01),
    "if_finite": lambda: optax.apply_if_finite(optax.adam(0.01), 3),
    "noise": lambda: optax.noisy_sgd(0.01),
    "mask": lambda: optax.adamw(0.01, weight_decay=0.5, mask=lambda p: jax.tree.map(lambda leaf: leaf.ndim > 1, p)),
    "lbfgs": lambda: optax.lbfgs(),
    "sm3": lambda: optax.sm3(0.01),
    "muon": lambda: optax.contrib.muon(0.01),
}


def put(transformation, strategy=None, **options):
    tree, step = dict_tree()
    strategy = strategy or ms.MultiWorkerMirroredStrategy()
    with strategy.scope():
        params, optimizer = ms.jax.distribute(tree, transformation, **options)
    return strategy, params, step, optimizer


@pytest.mark.ranks(1, 2, 3, timeout=180)
@pytest.mark.parametrize("chain", CHAINS)
def test_every_chain_equals_optax(chain):
    tree, step = dict_tree()
    expected = plain(tree, step, CHAINS[chain]())
    strategy, params, step, optimizer = put(CHAINS[chain]())
    with strategy:
        assert difference(arrays(train(strategy, params, step, optimizer)), expected) < 1e-9


@pytest.mark.ranks(1, 2, timeout=180)
def test_the_norm_over_all_gradients_is_limited():
    tree, step = dict_tree()
    expected = plain(tree, step, optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1, momentum=0.9)))
    strategy, params, step, optimizer = put(optax.sgd(0.1, momentum=0.9), max_norm=0.05)
    with strategy:
        assert difference(arrays(train(strategy, params, step, optimizer)), expected) < 1e-9


@pytest.mark.ranks(1, 2, timeout=180)
def test_several_local_replicas():
    tree, step = dict_tree()
    expected = plain(tree, step, optax.adam(0.01))
    strategy, params, step, optimizer = put(
        optax.adam(0.01), ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])
    )
    with strategy:
        assert difference(arrays(train_by_run(strategy, params, step, optimizer)), expected) < 1e-9


@pytest.mark.ranks(2, 3, timeout=180)
def test_parameter_servers_that_wait():
    x, y = rows()
    x, y = x[:48], y[:48]
    tree, step = dict_tree()
    transformation = optax.adam(0.01)
    expected, state = tree, transformation.init(tree)
    for a, b in ms.data.from_arrays((x, y)).shuffle(seed=1).batch(BATCH):
        updates, state = transformation.update(step(expected, np.array(a), np.array(b))[1], state)
        expected = optax.apply_updates(expected, updates)
    strategy, params, step, optimizer = put(optax.adam(0.01), ms.ParameterServerStrategy(num_ps=1, max_staleness=0))
    with strategy:

        def one(params, a, b):
            return ms.jax.apply(optimizer, step(params, a, b)[1], params)

        batches = ms.data.from_arrays((x, y)).shuffle(seed=1).batch(BATCH // strategy.num_workers)
        for batch in strategy.distribute_dataset(batches):
            params = strategy.run(one, args=(params, *batch))
        if not strategy.is_server:
            assert difference(arrays(params), arrays(expected)) < 1e-9


@pytest.mark.ranks(1, 2, timeout=180)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_larger_than_one_and_narrow_weights(dtype):
    n = 200_000  # several blocks of 64 K
    weights = jnp.linspace(-1, 1, n, dtype="float32").astype(dtype)
    gradient = jnp.cos(jnp.arange(n, dtype="float32")).astype(dtype)
    transformation = optax.adam(0.1, mu_dtype="bfloat16")
    wide = weights.astype("float32")
    updates, _ = transformation.update(gradient.astype("float32"), transformation.init(wide))
    expected = optax.apply_updates(wide, updates).astype(dtype)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            params, optimizer = ms.jax.distribute({"w": weights}, transformation)
        params = ms.jax.apply(optimizer, {"w": gradient}, params)
        np.testing.assert_allclose(np.array(params["w"], np.float32), np.array(expected, np.float32), rtol=1e-2)
        assert optimizer.slot_names == ("0.mu", "0.nu")


@pytest.mark.ranks(1, 2, timeout=180)
def test_state_is_saved_and_restored(mpi_tmp_path):
    path = mpi_tmp_path / "run.h5"
    strategy, params, step, optimizer = put(CHAINS["adamw"]())
    with strategy:
        params = train(strategy, params, step, optimizer, epochs=2)
        strategy.save(path)
        first = arrays(train(strategy, params, step, optimizer, epochs=1))
    strategy, params, step, optimizer = put(CHAINS["adamw"]())
    with strategy:
        strategy.restore(path)
        assert difference(arrays(train(strategy, params, step, optimizer, epochs=1)), first) < 1e-12


@pytest.mark.ranks(1, timeout=180)
def test_rules_on_whole_tensors_are_refused():
    tree, _ = dict_tree()
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        for name, make in WHOLE.items():
            with pytest.raises(TypeError, match="max_norm="):
                ms.jax.distribute(tree, make())
                raise AssertionError(name)
        with pytest.raises(TypeError, match="goes to ms.jax.apply"):
            ms.jax.distribute(tree, ms.optimizers.SGD(0.1))
        with pytest.raises(ValueError, match="with an optimizer"):
            ms.jax.distribute(tree, max_norm=1.0)


@pytest.mark.ranks(2, timeout=180)
def test_other_settings_on_one_rank_are_told_on_all():
    from mpi4py import MPI

    strategy, params, step, optimizer = put(optax.adam(0.02 if MPI.COMM_WORLD.rank else 0.01))
    with strategy, pytest.raises(ms.errors.CollectiveMismatchError, match="trial"):
        ms.jax.apply(optimizer, step(params, *rows())[1], params)

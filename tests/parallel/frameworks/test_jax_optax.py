"""optax's transformations under strategies: the numbers of plain optax in one process, from state divided over the ranks."""

import functools

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: make test-frameworks")

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import mpistrat as ms  # noqa: E402
from tests.harness.jax_training import (  # noqa: E402
    BATCH,
    TREES,
    arrays,
    dict_tree,
    difference,
    plain,
    rows,
    schedule,
    train,
    train_by_run,
)


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def long(params):
    return jax.tree.map(lambda leaf: leaf.shape[0] > 10, params)


def labels(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "slow" if "first" in str(path) else "fast", params)


def counts():
    """A transformation that no trace can follow: Python looks at its state."""

    def update(updates, state, params=None):
        rate = -0.1 if state["n"] < 3 else -0.05
        return jax.tree.map(lambda g: rate * g, updates), {"n": state["n"] + 1, "name": state["name"]}

    return optax.GradientTransformation(lambda params: {"n": 0, "name": "own"}, update)


WARM = functools.partial(optax.linear_schedule, 0.0, 1e-2, 1000)
BLOCKS = {
    "adamw": lambda: optax.adamw(schedule(), weight_decay=0.1),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: optax.rmsprop(0.01, centered=True, momentum=0.5),
    "adagrad": lambda: optax.adagrad(0.1),
    "lion": lambda: optax.lion(0.01),
    "clipped": lambda: optax.chain(optax.clip(0.05), optax.nadam(0.01)),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.01), 3),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(schedule()),
    "mask_by_ndim": lambda: optax.adamw(WARM(), weight_decay=0.1, mask=matrices),
    "mask_by_shape": lambda: optax.adamw(0.01, weight_decay=0.5, mask=long),
    "masked_chain": lambda: optax.chain(optax.masked(optax.add_decayed_weights(0.1), matrices), optax.sgd(WARM())),
    "frozen": lambda: optax.partition({True: optax.set_to_zero(), False: optax.adam(WARM())}, matrices),
    "labels": lambda: optax.partition({"slow": optax.sgd(1e-3, momentum=0.9), "fast": optax.adam(1e-2)}, labels),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2, warmup_steps=5),
    "conditional": lambda: optax.conditionally_mask(optax.adam(1e-2), lambda step: step % 2 == 0),
    "rprop": lambda: optax.rprop(1e-2),
    "cocob": lambda: optax.contrib.cocob(),
    "ema": lambda: optax.chain(optax.adam(1e-2), optax.ema(0.9)),
}
WHOLE = {
    "global_norm": lambda: optax.chain(optax.clip_by_global_norm(0.05), optax.adam(0.01)),
    "lamb": lambda: optax.lamb(0.01),
    "lars": lambda: optax.lars(0.01),
    "adafactor": lambda: optax.adafactor(0.01, min_dim_size_to_factor=2),
    "novograd": lambda: optax.novograd(0.01),
    "if_finite": lambda: optax.apply_if_finite(optax.adam(0.01), 3),
    "noise": lambda: optax.noisy_sgd(0.01, key=jax.random.key(3)),
    "lbfgs": lambda: optax.lbfgs(0.01, linesearch=None),
    "sm3": lambda: optax.sm3(0.01),
    "muon": lambda: optax.contrib.muon(0.01),
    "prodigy": lambda: optax.contrib.prodigy(),
    "python": counts,
}
CHAINS = BLOCKS | WHOLE


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
    expected = plain(tree, step, CHAINS[chain](), traced=chain != "python")
    strategy, params, step, optimizer = put(CHAINS[chain]())
    assert optimizer._on_wholes == (chain in WHOLE)
    with strategy:
        found = difference(arrays(train(strategy, params, step, optimizer)), expected)
        assert found < (1e-6 if chain == "muon" else 1e-9)  # Newton-Schulz enlarges the last bits


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
@pytest.mark.parametrize("chain", ["adagrad", "labels"])
def test_parameter_servers_that_wait(chain):
    x, y = rows()
    x, y = x[:48], y[:48]
    tree, step = dict_tree()
    transformation = CHAINS[chain]()
    expected, state = tree, transformation.init(tree)
    for a, b in ms.data.from_arrays((x, y)).shuffle(seed=1).batch(BATCH):
        updates, state = transformation.update(step(expected, np.array(a), np.array(b))[1], state, expected)
        expected = optax.apply_updates(expected, updates)
    strategy, params, step, optimizer = put(CHAINS[chain](), ms.ParameterServerStrategy(num_ps=1, max_staleness=0))
    with strategy:

        def one(params, a, b):
            return ms.jax.apply(optimizer, step(params, a, b)[1], params, of=a)

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


@pytest.mark.ranks(1, 2, 3, timeout=180)
@pytest.mark.parametrize(
    "chain", ["adamw", "labels", "schedule_free", "multi_steps", "global_norm", "noise", "adafactor", "python"]
)
def test_state_is_saved_and_restored(mpi_tmp_path, chain):
    """Also before the first step."""
    path, early = mpi_tmp_path / "run.h5", mpi_tmp_path / "early.h5"
    strategy, params, step, optimizer = put(CHAINS[chain]())
    with strategy:
        strategy.save(early)
        params = train(strategy, params, step, optimizer, epochs=1)
        strategy.save(path)
        first = arrays(train(strategy, params, step, optimizer, epochs=1))
    strategy, params, step, optimizer = put(CHAINS[chain]())
    with strategy:
        strategy.restore(path)
        assert difference(arrays(train(strategy, ms.jax.current(params), step, optimizer, epochs=1)), first) < 1e-12
    strategy, params, step, optimizer = put(CHAINS[chain]())
    with strategy:
        strategy.restore(early)
        params = train(strategy, ms.jax.current(params), step, optimizer, epochs=1)
        assert difference(arrays(train(strategy, params, step, optimizer, epochs=1)), first) < 1e-12


@pytest.mark.ranks(1, 2, timeout=180)
@pytest.mark.parametrize("chain", ["mask_by_ndim", "global_norm"])
def test_every_tree_by_rules_that_look_at_it(chain):
    for name, build in TREES.items():
        if name in ("linen", "nnx", "equinox"):
            pytest.importorskip("equinox" if name == "equinox" else "flax")
        tree, step = build()
        expected = plain(tree, step, CHAINS[chain](), epochs=2)
        with ms.MultiWorkerMirroredStrategy() as strategy:
            with strategy.scope():
                params, optimizer = ms.jax.distribute(tree, CHAINS[chain]())
            assert difference(arrays(train(strategy, params, step, optimizer, epochs=2)), expected) < 1e-9


@pytest.mark.ranks(1, 2, 3, timeout=180)
@pytest.mark.parametrize("chain", ["global_norm", "lamb"])
def test_whole_rules_in_float32_and_16_bits(chain):
    """Leaves that begin and end within the ranks' slices; weights of 16 bits have a state of 32."""
    rng = np.random.default_rng(0)
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 1e-2)):
        tree = {
            name: jnp.asarray(rng.normal(size=shape), dtype)
            for name, shape in (("a", (37, 41)), ("b", 5), ("c", (9, 3)))
        }
        transformation = CHAINS[chain]()
        theirs = jax.tree.map(lambda leaf: leaf.astype("float32"), tree)
        state = transformation.init(theirs)
        with ms.MultiWorkerMirroredStrategy() as strategy:
            with strategy.scope():
                params, optimizer = ms.jax.distribute(tree, transformation)
            for _ in range(5):
                grads = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), tree)
                params = ms.jax.apply(optimizer, grads, params)
                wide = jax.tree.map(lambda leaf: leaf.astype("float32"), grads)
                updates, state = transformation.update(wide, state, theirs)
                theirs = optax.apply_updates(theirs, updates)
                theirs = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype).astype("float32"), theirs, tree)
            for name, leaf in theirs.items():
                np.testing.assert_allclose(np.array(params[name], np.float32), leaf, rtol=tolerance, atol=tolerance)


@pytest.mark.ranks(2, timeout=180)
def test_whole_rules_with_several_local_replicas_and_a_norm():
    tree, step = dict_tree()
    expected = plain(tree, step, optax.chain(optax.clip_by_global_norm(0.05), optax.lamb(0.01)))
    strategy = ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])
    strategy, params, step, optimizer = put(optax.lamb(0.01), strategy, max_norm=0.05)
    with strategy:
        assert difference(arrays(train_by_run(strategy, params, step, optimizer)), expected) < 1e-9


@pytest.mark.ranks(1, 2, timeout=180)
def test_arguments_of_an_update():
    """A rate that falls when the loss stands still: the loss is an argument of the update."""

    def make():
        return optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))

    start, transformation = {"w": jnp.ones((5, 3))}, make()
    theirs, state = start, transformation.init(start)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            params, optimizer = ms.jax.distribute(start, make())
        with pytest.raises(TypeError, match="value"):
            ms.jax.apply(optimizer, start, params)
        params = ms.jax.current(params)
        for value in (3.0, 3.0, 3.0, 3.0, 2.0, 2.0, 2.0):
            params = ms.jax.apply(optimizer, start, params, value=value)
            updates, state = transformation.update(start, state, theirs, value=value)
            theirs = optax.apply_updates(theirs, updates)
        assert difference(arrays(params), arrays(theirs)) < 1e-12
        with pytest.raises(TypeError, match="extra arguments"):
            ms.jax.apply(ms.optimizers.SGD(0.1), start, params, value=1.0)
        if strategy.size > 1:
            with pytest.raises(ms.errors.CollectiveMismatchError, match="extra"):
                ms.jax.apply(optimizer, start, params, value=float(strategy.rank))


def scaled(counting=False):
    """A transformation with an argument that may be left out; where it counts, its state depends on that."""

    def update(updates, state, params=None, *, scale=1.0, **extra):
        return jax.tree.map(lambda leaf: scale * leaf, updates), state + scale if counting else state

    return optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)


SPARE = {
    "supported": lambda: optax.with_extra_args_support(optax.adam(0.1)),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "scaled": lambda: optax.chain(scaled(), optax.sgd(0.1, momentum=0.9)),
    "masked": lambda: optax.chain(optax.masked(scaled(), matrices), optax.adam(0.1)),
    "several": lambda: optax.MultiSteps(optax.chain(optax.adam(0.1), scaled()), 2),
    "norm": lambda: optax.chain(scaled(), optax.clip_by_global_norm(0.1)),
}


@pytest.mark.ranks(1, 2, timeout=180)
@pytest.mark.parametrize("chain", SPARE)
def test_arguments_that_an_update_does_not_need(chain):
    """They are given in some steps, with other numbers and of other types; the rule runs as it does without them."""
    start, transformation = {"w": jnp.ones((5, 3)), "b": jnp.ones(3)}, SPARE[chain]()
    theirs, state = start, transformation.init(start)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            params, optimizer = ms.jax.distribute(start, SPARE[chain]())
        assert optimizer._on_wholes == (chain == "norm")
        for number, scale in enumerate([None, 0.5, 2, None, jnp.asarray(3.0), 0.25, np.float64(0.125)]):
            gradients = jax.tree.map(lambda leaf, number=number: (1.0 + number) * leaf, start)
            extra = {} if scale is None else {"scale": scale, "value_fn": jnp.sum}
            params = ms.jax.apply(optimizer, gradients, params, **extra)
            updates, state = transformation.update(gradients, state, theirs, **extra)
            theirs = optax.apply_updates(theirs, updates)
            assert difference(arrays(params), arrays(theirs)) < 1e-9
        if strategy.size > 1 and chain != "norm":
            own = {"scale": float(strategy.rank)}
            if chain in ("supported", "injected"):  # which do not read it
                ms.jax.apply(optimizer, start, params, **own)
            else:
                with pytest.raises(ms.errors.CollectiveMismatchError, match="extra"):
                    ms.jax.apply(optimizer, start, params, **own)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    "make", [lambda: optax.scale(-0.1), lambda: optax.chain(scaled(counting=True), optax.sgd(0.1))]
)
def test_arguments_that_cannot_be_taken_are_refused(make):
    """optax takes none, or state that is kept once would depend on which steps had them."""
    start = {"w": jnp.ones((5, 3))}
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            params, optimizer = ms.jax.distribute(start, make())
        with pytest.raises(TypeError, match="extra arguments.*scale"):
            ms.jax.apply(optimizer, start, params, scale=0.5)
        params = ms.jax.apply(optimizer, start, ms.jax.current(params))
        np.testing.assert_allclose(params["w"], 0.9, rtol=1e-6)


@pytest.mark.ranks(1, timeout=180)
def test_what_optax_itself_refuses_is_its_error():
    tree, _ = dict_tree()
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        with pytest.raises(ValueError, match="structure"):
            ms.jax.distribute(tree, optax.masked(optax.sgd(0.1), {"first": {"w": True}, "third": False}))
        with pytest.raises(TypeError, match="goes to ms.jax.apply"):
            ms.jax.distribute(tree, ms.optimizers.SGD(0.1))
        with pytest.raises(ValueError, match="with an optimizer"):
            ms.jax.distribute(tree, max_norm=1.0)


@pytest.mark.ranks(2, timeout=180)
def test_whole_rules_where_no_node_has_the_tree_are_refused():
    tree, _ = dict_tree()
    for make, options in (
        (lambda: ms.ParameterServerStrategy(num_ps=1), {}),
        (lambda: ms.MeshStrategy(axes={"model": 2}), {"layouts": {"first/b": ("model",)}}),
    ):
        with make() as strategy, strategy.scope(), pytest.raises(ValueError, match=r"reduce_sum.*max_norm="):
            ms.jax.distribute(tree, optax.lamb(0.1), **options)


@pytest.mark.ranks(1, 2, timeout=180)
def test_gradients_that_a_whole_rule_lacks_are_named():
    strategy, params, step, optimizer = put(optax.lamb(0.1))
    with strategy:
        _, grads = step(params, *rows())
        grads["second"]["b"] = None
        with pytest.raises(ValueError, match="second/b: expected gradients of the whole tree"):
            ms.jax.apply(optimizer, grads, params)


@pytest.mark.ranks(2, timeout=180)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda rank: optax.adam(0.02 if rank else 0.01), id="rate"),
        pytest.param(lambda rank: optax.adamw(0.01, mask=matrices if rank else None), id="mask"),
        pytest.param(lambda rank: optax.adagrad(0.01, initial_accumulator_value=0.2 if rank else 0.1), id="start"),
        pytest.param(lambda rank: optax.lamb(0.02 if rank else 0.01), id="whole"),
        pytest.param(lambda rank: optax.noisy_sgd(0.01, key=jax.random.key(rank)), id="key"),
    ],
)
def test_other_settings_on_one_rank_are_told_on_all(make):
    from mpi4py import MPI

    strategy, params, step, optimizer = put(make(MPI.COMM_WORLD.rank))
    with strategy, pytest.raises(ms.errors.CollectiveMismatchError, match="digest"):
        ms.jax.apply(optimizer, step(params, *rows())[1], params)


@pytest.mark.ranks(2, 4, timeout=180)
def test_meshes_take_masks_of_wholes_and_whole_rules():
    """A mask by shape sees the whole leaf, of which a rank has a part; a rule that runs whole takes undivided leaves."""
    from mpi4py import MPI

    axes = {"data": MPI.COMM_WORLD.size // 2, "model": 2}
    rng = np.random.default_rng(0)
    tree = {"w": rng.normal(size=(12, 6)), "v": rng.normal(size=(8, 6)), "b": rng.normal(size=11)}
    grads = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), tree)
    layouts = {"w": ("model", None), "v": ("model", None)}
    for chain, options in (("mask_by_shape", {"layouts": layouts}), ("lamb", {})):
        transformation = CHAINS[chain]()
        theirs, state = tree, transformation.init(tree)
        with ms.MeshStrategy(axes=axes) as strategy:
            with strategy.scope():
                params, optimizer = ms.jax.distribute(tree, transformation, **options)
            variables = dict(zip(sorted(tree), strategy.extended.placement.variables, strict=False))
            for _ in range(4):
                parts = {
                    name: grads[name] if v.part is None else v.part.cut(grads[name]) for name, v in variables.items()
                }
                params = ms.jax.apply(optimizer, parts, params)
                updates, state = transformation.update(grads, state, theirs)
                theirs = optax.apply_updates(theirs, updates)
            for name, variable in variables.items():
                np.testing.assert_allclose(variable.gathered(), theirs[name], rtol=1e-9)


@pytest.mark.ranks(1, 2)
def test_a_file_does_not_replace_the_transformation(mpi_tmp_path):
    """A program that is started again with another one trains by that."""

    def run(first, transformation, last):
        with ms.MultiWorkerMirroredStrategy() as strategy:
            with strategy.scope():
                params, optimizer = ms.jax.distribute({"w": jnp.ones(4)}, transformation)
            assert optimizer.get_settings() == [{}]
            if first:
                strategy.restore(mpi_tmp_path / "x.h5")
                params = ms.jax.current(params)
            for _ in range(first, last):
                params = ms.jax.apply(optimizer, {"w": jnp.ones(4)}, params)
            strategy.save(mpi_tmp_path / "x.h5")
            return np.array(params["w"])

    assert run(0, optax.sgd(0.5), 1).tolist() == [0.5] * 4
    assert run(1, optax.chain(optax.sgd(0.25)), 2).tolist() == [0.25] * 4


@pytest.mark.ranks(1, 2, timeout=180)
@pytest.mark.parametrize("chain", ["labels", "noise", "adafactor"])
def test_state_is_taken_and_given_back(chain):
    strategy, params, step, optimizer = put(CHAINS[chain]())
    with strategy:
        params = train(strategy, params, step, optimizer, epochs=1)
        state, weights = optimizer.get_state(), jax.tree.map(np.array, params)
        params = train(strategy, params, step, optimizer, epochs=1)
        first = arrays(params)
        optimizer.set_state(state)
        params = train(strategy, ms.jax.assign(params, weights), step, optimizer, epochs=1)
        assert difference(arrays(params), first) < 1e-12


@pytest.mark.ranks(1, 2, timeout=180)
@pytest.mark.parametrize("how", ["restore", "set_state", "refused"])
@pytest.mark.parametrize("chain", ["schedule_free", "cocob"])
def test_state_that_begins_with_the_weights_begins_again(how, chain, mpi_tmp_path):
    """With the state of before the first step, or after one that was refused, it begins with the weights of the next step."""
    tree, step = dict_tree()
    weights = jax.tree.map(lambda leaf: np.array(leaf) + 1, tree)
    expected = plain(weights, step, BLOCKS[chain]())
    strategy, params, step, optimizer = put(BLOCKS[chain]())
    with strategy:
        early = optimizer.get_state()
        if how == "refused":
            wrong = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), params)
            optimizer.check_numerics = True
            with pytest.raises(FloatingPointError):
                ms.jax.apply(optimizer, wrong, params)
            params = ms.jax.assign(ms.jax.current(params), weights)
        elif how == "set_state":
            params = ms.jax.assign(train(strategy, params, step, optimizer, epochs=1), weights)
            optimizer.set_state(early)
        else:
            params = ms.jax.assign(params, weights)
            strategy.save(mpi_tmp_path / "early.h5")
            params = train(strategy, params, step, optimizer, epochs=1)
            strategy.restore(mpi_tmp_path / "early.h5")
            params = ms.jax.current(params)
        assert difference(arrays(train(strategy, params, step, optimizer)), expected) < 1e-9


OTHERS = [("global_norm", "multi_steps"), ("adamw", "global_norm"), ("sgd", "adamw")]


@pytest.mark.ranks(1, 2, timeout=180)
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize(("there", "here"), OTHERS)
def test_the_state_of_a_rule_that_keeps_something_else_is_refused(there, here, stepped, mpi_tmp_path):
    chains = CHAINS | {"sgd": lambda: optax.sgd(0.1)}
    strategy, params, step, optimizer = put(chains[there]())
    with strategy:
        params = train(strategy, params, step, optimizer, epochs=1)
        state = optimizer.get_state()
        strategy.save(mpi_tmp_path / "x.h5")
    strategy, params, step, optimizer = put(chains[here]())
    with strategy:
        if stepped:
            params = train(strategy, params, step, optimizer, epochs=1)
        before, taken = arrays(params), optimizer.iterations
        with pytest.raises(ValueError, match="optimizer 0 is 'optax rule.*, here 'optax rule"):
            strategy.restore(mpi_tmp_path / "x.h5")
        if "whole" in state and not optimizer._on_wholes:
            with pytest.raises(ValueError, match="the whole tree"):
                optimizer.set_state(state)
        params = ms.jax.current(params)
        assert difference(arrays(params), before) == 0 and optimizer.iterations == taken
        train(strategy, params, step, optimizer, epochs=1)


def signs(updates, params=None):
    """Rules that divide 0 by 0 where a gradient is 0."""
    return jax.tree.map(lambda g: -0.1 * g / jnp.abs(g), updates)


def untraced_signs(updates, params=None):
    return signs(updates) if float(jax.tree.leaves(updates)[0][0]) < 2 else updates


@pytest.mark.ranks(1)
@pytest.mark.parametrize("update", [signs, untraced_signs])
def test_only_a_nan_of_the_users_ends_a_program_that_debugs_nans(update):
    gradients = [np.full(3, 0.5, np.float32), np.array([0.5, 0.0, 0.5], np.float32)]
    with jax.debug_nans(True), ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            params, optimizer = ms.jax.distribute({"w": np.ones(3, np.float32)}, optax.stateless(update))
        params = ms.jax.apply(optimizer, {"w": jnp.asarray(gradients[0])}, params)
        np.testing.assert_allclose(np.asarray(params["w"]), 0.9, rtol=1e-6)
        with pytest.raises(FloatingPointError, match="nan"):
            ms.jax.apply(optimizer, {"w": jnp.asarray(gradients[1])}, params)

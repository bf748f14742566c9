"""JAX under strategies: the numbers of one process of plain JAX and optax, whatever the ranks."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: make test-frameworks")

import jax.numpy as jnp  # noqa: E402
import optax  # noqa: E402

import mpistrat as ms  # noqa: E402
from tests.harness.jax_training import (  # noqa: E402
    BATCH,
    RULES,
    TREES,
    arrays,
    dataset,
    dict_tree,
    difference,
    plain,
    put,
    rows,
    train,
    train_by_run,
)


@pytest.mark.ranks(1, 2, 3, 4, timeout=180)
@pytest.mark.parametrize("kind", TREES)
def test_every_tree_equals_one_process(kind):
    if kind in ("linen", "nnx", "equinox"):
        pytest.importorskip("equinox" if kind == "equinox" else "flax")
    tree, step = TREES[kind]()
    expected = plain(tree, step, RULES["adam"][1]())
    with put(TREES[kind], "adam") as (strategy, params, step, optimizer):
        trained = train(strategy, params, step, optimizer)
        assert jax.tree.structure(trained) == jax.tree.structure(tree)
        assert difference(arrays(trained), expected) < 1e-9
        assert optimizer.iterations == 50


@pytest.mark.ranks(1, 2, 3, timeout=180)
@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "adam"])
def test_every_rule_equals_optax(rule):
    tree, step = dict_tree()
    expected = plain(tree, step, RULES[rule][1]())
    with put(rule=rule) as (strategy, params, step, optimizer):
        found = difference(arrays(train(strategy, params, step, optimizer)), expected)
        assert found < (1e-7 if rule == "schedule" else 1e-9)  # optax counts in int32, and so has float32 rates


def check_steps_of_run(strategy, kind="dict"):
    tree, step = TREES[kind]()
    expected = plain(tree, step, RULES["adam"][1]())
    with put(TREES[kind], "adam", strategy) as (strategy, params, step, optimizer):
        trained = train_by_run(strategy, params, step, optimizer)
        assert difference(arrays(trained), expected) < 1e-9


@pytest.mark.ranks(1, 2, timeout=180)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]), id="two_local_replicas"),
        pytest.param(lambda: ms.CentralStorageStrategy(), id="central_storage"),
    ],
)
def test_steps_of_run_equal_one_process(make):
    check_steps_of_run(make())


@pytest.mark.ranks(2, timeout=180)
@pytest.mark.parametrize("kind", ["named_tuples", "linen", "equinox"])
def test_steps_of_run_take_every_tree(kind):
    pytest.importorskip({"equinox": "equinox", "named_tuples": "jax"}.get(kind, "flax"))
    check_steps_of_run(ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]), kind)


@pytest.mark.ranks(1, timeout=180)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: ms.OneDeviceStrategy(), id="one_device"),
        pytest.param(lambda: ms.MirroredStrategy(devices=["cpu:0", "cpu:1"]), id="mirrored"),
    ],
)
def test_strategies_of_one_process(make):
    check_steps_of_run(make())


@pytest.mark.ranks(1, 2, 3, timeout=180)
def test_a_loss_that_is_a_part_of_the_whole():
    tree, step = dict_tree()
    expected = plain(tree, step, RULES["sgd"][1]())
    with put(loss="sum") as (strategy, params, step, optimizer):

        def part(params, x, y):
            loss, grads = step(params, x, y)
            scale = len(x) / ms.context.global_batch_size() if len(x) else 0.0
            return loss, jax.tree.map(lambda g: jnp.nan_to_num(g) * scale, grads)

        assert difference(arrays(train(strategy, params, part, optimizer)), expected) < 1e-9


@pytest.mark.ranks(2, 3, timeout=180)
def test_parameter_servers_that_wait_equal_one_process():
    tree, step = dict_tree()
    expected = plain(tree, step, RULES["sgd"][1](), epochs=4)
    with put(strategy=ms.ParameterServerStrategy(num_ps=1, max_staleness=0)) as (strategy, params, step, optimizer):

        def one(params, a, b):
            return ms.jax.apply(optimizer, step(params, a, b)[1], params, of=a)

        data = strategy.distribute_dataset(dataset(BATCH // strategy.num_workers))  # uneven at its end
        for _ in range(4):
            for batch in data:
                params = strategy.run(one, args=(params, *batch))
            strategy.barrier()  # one worker may have had a step more
            params = params if strategy.is_server else ms.jax.current(params)
        if not strategy.is_server:
            assert difference(arrays(ms.jax.current(params)), expected) < 1e-9


@pytest.mark.ranks(1, 2, timeout=180)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_every_dtype_lies_in_the_variables_memory(dtype):
    tree = {"a": jnp.ones(3, dtype), "b": jnp.full((2, 5), 2, dtype), "c": jnp.asarray(1.0, dtype)}
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            params, optimizer = ms.jax.distribute(tree), ms.optimizers.SGD(0.25)
        for _ in range(2):
            params = ms.jax.apply(optimizer, tree, params)
            variables = {v.name: v for v in optimizer.variables}
            for name, leaf in params.items():
                assert leaf.dtype == dtype
                assert leaf.unsafe_buffer_pointer() == variables[name].storage().ctypes.data
                assert leaf.unsafe_buffer_pointer() % 64 == 0
        assert [float(leaf.reshape(-1)[0]) for leaf in params.values()] == [0.5, 1.0, 0.5]


@pytest.mark.ranks(1, 2, timeout=180)
def test_what_the_strategy_writes_is_seen_through_the_arrays(mpi_tmp_path):
    path = mpi_tmp_path / "run.h5"
    with put(rule="momentum") as (strategy, params, step, optimizer):
        params = train(strategy, params, step, optimizer, epochs=1)
        strategy.save(path)
        saved = arrays(params)
        params = train(strategy, params, step, optimizer, epochs=1)
        again = arrays(params)
        strategy.restore(path)
        assert difference(arrays(params), saved) == 0
        read = jax.jit(lambda p: jax.tree.map(lambda leaf: leaf + 0, p))
        assert difference(arrays(read(params)), saved) == 0
        data = iter(strategy.distribute_dataset(ms.data.from_arrays(rows()).shuffle(seed=1).batch(BATCH)))
        for x, y in data:  # the same epoch as the second one was: each `train` begins at the first
            params = ms.jax.apply(optimizer, step(params, x, y)[1], params, of=x)
        assert difference(arrays(params), again) < 1e-12


@pytest.mark.ranks(1, 2, timeout=180)
def test_a_computation_that_nobody_has_waited_for_reads_the_old_numbers():
    n = 300
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            params, optimizer = ms.jax.distribute({"w": jnp.ones((n, n))}), ms.optimizers.SGD(1e-3)

        @jax.jit
        def slow(w, x):  # some tenths of a second, and reads the parameters until its end
            return jax.lax.fori_loop(0, 60, lambda _, a: jnp.dot(a, w) / n, x)[0, 0]

        ones = jnp.ones((n, n))
        slow(ones, ones).block_until_ready()
        pending = False
        for step in range(5):
            seen = slow(params["w"], ones) if strategy.rank == strategy.size - 1 else None
            pending = pending or (seen is not None and not seen.is_ready())
            old, params = params, ms.jax.apply(optimizer, {"w": ones}, params)
            assert old["w"].is_deleted()
            if seen is not None:
                assert abs(float(seen) - (1 - 1e-3 * step) ** 60) < 1e-9
            assert abs(float(params["w"][0, 0]) - (1 - 1e-3 * (step + 1))) < 1e-12
        assert pending or strategy.rank < strategy.size - 1  # else the test shows nothing


@pytest.mark.ranks(2, 3, timeout=180)
def test_rank_0s_numbers_are_everybodys():
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    tree = {"w": jnp.full(3, float(comm.rank)), "steps": jnp.asarray(comm.rank), "table": np.arange(2) + comm.rank}
    tree |= {"name": "model", "function": jnp.tanh, "number": 0.5, "key": jax.random.key(comm.rank)}
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            params = ms.jax.distribute(tree)
        assert params["w"].tolist() == [0.0] * 3
        assert (int(params["steps"]), params["table"].tolist()) == (0, [0, 1])
        assert params["function"] is jnp.tanh
        assert params["number"] == 0.5
        grads = dict.fromkeys(params) | {"w": jnp.full(3, 1.0 + comm.rank)}
        params = ms.jax.apply(ms.optimizers.SGD(1.0), grads, params)
        mean = (comm.size + 1) / 2
        assert params["w"].tolist() == [-mean] * 3
        assert params["key"] is tree["key"]


@pytest.mark.ranks(1, 2, timeout=180)
def test_parts_of_a_tree_may_have_optimizers_of_their_own():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            params = ms.jax.distribute({"body": {"w": jnp.zeros(3)}, "head": {"w": jnp.zeros(2)}})
            body, head = ms.optimizers.SGD(1.0), ms.optimizers.SGD(0.5)
        for _ in range(2):
            params["head"] = ms.jax.apply(head, {"w": jnp.ones(2)}, params["head"])
            params["body"] = ms.jax.apply(body, {"w": jnp.ones(3)}, params["body"])
        assert params["body"]["w"].tolist() == [-2.0] * 3
        assert params["head"]["w"].tolist() == [-1.0] * 2


@pytest.mark.ranks(1, 2, timeout=180)
def test_after_an_error_the_parameters_can_be_had_again():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            params = ms.jax.distribute({"w": jnp.ones(3)})
            optimizer = ms.optimizers.SGD(1.0, check_numerics=True)
        with pytest.raises(FloatingPointError):
            ms.jax.apply(optimizer, {"w": jnp.full(3, jnp.nan)}, params)
        assert params["w"].is_deleted()
        params = ms.jax.current(params)
        assert ms.jax.current(params)["w"] is params["w"]
        params = ms.jax.apply(optimizer, {"w": jnp.ones(3)}, params)
        assert params["w"].tolist() == [0.0] * 3


@pytest.mark.ranks(1, 2, timeout=180)
@pytest.mark.parametrize("rule", [None, optax.adam(0.1), optax.lamb(0.1)])
def test_a_scaled_loss_skips_steps_that_overflow(rule):
    """With an optimizer of the package, and rules of optax on blocks and on wholes."""
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            params = ms.jax.distribute({"w": jnp.ones(3)}, rule)
            params, inner = (params, ms.optimizers.SGD(0.1)) if rule is None else params
            optimizer = ms.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
        for number in range(3):
            scale = float(optimizer.scale_loss(1.0))
            assert scale == (8.0 if number < 2 else 4.0)
            bad = number == 1 and strategy.rank == strategy.size - 1
            gradient = jnp.full(3, jnp.inf if bad else scale)
            params = ms.jax.apply(optimizer, {"w": gradient}, params)
        assert optimizer.iterations == 2
    tree, tx = {"w": jnp.ones(3)}, rule or optax.sgd(0.1)
    state = tx.init(tree)
    for _ in range(2):
        updates, state = tx.update({"w": jnp.ones(3)}, state, tree)
        tree = optax.apply_updates(tree, updates)
    assert difference(arrays(params), arrays(tree)) < 1e-9


@pytest.mark.ranks(1, 2, timeout=180)
def test_keys_differ_between_replicas_and_repeat():
    from mpi4py import MPI

    with ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        draws = []
        for _ in range(2):
            drawn = strategy.run(lambda: np.array(jax.random.normal(ms.jax.key(7), (4,))))
            draws.append([a.tolist() for a in strategy.local_results(drawn)])
        assert draws[0] == draws[1]
        everywhere = [tuple(a) for mine in MPI.COMM_WORLD.allgather(draws[0]) for a in mine]
        assert len(set(everywhere)) == 2 * strategy.size


@pytest.mark.ranks(1, 2, 3, timeout=180)
def test_leaves_without_elements():
    """As plain JAX and optax do, also where the rule looks at the whole tree."""
    tree = {"w": np.ones(3), "none": np.ones((0, 2))}
    loss = jax.value_and_grad(lambda p, x: ((p["w"] ** 2).sum() + p["none"].sum()) * x.mean())
    for transformation in (optax.adam(0.1), optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))):
        theirs, state = tree, transformation.init(tree)
        with ms.MultiWorkerMirroredStrategy() as strategy:
            with strategy.scope():
                params, optimizer = ms.jax.distribute(tree, transformation)
            for _ in range(3):
                x = jnp.ones(2)
                params = ms.jax.apply(optimizer, loss(params, x)[1], params)
                updates, state = transformation.update(loss(theirs, x)[1], state, theirs)
                theirs = optax.apply_updates(theirs, updates)
            np.testing.assert_allclose(params["w"], theirs["w"], rtol=1e-12)
            assert params["none"].shape == (0, 2)


@pytest.mark.ranks(1, 2, 3, timeout=180)
def test_other_weights_are_assigned():
    with put(rule="momentum") as (_, params, step, optimizer):
        other, count = {"w": np.full((10, 16), 2.0, np.float32), "b": jnp.ones(16)}, jax.tree.map(jnp.copy, params)
        values = {"first": other, "second": {**dict_tree()[0]["second"]}}
        params = ms.jax.apply(optimizer, step(params, *rows())[1], params)
        pending = jax.jit(lambda p: p["first"]["w"] + 0)(params)
        old, params = params, ms.jax.assign(params, values)
        assert old["first"]["w"].is_deleted()
        assert float(pending[0, 0]) != 2  # read before the change
        for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(values), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        params["second"] = ms.jax.assign(params["second"], count["second"])
        ms.jax.apply(optimizer, step(params, *rows())[1], params)


@pytest.mark.ranks(2, 3, timeout=180)
def test_weights_in_parts_on_servers_are_assigned():
    values = {"rows": np.arange(12, dtype=np.float32).reshape(4, 3), "whole": np.ones(1, np.float32)}
    partitioner = ms.partitioners.FixedShardsPartitioner(2)
    with ms.ParameterServerStrategy(num_ps=1, variable_partitioner=partitioner) as strategy:
        with strategy.scope():
            params = ms.jax.distribute(jax.tree.map(np.zeros_like, values))
        params = ms.jax.assign(params, values)
        strategy.barrier()
        for name, value in values.items():
            np.testing.assert_array_equal(params[name], value)


@pytest.mark.ranks(1, 2, timeout=180)
def test_weights_that_do_not_fit_are_refused():
    with put() as (strategy, params, _, _):
        values = jax.tree.map(np.array, params)
        for wrong, text in (
            ({"first": values["first"]}, "a tree like params"),
            ({**values, "second": {**values["second"], "b": np.ones(4)}}, r"second/b: expected shape \(3,\)"),
            ({**values, "second": {**values["second"], "b": np.ones(3, int)}}, "second/b: expected a floating array"),
        ):
            with pytest.raises(ValueError, match=text):
                ms.jax.assign(params, wrong)
        with pytest.raises(ms.errors.ContextError, match="outside of steps"):
            strategy.run(ms.jax.assign, args=(params, values))
        with pytest.raises(ValueError, match="none of its arrays"):
            ms.jax.assign(values, values)
        if strategy.size > 1:
            values["first"]["b"][0] = strategy.rank
            with pytest.raises(ms.errors.CollectiveMismatchError):
                ms.jax.assign(params, values)
            params = ms.jax.current(params)
        assert params["second"]["w"].shape == (16, 3)

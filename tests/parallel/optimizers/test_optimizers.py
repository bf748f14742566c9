"""Optimizers on several ranks and replicas: the numbers of a serial run, each rank with its own part of the slots."""

import functools

import numpy as np
import pytest

from tests.models import optimizer_reference as reference

CASES = reference.cases()
SHAPES = ((70001,), (3, 5), (), (129, 513))
DEVICES = {"one": ["cpu:0"], "two": ["cpu:0", "cpu:1"]}


@functools.cache
def gradients_of(step, shapes=SHAPES):
    """The gradients of one step, summed over all replicas."""
    return [np.random.default_rng((step, i)).normal(size=shape) for i, shape in enumerate(shapes)]


def share_of(gradient, replica, replicas):
    """One replica's part of a gradient: the parts add up to it."""
    return gradient * ((replica + 1) * 2 / (replicas * (replicas + 1)))


def start_of(shapes=SHAPES):
    return [np.random.default_rng(99 + i).normal(size=shape) for i, shape in enumerate(shapes)]


def train(strategy, optimizer, variables, steps, in_place=True):
    import mpistrat as ms

    replicas = strategy.num_replicas_in_sync
    shapes = tuple(v.shape for v in variables)

    def step(number):
        mine = ms.get_replica_context().replica_id_in_sync_group
        parts = [share_of(g, mine, replicas) for g in gradients_of(number, shapes)]
        if in_place:
            for variable, part in zip(variables, parts, strict=True):
                variable.grad[...] = part
            parts = [v.grad for v in variables]
        optimizer.apply_gradients(list(zip(parts, variables, strict=True)))

    for number in steps:
        strategy.run(step, args=(number,))


def make(strategy, build, shapes=SHAPES):
    import mpistrat as ms

    with strategy.scope():
        variables = [ms.Variable(value, name=f"v{i}") for i, value in enumerate(start_of(shapes))]
        return build(ms.optimizers), variables


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("devices", DEVICES)
def test_any_layout_equals_the_formula(devices):
    import mpistrat as ms

    for name, (build, rule, rate) in CASES.items():
        with ms.MirroredStrategy(devices=DEVICES[devices]) as strategy:
            optimizer, variables = make(strategy, build)
            train(strategy, optimizer, variables, range(3))
            weights, slots = reference.run(rule, start_of(), gradients_of, range(3), rate)
            for variable, expected, kept in zip(variables, weights, slots, strict=True):
                np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-12, atol=1e-13, err_msg=name)
                ours = optimizer.slots(variable)
                assert set(ours) == set(kept)
                for slot, array in kept.items():
                    np.testing.assert_allclose(ours[slot], array, rtol=1e-12, atol=1e-13, err_msg=f"{name} {slot}")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_compiled_loops_and_numpy_give_the_same_bits(dtype, monkeypatch):
    import mpistrat as ms
    from mpistrat.base import loops

    if not loops.used()[0]:
        pytest.skip(f"no compiled loops: {loops.used()[1]}")
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    called = []

    def trained(build):
        with ms.MirroredStrategy(devices=DEVICES["two"]) as strategy:
            with strategy.scope():
                variables = [ms.Variable(value.astype(dtype), name=f"v{i}") for i, value in enumerate(start_of())]
                optimizer = build(ms.optimizers)
            train(strategy, optimizer, variables, range(3))
            arrays = [variable.numpy() for variable in variables]
            return arrays + [slot for v in variables for slot in optimizer.slots(v).values()]

    builds = {
        name: CASES[name][0] for name in ("adamw", "momentum")
    }  # each rule by itself: tests/single/base/test_loops.py
    builds["clipnorm"] = lambda optimizers: optimizers.Adam(0.1, clipnorm=0.5, use_ema=True)
    builds["accumulation"] = lambda optimizers: optimizers.Adam(
        0.1, gradient_accumulation_steps=2, global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=2
    )
    for name, build in builds.items():
        ours = trained(build)
        with monkeypatch.context() as patch:
            for loop in ("add", "narrow", "update", "_squares"):
                patch.setattr(loops, loop, lambda *_: called.append(1) or False)
            expected = trained(build)
        assert called
        for mine, numpys in zip(ours, expected, strict=True):
            assert mine.tobytes() == numpys.tobytes(), name


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("ops", ["MpiAllReduce", "ReductionToOneDevice", "HierarchicalAllReduce"])
@pytest.mark.parametrize("shared", ["1", "0"])
def test_every_algorithm_with_and_without_shared_memory(ops, shared, monkeypatch):
    import mpistrat as ms

    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", shared)
    build, rule, rate = CASES["adamw"]
    for clip in (None, 30.0):
        algorithm = getattr(ms, ops)()
        with ms.MultiWorkerMirroredStrategy(devices=DEVICES["two"], cross_device_ops=algorithm) as strategy:
            optimizer, variables = make(strategy, build)
            optimizer.global_clipnorm = clip
            train(strategy, optimizer, variables, range(2), in_place=False)
            limit = clip or 1e9
            clipped = [reference.clip(gradients_of(step), limit) for step in range(2)]
            weights, slots = reference.run(rule, start_of(), clipped.__getitem__, range(2), rate)
            for variable, expected, kept in zip(variables, weights, slots, strict=True):
                np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-12, atol=1e-13)
                np.testing.assert_allclose(
                    optimizer.slots(variable)["velocity"], kept["velocity"], rtol=1e-12, atol=1e-13
                )


@pytest.mark.ranks(1, 2, 3)
def test_central_storage_does_the_same():
    import mpistrat as ms

    build, rule, rate = CASES["momentum"]
    with ms.CentralStorageStrategy() as strategy:
        optimizer, variables = make(strategy, build)
        train(strategy, optimizer, variables, range(2))
        state = optimizer.get_state()
        weights, slots = reference.run(rule, start_of(), gradients_of, range(2), rate)
        for variable, expected, kept in zip(variables, weights, slots, strict=True):
            np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(
                state["slots"][variable.name]["momentum"], kept["momentum"], rtol=1e-12, atol=1e-13
            )


@pytest.mark.ranks(1, 2, 4)
def test_each_rank_keeps_its_part_of_the_slots():
    from mpi4py import MPI

    import mpistrat as ms

    comm = MPI.COMM_WORLD
    with ms.MirroredStrategy() as strategy:
        optimizer, variables = make(strategy, CASES["adam"][0], shapes=((100_000,),))
        train(strategy, optimizer, variables, range(1))
        mine = optimizer._core.slots.of(variables[0].arena)
        sizes = [array.size for array in mine.arrays.values()]
        assert sizes == [mine.high - mine.low] * 2
        total = np.zeros(1, np.int64)
        comm.Allreduce(np.array([sizes[0]], np.int64), total)
        assert total[0] == 100_000
        assert abs(sizes[0] - 100_000 / comm.size) <= 16


@pytest.mark.ranks(1, 2, 3, 4)
def test_the_same_layout_gives_the_same_bits():
    import mpistrat as ms

    found = []
    for _ in range(2):
        with ms.MultiWorkerMirroredStrategy(devices=DEVICES["two"]) as strategy:
            optimizer, variables = make(strategy, lambda o: o.Adam(0.1, global_clipnorm=5.0))
            train(strategy, optimizer, variables, range(4))
            found.append([v.numpy().tobytes() for v in variables])
    assert found[0] == found[1]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", CASES)
def test_state_restores_on_any_layout(name):
    """The reference's own state, given to any number of ranks, goes on as the reference does."""
    import mpistrat as ms

    build, rule, rate = CASES[name]
    weights, slots = reference.run(rule, start_of(), gradients_of, range(2), rate)
    with ms.MirroredStrategy() as strategy:
        optimizer, variables = make(strategy, build)
        for variable, value in zip(variables, weights, strict=True):
            variable.assign(value)
        named = {v.name: s for v, s in zip(variables, slots, strict=True)} if optimizer.slot_names else {}
        optimizer.set_state({"iterations": 2, "slots": named})
        train(strategy, optimizer, variables, range(2, 4))
        assert optimizer.iterations == 4
        expected, _ = reference.run(rule, weights, gradients_of, range(2, 4), rate, slots)
        for variable, value in zip(variables, expected, strict=True):
            np.testing.assert_allclose(variable.numpy(), value, rtol=1e-12, atol=1e-13)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_gradients_are_summed_in_float32(dtype):
    import mpistrat as ms

    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    with ms.MirroredStrategy(devices=DEVICES["two"]) as strategy:
        with strategy.scope():
            w = ms.Variable(np.zeros(70001), dtype=dtype, name="w")
            optimizer = ms.optimizers.SGD(1.0)
        replicas = strategy.num_replicas_in_sync

        def step():
            # 256, and 1/2 on every other replica: each 1/2 would be lost next to 256 in bfloat16
            first = ms.get_replica_context().replica_id_in_sync_group == 0
            w.grad[...] = 256 if first else 0.5
            optimizer.apply_gradients([(w.grad, w)])

        strategy.run(step)
        exact = -(256 + 0.5 * (replicas - 1))
        rounded = np.array([exact], np.float32).astype(w.dtype).astype(np.float32)[0]
        assert set(w.numpy().astype(np.float32).tolist()) == {rounded}


@pytest.mark.ranks(1, 2, 3)
def test_sparse_and_absent_gradients():
    import mpistrat as ms

    with ms.MirroredStrategy(devices=DEVICES["two"]) as strategy:
        with strategy.scope():
            table = ms.Variable(np.zeros((50, 3)), name="table")
            kept = ms.Variable(np.ones(5), name="kept")
            optimizer = ms.optimizers.SGD(1.0)
        replicas = strategy.num_replicas_in_sync

        def step():
            mine = ms.get_replica_context().replica_id_in_sync_group
            rows = ms.IndexedSlices(np.ones((3, 3)), np.array([mine, 49, 49]))
            optimizer.apply_gradients([(rows, table), (None, kept)])

        strategy.run(step)
        expected = np.zeros((50, 3))
        expected[:replicas] -= 1
        expected[49] -= 2 * replicas
        assert np.array_equal(table.numpy(), expected)
        assert kept.numpy().tolist() == [1] * 5


@pytest.mark.ranks(1, 2)
def test_gradients_that_were_summed_already():
    import mpistrat as ms

    with ms.MirroredStrategy(devices=DEVICES["two"]) as strategy:
        with strategy.scope():
            w = ms.Variable(np.zeros(70001), name="w")
            optimizer = ms.optimizers.SGD(1.0)

        def step():
            total = ms.get_replica_context().all_reduce("SUM", np.full(70001, 2.0))
            optimizer.apply_gradients([(total, w)], experimental_aggregate_gradients=False)

        strategy.run(step)
        assert set(w.numpy().tolist()) == {-2.0 * strategy.num_replicas_in_sync}


@pytest.mark.ranks(1, 2, 3)
def test_constraints_of_all_ranks():
    import mpistrat as ms

    with ms.MirroredStrategy() as strategy:
        with strategy.scope():
            w = ms.Variable(np.linspace(-1, 1, 1000), name="w", constraint=lambda value: np.clip(value, 0.0, 0.5))
            optimizer = ms.optimizers.SGD(1.0)
        strategy.run(lambda: optimizer.apply_gradients([(np.zeros(1000), w)]))
        assert np.array_equal(w.numpy(), np.clip(np.linspace(-1, 1, 1000), 0, 0.5))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("shared", ["1", "0"])
def test_what_all_rules_have_in_common_on_any_layout(shared, monkeypatch):
    import mpistrat as ms

    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", shared)
    for name, said in reference.SETTINGS.items():
        numerics = "ema" in name  # with and without
        with ms.MultiWorkerMirroredStrategy(devices=DEVICES["two"]) as strategy:
            optimizer, variables = make(strategy, lambda o: o.Adam(0.03, **said, check_numerics=numerics))  # noqa: B023
            train(strategy, optimizer, variables, range(4))
            weights, averages = reference.apply(reference.adam(), start_of(), gradients_of, 4, 0.03, **said)
            for variable, expected, average in zip(variables, weights, averages, strict=True):
                np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-11, atol=1e-13, err_msg=name)
                if "use_ema" in said:
                    np.testing.assert_allclose(optimizer.slots(variable)["average"], average, rtol=1e-11, atol=1e-13)


@pytest.mark.ranks(1, 2)
def test_averages_and_accumulated_gradients_go_on_after_restore(mpi_tmp_path):
    import mpistrat as ms

    said = reference.SETTINGS["accumulate, clip, decay, ema"]
    path = mpi_tmp_path / "run.h5"
    for devices, calls in (("two", range(3)), ("one", range(3, 6))):  # in the middle of an update
        with ms.MirroredStrategy(devices=DEVICES[devices]) as strategy:
            optimizer, variables = make(strategy, lambda o: o.Adam(0.03, **said))
            if calls.start:
                strategy.restore(path)
                assert (optimizer.iterations, optimizer._core.calls) == (1, 3)
            train(strategy, optimizer, variables, calls)
            strategy.save(path)
            found = [v.numpy() for v in variables]
    weights, _ = reference.apply(reference.adam(), start_of(), gradients_of, 6, 0.03, **said)
    for value, expected in zip(found, weights, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("shared", ["1", "0"])
def test_numbers_that_are_not_finite_are_refused_on_every_rank(shared, monkeypatch):
    from mpi4py import MPI

    import mpistrat as ms

    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", shared)
    last = MPI.COMM_WORLD.size - 1
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            variables = [ms.Variable(np.ones(size, np.float32), name=f"v{size}") for size in (300_000, 300)]
            optimizer = ms.optimizers.SGD(1.0, check_numerics=True)

        def step(value):
            for v in variables:
                v.grad[...] = 0.0
            variables[1].grad[7:9] = value
            optimizer.apply_gradients([(v.grad, v) for v in variables])

        strategy.run(step, args=(0.0,))
        text = rf"v300: expected finite numbers, got rank {last}: 2 that are not, of 300, in step 2\. "
        with pytest.raises(FloatingPointError, match=text):
            strategy.run(step, args=(np.nan if strategy.rank == last else 0.0,))
        if last:  # finite on each rank, but not the sum
            with pytest.raises(FloatingPointError, match="2 that are not in the sum over all replicas"):
                strategy.run(step, args=(3e38,))
        assert optimizer.iterations == 1
        assert all(set(v.numpy().tolist()) == {1.0} for v in variables)
        strategy.run(step, args=(0.0,))
        assert optimizer.iterations == 2


@pytest.mark.ranks(1, 2)
def test_wrong_places_are_refused():
    import mpistrat as ms

    with ms.MirroredStrategy(devices=DEVICES["two"]) as strategy:
        with strategy.scope():
            w = ms.Variable(np.zeros(2), name="w")
            optimizer = ms.optimizers.SGD(0.1)
            with pytest.raises(ms.errors.ContextError, match=r"strategy\.run"):
                optimizer.apply_gradients([(np.ones(2), w)])
        stranger = ms.Variable(np.zeros(2))  # of the default strategy
        with pytest.raises(ValueError, match="outside of every scope"):
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), stranger)]))

        def differ():
            first = ms.get_replica_context().replica_id_in_sync_group % 2 == 0
            optimizer.apply_gradients([(np.ones(2) if first else None, w)])

        with pytest.raises(ValueError, match="others on local replica 1"):
            strategy.run(differ)
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), w)]))
        with pytest.raises(ValueError, match="Create one optimizer for each strategy"):
            optimizer.apply_gradients([(np.ones(2), stranger)])
    with pytest.raises((ms.errors.ClosedError, ms.errors.ContextError)):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), w)]))


@pytest.mark.ranks(2)
def test_an_optimizer_keeps_no_shared_memory_from_being_freed():
    import weakref

    import mpistrat as ms

    with ms.MirroredStrategy(devices=DEVICES["two"]) as strategy:
        optimizer, variables = make(strategy, lambda o: o.Adam(0.1, global_clipnorm=1.0))
        train(strategy, optimizer, variables, range(1))
        arena = variables[0].arena
        memory = [weakref.ref(array.base) for array in (*arena.copies, *arena.gradients.node)]
        assert all(reference() is not None for reference in memory)
        del variables, arena
    assert all(reference() is None for reference in memory)
    assert optimizer.iterations == 1


def test_ratios_of_norms_are_of_whole_variables_whatever_the_ranks():
    """One variable of 70,001 elements lies on all ranks' slices; another is 0, and moves by the rate alone."""
    import mpistrat as ms

    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        number = strategy.num_replicas_in_sync
        w, zero = ms.Variable(np.full(70001, 2.0)), ms.Variable(np.zeros(5))
        optimizer = ms.optimizers.Lamb(0.5, epsilon=1e-15)

        def step():
            ones = np.full(70001, 3.0 / number), np.full(5, -1.0 / number)
            optimizer.apply_gradients(list(zip(ones, (w, zero), strict=True)))

        strategy.run(step)
        # The direction at the first step is the gradient's sign: of norm sqrt(n), as 2 is of the weights' norm over it.
        assert np.allclose(w.numpy(), 2 - 0.5 * 2, rtol=1e-12)
        assert np.allclose(zero.numpy(), 0.5, rtol=1e-12)

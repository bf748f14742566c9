"""Gradients that are handed over: the bits of an ordinary step, what a rank keeps of them, and mistakes.

One node, ranks without shared memory, or nodes made up on this machine, as in test_sharded_slots.
"""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.arena import buckets
from tests.harness.gradient_memory import memory_of
from tests.harness.process_groups import set_layout
from tests.models.optimizer_states import assert_same, state_of

SIZES = (150_007, 15, 1, 133_177, 65_003)
HANDED_OVER = [[4], [3, 1]]
pytestmark = pytest.mark.ranks(2, 3, 4)


@pytest.fixture(params=["shared", "private", "nodes"])
def opened(request, monkeypatch):
    """A function that makes a strategy whose buckets are small: each variable but the smallest fills some."""
    if request.param != "shared":
        set_layout(request.param, monkeypatch)
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 200_000)
    return lambda sharded=True, **more: ms.MultiWorkerMirroredStrategy(sharded_gradients=sharded, **more)


def make(strategy, build, dtype="float32"):
    rng = np.random.default_rng(99)
    with strategy.scope():
        variables = [ms.Variable(rng.normal(size=size), name=f"v{i}", dtype=dtype) for i, size in enumerate(SIZES)]
        return variables, build(ms.optimizers)


def gradient_of(variable, number):
    replica = ms.get_replica_context().replica_id_in_sync_group
    return np.random.default_rng((number, int(variable.name[1:]), replica)).normal(size=variable.shape)


def train(strategy, variables, optimizer, handed_over=HANDED_OVER, steps=3):
    """Take steps; `handed_over` are the indices of variables that are given to `begin` together, in order."""

    def step(number):
        for variable in variables:
            variable.grad[...] = gradient_of(variable, number)
        for chosen in handed_over:
            optimizer.begin([variables[i] for i in chosen])
        optimizer.apply_gradients([(v.grad, v) for v in variables])

    for number in range(steps):
        strategy.run(step, args=(number,))


def both_ways(opened, build, handed_over=HANDED_OVER, dtype="float32", train=train, **more):
    found = []
    for sharded, chosen in ((True, handed_over), (False, ())):
        with opened(sharded, **more) as strategy:
            variables, optimizer = make(strategy, build, dtype)
            train(strategy, variables, optimizer, chosen)
            found.append(state_of(variables, optimizer))
    assert_same(*found)


BUILDS = {
    "SGD": lambda o: o.SGD(0.1, weight_decay=0.01),
    "Adam, clipped": lambda o: o.Adam(0.01, global_clipnorm=3.0),
    "Adam, each clipped": lambda o: o.Adam(0.01, clipnorm=1.0, check_numerics=True),
    "Lamb": lambda o: o.Lamb(0.01),
    "Adafactor": lambda o: o.Adafactor(0.01),
    "accumulation": lambda o: o.Adam(0.01, gradient_accumulation_steps=2, loss_scale_factor=4.0),
}


@pytest.mark.parametrize("build", BUILDS)
def test_bits_are_those_of_an_ordinary_step(opened, build):
    both_ways(opened, BUILDS[build])


def test_a_gradient_that_is_refused_leaves_the_others(opened):
    """The program may give right ones, and call again."""
    with opened() as strategy:
        with strategy.scope():
            a, b = (ms.Variable(np.zeros(size, np.float32), name=f"v{size}") for size in (10, 4))
            optimizer = ms.optimizers.SGD(1.0)

        def step():
            a.grad[...], b.grad[...] = 5, 7
            with pytest.raises(ValueError, match="shape"):
                optimizer.apply_gradients([(a.grad, a), (np.zeros(3, np.float32), b)])
            optimizer.apply_gradients([(a.grad, a), (b.grad, b)])

        strategy.run(step)
        n = strategy.num_replicas_in_sync
        assert (np.asarray(a) == -5 * n).all()
        assert (np.asarray(b) == -7 * n).all()


def test_an_optimizer_that_has_begun_in_another_strategy(opened):
    """As long as it took no step there."""
    optimizer = ms.optimizers.SGD(1.0)
    with opened(False) as first, opened() as second:
        with first.scope():
            a = ms.Variable(np.zeros(300_000, np.float32), name="a")
        with second.scope():
            b = ms.Variable(np.zeros(10, np.float32), name="b")

        def begin():
            a.grad[...] = 1
            optimizer.begin([a])
            with pytest.raises(ValueError, match="twice"):
                optimizer.begin([a])

        def step():
            b.grad[...] = 1
            gradient = b.grad
            optimizer.begin([b])
            optimizer.apply_gradients([(gradient, b)])

        first.run(begin)
        for number in (1, 2):
            second.run(step)
            assert (np.asarray(b) == -number * second.num_replicas_in_sync).all()


def test_a_program_that_never_calls_begin(opened):
    both_ways(opened, BUILDS["Adam, clipped"], handed_over=[])


@pytest.mark.parametrize("handed_over", [[], [[0, 1, 2, 3, 4]], [[0], [4], [2]]])
def test_none_all_and_another_order_of_variables(opened, handed_over):
    both_ways(opened, BUILDS["Adam, clipped"], handed_over)
    both_ways(opened, BUILDS["Adafactor"], handed_over)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_other_dtypes(opened, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    both_ways(opened, BUILDS["accumulation"], dtype=dtype)


@pytest.mark.ranks(1, 2, 3)
def test_several_replicas_a_rank(opened, request):
    if "nodes" in request.node.callspec.params.values():
        pytest.skip("its topology has one replica a rank")
    both_ways(opened, BUILDS["Adam, clipped"], devices=["cpu:0", "cpu:1"])


def test_fewer_bytes_between_nodes(opened):
    both_ways(opened, BUILDS["SGD"], communication_options=ms.CommunicationOptions(wire="bfloat16"))


def test_where_MPI_allows_one_thread_only(opened, monkeypatch):
    from mpi4py import MPI

    from mpistrat.arena import early

    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    monkeypatch.setattr(early.threading, "Thread", None)
    both_ways(opened, BUILDS["Adam, clipped"])


def test_variables_of_two_dtypes(opened):
    found = []
    for sharded in (True, False):
        with opened(sharded) as strategy:
            singles, optimizer = make(strategy, BUILDS["SGD"])
            with strategy.scope():
                doubles = [ms.Variable(np.ones(s), name=f"d{i}", dtype="float64") for i, s in enumerate((90_001, 3))]
            variables = [singles[0], doubles[0], singles[1], doubles[1], *singles[2:]]
            train(strategy, variables, optimizer, [[5, 1], [0, 2, 3]] if sharded else ())
            found.append([v.numpy() for v in variables])
    for ours, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_gradients_elsewhere_and_by_rows(opened):
    """As apply_gradients takes them: arrays of the program, rows, None; and those of v.grad from before begin."""

    def train_so(strategy, variables, optimizer, handed_over):
        def step(number):
            given = [gradient_of(v, number) for v in variables]
            variables[3].grad = given[3]
            given[3] = variables[3].grad
            for chosen in handed_over:
                optimizer.begin([variables[i] for i in chosen])
            given[0] = ms.IndexedSlices(given[0][:7], np.array([5, 150_006, 5, 0, 1, 2, 77]), (SIZES[0],))
            given[2] = None
            optimizer.apply_gradients(list(zip(given, variables, strict=True)))

        for number in range(3):
            strategy.run(step, args=(number,))

    both_ways(opened, BUILDS["Adam, clipped"], [[3]], train=train_so)


def test_two_optimizers_in_one_arena(opened):
    def step(number):
        for variable in variables:
            variable.grad[...] = gradient_of(variable, number)
        if sharded:
            second.begin([variables[4]])
            first.begin([variables[0], variables[1]])
            second.begin([variables[3]])
        first.apply_gradients([(v.grad, v) for v in variables[:2]])
        second.apply_gradients([(v.grad, v) for v in variables[2:]])

    found = []
    for sharded in (True, False):
        with opened(sharded) as strategy:
            variables, first = make(strategy, BUILDS["SGD"])
            with strategy.scope():
                second = ms.optimizers.Momentum(0.1)
            for number in range(3):
                strategy.run(step, args=(number,))
            found.append([v.numpy() for v in variables])
    for ours, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, expected)


# what is there of a gradient


def test_a_gradient_is_zero_in_a_new_step_and_gone_when_handed_over(opened):
    with opened() as strategy:
        variables, optimizer = make(strategy, BUILDS["SGD"])

        def step():
            for variable in variables:
                assert not variable.grad.any()
                variable.grad += 1
            before = variables[4].grad
            optimizer.begin([variables[4]])
            gone = variables[4].grad
            uses = [
                lambda: gone[0], lambda: gone.sum(), lambda: np.asarray(gone), lambda: gone * 2, lambda: before + gone,
                lambda: np.multiply(2, 3, out=gone), lambda: len(gone), lambda: np.concatenate([before, gone]),
            ]  # fmt: skip
            for use in uses:
                with pytest.raises(ValueError, match=r"v4: expected no use of a gradient after Optimizer\.begin"):
                    use()
            with pytest.raises(ValueError, match="v4: expected no use"):
                variables[4].grad = 1
            before[...] = 7  # the program's own memory by now
            optimizer.apply_gradients([(v.grad, v) for v in variables])

        strategy.run(step)
        strategy.run(step)
        fresh = np.random.default_rng(99)
        for variable, size in zip(variables, SIZES, strict=True):
            start = fresh.normal(size=size).astype(np.float32)
            for _ in range(2):
                start -= np.float32(0.1) * np.float32(0.01) * start
                start -= np.float32(0.1) * np.float32(strategy.num_replicas_in_sync)
            np.testing.assert_allclose(variable.numpy(), start, rtol=1e-5, atol=1e-5)


def test_memory():
    """Weights and sums once a node, and two buckets a rank, instead of all gradients of each; beside them one gradient."""
    from mpi4py import MPI

    size, slack = MPI.COMM_WORLD.size, 300_000
    shared, private, whole = memory_of(True)
    assert abs(shared - (2 * whole + 2 * buckets.BUCKET_BYTES * size)) < slack
    assert private < whole // 16 + slack
    shared, private, whole = memory_of(False)
    assert abs(shared - (1 + size) * whole) < slack


# mistakes


def wrong(opened, act, error, words, build=BUILDS["SGD"]):
    """Have a step that should fail on all ranks; then right ones must give the numbers of a run without the mistake."""
    from mpi4py import MPI

    with opened() as strategy:
        variables, optimizer = make(strategy, build)
        train(strategy, variables, optimizer, steps=1)
        said = ""
        try:
            strategy.run(act, args=(variables, optimizer))
        except error as got:
            said = str(got)
        told = MPI.COMM_WORLD.allgather(said)
        assert all(words in text for text in told), told
        train(strategy, variables, optimizer, [[4], [0]], steps=2)
        found = [v.numpy() for v in variables]
    with opened(False) as strategy:
        variables, optimizer = make(strategy, build)
        train(strategy, variables, optimizer, (), steps=1)
        train(strategy, variables, optimizer, (), steps=2)
        for ours, expected in zip(found, variables, strict=True):
            np.testing.assert_array_equal(ours, expected.numpy())


def test_a_variable_twice(opened):
    def act(variables, optimizer):
        optimizer.begin([variables[4]])
        optimizer.begin([variables[3], variables[4]])

    wrong(opened, act, ValueError, "v4: expected each variable once in a step, got 'v4' twice")


def test_a_variable_that_the_step_leaves_out(opened):
    def act(variables, optimizer):
        optimizer.begin([variables[4], variables[1]])
        optimizer.apply_gradients([(v.grad, v) for v in variables[:4]])

    wrong(opened, act, ValueError, "v4: expected a gradient for each variable passed to begin, got none")


def test_another_gradient_than_the_one_handed_over(opened):
    def act(variables, optimizer):
        optimizer.begin([variables[4]])
        optimizer.apply_gradients([(np.zeros(v.shape, np.float32), v) for v in variables])

    wrong(opened, act, ValueError, "v4: expected its gradient in v.grad, got one elsewhere")


def test_a_gradient_that_does_not_fit(opened):
    def act(variables, optimizer):
        optimizer.begin([variables[4]])
        optimizer.apply_gradients([(np.zeros(3, np.float32) if v is variables[0] else v.grad, v) for v in variables])

    wrong(opened, act, ValueError, "v0: expected a gradient of shape (150007,), got shape (3,)")


def test_sums_that_are_sums_already(opened):
    def act(variables, optimizer):
        optimizer.apply_gradients([(v.grad, v) for v in variables], experimental_aggregate_gradients=False)

    wrong(opened, act, ValueError, "expected gradients that sharded_gradients sums")


def test_numbers_that_are_not_finite(opened):
    def act(variables, optimizer):
        if ms.get_replica_context().replica_id_in_sync_group == 0:
            variables[3].grad[17] = np.inf
        optimizer.begin([variables[3]])
        optimizer.apply_gradients([(v.grad, v) for v in variables])

    words = "v3: expected finite numbers, got 1 that are not in the sum over all replicas, of 133177, in step 2."
    wrong(opened, act, FloatingPointError, words, lambda o: o.SGD(0.1, check_numerics=True))


def test_a_scaled_loss_that_overflows(opened):
    with opened() as strategy:
        with strategy.scope():
            w = ms.Variable(np.zeros(200_001, np.float32), name="w")
            optimizer = ms.optimizers.LossScaleOptimizer(ms.optimizers.SGD(1.0), initial_scale=8.0)

        def step(value):
            w.grad[...] = value
            optimizer.inner_optimizer.begin([w])
            optimizer.apply_gradients([(w.grad, w)])

        strategy.run(step, args=(np.inf,))
        assert float(optimizer.dynamic_scale) == 4.0 and not w.numpy().any()
        strategy.run(step, args=(4.0,))
        np.testing.assert_array_equal(w.numpy(), -np.float32(strategy.num_replicas_in_sync))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"local_steps": 2}, "local_steps"),
        ({"replicas": 4}, "OrderedAllReduce"),
        ({"cross_device_ops": ms.MpiAllReduce()}, "MpiAllReduce"),
        ({"sharded_slots": False}, "sharded_slots=False"),
        ({"communication_options": ms.CommunicationOptions(wire="int8")}, "wire='int8'"),
    ],
)
def test_what_it_cannot_be_combined_with(opened, request, more, words):
    alone = "shared" in request.node.callspec.params.values()
    if alone and ("sharded_slots" in more or "communication_options" in more):
        opened(**more).close()
        return
    with pytest.raises(ValueError, match=rf"sharded_gradients: expected gradients summed .* got .*{words}"):
        opened(**more)


def test_ranks_must_agree(opened):
    from mpi4py import MPI

    with pytest.raises(ms.errors.CollectiveMismatchError, match="sharded_gradients"):
        opened(MPI.COMM_WORLD.rank == 0)


@pytest.mark.ranks(2, 3)
def test_a_step_that_ends_by_an_error_is_forgotten():
    with ms.MultiWorkerMirroredStrategy(sharded_gradients=True) as strategy:
        with strategy.scope():
            v, u = (ms.Variable(np.zeros(10, np.float32), name=name) for name in "vu")
            optimizer = ms.optimizers.SGD(1.0)

        def step(bad):
            v.grad[...] = 1
            optimizer.begin([v])
            if bad:
                raise OverflowError("a bad batch")
            u.grad[...] = 1
            optimizer.apply_gradients([(v.grad, v), (u.grad, u)])

        for number in range(4):
            if number == 1:
                with pytest.raises(OverflowError):
                    strategy.run(step, args=(True,))
            else:
                strategy.run(step, args=(False,))
        assert (v.numpy() == -3 * strategy.size).all()
        assert (u.numpy() == -3 * strategy.size).all()


@pytest.mark.ranks(2)
def test_a_gradient_that_is_changed_after_begin_is_told():
    with ms.MultiWorkerMirroredStrategy(sharded_gradients=True) as strategy:
        with strategy.scope():
            v, optimizer = ms.Variable(np.zeros(10, np.float32), name="v"), ms.optimizers.SGD(1.0)

        def step():
            gradient = v.grad
            gradient[...] = 1
            optimizer.begin([v])
            gradient *= 0.5
            optimizer.apply_gradients([(gradient, v)])

        with pytest.raises(ValueError, match="changed after begin"):
            strategy.run(step)

        def compare():
            v.grad[...] = 1
            optimizer.begin([v])
            return v.grad == 0

        with pytest.raises(ValueError, match="after Optimizer.begin"):
            strategy.run(compare)


@pytest.mark.ranks(3)
def test_bits_of_small_arenas_between_nodes(monkeypatch):
    """An arena that is not divided over nodes crosses the network in the chunks of an ordinary step."""
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")

    def trained(sharded):
        with ms.MultiWorkerMirroredStrategy(sharded_gradients=sharded) as strategy:
            with strategy.scope():
                variables = [ms.Variable(np.zeros(size, np.float32)) for size in (100_007, 15, 30_003)]
                optimizer = ms.optimizers.SGD(1.0)

            def step():
                for number, v in enumerate(variables):
                    v.grad[...] = np.random.default_rng((number, strategy.rank)).normal(size=v.shape)
                if sharded:
                    optimizer.begin(variables)
                optimizer.apply_gradients([(v.grad, v) for v in variables])

            strategy.run(step)
            return [v.numpy().tobytes() for v in variables]

    assert trained(True) == trained(False)

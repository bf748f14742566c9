"""ON_WRITE variables: aggregation of what replicas write, writes that concern all, one copy on a node."""

import numpy as np
import pytest

from mpistrat.base.distributed_values import Mirrored, PerReplica
from mpistrat.errors import ClosedError, CollectiveMismatchError, ContextError
from mpistrat.types import IndexedSlices, VariableAggregation
from mpistrat.variables import Variable
from mpistrat.variables.kinds import apply_constraint
from tests.harness.variable_harness import VariableHarness, replica_id

NONE, SUM = VariableAggregation.NONE, VariableAggregation.SUM
MEAN, FIRST = VariableAggregation.MEAN, VariableAggregation.ONLY_FIRST_REPLICA


def devices_of(layout, rank):
    count = {"one": 1, "two": 2, "uneven": 1 + rank % 2}[layout]
    return [f"cpu:{k}" for k in range(count)]


def same_everywhere(array):
    from mpi4py import MPI

    return len(set(MPI.COMM_WORLD.allgather(np.asarray(array).tobytes()))) == 1


@pytest.fixture(params=["one-shared", "uneven-shared", "two-private"])
def harness(request):
    from mpi4py import MPI

    layout, _, memory = request.param.partition("-")
    with VariableHarness(devices_of(layout, MPI.COMM_WORLD.rank), shared_memory=memory == "shared") as made:
        yield made


@pytest.fixture(params=[True, False], ids=["shared", "private"])
def shared(request):
    return request.param


@pytest.mark.ranks(1, 2, 3, 4)
def test_writes_in_replica_context_are_aggregated(harness):
    n = harness.topology.num_replicas
    ids = np.arange(n)
    with harness.scope():
        made = {(op, how): Variable(np.ones((2, 3)), aggregation=how) for op in OPS for how in (SUM, MEAN, FIRST)}

    def step():
        for (op, _), v in made.items():
            assert getattr(v, op)(np.full((2, 3), 5.0 + replica_id())) is v

    harness.run(step)
    written = {SUM: (5.0 + ids).sum(), MEAN: (5.0 + ids).mean(), FIRST: 5.0}
    for (op, how), v in made.items():
        np.testing.assert_allclose(v, np.full((2, 3), OPS[op](1.0, written[how])), rtol=1e-15)
        assert same_everywhere(v)


OPS = {"assign": lambda old, new: new, "assign_add": np.add, "assign_sub": np.subtract}


@pytest.mark.ranks(1, 2, 3)
def test_numbers_and_closed_over_arrays_count_once_for_each_replica(harness):
    n = harness.topology.num_replicas
    with harness.scope():
        number, array = Variable(1.0, aggregation=SUM), Variable(np.ones(3), aggregation=SUM)
        mean, whole = Variable(1.0, aggregation=MEAN), Variable(1, aggregation=SUM)
    one = np.ones(3)

    def step():
        number.assign_add(1)
        array.assign_add(one)  # the same object in every replica of a rank
        mean.assign_add(1)
        whole.assign_add(2)

    harness.run(step)
    assert (number.numpy(), mean.numpy(), whole.numpy()) == (1 + n, 2, 1 + 2 * n)
    assert array.numpy().tolist() == [1 + n] * 3


@pytest.mark.ranks(1, 2)
def test_documented_mean_of_two_replicas():
    from mpi4py import MPI

    with VariableHarness(["cpu:0"] if MPI.COMM_WORLD.size == 2 else ["cpu:0", "cpu:1"]) as harness:
        with harness.scope():
            mean, total = Variable(1.0, aggregation=MEAN), Variable(1.0, aggregation=SUM)

        def step():
            mean.assign_add(float(replica_id()))
            total.assign_add(float(replica_id()))
            return float(mean), float(total)

        seen = harness.run(step)
        assert (float(mean), float(total)) == (1.5, 2.0)
        assert seen == (1.5, 2.0) if MPI.COMM_WORLD.size == 2 else seen[0].values == (1.5, 1.5)


@pytest.mark.ranks(1, 2)
def test_without_aggregation_a_replica_may_not_write(harness):
    with harness.scope():
        v = Variable([1.0, 2.0])
    for write in (
        lambda: v.assign([3.0, 4.0]),
        lambda: v.assign_add([3.0, 4.0]),
        lambda: v.scatter_update(([0], [1.0])),
    ):
        with pytest.raises(ValueError, match="aggregation"):
            harness.run(write)
    assert v.numpy().tolist() == [1.0, 2.0]


@pytest.mark.ranks(1, 2, 3, 4)
def test_writes_for_all_replicas_happen_once(harness):
    with harness.scope():
        v = Variable(np.arange(1000.0))
        v.assign_add(np.ones(1000)).assign_add(v).assign_sub(np.full(1000, 0.5))
        np.testing.assert_array_equal(v, 2 * (np.arange(1000.0) + 1) - 0.5)
        v.assign(np.asarray(v)[::-1])
        np.testing.assert_array_equal(v, 2 * (np.arange(1000.0)[::-1] + 1) - 0.5)
        v.assign(Mirrored([np.zeros(1000)] * harness.topology.num_local_replicas))
        with pytest.raises(ValueError, match="Reduce it first"):
            v.assign(PerReplica([np.ones(1000)] * harness.topology.num_local_replicas))
    v.assign_add(np.ones(1000))  # outside of every scope, too
    harness.update(v, lambda w: w.assign_add(np.ones(1000)))
    assert v.numpy().tolist() == [2.0] * 1000


@pytest.mark.ranks(2, 3)
def test_ranks_that_write_different_values_are_told():
    with VariableHarness() as harness:
        rank = harness.topology.rank
        with harness.scope():
            v = Variable(np.zeros(4), name="w")
            with pytest.raises(CollectiveMismatchError, match=r"assign 'w' float64 \(4,\)"):
                v.assign(np.full(4, float(rank == 1)))
            with pytest.raises(CollectiveMismatchError, match="scatter_add 'w'"):
                v.scatter_add(([rank], [1.0]))
        assert v.numpy().tolist() == [0.0] * 4


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("mine", "theirs", "words"),
    [
        ({"initial_value": np.zeros(3)}, {"initial_value": np.zeros(4)}, [r"\(3,\)", r"\(4,\)"]),
        ({"dtype": "float32"}, {"dtype": "float64"}, ["float32", "float64"]),
        ({"name": "a"}, {"name": "b"}, ["'a'", "'b'"]),
        ({"trainable": True}, {"trainable": False}, ["True", "False"]),
        ({"aggregation": SUM}, {"aggregation": MEAN}, ["SUM", "MEAN"]),
        ({"initial_value": lambda: np.zeros(3)}, {}, ["initial_value", "'Variable'"]),
    ],
)
def test_ranks_that_make_different_variables_are_told(mine, theirs, words):
    with VariableHarness() as harness, harness.scope():
        options = {"initial_value": np.zeros(3)} | (mine if harness.topology.rank == 1 else theirs)
        with pytest.raises(CollectiveMismatchError) as caught:
            Variable(**options)
        for word in words:
            caught.match(word)


@pytest.mark.ranks(1, 3)
@pytest.mark.hosts(2, ranks_per_host=2)
def test_rank_0_says_what_the_initial_value_is(shared, monkeypatch):
    from mpi4py import MPI

    monkeypatch.setattr("mpistrat.variables.create.CHUNK", 1000)
    rank = MPI.COMM_WORLD.rank
    calls = []

    def initial():
        calls.append(rank)
        return np.float32([[rank, np.nan, 7.5]])

    with VariableHarness(shared_memory=shared) as harness, harness.scope():
        random = np.random.default_rng(rank).normal(size=401)  # several pieces
        expected = np.random.default_rng(0).normal(size=401)
        assert np.array_equal(Variable(random), expected)
        assert rank == 0 or random[0] != expected[0]  # the user's own array is left alone
        v = Variable(initial, name="n")
        assert v.dtype == np.float32 and v.shape == (1, 3)
        np.testing.assert_array_equal(v, [[0, np.nan, 7.5]])
        assert calls == ([0] if rank == 0 else [])
        assert Variable(np.zeros((0, 4))).shape == (0, 4)
        assert Variable(lambda: 3).numpy() == 3


@pytest.mark.ranks(1, 2)
def test_names_are_unique():
    with VariableHarness() as harness, harness.scope():
        names = [Variable(0.0, name=name).name for name in (None, "w", "w", None, "w_1", "w")]
        assert names == ["Variable", "w", "w_1", "Variable_1", "w_1_1", "w_2"]


@pytest.mark.ranks(2, 3, 4)
def test_a_node_has_one_copy(shared):
    with VariableHarness(shared_memory=shared) as harness, harness.scope():
        v = Variable(np.zeros(10))
        if harness.topology.rank == 0:
            v.arena.values[v.offset] = 5.0
        harness.group.barrier("written")
        assert v[0] == (5.0 if shared or harness.topology.rank == 0 else 0.0)
        assert (v.arena.gradients.node is None) == (not shared)
        v.arena.values[v.offset] = 5.0  # at the end nodes must have the same weights


@pytest.mark.ranks(1, 2, 3)
def test_each_replica_has_a_gradient_of_its_own(harness):
    with harness.scope():
        first, v = Variable(np.zeros(3), name="first"), Variable(np.zeros((2, 2)))

    def step():
        np.multiply(np.ones((2, 2)), 1 + replica_id(), out=v.grad)
        v.grad += 10
        first.grad = [1, 2, 3]
        with pytest.raises(ValueError, match="shape"):
            first.grad = np.zeros(4)

    harness.run(step)
    harness.group.barrier("gradients")
    offset = harness.topology.replica_offset
    for local in range(harness.topology.num_local_replicas):
        assert v.gradient(local).tolist() == [[11 + offset + local] * 2] * 2
    if harness.group.node.shared:  # every replica's on the node, in their order
        seen = [flat[v.offset] for flat in v.arena.gradients.node]
        assert seen == [11 + replica for replica in range(harness.topology.num_replicas)]
    if harness.topology.num_local_replicas > 1:
        with pytest.raises(ContextError, match="replica context"):
            _ = v.grad
    else:
        assert v.grad[0, 0] == 11 + offset


@pytest.mark.ranks(1, 2, 3)
def test_slices_cover_the_arena_once(shared):
    from mpi4py import MPI

    with VariableHarness(shared_memory=shared) as harness, harness.scope():
        first = Variable(np.zeros(1001, np.float32))
        second = Variable(np.zeros(99, np.float32))
        assert first.arena is second.arena and second.offset % 16 == 0
        ranges = [(first.offset, first.offset + 1001), (second.offset, second.offset + 99)]
        mine = first.arena.owned(ranges)
        pieces = [piece for part in MPI.COMM_WORLD.allgather(mine) for piece in part]
        elements = [i for low, high in pieces for i in range(low, high)]
        copies = 1 if shared else harness.topology.size
        assert sorted(elements) == sorted([i for low, high in ranges for i in range(low, high)] * copies)
        later = Variable(np.zeros(5, np.float32))  # the slices are fixed: not in the same arena
        assert later.arena is not first.arena
        assert first.arena.owned(ranges) == mine


@pytest.mark.ranks(1, 2, 3)
def test_constraint_is_applied_on_request(harness):
    with harness.scope():
        v = Variable([-1.0, 2.0], constraint=lambda w: np.maximum(w, 0))
        assert v.numpy().tolist() == [-1.0, 2.0]
        apply_constraint(v)
        assert v.numpy().tolist() == [0.0, 2.0]
        apply_constraint(Variable(1.0))


@pytest.mark.ranks(1, 2, 3, 4)
def test_scatter_in_replica_context(harness):
    n = harness.topology.num_replicas
    with harness.scope():
        made = {how: Variable(np.ones((7, 2)), aggregation=how) for how in (SUM, MEAN, FIRST)}

    def step():
        k = replica_id()
        for v in made.values():
            v.scatter_add(IndexedSlices(np.full((2, 2), 1.0 + k), np.array([k % 7, 0])))
            v.scatter_sub(([k % 7], [[0.5, 0.25]]))
        made[FIRST].scatter_update(([6] * (1 + k), np.full((1 + k, 2), 30.0 + k)))
        made[SUM].scatter_mul(([3], [[2.0, 3.0]]))
        with pytest.raises(NotImplementedError, match="ONLY_FIRST_REPLICA"):
            made[SUM].scatter_max(([0], [[1.0, 1.0]]))

    harness.run(step)
    for how, v in made.items():
        expected = np.ones((7, 2))
        for k in range(n if how is not FIRST else 1):
            part = 1.0 / n if how is MEAN else 1.0
            np.add.at(expected, [k % 7, 0], np.full((2, 2), (1.0 + k) * part))
            expected[k % 7] -= np.array([0.5, 0.25]) * part
        if how is FIRST:
            expected[6] = 30.0
        if how is SUM:
            expected[3] *= np.array([2.0, 3.0]) ** n
        np.testing.assert_allclose(v, expected, rtol=1e-13)
        assert same_everywhere(v)


@pytest.mark.ranks(1, 2, 4)
def test_scatter_for_all_replicas(shared):
    with VariableHarness(shared_memory=shared) as harness, harness.scope():
        v = Variable(np.zeros((5, 3)))
        expected = np.zeros((5, 3))
        indices, updates = np.array([4, 0, 4, 2]), np.arange(12.0).reshape(4, 3)
        np.add.at(expected, indices, updates)
        v.scatter_add((indices, updates))
        v.scatter_nd_update([[1, 1], [3, 2]], [50.0, 60.0])
        expected[1, 1], expected[3, 2] = 50.0, 60.0
        v.scatter_max(([0, 1], np.full((2, 3), 4.5)))
        expected[:2] = np.maximum(expected[:2], 4.5)
        np.testing.assert_array_equal(v, expected)
        np.testing.assert_array_equal(v.sparse_read([3, 0, 3]), expected[[3, 0, 3]])
        v.scatter_update(([0, 0], [[1.0] * 3, [2.0] * 3]))
        assert v[0].tolist() == [2.0] * 3
        v.scatter_add(([1], v[0:1]))  # a view of the variable itself
        np.testing.assert_array_equal(v[1], expected[1] + 2)


@pytest.mark.ranks(3, 4)
@pytest.mark.parametrize("nodes", ["0011", "0101", "0110"])
def test_nodes_stay_equal(nodes):
    from mpi4py import MPI

    from tests.harness.variable_harness import pretend_nodes

    comm = pretend_nodes(MPI, [int(node) for node in nodes[: MPI.COMM_WORLD.size]])
    with VariableHarness(["cpu:0"], comm=comm) as harness:
        with harness.scope():
            v = Variable(np.random.default_rng(MPI.COMM_WORLD.rank).normal(size=300), aggregation=MEAN)
            v.assign_add(np.ones(300))
        harness.run(lambda: v.assign_add(np.full(300, float(replica_id()))))
        expected = np.random.default_rng(0).normal(size=300) + 1 + np.arange(harness.topology.num_replicas).mean()
        np.testing.assert_allclose(v, expected, rtol=1e-14)
        assert same_everywhere(v)
        with harness.scope(), pytest.raises(CollectiveMismatchError):
            v.assign(np.full(300, float(harness.topology.node_index)))


@pytest.mark.ranks(1, 2)
def test_after_close_everything_raises_but_old_views_are_there():
    harness = VariableHarness()
    with harness.scope():
        v = Variable(np.arange(5.0), name="gone")
    view, gradient = np.asarray(v), v.grad
    gradient[:] = 3
    harness.close()
    for use in (
        lambda: v.array,
        lambda: v + 1,
        lambda: np.asarray(v),
        lambda: v.numpy(),
        lambda: v[0],
        lambda: v.values,
        lambda: v.grad,
        lambda: v.assign(np.zeros(5)),
        lambda: v.scatter_add(([0], [1.0])),
        lambda: v.sparse_read([0]),
    ):
        with pytest.raises(ClosedError, match="gone"):
            use()
    assert view.tolist() == [0, 1, 2, 3, 4] and gradient.tolist() == [3] * 5
    assert "closed" in repr(v) and v.name == "gone"


@pytest.mark.ranks(1, 2)
def test_variables_of_another_scope_are_refused():
    with VariableHarness() as one, VariableHarness() as other:
        with one.scope():
            v = Variable(1.0)
        with other.scope(), pytest.raises(ValueError, match="another strategy"):
            v.assign(2.0)
        assert float(v) == 1.0


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int64", "complex128", "uint8", "bool"])
def test_dtypes(dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    with VariableHarness() as harness, harness.scope():
        v = Variable(np.array([1, 0, 1]) > 0, dtype=dtype, aggregation=NONE if dtype == "bool" else SUM)
        assert v.dtype.name == dtype
        v.assign(np.array([0, 1, 1]).astype(v.dtype))
        assert np.asarray(v).astype(int).tolist() == [0, 1, 1]
        if dtype != "bool":
            harness.run(lambda: v.assign_add(np.array([1, 1, 0]).astype(v.dtype)))
            n = harness.topology.num_replicas
            assert np.asarray(v).astype(complex).real.tolist() == [n, 1 + n, 1]
        has_gradient = dtype in ("float16", "bfloat16", "complex128")
        assert (v.arena.gradients is not None) == has_gradient

"""What every CrossDeviceOps promises. A new one adds one line to OPS."""

import importlib.util
import itertools
import zlib

import numpy as np
import pytest

from mpistrat.arena.arithmetic import arithmetic
from mpistrat.base.distributed_values import PerReplica
from mpistrat.base.options import CommunicationOptions
from mpistrat.comm.arrays import accumulation_dtype
from mpistrat.cross_device.auto import AutoAllReduce
from mpistrat.cross_device.hierarchical import HierarchicalAllReduce
from mpistrat.cross_device.mpi import MpiAllReduce
from mpistrat.cross_device.nccl import NcclAllReduce
from mpistrat.cross_device.ops import CrossDeviceOps
from mpistrat.cross_device.ordered import OrderedAllReduce
from mpistrat.cross_device.to_one import ReductionToOneDevice
from mpistrat.errors import CollectiveMismatchError
from mpistrat.types import IndexedSlices, ReduceOp
from tests.harness.process_groups import Gradients, local, open_group

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


class LeftFold(CrossDeviceOps):
    """What a user might write: the least that a subclass needs."""

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        every = self.gather_implementation(PerReplica([v[None] for v in per_replica_value.values]), None, 0, options)
        how = arithmetic(reduce_op, every.dtype, self.group.topology.num_replicas)
        total = np.asarray(every.sum(axis=0, dtype=how.accumulate))
        return total.astype(how.result) if how.divisor == 1 else (total / how.divisor).astype(how.result)

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        return [self.reduce_implementation(reduce_op, v, d, options) for v, d in value_destination_pairs]


OPS = {
    "auto": AutoAllReduce,
    "mpi": MpiAllReduce,
    "hierarchical": HierarchicalAllReduce,
    "one_device": ReductionToOneDevice,
    "one_device_function": lambda: ReductionToOneDevice("cpu:0", accumulation_fn=lambda parts: sum(parts)),
    "ordered": OrderedAllReduce,
    "users": LeftFold,
    "nccl": NcclAllReduce,
}
NEEDS_GPU = {"nccl"}
DTYPES = [
    "int8",
    "uint8",
    "int32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "longdouble",
    "complex64",
    "complex128",
]


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.gpu) if name in NEEDS_GPU else name for name in OPS],
    scope="module",
)
def make(request):
    return OPS[request.param]


# Two layouts on each number of ranks, not all on all.
LAYOUTS_OF = {
    1: ("shared", "devices"),
    2: ("shared", "private"),
    3: ("shared", "nodes of devices"),
    4: ("devices", "nodes"),
}


@pytest.fixture(params=[0, 1], ids=["layout0", "layout1"], scope="module")
def group(request):
    from mpi4py import MPI

    with open_group(LAYOUTS_OF[MPI.COMM_WORLD.size][request.param]) as group:
        yield group


@pytest.fixture
def ops(make, group):
    ops = make()
    ops.bind(group)
    return ops


@pytest.fixture
def replicas(group):
    return group.topology.num_replicas


def test_sum_and_mean_of_the_documentation(ops, group, replicas):
    values = local(group, lambda replica: np.arange(4.0) + 4 * replica)
    offset = 4 * replicas * (replicas - 1) / 2
    total = ops.reduce(ReduceOp.SUM, values)
    assert total.tolist() == [k * replicas + offset for k in range(4)]  # two replicas: [4, 6, 8, 10]
    assert ops.reduce("mean", values).tolist() == [k + offset / replicas for k in range(4)]


def test_dtypes(ops, group, replicas):
    names = [*DTYPES, "bfloat16"] if importlib.util.find_spec("ml_dtypes") else DTYPES
    if "bfloat16" in names:
        importlib.import_module("ml_dtypes")  # makes np.dtype understand the name
    count = replicas * (replicas + 1) // 2
    for dtype in map(np.dtype, names):
        factor = 1 + 1j if dtype.kind == "c" else 1
        value = (np.array([1, 2, 3, 0]) * factor).astype(dtype)
        values = local(group, lambda replica: (value * (replica + 1)).astype(dtype))  # noqa: B023
        total, mean = ops.reduce(ReduceOp.SUM, values), ops.reduce(ReduceOp.MEAN, values)
        assert total.dtype == dtype
        assert total.astype(complex).tolist() == [1 * count * factor, 2 * count * factor, 3 * count * factor, 0], dtype
        assert mean.dtype == (np.float64 if dtype.kind in "iu" else dtype)
        assert mean.astype(complex).tolist() == [k * (replicas + 1) / 2 * factor for k in (1, 2, 3, 0)], dtype


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_a_form_that_was_reduced_before(ops, group, replicas, shape):
    """What is kept of a dtype and a shape changes nothing, also where other calls come between."""
    counts = np.arange(1, replicas + 1)
    for turn in (1, 2, 3, 4):
        for dtype in ("int8", "int64", "float16", "float32", "float64", "complex128"):
            values = local(group, lambda replica: np.full(shape, turn * (replica + 1), dtype))  # noqa: B023
            total, mean = ops.reduce("SUM", values, name=f"{turn % 2}"), ops.reduce(ReduceOp.MEAN, values)
            assert total.dtype == dtype and total.shape == shape and isinstance(total, np.ndarray)
            assert (total == turn * counts.sum()).all()
            assert mean.dtype == (np.float64 if dtype.startswith("int") else dtype) and mean.shape == shape
            assert (mean == turn * counts.mean()).all()
            total[...] = 0  # it is the caller's
            ops.broadcast(np.ones(3))


def test_ranks_that_make_different_calls_made_before(ops, group):
    if group.topology.size == 1 or group.num_nodes > 1:  # other nodes compare at intervals
        pytest.skip("needs two ranks of a node")
    first = group.topology.rank == 0
    calls = [("SUM", np.ones(2)), ("MEAN", np.ones(2)), ("SUM", np.ones(3)), ("SUM", np.ones(2, np.float32))]
    pairs = [(op, local(group, lambda replica: array)) for op, array in calls]  # noqa: B023
    for op, value in pairs * 3:
        ops.reduce(op, value)
    for op, value in pairs[1:]:
        with pytest.raises(CollectiveMismatchError, match=r"rank 0: reduce float64 \(2,\) .*SUM.*ranks? 1"):
            ops.reduce(*(pairs[0] if first else (op, value)))
        assert ops.reduce(*pairs[1]).tolist() == [1.0, 1.0]  # nothing is broken


def test_narrow_floats_are_rounded_once(ops, group, replicas):
    # 2048 + 1 is 2048 in float16, so sums formed in float16 would stay there.
    values = local(group, lambda replica: np.float16([2048 if replica == 0 else 1]))
    assert ops.reduce(ReduceOp.SUM, values)[0] == np.float16(2048 + replicas - 1)
    # 40000 + 40000 is infinite in float16, its mean is not.
    values = local(group, lambda replica: np.float16([40000]))
    assert ops.reduce(ReduceOp.MEAN, values)[0] == np.float16(40000)


def test_mean_of_small_integers_does_not_wrap(ops, group):
    assert ops.reduce(ReduceOp.MEAN, local(group, lambda replica: np.int8([120]))).tolist() == [120.0]


EXTREMES = {ReduceOp.MIN: np.minimum, ReduceOp.MAX: np.maximum, ReduceOp.PROD: np.multiply}


@pytest.fixture
def extremes(make, ops):
    if not set(EXTREMES) <= set(ops.reduce_ops):
        pytest.skip("sums and means only")
    return ops


def test_minimum_maximum_and_product(extremes, group, replicas):
    """Two replicas: of [-2, 3, 4, 0] and [2, 0, 4, 1]; small, in several chunks, and packed together."""
    names = [name for name in DTYPES if np.dtype(name).kind != "c"]
    if importlib.util.find_spec("ml_dtypes"):
        importlib.import_module("ml_dtypes")
        names.append("bfloat16")

    def value(replica, dtype):
        signed = [2 - 4 * (replica == 0), 3 - 3 * (replica == 1), 4, replica]
        return np.array(np.abs(signed) if dtype.kind == "u" else signed).astype(dtype)

    numbers = {dtype: [value(replica, dtype) for replica in range(replicas)] for dtype in map(np.dtype, names)}
    bools = {np.dtype(bool): [value(replica, np.dtype(bool)) for replica in range(replicas)]}
    for op, combine in EXTREMES.items():
        every = numbers if op is ReduceOp.PROD else numbers | bools
        columns = [local(group, lambda replica, d=dtype, e=every: e[d][replica]) for dtype in every]
        together = extremes.batch_reduce(op, [(column, None) for column in columns])
        for (dtype, values), column, packed in zip(every.items(), columns, together, strict=True):
            expected = values[0]
            for other in values[1:]:
                expected = combine(expected, other)
            found = extremes.reduce(op.value.lower(), column)
            assert found.dtype == packed.dtype == dtype
            assert found.astype(float).tolist() == packed.astype(float).tolist() == expected.astype(float).tolist()
    base = np.arange(700_007, dtype=np.float32) % 1000 - 500
    for op, best in ((ReduceOp.MIN, 0), (ReduceOp.MAX, replicas - 1)):
        assert np.array_equal(extremes.reduce(op, local(group, lambda replica: base + replica)), base + best)


def test_nan_wins_and_all_ranks_have_the_same_bits(extremes, group, replicas):
    special = [np.nan, -np.nan, -0.0, 0.0, np.inf, -np.inf, 1.0, -1.0]
    for dtype in ("float16", "float32", "float64", "longdouble"):
        for size in (64, 300_000) if dtype == "float32" else (64,):
            every = [
                np.random.default_rng(replica).choice(np.array(special, dtype), size).astype(dtype)
                for replica in range(replicas)
            ]
            for op, of in ((ReduceOp.MIN, np.min), (ReduceOp.MAX, np.max)):
                found = extremes.reduce(op, local(group, lambda replica: every[replica]))  # noqa: B023
                assert np.array_equal(found, of(every, axis=0), equal_nan=True), (dtype, op)
                zeros = np.all(np.array(every) == 0, axis=0)
                same = zeros & np.all(np.signbit(every) == np.signbit(every[0]), axis=0)
                assert np.array_equal(np.signbit(found)[same], np.signbit(every[0])[same])
                bits = found.tobytes() if dtype != "longdouble" else np.signbit(found).tobytes()  # it has padding
                with group.collective("compare"):
                    checksums = group.all_gather_int([zlib.crc32(bits)])
                assert len(set(checksums[:, 0].tolist())) == 1, (dtype, op)


def test_narrow_products_are_rounded_once(extremes, group, replicas):
    # 300 * 300 is infinite in float16; a third replica makes it finite again.
    values = local(group, lambda replica: np.float16({0: 300, 1: 300, 2: 1 / 256}.get(replica, 1)))
    expected = {1: 300, 2: np.inf}.get(replicas, 300 * 300 / 256)
    assert extremes.reduce(ReduceOp.PROD, values) == np.float16(expected)


def test_values_without_a_minimum(extremes, group):
    rows = IndexedSlices(np.ones((1, 2)), np.zeros(1, int), (3, 2))
    for op in EXTREMES:
        for wrong, text in (
            (np.ones(2, complex), f"real numbers for {op.value}"),
            (rows, f"dense arrays for {op.value}"),
            *([(np.ones(2, bool), "an array of numbers.*MIN is True if all are")] if op is ReduceOp.PROD else ()),
        ):
            for act in (
                lambda v, op=op: extremes.reduce(op, v),
                lambda v, op=op: extremes.batch_reduce(op, [(v, None)]),
            ):
                with pytest.raises(TypeError, match=text):
                    act(local(group, lambda replica: wrong))  # noqa: B023


def test_what_an_algorithm_does_not_know_is_refused(ops, group, replicas):
    values = local(group, lambda replica: np.ones(2))
    for op in EXTREMES:
        if op in ops.reduce_ops:
            assert ops.reduce(op, values).tolist() == [1.0, 1.0]
            continue
        for act in (lambda op=op: ops.reduce(op, values), lambda op=op: ops.batch_reduce(op, [(values, None)])):
            with pytest.raises(ValueError, match=f"reduce_op: expected SUM, MEAN, the reductions of .* got {op.value}"):
                act()
    assert ops.reduce(ReduceOp.SUM, values)[0] == replicas


def test_ranks_that_disagree_on_the_reduction(extremes, group):
    values = local(group, lambda replica: np.ones(2))
    if group.topology.size > 1 and group.num_nodes == 1:
        with pytest.raises(CollectiveMismatchError, match="MIN.*MAX|MAX.*MIN"):
            extremes.reduce("MIN" if group.topology.rank == 0 else "MAX", values)
    assert extremes.reduce("MIN", values).tolist() == [1.0, 1.0]  # nothing is broken


def test_plain_values_of_minimum_and_product(extremes, group, replicas):
    counts = group.topology.replicas_per_rank
    assert extremes.reduce(ReduceOp.MAX, float(group.topology.rank)) == len(counts) - 1
    assert extremes.reduce(ReduceOp.MIN, 2.0) == 2.0
    if max(counts) == 1:
        assert extremes.reduce(ReduceOp.PROD, 2.0) == 2.0**replicas
    elif min(counts) > 1:
        with pytest.raises(ValueError, match="plain float"):
            extremes.reduce(ReduceOp.PROD, 2.0)


def test_shapes(ops, group, replicas):
    for shape in [(), (0,), (3, 0, 2), (1,), (5, 7), (9000,), (300, 1001)]:
        base = np.arange(np.prod(shape, dtype=int), dtype=np.float64).reshape(shape)
        total = ops.reduce(ReduceOp.SUM, local(group, lambda replica: np.asarray(base + replica)))  # noqa: B023
        assert isinstance(total, np.ndarray)
        assert total.shape == shape
        assert np.array_equal(total, base * replicas + replicas * (replicas - 1) / 2), shape


def test_several_chunks(ops, group, replicas):
    base = np.arange(700_007, dtype=np.float32) % 1000
    total = ops.reduce(ReduceOp.SUM, local(group, lambda replica: base + replica))
    assert np.array_equal(total, base * replicas + replicas * (replicas - 1) / 2)
    again = ops.reduce(ReduceOp.MEAN, local(group, lambda replica: base + 2 * replica))
    assert np.allclose(again, base + (replicas - 1), rtol=1e-6)
    assert np.array_equal(total, base * replicas + replicas * (replicas - 1) / 2)  # not overwritten


def test_memory_orders(ops, group, replicas):
    base = np.arange(24.0).reshape(4, 6)
    forms = {
        "fortran": np.asfortranarray(base),
        "stride": np.repeat(base, 2, axis=1)[:, ::2],
        "swapped": base.astype(">f8"),
        "broadcast": np.broadcast_to(base[:1], (4, 6)),
        "list": base.tolist(),
    }
    for order, value in forms.items():
        expected = base[:1].repeat(4, axis=0) if order == "broadcast" else base
        total = ops.reduce(ReduceOp.SUM, local(group, lambda replica: value))  # noqa: B023
        assert total.dtype == np.dtype(float)
        assert np.array_equal(total, expected * replicas), order


def test_the_result_is_new_and_the_value_is_kept(ops, group, replicas):
    for size in (3, 200_000):
        mine = local(group, lambda replica: np.ones(size))  # noqa: B023
        total = ops.reduce(ReduceOp.SUM, mine)
        total += 5
        assert all((value == 1).all() for value in mine.values)
        assert ops.reduce(ReduceOp.SUM, mine)[0] == replicas
        assert total[-1] == replicas + 5


def test_the_same_layout_gives_the_same_bits(ops, group):
    for size in (1, 1000, 70_001):
        generators = [np.random.default_rng(replica) for replica in range(group.topology.num_replicas)]
        values = local(group, lambda replica: generators[replica].standard_normal(size, np.float32))  # noqa: B023
        first = ops.reduce(ReduceOp.SUM, values)
        assert ops.reduce(ReduceOp.SUM, values).tobytes() == first.tobytes()
        with group.collective("compare"):
            checksums = group.all_gather_int([zlib.crc32(first.tobytes())])
        assert len(set(checksums[:, 0].tolist())) == 1


def test_plain_values(ops, group, replicas):
    counts = group.topology.replicas_per_rank
    assert ops.reduce(ReduceOp.MEAN, 2.0) == 2.0
    assert ops.reduce(ReduceOp.SUM, 0.0) == 0.0
    if max(counts) == 1:
        assert ops.reduce(ReduceOp.SUM, float(group.topology.rank)) == replicas * (replicas - 1) / 2
    elif min(counts) > 1:
        with pytest.raises(ValueError, match="plain float"):
            ops.reduce(ReduceOp.SUM, 1.0)


def test_batch_is_like_a_loop(ops, group, replicas):
    def values(replica):
        scale = replica + 1
        return [
            np.full((3, 2), scale, np.float32),
            np.full(4, scale, np.int64),
            np.float32(scale),
            np.full(30_000, scale, np.float32),
            np.zeros((0, 3), np.float16),
            np.full(3, scale, np.float16),
        ]

    columns = [local(group, lambda replica, i=i: values(replica)[i]) for i in range(6)]
    total = replicas * (replicas + 1) // 2
    for options in (None, CommunicationOptions(bytes_per_pack=16), CommunicationOptions(bytes_per_pack=0)):
        results = ops.batch_reduce(ReduceOp.SUM, [(column, None) for column in columns], options)
        for result, like in zip(results, values(0), strict=True):
            assert result.shape == np.shape(like)
            assert result.dtype == np.asarray(like).dtype
            assert (result == total).all()
    means = ops.batch_reduce(ReduceOp.MEAN, [(columns[1], None), (columns[0], None)])
    assert means[0].tolist() == [(replicas + 1) / 2] * 4
    assert means[0].dtype == np.float64
    assert ops.batch_reduce(ReduceOp.SUM, []) == []


def test_rows_of_indexed_slices_are_kept(ops, group, replicas):
    def rows(replica):
        count = replica % 2 + 1
        return IndexedSlices(np.full((count, 2), float(replica + 1)), np.full(count, 3), (5, 2))

    found = ops.reduce(ReduceOp.SUM, local(group, rows))
    assert found.indices.tolist() == [3] * sum(r % 2 + 1 for r in range(replicas))
    assert found.to_dense()[3, 0] == sum((r % 2 + 1) * (r + 1) for r in range(replicas))
    dense, mean = ops.batch_reduce(
        ReduceOp.MEAN, [(local(group, lambda replica: np.float64(replica)), None), (local(group, rows), None)]
    )
    assert dense == (replicas - 1) / 2
    assert np.allclose(mean.to_dense(), found.to_dense() / replicas)


def test_broadcast(ops, group, replicas):
    for root in range(replicas):
        value = ops.broadcast(local(group, lambda replica: np.full((2, 3), replica, np.int16)), root=root)
        assert value.dtype == np.int16
        assert (value == root).all()
        assert value.shape == (2, 3)
    assert ops.broadcast(local(group, lambda replica: np.array(replica == 0))).tolist() is True
    for root in (-1, replicas):
        with pytest.raises(ValueError, match="root: expected a replica from 0"):
            ops.broadcast(local(group, lambda replica: np.ones(1)), root=root)


def test_gather(ops, group, replicas):
    rows = ops.gather(local(group, lambda replica: np.full((replica + 1, 3), replica, np.int8)))
    assert rows.dtype == np.int8
    assert rows[:, 2].tolist() == [r for r in range(replicas) for _ in range(r + 1)]
    columns = ops.gather(local(group, lambda replica: np.full((2, replica, 2), replica)), axis=1)
    assert columns[1, :, 0].tolist() == [r for r in range(replicas) for _ in range(r)]
    counted_back = ops.gather(local(group, lambda replica: np.full((2, replica, 2), replica)), axis=-2)
    assert np.array_equal(counted_back, columns)
    assert columns.shape == (2, replicas * (replicas - 1) // 2, 2)
    nothing = ops.gather(local(group, lambda replica: np.zeros((replica, 0))))
    assert nothing.shape == (replicas * (replicas - 1) // 2, 0)
    assert ops.gather(local(group, lambda replica: np.array([replica % 2 == 0]))).tolist()[:1] == [True]


def test_gather_refuses(ops, group, replicas):
    with pytest.raises(ValueError, match="got a scalar"):
        ops.gather(local(group, lambda replica: np.float64(1)))
    for axis in (-3, 2, "x", None):
        with pytest.raises(ValueError, match=rf"axis: expected -2 <= axis < 2, a dimension .* \(2, 2\), got {axis!r}"):
            ops.gather(local(group, lambda replica: np.ones((2, 2))), axis=axis)
    if group.topology.size > 1:
        last = group.topology.size - 1
        wide = 4 if group.topology.rank == last else 3
        with pytest.raises(CollectiveMismatchError) as caught:
            ops.gather(local(group, lambda replica: np.ones((2, wide))))
        assert "(2, 3)" in str(caught.value)
        assert "(2, 4)" in str(caught.value)
        assert f"rank {last}" in str(caught.value)
    assert ops.gather(local(group, lambda replica: np.ones((1, 2)))).shape == (replicas, 2)  # nothing is broken


def test_what_cannot_be_summed(ops, group):
    for wrong in (np.array([True]), np.array([object()]), np.zeros(2, [("a", "i4")]), np.array(["x"])):
        with pytest.raises(TypeError, match="reduce: value: expected an array"):
            ops.reduce(ReduceOp.SUM, local(group, lambda replica: wrong))  # noqa: B023


def test_a_list_of_destinations_is_refused(ops, group):
    with pytest.raises(ValueError, match="destinations"):
        ops.reduce(ReduceOp.SUM, local(group, lambda replica: np.ones(1)), destinations=["cpu:0", "cpu:1"])


def test_a_device_as_destination(ops, group, replicas):
    total = ops.reduce(ReduceOp.SUM, local(group, lambda replica: np.ones(1)), destinations="cpu:0")
    assert total.tolist() == [replicas]


def test_options_of_one_call(ops, group, replicas):
    """Ranks with one replica cache what ranks with several do anew in each call: both must work in the same memory."""
    every = [CommunicationOptions(implementation=name, timeout_seconds=15) for name in ("MPI", "HIERARCHICAL", "AUTO")]
    for options, shape in itertools.product((*every, None), ((), 3, 100_000)):
        for turn in range(1, 4):
            values = local(group, lambda replica: np.full(shape, turn, np.float64))  # noqa: B023
            assert (ops.reduce(ReduceOp.SUM, values, None, options) == turn * replicas).all()
    for options, turn in itertools.product((*every, None), range(1, 4)):
        values = local(group, lambda replica: np.full(100, turn, np.float64))  # noqa: B023
        assert (ops.batch_reduce("MEAN", [(values, None)] * 2, options)[1] == turn).all()
        assert ops.gather(values, None, 0, options).tolist() == [turn] * 100 * replicas


@pytest.mark.parametrize("shape", [(), 3, 5000, 100_000])
def test_ranks_that_forgot_a_call_meet_those_that_cached_it(ops, group, replicas, shape):
    offset = group.topology.replica_offset
    for turn in range(1, 7):
        if (group.topology.rank + turn) % 3 == 0:
            ops.plans.clear()
        values = local(group, lambda replica: np.full(shape, turn * (replica + 1), np.float64))  # noqa: B023
        expected = turn * replicas * (replicas + 1) / 2
        assert (ops.reduce(ReduceOp.SUM, values) == expected).all()
        if ReduceOp.MAX in ops.reduce_ops:
            assert (ops.reduce(ReduceOp.MAX, values) == turn * replicas).all()
        if group.topology.num_local_replicas == 1:
            assert values.values[0].reshape(-1)[0] == turn * (offset + 1)  # what was given stays


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_arena(ops, group, replicas, dtype):
    size = 200_000
    arena = Gradients(group, size, dtype)
    for index, flat in enumerate(arena.local):
        flat[...] = (np.arange(size) % 50).astype(dtype) * dtype(group.topology.replica_offset + index + 1)
    covered = np.zeros(size, int)

    def consume(low, high, block):
        covered[low:high] += 1
        assert high - low <= 1 << 16
        assert block.dtype == accumulation_dtype(np.dtype(dtype))
        expected = (np.arange(low, high) % 50) * (replicas * (replicas + 1) // 2)
        assert np.array_equal(block, expected.astype(dtype))
        block[...] = -1  # scratch

    ranges = [(0, 1000), (1040, 150_000), (160_000, size)]
    with group.collective("apply") as ops.call:
        ops.reduce_arena(arena, ranges, consume)
        group.node.barrier()
    mine = np.zeros(size, int)
    for low, high in arena.owned(ranges):
        mine[low:high] = 1
    assert np.array_equal(covered, mine)

"""Small collectives: one barrier of the node compares the call and moves the data, whatever each rank knows from before."""

import time

import numpy as np
import pytest

from mpistrat.base import loops
from mpistrat.comm import exchange
from mpistrat.cross_device.collectives import Collectives
from mpistrat.errors import CollectiveMismatchError
from tests.harness.process_groups import open_group

SMALL = 1 << 16  # bytes of a rank


@pytest.fixture(params=["shared", "nodes", "private"])
def group(request):
    with open_group(request.param) as group:
        yield group


@pytest.fixture
def of(group):
    collectives = Collectives(group, "Test")
    yield collectives
    collectives.close()


@pytest.fixture
def node():
    """Collectives of the ranks of one node."""
    with open_group("shared") as group:
        collectives = Collectives(group, "Test")
        yield collectives
        collectives.close()


def rows(rank, turn, length, width=3, dtype="f4"):
    return np.random.default_rng([rank, turn]).integers(-99, 99, (length, width)).astype(dtype)


def drawn(turn, rank, *shape):
    """Return a turn's lengths and dtype, after a short wait on a rank: every 20th turn has a length that is not small."""
    lengths = np.random.default_rng(turn).integers(0, 4, shape) if turn % 3 else np.full(shape, 2)
    if turn % 20 == 19:
        lengths.reshape(len(lengths), -1)[turn % len(lengths), 0] = SMALL // 12 + turn % 2
    if turn % 10 == rank:
        time.sleep(0.001)
    return lengths, "f4" if turn % 7 else "i2"


@pytest.mark.ranks(2, 3, 4)
def test_gather_of_lengths_that_change(of):
    """Some lengths come again, others do not; some ranks have more than a small message has room for."""
    size, rank = of.group.topology.size, of.group.topology.rank
    kept = []
    for turn in range(60):
        lengths, dtype = drawn(turn, rank, size)
        every = [rows(r, turn, lengths[r], dtype=dtype) for r in range(size)]
        for axis in (0, 1):
            parts = [part if axis == 0 else part.T for part in every]
            found = of.all_gather(parts[rank], axis=axis)
            assert found.dtype == dtype and np.array_equal(found, np.concatenate(parts, axis))
            kept.append((found, found.tobytes()))
        nest = of.all_gather({"a": every[rank], "b": np.arange(rank + turn % 2)})
        assert np.array_equal(nest["a"], np.concatenate(every))
        assert nest["b"].tolist() == [n for r in range(size) for n in range(r + turn % 2)]
    assert all(found.tobytes() == before for found, before in kept)  # which are in no memory that is used again


@pytest.mark.ranks(2, 3)
def test_lengths_and_small_arrays_are_one_message_between_nodes(monkeypatch):
    """From the second gather on, also of shapes that take turns. What has no room follows in a message of its own."""
    from mpistrat.cross_device import gather

    sent, send = [], gather.gather_parts
    monkeypatch.setattr(gather, "gather_parts", lambda *args: sent.append(args) or send(*args))
    with open_group("private") as group:
        of, rank, size = Collectives(group, "Test"), group.topology.rank, group.topology.size
        for count, lengths in enumerate(([3], [2, 3, 1] * 3, [9], [3, 9] * 4, [SMALL], [2]), 1):
            before = len(sent)
            for turn, length in enumerate(lengths):
                every = [rows(r, turn, length + r) for r in range(size)]
                assert np.array_equal(of.all_gather(every[rank]), np.concatenate(every))
            assert len(sent) - before == (count in (1, 3, 5)), lengths
        of.close()


@pytest.mark.ranks(2, 3)
def test_small_parts_are_one_message_between_nodes(monkeypatch):
    """With lengths, what has no room follows in a message of its own, and has room in the next calls."""
    sent = []
    for name, cls in (("together", exchange.PartExchange), ("apart", exchange)):
        attribute = "move" if name == "together" else "_exchange_by_mpi"
        send = getattr(cls, attribute)
        monkeypatch.setattr(cls, attribute, lambda *args, name=name, send=send: sent.append(name) or send(*args))
    with open_group("private") as group:
        of, rank, size = Collectives(group, "Test"), group.topology.rank, group.topology.size
        value = np.arange(8.0 * size)
        for call in (
            lambda: of.reduce_scatter("SUM", value),
            lambda: of.reduce_scatter("SUM", value[:1], out=np.empty(int(rank == 0))),
            lambda: of.reshard(value.reshape(8, size), old=0, new=1),
        ):
            for _ in range(2):
                sent.clear()
                call()
                assert sent == ["together"]
        for length, alone in ((3, False), (3, True), (2, True), (9, False), (3, True), (SMALL, False), (9, True)):
            sent.clear()
            every = [rows(r, length, length * size) for r in range(size)]
            found, _ = of.all_to_all(every[rank], splits=np.full(size, length))
            assert np.array_equal(found, np.concatenate([part[length * rank :][:length] for part in every]))
            assert sent == ["together"] if alone else ["together", "apart"], length
        of.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("layout", ["nodes", "private"])
def test_wrong_splits_of_one_rank_are_an_error_on_all(layout):
    with open_group(layout) as group:
        of, rank, size = Collectives(group, "Test"), group.topology.rank, group.topology.size
        value = np.arange(8.0 * size)
        right = np.full(size, 8)
        for _ in range(2):
            for wrong in (right + 1, right[1:], -right, right.astype("f4"), [[1], [2, 3]]):
                with pytest.raises(ValueError, match="splits|inhomogeneous") as error:
                    of.all_to_all(value, splits=wrong if rank == 1 else right)
                assert rank == 1 or "rank 1" in str(error.value)
            found, lengths = of.all_to_all(value, splits=right)
            assert np.array_equal(found, np.tile(value[8 * rank :][:8], size))
            assert lengths.tolist() == [8] * size
        of.close()


@pytest.mark.ranks(2, 3)
def test_a_gather_that_differs_on_one_rank_is_an_error_on_all(of):
    """Also of a form that this rank has gathered before, and of one that the others have."""
    odd = of.group.topology.rank == 1
    for _ in range(2):
        assert len(of.all_gather(np.ones((2, 2)))) == 2 * of.group.topology.size
        assert of.all_gather(np.ones((2, 3)), axis=1).shape == (2, 3 * of.group.topology.size)
        for wrong in (np.ones((2, 3)), np.ones((2, 2), "f4"), np.ones(2), np.ones(()), np.ones((9999, 9))):
            with pytest.raises(CollectiveMismatchError, match=r"rank 1|rank 0"):
                of.all_gather(wrong if odd else np.ones((2, 2)))
        if of.group.num_nodes == 1:  # between nodes, where the last call was the other one, the watchdogs end the job
            with pytest.raises(CollectiveMismatchError, match="rank"):
                of.all_gather(np.ones((2, 2)), axis=int(odd))
        for value, text in ((np.ones(()), "a scalar"), (np.ones(2), "axis < 1")):
            with pytest.raises(ValueError, match=text):
                of.all_gather(value, axis=1)
        with pytest.raises(TypeError):
            of.all_gather(np.zeros(2, "i4,i4"))


@pytest.mark.ranks(2, 3, 4)
def test_parts_whose_lengths_change(of):
    size, rank = of.group.topology.size, of.group.topology.rank
    kept = []
    for turn in range(60):
        splits, dtype = drawn(turn, rank, size, size)
        every = [rows(r, turn, splits[r].sum(), dtype=dtype) for r in range(size)]
        came = [np.split(part, splits[r].cumsum()[:-1])[rank] for r, part in enumerate(every)]
        for axis in (0, 1):
            parts = [part if axis == 0 else part.T for part in every]
            found, lengths = of.all_to_all(parts[rank], splits=splits[rank], axis=axis)
            expected = np.concatenate(came) if axis == 0 else np.concatenate(came).T
            assert found.dtype == dtype and np.array_equal(found, expected)
            assert lengths.tolist() == splits[:, rank].tolist()
            kept.append((found, found.tobytes()))
        equal = [rows(r, turn, size * (r + turn % 2), dtype=dtype) for r in range(size)]
        found, lengths = of.all_to_all(equal[rank])
        assert np.array_equal(found, np.concatenate([np.split(part, size)[rank] for part in equal]))
        assert lengths.tolist() == [r + turn % 2 for r in range(size)]
    assert all(found.tobytes() == before for found, before in kept)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", ["f8", "f4", "f2", "i4"])
def test_parts_of_reductions(of, dtype):
    """Of lengths that ranks do not divide, along each axis, and above and below the size of small ones."""
    size, rank = of.group.topology.size, of.group.topology.rank
    for turn, length in enumerate((0, 1, 5, 2 * size, 7000, 5)):
        every = [rows(r, turn, length, 4, dtype) for r in range(size)]
        for op, total in (("SUM", sum(every)), ("MEAN", sum(part.astype("f8") for part in every) / size)):
            for axis in (0, 1):
                found = of.reduce_scatter(op, every[rank], axis=axis)
                expected = np.array_split(total, size, axis)[rank]
                assert found.dtype == ("f8" if op == "MEAN" and dtype == "i4" else dtype)
                assert found.shape == expected.shape and np.allclose(
                    found, expected, rtol=1e-3 if dtype == "f2" else 1e-6
                )
                out = np.empty_like(found)
                assert of.reduce_scatter(op, every[rank], axis=axis, out=out) is out
                assert out.tobytes() == found.tobytes()
        for root in range(size):
            found = of.broadcast(every[rank], root=root)
            assert np.array_equal(found, every[root]) and not np.may_share_memory(found, every[rank])
            found[...] = 0
        assert np.array_equal(every[rank], rows(rank, turn, length, 4, dtype))
    assert of.broadcast(np.float64(rank), root=1) == 1


@pytest.mark.ranks(2, 3)
def test_parts_that_differ_on_one_rank_are_an_error_on_all(node):
    size, odd = node.group.topology.size, node.group.topology.rank == 1
    value = np.ones((2 * size, size))
    twos = np.full(size, 2)
    calls = {
        "reduce_scatter": lambda v: node.reduce_scatter("SUM", v),
        "all_to_all": lambda v: node.all_to_all(v, splits=twos),
        "all_to_all, axis 1": lambda v: node.all_to_all(v, axis=1),
        "reshard": lambda v: node.reshard(v, old=0, new=1),
        "broadcast": node.broadcast,
    }
    for _ in range(2):
        for call in calls.values():
            call(value)
        for name, call in calls.items():
            for wrong in (value.astype("f4"), value[..., None], np.ones((9999, 9)), np.ones(())):
                with pytest.raises(CollectiveMismatchError, match="rank 1"):
                    call(wrong if odd else value)
            for other, unlike in calls.items():
                if other != name:
                    with pytest.raises(CollectiveMismatchError, match="rank 1"):
                        (call if odd else unlike)(value)
        with pytest.raises(CollectiveMismatchError, match="rank 1"):
            node.broadcast(value, root=int(odd))
        for length in (2 * size + 1, SMALL):  # which only this rank knows
            with pytest.raises(ValueError, match=f"{size} lengths"):
                node.all_to_all(np.ones((length, size)) if odd else value, splits=twos)
        with pytest.raises(ValueError, match="Give splits"):
            node.all_to_all(value[: size + odd])
        for call in (calls["reduce_scatter"], calls["all_to_all"], calls["reshard"]):
            with pytest.raises(ValueError, match="a scalar"):
                call(np.ones(()))
        with pytest.raises(TypeError):
            node.broadcast(np.zeros(size, "i4,i4"))
        with pytest.raises(TypeError):
            node.reduce_scatter("SUM", np.zeros(size, bool))
        with pytest.raises(TypeError):
            node.all_to_all(np.zeros(size, "i4,i4"))


@pytest.mark.ranks(2, 4)
def test_a_rank_that_reads_late_gets_the_same_numbers(node, monkeypatch):
    """The others are in the next call by then, and have written what they have for it."""
    memory, size, rank = node.group.node, node.group.topology.size, node.group.topology.rank
    barrier, turns = memory.barrier, iter(range(10_000))

    def late(call=None):
        barrier(call)
        if next(turns) % size == rank:
            time.sleep(0.002)

    monkeypatch.setattr(memory, "barrier", late)
    for turn in range(12):
        every = [rows(r, turn, size, size, "f8") for r in range(size)]
        mine, total = every[rank], sum(every)
        assert np.array_equal(node.all_gather(mine), np.concatenate(every))
        assert np.array_equal(node.all_reduce("SUM", mine), total)
        assert np.array_equal(node.all_to_all(mine)[0], [part[rank] for part in every])
        assert np.array_equal(node.reduce_scatter("SUM", mine), total[[rank]])
        assert np.array_equal(node.broadcast(mine, root=turn % size), every[turn % size])
        assert np.array_equal(node.all_gather(mine, equal=True), np.concatenate(every))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("way", ["compiled", "python"])
def test_a_small_call_takes_one_barrier(node, way, monkeypatch):
    if way == "python":
        monkeypatch.setattr(loops, "meet", loops.leave_to_numpy)
    size = node.group.topology.size
    value = np.arange(8.0 * size)
    calls = {
        "all_reduce": lambda: node.all_reduce("SUM", value),
        "all_gather": lambda: node.all_gather(value),
        "all_gather, equal": lambda: node.all_gather(value, equal=True),
        "all_gather of a nest": lambda: node.all_gather([value, value]),
        "reduce_scatter": lambda: node.reduce_scatter("SUM", value),
        "reduce_scatter, out": lambda: node.reduce_scatter("SUM", value, out=np.empty(8)),
        "all_to_all": lambda: node.all_to_all(value),
        "all_to_all with splits": lambda: node.all_to_all(value, splits=np.full(size, 8)),
        "reshard": lambda: node.reshard(value.reshape(size, 8), old=0, new=1),
        "broadcast": lambda: node.broadcast(value, root=1),
        "broadcast of a nest": lambda: node.broadcast([value, value]),
        "barrier": node.barrier,
    }
    for name, call in calls.items():
        for _ in range(3):
            before = node.group.node.barriers
            call()
            assert node.group.node.barriers == before + 1, name


ORDERS = (">f8", ">i4", ">c16", "<f8")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", ORDERS)
@pytest.mark.parametrize("length", [1, 20_000], ids=["small", "large"])
def test_the_byte_order_of_an_array_changes_no_number(of, dtype, length):
    """Each operation twice: by itself, and by what is kept of it."""
    size, rank = of.group.topology.size, of.group.topology.rank
    every = [np.arange(size * length, dtype="f8").astype(dtype) + 1000 * r for r in range(size)]
    mine, total = every[rank], sum(each.astype(dtype[1:]) for each in every)
    whole = np.concatenate(every)
    for _ in range(2):
        for splits in (None, np.full(size, length)):
            found, _lengths = of.all_to_all(mine, splits=splits)
            assert np.array_equal(found, np.concatenate([each[rank * length :][:length] for each in every]))
        assert np.array_equal(of.all_gather(mine), whole)
        assert np.array_equal(of.broadcast(mine, root=size - 1), every[-1])
        assert np.array_equal(of.all_reduce("SUM", mine), total)
        assert np.array_equal(of.reduce_scatter("SUM", mine), total[rank * length :][:length])


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("empty", [{}, [], (), {"a": ()}], ids=repr)
def test_a_nest_without_arrays_stays_empty(of, empty):
    assert of.all_gather(empty) == of.broadcast(empty) == of.all_reduce("SUM", empty) == empty
    assert of.reduce_scatter("SUM", empty) == of.all_to_all(empty)[0] == empty

"""The operations of torch.distributed on the backend of this package, next to arithmetic."""

import functools
import gc
import math
import operator
import threading

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import torch.distributed as dist  # noqa: E402
from torch._C import _distributed_c10d as c10d  # noqa: E402

from tests.harness.process_groups import set_layout  # noqa: E402
from tests.harness.torch_groups import NAME, default_group, group_in  # noqa: E402
from tests.harness.torch_operations import all_gather_single, gather_single, reduce_scatter_single  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
MOVED = [torch.bool, *INTEGERS, *UNSIGNED, *FLOATS, *COMPLEX, torch.float8_e4m3fn]
SIZES = [1, 70_000, 700_000]  # a plan, one exchange, several stages


@pytest.fixture(params=["shared", "private", "nodes"])
def group(request, monkeypatch):
    """The default group on one node, without shared memory, and on two nodes made of one machine."""
    with group_in(request.param, monkeypatch) as group:
        yield group


def here():
    return dist.get_rank(), dist.get_world_size()


def full(value, shape, dtype):
    return torch.full(shape, value).to(dtype)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_sums_of_all_sizes(group, size, dtype):
    rank, ranks = here()
    tensor = full(rank + 1, (size,), dtype)
    dist.all_reduce(tensor)
    assert (tensor == ranks * (ranks + 1) // 2).all()


@pytest.mark.ranks(1, 2, 3, 4)
def test_reductions_of_all_dtypes(group):
    rank, ranks = here()
    op = dist.ReduceOp
    wanted = {op.SUM: ranks * (ranks + 1) // 2, op.PRODUCT: math.factorial(ranks), op.MIN: 1, op.MAX: ranks}
    for dtype in [*INTEGERS, *UNSIGNED, *FLOATS]:
        for how, want in wanted.items():
            tensor = full(rank + 1, (3, 5), dtype)
            dist.all_reduce(tensor, how)
            assert (tensor.double() == want).all(), (dtype, how)
        tensor = full(rank + 1, (2,), dtype)
        dist.all_reduce(tensor, op.AVG)
        mean = (ranks + 1) / 2
        assert (tensor.double() == (mean if dtype.is_floating_point else math.trunc(mean))).all(), dtype
    for dtype in COMPLEX:
        tensor = full(complex(rank, 1), (3,), dtype)
        dist.all_reduce(tensor)
        assert (tensor == complex(ranks * (ranks - 1) // 2, ranks)).all()


@pytest.mark.ranks(1, 2, 3, 4)
def test_bits_truth_values_and_factors(group):
    rank, ranks = here()
    op = dist.ReduceOp
    for how, combine in ((op.BAND, operator.and_), (op.BOR, operator.or_), (op.BXOR, operator.xor)):
        tensor = torch.tensor([8 + 2**rank, 5])
        dist.all_reduce(tensor, how)
        assert tensor[0] == functools.reduce(combine, [8 + 2**other for other in range(ranks)]), how
    every, some, odd = [ranks == 1, True, False], [True, True, False], [True, ranks % 2 == 1, False]
    wanted = {op.SUM: some, op.MAX: some, op.BOR: some, op.PRODUCT: every, op.MIN: every, op.BAND: every, op.BXOR: odd}
    for how, want in wanted.items():
        tensor = torch.tensor([rank == 0, True, False])
        dist.all_reduce(tensor, how)
        assert tensor.tolist() == want, how
    tensor = torch.full((3,), rank + 1.0)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    assert (tensor == ranks * (ranks + 1) / 4).all()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_floats_are_rounded_once(group, dtype):
    """1 and then terms that are each lost to rounding, but not their sum."""
    rank, ranks = here()
    step = torch.finfo(dtype).eps
    tensor = torch.tensor([1.0 if rank == 0 else 0.75 * step / (ranks - 1)]).to(dtype)
    want = torch.tensor([1.0 + 0.75 * step]).to(dtype)
    dist.all_reduce(tensor)
    assert tensor == want
    output, parts = torch.empty(1, dtype=dtype), [tensor.clone() for _ in range(ranks)]
    for part in parts:
        part.fill_(1.0 if rank == 0 else 0.75 * step / (ranks - 1))
    dist.reduce_scatter(output, parts)
    assert output == want


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [3, 100_000])
def test_sums_that_are_not_finite_are_results(group, dtype, count):
    """As in torch: no warning, and no error of NumPy's where the program asks NumPy for errors."""
    rank, ranks = here()
    with np.errstate(all="raise"):
        largest = torch.full((count,), torch.finfo(dtype).max, dtype=dtype)
        ends = torch.full((count,), math.inf if rank else -math.inf, dtype=dtype)
        dist.all_reduce(largest)
        dist.all_reduce(ends, async_op=True).wait()
        output = torch.empty(1, dtype=dtype)
        reduce_scatter_single(output, largest.new_full((ranks,), torch.finfo(dtype).max))
    assert (largest == math.inf).all()
    assert ends.isnan().all()
    assert output == math.inf


@pytest.mark.ranks(1, 2, 3, 4)
def test_moves_of_all_dtypes(group):
    rank, ranks = here()
    for dtype in MOVED:

        def each(value, dtype=dtype):
            return full(value % 2 if dtype == torch.bool else value, (2, 3), dtype)

        tensor = each(rank + 1)
        dist.broadcast(tensor, ranks - 1)
        assert equal(tensor, each(ranks)), dtype
        rooms = [each(9) for _ in range(ranks)]
        dist.all_gather(rooms, each(rank))
        assert all(equal(room, each(other)) for other, room in enumerate(rooms)), dtype
        whole = torch.empty(2 * ranks, 3, dtype=dtype)
        all_gather_single(whole, each(rank))
        assert equal(whole, torch.cat([each(other).view(torch.uint8) for other in range(ranks)]).view(dtype)), dtype
        rooms = [each(9) for _ in range(ranks)]
        dist.all_to_all(rooms, [each(10 * rank + other) for other in range(ranks)])
        assert all(equal(room, each(10 * other + rank)) for other, room in enumerate(rooms)), dtype
        output, parts = each(9), [each(other) for other in range(ranks)]
        dist.scatter(output, parts if rank == 0 else None)
        assert equal(output, each(rank)), dtype
        dist.gather(each(rank), rooms if rank == ranks - 1 else None, dst=ranks - 1)
        assert rank < ranks - 1 or all(equal(room, each(other)) for other, room in enumerate(rooms)), dtype
        stack = torch.empty(ranks, 2, 3, dtype=dtype) if rank == ranks - 1 else None
        gather_single(each(rank), stack, dst=ranks - 1)
        assert stack is None or all(equal(row, each(other)) for other, row in enumerate(stack)), dtype
        if stack is not None:
            stack[0] = each(rank + 1)
        gather_single(each(rank + 1) if stack is None else stack[0], stack, dst=ranks - 1)  # a slice of the result
        assert stack is None or all(equal(row, each(other + 1)) for other, row in enumerate(stack)), dtype


def equal(one, other):
    return one.shape == other.shape and bool((one.view(torch.uint8) == other.view(torch.uint8)).all())


@pytest.mark.ranks(1, 2, 3, 4)
def test_reduce_and_reduce_scatter(group):
    rank, ranks = here()
    total = ranks * (ranks + 1) // 2
    for dtype in (torch.float32, torch.float16, torch.int32):
        tensor = full(rank + 1, (4,), dtype)
        dist.reduce(tensor, ranks - 1)
        assert (tensor == (total if rank == ranks - 1 else rank + 1)).all()
        whole, output = full(rank + 1, (2 * ranks,), dtype), full(0, (2,), dtype)
        whole[2 * rank] += 1
        reduce_scatter_single(output, whole)
        assert output.tolist() == [total + 1, total]
        reduce_scatter_single(output, whole, dist.ReduceOp.MAX)
        assert output.tolist() == [max(ranks, rank + 2), ranks]
        dist.reduce_scatter(output, list(whole.split(2)), dist.ReduceOp.AVG)
        assert (output.double() - torch.tensor([total + 1.0, total]) / ranks).abs().max() < 1
        lengths = range(1, ranks + 1)
        output = full(0, (rank + 1,), dtype)
        dist.reduce_scatter(output, [full(rank + 1, (length,), dtype) for length in lengths])
        assert (output == total).all()


@pytest.mark.ranks(1, 2, 3, 4)
def test_parts_of_unequal_sizes(group):
    rank, ranks = here()
    rooms = [torch.empty(other, 2) for other in range(ranks)]
    dist.all_gather(rooms, torch.full((rank, 2), float(rank)))
    assert all((room == other).all() for other, room in enumerate(rooms))
    going = [rank + other for other in range(ranks)]
    output = torch.empty(sum(going), 2)
    dist.all_to_all_single(output, torch.full((sum(going), 2), float(rank)), going, going)
    assert [part[0, 0].item() for part in output.split(going) if len(part)] == [
        float(other) for other, length in enumerate(going) if length
    ]
    outputs = [torch.empty(other + 1) for other in range(ranks)]
    dist.all_to_all(outputs, [torch.full((rank + 1,), 1.0 * rank) for _ in range(ranks)])
    assert all((output == other).all() for other, output in enumerate(outputs))


@pytest.mark.ranks(1, 2, 3, 4)
def test_empty_tensors_and_scalars(group):
    rank, ranks = here()
    for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.bool):
        tensor = torch.empty(0, 3, dtype=dtype)
        several = [tensor.clone() for _ in range(ranks)]
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        dist.broadcast(tensor, 0)
        dist.reduce(tensor, 0, dist.ReduceOp.MAX)
        dist.all_gather(several, tensor)
        all_gather_single(torch.empty(0, 3, dtype=dtype), tensor)
        dist.scatter(tensor, several if rank == 0 else None)
        dist.gather(tensor, several if rank == 0 else None)
        dist.all_to_all_single(torch.empty(0, 3, dtype=dtype), tensor, [0] * ranks, [0] * ranks)
        dist.all_to_all(several, [tensor.clone() for _ in range(ranks)])
        reduce_scatter_single(torch.empty(0, 3, dtype=dtype), tensor)
    tensor = torch.tensor(3.0 + rank)
    dist.all_reduce(tensor)
    assert tensor == 3 * ranks + ranks * (ranks - 1) / 2
    rooms = [torch.tensor(0.0) for _ in range(ranks)]
    dist.all_gather(rooms, torch.tensor(float(rank)))
    assert [float(room) for room in rooms] == list(range(ranks))


@pytest.mark.ranks(1, 2, 3)
def test_other_memory_orders(group):
    _, ranks = here()
    wide = torch.arange(24.0).reshape(4, 6)
    for view in (wide.clone().t(), wide.clone()[:, ::2], torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)):
        want = view.clone()
        dist.all_reduce(view)
        assert torch.equal(view, want * ranks)
        dist.broadcast(view, 0)
        assert torch.equal(view, want * ranks)
    parameter = torch.nn.Parameter(torch.ones(3))
    dist.all_reduce(parameter)
    assert (parameter == ranks).all()


@pytest.mark.ranks(1, 2, 3, 4)
def test_sparse_sums(group):
    rank, ranks = here()
    tensor = torch.sparse_coo_tensor([[rank, ranks]], [1.0, 2.0], (ranks + 1,))
    dist.all_reduce(tensor)
    assert tensor.to_dense().tolist() == [1.0] * ranks + [2.0 * ranks]
    rows = torch.sparse_coo_tensor(
        [[1]] if rank == 0 else torch.empty(1, 0), torch.ones(1 if rank == 0 else 0, 3), (2, 3)
    )
    dist.all_reduce(rows)
    assert rows.to_dense().tolist() == [[0.0] * 3, [1.0] * 3]


@pytest.mark.ranks(1, 2, 3)
def test_coalesced_functional_and_object_calls(group):
    import torch.distributed._functional_collectives as functional

    rank, ranks = here()
    with dist._coalescing_manager():
        first, second = torch.ones(3), torch.ones(4)
        dist.all_reduce(first)
        dist.all_reduce(second)
    assert (first == ranks).all() and (second == ranks).all()
    outputs = [torch.empty(2 * ranks), torch.empty(ranks)]
    with dist._coalescing_manager():
        all_gather_single(outputs[0], torch.full((2,), float(rank)))
        all_gather_single(outputs[1], torch.full((1,), float(rank)))
    assert outputs[0].tolist() == [float(i // 2) for i in range(2 * ranks)]
    assert outputs[1].tolist() == [float(i) for i in range(ranks)]
    total = functional.all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    assert (functional.wait_tensor(total) == ranks).all()
    whole = functional.all_gather_tensor(torch.full((1, 2), float(rank)), 0, dist.group.WORLD)
    assert whole[:, 0].tolist() == [float(i) for i in range(ranks)]
    part = functional.reduce_scatter_tensor(torch.ones(2 * ranks), "sum", 0, dist.group.WORLD)
    assert (part == ranks).all()
    objects = [None] * ranks
    dist.all_gather_object(objects, {"rank": rank, "text": "a" * rank})
    assert [each["rank"] for each in objects] == list(range(ranks))
    some = [("hello", 3)] if rank == 0 else [None]
    dist.broadcast_object_list(some)
    assert some == [("hello", 3)]


@pytest.mark.ranks(2, 3, 4)
def test_messages(group):
    rank, ranks = here()
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    for size in (1, 20_000, 500_000):
        room = torch.empty(size)
        ops = [dist.P2POp(dist.irecv, room, before), dist.P2POp(dist.isend, torch.full((size,), float(rank)), after)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert (room == before).all()
    rooms = [torch.empty(2) for _ in range(3)]
    receives = [dist.irecv(room, before, tag=tag) for room, tag in zip(rooms, (5, 5, 7), strict=True)]
    sends = [
        dist.isend(torch.full((2,), float(tag + index)), after, tag=tag) for index, tag in ((0, 7), (1, 5), (2, 5))
    ]
    for work in (*reversed(receives), *sends):  # the first receive has the first message of its tag
        work.wait()
    assert [room[0].item() for room in rooms] == [6.0, 7.0, 7.0]
    if rank == 0:
        found = set()
        for _ in range(ranks - 1):
            room = torch.empty(2)
            source = dist.recv(room)
            assert (room == source).all()
            found.add(source)
        assert found == set(range(1, ranks))
    else:
        dist.send(torch.full((2,), float(rank)), 0)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("count", [10, 3_000_000])
def test_large_messages_do_not_wait_for_the_order_of_waits(group, count):
    """Sends are waited for before receives; then one rank receives, and the other is in a collective with the send unfinished."""
    rank, size = here()
    room = torch.zeros(count)
    send, receive = (
        dist.isend(torch.full((count,), float(rank)), (rank + 1) % size),
        dist.irecv(room, (rank - 1) % size),
    )
    send.wait()
    receive.wait()
    assert (room == (rank - 1) % size).all()
    if rank == 0:
        work = dist.isend(room, 1)
        dist.barrier()
        work.wait()
    else:
        if rank == 1:
            dist.recv(room, 0)
        dist.barrier()
    if rank == 1:
        work = dist.irecv(room, 0)
        dist.barrier()
        work.wait()
    else:
        if rank == 0:
            dist.send(room, 1)
        dist.barrier()


@pytest.mark.ranks(2, 3)
def test_long_and_short_messages_of_one_tag_in_order(group):
    """Also those as short as the head of a long one; received last to first, and from any rank."""
    rank, ranks = here()
    sizes = [1, 70_000, 2, 3, 90_000, 0, 100_000]
    for source in range(1, ranks):
        for sender in (source, None):
            rooms = [torch.zeros(size) for size in sizes]
            works = []
            if rank == source:
                works = [dist.isend(torch.full((size,), float(rank + size)), 0, tag=3) for size in sizes]
            elif rank == 0:
                works = [dist.irecv(room, sender, tag=3) for room in rooms]
            for work in reversed(works):
                work.wait()
            assert rank or all((room == source + size).all() for size, room in zip(sizes, rooms, strict=True))
            dist.barrier()


@pytest.mark.ranks(2, 3)
def test_messages_that_no_rank_received_end_with_their_group():
    """MPI gives the number of a communicator that was freed to a later one, of any group."""
    for turn in range(4):
        with default_group():
            rank, ranks = here()
            for members in ([0, ranks - 1], None, [0, ranks - 1]):
                group, room = dist.new_group(members), torch.zeros(3)
                if rank == 0:
                    for _ in range(2):  # the second is not received
                        dist.isend(torch.full((3,), float(turn)), ranks - 1, group=group)
                elif rank == ranks - 1:
                    dist.recv(room, 0, group=group)
                    assert (room == turn).all()


@pytest.mark.ranks(2)
def test_a_large_message_that_no_rank_received_ends_with_its_group():
    """MPI reads its memory when it is received, which only the last collective of the group does."""
    for _ in range(2):
        with default_group():
            rank, _ = here()
            if rank == 0:
                dist.isend(torch.arange(4_000_000, dtype=torch.float32), 1)
                dist.send(torch.ones(2), 1, tag=7)
            else:
                room = torch.zeros(2)
                dist.recv(room, 0, tag=7)
                assert room.tolist() == [1, 1]
            dist.barrier()
        gc.collect()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["broadcast", "gather", "scatter"])
def test_what_one_rank_alone_has_sent_reaches_no_later_call(name, monkeypatch):
    """Each rank is a node: the rank that only sends goes on, and its message would wait for a later call of the group."""
    set_layout("nodes", monkeypatch)
    with default_group():
        rank, _ = here()
        sender = 1 if name == "gather" else 0

        def call(value):
            room, rooms = torch.tensor([value]), [torch.tensor([value]) for _ in range(2)]
            if name == "broadcast":
                dist.broadcast(room if rank == 0 else room.zero_(), 0)
            elif name == "scatter":
                dist.scatter(room.zero_(), rooms if rank == 0 else None, 0)
            else:
                dist.gather(room, rooms if rank == 0 else None, 0)
                room = rooms[1] if rank == 0 else room
            return room.item()

        dist.all_reduce(torch.ones(1))
        assert call(1.0) == 1
        with pytest.raises(RuntimeError, match=f"dist.{name} .*dist.all_reduce|dist.all_reduce .*dist.{name}"):
            if rank == sender:
                call(2.0)
                dist.barrier()
            else:
                dist.all_reduce(torch.ones(1))
        with pytest.raises(RuntimeError, match="no longer be used: ranks made different calls"):
            call(5.0)


@pytest.mark.ranks(2)
def test_messages_of_another_form(group):
    rank, _ = here()
    pairs = [  # of what is sent, and of what is received
        (torch.ones(5), torch.empty(4), "expected 16 bytes of float32, got 20 bytes of float32"),
        (torch.ones(4, dtype=torch.int32), torch.empty(4), "expected 16 bytes of float32, got 16 bytes of int32"),
        (torch.ones(1), torch.empty(2), "expected 8 bytes of float32, got 4 bytes"),
        (torch.ones(90_000), torch.empty(80_000), "expected 320000 bytes of float32, got 360000 bytes of float32"),
        (torch.ones(90_000, dtype=torch.int32), torch.empty(90_000), "of float32, got 360000 bytes of int32"),
        (torch.ones(4), torch.empty(90_000), "expected 360000 bytes of float32, got 16 bytes of float32"),
        (torch.ones(90_000), torch.empty(2), "expected 8 bytes of float32, got 360000 bytes of float32"),
        # the longest message that needs no head, and one more byte
        (torch.ones(65_536, dtype=torch.int8), torch.empty(65_537, dtype=torch.uint8), "got 65536 bytes of int8"),
        (torch.ones(65_537, dtype=torch.uint8), torch.empty(65_536, dtype=torch.int8), "got 65537 bytes of uint8"),
    ]
    for going, room, text in pairs:
        if rank == 1:
            dist.send(going, 0)
        else:
            with pytest.raises(RuntimeError, match=rf"dist\.recv of .* from rank 1: .*{text}.*called at test_torch"):
                dist.recv(room, 1)
    with pytest.raises(ValueError, match="tag"):
        dist.send(torch.ones(1), 1 - rank, tag=-1)


@pytest.mark.ranks(1, 2, 3, 4)
def test_works_and_futures(group):
    _, ranks = here()
    tensors = [torch.full((100_000,), float(i)) for i in range(5)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert work.wait() and work.is_completed() and work.is_success()
        assert (tensor == i * ranks).all()
    future = dist.all_reduce(torch.ones(10), async_op=True).get_future()
    assert (future.then(lambda done: done.value()[0] * 2).wait() == 2 * ranks).all()


@pytest.mark.ranks(2, 3)
def test_a_callback_may_call_a_collective(group):
    """In the thread of the lane where the first call still runs, in the caller's where it has ended."""
    rank, ranks = here()

    def gather(done):
        rooms = [torch.empty(3) for _ in range(ranks)]
        dist.all_gather(rooms, done.value()[0] + rank)
        return torch.stack(rooms)

    for _ in range(20):
        futures = [dist.all_reduce(torch.ones(3), async_op=True).get_future().then(gather) for _ in range(4)]
        last = dist.all_reduce(torch.ones(5), async_op=True)
        for future in futures:
            assert future.wait()[:, 0].tolist() == [float(ranks + other) for other in range(ranks)]
        last.wait()


@pytest.mark.ranks(2, 3, 4)
def test_groups_of_some_ranks(group):
    """Only members take part, also in making it."""
    rank, ranks = here()
    even = dist.new_group(list(range(0, ranks, 2)))
    last = dist.new_group([ranks - 1])
    if rank % 2 == 0:
        tensor = torch.ones(4)
        dist.all_reduce(tensor, group=even)
        assert (tensor == len(range(0, ranks, 2))).all()
        assert dist.get_rank(even) == rank // 2
    if rank == ranks - 1:
        own = dist.new_group([rank], use_local_synchronization=True)
        for alone in (last, own):
            tensor, rooms = torch.ones(3), [torch.empty(3)]
            dist.all_reduce(tensor, group=alone)
            dist.all_gather(rooms, tensor, group=alone)
            dist.barrier(alone)
            assert (rooms[0] == 1).all()
    dist.barrier()


@pytest.mark.ranks(2, 3)
def test_groups_in_another_order_on_each_rank(group):
    rank, ranks = here()
    groups = [dist.new_group(), dist.new_group()]
    for i in range(50):
        tensors = [torch.full((1000 * (1 + i % 50),), 1.0), torch.full((1000,), 2.0)]
        order = (0, 1) if rank % 2 == 0 else (1, 0)
        works = [dist.all_reduce(tensors[k], group=groups[k], async_op=True) for k in order]
        for work in works:
            work.wait()
        assert (tensors[0] == ranks).all() and (tensors[1] == 2 * ranks).all()


@pytest.mark.ranks(2)
def test_many_groups_leave_no_communicators():
    """MPICH has room for some 2,000 communicators, of which a group has five."""
    with default_group():
        for _ in range(300):
            one = dist.new_group()
            dist.barrier(one)
            dist.destroy_process_group(one)


@pytest.mark.ranks(1, 2)
def test_forgotten_groups_are_freed():
    from datetime import timedelta

    from mpi4py import MPI

    from mpistrat.comm.dropped import DROPPED
    from mpistrat.torch.backend.group import over

    before, kept = threading.active_count(), len(DROPPED.groups)  # groups whose ranks gave up are never freed
    for _ in range(20):
        group = over(MPI.COMM_WORLD, dist.HashStore(), timedelta(seconds=20), "forgotten")
        tensor = torch.ones(3)
        group.allreduce([tensor]).wait()
        assert (tensor == MPI.COMM_WORLD.size).all()
        del group
    assert len(DROPPED.groups) <= kept + 3
    assert threading.active_count() <= before + 2  # the watchdog, and the last lane


@pytest.mark.ranks(1)
def test_operations_run_in_the_calling_thread_where_mpi_allows_one():
    from mpistrat.torch.backend.lane import Lane
    from mpistrat.torch.backend.work import OperationWork

    lane, found = Lane("one", threads=False), []

    def outer():
        found.append(threading.current_thread())
        lane.run(OperationWork("inner", None), lambda: found.append("inner"), waits=False)

    work = lane.run(OperationWork("outer", None), outer, waits=False)
    assert work.is_completed()
    assert found == [threading.current_thread(), "inner"]
    with pytest.raises(RuntimeError, match=r"slow: Timed out waiting .* for the operation, which continues"):
        OperationWork("slow", None).wait(timeout=0.01)


@pytest.mark.ranks(1, 2)
def test_start_and_end_again():
    for _ in range(3):
        with default_group():
            _, ranks = here()
            tensor = torch.ones(200_000)
            dist.all_reduce(tensor)
            assert (tensor == ranks).all()
            assert dist.get_backend() == NAME
            kept = dist.group.WORLD
        with pytest.raises(RuntimeError, match="destroyed"):
            kept.allreduce([torch.ones(1)])


@pytest.mark.ranks(2)
def test_little_shared_memory(monkeypatch, caplog):
    from mpistrat.comm import shared_memory

    with default_group():
        monkeypatch.setattr(shared_memory, "free_space", lambda: 0)
        tensor = torch.ones(600_000)  # on two ranks by the staging memory of the group
        dist.all_reduce(tensor)
        assert (tensor == 2).all()
        group = dist.new_group()
        assert group._ranks.num_nodes == 2
        for size in (3, 600_000):
            tensor, rooms = torch.ones(size), [torch.empty(size) for _ in range(2)]
            dist.all_reduce(tensor, group=group)
            dist.broadcast(tensor, 0, group=group)
            dist.all_gather(rooms, tensor, group=group)
            assert (rooms[1] == 2).all()


@pytest.mark.ranks(4)
def test_little_shared_memory_for_large_sums(monkeypatch):
    from mpistrat.comm import shared_memory

    with default_group():
        monkeypatch.setattr(shared_memory, "free_space", lambda: 0)
        for _ in range(2):
            tensor = torch.ones(600_000)
            dist.all_reduce(tensor)
            assert (tensor == 4).all()


@pytest.mark.ranks(2)
def test_monitored_barriers(group):
    from datetime import timedelta

    rank, _ = here()
    group.monitored_barrier(timedelta(seconds=20))
    if rank == 0:
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier in 100 ms"):
            group.monitored_barrier(timedelta(seconds=0.1))
    dist.barrier()
    if rank == 1:
        with pytest.raises(RuntimeError, match="Rank 1 successfully reached monitoredBarrier, but received errors"):
            group.monitored_barrier(timedelta(seconds=20))
    group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("wait", [True, False])
def test_profiles_show_the_operations(group, wait):
    with torch.profiler.profile() as profile:
        work = dist.all_reduce(torch.ones(3), async_op=not wait)
        if work is not None:
            work.wait()
    assert any(event.name == "mpistrat:all_reduce" for event in profile.events())
    if hasattr(dist, "record_comm"):
        with torch.profiler.profile() as profile, dist.record_comm("own name"):
            dist.all_reduce(torch.ones(3))
        assert any(event.name == "own name" for event in profile.events())


@pytest.mark.ranks(1, 2)
def test_it_is_its_own_backend_without_the_optional_functions(group):
    """Newer versions of PyTorch ask for it before messages in a batch."""
    cpu = torch.device("cpu")
    backend = group._get_backend(cpu)
    assert backend is group
    names = {name for kind in (c10d.Backend, c10d.ProcessGroup) for name in dir(kind)} - {"supports_tensor_alloc"}
    names = sorted(name for name in names if name.startswith(("supports_", "_supports_")))
    assert [name for name in names if getattr(backend, name) is not False] == []
    assert not backend.supports_tensor_alloc(cpu)
    with pytest.raises(RuntimeError, match="No backend type|not find the default backend"):
        group._get_backend(torch.device("meta"))


@pytest.mark.ranks(1)
def test_a_check_for_nan_that_it_cannot_make_is_a_warning(monkeypatch, caplog):
    monkeypatch.setenv("TORCH_DIST_NAN_CHECK", "1")
    monkeypatch.setattr(c10d, "NanCheckHook", None, raising=False)  # of PyTorch 2.14
    with default_group():
        dist.all_reduce(torch.tensor([math.nan]))
    assert "TORCH_DIST_NAN_CHECK: torch.distributed over MPI does not look for NaN. Check" in caplog.text


#: Methods and properties of C++ that need no backend.
OF_CPP = {
    *("BackendType", "_add_ephemeral_timeout", "_backend_id", "_enable_collectives_timing", "_get_backend_name", "_id"),
    *("_pybind11_conduit_v1_", "_register_backend", "_set_default_backend", "boxed", "get_backend", "unbox"),
    *("Options", "options", "use_pg_for_symm_mem_rendezvous"),
    *dist.ProcessGroup.BackendType.__members__,
}


@pytest.mark.ranks(1)
def test_every_method_of_torch_is_there_or_an_error_that_names_it(group):
    names = {name for name in dir(c10d.ProcessGroup) if not name.startswith("__")}
    refused = 0
    for name in sorted(names - OF_CPP):
        method = getattr(type(group), name)
        assert method is not getattr(c10d.ProcessGroup, name), name
        if getattr(method, "__name__", "") == "refuse":
            refused += 1
            with pytest.raises(
                NotImplementedError, match=rf"ProcessGroup\.{name}: group: .*got one of 'mpistrat'.*\. [A-Z]"
            ):
                method(group, 1, timeout=None)
    assert refused or not hasattr(c10d.ProcessGroup, "register_pre_hook")  # of PyTorch 2.14


@pytest.mark.ranks(1, 2)
def test_tensors_may_change_their_size_afterwards(group):
    """As FSDP changes the size of its parameters' storage; `Tensor.numpy` would forbid it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tensors = {name: torch.ones(4) for name in ("all_reduce", "broadcast", "gathered", "scattered", "received")}
    whole = torch.ones(4 * size)
    dist.all_reduce(tensors["all_reduce"])
    dist.broadcast(tensors["broadcast"], 0)
    dist.all_gather_into_tensor(whole, tensors["gathered"])
    dist.reduce_scatter_tensor(tensors["scattered"], whole)
    if size > 1:
        request = dist.isend(torch.ones(4), 1 - rank)
        dist.recv(tensors["received"], 1 - rank)
        request.wait()
    for name, tensor in {**tensors, "whole": whole}.items():
        assert tensor.untyped_storage().resizable(), name


@pytest.mark.ranks(1, 2)
def test_fully_sharded_data_parallel(group):
    """The first FSDP, beside plain SGD: all ranks have the same rows."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(3)
    plain = torch.nn.Linear(4, 4)
    wrapped = torch.nn.Linear(4, 4)
    wrapped.load_state_dict(plain.state_dict())
    model = FullyShardedDataParallel(wrapped, device_id=torch.device("cpu"))
    rows, steps = torch.randn(8, 4), []
    for module in (plain, model):
        rule = torch.optim.SGD(module.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            rule.zero_grad()
            loss = module(rows).square().mean()
            loss.backward()
            rule.step()
            losses.append(loss.item())
        steps.append(losses)
    assert steps[0] == pytest.approx(steps[1], rel=1e-6)

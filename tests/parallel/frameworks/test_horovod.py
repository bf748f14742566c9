"""Horovod's collectives on ranks, next to arithmetic, and what ranks see when their calls differ."""

import math
import threading
import time

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat.horovod.torch as hvd  # noqa: E402
from mpistrat.errors import ContextError  # noqa: E402
from mpistrat.horovod import operations  # noqa: E402
from tests.harness.horovod_ranks import initialized  # noqa: E402

DTYPES = [torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(autouse=True)
def started():
    with initialized():
        yield


def full(value, *shape, dtype=torch.float32):
    return torch.full(shape, value).to(dtype)


def total():
    return hvd.size() * (hvd.size() + 1) // 2


@pytest.mark.ranks(1, 2, 4)
def test_numbers_of_the_ranks():
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    assert (hvd.rank(), hvd.size()) == (world.rank, world.size) == (hvd.local_rank(), hvd.local_size())
    assert (hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()) == (0, 1, True)
    assert hvd.is_initialized() and hvd.mpi_built() and not hvd.gloo_built() and hvd.mpi_threads_supported()


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(dtype):
    mine, size = full(hvd.rank() + 1, 3, 2, dtype=dtype), hvd.size()
    wanted = {hvd.Sum: total(), hvd.Min: 1, hvd.Max: size, hvd.Product: math.factorial(size)}
    mean = total() / size
    wanted[hvd.Average] = mean if dtype.is_floating_point else int(mean)
    for op, want in wanted.items():
        assert torch.equal(hvd.allreduce(mine, op=op), full(want, 3, 2, dtype=dtype)), op
    assert torch.equal(mine, full(hvd.rank() + 1, 3, 2, dtype=dtype)), "not in place"
    assert torch.equal(
        hvd.allreduce(mine, op=hvd.Sum, prescale_factor=2, postscale_factor=3), full(6 * total(), 3, 2, dtype=dtype)
    )
    again = hvd.allreduce_(mine, op=hvd.Sum)
    assert again is mine and torch.equal(mine, full(total(), 3, 2, dtype=dtype))


@pytest.mark.ranks(2, 4)
def test_calls_in_another_order_on_each_rank():
    """Without names they would sum tensors of different names."""
    for _ in range(3):
        order = list(range(50))
        if hvd.rank() % 2:
            order.reverse()
        handles = {i: hvd.allreduce_async(full(i + hvd.rank(), i % 7 + 1), name=f"t{i}", op=hvd.Sum) for i in order}
        for i, handle in handles.items():
            want = sum(i + rank for rank in range(hvd.size()))
            assert torch.equal(hvd.synchronize(handle), full(want, i % 7 + 1)), i


@pytest.mark.ranks(2)
def test_large_and_small_tensors_together():
    shapes = [1 << 21, 3, 1 << 19, 5, 0]
    handles = [hvd.allreduce_async(torch.ones(n), name=f"n{n}", op=hvd.Sum) for n in shapes]
    for n, handle in zip(shapes, handles, strict=True):
        assert torch.equal(hvd.synchronize(handle), full(2, n))


@pytest.fixture
def sums(monkeypatch):
    """Sizes of the sums that are made, where small calls are sent only when a thread waits for one, or asks if it has ended."""
    made, whole = [], operations.FusedReduction._reduced
    monkeypatch.setattr(
        operations.FusedReduction,
        "_reduced",
        lambda self, group, flat: made.append(flat.numel()) or whole(self, group, flat),
    )
    hvd.shutdown()
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "60000")
    hvd.init()
    return made


@pytest.mark.ranks(2, 4)
def test_calls_of_a_step_are_one_sum(sums):
    for step in range(3):
        handles = [hvd.allreduce_async(full(step + hvd.rank(), i + 1), name=f"t{i}", op=hvd.Sum) for i in range(8)]
        time.sleep(0.03)
        assert len(sums) == step, "nothing is sent before a thread waits"
        for i, handle in enumerate(handles):
            want = step * hvd.size() + total() - hvd.size()
            assert torch.equal(hvd.synchronize(handle), full(want, i + 1))
    assert sums == [36, 36, 36]


@pytest.mark.ranks(2)
def test_a_repeated_decision_is_not_computed_again(sums, monkeypatch):
    """Calls without a name, whose texts are new each time, between the steps do not change that."""
    cuts, cut = [], operations.FusedReduction._cut
    monkeypatch.setattr(operations.FusedReduction, "_cut", lambda self, flat: cuts.append(flat) or cut(self, flat))
    for step in range(5):
        handles = [hvd.allreduce_async(full(step, i + 1), name=f"t{i}", op=hvd.Sum) for i in range(3)]
        assert hvd.allreduce(full(step, 2), op=hvd.Sum).tolist() == [2 * step] * 2
        assert [hvd.synchronize(handle).tolist() for handle in handles] == [[2 * step] * (i + 1) for i in range(3)]
        handles = [hvd.allreduce_async(full(step, i + 1), name=f"t{i}", op=hvd.Sum) for i in range(3)]
        assert [hvd.synchronize(handle).tolist() for handle in handles] == [[2 * step] * (i + 1) for i in range(3)]
    assert len(cuts) == 5 + 1, "once with each unnamed call, with which the order is another, and once for all others"


@pytest.mark.ranks(2)
def test_calls_that_no_thread_waits_for_are_sent(sums, monkeypatch):
    """When the program asks if they have ended; when they are large; and some milliseconds after the last one."""
    handle = hvd.allreduce_async(torch.ones(3), name="polled", op=hvd.Sum)
    assert soon(lambda: hvd.poll(handle))
    large = torch.ones(1 << 18)
    hvd.allreduce_async_(large, name="large", op=hvd.Sum)
    assert soon(lambda: large[-1] == 2)
    hvd.shutdown()
    monkeypatch.delenv("HOROVOD_CYCLE_TIME")
    hvd.init()
    small = torch.ones(3)
    hvd.allreduce_async_(small, name="small", op=hvd.Sum)
    assert soon(lambda: small[-1] == 2)


def soon(done):
    """Return True as soon as a function does, False after some seconds."""
    until = time.monotonic() + 20
    while not done() and time.monotonic() < until:
        time.sleep(0.01)
    return done()


@pytest.mark.ranks(2)
def test_repeated_names_with_other_shapes_dtypes_and_ranks_that_joined():
    """What a repeated decision keeps is dropped when a call of its names changes."""
    for shape, dtype in ((3, torch.float32), (5, torch.float32), (5, torch.float64), (3, torch.float32)):
        for _ in range(2):
            calls = [(f"t{i}", full(1, shape + i, dtype=dtype)) for i in range(3)]
            handles = [hvd.allreduce_async(tensor, name=name, op=hvd.Sum) for name, tensor in calls]
            for (_, tensor), handle in zip(calls, handles, strict=True):
                found = hvd.synchronize(handle)
                assert found.dtype == dtype and torch.equal(found, 2 * tensor)
    if hvd.rank() == 0:
        for _ in range(2):
            handles = [hvd.allreduce_async(full(1, 3 + i), name=f"t{i}", op=hvd.Sum) for i in range(3)]
            assert [hvd.synchronize(handle).sum().item() for handle in handles] == [3, 4, 5]
    hvd.join()


@pytest.mark.ranks(2, 4)
def test_in_place_on_views_and_tensors_that_are_not_contiguous():
    whole = torch.zeros(4, 6)
    part = whole[:, ::2]
    part += 1
    hvd.allreduce_(part, op=hvd.Sum)
    assert torch.equal(part, full(hvd.size(), 4, 3)) and whole[:, 1::2].sum() == 0
    part.fill_(hvd.rank())
    hvd.broadcast_(part, root_rank=1)
    assert torch.equal(part, full(1, 4, 3)) and whole[:, 1::2].sum() == 0


@pytest.mark.ranks(2)
def test_groups_of_several_dtypes():
    found = hvd.grouped_allreduce([torch.ones(2), torch.ones(3, dtype=torch.int64)], op=hvd.Sum)
    assert [each.dtype for each in found] == [torch.float32, torch.int64]
    assert [each.tolist() for each in found] == [[2, 2], [2, 2, 2]]
    own = [torch.ones(2), torch.zeros(1)]
    assert hvd.grouped_allreduce_(own, op=hvd.Sum)[0] is own[0] and own[0].tolist() == [2, 2]


@pytest.mark.ranks(1, 2, 4)
def test_gather_broadcast_all_to_all_and_scattered_reductions():
    rank, size = hvd.rank(), hvd.size()
    found = hvd.allgather(full(rank, rank + 1, 2))
    assert found[:, 0].tolist() == [r for r in range(size) for _ in range(r + 1)]
    assert hvd.allgather(torch.tensor(rank)).tolist() == list(range(size))
    assert [each.numel() for each in hvd.grouped_allgather([torch.ones(1), torch.ones(rank)])] == [size, total() - size]
    assert hvd.broadcast(torch.tensor([rank]), root_rank=size - 1).tolist() == [size - 1]
    rows, counts = hvd.alltoall(torch.arange(size) * 10 + rank, splits=[1] * size)
    assert rows.tolist() == [10 * rank + r for r in range(size)] and counts.tolist() == [1] * size
    uneven = hvd.alltoall(full(rank, 1), splits=[0] * (size - 1) + [1])[0]
    assert uneven.tolist() == (list(range(size)) if rank == size - 1 else [])
    own = hvd.reducescatter(torch.arange(2.0 * size + 1), op=hvd.Sum)
    first = 0 if rank == 0 else 2 * rank + 1
    assert own.tolist() == [size * row for row in range(first, 2 * rank + 3)]
    assert hvd.reducescatter(torch.ones(size), op=hvd.Average).tolist() == [1]
    assert hvd.barrier() is None


@pytest.mark.ranks(2)
def test_gradients():
    x = torch.ones(3, requires_grad=True)
    (hvd.allreduce(x, op=hvd.Sum) * (hvd.rank() + 1)).sum().backward()
    assert x.grad.tolist() == [3, 3, 3]
    x = torch.ones(1, 2, requires_grad=True)
    (hvd.allgather(x) * (hvd.rank() + 1)).sum().backward()
    assert x.grad.tolist() == [[1.5, 1.5]]
    x = torch.ones(2, requires_grad=True)
    (hvd.broadcast(x, 1) * (hvd.rank() + 1)).sum().backward()
    assert x.grad.tolist() == ([1.5, 1.5] if hvd.rank() == 1 else [0, 0])
    x = torch.ones(2, requires_grad=True)
    (hvd.alltoall(x) * (hvd.rank() + 1)).sum().backward()
    assert x.grad.tolist() == [1, 2]
    x = torch.ones(2, requires_grad=True)
    (hvd.reducescatter(x, op=hvd.Sum) * (hvd.rank() + 1)).sum().backward()
    assert x.grad.tolist() == [2, 4]


@pytest.mark.ranks(2)
def test_sparse_sums():
    own = torch.sparse_coo_tensor([[hvd.rank(), 2]], [1.0, 4.0], (4,))
    assert hvd.sparse_allreduce_async(own, "s", hvd.Sum)().to_dense().tolist() == [1, 1, 8, 0]
    assert hvd.sparse_allreduce_async(own, "s", hvd.Average)().to_dense().tolist() == [0.5, 0.5, 4, 0]
    with pytest.raises(ValueError, match="hvd.allreduce: tensor: expected dense tensors .*, got a sparse one"):
        hvd.allreduce(own)
    with pytest.raises(ValueError, match="op: expected Average or Sum, got Max"):
        hvd.sparse_allreduce_async(own, "s", hvd.Max)


@pytest.mark.ranks(4)
def test_adasum_of_orthogonal_and_of_equal_tensors():
    """Orthogonal ones are added, equal ones are averaged."""
    own = torch.zeros(4)
    own[hvd.rank()] = 2.0
    assert hvd.allreduce(own, op=hvd.Adasum).tolist() == [2, 2, 2, 2]
    assert torch.allclose(hvd.allreduce(full(3, 5), op=hvd.Adasum), full(3, 5))
    large = full(3, 1 << 20)
    assert torch.allclose(hvd.allreduce(large, op=hvd.Adasum), large)


@pytest.mark.ranks(3)
def test_adasum_needs_a_power_of_two():
    with pytest.raises(hvd.HorovodInternalError, match="expected a power of two, got 3"):
        hvd.allreduce(torch.ones(1), op=hvd.Adasum)


@pytest.mark.ranks(2, 4)
def test_ranks_with_different_numbers_of_batches():
    """A rank that joined counts as zero in sums, and not at all in products, minima and maxima."""
    rank, size = hvd.rank(), hvd.size()
    for batch in range(rank + 1):
        left = size - batch
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [left, left]
        assert hvd.allreduce(full(-2, 1), op=hvd.Max).item() == -2
        assert hvd.allreduce(full(2, 1, dtype=torch.int32), op=hvd.Min).item() == 2
        assert hvd.allreduce(full(2, 1), op=hvd.Product).item() == 2**left
        hvd.barrier()
    last = hvd.join()
    assert hvd.allgather_object(last) == [last] * size
    assert last == size - 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size, "unnamed calls match again"


@pytest.mark.ranks(4)
def test_process_sets():
    even, odd = hvd.add_process_set([0, 2]), hvd.add_process_set(hvd.ProcessSet([3, 1]))
    own, other = (odd, even) if hvd.rank() % 2 else (even, odd)
    assert (own.size(), own.rank(), own.included()) == (2, hvd.rank() // 2, True)
    assert (other.size(), other.rank(), other.included()) == (2, None, False)
    assert hvd.allreduce(full(hvd.rank(), 1), process_set=own, op=hvd.Sum).item() == (4 if hvd.rank() % 2 else 2)
    assert hvd.broadcast(full(hvd.rank(), 1), own.ranks[1], process_set=own).item() == own.ranks[1]
    assert hvd.allgather(torch.tensor([hvd.rank()]), process_set=own).tolist() == own.ranks
    with pytest.raises(hvd.HorovodInternalError, match=rf"expected a call of ranks .*, got one of rank {hvd.rank()}"):
        hvd.allreduce(torch.ones(1), process_set=other)
    with pytest.raises(ValueError, match="root_rank: expected a rank of the process set"):
        hvd.broadcast(torch.ones(1), other.ranks[0], process_set=own)
    with pytest.raises(ValueError, match=r"got \[0, 2\], which are those of another one"):
        hvd.add_process_set([0, 2])
    with pytest.raises(ValueError, match="expected at least one rank, each with 0 <= rank < 4"):
        hvd.add_process_set([0, 4])
    assert hvd.remove_process_set(even) and not hvd.remove_process_set(even)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ValueError, match="expected a registered one"):
        hvd.allreduce(torch.ones(1), process_set=even)
    again = hvd.add_process_set([0, 2])
    assert again.process_set_id != odd.process_set_id


@pytest.mark.ranks(2, 3)
def test_calls_that_differ_fail_on_all_ranks():
    rank, last = hvd.rank(), hvd.size() - 1
    others = "rank 0" if last == 1 else "ranks 0, 1"
    wrong = {
        "shapes": lambda: hvd.allreduce(torch.ones(3 + (rank == last)), name="grad"),
        "dtypes": lambda: hvd.allreduce(
            torch.ones(3).to(torch.float64 if rank == last else torch.float32), name="grad"
        ),
        "root_rank": lambda: hvd.broadcast(torch.ones(3), int(rank == last), name="grad"),
        "op": lambda: hvd.allreduce(torch.ones(3), op=hvd.Sum if rank == last else hvd.Max, name="grad"),
    }
    for word, call in wrong.items():
        with pytest.raises(
            hvd.HorovodInternalError, match=rf"\.grad: .* different {word}: {others}: .*; rank {last}: "
        ):
            call()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="grad").item() == hvd.size()


@pytest.mark.ranks(2)
def test_wrong_arguments_fail_before_anything_is_sent():
    for call, text in (
        (
            lambda: hvd.allreduce(torch.ones(1, dtype=torch.bool)),
            "expected dense tensors of numbers on the CPU or on one GPU, got one of",
        ),
        (lambda: hvd.allreduce(torch.ones(1, device="meta")), "got one on meta"),
        (lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum), "average: expected None where op is given"),
        (lambda: hvd.alltoall(torch.ones(3)), "tensor: expected a number of rows that 2 ranks divide, got 3"),
        (lambda: hvd.alltoall(torch.ones(3), [4, 0]), "splits: expected 2 numbers of rows, together at most 3, got"),
        (
            lambda: hvd.alltoall(torch.ones(3), torch.tensor([1, 1])),
            "splits: expected 32-bit integers, got torch.int64",
        ),
        (lambda: hvd.reducescatter(torch.tensor(1.0)), "expected at least one dimension"),
        (lambda: hvd.ProcessSet([0, 0]), "expected a list of ranks, each once"),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(NotImplementedError, match="expected any other reduction, got Adasum"):
        hvd.reducescatter(torch.ones(2), op=hvd.Adasum)
    with pytest.raises(
        TypeError, match=rf"rank {hvd.rank()}: hvd.broadcast_object: obj: expected an object that can be"
    ):
        hvd.broadcast_object(threading.Lock(), hvd.rank())


@pytest.mark.ranks(2)
def test_a_name_is_used_once_at_a_time():
    first = hvd.allreduce_async(torch.ones(1), name="x")
    if not hvd.poll(first):
        with pytest.raises(ValueError, match=rf"rank {hvd.rank()}: .* Duplicate tensor name 'allreduce.x'"):
            hvd.allreduce_async(torch.ones(1), name="x")
    hvd.synchronize(first)
    assert hvd.synchronize(first) is None
    assert hvd.poll(first)


@pytest.mark.ranks(2)
def test_a_rank_that_shuts_down_ends_the_calls_that_wait_for_it():
    if hvd.rank() == 1:
        hvd.shutdown()
        with pytest.raises(ValueError, match="Horovod has not been initialized; call hvd.init"):
            hvd.rank()
    else:
        with pytest.raises(hvd.HorovodInternalError, match=r"rank 1 has called hvd\.shutdown, or ended"):
            hvd.allreduce(torch.ones(1), name="x")
        assert not hvd.is_initialized() and hvd.rank() == 0
        with pytest.raises(hvd.HorovodInternalError, match="Horovod has been shut down"):
            hvd.allreduce(torch.ones(1), name="y")


@pytest.mark.ranks(2)
def test_a_call_that_a_rank_lacks_is_reported_and_fails(monkeypatch, caplog):
    from mpi4py import MPI

    hvd.shutdown()
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.3")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "2")
    hvd.init()
    if hvd.rank() == 0:
        with pytest.raises(
            hvd.HorovodInternalError, match=r"allreduce\.grad: rank 0 waited \d s for rank 1, which did not"
        ):
            hvd.allreduce(torch.ones(1), name="grad")
        assert "allreduce.grad: rank 0 waited" in caplog.text and "s for rank 1" in caplog.text
    MPI.COMM_WORLD.Barrier()


@pytest.mark.ranks(2)
def test_an_idle_rank_leaves_its_core_to_others():
    hvd.barrier()
    time.sleep(1.2)
    start = time.process_time()
    time.sleep(2)
    assert time.process_time() - start < 0.2, "a tenth of a core"
    hvd.barrier()


@pytest.mark.ranks(2)
def test_init_again_and_with_some_ranks():
    from mpi4py import MPI

    hvd.shutdown()
    hvd.init(comm=[MPI.COMM_WORLD.rank])
    assert (hvd.rank(), hvd.size()) == (0, 1)
    hvd.shutdown()
    part = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank)
    hvd.init(comm=part, process_sets="dynamic")
    assert hvd.size() == 1 and hvd.allreduce(full(5, 1), op=hvd.Sum).item() == 5
    hvd.shutdown()
    part.Free()
    hvd.init(process_sets=[hvd.ProcessSet([0])])
    assert hvd.size() == 2
    with pytest.raises(ValueError, match="hvd.init: comm: expected"):
        hvd.shutdown()
        hvd.init(comm=[7])


@pytest.mark.ranks(2)
def test_the_timeline_has_the_calls(tmp_path):
    import json

    path = tmp_path / "timeline.json"
    hvd.start_timeline(str(path), mark_cycles=True)
    hvd.allreduce(torch.ones(2), name="one")
    hvd.allgather(torch.ones(2), name="two")
    hvd.stop_timeline()
    hvd.allreduce(torch.ones(2), name="three")
    if hvd.rank() == 0:
        events = json.loads(path.read_text())
        names = {(event["name"], event.get("tid")) for event in events}
        for name in ("ALLREDUCE", "NEGOTIATE_ALLREDUCE"):
            assert (name, "allreduce.one") in names
        assert ("ALLGATHER", "allgather.two") in names and ("CYCLE_START", None) in names
        assert "three" not in path.read_text()
        with pytest.raises(ContextError, match="expected a file that can be written"):
            hvd.start_timeline(str(tmp_path / "none" / "timeline.json"))
    hvd.barrier()

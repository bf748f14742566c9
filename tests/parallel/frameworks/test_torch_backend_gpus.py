"""Tensors on GPUs in a group of ours, without a GPU: float64 tensors stand for them, and PyTorch's gloo for its NCCL."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import torch.distributed as dist  # noqa: E402

from mpistrat.torch.backend import gpus  # noqa: E402
from mpistrat.torch.backend import group as group_module  # noqa: E402
from tests.harness.torch_groups import default_group  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.ranks(2, 4)]


class Recorder:
    """PyTorch's group inside ours, which notes the calls that it gets."""

    def __init__(self, inner):
        self.inner, self.calls = inner, []

    def __getattr__(self, name):
        method = getattr(self.inner, name)

        def call(*args, **kwargs):
            self.calls.append(name)
            return method(*args, **kwargs)

        return call


@pytest.fixture
def group(monkeypatch):
    """The default group, for which float64 tensors lie on a GPU of each rank's own."""
    on_gpu = lambda tensor: tensor.dtype == torch.float64  # noqa: E731
    monkeypatch.setattr(gpus, "is_on_gpu", on_gpu)
    monkeypatch.setattr(group_module, "is_on_gpu", on_gpu)
    monkeypatch.setattr(gpus, "_number_of", lambda device: (dist.get_rank(), 0))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    with default_group() as group:

        def inner_group(timeout):
            make = lambda store, rank, size: dist.ProcessGroupGloo(store, rank, size, timeout)  # noqa: E731
            return make, dist.ProcessGroup.BackendType.GLOO

        monkeypatch.setattr(gpus, "inner_group", inner_group)
        group.gpus = gpus.GpuGroup(group._ranks, group._store, group._timeout)
        yield group


def x(value, *shape):
    return torch.full(shape, float(value), dtype=torch.float64)


def test_collectives_go_to_the_group_inside(group):
    rank, size = dist.get_rank(), dist.get_world_size()
    waiting = dist.all_reduce(torch.ones(5), async_op=True)  # of ours, in the lane while the other is made
    tensor = x(rank + 1, 3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [size * (size + 1) / 2] * 3
    group.gpus.inner = recorder = Recorder(group.gpus.inner)
    waiting.wait()
    dist.broadcast(tensor, src=1)
    rooms = [x(0, 3) for _ in range(size)]
    dist.all_gather(rooms, x(rank, 3))
    whole = x(0, 3 * size)
    dist.all_gather_into_tensor(whole, x(rank, 3))
    part = x(0, 2)
    dist.reduce_scatter_tensor(part, x(1, 2 * size))
    dist.reduce(x(1, 2), dst=0)
    dist.gather(x(rank, 2), [x(0, 2) for _ in range(size)] if rank == 0 else None, dst=0)
    dist.scatter(part, [x(7, 2)] * size if rank == 0 else None, src=0)
    came = x(0, size)
    dist.all_to_all_single(came, x(rank, size))
    assert [room[0].item() for room in rooms] == came.tolist() == list(range(size))
    assert whole.view(size, 3)[:, 0].tolist() == list(range(size)) and part.tolist() == [7, 7]
    assert recorder.calls == [
        *("broadcast", "allgather", "_allgather_base", "_reduce_scatter_base", "reduce", "gather", "scatter"),
        "alltoall_base",
    ]
    integers = torch.ones(3, dtype=torch.int64)
    dist.all_reduce(integers)
    assert integers.tolist() == [size] * 3 and len(recorder.calls) == 8


def test_messages_do_not_decide(group):
    """A rank whose first tensor on a GPU is sent cannot wait for the others."""
    rank, size = dist.get_rank(), dist.get_world_size()
    room = x(0, 4)
    works = [dist.isend(x(rank, 4), (rank + 1) % size), dist.irecv(room, (rank - 1) % size)]
    for work in works:
        work.wait()
    assert room.tolist() == [(rank - 1) % size] * 4 and group.gpus.inner is None


@pytest.mark.parametrize("why", ["shared", "missing"])
def test_ranks_that_cannot_use_nccl_are_named_once(group, why, monkeypatch, caplog):
    rank, size = dist.get_rank(), dist.get_world_size()
    if why == "shared":
        monkeypatch.setattr(gpus, "_number_of", lambda device: (rank // 2, 0))
        reason = "; ".join(f"ranks {each}, {each + 1} share a GPU" for each in range(0, size, 2))
    else:
        monkeypatch.setattr(dist, "is_nccl_available", lambda: rank != 1)
        reason = "PyTorch has no NCCL on rank 1"
    for _ in range(2):
        tensor = x(rank + 1, 3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [size * (size + 1) / 2] * 3
    assert group.gpus.inner is None
    if rank == 0:
        assert caplog.text.count(f"through host memory, not by NCCL: {reason}") == 1


def test_ranks_with_tensors_of_another_place_are_told(group):
    """One rank has its tensor on a GPU, the others have theirs on the CPU."""
    rank = dist.get_rank()
    tensor = x(1, 3) if rank == 0 else torch.ones(3)
    with pytest.raises(RuntimeError, match="first tensor on a GPU"):
        dist.all_reduce(tensor)


def test_what_nccl_does_not_know_goes_through_the_host(group):
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.all_reduce(x(1, 2))
    group.gpus.inner = recorder = Recorder(group.gpus.inner)
    sparse = torch.sparse_coo_tensor([[rank]], torch.ones(1, dtype=torch.float64), (size,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [1] * size and recorder.calls == []
    assert not gpus._nccl_knows(torch.ones(1, dtype=torch.int16), ())
    opts = dist.AllreduceOptions()
    assert gpus._nccl_knows(x(1, 1), ([x(1, 1)], opts))
    opts.reduceOp = dist.ReduceOp.BXOR
    assert not gpus._nccl_knows(x(1, 1), ([x(1, 1)], opts))


@pytest.mark.parametrize("connected", [False, True])
def test_coalesced_calls_end_with_all_of_them(group, connected):
    """With the first tensor on a GPU within the block, and before it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if connected:
        dist.all_reduce(x(1, 2))
    wholes, parts = [x(0, 2 * size) for _ in range(2)], [x(0, 2) for _ in range(2)]
    with dist._coalescing_manager(group=group, async_ops=True) as gathers:
        for number, whole in enumerate(wholes):
            dist.all_gather_into_tensor(whole, x(rank + number, 2))
    with dist._coalescing_manager(group=group, async_ops=True) as sums:
        for number, part in enumerate(parts):
            dist.reduce_scatter_tensor(part, x(number + 1, 2 * size))
    gathers.wait()
    sums.wait()
    for number in range(2):
        assert wholes[number].view(size, 2)[:, 0].tolist() == [each + number for each in range(size)]
        assert parts[number].tolist() == [size * (number + 1)] * 2


def test_messages_in_a_coalesced_block_are_waited_for(group):
    """As PyTorch 2.5 sends tensors on GPUs in `batch_isend_irecv`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    room = x(0, 100_000)
    group._start_coalescing(torch.device("cuda"))
    group.send([x(rank, 100_000)], (rank + 1) % size, 0)
    group.recv([room], (rank - 1) % size, 0)
    group._end_coalescing(torch.device("cuda")).wait()
    assert room.tolist() == [(rank - 1) % size] * 100_000


def test_the_time_limit_reaches_the_group_inside(group):
    from datetime import timedelta

    dist.all_reduce(x(1, 2))
    group.gpus.inner = recorder = Recorder(group.gpus.inner)
    group.set_timeout(timedelta(seconds=7))
    name = "set_timeout" if hasattr(dist.ProcessGroupGloo, "set_timeout") else "_set_default_timeout"
    assert recorder.calls == [name]

"""Horovod's calls with tensors on GPUs, without a GPU: float64 tensors stand for them, and PyTorch's gloo for its NCCL.

Streams and events are stand-ins that note their order.
"""

import contextlib

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import torch.distributed as dist  # noqa: E402

import mpistrat.horovod.torch as hvd  # noqa: E402
from mpistrat.horovod import engine  # noqa: E402
from mpistrat.horovod.torch import basics, calls  # noqa: E402
from mpistrat.torch.backend import gpus  # noqa: E402
from mpistrat.torch.backend import group as group_module  # noqa: E402
from tests.harness.horovod_ranks import initialized  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.ranks(2)]


class Streams:
    """The streams of a GPU: what happens on each is noted."""

    def __init__(self):
        self.log, self.current, self.events, self.finished = [], self.stream("caller"), 0, True

    def stream(self, name="engine"):
        return NotedStream(self, name)

    def queued(self, tensors):
        return [self.current.record_event()] if any(on_gpu(tensor) for tensor in tensors) else []

    @contextlib.contextmanager
    def use(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class NotedStream:
    def __init__(self, all_streams, name):
        self.all, self.name = all_streams, name

    def wait_event(self, event):
        self.all.log.append(f"{self.name} waits for {event.name}")

    def record_event(self):
        self.all.events += 1
        self.all.log.append(f"{self.name} records {self.all.events}")
        return NotedEvent(self.all)

    def synchronize(self):
        self.all.log.append(f"all wait for {self.name}")


class NotedEvent:
    def __init__(self, all_streams):
        self.all, self.name = all_streams, all_streams.events

    def query(self):
        return self.all.finished


def on_gpu(tensor):
    return tensor.dtype == torch.float64


@pytest.fixture
def streams(monkeypatch):
    """Horovod's calls where each rank has a GPU of its own."""
    from mpi4py import MPI

    found, call = Streams(), gpus._call

    def noted(inner, name, args, kwargs):
        found.log.append(f"{name} on {found.current.name}")
        return call(inner, name, args, kwargs)

    def inner_group(timeout):
        make = lambda store, rank, size: dist.ProcessGroupGloo(store, rank, size, timeout)  # noqa: E731
        return make, dist.ProcessGroup.BackendType.GLOO

    for module in (gpus, group_module, engine, calls):
        monkeypatch.setattr(module, "is_on_gpu", on_gpu)
    for module in (group_module, engine):
        monkeypatch.setattr(module, "gpus_here", lambda: True)
    monkeypatch.setattr(gpus, "_number_of", lambda device: (MPI.COMM_WORLD.rank, 0))
    monkeypatch.setattr(gpus, "inner_group", inner_group)
    monkeypatch.setattr(gpus, "_call", noted)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(engine, "queued", found.queued)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: found.stream())
    monkeypatch.setattr(torch.cuda, "stream", found.use)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: found.current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(basics.Engine, "use_gpu", lambda self, number: None)  # the stand-in for its GPU is the CPU
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "60000")  # so that the waiting thread makes the calls
    with initialized():
        yield found


def x(value, *shape):
    return torch.full(shape, float(value), dtype=torch.float64)


def test_a_call_runs_between_the_work_before_and_after_it(streams):
    found = hvd.allreduce(x(hvd.rank() + 1, 3), op=hvd.Sum)
    assert found.tolist() == [3, 3, 3]
    assert streams.log == [
        *("caller records 1", "engine waits for 1", "allreduce on engine", "engine records 2", "caller waits for 2")
    ]
    streams.log.clear()
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [2, 2, 2]
    assert streams.log == [], "on the CPU"
    first, second = (hvd.allreduce_async_(x(1, 2), name=name, op=hvd.Sum) for name in ("one", "two"))
    assert torch.equal(hvd.synchronize(first) + hvd.synchronize(second), x(4, 2))
    assert streams.log == [
        *("caller records 3", "caller records 4", "engine waits for 3", "engine waits for 4", "allreduce on engine"),
        *("engine records 5", "caller waits for 5", "caller waits for 5"),
    ]


def test_poll_waits_for_the_gpu(streams):
    streams.finished = False
    handle, other = (hvd.allreduce_async(x(1, 2), name=name, op=hvd.Sum) for name in ("one", "two"))
    hvd.synchronize(other)
    assert not hvd.poll(handle)
    streams.finished = True
    assert hvd.poll(handle) and hvd.synchronize(handle).tolist() == [2, 2]


def test_all_collectives_go_by_nccl(streams):
    rank = hvd.rank()
    part = x(0, 4, 2)[:, 1]
    part += rank
    hvd.broadcast_(part, root_rank=1)
    assert part.tolist() == [1] * 4
    assert hvd.allgather(x(rank, 1, 2)).tolist() == [[0, 0], [1, 1]]
    rows, counts = hvd.alltoall(x(rank, 3), splits=[1, 2])
    assert (rows.tolist(), counts.tolist()) == ([0, 1] if rank == 0 else [0, 0, 1, 1], [rank + 1] * 2)
    assert [each.tolist() for each in hvd.grouped_allreduce([x(1, 2), x(rank, 1)], op=hvd.Sum)] == [[2, 2], [1]]
    assert hvd.allreduce(x(rank, 2), op=hvd.Sum, prescale_factor=2, postscale_factor=3).tolist() == [6, 6]
    assert hvd.allreduce(x(2, 2), op=hvd.Adasum).tolist() == [2, 2]
    names = [line.split()[0] for line in streams.log if line.endswith(" on engine")]
    assert names == ["broadcast", "allgather", "alltoall_base", "allreduce", "allreduce"]
    assert hvd.allgather_object(rank) == [0, 1]


def test_a_rank_that_joined_takes_part(streams):
    hvd.allreduce(x(1, 2), name="a", op=hvd.Sum)
    if hvd.rank() == 0:
        assert hvd.allreduce(x(3, 2), name="a", op=hvd.Sum).tolist() == [3, 3]
    assert hvd.join() == 0 or hvd.rank() == 1


def test_a_step_of_an_optimizer(streams):
    """The gradient is 1 on rank 0 and 2 on rank 1."""
    model = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum)
    for _ in range(2):
        optimizer.zero_grad()
        (model(x(hvd.rank() + 1, 1, 2))).sum().backward()
        optimizer.step()
    assert model.weight.tolist() == [[-6, -6]]


def test_ranks_that_share_a_gpu_use_host_memory(streams, monkeypatch, caplog):
    monkeypatch.setattr(gpus, "_number_of", lambda device: (0, 0))
    assert hvd.allreduce(x(hvd.rank(), 2), op=hvd.Sum).tolist() == [1, 1]
    assert hvd.allreduce(x(hvd.rank(), 2), op=hvd.Average).tolist() == [0.5, 0.5]
    own = hvd.reducescatter(x(1, 3), op=hvd.Sum)
    assert own.tolist() == ([2, 2] if hvd.rank() == 0 else [2])
    assert [line for line in streams.log if line.endswith(" on engine")] == []
    if hvd.rank() == 0:
        assert "through host memory, not by NCCL: ranks 0, 1 share a GPU" in caplog.text


def test_a_process_set_has_a_group_of_its_own(streams):
    alone = hvd.add_process_set([hvd.size() - 1])
    if alone.included():
        assert hvd.allreduce(x(5, 1), op=hvd.Sum, process_set=alone).item() == 5
    assert hvd.remove_process_set(alone)
    assert hvd.allreduce(x(1, 1), op=hvd.Sum).item() == 2
    assert "all wait for engine" in streams.log or not hvd.rank()


def test_a_rank_has_one_gpu(streams, monkeypatch):
    monkeypatch.setattr(basics.engine(""), "_gpu", torch.device("cuda", 1))
    with pytest.raises(
        ValueError, match=rf"rank {hvd.rank()}: .* on cuda:1, the GPU of this rank's first call, got cpu"
    ):
        hvd.allreduce(x(1, 1))
    monkeypatch.setattr(calls, "is_on_gpu", lambda tensor: tensor.is_meta)
    with pytest.raises(ValueError, match="on the CPU or on one GPU, got one on cpu and one on meta"):
        hvd.grouped_allreduce([torch.ones(1), torch.ones(1, device="meta")])

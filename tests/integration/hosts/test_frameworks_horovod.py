"""Horovod's calls over two isolated hosts: numbers of ranks, collectives, a step, and calls that differ."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat.horovod.torch as hvd  # noqa: E402
from tests.harness.horovod_ranks import initialized  # noqa: E402

pytestmark = pytest.mark.hosts(2, ranks_per_host=2)


@pytest.fixture(autouse=True)
def started():
    with initialized():
        yield


def full(value, *shape):
    return torch.full(shape, float(value))


def test_numbers_of_the_ranks():
    rank = hvd.rank()
    assert (hvd.size(), hvd.local_size(), hvd.cross_size(), hvd.is_homogeneous()) == (4, 2, 2, True)
    assert (hvd.local_rank(), hvd.cross_rank()) == (rank % 2, rank // 2)


def test_collectives():
    rank = hvd.rank()
    for count in (1, 1000, 1 << 21):
        assert torch.equal(hvd.allreduce(full(rank + 1, count), op=hvd.Sum), full(10, count))
    order = list(range(20)) if rank % 2 else list(range(19, -1, -1))
    handles = {i: hvd.allreduce_async(full(i + rank, i + 1), name=f"t{i}") for i in order}
    for i, handle in handles.items():
        assert torch.equal(hvd.synchronize(handle), full(i + 1.5, i + 1))
    assert hvd.broadcast(full(rank, 2), root_rank=3).tolist() == [3, 3]
    assert hvd.allgather(full(rank, rank)).tolist() == [1, 2, 2, 3, 3, 3]
    assert hvd.alltoall(torch.arange(4) + 10 * rank).tolist() == [rank, 10 + rank, 20 + rank, 30 + rank]
    assert hvd.reducescatter(torch.arange(5.0), op=hvd.Sum).tolist() == [[0, 4], [8], [12], [16]][rank]
    assert hvd.allgather_object({"rank": rank}) == [{"rank": each} for each in range(4)]
    across = hvd.add_process_set([0, 3])
    if across.included():
        assert hvd.allreduce(full(rank, 3), op=hvd.Sum, process_set=across).tolist() == [3, 3, 3]
    for _ in range(rank):
        assert hvd.allreduce(full(1, 1), name="late", op=hvd.Sum).item() <= 3
    assert hvd.join() == 3


def test_steps_of_an_optimizer():
    """All ranks begin with rank 0's weights. The gradients are 1 to 4, their average 2.5."""
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(model.weight, hvd.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 + hvd.rank(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for want in (-1.25, -1.25 - 0.5 * (2.5 + 1.25)):
        optimizer.zero_grad()
        (model(torch.ones(1, 2)) * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
        assert model.weight.tolist() == [[want, want]]


def test_calls_that_differ_fail_on_both_hosts():
    rank = hvd.rank()
    text = r"allreduce\.grad: .* different shapes: ranks 0, 1, 2: \[\[3\]\]; rank 3: \[\[4\]\]"
    with pytest.raises(hvd.HorovodInternalError, match=text):
        hvd.allreduce(torch.ones(3 + (rank == 3)), name="grad")
    assert hvd.allreduce(torch.ones(1), name="grad", op=hvd.Sum).item() == 4

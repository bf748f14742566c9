"""What PyTorch's dispatch modes and subclasses of tensors see of the backend's operations, next to what they see of gloo's."""

import contextlib

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import torch.distributed as dist  # noqa: E402
from torch.distributed import _functional_collectives  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

from tests.harness.torch_groups import default_group, fully_shard  # noqa: E402
from tests.harness.torch_operations import CALLS, all_gather_single, gather_single, reduce_scatter_single  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.ranks(2)]


def send_to_next(group):
    """Send a tensor to the next rank, and receive one from the rank before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent = dist.isend(torch.ones(3), (rank + 1) % ranks, group=group)
    dist.recv(torch.ones(3), (rank - 1) % ranks, group=group)
    sent.wait()


def coalesced(group):
    """Sum tensors in one call."""
    dist.all_reduce_coalesced([torch.ones(2), torch.ones(3)], group=group)


def functional(group):
    """Sum a tensor, and gather it, by functional collectives, which are operators of their own."""
    total = _functional_collectives.all_reduce(torch.ones(3), "sum", group)
    _functional_collectives.all_gather_tensor(total, 0, group).sum().item()


def call(name, group):
    """Call an operation of `CALLS`."""
    CALLS[name](torch.ones(3), dist.get_world_size(), 3, torch.float32, 0, group=group)


CASES = {name: lambda group, name=name: call(name, group) for name in CALLS}
CASES |= {"send": send_to_next, "all_reduce_coalesced": coalesced, "functional": functional}


class Seen(TorchDispatchMode):
    """A mode that notes the operators of groups, the shapes of their tensors, and the sizes of their groups."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "c10d" in function.namespace:
            names = [argument.name for argument in function._schema.arguments]
            number = names.index("process_group") if "process_group" in names else len(names)
            shapes = tree_map_only(torch.Tensor, lambda tensor: tuple(tensor.shape), list(args[:number]))
            size = dist.ProcessGroup.unbox(args[number]).size() if number < len(names) else None
            self.calls.append((str(function), [shape for shape in shapes if not isinstance(shape, str)], size))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CASES)
def test_a_mode_sees_the_operators_that_it_sees_of_gloo(name):
    with default_group() as group:
        found = []
        for each in (dist.new_group(backend="gloo"), group):
            with Seen() as outer, Seen() as inner:
                try:
                    CASES[name](each)
                except RuntimeError as error:  # gloo of PyTorch 2.5
                    if each is group or "does not support" not in str(error):
                        raise
                    pytest.skip(str(error))
            assert inner.calls == outer.calls
            found.append(inner.calls)
        assert found[1] == found[0] and found[0]


@pytest.mark.skipif(not hasattr(torch.ops.c10d, "gather_into_tensor_"), reason="new in PyTorch 2.14")
def test_a_mode_sees_a_gather_into_one_tensor():
    """Gloo has none."""
    with default_group(), Seen() as seen:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        whole = torch.empty(ranks) if rank == 0 else None
        gather_single(torch.tensor([float(rank)]), whole)
    assert seen.calls == [("c10d.gather_into_tensor_.default", [(ranks if rank == 0 else 0,), (1,)], ranks)]
    assert whole is None or whole.tolist() == list(range(ranks))


def test_operations_that_modes_see_have_their_results():
    with default_group(), Seen(), Seen():
        rank, ranks = dist.get_rank(), dist.get_world_size()
        total, whole, mine = torch.full((3,), rank + 1.0), torch.empty(ranks), torch.empty(1)
        work = dist.all_reduce(total, async_op=True)
        work.wait()
        all_gather_single(whole, torch.tensor([float(rank)]))
        reduce_scatter_single(mine, torch.arange(float(ranks)))
    assert total.tolist() == [ranks * (ranks + 1) / 2] * 3
    assert whole.tolist() == list(range(ranks)) and mine.tolist() == [rank * ranks]


def test_a_mode_that_raises_leaves_the_group_usable():
    class Raises(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            raise KeyError("mode")

    with default_group():
        tensor = torch.ones(1)
        with contextlib.suppress(KeyError), Raises():
            dist.all_reduce(tensor)
        dist.all_reduce(tensor)
        assert tensor.item() == dist.get_world_size()


def test_comm_debug_mode_counts_the_collectives_of_fully_sharded_modules():
    debug = pytest.importorskip("torch.distributed.tensor.debug")
    with default_group():
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        for module in (*model, model):
            fully_shard(module)
        with debug.CommDebugMode() as mode:
            model(torch.ones(2, 4)).sum().backward()
        counts = {str(operator): count for operator, count in mode.get_comm_counts().items()}
    # Two modules have parameters, which each gathers once forward and once backward. Then it scatters their gradients.
    assert counts == {"c10d._allgather_base_": 4, "c10d._reduce_scatter_base_": 2}


def both(first, second, shape=(3,)):
    """Return a tensor that wraps two."""
    return TwoTensor(torch.full(shape, float(first)), torch.full(shape, float(second)))


def moved(name, group, make):
    """Call an operation with tensors of two numbers each, which MAKE makes; return the tensors that it writes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own, parts, whole = make(rank + 1, 10 * rank), [make(0, 0) for _ in range(ranks)], make(0, 0, (3 * ranks,))
    given = [make(each + 1, 100 * rank + each) for each in range(ranks)]
    mine, long, root = make(0, 0), make(rank + 1, 2 * rank, (3 * ranks,)), rank == 0
    calls = {
        "all_reduce": lambda: dist.all_reduce(own, group=group),
        "broadcast": lambda: dist.broadcast(own, src=1, group=group),
        "reduce": lambda: dist.reduce(own, dst=0, group=group),
        "all_gather": lambda: dist.all_gather(parts, own, group=group),
        "all_gather_single": lambda: all_gather_single(whole, own, group=group),
        "gather": lambda: dist.gather(own, parts if root else None, dst=0, group=group),
        "scatter": lambda: dist.scatter(mine, given if root else None, src=0, group=group),
        "reduce_scatter_single": lambda: reduce_scatter_single(mine, long, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(whole, long, group=group),
        "all_reduce async": lambda: dist.all_reduce(own, group=group, async_op=True).wait(),
        "send": lambda: exchange(own, mine, group),
    }
    calls[name]()
    return [mine, whole, *parts] if name == "reduce" and not root else [own, mine, whole, *parts]


def exchange(own, mine, group):
    """Send a tensor to the next rank, and receive one from the rank before."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank % 2:
        dist.recv(mine, (rank - 1) % ranks, group=group)
        dist.send(own, (rank + 1) % ranks, group=group)
    else:
        dist.send(own, (rank + 1) % ranks, group=group)
        dist.recv(mine, (rank - 1) % ranks, group=group)


OPERATIONS = [
    "all_reduce", "broadcast", "reduce", "all_gather", "all_gather_single", "gather", "scatter", "reduce_scatter_single",
    "all_to_all_single", "all_reduce async", "send",
]  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_tensor_that_wraps_two_moves_what_gloo_moves_for_each(name):
    with default_group() as group:
        gloo, found = dist.new_group(backend="gloo"), moved(name, group, both)
        first = moved(name, gloo, lambda first, second, shape=(3,): torch.full(shape, float(first)))
        second = moved(name, gloo, lambda first, second, shape=(3,): torch.full(shape, float(second)))
    assert [each.a.tolist() for each in found] == [each.tolist() for each in first]
    assert [each.b.tolist() for each in found] == [each.tolist() for each in second]


def test_a_wrapped_tensor_is_distributed():
    tensor = pytest.importorskip("torch.distributed.tensor")
    with default_group() as group:
        mesh = torch.distributed.DeviceMesh.from_group(group, "cpu")
        whole = TwoTensor(torch.arange(4.0), torch.arange(4.0) + 10)
        part = tensor.distribute_tensor(whole, mesh, [tensor.Shard(0)]).to_local()
        first = 2 * dist.get_rank()
        assert part.a.tolist() == [first, first + 1] and part.b.tolist() == [first + 10, first + 11]


def test_a_dtensor_is_an_error_that_says_what_to_pass():
    tensor = pytest.importorskip("torch.distributed.tensor")
    with default_group() as group:
        mesh = torch.distributed.DeviceMesh.from_group(group, "cpu")
        sharded = tensor.distribute_tensor(torch.arange(4.0), mesh, [tensor.Shard(0)])
        # PyTorch 2.5 asserts before it calls the group.
        text = r"sharding strategy|got a DTensor.*to_local|no DeviceMesh"
        with pytest.raises((NotImplementedError, AssertionError), match=text):
            dist.all_reduce(sharded)
        dist.all_reduce(sharded.to_local())
        assert sharded.to_local().tolist() == [2.0, 4.0]


def test_a_compiled_function_calls_operations():
    @torch.compile(backend="eager")
    def twice(tensor):
        dist.all_reduce(tensor)
        work = dist.all_reduce(tensor, async_op=True)  # a graph break
        work.wait()
        return tensor + 1

    with default_group():
        assert twice(torch.ones(3)).tolist() == [dist.get_world_size() ** 2 + 1] * 3

"""Random operations of torch.distributed on the backend of this package, next to arithmetic over all ranks' tensors.

Dtypes, shapes with empty axes and axes of one element, strides, groups, roots and splits are drawn; tests with chosen cases are
in test_torch_backend.py. The reference gets each rank's tensors by gloo.
"""

import functools
import operator
import random

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import torch.distributed as dist  # noqa: E402

from tests.harness.torch_groups import group_in  # noqa: E402
from tests.harness.torch_operations import all_gather_single, gather_single, reduce_scatter_single  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.ranks(2, 3, 4)]
CALLS = 60
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
MOVED = [*INTEGERS, *FLOATS, torch.bool, torch.complex64, torch.float8_e4m3fn]
OPERATORS = {  # of numbers so small that no order of sums changes a bit
    "SUM": operator.add, "PRODUCT": operator.mul, "MIN": torch.minimum, "MAX": torch.maximum,
    "BAND": operator.and_, "BOR": operator.or_, "BXOR": operator.xor,
}  # fmt: skip


@pytest.fixture(params=["shared", "private", "nodes"])
def group(request, monkeypatch):
    with group_in(request.param, monkeypatch) as group:
        yield group


class Draw:
    """What one call is drawn from: the same on all ranks, but for the numbers in tensors."""

    def __init__(self, seed):
        self.same = random.Random(seed)
        self.own = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        everybody = list(range(dist.get_world_size()))
        self.groups = [(everybody, dist.new_group(everybody), dist.new_group(everybody, backend="gloo"))]
        for size in {2, len(everybody) - 1} - {1, len(everybody)}:
            some = sorted(self.same.sample(everybody, size))
            self.groups.append((some, dist.new_group(some), dist.new_group(some, backend="gloo")))

    def next(self):
        self.members, self.group, self.gloo = self.same.choice(self.groups)
        self.size, self.root = len(self.members), self.same.choice(self.members)
        self.dtype = self.same.choice(MOVED)
        self.reduced = self.same.choice([*INTEGERS, *FLOATS])
        bits = self.reduced in INTEGERS
        self.op = self.same.choice(list(OPERATORS) if bits else ["SUM", "PRODUCT", "MIN", "MAX"])
        self.shape = tuple(self.same.choice([0, 1, 1, 2, 5, 300]) for _ in range(self.same.choice([0, 1, 2, 2, 3])))
        self.strides = self.same.choice(["dense", "turned", "every second", "inside"])
        self.later = self.same.random() < 0.4  # async_op
        self.counts = [[self.same.choice([0, 1, 3]) for _ in self.members] for _ in self.members]

    @property
    def mine(self):
        """The number of this rank in the group; negative outside."""
        rank = dist.get_rank()
        return self.members.index(rank) if rank in self.members else -1

    def room(self, shape, dtype):
        """Return a tensor that an operation fills, with the drawn strides."""
        if self.strides == "turned":
            return torch.empty(shape[::-1], dtype=dtype).permute(tuple(range(len(shape))[::-1]))
        if self.strides == "every second" and shape:
            return torch.empty((*shape[:-1], 2 * shape[-1]), dtype=dtype)[..., ::2]
        if self.strides == "inside":
            size = torch.Size(shape).numel()
            return torch.empty(size + 3, dtype=dtype)[3:].view(shape)
        return torch.empty(shape, dtype=dtype)

    def tensor(self, shape, dtype):
        """Return a tensor of small numbers of this rank."""
        numbers = torch.randint(0, 3, shape, generator=self.own)
        return self.room(shape, dtype).copy_(numbers.to(dtype))

    def ask(self, call, *args, **kwargs):
        """Call an operation, and wait for it if it was started only."""
        work = call(*args, group=self.group, async_op=self.later, **kwargs)
        if self.later:
            work.wait()

    def all(self, given):
        """Return what each member has given, by its number."""
        found = [None] * self.size
        dist.all_gather_object(found, [(str(one.dtype), one.double() if one.dtype != torch.complex64 else one) for one in given],
                               group=self.gloo)  # fmt: skip
        return [[values for _, values in one] for one in found]


def reduced(values, op, dtype):
    """Reduce tensors of float64 as the dtype would."""
    if dtype in INTEGERS:
        return functools.reduce(OPERATORS[op], [value.to(dtype) for value in values])
    return functools.reduce(OPERATORS[op], values).to(dtype)


def same(got, want):
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one.to(torch.complex64), other.to(torch.complex64))


def all_reduce(draw):
    value = draw.tensor(draw.shape, draw.reduced)
    given = draw.all([value])
    draw.ask(dist.all_reduce, value, getattr(dist.ReduceOp, draw.op))
    same([value], [reduced([one for (one,) in given], draw.op, draw.reduced)])


def reduce(draw):
    value = draw.tensor(draw.shape, draw.reduced)
    given = draw.all([value])
    draw.ask(dist.reduce, value, draw.root, getattr(dist.ReduceOp, draw.op))
    if dist.get_rank() == draw.root:
        same([value], [reduced([one for (one,) in given], draw.op, draw.reduced)])


def broadcast(draw):
    value = draw.tensor(draw.shape, draw.dtype)
    given = draw.all([value])
    draw.ask(dist.broadcast, value, draw.root)
    same([value], given[draw.members.index(draw.root)])


def all_gather(draw):
    value, rooms = draw.tensor(draw.shape, draw.dtype), [draw.room(draw.shape, draw.dtype) for _ in draw.members]
    given = draw.all([value])
    draw.ask(dist.all_gather, rooms, value)
    same(rooms, [one for (one,) in given])


def all_gather_of_one_tensor(draw):
    shape = draw.shape or (1,)
    value, room = draw.tensor(shape, draw.dtype), torch.empty((draw.size * shape[0], *shape[1:]), dtype=draw.dtype)
    given = draw.all([value])
    draw.ask(all_gather_single, room, value)
    same([room], [torch.cat([one for (one,) in given])])


def reduce_scatter(draw):
    parts, room = [draw.tensor(draw.shape, draw.reduced) for _ in draw.members], draw.room(draw.shape, draw.reduced)
    given = draw.all(parts)
    draw.ask(dist.reduce_scatter, room, parts, getattr(dist.ReduceOp, draw.op))
    same([room], [reduced([one[draw.mine] for one in given], draw.op, draw.reduced)])


def reduce_scatter_of_one_tensor(draw):
    shape = draw.shape or (1,)
    whole = draw.tensor((draw.size * shape[0], *shape[1:]), draw.reduced)
    room = draw.room(shape, draw.reduced)
    given = draw.all(list(whole.chunk(draw.size)) if whole.numel() else [room * 0] * draw.size)
    draw.ask(reduce_scatter_single, room, whole, getattr(dist.ReduceOp, draw.op))
    same([room], [reduced([one[draw.mine] for one in given], draw.op, draw.reduced)])


def all_to_all(draw):
    parts = [draw.tensor((count,), draw.dtype) for count in draw.counts[draw.mine]]
    rooms = [draw.room((counts[draw.mine],), draw.dtype) for counts in draw.counts]
    given = draw.all(parts)
    draw.ask(dist.all_to_all, rooms, parts)
    same(rooms, [one[draw.mine] for one in given])


def all_to_all_of_one_tensor(draw):
    sent, received = draw.counts[draw.mine], [counts[draw.mine] for counts in draw.counts]
    whole, room = draw.tensor((sum(sent), 2), draw.dtype), draw.room((sum(received), 2), draw.dtype)
    given = draw.all(list(whole.split(sent)))
    draw.ask(dist.all_to_all_single, room, whole, received, sent)
    same([room], [torch.cat([one[draw.mine] for one in given])])


def gather(draw):
    value = draw.tensor(draw.shape, draw.dtype)
    rooms = [draw.room(draw.shape, draw.dtype) for _ in draw.members] if dist.get_rank() == draw.root else None
    given = draw.all([value])
    draw.ask(dist.gather, value, rooms, draw.root)
    if rooms is not None:
        same(rooms, [one for (one,) in given])


def gather_of_one_tensor(draw):
    value, root = draw.tensor(draw.shape, draw.dtype), dist.get_rank() == draw.root
    room = torch.empty((draw.size, *draw.shape), dtype=draw.dtype) if root else None
    given = draw.all([value])
    draw.ask(gather_single, value, room, draw.root)
    if root:
        same(room, [one for (one,) in given])


def scatter(draw):
    parts = [draw.tensor(draw.shape, draw.dtype) for _ in draw.members]
    given, room = draw.all(parts), draw.room(draw.shape, draw.dtype)
    draw.ask(dist.scatter, room, parts if dist.get_rank() == draw.root else None, draw.root)
    same([room], [given[draw.members.index(draw.root)][draw.mine]])


def messages_in_a_ring(draw):
    value, room = draw.tensor(draw.shape, draw.dtype), draw.room(draw.shape, draw.dtype)
    given = draw.all([value])
    after, before = (draw.members[(draw.mine + step) % draw.size] for step in (1, -1))
    for work in (dist.isend(value, after, group=draw.group, tag=7), dist.irecv(room, before, group=draw.group, tag=7)):
        work.wait()
    same([room], given[(draw.mine - 1) % draw.size])


OPERATIONS = [
    all_reduce, reduce, broadcast, all_gather, all_gather_of_one_tensor, reduce_scatter, reduce_scatter_of_one_tensor,
    all_to_all, all_to_all_of_one_tensor, gather, gather_of_one_tensor, scatter, messages_in_a_ring,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_they_give_what_arithmetic_gives(group, seed):
    draw = Draw(seed)
    for number in range(CALLS):
        draw.next()
        operation = draw.same.choice(OPERATIONS)
        if draw.mine >= 0:
            kind = f"{draw.op} {draw.dtype} {draw.reduced} {draw.shape} {draw.strides}"
            print(f"call {number}: {operation.__name__} {kind} {draw.members} root {draw.root}")  # shown if it fails
            operation(draw)

"""Wrong use of torch.distributed on the backend of this package: each error names the rank, the call and the user's line."""

import re
import sys
from datetime import timedelta
from time import monotonic, sleep

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import torch.distributed as dist  # noqa: E402

import mpistrat as ms  # noqa: E402
from tests.harness.torch_groups import default_group, group_in  # noqa: E402
from tests.harness.torch_operations import (  # noqa: E402
    CALLS,
    ROOTED,
    all_gather_single,
    call,
    function_of,
    reduce_scatter_single,
)

pytestmark = pytest.mark.filterwarnings("ignore")
REDUCING = ("all_reduce", "all_reduce async", "reduce", "reduce_scatter", "reduce_scatter_tensor")
WITH_TENSORS = [name for name in CALLS if name != "barrier"]


@pytest.fixture
def group():
    with default_group() as group:
        yield group


@pytest.fixture(params=["shared", "private", "nodes"])
def any_group(request, monkeypatch):
    with group_in(request.param, monkeypatch) as group:
        yield group


def check_mismatch(name, count=4, group=None, **wrong):
    """Make a call that differs on the last rank, then a right one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with pytest.raises(ms.errors.CollectiveMismatchError) as caught:
        call(name, **{"size": count, "group": group, **(wrong if rank == ranks - 1 else {})})
    text = str(caught.value)
    assert isinstance(caught.value, RuntimeError), "as torch's own"
    assert re.search(rf"ranks? 0.*{re.escape(function_of(name))}.*; rank {ranks - 1}: ", text) or "expected" in text, (
        text
    )
    assert "called at torch_operations.py:" in text
    call(name, count, group=group)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", [name for name in WITH_TENSORS if name != "all_to_all"])
def test_other_shapes_and_dtypes(group, name):
    check_mismatch(name, size=5)
    check_mismatch(name, dtype=torch.float64)
    check_mismatch(name, dtype=torch.int32)
    if "sparse" not in name:
        check_mismatch(name, dtype=torch.bfloat16)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("count", [20_000, 600_000])
def test_large_tensors_of_the_same_bytes(any_group, count):
    """Tensors that do not travel in the message that compares the call: other dtypes, reductions and roots."""

    def check(name, **wrong):  # between nodes the first call of a group is compared before it begins
        check_mismatch(name, count, dist.new_group(), **wrong)

    for name in WITH_TENSORS:
        check(name, dtype=torch.int32)
    for name in REDUCING:
        check(name, op=dist.ReduceOp.MAX)
        check(name, op=dist.ReduceOp.AVG)
    for name in ROOTED:
        check(name, root=1)


@pytest.mark.ranks(2, 3)
def test_a_mismatch_in_the_backward_pass_of_ddp(group):
    """C++ waits for the sums of gradients there, and gets the error as a text."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 3))
    for _ in range(2):
        model(torch.ones(2, 5)).sum().backward()
    loss = model(torch.ones(2, 5)).sum()
    with pytest.raises(RuntimeError) as caught:
        if dist.get_rank() == 1:
            dist.barrier()
        else:
            loss.backward()
    assert re.search(r"different collectives: ranks? 0.*dist\.all_reduce.*rank 1: dist\.barrier", str(caught.value))
    assert "called at test_torch_backend_errors.py" in str(caught.value)


@pytest.mark.ranks(2)
def test_the_future_of_a_failed_operation(group):
    work = dist.all_reduce(torch.ones(3 + dist.get_rank()), async_op=True)
    future = work.get_future()
    with pytest.raises(RuntimeError, match=r"CollectiveMismatchError: .*\(3,\).*\(4,\)"):
        future.wait()
    with pytest.raises(ms.errors.CollectiveMismatchError):
        work.wait()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", [dist.ReduceOp.BAND, dist.ReduceOp.BXOR])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
def test_other_roots_of_reductions_of_bits(group, dtype, op):
    with pytest.raises(ms.errors.CollectiveMismatchError, match=rf"\(4,\) {op.name} root 0.*\(4,\) {op.name} root 1"):
        dist.reduce(torch.ones(4, dtype=dtype), dist.get_rank(), op)


@pytest.mark.ranks(2)
def test_tensors_of_other_lengths_with_the_same_sum(group):
    lengths = (3, 2) if dist.get_rank() else (2, 3)
    with pytest.raises(ms.errors.CollectiveMismatchError, match=r"of \[2, 3\] elements.*of \[3, 2\] elements"):
        dist.all_reduce_coalesced([torch.ones(length) for length in lengths])
    with pytest.raises(ms.errors.CollectiveMismatchError, match=r"SUM sizes \[2, 3\].*SUM sizes \[3, 2\]"):
        dist.reduce_scatter(torch.ones(2), [torch.ones(length) for length in lengths])


@pytest.mark.ranks(2, 3)
def test_other_operations_that_all_ranks_have_called_before(any_group):
    """Between nodes, too: some operations send the same messages, and would take each other's."""
    last = dist.get_world_size() - 1
    for name in WITH_TENSORS:
        call(name)
    for one, other in (
        ("reduce_scatter_tensor", "all_to_all_single"), ("all_reduce", "reduce"), ("all_gather", "all_gather_into_tensor"),
        ("all_reduce", "broadcast"), ("gather", "scatter"),
    ):  # fmt: skip
        dist.barrier()
        with pytest.raises(
            ms.errors.CollectiveMismatchError, match=rf"{function_of(one)} .*; rank {last}: {function_of(other)} "
        ):
            call(other if dist.get_rank() == last else one)


#: Words of the package, which a user of torch.distributed does not know.
WORDS = r"exchange|in place|replica|strategy|axis|value:|'value'|MEAN|PROD\b|mpistrat|#"


def own_words():
    """Return a pattern of WORDS and of the names of the package's classes, but for those of errors."""
    modules = [vars(module) for name, module in list(sys.modules.items()) if name.startswith("mpistrat.")]
    classes = {each for names in modules for each in names.values() if isinstance(each, type)}
    names = {each.__name__ for each in classes if each.__module__.startswith("mpistrat.")}
    names -= {each.__name__ for each in classes if issubclass(each, Exception)} | {"ReduceOp"}
    return re.compile(rf"{WORDS}|\b({'|'.join(sorted(names))})\b")


@pytest.mark.ranks(2)
def test_errors_are_in_the_words_of_torch(group):
    """Every mismatch of every operation, arguments that no tensor allows, and a rank that is late."""
    rank, op, texts = dist.get_rank(), dist.ReduceOp, []

    def fails(act):
        with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
            act()
        texts.append(str(caught.value))

    wrong = [{"dtype": dtype} for dtype in (torch.int32, torch.bool, torch.bfloat16, torch.complex64)] + [{"size": 6}]
    of_reductions = [{"op": other} for other in (op.AVG, op.MAX, op.PRODUCT, dist._make_nccl_premul_sum(0.5))]
    for name in CALLS:
        more = (of_reductions if name in REDUCING else []) + ([{"root": 1}] if name in ROOTED else [])
        changes = wrong[: 2 if "sparse" in name else 4 if name == "all_to_all" else 5] + more
        for change in changes if name != "barrier" else ():
            fails(lambda name=name, change=change: call(name, **(change if rank else {})))
        fails(lambda name=name: call("broadcast" if rank and name != "broadcast" else "barrier" if rank else name))
    count, truth = torch.ones(4, dtype=torch.int32), torch.ones(4, dtype=torch.bool)
    for tensor, one, other in (
        (count, op.BAND, op.BXOR), (truth, op.SUM, op.PRODUCT), (truth, op.BXOR, op.BOR), (truth, op.MAX, op.BXOR),
    ):  # fmt: skip
        fails(lambda tensor=tensor, both=(one, other): dist.all_reduce(tensor, both[rank]))
    for tensor, how in (
        (torch.ones(4, dtype=torch.complex64), op.MAX), (torch.ones(4), op.BAND), (torch.ones(4).to(torch.float8_e5m2), op.SUM),
    ):  # fmt: skip
        fails(lambda args=(tensor, 0, how): dist.reduce(*args))
        fails(lambda tensor=tensor, how=how: reduce_scatter_single(tensor[:2].clone(), tensor, how))
    pattern = own_words()
    for text in texts:
        found = pattern.search(text.replace("at torch_operations.py", ""))
        assert found is None, (found, text)
    dist.barrier()


@pytest.mark.ranks(2)
def test_other_shapes_and_dtypes_of_parts(group):
    """The sizes of an all-to-all differ by rank: a rank compares what it expects with what comes."""
    check_mismatch("all_to_all", dtype=torch.float64)
    with pytest.raises(
        ms.errors.CollectiveMismatchError, match=r"dist\.all_to_all: output: expected \d elements from rank"
    ):
        call("all_to_all", size=4 + dist.get_rank())
    call("all_to_all")
    rank = dist.get_rank()
    going = [1, 2] if rank == 0 else [3, 1]
    coming = [1, 3] if rank == 0 else [1, 1]
    output = torch.zeros(sum(coming))
    if rank == 1:
        with pytest.raises(
            RuntimeError, match="rank 1: dist.all_to_all_single: output: expected 1 elements from rank 0, got 2"
        ):
            dist.all_to_all_single(output, torch.ones(sum(going)), coming, going)
    else:
        dist.all_to_all_single(output, torch.ones(sum(going)), coming, going)
        assert (output == 1).all()
    dist.barrier()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ROOTED)
def test_other_roots(group, name):
    check_mismatch(name, root=1)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", WITH_TENSORS)
def test_other_operations(group, name):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with pytest.raises(
        ms.errors.CollectiveMismatchError, match=rf"{re.escape(function_of(name))}.*; rank {ranks - 1}: dist.barrier"
    ):
        call("barrier" if rank == ranks - 1 else name)
    with pytest.raises(ms.errors.CollectiveMismatchError, match="SUM|sum") as caught:
        dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if rank == ranks - 1 else dist.ReduceOp.SUM)
    assert "ranks entered different collectives" in str(caught.value)
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CALLS)
def test_late_ranks(group, name):
    own, done = dist.new_group(timeout=timedelta(seconds=0.4)), dist.new_group()
    call(name, group=own)
    if dist.get_rank() == 0:
        start = monotonic()
        text = rf"{re.escape(function_of(name))}.*rank 0 waited 0\.4 s for rank 1.*a timeout of .*called at torch_operations\.py"
        with pytest.raises(ms.errors.CollectiveTimeoutError, match=text) as caught:
            call(name, group=own)
        assert monotonic() - start < 10
        assert isinstance(caught.value, RuntimeError)
        assert "rank 1 in dist.barrier" in str(caught.value) or "rank 1 not in" in str(caught.value)
    dist.barrier(done)
    if dist.get_rank() == 1:
        with pytest.raises(ms.errors.CollectiveTimeoutError, match="gave up"):
            call(name, group=own)


@pytest.mark.ranks(2)
def test_late_messages(group):
    own = dist.new_group(timeout=timedelta(seconds=0.3))
    if dist.get_rank() == 0:
        for source, whom in ((1, "rank 1"), (None, "any rank")):
            text = rf"dist\.recv of float32 \(3,\) from {whom}: rank 0 waited 0\.3 s.*called at test_torch_backend_errors\.py"
            with pytest.raises(ms.errors.CollectiveTimeoutError, match=text):
                dist.recv(torch.empty(3), source, group=own)
    else:
        sleep(4)
    dist.barrier()
    if dist.get_rank() == 1:
        dist.send(torch.full((3,), 7.0), 0, group=own)
    else:
        room = torch.empty(3)
        dist.recv(room, 1, group=own)
        assert (room == 7).all()


@pytest.mark.ranks(2)
def test_tensors_elsewhere_and_wrong_arguments(group):
    rank = dist.get_rank()
    with pytest.raises(
        RuntimeError,
        match=rf"rank {rank}: dist\.all_reduce: tensor: expected tensors on the CPU.*got one on meta.*cpu",
    ):
        dist.all_reduce(torch.ones(3, device="meta"))
    with pytest.raises(RuntimeError, match="expected tensors on the CPU"):
        dist.send(torch.ones(3, device="meta"), 1 - rank)
    with pytest.raises(ValueError, match=r"tensor_list: expected a list of 2 tensors, one for each rank, got 1"):
        dist.all_gather([torch.ones(3)], torch.ones(3))
    with pytest.raises(ValueError, match="output_tensor: expected 2 x 3 elements of float32, got 5 of float32"):
        all_gather_single(torch.ones(5), torch.ones(3))
    with pytest.raises(ValueError, match="expected a first dimension that 2 ranks divide, got 3"):
        dist.all_to_all_single(torch.ones(3), torch.ones(3))
    with pytest.raises(RuntimeError, match="SUM for a sparse tensor, got MAX"):
        dist.all_reduce(torch.sparse_coo_tensor([[0]], [1.0], (2,)), dist.ReduceOp.MAX)
    dist.barrier()


EXIT = """
import sys, torch, torch.distributed as dist
from tests.harness.torch_groups import start
from tests.harness.torch_operations import CALLS, call, function_of
import mpistrat as ms

start(30)
groups = {name: dist.new_group() for name in CALLS}
recv = dist.new_group()
dist.barrier()
if dist.get_rank() == 1:
    sys.exit(3)
for name, group in groups.items():
    try:
        call(name, group=group)
    except ms.errors.PeerExitError as error:
        print(name, "OK" if f"rank 1 left the program with status 3 while rank 0 was in {function_of(name)}" in str(error)
              and "called at torch_operations.py" in str(error) else error, flush=True)
try:
    dist.recv(torch.empty(3), 1, group=recv)
except ms.errors.PeerExitError as error:
    print("recv", "OK" if "rank 1 left the program while rank 0 was in dist.recv" in str(error) else error, flush=True)
sys.exit(3)
"""


def test_ranks_that_left(mpi_run):
    result = mpi_run(EXIT, 2, timeout=120)
    for name in (*CALLS, "recv"):
        assert f"{name} OK" in result.stdout, result.stdout + result.stderr
    assert result.seconds < 110


RAISE = """
import torch, torch.distributed as dist
from tests.harness.torch_groups import start
start(30)
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("the bug of rank 1")
dist.recv(torch.empty(3), 1)
"""


def test_a_rank_that_raises(mpi_run):
    result = mpi_run(RAISE, 2, timeout=120)
    assert result.returncode != 0
    assert "the bug of rank 1" in result.stderr
    assert "the job ends because of rank 1: ValueError: the bug of rank 1" in result.stderr


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("root", [-1, 2, 7])
@pytest.mark.parametrize("name", ["broadcast", "reduce", "gather", "scatter"])
def test_a_root_that_is_no_rank(group, name, root):
    value, size = torch.ones(2), dist.get_world_size()
    call_of = {
        "broadcast": lambda: dist.broadcast(value, root),
        "reduce": lambda: dist.reduce(value, root),
        "gather": lambda: dist.gather(value, None, root),
        "scatter": lambda: dist.scatter(value, None, root),
    }
    with pytest.raises(
        (ValueError, RuntimeError), match=rf"dist\.{name}: root: expected a rank of the group.*got {root}"
    ):
        call_of[name]()
    dist.all_reduce(value)
    assert value.tolist() == [size, size]

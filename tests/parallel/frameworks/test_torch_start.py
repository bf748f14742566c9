"""torch.distributed starts under MPI without variables: the numbers, the port, the ranks that take part, wrong use."""

import contextlib
import inspect
import os
import re
import subprocess
import sys
import types
from datetime import timedelta
from time import monotonic

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import torch.distributed as dist  # noqa: E402

import mpistrat as ms  # noqa: E402

NAMES = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"


@pytest.fixture(autouse=True)
def nothing_set():
    before = {name: os.environ.pop(name, None) for name in (*NAMES, "MPISTRAT_COLORS")}
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = 0  # a call that raises leaves it, on ranks that made it
    ms.torch.use()
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture
def stand_in(monkeypatch):
    """A group of gloo in the place of the group over MPI; the calls that made one."""
    from mpistrat.torch import backend
    from mpistrat.torch.backend.group import MpiProcessGroup

    calls = []

    def over(comm, store, timeout, name):
        calls.append((comm.rank, comm.size, timeout, name))
        return dist.ProcessGroupGloo(store, comm.rank, comm.size, timeout)

    def create(opts, options):
        calls.append((opts.group_rank, opts.group_size, opts.timeout, opts.group_id))
        return dist.ProcessGroupGloo(opts.store, opts.group_rank, opts.group_size, opts.timeout)

    module = types.ModuleType("mpistrat.torch.backend.group")
    module.over, module.create, module.MpiProcessGroup = over, create, MpiProcessGroup
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(backend, "group", module, raising=False)
    return calls


def total(group=None):
    value = torch.tensor([float(dist.get_rank(group) + 1)])
    dist.all_reduce(value, group=group)
    return value.item()


@pytest.mark.ranks(1, 2, 4)
def test_gloo_needs_no_variables():
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    dist.init_process_group("gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
    assert total() == sum(range(comm.size + 1))
    values = {name: os.environ[name] for name in NAMES}
    assert values.pop("MASTER_PORT").isdigit()
    rank, size = str(comm.rank), str(comm.size)
    assert values == {
        "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_init_destroy_and_init_again():
    for _ in range(3):
        dist.init_process_group("gloo")
        assert total() == 3
        dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_the_store_outlives_the_group_of_rank_0():
    """A rank that is late still finds it."""
    from mpi4py import MPI

    dist.init_process_group("gloo")
    assert total() == 3
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        del store
        dist.destroy_process_group()
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 1:
        store.set("late", "here")
        assert store.get("late") == b"here"
        dist.destroy_process_group()
    MPI.COMM_WORLD.Barrier()


@pytest.mark.ranks(2)
def test_the_port_is_one_that_the_system_chose():
    """Nothing is at torchrun's port, and a port that another program has is none for the store."""
    import socket

    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    dist.init_process_group("gloo")
    port = int(os.environ["MASTER_PORT"])
    assert port not in (29500, taken.getsockname()[1])
    store = dist.TCPStore("127.0.0.1", port, 2, False, timedelta(seconds=10))
    store.set(f"from {dist.get_rank()}", "here")
    store.wait(["from 0", "from 1"], timedelta(seconds=10))
    taken.close()


@pytest.mark.ranks(2)
def test_all_four_variables_are_the_users():
    """Ranks in reverse order, as MPI does not number them."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    server = dist.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False) if comm.rank == 1 else None
    port = comm.bcast(server and server.port, 1)
    del server
    comm.Barrier()
    numbers = {"RANK": str(1 - comm.rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(numbers)
    dist.init_process_group("gloo")
    assert dist.get_rank() == 1 - comm.rank
    assert total() == 3
    assert {name: os.environ.get(name) for name in NAMES} == {"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None, **numbers}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_numbers_that_are_not_mpis_are_an_error_on_every_rank(name):
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        os.environ[name] = "7"
    with pytest.raises(ms.errors.ClusterError, match=f"rank 1: init_process_group: {name}: expected MPI's, .*got 7"):
        dist.init_process_group("gloo")
    os.environ.pop(name, None)
    dist.init_process_group("gloo")
    assert total() == 3


@pytest.mark.ranks(2)
def test_numbers_of_mpi_may_be_there():
    from mpi4py import MPI

    os.environ["RANK"] = str(MPI.COMM_WORLD.rank)
    dist.init_process_group("gloo", rank=MPI.COMM_WORLD.rank, world_size=2)
    assert total() == 3


@pytest.mark.ranks(2, 3)
def test_the_name_mpi(stand_in):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    dist.init_process_group("mpi", timeout=timedelta(seconds=77))
    assert dist.get_backend() == "mpi" and dist.is_mpi_available()
    assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
    assert total() == sum(range(comm.size + 1))
    assert stand_in[0][:3] == (comm.rank, comm.size, timedelta(seconds=77))
    # some ranks: only the members make the group
    last = dist.new_group([comm.size - 1, 0])
    members = (0, comm.size - 1)
    if comm.rank in members:
        assert total(last) == 3
        assert stand_in[1][:2] == (members.index(comm.rank), 2)
        assert stand_in[1][3] != stand_in[0][3]
    else:
        assert len(stand_in) == 1
    # a group of another backend finds the others by the store
    assert total(dist.new_group(backend="gloo")) == sum(range(comm.size + 1))


@pytest.mark.ranks(2)
def test_the_name_mpistrat(stand_in):
    dist.init_process_group("mpistrat", timeout=timedelta(seconds=77))
    assert total() == 3
    assert stand_in[0][:3] == (dist.get_rank(), 2, timedelta(seconds=77))


@pytest.mark.ranks(2)
def test_mpi_has_fewer_ranks_than_torch(stand_in):
    """Ranks of torch that MPI does not connect, each of them a world of its own, are refused."""
    from mpi4py import MPI

    ms.torch.use(MPI.COMM_SELF)
    os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    store = dist.HashStore()
    with pytest.raises(ms.errors.ClusterError, match="expected as many ranks .* got 2 in WORLD_SIZE, and 1 in MPI"):
        dist.init_process_group("mpistrat", store=store, rank=0, world_size=2)


@pytest.mark.ranks(2, 4)
def test_only_some_ranks_by_use():
    """The others make no call."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    half = comm.Split(comm.rank % 2)
    if comm.rank % 2:
        ms.torch.use(half)
        dist.init_process_group("gloo")
        assert (dist.get_rank(), dist.get_world_size()) == (comm.rank // 2, comm.size // 2)
        assert os.environ["LOCAL_RANK"] == str(comm.rank // 2)
        assert total() == sum(range(half.size + 1))
        with pytest.raises(ms.errors.ContextError, match="use: expected no default process group, got a group"):
            ms.torch.use()
        dist.destroy_process_group()
        ms.torch.use()
    comm.Barrier()
    dist.init_process_group("gloo")
    assert (dist.get_world_size(), total()) == (comm.size, sum(range(comm.size + 1)))
    half.Free()


@pytest.mark.ranks(1)
def test_use_takes_communicators():
    from mpi4py import MPI

    with pytest.raises(
        ms.errors.LayoutError, match="use: comm: expected an intracommunicator of mpi4py, got COMM_NULL"
    ):
        ms.torch.use(MPI.COMM_NULL)
    with pytest.raises(ms.errors.LayoutError, match=r"use: comm: expected an intracommunicator of mpi4py, got a str"):
        ms.torch.use("world")


@pytest.mark.ranks(4)
def test_only_some_ranks_by_color(monkeypatch):
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    monkeypatch.setenv("MPISTRAT_COLORS", "left=0,3:right=2")
    if rank == 1:
        with pytest.raises(ms.errors.LayoutError, match="MPISTRAT_COLORS: .* which has none for rank 1"):
            dist.init_process_group("gloo")
        return
    dist.init_process_group("gloo")
    expected = {0: (0, 2, 3), 3: (1, 2, 3), 2: (0, 1, 1)}
    assert (dist.get_rank(), dist.get_world_size(), total()) == expected[rank]
    dist.destroy_process_group()
    with ms.MultiWorkerMirroredStrategy() as strategy:  # the same ranks
        assert (strategy.rank, strategy.size) == expected[rank][:2]


NAMES_OF_OURS = ["mpi", "mpistrat", "cpu:mpistrat,cuda:nccl"]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("backend", NAMES_OF_OURS)
def test_the_group_over_mpi(backend):
    """Gradients of DDP are those of gloo, side by side; groups of some ranks, and of gloo, follow."""
    from mpi4py import MPI
    from torch.nn.parallel import DistributedDataParallel

    comm = MPI.COMM_WORLD
    rows = torch.arange(12.0).reshape(4, 3) * (comm.rank + 1)
    found = []
    for name in ("gloo", backend):
        dist.init_process_group(name)
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(3, 2))
        model(rows).square().sum().backward()
        found.append(model.module.weight.grad)
        if name == backend:
            assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
            assert total() == sum(range(comm.size + 1))
            pair = dist.new_group([0, comm.size - 1])
            if comm.rank in (0, comm.size - 1):
                assert total(pair) == 3
            assert total(dist.new_group(backend="gloo")) == sum(range(comm.size + 1))
        dist.destroy_process_group()
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=0)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("backend", ["gloo", *NAMES_OF_OURS])
def test_a_monitored_barrier_names_the_rank_that_does_not_come(backend):
    """PyTorch's function has it for gloo alone; the texts are the same."""
    dist.init_process_group(backend)
    last, limit = dist.get_world_size() - 1, timedelta(seconds=3)
    dist.monitored_barrier()
    dist.monitored_barrier(dist.new_group([0, last]), timedelta(seconds=20), True)
    own = dist.new_group()
    dist.barrier()
    if dist.get_rank() == 0:
        with pytest.raises(
            RuntimeError, match=rf"\[Rank 0\]: Ranks? {last} failed to pass monitoredBarrier in 3000 ms"
        ):
            dist.monitored_barrier(own, limit, wait_all_ranks=True)
    elif dist.get_rank() < last:
        with pytest.raises(RuntimeError, match="reached monitoredBarrier, but received errors"):
            dist.monitored_barrier(own, limit, wait_all_ranks=True)
    assert total() == sum(range(last + 2))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("backend", NAMES_OF_OURS)
def test_a_rank_that_does_not_make_a_group_is_named(backend):
    """Within the timeout, on all that wait, and on the rank itself, if it comes later. The next group is none the worse."""
    dist.init_process_group(backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    text = rf"a process group of ranks .*: rank \d waited 2 s for rank {ranks - 1}\. .*called at test_torch_start"
    for late in (False, True):
        if late == (rank == ranks - 1):
            start = monotonic()
            with pytest.raises(ms.errors.CollectiveTimeoutError, match=text) as caught:
                dist.new_group(timeout=timedelta(seconds=2))
            assert isinstance(caught.value, RuntimeError)
            assert monotonic() - start < (2 if late else 20)
        dist.barrier()
    assert total(dist.new_group()) == sum(range(ranks + 1))


NEVER = """
import pathlib, sys, time
from datetime import timedelta
import torch.distributed as dist
from mpi4py import MPI
backend, raised = sys.argv[1], pathlib.Path(sys.argv[2])
if MPI.COMM_WORLD.rank == 1:
    end = time.monotonic() + 60
    while not raised.exists() and time.monotonic() < end:
        time.sleep(0.1)
    sys.exit()
try:
    dist.init_process_group(backend, timeout=timedelta(seconds=2))
except RuntimeError as error:
    sys.stdout.write(str(error))
    raised.touch()
"""


@pytest.mark.parametrize("backend", ["gloo", *NAMES_OF_OURS])
def test_a_rank_that_does_not_make_the_default_group_is_named(mpi, tmp_path, backend):
    (tmp_path / "never.py").write_text(NEVER)
    words = [*mpi.command(2), mpi.python, str(tmp_path / "never.py"), backend, str(tmp_path / "raised")]
    done = without_variables(words)
    assert done.stdout.startswith("init_process_group: rank 0 of 2 waited 2 s for rank 1"), done


@pytest.mark.ranks(4)
@pytest.mark.parametrize("backend", NAMES_OF_OURS)
def test_subgroups_and_the_names_of_backends(backend):
    dist.init_process_group(backend)
    rank = dist.get_rank()
    assert dist.get_backend_config() == {"mpi": "cpu:mpi", "mpistrat": "cpu:mpistrat"}.get(backend, backend)
    gloo = dist.new_group(backend="gloo")
    try:
        part = dist.split_group(gloo, [[0, 1], [2, 3]])  # which it can since 2.14, where ranks know equally many groups
    except RuntimeError as error:
        assert re.search("No device associated|does not support", str(error))
    else:
        assert dist.get_process_group_ranks(part) == ([0, 1] if rank < 2 else [2, 3])
    mine, every = dist.new_subgroups(group_size=2)
    assert len(every) == 2 and total(mine) == 3
    assert dist.get_backend_config(mine) == dist.get_backend_config()
    mine, every = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    assert (len(every), dist.get_rank(mine), total(mine)) == (2, rank // 2, 3)
    if rank in (1, 3):  # only the members make this call
        kind = "mpistrat" if backend == "mpi" else None
        assert total(dist.new_group([1, 3], backend=kind, use_local_synchronization=True)) == 3
    check_splits(rank)
    if hasattr(dist, "shrink_group"):
        with pytest.raises(
            NotImplementedError, match=r"dist\.shrink_group: .*expected a group of NCCL.*dist\.split_group"
        ):
            dist.shrink_group([3])


def check_splits(rank):
    """Split the default group of four ranks, a part of it, and with wrong lists."""
    part = dist.split_group(None, [[0, 3], [1, 2]])
    assert (dist.get_rank(part), total(part)) == (rank // 2, 3)
    assert dist.get_process_group_ranks(part) == ([0, 3] if rank in (0, 3) else [1, 2])
    assert dist.get_backend(part) == dist.get_backend()
    back = dist.split_group(None, [[3, 2, 1]])  # in this order
    assert (
        back == dist.GroupMember.NON_GROUP_MEMBER if rank == 0 else (dist.get_rank(back), total(back)) == (3 - rank, 6)
    )
    odd = dist.new_group([1, 3])
    if rank in (1, 3):  # by their numbers in the group; rank 1 is in no list
        found = dist.split_group(odd, [[1]], group_desc="one")
        assert (
            found == dist.GroupMember.NON_GROUP_MEMBER if rank == 1 else (dist.get_rank(found), total(found)) == (0, 1)
        )
    for wrong in ([[0, 1], [1, 2]], [[4]], [[]], [], None):
        with pytest.raises(
            ValueError, match=rf"rank {rank}: dist\.split_group: split_ranks: .*different ranks of the group"
        ):
            dist.split_group(None, wrong)
    if "backend" in inspect.signature(dist.split_group).parameters:
        with pytest.raises(
            ValueError,
            match=r"dist\.split_group: backend: expected '.*mpi.*', the one of the group, or None, got 'gloo'",
        ):
            dist.split_group(None, [[0, 1]], backend="gloo")
    with (
        pytest.raises(ValueError, match="pg_options") if "mpistrat" in dist.get_backend() else contextlib.nullcontext()
    ):
        dist.split_group(None, [[0, 1, 2, 3]], pg_options="fast")
    lists = [[0, 1], [2, 3]] if rank else [[0, 2], [1, 3]]
    with pytest.raises(
        ms.errors.CollectiveMismatchError, match=r"ranks? 0: dist\.split_group.*\[\[0, 2\], \[1, 3\]\].*\[\[0, 1\]"
    ):
        dist.split_group(None, lists)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("backend", NAMES_OF_OURS)
def test_the_group_over_mpi_of_some_ranks(backend, monkeypatch):
    """Ranks 1 and 3 of COMM_WORLD, by a communicator and by a color; torch numbers them 0 and 1."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    part = comm.Split(comm.rank % 2)
    for by in ("comm", "color"):
        if comm.rank % 2 == 0:
            continue
        if by == "comm":
            ms.torch.use(part)
        else:
            ms.torch.use()
            monkeypatch.setenv("MPISTRAT_COLORS", "train=1,3")
        dist.init_process_group(backend)
        assert (dist.get_rank(), dist.get_world_size(), total()) == (comm.rank // 2, 2, 3)
        own = dist.new_group([1])
        if dist.get_rank() == 1:
            assert dist.get_world_size(own) == 1
        dist.destroy_process_group()
    comm.Barrier()
    part.Free()


PLAIN = """
import os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
assert "mpistrat" not in sys.modules and "mpi4py" not in sys.modules
dist.init_process_group(sys.argv[1])
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
sys.stdout.write(f"{dist.get_rank()} {dist.get_world_size()} {model.module.weight.grad[0].tolist()}\\n")
dist.destroy_process_group()
"""


def without_variables(words, **more):
    """Run a command with an empty environment, but for what finds programs, and this package where it is not installed."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **more}
    for name in ("PYTHONPATH", "LD_LIBRARY_PATH"):
        if name in os.environ:
            environment[name] = os.environ[name]
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100)


LOADED = """
import sys
import torch, torch.distributed as dist
dist.init_process_group("mpi")
dist.all_reduce(torch.ones(1))
unused = "torch._dynamo", "mpistrat.torch.module", "mpistrat.data", "mpistrat.optimizers"
late = [name for name in unused if name in sys.modules]
dist.destroy_process_group()
import importlib, pkgutil, types
import mpistrat.torch as front
for part in pkgutil.iter_modules(front.__path__):
    importlib.import_module("mpistrat.torch." + part.name)
hidden = [name for name in front.__all__ if isinstance(getattr(front, name), types.ModuleType)]
print(late, hidden, set(front.__all__) - set(dir(front)))
"""


def test_a_process_group_loads_no_compiler_and_no_strategy(mpi_run):
    """torch._dynamo takes a second. What is imported when first used must not be hidden by a module of its name."""
    ended = mpi_run(LOADED, 1, timeout=100)
    assert ended.out[0].split("\n") == ["[] [] set()", ""], str(ended)


FREED_LATE = """
import atexit, threading, time
import torch.distributed as dist
import mpistrat.torch.backend.exit
mpistrat.torch.backend.exit._FREED = 3.0  # enough on a loaded machine
end = threading.Event()

def free():
    end.wait()
    time.sleep(0.2)
    print("freed", flush=True)

dist.init_process_group("gloo")
dist.destroy_process_group()
threading.Thread(target=free, daemon=True).start()  # like gloo's worker: Python does not wait for it
atexit.register(end.set)
"""


def test_a_worker_of_gloo_has_the_lock_once_more_before_the_interpreter_ends(mpi_run):
    """It frees the last operation late. Python would end it within a destructor, which aborts the process."""
    ended = mpi_run(FREED_LATE, 2, timeout=100)
    assert ended.returncode == 0 and all("freed" in out for out in ended.out), str(ended)


@pytest.mark.parametrize("backend", ["gloo", *NAMES_OF_OURS])
def test_a_program_without_a_word_of_this_package(mpi, tmp_path, backend):
    """On an empty environment: the gradient is the mean of 2 x 0 and 2 x 1."""
    (tmp_path / "plain.py").write_text(PLAIN)
    words = [*mpi.command(2), mpi.python, str(tmp_path / "plain.py"), backend]
    done = without_variables(words)
    lines = sorted(line for line in done.stdout.splitlines() if line and not line.startswith("[Gloo]"))
    assert (lines, done.returncode) == ([f"{rank} 2 [1.0, 1.0, 1.0, 1.0]" for rank in range(2)], 0), done


def test_the_variable_switches_it_off(mpi, tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    words = [*mpi.command(2), mpi.python, str(tmp_path / "plain.py"), "gloo"]
    done = without_variables(words, MPISTRAT_TORCH="0")
    assert done.returncode != 0 and "RANK expected, but not set" in done.stderr


@pytest.mark.parametrize(
    "backend", ["mpi", "mpistrat"], ids="torchrun-{}".format
)  # pytest-mpi takes "mpi" for a marker
def test_torchrun_itself_is_refused_with_what_to_do(backend, tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        str(tmp_path / "plain.py"),
        backend,
    ]
    done = without_variables(words)
    assert done.returncode != 0
    assert (
        f"ClusterError: init_process_group: '{backend}': expected ranks that a launcher of MPI started" in done.stderr
    )
    assert "mpistrat run --torchrun" in done.stderr

"""Steps by PyTorch's own parts, as on GPUs: tests of distributed modules a second time, with gloo in NCCL's place."""

import importlib
import subprocess
import threading
import types

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402
from mpistrat.base.programs import program  # noqa: E402
from mpistrat.torch import overlap, torch_step  # noqa: E402
from tests.harness.torch_by_torch import step_by_torch  # noqa: E402
from tests.harness.torch_training import difference, distributed, loss_of, make, mlp, plain, put, rows  # noqa: E402
from tests.launch.launcher import job_environment  # noqa: E402
from tests.parallel.frameworks import test_torch_overlap  # noqa: E402

_SUITE = {
    "train": "torch_module",
    "torch": "every",
    "torch_counted_loss": "every",
    "torch_files": "every",
    "torch_grad_scaler": "every",
    "torch_no_rows": "every",
    "torch_rules": "every",
    "torch_strategies": "multi_worker halves save_and",
    "torch_thaw": "every",
    "torch_two_optimizers": "every",
    "torch_unused": "every",
    "torch_weights": "a_loop unequal two_datasets two_modules recurrent zeros",
    "torch_wrong_use": "every",
}

_BY_PARTS_OF_THE_PACKAGE = "Adafactor", "Muon", "-own]", "bfloat16", "of_ours", "replicas_of_one_rank", "local_replicas"


def _again(module, words):
    """Define the tests of another file whose names have one of some words here, under names that begin with the file's."""
    source = importlib.import_module(f"tests.parallel.frameworks.test_{module}")
    marks = getattr(source, "pytestmark", [])
    for name, test in vars(source).items():
        if name.startswith("test_") and (words == "every" or any(word in name for word in words.split())):
            again = types.FunctionType(test.__code__, test.__globals__, name, test.__defaults__, test.__closure__)
            again.__dict__.update(vars(test))  # a copy: marks of the other file's test would come twice
            for mark in marks if isinstance(marks, list) else [marks]:
                again = mark(again)
            globals()[f"test_{module}_{name.removeprefix('test_')}"] = again


for _module, _words in _SUITE.items():
    _again(_module, _words)


@pytest.fixture(autouse=True)
def calls(monkeypatch, request):
    """The names of the calls that gloo has got."""
    return step_by_torch(monkeypatch, any(word in request.node.name for word in _BY_PARTS_OF_THE_PACKAGE))


@pytest.mark.ranks(1, 2, 3)
def test_gradients_are_summed_by_the_group_inside(calls):
    reference = mlp()
    plain(reference, make("AdamW", reference), epochs=2)
    with put(name="AdamW") as (strategy, module, optimizer):
        distributed(strategy, module, optimizer, epochs=2)
        assert difference(module.parameters(), reference.parameters()) < 1e-9
        assert calls.count("allreduce") == (
            1 + 10 if strategy.size > 1 else 0
        )  # the first one, and one bucket in each step


@pytest.mark.ranks(1, 2)
def test_a_fused_optimizer_is_fused(monkeypatch):
    reference, module = mlp(), mlp()
    plain(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), epochs=2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    fused, tensors = torch._fused_adamw_, []
    noted = lambda *given, **more: tensors.append(len(given[0])) or fused(*given, **more)  # noqa: E731
    monkeypatch.setattr(torch, "_fused_adamw_", noted)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer)
        distributed(strategy, module, optimizer, epochs=2)
        assert difference(module.parameters(), reference.parameters()) < 1e-9
    assert tensors == [4] * 10  # one call for all parameters in each step


@pytest.mark.ranks(2, 3)
def test_weights_that_differ_are_an_error_on_every_rank():
    """Each rank has a copy of them."""
    with put() as (strategy, module, optimizer):
        if strategy.rank == 1:
            module[2].bias.data[1] += 1e-12
        loss_of(module, *rows()).backward()
        with pytest.raises(
            ms.errors.CollectiveMismatchError, match=r"the same weights on all ranks, got rank.* 2\.bias"
        ):
            optimizer.step()


@pytest.mark.ranks(1, 2)
def test_a_step_is_in_order_with_what_the_program_computes(monkeypatch):
    """Loading gradients, and the step: as that of every optimizer on GPUs."""
    names = step_by_torch(monkeypatch)
    with put() as (_, module, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(module, *rows()).backward()
            optimizer.step()
    assert names.count("in order") == 4


@pytest.mark.ranks(2, 3)
def test_after_a_refused_step_all_ranks_compare_their_copies_in_the_same_steps():
    """Or one would wait in the comparison, and the others in the sum."""
    with put() as (strategy, module, optimizer):
        for turn in range(4):
            optimizer.zero_grad()
            loss_of(module, *rows()).backward()
            if turn != 1:
                optimizer.step()
                continue
            if strategy.rank == 1:
                module[2].bias.grad = None
            with pytest.raises(ms.errors.CollectiveMismatchError):
                optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["foreach", "fused", "capturable", "differentiable"])
def test_ranks_with_other_implementations_are_an_error(name):
    """PyTorch's own step has other bits with each of them, so the ranks must agree."""
    module = mlp()
    with ms.MultiWorkerMirroredStrategy() as strategy:
        optimizer = torch.optim.AdamW(module.parameters(), **({name: True} if strategy.rank == 1 else {}))
        with strategy.scope():
            module, optimizer = ms.torch.distribute(module, optimizer)
        optimizer.zero_grad()
        sum(p.sum() for p in module.parameters()).backward()
        with pytest.raises(ms.errors.CollectiveMismatchError, match=rf"rank 0.*'{name}'.*rank 1.*'{name}': True"):
            optimizer.step()


@pytest.fixture
def started(monkeypatch):
    """The numbers of parameters whose sums started within a backward pass."""
    counts = []
    plain = torch_step.BegunInBackward.start
    noted = lambda self, links: counts.append(len(links)) or plain(self, links)  # noqa: E731
    monkeypatch.setattr(torch_step.BegunInBackward, "start", noted)
    monkeypatch.setattr(overlap, "_BUCKET_BYTES", 1 << 20)
    return counts


def check_overlap(backward, **more):
    ours, expected = (test_torch_overlap.weights(how, backward, **more) for how in (True, False))
    assert all(map(torch.equal, ours, expected))


@pytest.mark.ranks(2)  # of three, sums in other buckets have other last digits
@pytest.mark.parametrize("backward, times", [("once", 12), ("in_place", 12), ("counted", 12), ("a_layer_left_out", 4)])
def test_sums_start_within_the_backward_pass(started, backward, times):
    check_overlap(getattr(test_torch_overlap, backward), loss="sum" if backward == "counted" else "mean")
    assert started == [2] * times  # each of three layers is a bucket


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backward", ["twice", "changed_on_one_rank", "replaced", "forgotten", "scaled"])
def test_gradients_that_change_after_the_backward_pass_are_summed_in_the_step(started, backward):
    check_overlap(getattr(test_torch_overlap, backward))
    assert 0 < len(started) <= 3  # in the first step, never again


@pytest.mark.ranks(2)
def test_a_backward_pass_in_a_thread_of_its_own(started):
    """As those on GPUs are, for which PyTorch begins a thread."""

    def in_a_thread(module, optimizer, rank):
        thread = threading.Thread(target=test_torch_overlap.once, args=(module, optimizer, rank))
        thread.start()
        thread.join()

    check_overlap(in_a_thread)
    assert len(started) == 12


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["AdamW", "NAdam", "momentum"])
def test_a_file_goes_from_cpus_to_gpus_and_back(name, monkeypatch, mpi_tmp_path):
    reference = mlp()
    expected = make(name, reference, groups=True)
    plain(reference, expected, epochs=6)
    weights = []
    for turn in range(3):
        if turn == 1:
            monkeypatch.undo()  # steps on CPUs
        elif turn == 2:
            step_by_torch(monkeypatch)
        with put(name=name, groups=True) as (strategy, module, optimizer):
            if turn:
                strategy.restore(f"{mpi_tmp_path}/{turn - 1}.h5")
            distributed(strategy, module, optimizer, epochs=2, first=2 * turn)
            strategy.save(f"{mpi_tmp_path}/{turn}.h5")
            weights = [parameter.detach().clone() for parameter in module.parameters()]
            state = optimizer.state_dict()["state"]
    assert difference(weights, reference.parameters()) < 1e-9
    for mine, theirs in zip(state.values(), expected.state_dict()["state"].values(), strict=True):
        assert all(
            torch.allclose(mine[key], value.to(mine[key].dtype)) for key, value in theirs.items() if value is not None
        )


@pytest.mark.ranks(1)
def test_what_goes_by_the_parts_of_the_package(monkeypatch):
    steps = []
    plain_run = torch_step.TorchStep.run
    monkeypatch.setattr(torch_step.TorchStep, "run", lambda self, how: steps.append(1) or plain_run(self, how))

    def steps_with(make_optimizer, module=None, **options):
        steps.clear()
        module = mlp() if module is None else module
        with ms.MultiWorkerMirroredStrategy(**options) as strategy:
            optimizer = make_optimizer(module.parameters())
            with strategy.scope():
                ms.torch.distribute(module, optimizer)

            def step():
                module(torch.ones(2, 10, dtype=module[0].weight.dtype)).sum().backward()
                optimizer.step()

            strategy.run(step)
        return len(steps)

    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    assert steps_with(sgd) == 1
    assert steps_with(torch.optim.Adafactor) == 0
    assert steps_with(sgd, mlp().to(torch.bfloat16)) == 0
    assert steps_with(sgd, cross_device_ops=ms.ReductionToOneDevice()) == 0
    assert steps_with(sgd, devices=["cpu:0", "cpu:1"]) == 0


PROGRAM = """
import os, signal, sys
import pytest, torch
import mpistrat as ms
from tests.harness.torch_by_torch import step_by_torch

calls, (where, kill) = step_by_torch(pytest.MonkeyPatch()), sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(7, 3))
optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
strategy = ms.MultiWorkerMirroredStrategy()
with strategy.scope():
    ms.torch.distribute(model, optimizer, max_norm=1.0)
every = {"every_steps": 5, "snapshot_seconds": None} if where == "files" else {"snapshot_seconds": 0.001}
checkpoints = ms.train.Checkpoints(strategy, f"checkpoints-{kill}", **every)
notes = checkpoints.restore_latest() or {"step": 0}
generation = int(os.environ["MPISTRAT_GENERATION"])
if strategy.rank == 0:
    print("from", generation, notes["step"], flush=True)
for step in range(notes["step"] + 1, 31):
    torch.manual_seed(100 * step + strategy.rank)
    optimizer.zero_grad()
    model(torch.randn(4, 5)).square().mean().backward()
    if kill == "kill" and (generation, step) in ((0, 12), (1, 23)) and strategy.rank == generation:
        checkpoints.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    checkpoints.step(step)
checkpoints.wait()
assert "allreduce" in calls
strategy.save(f"end-{kill}.h5")
strategy.close()
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["files", "memory"])
def test_killed_ranks_leave_the_bits_of_an_undisturbed_run(mpi, tmp_path, where):
    import h5py

    (tmp_path / "train.py").write_text(PROGRAM)
    begun = {}
    for kill in ("none", "kill"):
        words = program("mpistrat", "run", "-n", "2", "--restarts", "5", python=mpi.python)
        environment = job_environment("none", tmp_path, None)
        words = [*words, "train.py", where, kill]
        done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=140)
        assert done.returncode == 0, done.stderr
        begun[kill] = [int(line.split()[2]) for line in done.stdout.splitlines() if line.startswith("from")]
    assert begun["none"] == [0] and len(begun["kill"]) == 3
    _, second, third = begun["kill"]
    assert (second, third) == (10, 20) if where == "files" else 0 < second <= 11 and second < third <= 22
    with h5py.File(tmp_path / "end-none.h5") as wanted, h5py.File(tmp_path / "end-kill.h5") as found:
        assert found.attrs["digest"] == wanted.attrs["digest"]  # of all arrays
        assert {"variables", "optimizers"} <= set(found)

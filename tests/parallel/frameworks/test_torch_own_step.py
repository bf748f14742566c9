"""Steps by PyTorch's own parts, as on GPUs: tests of distributed modules a second time, with gloo in NCCL's place."""

import importlib
import threading

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

from mpistrat.torch import optimizer as torch_optimizer  # noqa: E402
from mpistrat.torch import torch_step  # noqa: E402
from tests.harness.torch_by_torch import step_by_torch  # noqa: E402
from tests.harness.torch_training import difference, distributed, make, mlp, plain, put  # noqa: E402
from tests.parallel.frameworks import test_torch_overlap  # noqa: E402

_SUITE = {
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


def _again(module, words):
    """Define the tests of another file whose names have one of some words here, under names that begin with the file's."""
    source = importlib.import_module(f"tests.parallel.frameworks.test_{module}")
    marks = getattr(source, "pytestmark", [])
    for name, test in vars(source).items():
        if name.startswith("test_") and (words == "every" or any(word in name for word in words.split())):
            for mark in marks if isinstance(marks, list) else [marks]:
                test = mark(test)
            globals()[f"test_{module}_{name.removeprefix('test_')}"] = test


for _module, _words in _SUITE.items():
    _again(_module, _words)


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """The names of the calls that gloo has got."""
    return step_by_torch(monkeypatch)


@pytest.mark.ranks(1, 2, 3)
def test_gradients_are_summed_by_the_group_inside(calls):
    reference = mlp()
    plain(reference, make("AdamW", reference), epochs=2)
    with put(name="AdamW") as (strategy, module, optimizer):
        distributed(strategy, module, optimizer, epochs=2)
        assert difference(module.parameters(), reference.parameters()) < 1e-9
        assert calls.count("allreduce") == (10 if strategy.size > 1 else 0)  # one bucket in each step


@pytest.fixture
def started(monkeypatch):
    """The numbers of parameters whose sums started within a backward pass."""
    counts = []
    plain = torch_step.BegunInBackward.start
    noted = lambda self, variables: counts.append(len(variables)) or plain(self, variables)  # noqa: E731
    monkeypatch.setattr(torch_step.BegunInBackward, "start", noted)
    monkeypatch.setattr(torch_optimizer, "_BUCKET_BYTES", 1 << 20)
    return counts


def check_overlap(backward, **more):
    ours, expected = (test_torch_overlap.weights(how, backward, **more) for how in (True, False))
    assert all(map(torch.equal, ours, expected))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("backward, times", [("once", 12), ("in_place", 12), ("counted", 12), ("a_layer_left_out", 4)])
def test_sums_start_within_the_backward_pass(started, backward, times):
    check_overlap(getattr(test_torch_overlap, backward), loss="sum" if backward == "counted" else "mean")
    assert started == [2] * times  # each of three layers is a bucket


@pytest.mark.ranks(2, 3)
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

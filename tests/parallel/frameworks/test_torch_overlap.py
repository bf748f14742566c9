"""Sums that start within a backward pass of PyTorch: the bits of steps without, also where gradients change after it."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402
from mpistrat.arena import early  # noqa: E402
from mpistrat.comm.process_group import ProcessGroup  # noqa: E402
from mpistrat.step import early_start  # noqa: E402
from mpistrat.torch import overlap  # noqa: E402

pytestmark = pytest.mark.ranks(2, 4)
WIDTH = 512


@pytest.fixture
def started(monkeypatch):
    """The number of times that sums started, on nodes of one rank each; they start for any number of bytes."""
    count = []
    plain = early.EarlySums.begin
    monkeypatch.setattr(early.EarlySums, "begin", lambda self, *given: count.append(1) or plain(self, *given))
    monkeypatch.setattr(overlap, "_BUCKET_BYTES", 1 << 20)
    monkeypatch.setattr(early_start, "LEAST_BYTES", 1)
    monkeypatch.setattr(early_start.EarlyChoice, "note_step", lambda self, group, begun: None)
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")
    return count


def weights(overlapped, backward, steps=4, max_norm=None, run=True, loss="mean"):
    """Train three layers, by a function that does the backward pass; return the weights."""
    torch.manual_seed(1)
    module = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    optimizer = torch.optim.Adam(module.parameters(), 1e-3)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer, max_norm=max_norm, overlap=overlapped, loss=loss)

        def step(number):
            torch.manual_seed(1000 * number + strategy.rank)
            optimizer.zero_grad()
            backward(module, optimizer, strategy.rank)
            optimizer.step()

        for number in range(steps):
            strategy.run(step, args=(number,)) if run else step(number)
        return [parameter.detach().clone() for parameter in module.parameters()]


def once(module, optimizer, rank):
    module(torch.randn(4, WIDTH)).square().mean().backward()


def twice(module, optimizer, rank):
    once(module, optimizer, rank)
    once(module, optimizer, rank)


def in_place(module, optimizer, rank):
    optimizer.zero_grad(set_to_none=False)
    once(module, optimizer, rank)


def changed_on_one_rank(module, optimizer, rank):
    once(module, optimizer, rank)
    if rank == 1:
        ms.torch.local_gradient(module[2].weight).zero_()


def replaced(module, optimizer, rank):
    once(module, optimizer, rank)
    module[2].weight.grad = torch.ones(WIDTH, WIDTH)


def forgotten(module, optimizer, rank):
    once(module, optimizer, rank)
    optimizer.zero_grad()
    once(module, optimizer, rank)


def scaled(module, optimizer, rank):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(module(torch.randn(4, WIDTH)).square().mean()).backward()
    scaler.unscale_(optimizer)


def counted(module, optimizer, rank):
    ms.torch.counted_loss(module(torch.randn(4, WIDTH)).square().sum(), 3 + rank, optimizer).backward()


def a_layer_left_out(module, optimizer, rank):
    module[2](module[0](torch.randn(4, WIDTH))).square().mean().backward()


def same(backward, **more):
    for ours, expected in zip(weights(True, backward, **more), weights(False, backward, **more), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("run", [True, False])
@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_bits_are_those_without(started, run, max_norm):
    same(once, run=run, max_norm=max_norm)
    assert len(started) == 4 * 3  # each of three layers with the bias after it is a bucket


def test_gradients_that_are_zeroed_in_place(started):
    same(in_place)
    assert started


@pytest.mark.parametrize("backward", [twice, changed_on_one_rank, replaced, forgotten, scaled])
def test_gradients_that_change_after_the_backward_pass(started, backward):
    same(backward)
    assert 0 < len(started) <= 3  # in the first step, never again


def test_losses_that_are_counted(started):
    same(counted, loss="sum")
    assert len(started) == 4 * 3


def test_a_layer_that_is_left_out(started):
    same(a_layer_left_out)
    assert len(started) == 4


@pytest.mark.parametrize(("width", "begun"), [(8, False), (WIDTH, True)])
def test_a_small_module_makes_no_calls_for_sums_that_cannot_start_early(monkeypatch, width, begun):
    # Early sums are of at least 4 MiB: these are 4 · (8² + 8) and 4 · (512² + 512) numbers of 4 bytes.
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")
    calls, plain = [], ProcessGroup.collective

    def noted(group, op, *given, **named):
        calls.append(op)
        return plain(group, op, *given, **named)

    monkeypatch.setattr(ProcessGroup, "collective", noted)
    module = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer, overlap=True)
        calls.clear()
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.ones(2, width)).square().mean().backward()
            optimizer.step()
    assert calls.count("apply_gradients") == 3
    assert any(each.startswith("begin") for each in calls) == begun

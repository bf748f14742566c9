"""What programs of PyTorch do beside a plain loop: compile, load by torch's own loaders, average, save, mixed precision."""

import contextlib
import copy
import ctypes
import gc
import io
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402
from tests.harness.torch_training import (  # noqa: E402
    dataset,
    difference,
    distributed,
    loss_of,
    make,
    mlp,
    plain,
    put,
    rows,
    step_of,
)

nn = torch.nn


def step(module, optimizer, x, y, call=lambda module, x: module(x)):
    step_of(lambda x: call(module, x), optimizer)(x, y)


# compiled modules


@pytest.mark.ranks(1, 2, timeout=150)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", ["compile, distribute", "module.compile, distribute", "distribute, compile"])
def test_compiled_modules_equal_one_process(how, backend):
    torch.compiler.reset()
    reference = mlp()
    plain(reference, make("Adam", reference), epochs=2)
    module = mlp()
    if how == "compile, distribute":
        module = torch.compile(module, backend=backend)
    elif how == "module.compile, distribute":
        module.compile(backend=backend)
    optimizer = make("Adam", module)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer)
        called = torch.compile(module, backend=backend) if how == "distribute, compile" else module
        distributed(strategy, called, optimizer, epochs=2)
        assert difference(module.parameters(), reference.parameters()) < 1e-9


@pytest.mark.ranks(1, 2, timeout=150)
def test_a_compiled_step_equals_one_process():
    torch.compiler.reset()
    reference = mlp()
    plain(reference, make("Adam", reference), epochs=2)
    with put() as (strategy, module, optimizer):

        @torch.compile(backend="eager")
        def whole(x, y):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()

        data = strategy.distribute_dataset(dataset())
        for _ in range(2):
            for x, y in data:
                whole(torch.from_numpy(x), torch.from_numpy(y))
        assert difference(module.parameters(), reference.parameters()) < 1e-9


@pytest.mark.ranks(1, 2, timeout=150)
def test_compilation_while_gradients_add_up():
    def train(module, optimizer, batches):
        optimizer.zero_grad()
        for x, y in batches:  # the second has another size: compiled while gradients are there
            loss_of(module, x, y).backward()
        optimizer.step()

    torch.compiler.reset()
    x, y = (part[:20] for part in rows())
    batches = ms.data.from_arrays((x, y)).batch(12)
    reference = mlp()
    train(reference, make("SGD", reference), [(a.copy(), b.copy()) for a, b in batches])
    with put(name="SGD") as (strategy, module, optimizer):
        module.compile(backend="aot_eager")
        train(module, optimizer, strategy.distribute_dataset(batches))
        assert difference(module.parameters(), reference.parameters()) < 1e-9


# where batches come from


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_with_a_sampler_equals_one_process(workers):
    data = torch.utils.data
    x, y = (part[:48] for part in rows())
    reference = mlp()
    expected = make("Adam", reference)
    for first in range(0, 48, 12):
        step(reference, expected, x[first : first + 12], y[first : first + 12])
    with put() as (strategy, module, optimizer):
        replicas = strategy.num_replicas_in_sync
        of_all = data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
        sampler = data.DistributedSampler(of_all, num_replicas=replicas, rank=strategy.rank, shuffle=False)
        loader = data.DataLoader(of_all, batch_size=12 // replicas, sampler=sampler, num_workers=workers)
        for a, b in loader:
            step(module, optimizer, a.numpy(), b.numpy())
        assert difference(module.parameters(), reference.parameters()) < 1e-9


@pytest.mark.ranks(1, 2)
def test_tensors_of_batches_are_their_memory_and_stay():
    x, y = rows()
    with put() as (strategy, _, _):
        kept = []
        for a, b in strategy.distribute_dataset(ms.data.from_arrays((x, y)).batch(12)):
            tensor = torch.from_numpy(a)
            assert tensor.data_ptr() == a.ctypes.data
            kept.append((tensor, a.copy(), b))
        assert len(kept) == 5
        assert all(np.array_equal(tensor.numpy(), copied) for tensor, copied, _ in kept)


class Named(nn.Module):
    """Takes its input by name, in a dict, or in a list."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, given=None, *, inputs=None):
        if given is not None:
            inputs = given["x"] if isinstance(given, dict) else given[0]
        return self.inner(inputs)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("form", ["name", "dict", "list", "eval"])
def test_uneven_batches_are_weighted_whatever_form_inputs_have(form):
    calls = {
        "name": lambda module, x: module(inputs=x),
        "dict": lambda module, x: module({"x": x}),
        "list": lambda module, x: module([x]),
        "eval": lambda module, x: module.eval()(inputs=x),  # as in fine-tuning without dropout
    }
    x, y = (part[:5] for part in rows())
    reference = Named()
    expected = make("SGD", reference)
    with put(Named, "SGD") as (strategy, module, optimizer):
        for _ in range(3):
            step(reference, expected, x, y, calls[form])
            for a, b in strategy.distribute_dataset(ms.data.from_arrays((x, y)).batch(5)):
                step(module, optimizer, a, b, calls[form])
        assert difference(module.parameters(), reference.parameters()) < 1e-12


# modules


class Holders(nn.Module):
    """Parameters in a list and a dict: without a dimension, and without a number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.listed = nn.ParameterList([torch.randn(10, 3), torch.randn(3)])
        self.named = nn.ParameterDict({"scale": torch.randn(()), "empty": torch.randn(0, 3)})
        self.double()

    def forward(self, x):
        return (x @ self.listed[0] + self.listed[1]) * self.named["scale"] + self.named["empty"].sum()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.out = nn.MultiheadAttention(10, 2, batch_first=True), nn.Linear(10, 3)
        self.double()

    def forward(self, x):
        x = torch.stack([x, x.roll(1, 1), -x], 1)
        return self.out(self.attention(x, x, x)[0][:, 0])


def weight_norm():
    module = mlp()
    nn.utils.parametrizations.weight_norm(module[0])
    return module


def channels_last():
    torch.manual_seed(0)
    layers = [nn.Unflatten(1, (2, 5, 1)), nn.Conv2d(2, 4, (3, 1)), nn.Flatten(), nn.Linear(12, 3)]
    return nn.Sequential(*layers).double().to(memory_format=torch.channels_last)


def recomputed():
    class Recomputed(nn.Sequential):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    return Recomputed(*mlp())


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("build", [Holders, Attention, weight_norm, channels_last, recomputed])
def test_modules_of_all_kinds_equal_one_process(build):
    # By SGD: a key's bias has no gradient but what rounding leaves, which Adam makes large.
    reference = build()
    plain(reference, make("SGD", reference), epochs=2)
    with put(build, "SGD") as (strategy, module, optimizer):
        distributed(strategy, module, optimizer, epochs=2)
        pairs = [(a, b) for a, b in zip(module.parameters(), reference.parameters(), strict=True) if b.numel()]
        assert difference(*zip(*pairs, strict=True)) < 1e-9


@pytest.mark.ranks(1, 2)
def test_hooks_of_the_program_are_called():
    seen = []
    with put() as (_, module, optimizer):
        module.register_forward_pre_hook(lambda *_: seen.append("before"))
        module.register_forward_hook(lambda *_: seen.append("forward"))
        module[2].weight.register_hook(lambda _: seen.append("gradient"))
        module[2].weight.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
        step(module, optimizer, *rows())
        assert seen == ["before", "forward", "gradient", "accumulated"]


# precision


@pytest.mark.ranks(1, 2, 3)
def test_passes_in_bfloat16_are_near_one_process():
    def train(module, optimizer, batches):
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(module, x, y)
            loss.backward()
            optimizer.step()

    build = lambda: mlp().float()  # noqa: E731
    x, y = rows()
    x = x.astype(np.float32)
    reference, start = build(), build()
    batches = ms.data.from_arrays((x, y)).batch(26)
    train(reference, make("SGD", reference), [(a.copy(), b.copy()) for a, b in batches] * 3)
    with put(build, "SGD") as (strategy, module, optimizer):
        data = strategy.distribute_dataset(batches)
        for _ in range(3):
            train(module, optimizer, data)
        assert module[0].weight.dtype is torch.float32
        moved = difference(start.parameters(), reference.parameters())
        assert difference(module.parameters(), reference.parameters()) < 0.02 < moved / 2


@pytest.mark.ranks(1, 2)
def test_steps_in_inference_mode_leave_nothing_behind():
    x, y = rows()
    reference = mlp()
    expected = make("Adam", reference)
    with put() as (_, module, optimizer):
        for _ in range(3):
            step(reference, expected, x, y)
            optimizer.zero_grad()
            loss_of(module, x, y).backward()
            with torch.inference_mode():
                optimizer.step()
                module(torch.from_numpy(x))
        assert difference(module.parameters(), reference.parameters()) < 1e-9


# copies and files


@pytest.mark.ranks(1, 2)
def test_an_averaged_model_equals_one_process():
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    def train(module, optimizer, batches):
        average = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for x, y in batches:
            step(module, optimizer, x, y)
            average.update_parameters(module)
        return average

    reference = mlp()
    expected = train(reference, make("SGD", reference), [(a.copy(), b.copy()) for a, b in dataset()])
    with put(name="SGD") as (strategy, module, optimizer):
        average = train(module, optimizer, strategy.distribute_dataset(dataset()))
        assert difference(average.parameters(), expected.parameters()) < 1e-9
        assert type(average.module) is nn.Sequential


@pytest.mark.ranks(1, 2)
def test_files_are_as_small_as_plain_ones_and_need_no_mpistrat():
    def saved(what):
        file = io.BytesIO()
        torch.save(what, file)
        return file.getvalue()

    reference = mlp()
    with put() as (_, module, optimizer):
        step(module, optimizer, *rows())
        for whole, of in ((module, reference), (module.state_dict(), reference.state_dict())):
            assert len(saved(whole)) < len(saved(of)) + 200
            assert b"mpistrat" not in saved(whole)
        again = torch.load(io.BytesIO(saved(module)), weights_only=False)
        assert type(again) is nn.Sequential
        assert difference(again.parameters(), module.parameters()) == 0
        assert again[0].weight.data_ptr() != module[0].weight.data_ptr()
        for part in (module[0], list(module.parameters())):
            assert len(saved(part)) < len(saved(copy.deepcopy(part))) + 200
        with pytest.raises(TypeError, match="state_dict"):
            saved(optimizer)


@pytest.mark.ranks(2)
def test_a_node_holds_the_parameters_once():
    def used():  # malloc gives pages of the heap back late: what counts is that tensors of 16 MiB are mapped, and unmapped
        for _ in range(3):  # what earlier tests left may be found in turns
            gc.collect()
        with contextlib.suppress(AttributeError):  # of another C library than GNU's
            ctypes.CDLL(None).malloc_trim(0)
        lines = (line.split() for line in Path("/proc/self/smaps_rollup").read_text().splitlines())
        return next(int(words[1]) / 1024 for words in lines if words[0] == "Pss:")

    if not Path("/proc/self/smaps_rollup").exists():
        pytest.skip("the system does not tell the proportional set size")
    with ms.MultiWorkerMirroredStrategy() as strategy:
        make("Adam", mlp())  # loads torch's compiler, as every optimizer does
        comm = strategy.comm
        comm.Barrier()
        before = comm.allreduce(used())
        module = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(4)]).requires_grad_(False)
        comm.Barrier()
        plain_ones = comm.allreduce(used()) - before
        assert plain_ones > 120  # two copies of 64 MiB
        with strategy.scope():
            ms.torch.distribute(module)
        comm.Barrier()
        assert 60 < comm.allreduce(used()) - before < 64 + 24

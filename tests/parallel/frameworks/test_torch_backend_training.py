"""Training by PyTorch's own parts on the backend of this package, next to gloo and to one process."""

import contextlib
import inspect

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from tests.harness.torch_groups import default_group, fully_shard  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, ROWS = 5, 12


@pytest.fixture
def group():
    with default_group() as group:
        yield group


class Net(nn.Module):
    def __init__(self, sparse=False, norm=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(30, 16, sparse=sparse)
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.last = nn.Linear(16, 3)

    def forward(self, rows, skip=False):
        hidden = torch.relu(self.first(self.embedding(rows)))
        hidden = hidden if skip else torch.relu(self.second(hidden))
        return self.last(self.norm(hidden))


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 30, (8,), generator=generator), torch.randint(0, 3, (8,), generator=generator)


def values(module):
    tensors = [*module.parameters(), *module.buffers()]
    return torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])


CASES = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 1e-4},
}
OTHERS = ["no_sync", "uneven", "sparse", "buffers", "zero", "post-local"]
HOOKS = ["fp16", "allreduce", "powersgd"]


def train(group, case):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer

    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Net(case == "sparse", case == "buffers")
    module = DistributedDataParallel(net, process_group=group, **CASES.get(case, {}))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    if case == "fp16":
        module.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif case == "allreduce":
        module.register_comm_hook(group, default_hooks.allreduce_hook)
    elif case == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1
        )
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif case == "zero":
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, process_group=group, lr=0.1)
    elif case == "post-local":
        state = post_localSGD_hook.PostLocalSGDState(group, group, start_localSGD_iter=2)
        module.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        averager = PeriodicModelAverager(period=2, warmup_steps=2, process_group=group)
        optimizer = PostLocalSGDOptimizer(optim=optimizer, averager=averager)
    steps = STEPS + (2 * rank if case == "uneven" else 0)
    with module.join() if case == "uneven" else contextlib.nullcontext():
        for step in range(steps):
            rows, labels = batch(step, rank)
            local = case == "no_sync" and step % 2 == 0
            with module.no_sync() if local else contextlib.nullcontext():
                skip = case == "unused" and (step + rank) % 2 == 0
                nn.functional.cross_entropy(module(rows, skip=skip), labels).backward()
            if not local:
                optimizer.step()
                optimizer.zero_grad()
    return values(module.module)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("case", [*CASES, *OTHERS, *HOOKS])
def test_ddp_equals_gloo(group, case):
    """To the rounding of float32, whose order of sums differs; the hook of fp16 rounds once here, on gloo each time."""
    theirs = train(dist.new_group(backend="gloo"), case)
    ours = train(dist.group.WORLD, case)
    assert (ours - theirs).abs().max() < (1e-3 if case == "fp16" else 1e-6)


@pytest.mark.ranks(2)
def test_a_hook_that_gathers_in_a_callback(group):
    """It calls a collective in the callback of a future, in the thread of the lane."""
    from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks

    if ".cuda(" in inspect.getsource(quantization_hooks.quantization_pertensor_hook) and not torch.cuda.is_available():
        pytest.skip("this hook of PyTorch needs a GPU")
    module = DistributedDataParallel(Net(), bucket_cap_mb=1e-4)
    module.register_comm_hook(group, quantization_hooks.quantization_pertensor_hook)
    rows, labels = batch(0, dist.get_rank())
    for _ in range(3):
        nn.functional.cross_entropy(module(rows), labels).backward()
    own = values(module.module)
    others = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(others, own)
    assert torch.equal(*others)


def mlp():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def rows_of(step):
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(ROWS, 8, generator=generator, dtype=torch.float64)
    return rows, torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)


def run(module, optimizer, low=0, high=ROWS, steps=range(STEPS)):
    for step in steps:
        rows, labels = rows_of(step)
        nn.functional.mse_loss(module(rows[low:high]), labels[low:high]).backward()
        optimizer.step()
        optimizer.zero_grad()


def own_rows():
    each = ROWS // dist.get_world_size()
    return dist.get_rank() * each, (dist.get_rank() + 1) * each


def whole(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("kind", ["ddp", "zero", "fsdp2", "hsdp"])
def test_sharded_training_equals_one_process(group, kind):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.optim import ZeroRedundancyOptimizer

    expected = mlp()
    run(expected, torch.optim.AdamW(expected.parameters(), lr=0.01))
    module, ranks = mlp(), dist.get_world_size()
    if kind in ("fsdp2", "hsdp"):
        if kind == "hsdp":
            copies = 2 if ranks % 2 == 0 else 1
            mesh = init_device_mesh("cpu", (copies, ranks // copies), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh("cpu", (ranks,))
        for layer in module:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    else:
        module = DistributedDataParallel(module)
        if kind == "zero":
            optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=0.01)
        else:
            optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    run(module, optimizer, *own_rows())
    for ours, theirs in zip(module.parameters(), expected.parameters(), strict=True):
        assert (whole(ours) - theirs).abs().max() < 1e-9


@pytest.mark.ranks(1, 2, 4)
def test_dtensor_products(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(2)
    left, right = torch.randn(8, 12, dtype=torch.float64), torch.randn(12, 4, dtype=torch.float64)
    for one, other in ((Shard(0), Replicate()), (Shard(1), Shard(0)), (Replicate(), Shard(1)), (Shard(0), Shard(1))):
        product = distribute_tensor(left, mesh, [one]) @ distribute_tensor(right, mesh, [other])
        assert (product.full_tensor() - left @ right).abs().max() < 1e-12
        moved = product.redistribute(mesh, [Shard(1)])
        assert (moved.full_tensor() - left @ right).abs().max() < 1e-12


@pytest.mark.ranks(1, 2, 4)
def test_tensor_parallel_layers(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    expected, module = mlp(), mlp()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(module, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    run(expected, torch.optim.SGD(expected.parameters(), lr=0.1))
    run(module, torch.optim.SGD(module.parameters(), lr=0.1, foreach=False))
    for ours, theirs in zip(module.parameters(), expected.parameters(), strict=True):
        assert (whole(ours) - theirs).abs().max() < 1e-9


@pytest.mark.ranks(1, 2, 4)
def test_distributed_checkpoints(group, tmp_path):
    from torch.distributed import checkpoint

    folder = [str(tmp_path)]
    dist.broadcast_object_list(folder)
    modules, optimizers = [], []
    for _ in range(3):
        module = mlp()
        fully_shard(module)
        modules.append(module)
        optimizers.append(torch.optim.AdamW(module.parameters(), lr=0.01))
    run(modules[0], optimizers[0], *own_rows(), range(3))
    checkpoint.save({"model": modules[0].state_dict()}, checkpoint_id=f"{folder[0]}/one")
    checkpoint.async_save({"model": modules[0].state_dict()}, checkpoint_id=f"{folder[0]}/two").result()
    for name, module in zip(("one", "two"), modules[1:], strict=True):
        state = {"model": module.state_dict()}
        checkpoint.load(state, checkpoint_id=f"{folder[0]}/{name}")
        module.load_state_dict(state["model"])
        for ours, theirs in zip(module.parameters(), modules[0].parameters(), strict=True):
            assert torch.equal(whole(ours), whole(theirs))

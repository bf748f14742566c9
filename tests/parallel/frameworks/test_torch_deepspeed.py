"""DeepSpeed's ZeRO-1 to 3 on CPUs over the backend: the weights of Adam in one process."""

import subprocess

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

from mpistrat.base.programs import program
from tests.launch.launcher import job_environment

PROGRAM = """
import torch
import torch.distributed as dist

dist.init_process_group("mpi")

import deepspeed

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.set_num_threads(1)
rank, size = dist.get_rank(), dist.get_world_size()


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))


def batch(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


reference = net()
adam = torch.optim.Adam(reference.parameters(), lr=0.01)
for step in range(5):
    adam.zero_grad()
    (sum(loss_of(reference, *batch(step, each)) for each in range(size)) / size).backward()
    adam.step()
for stage in (1, 2, 3):
    model = net()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.0, "torch_adam": True}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(5):
        engine.backward(loss_of(engine, *batch(step, rank)))
        engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
    if rank == 0:
        print("stage", stage, dist.get_backend(), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.timeout(300)
def test_zero_1_to_3_have_the_weights_of_one_process(mpi, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    words = [*program("mpistrat", "run", "-n", "2", python=mpi.python), "train.py"]
    environment = job_environment("none", tmp_path, {"PATH": "/usr/bin:/bin"})
    done = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("stage")] == [
        "stage 1 mpi",
        "stage 2 mpi",
        "stage 3 mpi",
    ]

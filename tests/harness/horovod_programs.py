"""A program of Horovod's elastic training for tests, on one machine and in a job of SLURM: one rank of it is killed."""

from __future__ import annotations

_ELASTIC = """
import os, signal, sys
import horovod.torch as hvd
import torch

hvd.init()
model = torch.nn.Linear(2, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())

@hvd.elastic.run
def train(state):
    first = state.step
    while state.step < 6:
        optimizer.zero_grad()
        (model(torch.ones(1, 2)) * (hvd.rank() + 1)).sum().backward()
        optimizer.step()
        state.step += 1
        if first == 0 and state.step == 4 and hvd.rank() == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        state.commit()
    return first

first = train(hvd.elastic.TorchState(model, optimizer, step=0))
sys.stdout.write(f"elastic {hvd.rank()} from step {first}: {model.weight.tolist()}\\n")
"""


def elastic(victim: int) -> str:
    """Return a program of six steps, in the fourth of which a rank is killed. A step's gradient is the mean of 1 to the ranks."""
    return _ELASTIC.replace("VICTIM", str(victim))


def ends(ranks: int, step: int, weight: float) -> list[str]:
    """Return what the ranks print that have started again from a step, sorted."""
    return [f"elastic {rank} from step {step}: {[[weight] * 2]}" for rank in range(ranks)]

"""A rank is killed while it trains; restarted ranks continue from a snapshot in memory."""

from __future__ import annotations

import hashlib
import os
import signal

import numpy as np

from ...base.environment import Environment
from ...optimizers import Adam
from ...strategy import MultiWorkerMirroredStrategy
from ...variables import Variable
from .trial import Trial

__all__ = ["run"]

_STEPS, _KILLED_AT, _SNAPSHOT = 80, 50, 20  # the last is the number of steps between snapshots


def run(trial: Trial) -> None:
    """Train undisturbed, then with a kill, and compare the bits of the weights. Collective.

    The first start of the ranks does the former, and starts the latter; the second start completes it.
    """
    generation, bits = Environment.read().generation, trial.folder / "undisturbed"
    if generation == 0:
        trial.part("training undisturbed")
        found, _ = _train(trial, "undisturbed-run", 0)
        if trial.topology.rank == 0:
            bits.write_text(found)
        trial.comm.Barrier()
    trial.part("training until the kill" if generation == 0 else "training after the kill")
    found, begun = _train(trial, "killed-run", _KILLED_AT if generation == 0 else 0)
    trial.same("the number of starts", generation, 1)
    trial.same("the restart found a snapshot", begun > 0, True)
    trial.number("the kill", "step", _KILLED_AT, "")
    trial.number("the snapshot", "step", begun, "")
    if trial.topology.rank == 0:
        trial.same("the weights have the bits of the undisturbed run", found, bits.read_text())


def _train(trial: Trial, name: str, kill_at: int) -> tuple[str, int]:
    """Train, and return a digest of the weights, and the step at which it resumed. Collective.

    Args:
        trial: the ranks.
        name: of the run, for its snapshots.
        kill_at: the step at which the last rank is killed; 0 for none.
    """
    strategy = MultiWorkerMirroredStrategy(comm=trial.comm, devices=["cpu:0"])
    with strategy.scope():
        weights = Variable(np.zeros(1 << 16), name="w")
        optimizer = Adam(0.1)
    begun, snapshot = 0, strategy.newest_snapshot(name)
    if snapshot is not None:
        begun = strategy.restore_snapshot(snapshot)["step"]
    rows = np.random.default_rng(0).normal(size=(_STEPS, 1 << 16))

    def step(number: int) -> None:
        weights.grad[...] = (weights.numpy() - rows[number - 1]) * (strategy.rank + 1)
        optimizer.apply_gradients([(weights.grad, weights)])

    for number in range(begun + 1, _STEPS + 1):
        strategy.run(step, args=(number,))
        if number % _SNAPSHOT == 0:
            strategy.take_snapshot(number, {"step": number}, name)
        if number == kill_at and strategy.rank == strategy.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
    strategy.close()
    return digest, begun

"""A search for hyperparameters by Optuna, in which groups of ranks train trials at once. Needs optuna.

    mpistrat run -n 4 -m mpistrat.examples.search --trials 20 --ranks-per-trial 2

The first rank of each group asks Optuna and reports to it; the other ranks get its answers. The groups share the study by a
journal file, which they may find in a common folder, and never wait for each other.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

import mpistrat as ms

from . import digits_data
from .digits_model import Digits

if TYPE_CHECKING:
    import optuna

__all__ = ["GroupTrial", "digits", "main", "search"]

COMPLETE, PRUNED, FAILED = "complete", "pruned", "failed"
#: Trains under a strategy of the group, and returns the value to minimize, or several.
Objective = Callable[["GroupTrial", Any], float | Sequence[float]]


@final
class GroupTrial:
    """A trial of Optuna on all ranks of a group. Its methods and attributes are Optuna's, and collective over the group."""

    def __init__(self, trial: optuna.Trial | None, strategy: Any) -> None:
        """Set the trial, None but on the first rank, and the strategy of the group."""
        self._trial, self._strategy = trial, strategy

    def __getattr__(self, name: str) -> Any:
        """Return the first rank's attribute, or a function that calls its method. Collective."""
        import optuna

        if callable(getattr(optuna.Trial, name)):
            return lambda *args, **settings: self._of_first(lambda trial: getattr(trial, name)(*args, **settings))
        return self._of_first(lambda trial: getattr(trial, name))

    def _of_first(self, call: Callable[[optuna.Trial], Any]) -> Any:
        """Return the first rank's result, or raise its error, on all ranks. Collective."""
        result = error = None
        if self._trial is not None:
            try:
                result = call(self._trial)
            except Exception as raised:
                error = raised
        result, error = self._strategy.broadcast_object((result, error))
        if error is not None:
            raise error
        return result


def search(world: Any, objective: Objective, trials: int, ranks_per_trial: int, file: Path, **study: Any) -> Any:
    """Run trials on groups of ranks; return the study on the first rank of each, None on the others. Collective.

    An objective that raises an error fails its trial, and the search continues. One that raises `optuna.TrialPruned` prunes it.

    Args:
        world: a strategy over all ranks.
        objective: called on all ranks of a group.
        trials: their number, with those that the file has from an earlier run.
        ranks_per_trial: the ranks of a group; the last group may have fewer.
        file: the journal, in a folder that all nodes share.
        study: arguments of `optuna.create_study`, such as pruner. Give each group's sampler another seed, or none.
    """
    import optuna
    from mpi4py import MPI
    from optuna.storages.journal import JournalFileBackend

    firsts = range(0, world.size, ranks_per_trial)
    sets = [world.process_set(range(first, min(first + ranks_per_trial, world.size))) for first in firsts]
    group = sets[world.rank // ranks_per_trial]

    waiting, failed, pruned = (getattr(optuna.trial.TrialState, name) for name in ("WAITING", "FAIL", "PRUNED"))

    def opened() -> optuna.Study:
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(file)))
        return optuna.create_study(storage=storage, study_name="search", load_if_exists=True, **study)

    found = opened() if world.rank == 0 else None  # one rank creates it
    world.barrier()
    if group.rank == 0 and found is None:
        found = opened()
    while True:
        asked = None
        if found is not None and sum(one.state != waiting for one in found.get_trials(deepcopy=False)) < trials:
            asked = found.ask()
            if asked.number >= trials:  # another group has just asked for the last one
                found.tell(asked, state=failed)
                asked = None
        if not group.broadcast_object(asked is not None, root=group.ranks[0]):
            break
        with ms.MultiWorkerMirroredStrategy(comm=group.comm if group.size > 1 else MPI.COMM_SELF) as strategy:
            value, ends = _ended(strategy, objective, GroupTrial(asked, strategy))
        if found is not None and asked is not None:
            found.tell(asked, value, state=None if value is not None else failed if FAILED in ends else pruned)
    world.barrier(timeout=math.inf, name="the search has ended")  # the last trials may take long
    return found


def _ended(strategy: Any, objective: Objective, trial: GroupTrial) -> tuple[Any, set[str]]:
    """Run an objective; return its value, if all ranks have one, and how it ended on them. Collective over the group."""
    import optuna

    value: Any = None
    end = COMPLETE
    try:
        found = objective(trial, strategy)
        value = [float(each) for each in found] if isinstance(found, Sequence) else float(found)
    except optuna.TrialPruned:
        end = PRUNED
    except Exception as error:
        print(f"rank {strategy.rank} of {strategy.size}: a trial fails: {error!r}", file=sys.stderr, flush=True)
        end = FAILED
    while True:
        try:
            ends = set(strategy.all_gather_object(end))
        except ms.errors.CollectiveMismatchError:  # another rank was still in the objective; it gets this error there
            continue
        return (value if ends == {COMPLETE} else None), ends


def digits(trial: GroupTrial, strategy: Any) -> float:
    """Train a network on the handwritten digits for up to 5 epochs, and return the share of wrong predictions."""
    import optuna

    rate = trial.suggest_float("rate", 1e-5, 1e-1, log=True)
    rows = trial.suggest_int("rows of a step", 32, 256)
    images, labels = digits_data.load()
    arrays = (images / np.float32(16), labels.astype(np.int64))
    training = ms.data.from_arrays(tuple(array[digits_data.TEST_ROWS :] for array in arrays))
    testing = ms.data.from_arrays(tuple(array[: digits_data.TEST_ROWS] for array in arrays))
    with strategy.scope():
        model, optimizer = Digits(0, np.float32), ms.optimizers.Adam(rate)
        accuracy = ms.train.SparseCategoricalAccuracy("accuracy")

    def step(images: np.ndarray, labels: np.ndarray) -> None:
        model.scores_and_gradients(images, labels)
        optimizer.apply_gradients([(v.grad, v) for v in model.variables])

    def test_step(images: np.ndarray, labels: np.ndarray) -> None:
        accuracy.update_state(labels, model.forward(images)[-1])

    trainer = ms.train.Trainer(strategy, step, test_step, metrics=[accuracy])
    batches = strategy.distribute_dataset(training.shuffle(seed=0).batch(rows))
    tests = strategy.distribute_dataset(testing.batch(digits_data.TEST_ROWS))
    for epoch in range(5):
        trainer.fit(batches, epoch + 1, initial_epoch=epoch)
        wrong = 1.0 - float(trainer.evaluate(tests)["accuracy"])
        trial.report(wrong, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return wrong


def main(arguments: list[str] | None = None) -> None:
    """Run the search of the command line; rank 0 prints the best trial. Collective."""
    parser = argparse.ArgumentParser(
        prog="python -m mpistrat.examples.search", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--trials", type=int, default=20, help="with those in the journal (%(default)s)")
    parser.add_argument("--ranks-per-trial", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--journal", type=Path, default=Path("search.log"), help="(%(default)s)")
    options = parser.parse_args(arguments)
    with ms.MultiWorkerMirroredStrategy() as world:
        study = search(world, digits, options.trials, options.ranks_per_trial, options.journal)
        if world.rank == 0:
            print(f"{len(study.trials)} trials; best: {study.best_value:.3f} wrong with {study.best_params}")


if __name__ == "__main__":
    main()

"""A search by Optuna on groups of ranks: trials at once, pruned ones, ones that fail on one rank or all, and a second run."""

from __future__ import annotations

import time

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.files import wait_for_files

KINDS = ("trains", "may be pruned", "all fail", "last fails")
PLANNED = [{"x": 0.1 * number, "kind": KINDS[number % 4], "steps": 1 + number % 3} for number in range(12)]


class NotPicklable(Exception):
    def __reduce__(self):
        raise TypeError("no pickle")


def ending(params, ranks):
    """Return how a trial with these parameters ends on a group of ranks."""
    if params["kind"] == "may be pruned":
        return "PRUNED" if params["x"] ** 2 > 0.25 else "COMPLETE"
    fails = params["kind"] == "all fail" or (params["kind"] == "last fails" and ranks > 1)
    return "FAIL" if fails else "COMPLETE"


@pytest.mark.ranks(3, 4)
def test_groups_of_ranks_train_trials_at_once(mpi_tmp_path):
    optuna = pytest.importorskip("optuna", reason="pip install optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    from mpistrat.examples.search import search

    seen = []

    def objective(trial, strategy):
        x = trial.suggest_float("x", -1.0, 2.0)
        kind = trial.suggest_categorical("kind", KINDS)
        steps = trial.suggest_int("steps", 1, 3)
        if not seen:  # the first trials of both groups are in here at once
            (mpi_tmp_path / f"group {world.rank // 2}").touch()
            wait_for_files(mpi_tmp_path, 2, "group *")
        seen.append((x, kind, steps))
        with strategy.scope():
            w = ms.Variable(0.0, name="w", aggregation=ms.VariableAggregation.SUM)
        last = strategy.size > 1 and strategy.rank == strategy.size - 1
        for step in range(steps):
            time.sleep(0.02 * steps)
            strategy.run(lambda: w.assign_add(x * x / strategy.size))
            if kind == "all fail" or (kind == "last fails" and last):
                raise NotPicklable
            trial.report(float(np.asarray(w)) / (step + 1), step)
            if kind == "may be pruned" and trial.should_prune():
                raise optuna.TrialPruned
        return float(np.asarray(w)) / steps

    def run(count):
        study = search(world, objective, count, 2, file, pruner=optuna.pruners.ThresholdPruner(upper=0.25))
        assert (study is None) == bool(world.rank % 2)
        found = [(one.state.name, one.value, one.params) for one in study.get_trials() if one.params] if study else None
        return world.broadcast_object(found), world.all_gather_object(tuple(seen))

    with ms.MultiWorkerMirroredStrategy() as world:
        file = mpi_tmp_path / "journal.log"
        if world.rank == 0:
            storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(file)))
            study = optuna.create_study(storage=storage, study_name="search")
            for params in PLANNED:
                study.enqueue_trial(params)
        world.barrier()
        found, by_rank = run(len(PLANNED))
        assert [params for *_, params in found] == PLANNED
        assert by_rank[0] == by_rank[1] and by_rank[2] == by_rank[-1], "the ranks of a group agree"
        assert sorted(by_rank[0] + by_rank[2]) == sorted(tuple(params.values()) for params in PLANNED)
        for state, value, params in found:
            ranks = 2 if world.size == 4 or tuple(params.values()) in by_rank[0] else 1
            assert state == ending(params, ranks), params
            assert value is None if state == "FAIL" else value == pytest.approx(params["x"] ** 2, rel=1e-6)
        more, by_rank = run(len(PLANNED) + 3)
        assert more[: len(PLANNED)] == found and len(more) == len(PLANNED) + 3, "a second run adds what is missing"
        assert len(by_rank[0]) + len(by_rank[2]) == len(more)


@pytest.mark.ranks(2)
def test_a_trial_has_what_optunas_has(mpi_tmp_path):
    optuna = pytest.importorskip("optuna", reason="pip install optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    from mpistrat.examples.search import search

    def objective(trial, strategy):
        trial.suggest_float("rate", 0.0, 1.0, step=0.25)
        rows = trial.suggest_int("rows", 1, 64, log=True)
        trial.set_user_attr("seen", trial.number)
        with pytest.raises(AttributeError):
            trial.no_such_name()
        return trial.params["rate"], np.float32(rows)

    with ms.MultiWorkerMirroredStrategy() as world:
        study = search(world, objective, 3, 2, mpi_tmp_path / "log", directions=["minimize", "maximize"])
        if study is not None:
            for number, one in enumerate(study.trials):
                assert one.values == [one.params["rate"], one.params["rows"]] and one.user_attrs == {"seen": number}

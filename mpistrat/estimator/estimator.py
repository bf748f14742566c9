"""Estimator: a model function and a folder from which training resumes and the model is evaluated and used.

EvaluatorSplit: communicators of the training ranks and of the evaluator.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from ..base.environment import Environment
from ..base.errors import ClusterError, explain
from ..base.log import logger
from ..base.masks import plain_array
from ..cluster.rendezvous import wait_for_ranks
from ..cluster.resolvers.tf_config import TFConfigClusterResolver
from ..cluster.start import import_mpi
from ..cluster.world import world as world_of
from ..data import Dataset, DistributedDataset, InputContext
from ..state.file import CheckpointFile
from ..state.list import key_of, locations, name_of
from ..strategies import strategy_from_environment
from ..strategy import OneDeviceStrategy, Strategy
from ..train import Callback, Checkpoints, JSONLogger, Loop, Trainer
from ..train.checkpoint_folders import newest_file
from ..train.weights import assign_from_file, expect_trainable, weights_of
from ..variables import variable_creator_scope
from .specs import EstimatorSpec, ModeKeys, RunConfig, WarmStartSettings, refuse_best_weights

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "Estimator",
    "EvaluatorSplit",
    "split_evaluator",
]


class EvaluatorSplit(NamedTuple):
    """The job, divided by roles.

    Attributes:
        comm: of the ranks with this one's role.
        is_evaluator: True if this rank evaluates.
        has_evaluator: True if a rank of this job does.
        world: all ranks.
    """

    comm: MPI.Intracomm
    is_evaluator: bool
    has_evaluator: bool
    world: MPI.Intracomm


def split_evaluator(comm: MPI.Intracomm | None = None) -> EvaluatorSplit:
    """Return communicators of the training ranks and of the evaluator. Collective over `comm`.

    A rank evaluates if its task in TF_CONFIG is evaluator, as in several programs under one mpiexec; or as the last one, if
    `mpistrat run --evaluator` (MPISTRAT_EVALUATOR=1) started it. `train_and_evaluate` calls it. A loop of your own creates
    its strategy over the result's `comm`, and its evaluator follows `ms.train.checkpoints_iterator`.

    Args:
        comm: default COMM_WORLD.

    Raises:
        ClusterError: on every rank: there are several evaluators, or no training rank.
        CollectiveMismatchError: on every rank: some ranks create a strategy instead.
        CollectiveTimeoutError: a rank did not arrive within MPISTRAT_ABORT_AFTER seconds.
        ContextError: a rank serves a coordinator, and cannot take part.

    Example:
        >>> split = ms.estimator.split_evaluator()
        >>> split.comm.size, split.is_evaluator
        (1, False)
    """
    world: MPI.Intracomm = world_of(import_mpi()) if comm is None else comm
    wait_for_ranks(world, "split_evaluator")
    task = TFConfigClusterResolver().task_type if os.environ.get("TF_CONFIG") else None
    last = Environment.read().evaluator and world.size > 1 and world.rank == world.size - 1
    evaluates = world.allgather(bool(last) if task is None else task == "evaluator")
    found = [rank for rank, is_evaluator in enumerate(evaluates) if is_evaluator]
    if len(found) > 1:
        expected, got = "one evaluator at most", f"ranks {', '.join(map(str, found))}"
        raise ClusterError(explain("split_evaluator", "comm", expected=expected, got=got, rank=world.rank))
    mine = evaluates[world.rank]
    part: Any = world.Split(int(mine), world.rank)
    return EvaluatorSplit(part, mine, bool(found), world)


def evaluator_elsewhere() -> bool:
    """Return whether TF_CONFIG's cluster has an evaluator, perhaps in another job."""
    return "evaluator" in TFConfigClusterResolver().cluster_spec().jobs


class ModelHook(Callback):
    """A callback of `Estimator.train` that needs the model before its variables are restored."""

    def prepare(self) -> None:
        """Create what needs variables. Collective; the model's training steps exist."""


@final
class _ByName:
    """A variable creator for one call of a model function: it returns the variables of earlier calls by name and order."""

    def __init__(self, created: dict[str, list[Any]]) -> None:
        self._created = created
        self._seen: Counter[str] = Counter()

    def __call__(self, next_creator: Callable[..., Any], **arguments: Any) -> Any:
        name = arguments.get("name") or "Variable"
        known, index = self._created.setdefault(name, []), self._seen[name]
        self._seen[name] += 1
        if index == len(known):
            known.append(next_creator(**arguments))
            return known[index]
        variable, value = known[index], arguments.get("initial_value")
        if value is not None and not callable(value) and np.shape(value) != variable.shape:
            expected, got = f"shape {variable.shape}, as model_fn gave it in another mode", f"shape {np.shape(value)}"
            raise ValueError(explain("Estimator", f"model_fn: variable {name!r}", expected=expected, got=got))
        return variable


@final
class _Interval(Callback):
    """The number of steps to the next checkpoint: as many as take some seconds."""

    def __init__(self, strategy: Strategy, seconds: float) -> None:
        self._strategy, self._seconds = strategy, seconds
        self._steps, self._took, self._begun = 0, 0.0, 0.0

    def __call__(self) -> int:
        """Return the number, by the first rank's clock. Collective."""
        wanted = 1 if not self._steps else round(self._steps * self._seconds / max(self._took, 1e-9))
        mine = max(1, min(wanted, 10 * self._steps))
        self._steps = int(self._strategy.broadcast_object(mine, root=Loop(self._strategy).first))
        self._begun = time.monotonic()
        return self._steps

    def on_epoch_end(self, loop: Loop, logs: Mapping[str, Any]) -> None:
        self._took = time.monotonic() - self._begun


_INPUT_ARGUMENTS = ("mode", "params", "config", "input_context")
_MODEL_ARGUMENTS = ("features", "labels", "mode", "params", "config")


@final
class Estimator:
    """A model that is trained, evaluated and used through the checkpoints in its folder.

    Attributes:
        config: the RunConfig.
        model_dir: the folder.
        params: passed to the model function.
    """

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
    ) -> None:
        """Set a model function; it is called later.

        Args:
            model_fn: returns an EstimatorSpec. It is called in the scope, with those of features, labels, mode, params and config
                that it takes. As in a graph features and labels are not arrays but the `ArraySpec`s of a replica's rows. It is
                called once, with the first data, if its spec has the steps of all modes. Else it is called again with each
                mode whose step no spec has. Then `ms.Variable` returns the variable that the first call created under the same
                name, the n-th of a name for the n-th.
            model_dir: takes precedence over config's.
            config: default RunConfig().
            params: passed to model_fn and to input functions.
            warm_start_from: a file or folder with the values of the trainable variables with which `train` starts where
                model_dir has no checkpoint; or `WarmStartSettings`, for some of them, or under other names.

        Raises:
            ValueError: there is no model_dir.
            TypeError: model_fn has another argument.

        Example:
            >>> import tempfile
            >>> def model_fn(features, labels, mode):
            ...     w = ms.Variable(np.zeros(features.shape[1:]), name="w", aggregation=ms.VariableAggregation.SUM)
            ...     loss = ms.train.MeanSquaredError("loss")
            ...     def test_step(x, y):
            ...         loss.update_state(y, x @ w.array)
            ...     def train_step(x, y):
            ...         test_step(x, y)
            ...         w.assign_sub(0.1 * (x @ w.array - y) @ x)
            ...     return ms.estimator.EstimatorSpec(mode, train_step, test_step, metrics=[loss])
            >>> def input_fn():
            ...     return ms.data.from_arrays((np.eye(2), np.array([1.0, 2.0]))).batch(2).repeat()
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     estimator = ms.estimator.Estimator(model_fn, folder)
            ...     results = estimator.train(input_fn, max_steps=100).evaluate(input_fn, steps=1)
            ...     estimator.close()
            >>> results["global_step"], results["loss"] < 1e-6
            (100, True)
        """
        self.config = config or RunConfig()
        folder = self.config.model_dir if model_dir is None else model_dir
        if folder is None:
            raise ValueError(explain("Estimator", "model_dir", expected="a folder, here or in config", got="None"))
        self.model_dir, self.params = Path(folder).absolute(), dict(params or {})
        self._model_fn = model_fn
        _names("Estimator", "model_fn", model_fn, _MODEL_ARGUMENTS)
        self._split: EvaluatorSplit | None = None
        self._strategy: Strategy | None = None
        self._specs: dict[str, EstimatorSpec] = {}
        self._created: dict[str, list[Any]] = {}  # variables by the name that model_fn gives
        self._checkpoints: Checkpoints | None = None
        self._warm = warm_start_from

    # components

    @property
    def split(self) -> EvaluatorSplit:
        """The division into training ranks and evaluator. Collective the first time."""
        if self._split is None:
            self._split = split_evaluator()
        return self._split

    @property
    def strategy(self) -> Strategy:
        """The strategy of this rank's role. Collective the first time."""
        if self._strategy is None:
            split = self.split
            make = self.config.eval_distribute if split.is_evaluator else self.config.train_distribute
            if isinstance(make, Strategy):
                if split.has_evaluator:
                    expected = "a function of the communicator, in a job with an evaluator"
                    got = f"a {type(make).__name__}"
                    raise ValueError(explain("RunConfig", "train_distribute", expected=expected, got=got))
                self._strategy = make
            elif make is not None:
                self._strategy = make(split.comm)
            elif split.is_evaluator:
                self._strategy = OneDeviceStrategy(comm=split.comm)
            else:
                self._strategy = strategy_from_environment(comm=split.comm)
        return self._strategy

    @property
    def checkpoints(self) -> Checkpoints:
        """The folder's checkpoints. Collective the first time."""
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(self.strategy, self.model_dir, keep=self.config.keep_checkpoint_max)
        return self._checkpoints

    def latest_checkpoint(self) -> Path | None:
        """Return the newest file of the folder; None without files. Local, after the first collective call."""
        return self.checkpoints.latest()

    def make_trainer(self, data: DistributedDataset, mode: str, hooks: Sequence[Callback] = ()) -> Trainer:
        """Return a Trainer of the model, whose steps of a mode are created the first time. Collective."""
        spec = self._made(data, mode)
        return Trainer(
            self.strategy, spec.train_step, spec.test_step, spec.predict_step,
            optimizer=spec.optimizer, metrics=spec.metrics, callbacks=hooks,
            checkpoints=self.checkpoints if mode == ModeKeys.TRAIN else None,
        )  # fmt: skip

    def _made(self, data: DistributedDataset, mode: str) -> EstimatorSpec:
        known = self._specs.get(mode) or next((one for one in self._specs.values() if one.has_step(mode)), None)
        if known is None:
            rows = data.element_spec
            features, labels = rows if isinstance(rows, tuple) and len(rows) == 2 else (rows, None)
            given = {
                "features": features, "labels": labels, "mode": mode, "params": dict(self.params), "config": self.config
            }  # fmt: skip
            takes = _names("Estimator", "model_fn", self._model_fn, _MODEL_ARGUMENTS)
            with self.strategy.scope(), variable_creator_scope(_ByName(self._created)):
                spec: Any = self._model_fn(**{name: given[name] for name in takes})
            if not isinstance(spec, EstimatorSpec):
                got = type(spec).__name__
                raise TypeError(explain("Estimator", "model_fn", expected="to return an EstimatorSpec", got=got))
            known = self._specs[mode] = spec
        return known

    def input(self, input_fn: Callable[..., Any], mode: str, repeat: bool = False) -> tuple[DistributedDataset, int]:
        """Return an input function's data, distributed, and the number of its steps, negative if unknown. Collective."""
        takes = _names("Estimator", "input_fn", input_fn, _INPUT_ARGUMENTS)
        given = {"mode": mode, "params": dict(self.params), "config": self.config}
        chosen = {name: given[name] for name in takes if name in given}
        strategy = self.strategy
        if "input_context" in takes:

            def of_worker(input_context: InputContext) -> Any:
                return input_fn(**chosen, input_context=input_context)

            data = strategy.distribute_datasets_from_function(of_worker)
            return data, self._length(data)
        dataset = input_fn(**chosen)
        if isinstance(dataset, DistributedDataset):
            return dataset, self._length(dataset)
        if not isinstance(dataset, Dataset):
            got = type(dataset).__name__
            raise TypeError(explain("Estimator", "input_fn", expected="to return a dataset of ms.data", got=got))
        data = strategy.distribute_dataset(dataset)
        steps = self._length(data)
        return (strategy.distribute_dataset(dataset.repeat()) if repeat and steps > 0 else data), steps

    def _length(self, data: DistributedDataset) -> int:
        """Return the number of steps in the data, as the first reading rank knows it. Collective."""
        strategy = self.strategy
        return int(strategy.broadcast_object(data.cardinality(), root=Loop(strategy).first))

    # actions

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[Callback] = (),
        steps: int | None = None,
        max_steps: int | None = None,
    ) -> Estimator:
        """Train from the newest checkpoint on, and save one at the times of the RunConfig and at the end. Collective.

        It ends after `steps`, at step `max_steps`, or at the end of the data; or by a hook, or `should_stop`. The data
        continue at the checkpoint's position.

        Args:
            input_fn: returns a dataset; it may take mode, params, config and input_context.
            hooks: callbacks; their `on_epoch_end` is called before each checkpoint, with the results since the one before.
            steps: the number of steps.
            max_steps: the last step, counted over all runs; with parameter servers each worker's.

        Returns:
            Itself.

        Raises:
            ValueError: both steps and max_steps; data of unknown length end before the next checkpoint.
        """
        if steps is not None and max_steps is not None:
            expected, got = "steps or max_steps", "both"
            raise ValueError(explain("Estimator.train", "steps", expected=expected, got=got))
        refuse_best_weights("Estimator.train", hooks)
        data, length = self.input(input_fn, ModeKeys.TRAIN, repeat=True)
        logs = JSONLogger(self.model_dir / "train.jsonl", append=True)
        seconds = self.config.save_checkpoints_secs
        interval = None if seconds is None else _Interval(self.strategy, seconds)
        trainer = self.make_trainer(data, ModeKeys.TRAIN, [logs, *([] if interval is None else [interval]), *hooks])
        for hook in hooks:
            if isinstance(hook, ModelHook):
                hook.prepare()
        self._warm_start()
        if len(self._specs) > 1:  # files of before another mode's first call lack the variables that only it creates
            self.checkpoints.restore_file = self._restore_weights
        if steps is not None or length > 0:
            notes = self.checkpoints.restore_latest()
            begun = 0 if notes is None else notes["step"]
            ends = [begun + number for number in (steps, length) if number is not None and number > 0]
            max_steps = min([*ends, *([] if max_steps is None else [max_steps])])
        trainer.fit(
            data, sys.maxsize, steps_per_epoch=interval or self.config.save_checkpoints_steps, max_steps=max_steps
        )
        return self

    def _warm_start(self) -> None:
        """Assign the values of `warm_start_from`, unless there is a checkpoint. Collective."""
        strategy, settings = self.strategy, self._warm
        if settings is None or strategy.broadcast_object(self.checkpoints.latest()) is not None:
            return
        if not isinstance(settings, WarmStartSettings):
            settings = WarmStartSettings(settings)
        given = Path(settings.ckpt_to_initialize_from).absolute()
        path = strategy.broadcast_object(newest_file(given) if given.is_dir() else given)
        if path is None:
            expected, got = "a file, or a folder with a checkpoint", f"the folder {given} without one"
            raise ValueError(explain("Estimator", "warm_start_from", expected=expected, got=got))
        where = locations(strategy.extended.placement)
        names = settings.names({where[one.name].name: one.trainable for one in weights_of(strategy)})
        assign_from_file("Estimator: warm_start_from", strategy, path, names)
        if strategy.rank == 0:
            logger.info("Estimator: %d variables start with values of %s", len(names), path)

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Return the results of the newest checkpoint, or of another one, and its "global_step". Collective.

        They are also appended to `eval_NAME/results.jsonl` in the folder.

        Args:
            input_fn: as of `train`.
            steps: the number of batches; None for all.
            checkpoint_path: the file; default the newest.
            name: of this evaluation.

        Raises:
            ValueError: there is no checkpoint; endless data without steps.
        """
        data, length = self.input(input_fn, ModeKeys.EVAL)
        trainer = self.make_trainer(data, ModeKeys.EVAL)
        step = self.restore(checkpoint_path)
        return self.results(trainer, data, length, steps, step, name)

    def results(
        self, trainer: Trainer, data: DistributedDataset, length: int, steps: int | None, step: int, name: str | None
    ) -> dict[str, Any]:
        """Evaluate the current model, and record the results of a step. Collective."""
        if steps is None and length == -1:
            got = "None, and data without an end"
            raise ValueError(explain("Estimator.evaluate", "steps", expected="a number of batches", got=got))
        results = {**trainer.evaluate(data, steps), "global_step": step}
        if trainer.loop.tells:
            _append(self.model_dir / ("eval" if name is None else f"eval_{name}") / "results.jsonl", results)
        return results

    def predict(self, input_fn: Callable[..., Any], checkpoint_path: str | os.PathLike[str] | None = None) -> Any:
        """Return the rows of `predict_step` for all rows of the data, in their order, on every rank. Collective.

        They are an array, or a nest as predict_step returns.

        Raises:
            ValueError: there is no checkpoint, no predict_step, or no row.
            ContextError: under parameter servers.
        """
        data, _ = self.input(input_fn, ModeKeys.PREDICT)
        trainer = self.make_trainer(data, ModeKeys.PREDICT)
        self.restore(checkpoint_path)
        return trainer.predict(data)

    def restore(self, checkpoint_path: str | os.PathLike[str] | None = None) -> int:
        """Restore the model from the newest checkpoint, or another one; return its step. Collective."""
        self.checkpoints.wait()
        strategy = self.strategy
        newest = self.checkpoints.latest() if strategy.rank == 0 else None
        path = strategy.broadcast_object(newest) if checkpoint_path is None else checkpoint_path
        if path is None:
            expected, got = "a checkpoint in it", "no file"
            raise ValueError(
                explain("Estimator", str(self.model_dir), expected=expected, got=got, remedy="Train first")
            )
        # A model for evaluation does not need the file's optimizer, and may have other metrics.
        strict = bool(self._specs) and self._specs.keys() == {ModeKeys.TRAIN}
        return int((strategy.restore(path) if strict else self._restore_weights(path))["step"])

    def _restore_weights(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Restore what a file has; it must have all trainable variables. Collective."""
        strategy, error = self.strategy, None
        if strategy.rank == 0:
            try:
                expect_trainable("Estimator", strategy, path)
            except (OSError, ValueError) as found:
                error = found
        if (error := strategy.broadcast_object(error)) is not None:
            raise error
        return strategy.restore(path, strict=False)

    def export(self, path: str | os.PathLike[str]) -> Path:
        """Write the current variables as safetensors, for other programs. Collective. See `Strategy.export`."""
        self.strategy.export(path)
        return Path(path)

    def get_variable_names(self) -> list[str]:
        """Return the names of the variables in the newest checkpoint, as this rank sees it. Local."""
        with self._file() as file:
            return sorted(map(name_of, file.names()))

    def get_variable_value(self, name: str) -> np.ndarray:
        """Return a variable from the newest checkpoint, as this rank sees it. Local.

        Raises:
            ValueError: no checkpoint, or no such variable.
        """
        with self._file() as file:
            key = f"variables/{key_of(name)}"
            form = file.forms([key_of(name)]).get(key)
            if form is None:
                known = ", ".join(map(name_of, file.names()))
                raise ValueError(explain("Estimator.get_variable_value", "name", expected=known, got=repr(name)))
            return file.read_array(key, form)

    def _file(self) -> CheckpointFile:
        path = self.checkpoints.latest()
        if path is None:
            raise ValueError(explain("Estimator", str(self.model_dir), expected="a checkpoint in it", got="no file"))
        return CheckpointFile(path)

    def close(self) -> None:
        """Close its own strategy. Collective over the ranks of this role."""
        given = self.config.train_distribute, self.config.eval_distribute
        if self._strategy is not None and self._strategy not in given:
            self._strategy.close()


def _names(function: str, argument: str, called: Callable[..., Any], known: Sequence[str]) -> list[str]:
    """Return those of some arguments that a function takes.

    Raises:
        TypeError: it requires another one.
    """
    parameters = inspect.signature(called).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return [name for name in known if name != "input_context"]
    wanted = [one.name for one in parameters if one.default is one.empty and one.kind is not one.VAR_POSITIONAL]
    if others := [name for name in wanted if name not in known]:
        raise TypeError(explain(function, argument, expected=f"to take {', '.join(known)}", got=", ".join(others)))
    return [parameter.name for parameter in parameters if parameter.name in known]


def _append(path: Path, results: Mapping[str, Any]) -> None:
    """Write a line of results; lines of later steps, from an interrupted run, are removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            if json.loads(line)["global_step"] < results["global_step"]:
                kept.append(line)
        except (ValueError, KeyError):  # an incomplete line
            continue
    kept.append(json.dumps({name: plain_array(value, "evaluate", name).tolist() for name, value in results.items()}))
    path.write_text("\n".join(kept) + "\n")

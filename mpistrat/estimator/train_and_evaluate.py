"""train_and_evaluate: ranks train, and evaluate each checkpoint, or a separate evaluator does."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from ..base.errors import explain
from ..base.files import replacing
from ..base.log import logger
from ..cluster.rendezvous import wait_for_ranks
from ..train import EarlyStopping, Loop, Trainer
from .estimator import Estimator, ModelHook, evaluator_elsewhere
from .specs import EvalSpec, ModeKeys, TrainSpec, refuse_best_weights

__all__ = ["train_and_evaluate"]

_POLL_SECONDS = 1.0
_START = "train_and_evaluate"
_ENDED = "ended.json"  # the last step, written once training has ended


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, Any] | None, list[Path]]:
    """Train, and evaluate each checkpoint when it is due. Collective over the job.

    The training ranks evaluate, unless a rank of this job is the evaluator (`mpistrat run --evaluator`, or its task in
    TF_CONFIG), or TF_CONFIG's cluster has one. An evaluator follows the folder's checkpoints; training never waits for it,
    and it never stops training: it logs an error, and continues with the next checkpoint. It ends when training has ended and
    the last checkpoint is evaluated. It may be a separate job with the same folder.

    After a stop (`estimator.strategy.should_stop()`) end the program; a restarted one resumes.

    Args:
        estimator: the model.
        train_spec: settings of training.
        eval_spec: settings of evaluations.

    Returns:
        On evaluating ranks the last results, with "global_step", and the files exported then; else (None, []).

    Example:
        >>> ms.estimator.train_and_evaluate(  # doctest: +SKIP
        ...     estimator,
        ...     ms.estimator.TrainSpec(train_input, max_steps=10_000),
        ...     ms.estimator.EvalSpec(test_input),
        ... )

    Source: https://www.tensorflow.org/api_docs/python/tf/estimator/train_and_evaluate.
    """
    split = estimator.split
    beside = split.has_evaluator or evaluator_elsewhere()
    if eval_spec.input_fn is None and (split.is_evaluator or not beside):
        remedy = "None is for ranks that train next to an evaluator: mpistrat run --evaluator, or its task in TF_CONFIG"
        expected = "a function, as this rank evaluates"
        raise ValueError(explain("EvalSpec", "input_fn", expected=expected, got="None", remedy=remedy))
    refuse_best_weights("EvalSpec", eval_spec.hooks)
    if split.is_evaluator:
        if split.world.size > split.comm.size:
            wait_for_ranks(split.world, _START)
        return _Evaluator(estimator, train_spec, eval_spec).run()
    strategy = estimator.strategy
    if strategy.rank == 0:
        (estimator.model_dir / _ENDED).unlink(missing_ok=True)
    if split.has_evaluator:
        wait_for_ranks(split.world, _START)
    in_place = None if beside else _InPlace(estimator, eval_spec)
    hooks = [*train_spec.hooks, *([] if in_place is None else [in_place])]
    finished = False
    try:
        estimator.train(train_spec.input_fn, hooks, max_steps=train_spec.max_steps)
        finished = not strategy.should_stop()
    finally:
        if strategy.rank == 0:
            _mark_ended(estimator, finished)
    return (None, []) if in_place is None else in_place.last(finished)


def _mark_ended(estimator: Estimator, finished: bool) -> None:
    steps = estimator.checkpoints.steps()
    estimator.model_dir.mkdir(parents=True, exist_ok=True)
    with replacing(estimator.model_dir / _ENDED) as beside:
        beside.write_text(json.dumps({"step": steps[-1] if steps else 0, "finished": finished}))


class _Evaluation:
    """A repeated evaluation: its data, its hooks, its exporters."""

    def __init__(self, estimator: Estimator, spec: EvalSpec) -> None:
        self._estimator, self._spec = estimator, spec
        assert spec.input_fn is not None
        self._data, self._length = estimator.input(spec.input_fn, ModeKeys.EVAL)
        self._trainer: Trainer | None = None
        self.results: dict[str, Any] | None = None
        self.exports: list[Path] = []

    @property
    def trainer(self) -> Trainer:
        """The loop that evaluates."""
        if self._trainer is None:
            self._trainer = self._estimator.make_trainer(self._data, ModeKeys.EVAL)
        return self._trainer

    def __call__(self, loop: Loop, step: int, final: bool) -> None:
        """Evaluate the current model. Collective."""
        estimator, spec = self._estimator, self._spec
        self.results = estimator.results(self.trainer, self._data, self._length, spec.steps, step, spec.name)
        for hook in spec.hooks:
            hook.on_epoch_end(loop, self.results)
        self.export(final or loop.stop_training)

    def export(self, final: bool) -> None:
        """Offer the model to the exporters."""
        assert self.results is not None
        estimator = self._estimator
        path = estimator.checkpoints.path(self.results["global_step"])
        offered = [
            exporter.export(estimator, estimator.model_dir / "export" / exporter.name, path, self.results, final)
            for exporter in self._spec.exporters
        ]
        self.exports = [found for found in offered if found is not None]


@final
class _InPlace(ModelHook):
    """An evaluation before a checkpoint, on all training ranks, if due by the first rank's clock."""

    def __init__(self, estimator: Estimator, spec: EvalSpec) -> None:
        self._estimator, self._spec = estimator, spec
        self._evaluation: _Evaluation | None = None
        self._next = 0.0

    def prepare(self) -> None:
        if self._evaluation is None:
            self._evaluation = _Evaluation(self._estimator, self._spec)
            self._evaluation.trainer  # noqa: B018  # creates the variables of the model's evaluation

    def on_train_begin(self, loop: Loop) -> None:
        self._loop = loop

    def on_epoch_end(self, loop: Loop, logs: Mapping[str, Any]) -> None:
        assert self._evaluation is not None
        if loop.strategy.broadcast_object(time.monotonic() >= self._next, root=loop.first):
            self._evaluation(loop, loop.step, final=False)
            self._next = time.monotonic() + self._spec.throttle_secs

    def state(self) -> dict[str, Any]:
        return {"hooks": [hook.state() for hook in self._spec.hooks]}

    def load(self, state: dict[str, Any]) -> None:
        for hook, kept in zip(self._spec.hooks, state["hooks"], strict=False):
            hook.load(kept)

    def last(self, finished: bool) -> tuple[dict[str, Any] | None, list[Path]]:
        """Evaluate the final model, unless that is done, and return results and exports. Collective."""
        evaluation = self._evaluation
        assert evaluation is not None
        step = self._loop.strategy.broadcast_object(self._loop.step, root=self._loop.first)
        if finished:
            if evaluation.results is None or evaluation.results["global_step"] != step:
                evaluation(self._loop, step, final=True)
            else:
                evaluation.export(final=True)
        return evaluation.results, evaluation.exports


@final
class _Evaluator:
    """The rank that evaluates the checkpoints of other ranks."""

    def __init__(self, estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> None:
        self._estimator, self._spec, self._max_steps = estimator, eval_spec, train_spec.max_steps
        self._together = estimator.split.has_evaluator and estimator.split.world.size > 1
        self._began = time.monotonic()
        self._old = None if self._together else self._read_mark()  # perhaps of an earlier run
        self._evaluation: _Evaluation | None = None

    def run(self) -> tuple[dict[str, Any] | None, list[Path]]:
        """Evaluate until training has ended."""
        stops = [hook for hook in self._spec.hooks if isinstance(hook, EarlyStopping)]
        if stops:
            logger.warning(
                "train_and_evaluate: an evaluator of its own cannot stop training: EarlyStopping there has no effect"
            )
        tried: Path | None = None
        due = self._began + self._spec.start_delay_secs
        while not self._estimator.strategy.should_stop():
            ended = self._ended()
            newest = self._estimator.checkpoints.latest()
            if newest is not None and newest != tried and (ended or time.monotonic() >= due):
                tried, due = newest, time.monotonic() + self._spec.throttle_secs
                self._try(newest, ended)
                continue
            if ended or self._reached():
                break
            time.sleep(min(_POLL_SECONDS, max(0.05, self._spec.throttle_secs)))
        evaluation = self._evaluation
        if evaluation is None or evaluation.results is None:
            return None, []
        return evaluation.results, evaluation.exports

    def _try(self, path: Path, ended: bool) -> None:
        """Evaluate a file; log an error, and leave training alone."""
        try:
            if self._evaluation is None:
                self._evaluation = _Evaluation(self._estimator, self._spec)
            loop = self._evaluation.trainer.loop  # the model is created by now
            loop.step = step = self._estimator.restore(path)
            final = ended or (self._max_steps is not None and step >= self._max_steps)
            self._evaluation(loop, step, final)
            loop.epoch += 1
        except Exception as error:
            if isinstance(error, OSError) and not path.exists():
                logger.info("train_and_evaluate: %s was removed before it was evaluated", path)
            else:
                logger.exception("train_and_evaluate: the evaluator skips %s", path)

    def _reached(self) -> bool:
        results = None if self._evaluation is None else self._evaluation.results
        return results is not None and self._max_steps is not None and results["global_step"] >= self._max_steps

    def _ended(self) -> bool:
        """Return whether training has ended, in this job or for good."""
        mark = self._read_mark()
        if mark is None:
            return False
        text = mark[0]
        if mark == self._old and time.monotonic() - self._began < max(self._spec.start_delay_secs, 2 * _POLL_SECONDS):
            return False
        return self._together or bool(json.loads(text)["finished"])

    def _read_mark(self) -> tuple[str, float] | None:
        path = self._estimator.model_dir / _ENDED
        try:
            return path.read_text(), path.stat().st_mtime
        except OSError:
            return None

"""The parts of a step by strategy and option. Of each part the first row that fits is used.

An option that changes steps consists of rows here and the file they name. A file is loaded when a row of it is used.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, final

from ..arena.arena import Arena
from ..comm.arrays import is_gpu
from ..optimizers.core import OptimizerCore
from ..optimizers.rule import UpdateRun
from ..variables.placement import Placement
from ..variables.variable import Variable
from .interface import NodeRounds, OptionCheck, Starter, StepParts

__all__ = ["TABLE", "Row", "Steps", "check_options", "chosen"]


class Row(NamedTuple):
    """One implementation of a part.

    Attributes:
        part: a field of `StepParts`, a product of `Steps`, "check", which `check_options` calls, or "lacking", which returns a
            part of `Placement.lacking`.
        name: the strategy or option that uses it.
        fits: returns whether it is used, for a placement, an arena or an array.
        file, maker: the function or class that creates it, in this folder.
    """

    part: str
    name: str
    fits: Callable[[Any], bool]
    file: str
    maker: str


def _every(_: object) -> bool:
    return True


def _hands_over(placement: Placement) -> bool:
    return not placement.arenas.keeps_gradients


def _is_given(name: str) -> Callable[[OptionCheck], bool]:
    return lambda asked: name in asked.step.given()


def _has_local_steps(placement: Placement) -> bool:
    return placement.local_steps is not None


def _on_several_nodes(placement: Placement) -> bool:
    return placement.group.num_nodes > 1


def _has_grid(placement: Placement) -> bool:
    return placement.grid is not None


def _on_gpu(placement: Placement) -> bool:
    return placement.arenas.on_gpu


def _has_copies(arena: Arena) -> bool:
    return len(arena.copies) > 1


def _rounds_weights(arena: Arena) -> bool:
    return not arena.form.exact


def _sharded(arena: Arena) -> bool:
    return arena.sharded


TABLE = (
    Row("check", "local steps", _is_given("local_steps"), "outer", "check"),
    Row("check", "fewer bytes", _is_given("wire"), "fewer_bytes", "check"),
    Row("check", "sharded gradients", _is_given("sharded_gradients"), "handed_over", "check"),
    Row("lacking", "local steps", _has_local_steps, "outer", "lacking"),
    Row("lacking", "sharded gradients", _hands_over, "handed_over", "lacking"),
    Row("sums", "sharded gradients", _hands_over, "handed_over", "HandedOverSums"),
    Row("sums", "local steps", _has_local_steps, "sums", "OfNode"),
    Row("sums", "every other", _every, "sums", "OfAll"),
    Row("starter", "sharded gradients", _hands_over, "handed_over", "HandOver"),
    Row("starter", "GPUs", _on_gpu, "early_on_gpu", "EarlyOnGpu"),
    Row("starter", "early sums", _on_several_nodes, "early_start", "EarlyStart"),
    Row("starter", "every other", _every, "interface", "Starter"),
    Row("publish", "several GPUs on a rank", _has_copies, "publish", "ToDevices"),
    Row("publish", "fewer bytes", _rounds_weights, "fewer_bytes", "ToNodesInFewerBytes"),
    Row("publish", "slots divided over nodes", _sharded, "publish", "ToNodes"),
    Row("publish", "every other", _every, "interface", "Publish"),
    Row("rounds", "local steps", _has_local_steps, "outer", "OuterSteps"),
    Row("rounds", "every other", _every, "interface", "NodeRounds"),
    Row("norms", "local steps", _has_local_steps, "outer", "OverOwnNode"),
    Row("norms", "every other", _every, "norms", "OverAll"),
    Row("replica", "mesh", _has_grid, "mesh", "ReplicaParts"),
    Row("replica", "every other", _every, "interface", "Replica"),
    Row("engine", "GPUs", is_gpu, "arena_step", "whole_arenas"),
    Row("engine", "CPUs", _every, "arena_step", "blocks_in_cache"),
    Row("stream", "GPUs", _on_gpu, "on_stream", "StepOnStream"),
    Row("stream", "CPUs", _every, "interface", "of_the_program"),
)


def check_options(asked: OptionCheck) -> None:
    """Raise an error unless a strategy can have its options."""
    for row in TABLE:
        if row.part == "check" and row.fits(asked):
            _maker(row)(asked)


def _maker(row: Row) -> Any:
    return getattr(import_module(f"{__package__}.{row.file}"), row.maker)


def chosen(part: str, of: Any) -> Any:
    """Return the maker of a part, for a placement, an arena or an array.

    Example:
        >>> chosen("engine", np.zeros(3)).__name__
        'blocks_in_cache'
    """
    return _maker(next(row for row in TABLE if row.part == part and row.fits(of)))


@final
class Steps:
    """The factory of a strategy's steps, which its `Placement` offers to optimizers."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()  # of starters
        for row in TABLE:
            if row.part == "lacking" and row.fits(placement):
                placement.lacking.update(_maker(row)(placement))

    @functools.cached_property
    def parts(self) -> StepParts:
        """The parts, created with the first step."""
        from .sums import OfOne

        placement = self._placement
        return StepParts(
            sums=chosen("sums", placement)(placement),
            no_sums=OfOne(placement),
            new_norms=lambda: chosen("norms", placement)(placement),
            publish=lambda arena, *rest: chosen("publish", arena)(arena, *rest),
            engine_of=lambda values: chosen("engine", values)(values),
            replica_of=functools.partial(chosen("replica", placement), placement),
        )

    def forget_step(self) -> None:
        """Drop the announced or submitted gradients of a step that failed. Call it on every rank."""
        for owner in list(self._owners):
            owner.forget()

    def close(self) -> None:
        """Free the memory of sums."""
        if "parts" in vars(self):
            self.parts.sums.close()

    def new_starter(self, owner: Any) -> Starter:
        """Return the starter of sums that one optimizer's program announces; a failed step calls `owner.forget()`."""
        self._owners.add(owner)
        made: Starter = chosen("starter", self._placement)(self._placement)
        return made

    def new_rounds(self) -> NodeRounds:
        """Return the rounds of nodes, for one optimizer."""
        made: NodeRounds = chosen("rounds", self._placement)(self._placement)
        return made

    def new_step(self, core: OptimizerCore, variables: Sequence[Variable], left_out: Sequence[str]) -> UpdateRun:
        """Return the step of an optimizer on variables. Call it on all ranks; `left_out`: variables without a gradient."""
        from .training_step import TrainingStep

        return TrainingStep(core, self.parts, variables, left_out)

    def in_order(self, step: UpdateRun) -> UpdateRun:
        """Return any step, ordered with the program's computation."""
        made: UpdateRun = chosen("stream", self._placement)(step)
        return made

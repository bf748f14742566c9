"""The definition of an optimizer, from which other processes of the job can create the same one."""

from __future__ import annotations

from typing import Any, NamedTuple

from .core import find
from .hyperparameters import Rate
from .optimizer import Optimizer

__all__ = ["Definition", "definition_of", "make_defined"]

_UNDEFINED = ("_core", "slot_names")  # attributes that a definition stores separately, or not at all


class Definition(NamedTuple):
    """The data of the same optimizer in another process of the job, without its steps and slots.

    Attributes:
        ordinal: see `OptimizerCore`.
        kind: its class.
        rate: the learning rate that it was given.
        base: arguments of `Optimizer.__init__`.
        own: its other attributes, in the order of its description.
    """

    ordinal: int
    kind: type[Optimizer]
    rate: Rate
    base: dict[str, Any]
    own: dict[str, Any]


def definition_of(optimizer: Optimizer) -> Definition:
    """Return the definition of an optimizer, for `make_defined`."""
    own = {name: value for name, value in vars(optimizer).items() if name not in _UNDEFINED}
    core = optimizer._core
    base = {"slot_names": optimizer.slot_names, "slot_start": core.slot_start}
    return Definition(core.ordinal, type(optimizer), core.given_rate, base, own)


def make_defined(definition: Definition) -> Optimizer:
    """Return the optimizer of a definition, created if this process has none, with the definition's attributes."""
    optimizer: Optimizer | None = find(definition.ordinal)
    if optimizer is None:
        optimizer = definition.kind.__new__(definition.kind)
        Optimizer.__init__(optimizer, definition.rate, **definition.base)
        optimizer._core.take_next_ordinal()
        optimizer._core.take_ordinal(definition.ordinal)
    mine = vars(optimizer)
    for name in definition.own:
        mine.pop(name, None)  # to get the definition's order
    mine.update(definition.own)
    optimizer.learning_rate = definition.rate  # this also updates the descriptions of its steps
    return optimizer

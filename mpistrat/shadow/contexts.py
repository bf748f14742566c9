"""The contexts of `ms.shadow`, and the function that programs call for tensors of their own."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..base.arguments import integer
from ..base.context import OBSERVERS
from ..base.errors import explain
from .comparing import Comparing, ShadowReport
from .folder import Folder
from .session import Recording, Rounding, Session

__all__ = ["ELEMENTS", "STEPS", "compare", "installed", "record", "round_off", "tensor"]

STEPS, ELEMENTS = 10, 1 << 16  # by default
_KINDS = ("rows", "sum", "all")
_Path = str | os.PathLike[str]


@contextlib.contextmanager
def record(folder: _Path, *, steps: int = STEPS, elements: int = ELEMENTS) -> Iterator[None]:
    """Record the tensors of a program's first steps on one process, in a `with` block around it.

    It records parameters at the start of each step, digests of the rows of the arguments of `strategy.run` and of inputs of torch
    modules, and of batches of Keras models, outputs of torch modules, gradients, and parameters after the update. A run that the
    folder has is replaced.

    Args:
        folder: for one file of each step.
        steps: to record.
        elements: of each tensor, at equal distances; 0 for all.

    Raises:
        ValueError: a negative number; in the block: several ranks, or several replicas; at its end: no step was taken.
        OSError: the folder cannot be written.

    Example:
        >>> with ms.shadow.record("reference", steps=3):  # doctest: +SKIP
        ...     train()
    """
    function = "ms.shadow.record"
    integer(function, "elements", elements, 0)
    found = Folder(Path(folder), function)
    found.clear()
    with installed(Recording(found, integer(function, "steps", steps, 1), elements)):
        yield


@contextlib.contextmanager
def round_off(folder: _Path, *, steps: int = STEPS) -> Iterator[None]:
    """Measure how far rounding carries, in a `with` block around the recorded program, on one process.

    The program runs again with parameters that are changed by rounding before each step. The differences become the tolerance of
    `compare`. Two repetitions are enough.

    Args:
        folder: of `record`.
        steps: as recorded.

    Raises:
        ValueError: in the block: nothing was recorded; several ranks; other parameters or rows than those recorded; at its end:
            fewer steps, or none.

    Example:
        >>> with ms.shadow.round_off("reference", steps=3):  # doctest: +SKIP
        ...     train()
    """
    function = "ms.shadow.round_off"
    with installed(Rounding(Folder(Path(folder), function), integer(function, "steps", steps, 1))):
        yield


@contextlib.contextmanager
def compare(folder: _Path, *, steps: int = STEPS) -> Iterator[ShadowReport]:
    """Compare a program's first steps with the recorded ones, in a `with` block around it. Steps in it are collective.

    Args:
        folder: of `record`, which each rank reads.
        steps: at most; the recorded ones if these are fewer.

    Yields:
        The report, whose text has how much was compared, and what could not be.

    Raises:
        DifferenceError: on every rank, at the end of the first step that differs; at the end of the block, if the program caught
            it, or took another number of steps.
        ValueError: on every rank: nothing was recorded; a rank with several replicas; at the end of the block: no step was taken.

    Example:
        >>> with ms.shadow.compare("reference") as report:  # doctest: +SKIP
        ...     train()
    """
    function = "ms.shadow.compare"
    session = Comparing(Folder(Path(folder), function), integer(function, "steps", steps, 1))
    with installed(session):
        yield session.report


@contextlib.contextmanager
def installed(session: Session) -> Iterator[None]:
    """Return the context in which a session sees the program's tensors. Local."""
    if any(isinstance(each, Session) for each in OBSERVERS):
        raise ValueError(explain("ms.shadow", "", expected="one context of ms.shadow", got="one inside another"))
    with contextlib.ExitStack() as stack:
        OBSERVERS.append(session)
        stack.callback(OBSERVERS.remove, session)
        if "torch" in sys.modules:
            from ..torch.observed import hooked

            stack.enter_context(hooked(session))
        end = None
        try:
            yield
        except SystemExit as error:
            if error.code:
                raise
            end = error
        session.close()
        if end is not None:
            raise end


def tensor(name: str, value: Any, of: str = "rows") -> None:
    """Record or compare a tensor of the program, inside a step. Without a context of `ms.shadow` it does nothing. Local.

    Args:
        name: of the tensor, the same on all ranks.
        value: an array of floating numbers, of NumPy, torch or JAX.
        of: the relation to one process. "rows": one of the axes is the batch's, and each rank has its rows. "sum": the sum over
            the ranks is the tensor of one process. "all": each rank has it.

    Raises:
        ValueError: another relation.

    Example:
        >>> ms.shadow.tensor("hidden", np.ones((4, 3)))
    """
    if of not in _KINDS:
        raise ValueError(explain("ms.shadow.tensor", "of", expected=f"one of {', '.join(_KINDS)}", got=repr(of)))
    for each in OBSERVERS:
        if isinstance(each, Session):
            each.value(of, name, value)

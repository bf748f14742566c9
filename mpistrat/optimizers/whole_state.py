"""A rule that runs on whole tensors: what it needs of its variables, and its state, arrays of any shape in variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from ..base.errors import explain
from ..variables import Variable
from ..variables.kinds import receiver_of

__all__ = ["StateArray", "require_whole"]


def require_whole(function: str, variables: Sequence[Variable], rule: str, remedy: str) -> None:
    """Check that the variables of a rule on whole tensors are whole on each node.

    Raises:
        ValueError: servers keep them, ranks divide one, or nodes train by themselves.
    """
    placement = variables[0].placement
    divided = next((v.name for v in variables if v.part is not None and v.part.split), None)
    if placement.store is not None:
        got = "parameters that servers keep"
    elif divided is not None:
        got = f"parts of {divided}, which ranks divide"
    elif placement.local_steps is not None:
        got = "nodes that train by themselves (local_steps)"
    else:
        return
    expected = f"parameters that are whole on each node, for {rule}"
    raise ValueError(explain(function, "optimizer", expected=expected, got=got, remedy=remedy))


@final
class StateArray:
    """An array of a rule's state, in a variable: files have it, and a node has one copy. Making one is collective.

    Args:
        name: of the variable.
        value: before the first step.

    Attributes:
        variable: which has it.
    """

    def __init__(self, name: str, value: np.ndarray) -> None:
        value = value.astype(np.uint8) if value.dtype == np.bool_ else value
        self.variable = Variable(value, trainable=False, name=name)

    def parts_of(self, value: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Return copies of the elements of a new value that this rank writes, with the number of the first of each.

        Raises:
            RuntimeError: another shape.
        """
        variable = self.variable
        if value.shape != variable.shape:
            expected, got = f"state of shape {variable.shape}, as before the first step", f"shape {value.shape}"
            raise RuntimeError(explain("Optimizer.step", variable.name, expected=expected, got=got))
        flat = value.astype(variable.dtype).reshape(-1)
        return [(low, flat[low:high].copy()) for low, high in receiver_of(variable).ranges]

    def write(self, parts: Sequence[tuple[int, np.ndarray]]) -> None:
        """Write what `parts_of` returned: all ranks of a node have read the old value."""
        receiver = receiver_of(self.variable)
        for low, part in parts:
            receiver.take(low, part)

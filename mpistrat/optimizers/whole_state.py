"""Rules on whole tensors: their requirements, and their state, arrays of any shape in variables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from ..base.errors import explain
from ..variables import Variable
from ..variables.kinds import receiver_of

__all__ = ["StateArray", "require_whole"]


def require_whole(function: str, variables: Sequence[Variable], rule: str, remedy: str) -> None:
    """Raise ValueError unless the variables of a rule on whole tensors are whole on each node."""
    placement = variables[0].placement
    divided = next((v.name for v in variables if v.part is not None and v.part.split), None)
    if placement.optimizers.not_whole:
        got = placement.optimizers.not_whole
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
    """An array of a rule's state, in a variable: it is in files, and a node has one copy. Creation is collective.

    Args:
        name: of the variable.
        value: before the first step.

    Attributes:
        variable: the variable with the array.
    """

    def __init__(self, name: str, value: np.ndarray) -> None:
        value = value.astype(np.uint8) if value.dtype == np.bool_ else value
        self.variable = Variable(value, trainable=False, name=name)

    def parts_of(self, value: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Return copies of the elements of a new value that this rank writes, each with the number of its first one.

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
        """Write the parts of `parts_of`, after all ranks of a node have read the old value."""
        receiver = receiver_of(self.variable)
        for low, part in parts:
            receiver.take(low, part)

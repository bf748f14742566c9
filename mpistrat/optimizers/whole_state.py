"""State of a rule that runs on whole tensors: arrays of any shape, in variables, so files have them and a node has one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from ..errors import explain
from ..variables import Variable

__all__ = ["StateArray"]


@final
class StateArray:
    """An array of a rule's state. Making one is collective.

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
        return [(low, flat[low:high].copy()) for low, high in variable.receiver().ranges]

    def write(self, parts: Sequence[tuple[int, np.ndarray]]) -> None:
        """Write what `parts_of` returned: all ranks of a node have read the old value."""
        receiver = self.variable.receiver()
        for low, part in parts:
            receiver.take(low, part)

"""What training has made, and whether two runs have made the same of it, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def state_of(variables: Sequence[Any], optimizer: Any) -> dict[str, Any]:
    """The weights, and the optimizer's slots of each variable, by name."""
    found = {v.name: v.numpy() for v in variables}
    for name, slots in optimizer.get_state()["slots"].items():
        found.update({f"{name} {slot}": array for slot, array in slots.items()})
    return found


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any], what: str = "") -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=f"{what} {name}")

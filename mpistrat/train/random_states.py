"""The states of random generators that a program has beside `ms.rng`: Python's, NumPy's global one, PyTorch's on the CPU."""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["gather_states", "get_states", "hand_back", "set_states"]

_RANKS = 256  # up to so many the states are saved, 5 KB each


def gather_states(strategy: Any) -> list[dict[str, Any]]:
    """Return the states of all ranks; none where these are very many. Collective."""
    return list(strategy.all_gather_object(get_states())) if strategy.size <= _RANKS else []


def hand_back(strategy: Any, states: Sequence[Mapping[str, Any]]) -> None:
    """Let each rank go on from its states among those of `gather_states`; on another number of ranks it does nothing."""
    if len(states) == strategy.size:
        set_states(states[strategy.rank])


def get_states() -> dict[str, Any]:
    """Return this process's states, as what JSON can hold: some kilobytes.

    Example:
        >>> states, number = get_states(), np.random.rand()
        >>> set_states(states)
        >>> np.random.rand() == number
        True
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 - the one that programs use
    states: dict[str, Any] = {
        "python": [version, _text(np.array(words, np.uint32)), gauss],
        "numpy": [str(name), _text(np.asarray(keys)), int(position), int(has_gauss), float(cached)],
    }
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = _text(torch.get_rng_state().numpy())
    return states


def set_states(states: Mapping[str, Any]) -> None:
    """Let the generators go on from states that `get_states` returned."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(_array(words, np.uint32).tolist()), gauss))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, _array(keys, np.uint32), *rest))  # noqa: NPY002
    torch: Any = sys.modules.get("torch")
    if torch is not None and "torch" in states:
        torch.set_rng_state(torch.from_numpy(_array(states["torch"], np.uint8)))


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _array(text: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype).copy()

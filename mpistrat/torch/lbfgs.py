"""The state of torch's LBFGS as arrays of fixed shapes: its history grows, and variables cannot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..base.errors import explain

__all__ = ["is_lbfgs", "new_arrays", "packed", "unpacked"]

_NUMBERS = ("func_evals", "n_iter", "t", "prev_loss", "H_diag")
_VECTORS = ("d", "prev_flat_grad")
_HISTORY = ("old_dirs", "old_stps")  # one vector for each of the last iterations, and a number in "ro"


def is_lbfgs(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is torch's LBFGS, or a subclass."""
    return isinstance(optimizer, torch.optim.LBFGS)


def new_arrays(parameters: Sequence[torch.Tensor], group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the first parameter's arrays before the first step: 2 · history_size + 2 vectors."""
    empty = torch.cat(
        [parameter.detach().new_empty(0) for parameter in parameters]
    )  # of the dtype of their gradients together
    size, length = sum(parameter.numel() for parameter in parameters), int(group["history_size"])
    arrays = {name: torch.zeros((), dtype=torch.float64) for name in (*_NUMBERS, "length")}
    arrays |= {name: empty.new_zeros(size) for name in _VECTORS}
    arrays |= {name: empty.new_zeros((length, size)) for name in _HISTORY}
    return arrays | {"ro": empty.new_zeros(length)}


def packed(state: Mapping[str, Any], arrays: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return new arrays of a state, without "al", which torch recomputes in each iteration.

    Args:
        state: of the first parameter, as torch has it.
        arrays: as `new_arrays` returned them.

    Raises:
        RuntimeError: a longer history than the arrays hold.
    """
    length, room = len(state.get("old_dirs") or ()), len(arrays["ro"])
    if length > room:
        expected, got = f"at most {room}, as when it was distributed", str(length)
        raise RuntimeError(explain("LBFGS.step", "history_size", expected=expected, got=got))
    new = {name: torch.zeros_like(array) for name, array in arrays.items()}
    new["length"].fill_(length)
    for name in _NUMBERS:
        new[name].fill_(float(state.get(name) or 0))
    for name in _VECTORS:
        if state.get(name) is not None:
            new[name].copy_(state[name])
    for name in (*_HISTORY, "ro"):
        for row, value in zip(new[name], state.get(name) or (), strict=False):
            row.copy_(value)
    return new


def unpacked(arrays: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the state of `packed` arrays, in new memory."""
    state: dict[str, Any] = {name: int(arrays[name]) for name in ("func_evals", "n_iter")}
    if not state["n_iter"]:  # the first gradient was below the tolerance
        return state
    length = int(arrays["length"])
    state |= {name: float(arrays[name]) for name in ("t", "prev_loss")}
    state["H_diag"] = arrays["ro"].new_tensor(float(arrays["H_diag"]))
    state |= {name: arrays[name].clone() for name in _VECTORS}
    return state | {name: [row.clone() for row in arrays[name][:length]] for name in (*_HISTORY, "ro")}

"""Steps of optimizers as events of the recorder, so that `mpistrat top` and a run's page show a program's steps.

PyTorch calls a hook after the step of any optimizer. An event starts there and ends after the next step.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...comm.recorder import RECORDER

__all__ = ["note_steps"]

_counted: weakref.ref[Optimizer] | None = None  # of several optimizers that alternate one counts
_other: weakref.ref[Optimizer] | None = None  # another one that has taken a step since that one's last
_event = -1
_noting = False


def note_steps() -> None:
    """Record the steps of the program's optimizer from now on. A second call has no effect."""
    global _noting
    if not _noting:
        _noting = True
        register_optimizer_step_post_hook(_note)


def _note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _counted, _other, _event
    if _counted is None or _counted() is None or (_other is not None and _other() is optimizer):
        _counted = weakref.ref(optimizer)
    if _counted() is not optimizer:
        _other = weakref.ref(optimizer)
        return
    _other = None
    if _event >= 0:  # an unfinished event would enclose all later ones
        RECORDER.end(_event)
    _event = RECORDER.begin(RECORDER.name("r", "step"))

"""Steps of optimizers as events of the recorder, so that `mpistrat top` and a run's page know a program's steps.

PyTorch calls a hook after the step of any optimizer. An event begins there and ends after the next step.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...comm.recorder import RECORDER

__all__ = ["note_steps"]

_optimizer: weakref.ref[Optimizer] | None = None  # the first one that takes steps: a program may have several
_event = -1
_noting = False


def note_steps() -> None:
    """Record the steps of the program's optimizer from now on. A second call has no effect."""
    global _noting
    if not _noting:
        _noting = True
        register_optimizer_step_post_hook(_note)


def _note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    global _optimizer, _event
    if _optimizer is None or _optimizer() is None:
        _optimizer, _event = weakref.ref(optimizer), -1
    if _optimizer() is optimizer:
        if _event >= 0:
            RECORDER.end(_event)
        _event = RECORDER.begin(RECORDER.name("r", "step"))

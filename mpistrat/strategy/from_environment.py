"""The strategy that the launcher or the job script names in the environment."""

from __future__ import annotations

import inspect
from typing import Any

from ..environment import STRATEGIES, Environment
from ..errors import explain
from .central_storage import CentralStorageStrategy
from .mirrored import MirroredStrategy
from .multi_worker_mirrored import MultiWorkerMirroredStrategy
from .one_device import OneDeviceStrategy
from .strategy import Strategy

__all__ = ["add_strategy", "strategy_from_environment"]

_NAME = "strategy_from_environment"
_CLASSES: dict[str, type[Strategy]] = {
    "one_device": OneDeviceStrategy,
    "mirrored": MirroredStrategy,
    "multi_worker_mirrored": MultiWorkerMirroredStrategy,
    "central_storage": CentralStorageStrategy,
}


def add_strategy(name: str, kind: type[Strategy]) -> None:
    """Let the environment name a strategy that is made above this floor, by one of `options.STRATEGIES`."""
    _CLASSES[name] = kind


def strategy_from_environment(default: str = "multi_worker_mirrored", **settings: Any) -> Strategy:
    """Return a new strategy of the kind that MPISTRAT_STRATEGY names. Collective.

    `mpistrat run --strategy NAME --ps N program.py` and the scripts of `mpistrat job` set MPISTRAT_STRATEGY and
    MPISTRAT_NUM_PS, so that a program need not know under which strategy it runs.

    Args:
        default: the strategy where the variable is not set: "one_device", "mirrored", "multi_worker_mirrored",
            "central_storage" or "parameter_server".
        settings: passed to the strategy. `num_ps` precedes MPISTRAT_NUM_PS.

    Raises:
        ValueError: a variable or `default` is none of the legal values, or MPISTRAT_NUM_PS is set and the strategy has no
            servers.
        TypeError: the strategy does not take a setting.

    Example:
        >>> strategy = ms.strategy_from_environment(default="one_device")
        >>> type(strategy).__name__
        'OneDeviceStrategy'
        >>> strategy.close()
    """
    environment = Environment.read()
    name = environment.strategy or default
    if name not in _CLASSES:
        raise ValueError(explain(_NAME, "default", expected=f"one of {', '.join(STRATEGIES)}", got=repr(name)))
    kind = _CLASSES[name]
    takes = [parameter for parameter in inspect.signature(kind).parameters if parameter != "self"]
    if environment.num_ps is not None:
        if "num_ps" not in takes:
            got = f"{environment.num_ps}, and the strategy is {name}"
            remedy = "Set MPISTRAT_STRATEGY=parameter_server, or unset MPISTRAT_NUM_PS"
            raise ValueError(
                explain(_NAME, "MPISTRAT_NUM_PS", expected="a strategy with servers", got=got, remedy=remedy)
            )
        settings.setdefault("num_ps", environment.num_ps)
    for setting in settings:
        if setting not in takes:
            because = "MPISTRAT_STRATEGY" if environment.strategy else "the default"
            expected = f"a setting of {kind.__name__} ({because}): {', '.join(takes)}"
            raise TypeError(explain(_NAME, setting, expected=expected, got=repr(setting)))
    return kind(**settings)

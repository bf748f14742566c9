"""All strategies in one table: the default one, and those that MPISTRAT_STRATEGY can name.

A strategy's module is loaded when it is first used. `mpistrat/__init__.py` registers the default strategy from here.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from .base.environment import STRATEGIES, Environment, not_by_name
from .base.errors import explain

if TYPE_CHECKING:
    from .base.context import Frame
    from .strategy.strategy import Strategy

__all__ = ["default_frame", "strategy_from_environment"]

_NAME = "strategy_from_environment"


def default_frame() -> Frame:
    """Create the default strategy, which is this process alone, and return its frame."""
    from .strategy.synchronous import DefaultStrategy

    return DefaultStrategy().extended.replicas[0].frame


def _class(name: str) -> type[Strategy]:
    if name == "parameter_server":
        from .parameter_server.strategy import ParameterServerStrategy

        return ParameterServerStrategy
    from .strategy import synchronous

    kinds: dict[str, type[Strategy]] = {
        "one_device": synchronous.OneDeviceStrategy,
        "mirrored": synchronous.MirroredStrategy,
        "multi_worker_mirrored": synchronous.MultiWorkerMirroredStrategy,
        "central_storage": synchronous.CentralStorageStrategy,
    }
    return kinds[name]


def strategy_from_environment(default: str = "multi_worker_mirrored", **settings: Any) -> Strategy:
    """Return a new strategy of the kind that MPISTRAT_STRATEGY names. Collective.

    `mpistrat run --strategy NAME --ps N program.py` and the scripts of `mpistrat job` set MPISTRAT_STRATEGY and
    MPISTRAT_NUM_PS, so one program runs under any strategy.

    Args:
        default: the strategy if the variable is not set: "one_device", "mirrored", "multi_worker_mirrored", "central_storage"
            or "parameter_server".
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
    if name not in STRATEGIES:
        expected, remedy = f"one of {', '.join(STRATEGIES)}", not_by_name(name)
        raise ValueError(explain(_NAME, "default", expected=expected, got=repr(name), remedy=remedy))
    kind = _class(name)
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

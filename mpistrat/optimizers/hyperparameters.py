"""Hyperparameters of an optimizer: the learning rate, the common settings, and the text that ranks compare."""

from __future__ import annotations

import inspect
import re
from abc import ABC
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, TypedDict

import numpy as np

from ..arena.values import checksum
from ..base.errors import explain
from ..base.limits import AT_LEAST_ZERO, POSITIVE, UP_TO_ONE, Limits, checked, flag, number
from ..variables.variable import Variable
from .schedules import LearningRateSchedule

__all__ = [
    "AVERAGE",
    "GRADIENT_SUM",
    "LEAST_SCALE",
    "MOST_SCALE",
    "CallableRate",
    "CommonSettings",
    "CommonSettingsButDecay",
    "Hyperparameters",
    "Rate",
    "as_rate",
    "fixed_at",
    "numbers_of",
    "private_numbers_of",
]

AVERAGE, GRADIENT_SUM = (
    "average",
    "gradient_accumulator",
)  # slots of use_ema and of gradient_accumulation_steps, as in Keras

LEAST_SCALE, MOST_SCALE = 2.0**-126, 2.0**127  # of losses: beyond, float32 is 0 or infinity for good

Rate = float | LearningRateSchedule | Callable[..., float]


class CommonSettingsButDecay(TypedDict, total=False):
    """The common arguments of all optimizers except `weight_decay`, for which AdamW has its own default."""

    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None
    loss_scale_factor: float | None
    gradient_accumulation_steps: int | None
    check_numerics: bool
    name: str | None


class CommonSettings(CommonSettingsButDecay, total=False):
    """The common arguments of all optimizers; see `Optimizer`."""

    weight_decay: float | None


# Settings with these values are not in descriptions.
_DEFAULTS: dict[str, tuple[object, ...]] = dict.fromkeys(CommonSettings.__annotations__, (None, False)) | {
    "ema_momentum": (0.99,)
}
_FIXED = ("use_ema", "gradient_accumulation_steps")  # they determine the slots
_FIXED_BY_STEPS = ("initial_accumulator_value",)  # the start value of slots
_CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")
_LIMITS = dict.fromkeys((*_CLIPS, "loss_scale_factor"), POSITIVE) | {
    "weight_decay": AT_LEAST_ZERO,
    "ema_momentum": UP_TO_ONE,
}


class Hyperparameters(ABC):
    """The settings of an `Optimizer`, each checked when it is set.

    Attributes:
        _limits: the legal values of each setting of the rule that is a number or a flag.
    """

    _limits: ClassVar[Mapping[str, Limits]] = {}
    clipnorm: float | None
    clipvalue: float | None
    global_clipnorm: float | None
    loss_scale_factor: float | None
    weight_decay: float | None
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None
    gradient_accumulation_steps: int | None
    check_numerics: bool
    name: str
    _excluded: set[Variable]
    _excluded_names: list[re.Pattern[str]]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._limits:
            value = checked(type(self).__name__, name, value, self._limits[name])
        elif name in CommonSettings.__annotations__:
            value = self._checked(name, value)
        object.__setattr__(self, name, value)

    def _checked(self, name: str, value: Any) -> Any:
        """Return a common setting in its own type.

        Raises:
            TypeError: it is not a number.
            ValueError: it is out of range, or a second kind of clipping.
        """
        kind = type(self).__name__
        if name in _LIMITS and value is not None:
            other = next((clip for clip in _CLIPS if clip != name and self.__dict__.get(clip) is not None), None)
            if name in _CLIPS and other is not None:
                expected, got = "one of clipnorm, clipvalue and global_clipnorm", f"{other} and {name}"
                remedy = f"Set {other} to None before"
                raise ValueError(explain(kind, name, expected=expected, got=got, remedy=remedy))
            return number(kind, name, value, _LIMITS[name])
        if name in ("ema_overwrite_frequency", "gradient_accumulation_steps"):
            return _steps_or_none(kind, name, value, 1 if name == "ema_overwrite_frequency" else 2)
        return flag(kind, name, value) if name in ("use_ema", "check_numerics") else value


def fixed_at(setting: str, stepped: bool) -> str:
    """Return the text of the moment since which a setting is fixed; "" if it can be changed."""
    if setting in _FIXED:
        return "was made"
    return "took its first step" if stepped and setting in _FIXED_BY_STEPS else ""


def _steps_or_none(kind: str, argument: str, value: int | None, least: int) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least):
        expected = f"None or an integer of at least {least}"
        raise ValueError(explain(kind, argument, expected=expected, got=value))
    return None if value is None else int(value)


def as_rate(kind: str, value: Any) -> Rate:
    """Return the learning rate of an optimizer: a number, or a schedule.

    Raises:
        TypeError: it is neither a number nor callable.
        ValueError: it is out of range.
    """
    if callable(value):
        return value if isinstance(value, LearningRateSchedule) else CallableRate(value)
    if (
        isinstance(value, (bool, np.bool_))
        or not isinstance(value, (int, float, np.number, np.ndarray))
        or np.ndim(value)
    ):
        got = f"{type(value).__name__} {value!r:.60}"
        expected = "a number, a LearningRateSchedule or a callable"
        raise TypeError(explain(kind, "learning_rate", expected=expected, got=got))
    return number(kind, "learning_rate", value, AT_LEAST_ZERO)


class CallableRate:
    """A callable as a schedule: called without arguments, as in Keras, or with the step if it needs one argument."""

    def __init__(self, function: Callable[..., float]) -> None:
        self.function = function
        try:
            inspect.signature(function).bind()
            self._with_step = False
        except (TypeError, ValueError):
            self._with_step = True

    def __call__(self, step: int) -> float:
        return self.function(step) if self._with_step else self.function()

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__qualname__)


def numbers_of(thing: object, without: Collection[str] = ()) -> str:
    """Return the attributes of an object that are numbers or hold some, as text that is the same on every rank."""
    own = getattr(thing, "__dict__", {}).items()
    shown = (key for key, value in own if key[:1] != "_" and key not in without and not _is_default(key, value))
    words = ((key, _word(getattr(thing, key))) for key in shown)
    return ", ".join(f"{key}={word}" for key, word in words if word)


def _is_default(key: str, value: object) -> bool:
    return key == "slot_names" or (
        key in _DEFAULTS and any(value is default or value == default for default in _DEFAULTS[key])
    )


def private_numbers_of(thing: Hyperparameters) -> str:
    """Return the same for attributes with one leading underscore."""
    own = vars(thing).items()
    words = [(key, _word(value)) for key, value in own if key[:1] == "_" and "__" not in key and key != "_core"]
    return "".join(f", {key}={word}" for key, word in words if word)


def _word(value: object) -> str:
    """Return a number, a text, or a container of them as text; "" for other values."""
    if isinstance(value, np.ndarray):
        return f"array{value.shape}#{checksum(np.ascontiguousarray(value).reshape(-1)):08x}" * (value.dtype != object)
    if isinstance(value, (list, tuple)):
        words = [_word(item) for item in value]
        return f"[{', '.join(words)}]" if words and all(words) else ""
    if isinstance(value, dict):
        words = [_word(item) for item in value.values()]
        return (
            f"{{{', '.join(f'{k!r}: {w}' for k, w in zip(value, words, strict=True))}}}" if words and all(words) else ""
        )
    return repr(value) if isinstance(value, (bool, int, float, complex, str, np.generic, type(None))) else ""

"""Hyperparameters of an optimizer: rate, count, the arguments that all have in common, and how ranks compare them."""

from __future__ import annotations

import inspect
import re
from abc import ABC
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any, ClassVar, TypedDict

import numpy as np

from ..arena.values import checksum
from ..base.arguments import integer
from ..base.errors import explain
from ..base.limits import AT_LEAST_ZERO, POSITIVE, UP_TO_ONE, Limits, checked, flag, number
from ..variables.sharded import each_variable
from ..variables.variable import Variable
from .schedules import LearningRateSchedule

__all__ = [
    "AVERAGE",
    "GRADIENT_SUM",
    "OWN",
    "Hyperparameters",
    "Rate",
    "Settings",
    "SettingsButDecay",
]

AVERAGE, GRADIENT_SUM = (
    "average",
    "gradient_accumulator",
)  # slots of use_ema and of gradient_accumulation_steps, as in Keras

Rate = float | LearningRateSchedule | Callable[..., float]

# State of an optimizer's own steps, neither described nor shared with the same one on other ranks.
OWN = frozenset(
    [
        *(
            "begun",
            "_ordinal",
            "_made_in",
            "_number",
            "_iterations",
            "_counted_from",
            "_slots",
            "_steps",
            "_variables",
            "_strategy",
        ),
        *("_slot_start", "_rate", "_revision", "_private_words", "_slots_words", "_unsaved", "_updated_first"),
    ]
)


class SettingsButDecay(TypedDict, total=False):
    """The arguments that all optimizers have in common, but for `weight_decay`, which AdamW has a default of its own for."""

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


class Settings(SettingsButDecay, total=False):
    """The arguments that all optimizers have in common; see `Optimizer`."""

    weight_decay: float | None


_ROUNDING = 1e-12  # of a schedule that ends with 0

# Values with which settings are left out of descriptions.
_DEFAULTS: dict[str, tuple[object, ...]] = dict.fromkeys(Settings.__annotations__, (None, False)) | {
    "ema_momentum": (0.99,)
}
_FIXED = ("use_ema", "gradient_accumulation_steps")  # they decide which slots there are
_FIXED_BY_STEPS = ("initial_accumulator_value",)  # slots began with it
_CLIPS = ("clipnorm", "clipvalue", "global_clipnorm")
_LIMITS = dict.fromkeys((*_CLIPS, "loss_scale_factor"), POSITIVE) | {
    "weight_decay": AT_LEAST_ZERO,
    "ema_momentum": UP_TO_ONE,
}


class Hyperparameters(ABC):
    """The hyperparameters of an `Optimizer`. Setting a public attribute makes the ranks compare it at the next step.

    Attributes:
        limits: of each setting of the rule that is a number or a flag, what it may be, whenever it is set.
    """

    limits: ClassVar[Mapping[str, Limits]] = {}
    _steps: dict[tuple[int, ...], Any]

    def _take_settings(
        self,
        weight_decay: float | None,
        clipnorm: float | None,
        clipvalue: float | None,
        global_clipnorm: float | None,
        use_ema: bool,
        ema_momentum: float,
        ema_overwrite_frequency: int | None,
        loss_scale_factor: float | None,
        gradient_accumulation_steps: int | None,
        check_numerics: bool,
    ) -> None:
        self.clipnorm: float | None = clipnorm
        self.clipvalue: float | None = clipvalue
        self.global_clipnorm: float | None = global_clipnorm
        self.loss_scale_factor: float | None = loss_scale_factor
        self.weight_decay: float | None = weight_decay
        self.use_ema: bool = use_ema
        self.ema_momentum: float = ema_momentum
        self.ema_overwrite_frequency: int | None = ema_overwrite_frequency
        self.gradient_accumulation_steps: int | None = gradient_accumulation_steps
        self.check_numerics: bool = check_numerics
        self._excluded: set[Variable] = set()
        self._excluded_names: list[re.Pattern[str]] = []
        self._private_words = ""
        self._slots_words = ""  # a hash of what `set_slots` was given
        self._iterations = 0
        self._counted_from = 0  # steps are counted alike, but may be set otherwise on one rank
        self._revision = 0
        self._unsaved: frozenset[str] = frozenset()  # settings that are not this optimizer's own
        self._rate: Rate

    def __setattr__(self, name: str, value: Any) -> None:
        known = "_steps" in self.__dict__
        fixed = known and (name in _FIXED or (name in _FIXED_BY_STEPS and bool(self._steps)))
        if fixed and value != getattr(self, name, value):
            remedy = "Make another optimizer"
            expected = f"the value that it {'was made' if name in _FIXED else 'took its first step'} with"
            raise ValueError(explain(type(self).__name__, name, expected=expected, got=repr(value), remedy=remedy))
        if name in self.limits:
            value = checked(type(self).__name__, name, value, self.limits[name])
        elif name in Settings.__annotations__:
            value = self._checked(name, value)
        object.__setattr__(self, name, value)
        if known and not name.startswith("_"):
            self._describe_steps()

    def _checked(self, name: str, value: Any) -> Any:
        """Return a setting that all optimizers have, in its own type.

        Raises:
            TypeError: it is no number.
            ValueError: it is out of range, or a second kind of clipping.
        """
        if name in _LIMITS and value is not None:
            other = next((clip for clip in _CLIPS if clip != name and self.__dict__.get(clip) is not None), None)
            if name in _CLIPS and other is not None:
                expected, got = "one of clipnorm, clipvalue and global_clipnorm", f"{other} and {name}"
                remedy = f"Set {other} to None before"
                raise ValueError(explain(type(self).__name__, name, expected=expected, got=got, remedy=remedy))
            return number(type(self).__name__, name, value, _LIMITS[name])
        if name in ("ema_overwrite_frequency", "gradient_accumulation_steps"):
            return self._steps_or_none(name, value, 1 if name == "ema_overwrite_frequency" else 2)
        return flag(type(self).__name__, name, value) if name in ("use_ema", "check_numerics") else value

    # rate and count

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step. May be set to a number, a schedule or a callable, on every rank alike."""
        return self.rate_at(self._iterations + 1)

    @learning_rate.setter
    def learning_rate(self, value: Rate) -> None:
        if not callable(value):
            if (
                isinstance(value, (bool, np.bool_))
                or not isinstance(value, (int, float, np.number, np.ndarray))
                or np.ndim(value)
            ):
                got = f"{type(value).__name__} {value!r:.60}"
                expected = "a number, a LearningRateSchedule or a callable"
                raise TypeError(explain(type(self).__name__, "learning_rate", expected=expected, got=got))
            value = number(type(self).__name__, "learning_rate", value, AT_LEAST_ZERO)
        elif not isinstance(value, LearningRateSchedule):
            value = _CallableRate(value)
        self._rate = value

    @property
    def given_learning_rate(self) -> Rate:
        """What `learning_rate` was set to: a number, a schedule, or a callable."""
        return self._rate.function if isinstance(self._rate, _CallableRate) else self._rate

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1.

        Raises:
            ValueError: a schedule or callable returned NaN, an infinity or a negative number.
        """
        rate = self._rate
        if not callable(rate):
            return rate
        found = float(rate(step - 1))
        found = 0.0 if -_ROUNDING < found < 0 else found
        if not AT_LEAST_ZERO.legal(found):
            got = f"{found} from {rate} in step {step}"
            raise ValueError(explain(type(self).__name__, "learning_rate", expected=AT_LEAST_ZERO.text, got=got))
        return found

    @property
    def iterations(self) -> int:
        """Number of updates that were made. May be set, on every rank alike."""
        return self._iterations // (self.gradient_accumulation_steps or 1)

    @iterations.setter
    def iterations(self, value: int) -> None:
        updates = integer(type(self).__name__, "iterations", value, 0)
        self._iterations = self._counted_from = updates * (self.gradient_accumulation_steps or 1)

    @property
    def calls(self) -> int:
        """How often `apply_gradients` was called: more than `iterations` where gradients are accumulated."""
        return self._iterations

    def updates_at(self, call: int) -> bool:
        """Return whether a call of `apply_gradients`, counted from 1, is an update."""
        return call % (self.gradient_accumulation_steps or 1) == 0

    def changes_weights(self, call: int) -> bool:
        """Return whether a call changes weights: an update does, and one that may overwrite them with averages."""
        return self.updates_at(call) or self.ema_overwrite_frequency is not None

    def count_step(self) -> None:
        """Count a step that was taken for this optimizer elsewhere."""
        self._iterations += 1

    # weight decay

    def decay_of(self, variable: Variable) -> float:
        """Return the part of a variable's weights, times the rate, that is subtracted before each update."""
        if variable in self._excluded or any(pattern.search(variable.name) for pattern in self._excluded_names):
            return 0.0
        return self.weight_decay or 0.0

    def exclude_from_weight_decay(
        self, var_list: Iterable[Variable] | None = None, var_names: Iterable[str] | None = None
    ) -> None:
        """Exclude variables from the decay of weights; the same on every rank, before the first step.

        Args:
            var_list: variables.
            var_names: regular expressions, searched for in the names of variables.

        Raises:
            RuntimeError: after the first `apply_gradients`.
        """
        if self._steps:
            expected, got = "a call before the first apply_gradients", "a later one"
            function = f"{type(self).__name__}.exclude_from_weight_decay"
            raise RuntimeError(explain(function, "", expected=expected, got=got))
        self._excluded.update(v for _, v in each_variable((None, v) for v in var_list or ()))
        self._excluded_names.extend(re.compile(name) for name in var_names or ())

    def leave_to_owner(self, setting: str) -> None:
        """Leave a setting out of files: the optimizer around this one sets it before each step."""
        self._unsaved |= {setting}

    # how ranks compare them

    @property
    def revision(self) -> int:
        """A number that grows whenever an attribute is set, so that `describe` may give another text."""
        return self._revision

    def describe(self, without: Collection[str] = ()) -> str:
        """Return the rule and its numbers in words, by which ranks are compared, without the named settings."""
        rate: Any = self._rate
        if isinstance(rate, LearningRateSchedule) and not is_dataclass(rate):
            rate = f"{type(rate).__name__}({_numbers(rate)})"
        counted = f", counted from {self._counted_from}" if self._counted_from else ""
        self._private_words = self._private_words or _private(self)
        words = f"{_numbers(self, without)}{self._private_words}{counted}{self._slots_words}"
        return f"{type(self).__name__}(learning_rate={rate}, {words})"

    def _describe_steps(self) -> None:
        self._revision += 1
        for step in self._steps.values():
            step.describe()

    def __repr__(self) -> str:
        return self.describe()

    # checks of arguments

    def _steps_or_none(self, argument: str, value: int | None, least: int) -> int | None:
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least):
            expected = f"None or an integer of at least {least}"
            raise ValueError(explain(type(self).__name__, argument, expected=expected, got=value))
        return None if value is None else int(value)


class _CallableRate:
    """A callable as a schedule: called without arguments, as Keras does, or with the step where it needs one argument."""

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


def _numbers(thing: object, without: Collection[str] = ()) -> str:
    """The attributes of an object that are numbers or hold some, in words that mean the same on every rank."""
    own = getattr(thing, "__dict__", {}).items()
    shown = (key for key, value in own if key[:1] != "_" and key not in without and not _is_default(key, value))
    words = ((key, _word(getattr(thing, key))) for key in shown)
    return ", ".join(f"{key}={word}" for key, word in words if word)


def _is_default(key: str, value: object) -> bool:
    return key == "slot_names" or (
        key in _DEFAULTS and any(value is default or value == default for default in _DEFAULTS[key])
    )


def _private(thing: Hyperparameters) -> str:
    """The same of what a rule keeps under names that begin with one underscore."""
    own = vars(thing).items()
    words = [(key, _word(value)) for key, value in own if key[:1] == "_" and "__" not in key and key not in OWN]
    return "".join(f", {key}={word}" for key, word in words if word)


def _word(value: object) -> str:
    """A number, a text, or what holds some, in words; "" for all else."""
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

"""Learning rate schedules, with Keras's arguments and formulae.

Source: keras.optimizers.schedules of Keras 3. A step is counted from 0.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, final

from ..base.errors import explain
from ..base.limits import AT_LEAST_ZERO, FINITE, FLAG, POSITIVE, Limits, checked, number
from .config import attributes_of, config_of, made_from

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "CosineDecay",
    "CosineDecayRestarts",
    "ExponentialDecay",
    "InverseTimeDecay",
    "LearningRateSchedule",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
]


# Settings of decaying schedules. All others are numbers of at least 0.
_LIMITS: dict[str, Limits] = {
    "decay_steps": POSITIVE,
    "first_decay_steps": POSITIVE,
    "t_mul": Limits("a finite number >= 1", lambda factor: 1 <= factor < math.inf),
    "staircase": FLAG,
    "cycle": FLAG,
}


class LearningRateSchedule(ABC):
    """A learning rate for each step. Subclass it, or use one of this module, and pass it as `learning_rate`."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0; the same on every rank."""

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of this schedule, as JSON holds them. Local.

        Raises:
            TypeError: a schedule of your own that is not a dataclass: override this method.

        Example:
            >>> ExponentialDecay(0.1, decay_steps=100, decay_rate=0.5).get_config()
            {'initial_learning_rate': 0.1, 'decay_steps': 100, 'decay_rate': 0.5, 'staircase': False}
        """
        return config_of(self, attributes_of(self, ()))

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Return the schedule whose `get_config` returned `config`. Local. A schedule's `name`, which Keras has, is ignored.

        Example:
            >>> config = {"initial_learning_rate": 0.1, "decay_steps": 10}
            >>> CosineDecay.from_config({**config, "name": "CosineDecay"})(10)
            0.0
        """
        named = "name" in inspect.signature(cls).parameters
        return made_from(
            cls, {name: value for name, value in config.items() if named or name != "name"}, custom_objects
        )


@dataclass(frozen=True)
class _Checked(LearningRateSchedule):
    """A schedule whose arguments are numbers and flags."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                checked(type(self).__name__, field.name, value, _LIMITS.get(field.name, AT_LEAST_ZERO))


@dataclass(frozen=True)
class _Decay(_Checked):
    """A schedule that decays from an initial learning rate, at the pace of `decay_steps`."""

    initial_learning_rate: float
    decay_steps: float


@final
@dataclass(frozen=True)
class ExponentialDecay(_Decay):
    """initial_learning_rate * decay_rate ** (step / decay_steps); with `staircase` the exponent is rounded down.

    Raises:
        ValueError: decay_steps is not positive, or another number is negative, NaN or infinite.
        TypeError: a setting is neither a number nor a flag.

    Example:
        >>> ExponentialDecay(0.1, decay_steps=100, decay_rate=0.5)(200)
        0.025
    """

    decay_rate: float
    staircase: bool = False

    def __call__(self, step: int) -> float:
        exponent = step / self.decay_steps
        return self.initial_learning_rate * self.decay_rate ** (math.floor(exponent) if self.staircase else exponent)


@final
@dataclass(frozen=True)
class PiecewiseConstantDecay(LearningRateSchedule):
    """values[i] from the step after boundaries[i - 1] up to and with step boundaries[i].

    Args:
        boundaries: strictly increasing steps.
        values: learning rates, one more than boundaries.

    Raises:
        ValueError: their numbers do not fit, boundaries do not increase, or a value is negative, NaN or infinite.
        TypeError: one of them is not a number.

    Example:
        >>> rate = PiecewiseConstantDecay([10, 20], [1.0, 0.5, 0.1])
        >>> [rate(step) for step in (10, 11, 20, 21)]
        [1.0, 0.5, 0.5, 0.1]
    """

    boundaries: Sequence[float]
    values: Sequence[float]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.boundaries) + 1:
            expected, got = f"{len(self.boundaries) + 1} for {len(self.boundaries)} boundaries", len(self.values)
            raise ValueError(explain("PiecewiseConstantDecay", "values", expected=expected, got=got))
        for i, boundary in enumerate(self.boundaries):
            number("PiecewiseConstantDecay", f"boundaries[{i}]", boundary, FINITE)
        for i, value in enumerate(self.values):
            number("PiecewiseConstantDecay", f"values[{i}]", value, AT_LEAST_ZERO)
        if any(low >= high for low, high in zip(self.boundaries, self.boundaries[1:], strict=False)):
            got_boundaries = list(self.boundaries)
            raise ValueError(
                explain("PiecewiseConstantDecay", "boundaries", expected="increasing steps", got=got_boundaries)
            )

    def __call__(self, step: int) -> float:
        return self.values[sum(step > boundary for boundary in self.boundaries)]


@final
@dataclass(frozen=True)
class PolynomialDecay(_Decay):
    """(initial - end) * (1 - step / decay_steps) ** power + end, constant after `decay_steps`.

    With `cycle` the decay starts again at each multiple of `decay_steps`, over a longer time: `decay_steps` is then the
    first multiple that is not less than the step.

    Raises:
        ValueError: decay_steps is not positive, or another number is negative, NaN or infinite.
        TypeError: a setting is neither a number nor a flag.

    Example:
        >>> PolynomialDecay(0.5, decay_steps=4, end_learning_rate=0.25)(2)
        0.375
    """

    end_learning_rate: float = 0.0001
    power: float = 1.0
    cycle: bool = False

    def __call__(self, step: int) -> float:
        total = self.decay_steps
        if self.cycle:
            total *= max(1, math.ceil(step / total))
        left = 1 - min(step, total) / total
        return (self.initial_learning_rate - self.end_learning_rate) * left**self.power + self.end_learning_rate


@final
@dataclass(frozen=True)
class InverseTimeDecay(_Decay):
    """initial_learning_rate / (1 + decay_rate * step / decay_steps); with `staircase` the quotient is rounded down.

    Raises:
        ValueError: decay_steps is not positive, or another number is negative, NaN or infinite.
        TypeError: a setting is neither a number nor a flag.

    Example:
        >>> InverseTimeDecay(0.1, decay_steps=1, decay_rate=0.5)(2)
        0.05
    """

    decay_rate: float
    staircase: bool = False

    def __call__(self, step: int) -> float:
        time = step / self.decay_steps
        return self.initial_learning_rate / (1 + self.decay_rate * (math.floor(time) if self.staircase else time))


@final
@dataclass(frozen=True)
class CosineDecay(_Decay):
    """Half a cosine from the initial learning rate down to `alpha` times it, over `decay_steps`; then constant.

    With `warmup_target` the rate first rises in a straight line from the initial learning rate to `warmup_target`, over
    `warmup_steps`, and decays from there.

    Source: Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983.

    Raises:
        ValueError: decay_steps is not positive, or another number is negative, NaN or infinite.
        TypeError: a setting is neither a number nor a flag.

    Example:
        >>> round(CosineDecay(0.1, decay_steps=1000)(500), 12)
        0.05
        >>> CosineDecay(0.0, decay_steps=10, warmup_target=0.5, warmup_steps=4)(2)
        0.25
    """

    alpha: float = 0.0
    warmup_target: float | None = None
    warmup_steps: float = 0

    def __call__(self, step: int) -> float:
        top, time = self.initial_learning_rate, float(step)
        if self.warmup_target is not None:
            if step < self.warmup_steps:
                return top + (self.warmup_target - top) * (step / self.warmup_steps)
            top, time = self.warmup_target, step - self.warmup_steps
        cosine = 0.5 * (1 + math.cos(math.pi * min(time, self.decay_steps) / self.decay_steps))
        return top * ((1 - self.alpha) * cosine + self.alpha)


@final
@dataclass(frozen=True)
class CosineDecayRestarts(_Checked):
    """Half a cosine again and again: each from `m_mul` times the height of the one before, over `t_mul` times as many steps.

    The first one falls from the initial learning rate over `first_decay_steps`; each ends at `alpha` times the initial learning
    rate.

    Source: Loshchilov and Hutter, SGDR, https://arxiv.org/abs/1608.03983.

    Raises:
        ValueError: first_decay_steps is not positive, t_mul is less than 1, or another number is negative, NaN or infinite.
        TypeError: a setting is not a number.

    Example:
        >>> schedule = CosineDecayRestarts(0.5, first_decay_steps=10, m_mul=0.5)
        >>> [round(schedule(step), 12) for step in (0, 5, 10, 20, 30)]
        [0.5, 0.25, 0.25, 0.125, 0.125]
    """

    initial_learning_rate: float
    first_decay_steps: float
    t_mul: float = 2.0
    m_mul: float = 1.0
    alpha: float = 0.0

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step."""
        time, length, restarts = float(step), float(self.first_decay_steps), 0
        if self.t_mul == 1:
            restarts, time = int(time // length), time % length
        while time >= length:
            time, length, restarts = time - length, length * self.t_mul, restarts + 1
        cosine = 0.5 * self.m_mul**restarts * (1 + math.cos(math.pi * time / length))
        return self.initial_learning_rate * ((1 - self.alpha) * cosine + self.alpha)

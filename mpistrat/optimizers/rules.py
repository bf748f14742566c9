"""The update rules SGD, Adam, AdamW, Adagrad and RMSProp, each one function on a block.

Each is written in NumPy. `loops.update` does the same for float32 and float64 in one pass, with the same bits.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np

from ..base import loops
from ..base.errors import explain
from ..base.limits import AT_LEAST_ZERO, BELOW_ONE, FLAG, UP_TO_ONE, Limits
from ..base.loops import Around, CompiledLoop
from ..base.underflow import may_underflow
from .hyperparameters import CommonSettings, CommonSettingsButDecay, Rate
from .optimizer import Optimizer
from .rule import Block

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Momentum", "RMSProp", "approach", "average_into"]


_NOTHING_ELSE = Around()


class _BlockRule(Optimizer):
    """An Optimizer whose rule takes a block as one argument."""

    @abstractmethod
    def update_block(self, block: Block) -> None: ...

    @abstractmethod
    def _loop(self, step: int, rate: float) -> CompiledLoop: ...

    def update(
        self,
        gradient: Any,
        weights: Any,
        slots: Mapping[str, Any],
        step: int,
        rate: float,
        scratch: Sequence[Any],
    ) -> None:
        rule, numbers, names = self._loop(step, rate)
        arrays = tuple([slots.get(name) for name in names])
        if not loops.update(rule, numbers, [gradient], weights, arrays, _NOTHING_ELSE):
            self.update_block(Block(gradient, weights, slots, step, rate, scratch, 0))

    def _slot_for(self, setting: str, slot: str) -> str:
        """Return the slot that a setting needs now, or "". Settings may be set after slots were created.

        Raises:
            ValueError: the optimizer was created without the slot.
        """
        if not getattr(self, setting):
            return ""
        if slot not in self.slot_names:
            expected, got = "off, as when the optimizer was made", repr(getattr(self, setting))
            remedy = f"Create another optimizer with {setting}: it needs one more number for each weight"
            raise ValueError(explain(type(self).__name__, setting, expected=expected, got=got, remedy=remedy))
        return slot


@final
class SGD(_BlockRule):
    """w -= rate * g; with momentum m = momentum * m - rate * g and w += m; Nesterov: w += momentum * m - rate * g.

    Args:
        learning_rate: a number, a schedule or a callable.
        momentum: from 0 to 1.
        nesterov: look ahead by one step.
        settings: the common settings of `Optimizer`, by name.

    Raises:
        ValueError: a number is out of range.

    Source: keras.optimizers.SGD of Keras 3; Sutskever et al., http://proceedings.mlr.press/v28/sutskever13.pdf.
    """

    _limits: ClassVar[Mapping[str, Limits]] = {"momentum": UP_TO_ONE, "nesterov": FLAG}

    def __init__(
        self,
        learning_rate: Rate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **settings: Unpack[CommonSettings],
    ) -> None:
        self.momentum = momentum
        self.nesterov = nesterov
        super().__init__(learning_rate, slot_names=("momentum",) if self.momentum else (), **settings)

    def _loop(self, step: int, rate: float) -> CompiledLoop:
        return CompiledLoop("sgd", (rate, self.momentum, self.nesterov), (self._slot_for("momentum", "momentum"),))

    @may_underflow
    def update_block(self, block: Block) -> None:
        gradient, weights, slots, _, rate, scratch, _ = block
        np.multiply(gradient, rate, out=gradient)
        if not self.momentum:
            np.subtract(weights, gradient, out=weights)
            return
        momentum = slots["momentum"]
        np.multiply(momentum, self.momentum, out=momentum)
        np.subtract(momentum, gradient, out=momentum)
        if self.nesterov:
            ahead = scratch[0][: gradient.size]
            np.multiply(momentum, self.momentum, out=ahead)
            np.subtract(ahead, gradient, out=ahead)
            np.add(weights, ahead, out=weights)
        else:
            np.add(weights, momentum, out=weights)


def Momentum(
    learning_rate: Rate = 0.01,
    momentum: float = 0.9,
    nesterov: bool = False,
    **settings: Unpack[CommonSettings],
) -> SGD:
    """Return SGD with momentum, in Keras's form (TF: MomentumOptimizer).

    Args:
        learning_rate, momentum, nesterov, settings: as for `SGD`.

    Example:
        >>> Momentum(0.1).slot_names
        ('momentum',)
    """
    named: CommonSettings = {"name": "momentum", **settings}
    return SGD(learning_rate, momentum, nesterov, **named)


class _Adam(_BlockRule):
    """The common base of Adam and AdamW, which differ in the default of the weight decay."""

    _limits: ClassVar[Mapping[str, Limits]] = {
        "beta_1": BELOW_ONE,
        "beta_2": BELOW_ONE,
        "epsilon": AT_LEAST_ZERO,
        "amsgrad": FLAG,
    }

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **settings: Unpack[CommonSettings],
    ) -> None:
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.amsgrad = amsgrad
        kept = ("momentum", "velocity", "velocity_hat") if self.amsgrad else ("momentum", "velocity")
        super().__init__(learning_rate, slot_names=kept, **settings)

    def _loop(self, step: int, rate: float) -> CompiledLoop:
        alpha = rate * math.sqrt(1 - self.beta_2**step) / (1 - self.beta_1**step)
        numbers = alpha, 1 - self.beta_1, 1 - self.beta_2, self.epsilon
        return CompiledLoop("adam", numbers, ("momentum", "velocity", self._slot_for("amsgrad", "velocity_hat")))

    @may_underflow
    def update_block(self, block: Block) -> None:
        """Update in twelve passes over the block, AMSGrad thirteen; the compiled loop takes one."""
        gradient, weights, slots, step, rate, scratch, _ = block
        alpha, rest_1, rest_2, epsilon = self._loop(step, rate).numbers
        momentum, velocity, work = slots["momentum"], slots["velocity"], scratch[0][: gradient.size]
        largest = slots["velocity_hat"] if self.amsgrad else None
        approach(momentum, gradient, rest_1, work)
        np.multiply(gradient, gradient, out=gradient)
        approach(velocity, gradient, rest_2, gradient)
        if largest is not None:
            velocity = np.maximum(largest, velocity, out=largest)
        np.sqrt(velocity, out=gradient)
        np.add(gradient, epsilon, out=gradient)
        np.multiply(momentum, alpha, out=work)
        np.divide(work, gradient, out=work)
        np.subtract(weights, work, out=weights)


@final
class Adam(_Adam):
    """m += (g - m) * (1 - beta_1); v += (g² - v) * (1 - beta_2); w -= m * alpha / (sqrt(v) + epsilon).

    At step t, counted from 1, alpha = rate * sqrt(1 - beta_2 ** t) / (1 - beta_1 ** t).

    Args:
        learning_rate: a number, a schedule or a callable.
        beta_1, beta_2: decay rates of m and v; at least 0, less than 1.
        epsilon: keeps the divisor from zero.
        amsgrad: divide by the root of the largest v so far.
        settings: the common settings of `Optimizer`, by name.

    Raises:
        ValueError: a number is out of range.

    Source: keras.optimizers.Adam of Keras 3; Kingma and Ba, https://arxiv.org/abs/1412.6980.
    """


@final
class AdamW(_Adam):
    """Adam after w -= w * weight_decay * rate.

    Args:
        learning_rate: a number, a schedule or a callable.
        weight_decay: the fraction of each weight lost per step, times the rate.
        beta_1, beta_2, epsilon, amsgrad: as for `Adam`.
        settings: the other common settings of `Optimizer`, by name.

    Raises:
        ValueError: a number is out of range.

    Source: keras.optimizers.AdamW of Keras 3; Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
    """

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        weight_decay: float | None = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **settings: Unpack[CommonSettingsButDecay],
    ) -> None:
        super().__init__(learning_rate, beta_1, beta_2, epsilon, amsgrad, weight_decay=weight_decay, **settings)


@final
class Adagrad(_BlockRule):
    """a += g²; w -= rate * g / sqrt(a + epsilon).

    Args:
        learning_rate: a number, a schedule or a callable.
        initial_accumulator_value: start value of a; not negative.
        epsilon: keeps the divisor from zero.
        settings: the common settings of `Optimizer`, by name.

    Raises:
        ValueError: a number is out of range.

    Source: keras.optimizers.Adagrad of Keras 3; Duchi et al., http://www.jmlr.org/papers/volume12/duchi11a/duchi11a.pdf.
    """

    _limits: ClassVar[Mapping[str, Limits]] = {"initial_accumulator_value": AT_LEAST_ZERO, "epsilon": AT_LEAST_ZERO}

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        initial_accumulator_value: float = 0.1,
        epsilon: float = 1e-7,
        **settings: Unpack[CommonSettings],
    ) -> None:
        self.initial_accumulator_value = initial_accumulator_value
        self.epsilon = epsilon
        super().__init__(learning_rate, slot_names=("accumulator",), **settings)

    def _slot_start(self) -> Mapping[str, float]:
        return {"accumulator": self.initial_accumulator_value} if self.initial_accumulator_value else {}

    def _loop(self, step: int, rate: float) -> CompiledLoop:
        return CompiledLoop("adagrad", (rate, self.epsilon), ("accumulator",))

    @may_underflow
    def update_block(self, block: Block) -> None:
        gradient, weights, slots, _, rate, scratch, _ = block
        work, accumulator = scratch[0][: gradient.size], slots["accumulator"]
        np.multiply(gradient, gradient, out=work)
        np.add(accumulator, work, out=accumulator)
        np.add(accumulator, self.epsilon, out=work)
        np.sqrt(work, out=work)
        np.multiply(gradient, rate, out=gradient)
        np.divide(gradient, work, out=work)
        np.subtract(weights, work, out=weights)


@final
class RMSProp(_BlockRule):
    """v = rho * v + (1 - rho) * g²; w -= rate * g / sqrt(v + epsilon).

    Args:
        learning_rate: a number, a schedule or a callable.
        rho: decay rate of v, from 0 to 1.
        momentum: from 0 to 1; if not 0, the step is m = momentum * m + rate * g / sqrt(v + epsilon).
        epsilon: keeps the divisor from zero.
        centered: divide by the root of the variance: v minus the square of the gradient's mean.
        settings: the common settings of `Optimizer`, by name.

    Raises:
        ValueError: a number is out of range.

    Source: keras.optimizers.RMSprop of Keras 3; Hinton's lecture 6,
    http://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf.
    """

    _limits: ClassVar[Mapping[str, Limits]] = {
        "rho": UP_TO_ONE,
        "momentum": UP_TO_ONE,
        "epsilon": AT_LEAST_ZERO,
        "centered": FLAG,
    }

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        **settings: Unpack[CommonSettings],
    ) -> None:
        self.rho = rho
        self.momentum = momentum
        self.epsilon = epsilon
        self.centered = centered
        slots = ["velocity"]
        if self.momentum:
            slots.append("momentum")
        if self.centered:
            slots.append("average_gradient")
        super().__init__(learning_rate, slot_names=tuple(slots), **settings)

    def _loop(self, step: int, rate: float) -> CompiledLoop:
        numbers = rate, self.rho, 1 - self.rho, self.momentum, self.epsilon
        average, momentum = self._slot_for("centered", "average_gradient"), self._slot_for("momentum", "momentum")
        return CompiledLoop("rmsprop", numbers, ("velocity", average, momentum))

    @may_underflow
    def update_block(self, block: Block) -> None:
        gradient, weights, slots, _, rate, scratch, _ = block
        work, velocity = scratch[0][: gradient.size], slots["velocity"]
        np.multiply(gradient, gradient, out=work)
        average_into(velocity, work, self.rho)
        if self.centered:
            mean = slots["average_gradient"]
            np.copyto(work, gradient)
            average_into(mean, work, self.rho)
            np.multiply(mean, mean, out=work)
            np.subtract(velocity, work, out=work)
            np.add(work, self.epsilon, out=work)
        else:
            np.add(velocity, self.epsilon, out=work)
        np.sqrt(work, out=work)
        np.multiply(gradient, rate, out=gradient)
        np.divide(gradient, work, out=gradient)
        if self.momentum:
            momentum = slots["momentum"]
            np.multiply(momentum, self.momentum, out=momentum)
            np.add(momentum, gradient, out=momentum)
            gradient = momentum
        np.subtract(weights, gradient, out=weights)


def average_into(average: Any, number: Any, kept: float) -> None:
    """Set average = kept * average + (1 - kept) * number; overwrites number."""
    np.multiply(average, kept, out=average)
    np.multiply(number, 1 - kept, out=number)
    np.add(average, number, out=average)


def approach(average: Any, number: Any, rest: float, work: Any) -> None:
    """Set average += (number - average) * rest; work may be the number."""
    np.subtract(number, average, out=work)
    np.multiply(work, rest, out=work)
    np.add(average, work, out=average)

"""The update rules in NumPy alone, each one function on a block: Adadelta to Lamb and Adafactor, which need whole variables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np

from ..base.limits import AT_LEAST_ZERO, AT_MOST_ZERO, BELOW_ONE, FLAG, POSITIVE, UP_TO_ONE, Limits
from ..base.loops import CompiledLoop
from ..base.underflow import may_underflow
from .hyperparameters import CommonSettings, Rate
from .optimizer import Optimizer
from .rule import Block
from .rules import approach, average_into

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Adadelta", "Adafactor", "Adamax", "Ftrl", "Lamb", "Lion", "Nadam"]

_MOMENTUM_DECAY = 0.96  # of Nadam's schedule, from the paper


@final
class Adadelta(Optimizer):
    """a = rho * a + (1 - rho) * g²; u = g * sqrt(d + epsilon) / sqrt(a + epsilon); d = rho * d + (1 - rho) * u²; w -= rate * u.

    Args:
        learning_rate: a number, a schedule or a callable; 1.0 is the paper's.
        rho: decay rate of a and d, from 0 to 1.
        epsilon: keeps both roots from zero.
        settings: the common settings of `Optimizer`, by name.

    Raises:
        ValueError: a number is out of range.

    Source: keras.optimizers.Adadelta of Keras 3; Zeiler, https://arxiv.org/abs/1212.5701.
    """

    _limits: ClassVar[Mapping[str, Limits]] = {"rho": UP_TO_ONE, "epsilon": AT_LEAST_ZERO}

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        rho: float = 0.95,
        epsilon: float = 1e-7,
        **settings: Unpack[CommonSettings],
    ) -> None:
        self.rho, self.epsilon = rho, epsilon
        super().__init__(learning_rate, slot_names=("accumulated_grad", "accumulated_delta_var"), **settings)

    def _kernel(self, step: int, rate: float) -> CompiledLoop:
        return CompiledLoop("adadelta", (rate, self.rho, 1 - self.rho, self.epsilon), self.slot_names[:2])

    @may_underflow
    def update(
        self, gradient: Any, weights: Any, slots: Mapping[str, Any], step: int, rate: float, scratch: Sequence[Any]
    ) -> None:
        squares, deltas = slots["accumulated_grad"], slots["accumulated_delta_var"]
        work, change = scratch[0][: gradient.size], scratch[1][: gradient.size]
        average_into(squares, np.multiply(gradient, gradient, out=work), self.rho)
        np.sqrt(np.add(deltas, self.epsilon, out=change), out=change)
        np.multiply(change, gradient, out=change)
        np.sqrt(np.add(squares, self.epsilon, out=work), out=work)
        np.divide(change, work, out=change)
        average_into(deltas, np.multiply(change, change, out=work), self.rho)
        np.multiply(change, rate, out=change)
        np.subtract(weights, change, out=weights)


class _Moments(Optimizer):
    """The common base of Adamax, Nadam and Lamb: Adam's settings."""

    _kept: ClassVar[tuple[str, ...]] = ("momentum", "velocity")
    _limits: ClassVar[Mapping[str, Limits]] = {"beta_1": BELOW_ONE, "beta_2": BELOW_ONE, "epsilon": AT_LEAST_ZERO}

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        **settings: Unpack[CommonSettings],
    ) -> None:
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        super().__init__(learning_rate, slot_names=self._kept, **settings)


@final
class Adamax(_Moments):
    """m += (g - m) * (1 - beta_1); u = max(beta_2 * u, abs(g)); w -= rate * m / ((1 - beta_1 ** t) * (u + epsilon)).

    Args:
        learning_rate: a number, a schedule or a callable.
        beta_1, beta_2: decay rates of m and u; at least 0, less than 1.
        epsilon: keeps the divisor from zero.
        settings: the common settings of `Optimizer`, by name.

    Raises:
        ValueError: a number is out of range.

    Source: keras.optimizers.Adamax of Keras 3; Kingma and Ba, https://arxiv.org/abs/1412.6980, section 7.
    """

    _kept = ("momentum", "norm")

    def _kernel(self, step: int, rate: float) -> CompiledLoop:
        numbers = rate / (1 - self.beta_1**step), 1 - self.beta_1, self.beta_2, self.epsilon
        return CompiledLoop("adamax", numbers, self._kept)

    @may_underflow
    def update(
        self, gradient: Any, weights: Any, slots: Mapping[str, Any], step: int, rate: float, scratch: Sequence[Any]
    ) -> None:
        momentum, norm, work = slots["momentum"], slots["norm"], scratch[0][: gradient.size]
        approach(momentum, gradient, 1 - self.beta_1, work)
        np.absolute(gradient, out=gradient)
        np.maximum(np.multiply(norm, self.beta_2, out=norm), gradient, out=norm)
        np.multiply(momentum, rate / (1 - self.beta_1**step), out=gradient)
        np.divide(gradient, np.add(norm, self.epsilon, out=work), out=gradient)
        np.subtract(weights, gradient, out=weights)


@final
class Nadam(_Moments):
    """Adam with Nesterov's momentum: the step is along u' * m / (1 - U * u') + (1 - u) * g / (1 - U).

    u = beta_1 * (1 - 0.96 ** t / 2) at step t, u' that of the next step, U the product of all u so far; m, v and the divisor
    are Adam's. If beta_1 is changed, U keeps the earlier u; after `restore` all u are computed from the restored beta_1.

    Args:
        learning_rate: a number, a schedule or a callable.
        beta_1, beta_2: decay rates of m and v; at least 0, less than 1.
        epsilon: keeps the divisor from zero.
        settings: the common settings of `Optimizer`, by name.

    Raises:
        ValueError: a number is out of range.

    Source: keras.optimizers.Nadam of Keras 3; Dozat, https://cs229.stanford.edu/proj2015/054_report.pdf.
    """

    __product = 0, 1.0  # the last step, and the product of all u up to it

    def _kernel(self, step: int, rate: float) -> CompiledLoop:
        numbers = rate, 1 - self.beta_1, 1 - self.beta_2, *self._shares(step), 1 / (1 - self.beta_2**step), self.epsilon
        return CompiledLoop("nadam", numbers, self._kept)

    @may_underflow
    def update(
        self, gradient: Any, weights: Any, slots: Mapping[str, Any], step: int, rate: float, scratch: Sequence[Any]
    ) -> None:
        momentum, velocity, work = slots["momentum"], slots["velocity"], scratch[0][: gradient.size]
        of_mean, of_gradient = self._shares(step)
        approach(momentum, gradient, 1 - self.beta_1, work)
        change = np.multiply(momentum, of_mean, out=scratch[1][: gradient.size])
        np.add(change, np.multiply(gradient, of_gradient, out=work), out=change)
        np.multiply(gradient, gradient, out=gradient)
        approach(velocity, gradient, 1 - self.beta_2, work)
        np.sqrt(np.multiply(velocity, 1 / (1 - self.beta_2**step), out=work), out=work)
        np.divide(np.multiply(change, rate, out=change), np.add(work, self.epsilon, out=work), out=change)
        np.subtract(weights, change, out=weights)

    def _shares(self, step: int) -> tuple[float, float]:
        now, ahead, product = self._coefficient(step), self._coefficient(step + 1), self._product(step)
        return ahead / (1 - product * ahead), (1 - now) / (1 - product)

    def _coefficient(self, step: int) -> float:
        return self.beta_1 * (1 - 0.5 * _MOMENTUM_DECAY**step)

    def _product(self, step: int) -> float:
        """Return the product of the coefficients of all steps until this one."""
        last, product = self.__product
        if last > step:
            last, product = 0, 1.0
        while last < step and product:  # it is 0 after some thousand steps
            last += 1
            product *= self._coefficient(last)
        self.__product = step, product
        return product


@final
class Ftrl(Optimizer):
    """Follow the regularized leader: weights are recomputed from sums over all steps, sparse with L1.

    With s = 2 * l2_shrinkage and p = -learning_rate_power: n' = n + g²; z += g + s * w - (n' ** p - n ** p) * w / rate; then
    w = (clip(z, -l1, l1) - z) / (n' ** p / rate + 2 * l2 + beta / rate). A step at rate 0 changes nothing.

    Args:
        learning_rate: a number, a schedule or a callable.
        learning_rate_power: at most 0; -0.5 is the paper's, 0 a fixed rate.
        initial_accumulator_value: start value of n; not negative.
        l1_regularization_strength, l2_regularization_strength: l1 and l2, not negative.
        l2_shrinkage_regularization_strength: an L2 term in z only; not negative.
        beta: the paper's, not negative.
        settings: the common settings of `Optimizer`, by name.

    Raises:
        ValueError: a number is out of range.

    Source: keras.optimizers.Ftrl of Keras 3; McMahan et al., https://research.google.com/pubs/archive/41159.pdf.
    """

    _limits: ClassVar[Mapping[str, Limits]] = {
        "learning_rate_power": AT_MOST_ZERO,
        "initial_accumulator_value": AT_LEAST_ZERO,
        "l1_regularization_strength": AT_LEAST_ZERO,
        "l2_regularization_strength": AT_LEAST_ZERO,
        "l2_shrinkage_regularization_strength": AT_LEAST_ZERO,
        "beta": AT_LEAST_ZERO,
    }

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        learning_rate_power: float = -0.5,
        initial_accumulator_value: float = 0.1,
        l1_regularization_strength: float = 0.0,
        l2_regularization_strength: float = 0.0,
        l2_shrinkage_regularization_strength: float = 0.0,
        beta: float = 0.0,
        **settings: Unpack[CommonSettings],
    ) -> None:
        self.learning_rate_power = learning_rate_power
        self.initial_accumulator_value = initial_accumulator_value
        self.l1_regularization_strength = l1_regularization_strength
        self.l2_regularization_strength = l2_regularization_strength
        self.l2_shrinkage_regularization_strength = l2_shrinkage_regularization_strength
        self.beta = beta
        super().__init__(learning_rate, slot_names=("accumulator", "linear"), **settings)

    def _slot_start(self) -> Mapping[str, float]:
        return {"accumulator": self.initial_accumulator_value} if self.initial_accumulator_value else {}

    def _kernel(self, step: int, rate: float) -> CompiledLoop | None:
        if not rate:
            return None
        shrinkage = 2 * self.l2_shrinkage_regularization_strength
        numbers = rate, -self.learning_rate_power, self.l1_regularization_strength, shrinkage, self._divisor(rate)
        return CompiledLoop("ftrl", numbers, ("accumulator", "linear"))

    def _divisor(self, rate: float) -> float:
        """Return the term that is added to the divisor of all elements."""
        return 2 * (self.l2_regularization_strength + self.beta / (2 * rate))

    @may_underflow
    def update(
        self, gradient: Any, weights: Any, slots: Mapping[str, Any], step: int, rate: float, scratch: Sequence[Any]
    ) -> None:
        if not rate:
            return
        accumulator, linear = slots["accumulator"], slots["linear"]
        work, grown = scratch[0][: gradient.size], scratch[1][: gradient.size]
        np.add(linear, gradient, out=linear)
        np.add(linear, np.multiply(weights, 2 * self.l2_shrinkage_regularization_strength, out=work), out=linear)
        self._power(accumulator, work)
        np.add(accumulator, np.multiply(gradient, gradient, out=gradient), out=accumulator)
        self._power(accumulator, grown)
        np.divide(np.subtract(grown, work, out=work), rate, out=work)
        np.subtract(linear, np.multiply(work, weights, out=work), out=linear)
        limit = self.l1_regularization_strength
        np.subtract(np.clip(linear, -limit, limit, out=work), linear, out=work)
        np.divide(grown, rate, out=grown)
        np.add(grown, self._divisor(rate), out=grown)
        np.divide(work, grown, out=weights)

    def _power(self, accumulator: Any, out: Any) -> None:
        if self.learning_rate_power == -0.5:
            np.sqrt(accumulator, out=out)
        else:
            np.power(accumulator, -self.learning_rate_power, out=out)


@final
class Lion(Optimizer):
    """w -= rate * sign(beta_1 * m + (1 - beta_1) * g); m = beta_2 * m + (1 - beta_2) * g.

    Args:
        learning_rate: a number, a schedule or a callable: three to ten times less than Adam's.
        beta_1: weight of m in a step; more than 0, at most 1.
        beta_2: decay rate of m; at least 0, less than 1.
        settings: the common settings of `Optimizer`, by name.

    Raises:
        ValueError: a number is out of range.

    Source: keras.optimizers.Lion of Keras 3; Chen et al., https://arxiv.org/abs/2302.06675.
    """

    _limits: ClassVar[Mapping[str, Limits]] = {
        "beta_1": Limits("0 < value <= 1", lambda number: 0 < number <= 1),
        "beta_2": BELOW_ONE,
    }

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.99,
        **settings: Unpack[CommonSettings],
    ) -> None:
        self.beta_1, self.beta_2 = beta_1, beta_2
        super().__init__(learning_rate, slot_names=("momentum",), **settings)

    def _kernel(self, step: int, rate: float) -> CompiledLoop:
        numbers = rate, self.beta_1, 1 - self.beta_1, self.beta_2, 1 - self.beta_2
        return CompiledLoop("lion", numbers, ("momentum",))

    @may_underflow
    def update(
        self, gradient: Any, weights: Any, slots: Mapping[str, Any], step: int, rate: float, scratch: Sequence[Any]
    ) -> None:
        momentum, work = slots["momentum"], scratch[0][: gradient.size]
        change = np.multiply(momentum, self.beta_1, out=scratch[1][: gradient.size])
        np.sign(np.add(change, np.multiply(gradient, 1 - self.beta_1, out=work), out=change), out=change)
        np.subtract(weights, np.multiply(change, rate, out=change), out=weights)
        average_into(momentum, gradient, self.beta_2)


@final
class Lamb(_Moments):
    """w -= rate * ratio * u, along Adam's u = m' / (sqrt(v') + epsilon), with ratio = norm(w) / norm(u) of each whole variable.

    m' = m / (1 - beta_1 ** t) and v' = v / (1 - beta_2 ** t) at step t, with Adam's m and v; the ratio is 1 if a norm is 0.
    Use it for batches so large that one rate does not suit all layers. One small collective sums the norms of all variables; a
    shard of a ShardedVariable counts as a variable. Not for variables on parameter servers.

    Args:
        learning_rate: a number, a schedule or a callable.
        beta_1, beta_2: decay rates of m and v; at least 0, less than 1.
        epsilon: keeps the divisor from zero.
        settings: the common settings of `Optimizer`, by name.

    Raises:
        ValueError: a number is out of range.

    Source: keras.optimizers.Lamb of Keras 3; You et al., https://arxiv.org/abs/1904.00962.
    """

    _passes = ("direct",)

    @may_underflow
    def _direction(self, block: Block) -> None:
        """Write u over a block of gradients, and update its slots."""
        gradient, _, slots, step, _, scratch, _ = block
        momentum, velocity, work = slots["momentum"], slots["velocity"], scratch[0][: gradient.size]
        approach(momentum, gradient, 1 - self.beta_1, work)
        np.multiply(gradient, gradient, out=gradient)
        approach(velocity, gradient, 1 - self.beta_2, work)
        np.sqrt(np.multiply(velocity, 1 / (1 - self.beta_2**step), out=work), out=work)
        np.multiply(momentum, 1 / (1 - self.beta_1**step), out=gradient)
        np.divide(gradient, np.add(work, self.epsilon, out=work), out=gradient)

    def _ratio(self, weights: float, direction: float, size: int, step: int, rate: float) -> float:
        """Return the weights' norm over the direction's; 1 if one of them is 0."""
        return weights / direction if weights > 0 and direction > 0 else 1.0

    def _loop(self, step: int, rate: float) -> CompiledLoop:
        return CompiledLoop("sgd", (rate, 0.0, False), ("",))

    @may_underflow
    def update(
        self, gradient: Any, weights: Any, slots: Mapping[str, Any], step: int, rate: float, scratch: Sequence[Any]
    ) -> None:
        """Step along the scaled direction, which replaces the gradient."""
        np.subtract(weights, np.multiply(gradient, rate, out=gradient), out=weights)


@final
class Adafactor(Optimizer):
    """w -= max(epsilon_2, rms(w)) * p * u / max(1, rms(u) / clip_threshold), along u = g / sqrt(v), rms over each whole variable.

    At step t, a = b * v + (1 - b) * (g² + epsilon_1) with b = 1 - t ** beta_2_decay. Of a variable of one dimension v is a; of
    more, in each matrix of the last two, the product of a row's mean of a and a column's, over the mean of all. p is the least
    of the rate and 1 / sqrt(t). Means and norms are summed over the ranks by two small collectives. Not for variables on
    parameter servers, nor for matrices that a MeshStrategy divides.

    It stores only v, one number for each weight, half as much as Adam, divided among the ranks of a node. Means of rows and
    columns are computed from it, while Keras stores them as well.

    Args:
        learning_rate: a number, a schedule or a callable.
        beta_2_decay: exponent of the decay of v; at most 0.
        epsilon_1: keeps v from zero; more than 0.
        epsilon_2: least size of weights for the relative step; not negative.
        clip_threshold: rms of u above which it is scaled down; more than 0.
        relative_step: as in Keras, limit a rate that is a number to 1 / sqrt(t), which p does in any case.
        settings: the common settings of `Optimizer`, by name.

    Raises:
        ValueError: a number is out of range.

    Source: keras.optimizers.Adafactor of Keras 3; Shazeer and Stern, https://arxiv.org/abs/1804.04235.
    """

    _passes = ("factor", "direct")
    _factored = "velocity"
    _limits: ClassVar[Mapping[str, Limits]] = {
        "beta_2_decay": AT_MOST_ZERO,
        "epsilon_1": POSITIVE,
        "epsilon_2": AT_LEAST_ZERO,
        "clip_threshold": POSITIVE,
        "relative_step": FLAG,
    }

    def __init__(
        self,
        learning_rate: Rate = 0.001,
        beta_2_decay: float = -0.8,
        epsilon_1: float = 1e-30,
        epsilon_2: float = 1e-3,
        clip_threshold: float = 1.0,
        relative_step: bool = True,
        **settings: Unpack[CommonSettings],
    ) -> None:
        self.beta_2_decay, self.epsilon_1, self.epsilon_2 = beta_2_decay, epsilon_1, epsilon_2
        self.clip_threshold, self.relative_step = clip_threshold, relative_step
        super().__init__(learning_rate, slot_names=("velocity",), **settings)

    @may_underflow
    def _form_moments(self, block: Block) -> None:
        """Replace v of a block by a."""
        work = np.multiply(block.gradient, block.gradient, out=block.scratch[0][: block.gradient.size])
        np.add(work, self.epsilon_1, out=work)
        average_into(block.slots["velocity"], work, 1 - block.step**self.beta_2_decay)

    @may_underflow
    def _direction(self, block: Block) -> None:
        gradient, velocity = block.gradient, block.slots["velocity"]
        work = np.sqrt(velocity, out=block.scratch[0][: gradient.size])
        np.maximum(
            work, np.finfo(work.dtype).tiny, out=work
        )  # where row and column have no gradient, v is 0 in 32 bits
        np.divide(gradient, work, out=gradient)

    def _ratio(self, weights: float, direction: float, size: int, step: int, rate: float) -> float:
        """Return the step's size: relative to the weights' rms, and less if the direction's rms exceeds the threshold."""
        relative = max(self.epsilon_2, weights / math.sqrt(size)) * min(rate, 1 / math.sqrt(step))
        return relative / max(1.0, direction / math.sqrt(size) / self.clip_threshold)

    def _loop(self, step: int, rate: float) -> CompiledLoop:
        return CompiledLoop("sgd", (1.0, 0.0, False), ("",))

    @may_underflow
    def update(
        self, gradient: Any, weights: Any, slots: Mapping[str, Any], step: int, rate: float, scratch: Sequence[Any]
    ) -> None:
        """Step along the scaled direction, which replaces the gradient."""
        np.subtract(weights, gradient, out=weights)

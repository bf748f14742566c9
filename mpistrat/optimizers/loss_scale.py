"""The LossScaleOptimizer: adapts the scale of losses, so that 16-bit gradients neither vanish nor overflow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

from ..base import context
from ..base.errors import explain
from ..base.limits import POSITIVE, Limits, number
from ..base.log import logger
from ..comm.arrays import is_gpu
from ..variables.sharded import ShardedVariable, each_variable
from ..variables.variable import Variable
from .config import attributes_of, config_of, made_from
from .gradients import ReplicaPairs
from .hyperparameters import LEAST_SCALE, MOST_SCALE, Rate
from .optimizer import Optimizer
from .rule import UpdateRun

__all__ = ["LossScaleOptimizer"]

_WORRYING = 50  # skipped steps in a row: far more than needed to find a factor
_STEPS = Limits("a finite number >= 1, and whole", lambda steps: steps >= 1 and steps.is_integer())


@final
class LossScaleOptimizer:
    """An optimizer that scales losses for another one, and skips steps whose gradients are not finite. Collective.

    A NaN or an infinity in the sums of any rank skips the step on all, and halves the factor. After `dynamic_growth_steps`
    finite steps it is doubled. The factor and the step of its last change are variables, so they are in files. After 50 skipped
    steps in a row there is one warning: a smaller factor does not remove a NaN. Create it in the scope of the strategy whose
    variables it updates.

    With parameter servers each worker, or group of workers in sync, has its own factor, and divides by it before it pushes. A
    worker whose gradients are not finite pushes nothing in this step, and its factor is halved. Other workers' steps are
    applied: with `max_staleness=0` the step is the sum of the others' gradients, and does not count if no worker has any. A
    file has the first worker's factor, which `restore` gives to all.

    Args:
        inner_optimizer: takes the steps; of `ms.optimizers`, without `loss_scale_factor`. All settings are its.
        initial_scale: the factor of the first steps.
        dynamic_growth_steps: the number of finite steps before the factor is doubled.
        name: of the variables.

    Attributes:
        inner_optimizer, initial_scale, dynamic_growth_steps: as given.
        dynamic_scale: the variable with the factor, without dimensions, float32.

    Raises:
        TypeError: another inner optimizer.
        ValueError: a number out of range, or a `loss_scale_factor` of the inner optimizer.

    Source: keras.optimizers.LossScaleOptimizer of Keras 3; Micikevicius et al., https://arxiv.org/abs/1710.03740.

    Example:
        >>> optimizer = ms.optimizers.SGD(0.1)
        >>> optimizer = ms.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
        >>> float(optimizer.scale_loss(0.5))
        4.0
    """

    def __init__(
        self,
        inner_optimizer: Any,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        name: str = "loss_scale_optimizer",
    ) -> None:
        if not isinstance(inner_optimizer, Optimizer):
            expected, got = "an optimizer of ms.optimizers", type(inner_optimizer).__name__
            raise TypeError(explain("LossScaleOptimizer", "inner_optimizer", expected=expected, got=got))
        if inner_optimizer.loss_scale_factor is not None:
            expected, got = "an optimizer without loss_scale_factor", str(inner_optimizer.loss_scale_factor)
            remedy = "Give the number as initial_scale"
            raise ValueError(
                explain("LossScaleOptimizer", "inner_optimizer", expected=expected, got=got, remedy=remedy)
            )
        self.initial_scale = number("LossScaleOptimizer", "initial_scale", initial_scale, POSITIVE)
        steps = number("LossScaleOptimizer", "dynamic_growth_steps", dynamic_growth_steps, _STEPS)
        self.dynamic_growth_steps = int(steps)
        self.inner_optimizer, self.name, self._left_out = inner_optimizer, name, 0
        inner_optimizer.check_numerics = True
        inner_optimizer._core.unsaved |= {"loss_scale_factor"}  # in files as dynamic_scale
        inner_optimizer._core.before_step = self._prepare
        alone = context.has_strategy() and context.get_strategy().extended.placement.store is not None
        how: dict[str, Any] = {"trainable": False, "per_worker_variable": alone}
        self.dynamic_scale = Variable(self.initial_scale, dtype="float32", name=f"{name}/dynamic_scale", **how)
        self._changed_at = Variable(0, dtype="int64", name=f"{name}/changed_at", **how)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of this optimizer and of the inner one, as JSON holds them. Local."""
        return config_of(self, attributes_of(self, ()))

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> LossScaleOptimizer:
        """Return a new optimizer whose arguments are those of `get_config`; see `Optimizer.from_config`. Collective."""
        return made_from(cls, config, custom_objects)

    @property
    def iterations(self) -> int:
        """The number of updates of the inner optimizer."""
        return self.inner_optimizer.iterations

    @property
    def learning_rate(self) -> float:
        """The inner optimizer's learning rate of the next step. Can be set, on every rank."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Rate) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def step_counter(self) -> int:
        """The number of finite steps since the last change of the factor."""
        return self.inner_optimizer._core.calls - int(self._changed_at)

    def scale_loss(self, loss: Any) -> Any:
        """Return a loss times the factor, for the computation of gradients. An array of CuPy is multiplied on its GPU."""
        scale = self.dynamic_scale.array
        on_gpu = is_gpu(scale) and type(loss) is type(scale)
        return loss * (scale.astype(loss.dtype) if on_gpu else float(scale))

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable | ShardedVariable]],
        *,
        experimental_aggregate_gradients: bool = True,
        name: str | None = None,
    ) -> int:
        """Sum gradients of scaled losses and update the variables, if all sums are finite. Collective; in replica context.

        Args:
            grads_and_vars, experimental_aggregate_gradients, name: as for `Optimizer.apply_gradients`, whose errors it raises.

        Returns:
            `iterations`, which does not count skipped steps; on a GPU that decides about them an array of CuPy with that number.
        """
        replica = context.expect_replica("LossScaleOptimizer.apply_gradients")
        pairs = ReplicaPairs(each_variable(grads_and_vars))
        replica.merge_call(self._take_step, args=(pairs, bool(experimental_aggregate_gradients)))
        overflow = self.inner_optimizer._core.overflow
        return self.iterations if overflow is None else overflow.count

    def _take_step(self, strategy: Any, pairs: Any, aggregate: bool) -> None:
        if self.dynamic_scale.placement.strategy is not strategy:
            expected, got = "an optimizer that was made in the strategy's scope", "one that was made elsewhere"
            raise ValueError(explain("LossScaleOptimizer.apply_gradients", self.name, expected=expected, got=got))
        inner = self.inner_optimizer
        try:
            inner._take_step(strategy, pairs, aggregate)
        except FloatingPointError:  # on every rank that steps together with this one
            self._set(0.5)
            self._note_skipped(self._left_out + 1)
        else:
            if inner._core.overflow is None:
                self._note_skipped(0)
                if self.step_counter >= self.dynamic_growth_steps:
                    self._set(2.0)

    def _prepare(self, step: UpdateRun) -> None:
        """Give the factor to the inner optimizer before a step, or leave it to the GPU."""
        inner, core = self.inner_optimizer, self.inner_optimizer._core
        if not step.may_skip:
            if core.overflow is not None:
                core.count_on_host()
            scale = float(self.dynamic_scale)
            if inner.loss_scale_factor != scale:
                inner.loss_scale_factor = scale
            return
        if core.overflow is None:
            from .device_scale import DeviceLossScale

            how = self.dynamic_growth_steps, self._note_skipped
            core.overflow = DeviceLossScale(self.dynamic_scale, self._changed_at, *how)
            inner.loss_scale_factor = None
        core.started -= core.overflow.begin((step, core.revision), core.started)

    def _set(self, times: float) -> None:
        self.dynamic_scale.assign(min(max(float(self.dynamic_scale) * times, LEAST_SCALE), MOST_SCALE))
        self._changed_at.assign(self.inner_optimizer._core.calls)

    def _note_skipped(self, steps: int) -> None:
        """Warn once if too many steps were skipped in a row."""
        placement = self.dynamic_scale.placement
        speaks = placement.strategy.rank == 0 or placement.store is not None
        if self._left_out < _WORRYING <= steps and speaks:
            text = "LossScaleOptimizer: %d steps in a row were left out, for sums that are not finite: the factor is %g now"
            logger.warning(text, steps, float(self.dynamic_scale))
        self._left_out = steps

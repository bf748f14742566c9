"""A Keras optimizer whose update begins with the sum of the gradients over all ranks."""

from __future__ import annotations

from typing import Any

import keras

from ..errors import ContextError, explain
from .gradients import sum_over_ranks
from .link import Link
from .subclass import subclass

__all__ = ["DistributedOptimizer", "distribute_optimizer"]


class DistributedOptimizer(keras.optimizers.Optimizer):
    """What `distribute` makes of an optimizer's class: the class itself, and these methods first."""

    mpistrat: Link

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a plain optimizer: copies, and those made from a configuration, belong to no strategy."""
        return cls.__bases__[1](*args, **kwargs)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Sum the gradients over all ranks, then update as Keras does. Collective."""
        if self.mpistrat.in_sum:
            super().apply(grads, trainable_variables)
            return
        variables = None if trainable_variables is None else list(trainable_variables)
        super().apply(sum_over_ranks(self.mpistrat, list(grads), variables), variables)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Sum the gradients over all ranks, then return what Keras does. Collective."""
        grads = sum_over_ranks(self.mpistrat, list(grads), None)
        self.mpistrat.in_sum = True
        try:
            return super().stateless_apply(optimizer_variables, grads, trainable_variables)
        finally:
            self.mpistrat.in_sum = False


def distribute_optimizer(link: Link, optimizer: Any) -> None:
    """Make an optimizer a distributed one; one that is of the strategy's stays as it is.

    Raises:
        ContextError: it was distributed in another strategy.
    """
    if isinstance(optimizer, DistributedOptimizer):
        if optimizer.mpistrat.strategy is not link.strategy:
            remedy = "Make a new optimizer, and compile the model with it"
            got = "one that was distributed in another strategy"
            raise ContextError(
                explain("compile", "optimizer", expected="an optimizer of no strategy", got=got, remedy=remedy)
            )
        return
    optimizer.__class__ = subclass(type(optimizer), DistributedOptimizer)
    vars(optimizer)["mpistrat"] = link

"""The mean over all tokens: losses are sums with counts; the step divides by the counts of all replicas."""

from __future__ import annotations

import operator
from typing import Any, final

import torch

from ..base.errors import explain
from ..base.types import Quality
from ..strategy.contexts import local_replica

__all__ = ["LossCount", "counted_loss"]

_FUNCTION = "ms.torch.counted_loss"


@final
class LossCount:
    """The count of the losses whose gradients a local replica has.

    Attributes:
        value: the sum of the counts; None if no loss was counted.
        used: True if a step has taken the gradients.
    """

    def __init__(self) -> None:
        self.value: int | None = None
        self.used = False

    def clear(self) -> None:
        """Start again, without gradients."""
        self.value, self.used = None, False

    def add(self, count: int, empty: bool) -> None:
        """Add the count of a loss whose backward pass starts.

        Args:
            count: of the loss.
            empty: True if no parameter has a gradient.

        Raises:
            RuntimeError: a step may have taken some of the gradients.
        """
        if empty:
            self.clear()
        elif self.used:
            expected = "gradients that were cleared since the last step, by optimizer.zero_grad()"
            raise RuntimeError(explain(_FUNCTION, "", expected=expected, got="parameters that have some"))
        self.value = count + (self.value or 0)


class _CountedLoss(torch.autograd.Function):
    """The identity, whose backward pass adds a count."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, optimizer: Any, count: int) -> torch.Tensor:
        ctx.optimizer, ctx.replica, ctx.count = optimizer, local_replica(optimizer.mpistrat_strategy), count
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        links = ctx.optimizer.mpistrat_links[ctx.replica]
        empty = all(link.parameter.grad is None for link in links)
        ctx.optimizer.mpistrat_counts[ctx.replica].add(ctx.count, empty)
        return gradient, None, None


def counted_loss(loss: torch.Tensor, count: Any, optimizer: Any) -> torch.Tensor:
    """Return a loss that is a sum over `count` terms, such as tokens, so that the step takes the mean over all of them.

    The backward pass adds the count; `optimizer.step()` divides the sum of gradients by the counts of all replicas and of all
    backward passes since `optimizer.zero_grad()`. All replicas must count, also with 0.

    Args:
        loss: a scalar, the sum over this replica's terms.
        count: the number of terms, an integer or a tensor of one.
        optimizer: of `distribute(module, optimizer, loss="sum")`.

    Raises:
        TypeError: an optimizer that was not distributed; a count that is not an integer.
        ValueError: an optimizer for losses that are means; a negative count; parameter servers or local_steps.

    Example:
        >>> loss = cross_entropy(model(x), y, ignore_index=-1, reduction="sum")  # doctest: +SKIP
        >>> ms.torch.counted_loss(loss, (y != -1).sum(), optimizer).backward()  # doctest: +SKIP
        >>> optimizer.step()  # doctest: +SKIP
    """
    if not hasattr(optimizer, "mpistrat_counts"):
        remedy = "Pass the optimizer that ms.torch.distribute has returned"
        expected, got = "a distributed optimizer of torch.optim", type(optimizer).__name__
        raise TypeError(explain(_FUNCTION, "optimizer", expected=expected, got=got, remedy=remedy))
    placement = optimizer.mpistrat_strategy.extended.placement
    if got := placement.lacks(Quality.COMMON_STEPS, Quality.EQUAL_NODES):
        expected = "a strategy that sums the gradients of all replicas in each step"
        remedy = "Divide the loss by the expected number of terms, or use ms.MultiWorkerMirroredStrategy()"
        raise ValueError(explain(_FUNCTION, "optimizer", expected=expected, got=f"one with {got}", remedy=remedy))
    if optimizer.mpistrat_weighs:
        expected, got = 'ms.torch.distribute(..., loss="sum")', 'loss="mean", which weighs gradients by rows'
        raise ValueError(explain(_FUNCTION, "optimizer", expected=expected, got=got))
    number = operator.index(count)
    if number < 0:
        raise ValueError(explain(_FUNCTION, "count", expected="0 or more", got=str(number)))
    return _CountedLoss.apply(loss, optimizer, number)  # type: ignore[no-any-return]

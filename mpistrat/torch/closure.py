"""The step of an optimizer that calls a closure, as LBFGS does in its line search: each call is a pass of all replicas.

Every rank runs the optimizer's own step on copies of the parameters. The closure computes with these copies, sums the
gradients as a step does, and returns the loss of the whole batch. So all ranks have equal values, and search the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..base import context
from ..base.errors import explain
from ..strategy.contexts import in_step
from .module import check_parameters
from .whole import TorchWholeRule

__all__ = ["step_with_closure"]

_REMEDY = "Call optimizer.step(closure) in a function, and call that by strategy.run"


def step_with_closure(optimizer: Any, whole: TorchWholeRule, closure: Callable[[], Any] | None) -> Any:
    """Take a step of a distributed optimizer; return the result of its own step. Collective.

    Args:
        optimizer: a `TorchOptimizer`.
        whole: its rule.
        closure: computes this replica's loss and its gradients, and returns the loss.

    Raises:
        TypeError: no closure.
        RuntimeError: several local replicas.
        CollectiveMismatchError: on every rank, when ranks have computed different values.
        BatchError: the loss is of several batches, of which replicas have unequal shares.
    """
    strategy, function = optimizer.mpistrat_strategy, f"{optimizer.mpistrat_rule.rule}.step"
    if closure is None:
        expected, got = "a function that clears the gradients, calls backward and returns the loss", "None"
        remedy = "Call optimizer.step(closure)"
        raise TypeError(explain(function, "closure", expected=expected, got=got, remedy=remedy))
    replicas = len(strategy.extended.replicas)
    if replicas > 1:
        expected, got = "one replica on each rank", f"{replicas}, which share the optimizer"
        remedy = "Start a rank for each replica, or take an optimizer without a closure"
        raise RuntimeError(explain(function, "", expected=expected, got=got, remedy=remedy))
    optimizer.__dict__.update(_opt_called=True)  # torch's schedulers check it, for a warning
    step = optimizer.mpistrat_rule.iterations + 1
    result = whole.run(lambda: _evaluated(optimizer, whole, closure, function), step)

    def write() -> None:
        context.expect_replica(function).merge_call(lambda strategy: whole.assign())

    in_step(strategy, write, function, _REMEDY)
    return result


def _evaluated(optimizer: Any, whole: TorchWholeRule, closure: Callable[[], Any], function: str) -> Any:
    """Return the loss of the whole batch at the parameters' copies, and set its gradients. Collective."""
    module, rule, links = optimizer.mpistrat_module, optimizer.mpistrat_rule, optimizer.mpistrat_links[0]
    copies, losses = whole.parameters(), list[float]()
    try:
        for link in links:
            link.parameter.data = copies[link.variable.name].data.to(link.parameter.device)
        with torch.enable_grad():
            loss = closure()
    finally:
        for link in links:
            link.attach()
    weight, value = module.mpistrat_passes.weight_of_loss(loss), loss
    if isinstance(loss, torch.Tensor):
        value = loss.detach()
    check_parameters(module, 0)

    def add() -> None:
        optimizer._apply()
        if loss is not None:
            own = float(value) * weight if weight else 0.0  # the mean of no row is NaN
            losses.append(float(context.expect_replica(function).all_reduce("SUM", np.float64(own))))

    in_step(optimizer.mpistrat_strategy, add, function, _REMEDY)
    if not losses:
        return None
    total = rule.mean_loss(losses[0])
    return loss.new_tensor(total) if isinstance(loss, torch.Tensor) else total

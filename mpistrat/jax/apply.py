"""apply: the step of an optimizer with the gradients of a distributed tree."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NoReturn, final

import jax
import numpy as np

from ..base import context, global_batch
from ..base.errors import BatchError, explain
from ..base.masks import plain_array
from ..comm.arrays import accumulation_dtype
from ..optimizers import LossScaleOptimizer, Optimizer
from ..optimizers.foreign import write_share
from ..strategy.contexts import in_step, local_replica
from ..strategy.loss import summed_replicas, weight_of_pass
from .arrays import JaxLink, flatten, link_of, memory_of, names_of, release
from .gradients import is_weighted
from .rule import JaxRule

__all__ = ["apply"]

_FUNCTION = "ms.jax.apply"


@final
class _ReplicaStep:
    """The gradients of one replica in a step; a leaf of nested structures.

    Attributes:
        made: the parameters' arrays after the step.
    """

    def __init__(
        self,
        optimizer: Optimizer | LossScaleOptimizer,
        links: Sequence[JaxLink],
        gradients: Sequence[Any],
        shares: Sequence[float],
        extra: dict[str, Any],
    ) -> None:
        self._optimizer, self._links, self._gradients, self._shares = optimizer, links, gradients, shares
        self._extra = extra
        self.made: list[Any] = []

    def take(self) -> None:
        """Take the step. Collective; in replica context."""
        frame = context.current()
        replica, local = frame.replica, local_replica(frame.strategy)
        pairs = [
            (None if gradient is None else self._load(gradient, link, local, share), link.variable)
            for gradient, link, share in zip(self._gradients, self._links, self._shares, strict=True)
        ]
        replica.merge_call(lambda _: self._begin())
        self._optimizer.apply_gradients(pairs)
        self.made = replica.merge_call(lambda _: _Made([link.make() for link in self._links])).arrays

    def _begin(self) -> None:
        if isinstance(rule := getattr(self._optimizer, "inner_optimizer", self._optimizer), JaxRule):
            rule.take_extra(self._extra)
        release(self._links)

    def _load(self, gradient: Any, link: JaxLink, replica: int, share: float) -> Any:
        """Return the gradient, times the replica's share, in the memory that is summed."""
        target = link.variable.gradient(replica)
        array = memory_of(gradient, target)
        if share == 1:
            target[...] = array
        elif share and accumulation_dtype(array.dtype) != array.dtype:
            target[...] = array.astype(np.float32) * np.float32(share)
        else:
            write_share(array, share, target)
        return target


@final
class _Made:
    """New arrays of parameters; a leaf of nested structures, equal for all local replicas."""

    def __init__(self, arrays: list[Any]) -> None:
        self.arrays = arrays


def apply(optimizer: Optimizer | LossScaleOptimizer, grads: Any, params: Any, of: Any = None, **extra: Any) -> Any:
    """Sum gradients over all replicas, update the parameters in one pass, and return them. Collective.

    In a step of `strategy.run`, or outside on ranks with one replica each. `params` is consumed: later use of its arrays
    raises an error. It waits for computations with them.

    Gradients of `ms.jax.value_and_grad` are weighted already. Others are weighted by the batch `of`, or that of
    `strategy.batch`. Equal shares of batches need none of these.

    Args:
        optimizer: one of `ms.optimizers`.
        grads: this replica's, a tree like `params`; None, on all ranks, for a parameter that must not change.
        params: the result of `distribute` or the last `apply`, or a subtree of it.
        of: the batch of the gradients, or an array of it, as the dataset returned it.
        extra: arguments of optax's update, as `value=` of `optax.contrib.reduce_on_plateau`, equal on all ranks.

    Returns:
        The tree `params` with its arrays after the update.

    Raises:
        ContextError: outside of `strategy.run` on a rank with several local replicas, or with servers.
        ValueError: other structures, shapes or dtypes than the parameters'; an optimizer of another strategy.
        TypeError: not an optimizer of `ms.optimizers`; values of a traced function.
        RuntimeError: arrays that are not parameters, were consumed, or donated.
        BatchError: replicas have unequal shares of batches, and the batch of the gradients is unknown.
        CollectiveMismatchError: on every rank, when ranks update different parameters, or with different settings.

    Example:
        >>> loss, grads = ms.jax.value_and_grad(loss_of)(params, batch)  # doctest: +SKIP
        >>> params = ms.jax.apply(optimizer, grads, params)  # doctest: +SKIP
    """
    rule = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
    if not isinstance(rule, Optimizer):
        expected, got = "an optimizer of ms.optimizers", f"{type(rule).__module__}.{type(rule).__qualname__}"
        raise TypeError(explain(_FUNCTION, "optimizer", expected=expected, got=got))
    if extra and not isinstance(rule, JaxRule):
        expected, got = "an optimizer of optax, for extra arguments", f"{type(rule).__name__}"
        raise TypeError(explain(_FUNCTION, next(iter(extra)), expected=expected, got=got))
    leaves, structure = flatten(params)
    gradients, form = flatten(grads)
    if form != structure:
        _refuse_structure(names_of(params), names_of(grads), form, structure)
    places, links, chosen = [], [], []
    for place, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
        link = link_of(leaf)
        if gradient is None and link is None:
            continue
        if getattr(gradient, "dtype", None) == jax.dtypes.float0:  # of an integer
            continue
        name = names_of(params)[place] if link is None else link.name
        links.append(_checked(leaf, gradient, link, name))
        places.append(place)
        chosen.append(gradient)
    if not links:
        raise ValueError(explain(_FUNCTION, "params", expected="parameters with gradients", got="no gradient"))
    strategy = links[0].variable.placement.strategy
    replica = local_replica(strategy)
    step = _ReplicaStep(optimizer, links, chosen, _shares(strategy, links, chosen, of, replica), extra)
    remedy = "Put gradients and apply into a function, and call that by strategy.run(step, args=(params, *batch))"
    in_step(strategy, step.take, _FUNCTION, remedy)
    for place, array, link in zip(places, step.made, links, strict=True):
        leaves[place] = array
        if replica in link.weighted:
            link.weighted[replica] = False
    return structure.unflatten(leaves)


def _shares(strategy: Any, links: Sequence[JaxLink], gradients: Sequence[Any], of: Any, replica: int) -> list[float]:
    """Return the factor of each gradient before the sum.

    Raises:
        BatchError: the batch of a gradient is unknown, or a weighted gradient gets a batch.
    """
    equal, weight = 1 / summed_replicas(strategy), None
    shares = []
    for link, gradient in zip(links, gradients, strict=True):
        weighted = is_weighted(gradient, link, replica)
        if weighted and of is not None and link.mean:
            raise BatchError(
                f"{_FUNCTION}: {link.name}: of= is given, and ms.jax.value_and_grad has weighted its gradients already; rank "
                f"{strategy.rank}. Leave of= out, or compute all gradients by jax.value_and_grad"
            )
        if not link.mean or gradient is None:
            shares.append(1.0)
        elif weighted:
            shares.append(equal)
        elif weighted is None and of is None and strategy.extended.batches.uneven:
            raise BatchError(
                f"{_FUNCTION}: {link.name}: it is unknown whether this gradient is weighted: ms.jax.value_and_grad has computed "
                f"others of this parameter, but none since the last ms.jax.apply; rank {strategy.rank}. Compute all gradients by "
                "ms.jax.value_and_grad, after the last ms.jax.apply, or give the batch of unweighted ones: of=x"
            )
        else:
            weight = _weight(strategy, of, link.name) if weight is None else weight
            shares.append(weight * equal)
    return shares


def _weight(strategy: Any, of: Any, name: str) -> float:
    """Return the weight of gradients of the batch `of`, of `strategy.batch`, or of equal shares."""
    if of is None and strategy.extended.batches.uneven and not global_batch.is_named():
        raise BatchError(
            f"{_FUNCTION}: {name}: this gradient has no weight: the replicas have unequal parts of batches, and a gradient does "
            f"not show which batch, or sum of several, it is of; rank {strategy.rank}. Compute gradients by "
            "ms.jax.value_and_grad(fun), which weights them, or give the batch: ms.jax.apply(optimizer, grads, params, of=x); or "
            "write `with strategy.batch(x):` around the call, `with strategy.batch(None):` for rows of no distributed dataset"
        )
    with contextlib.nullcontext() if of is None else strategy.batch(of):
        return weight_of_pass(strategy, (), _FUNCTION)


def _checked(leaf: Any, gradient: Any, link: JaxLink | None, name: str) -> JaxLink:
    """Return the link of a leaf, after checking its gradient."""
    if isinstance(leaf, jax.core.Tracer) or isinstance(gradient, jax.core.Tracer):
        remedy = "Return the gradients of the jitted function, and call ms.jax.apply outside of it"
        raise TypeError(explain(_FUNCTION, name, expected="arrays", got="values of a traced function", remedy=remedy))
    if link is None:
        _refuse(name, f"{type(leaf).__name__} of another origin")
    if link.array is not leaf:
        _refuse(name, "one that an earlier ms.jax.apply has consumed")
    if leaf.is_deleted():
        remedy = "Leave out donate_argnums and donate_argnames for them: their memory is the strategy's"
        _refuse(name, "a deleted one, as jax.jit leaves it behind that donates its arguments", remedy)
    if gradient is None:
        return link
    variable = link.variable
    shape, dtype = getattr(gradient, "shape", None), getattr(gradient, "dtype", None)
    if shape != variable.shape or dtype != variable.dtype:
        expected, got = f"a gradient {variable.dtype}{variable.shape}", f"{type(gradient).__name__} {dtype}{shape}"
        raise ValueError(explain(_FUNCTION, name, expected=expected, got=got))
    if isinstance(gradient, np.ndarray):
        plain_array(gradient, _FUNCTION, name)
    return link


def _refuse(name: str, got: str, remedy: str = "") -> NoReturn:
    expected = "an array that ms.jax.distribute or the last ms.jax.apply returned"
    remedy = remedy or "params = ms.jax.apply(optimizer, grads, params), each time with what the last one returned"
    raise RuntimeError(explain(_FUNCTION, name, expected=expected, got=got, remedy=remedy))


def _refuse_structure(names: Sequence[str], theirs: Sequence[str], form: Any, structure: Any) -> NoReturn:
    lacks = [name for name in names if name not in theirs]
    more = [name for name in theirs if name not in names]
    got = f"one without {lacks[0]}" if lacks else f"one with {more[0]}" if more else f"{form} for {structure}"
    raise ValueError(explain(_FUNCTION, "grads", expected="a tree like params", got=got))

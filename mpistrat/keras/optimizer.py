"""A Keras optimizer whose update starts with the sum of the gradients over all ranks, in one collective per dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from ..base.context import OBSERVERS
from ..base.errors import ContextError, explain
from .link import ModelLink, subclass
from .observed import observed_update, report_compiled

__all__ = ["DistributedOptimizer", "distribute_optimizer", "in_graph", "sum_over_ranks"]

_Add = Callable[..., list[np.ndarray]]  # of arrays of the host: the sums over the ranks


class DistributedOptimizer(keras.optimizers.Optimizer):
    """Methods that `distribute` adds before those of an optimizer's class, in a subclass of both."""

    mpistrat: ModelLink
    mpistrat_update: Any  # updates in one pass with the sum

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return a plain optimizer, as for copies and configurations."""
        return cls.__bases__[1](*args, **kwargs)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Sum the gradients over all ranks, then update as Keras does. Collective."""
        if self.mpistrat.in_sum:
            super().apply(grads, trainable_variables)
            return
        variables = None if trainable_variables is None else list(trainable_variables)
        grads = list(grads)
        if not OBSERVERS or self.mpistrat.in_step:
            self._sum_and_apply(grads, variables)
        elif in_graph(grads):
            report_compiled(self.name)
            self._sum_and_apply(grads, variables)
        else:
            if not self.built and variables is not None:
                self.build(variables)
            with observed_update(self.mpistrat, self._trainable_variables):
                self._sum_and_apply(grads, variables)

    def _sum_and_apply(self, grads: list[Any], variables: list[Any] | None) -> None:
        link = self.mpistrat
        if self.built and keras.backend.backend() == "torch" and link.updates_itself and link.alone:
            known = self._trainable_variables if variables is None else variables
            if _torch_update()(self, grads, known):
                return
        of = self._trainable_variables if variables is None else variables
        grads = sum_over_ranks(link, grads, link.weigher(self, in_graph(grads)), variables, of)
        with link.after_sum():
            super().apply(grads, variables)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Sum the gradients over all ranks, then return Keras's result. Collective."""
        link = self.mpistrat
        if link.in_sum:
            return super().stateless_apply(optimizer_variables, grads, trainable_variables)
        if link.left is not None:
            link.left.append(list(grads))
            return trainable_variables, optimizer_variables
        given = optimizer_variables, list(grads), list(trainable_variables)
        if not OBSERVERS or link.in_step:
            return self._sum_and_return(*given)
        if in_graph(given[1]):
            report_compiled(self.name)
            return self._sum_and_return(*given)
        values = given[2]
        with observed_update(link, self._trainable_variables, values):
            weights, slots = self._sum_and_return(*given)
            values[:] = weights
        return weights, slots

    def _sum_and_return(self, slots: Any, grads: list[Any], weights: Any) -> Any:
        link = self.mpistrat
        summed = sum_over_ranks(link, grads, link.weigher(self, in_graph(grads)), of=self._trainable_variables)
        with link.after_sum():
            return super().stateless_apply(slots, summed, weights)


def distribute_optimizer(link: ModelLink, optimizer: Any) -> None:
    """Distribute an optimizer, unless it is one of this strategy already.

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
    optimizer.__class__ = subclass(type(optimizer), link.optimizers)
    vars(optimizer).update(mpistrat=link, mpistrat_update=None)


def sum_over_ranks(
    link: ModelLink, gradients: Sequence[Any], weigh: Callable[[], float], variables: Sequence[Any] | None = None,
    of: Sequence[Any] = (),
) -> list[Any]:  # fmt: skip
    """Return the weighted sum over all ranks of each gradient; None stays None.

    The computation is collective, in the current step.

    Args:
        link: of the model.
        gradients: the backend's tensors.
        weigh: returns the share, when the sum is computed.
        variables: of the gradients, if known: TensorFlow's sparse gradients have no shape.
        of: the variables of gradients that observers see.
    """
    if keras.backend.backend() == "tensorflow":  # whose updates square each occurrence of a sparse row
        import tensorflow as tf

        gradients = [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in gradients]
    there = [index for index, gradient in enumerate(gradients) if gradient is not None]
    if not there or (link.size == 1 and not (of and OBSERVERS)):
        return list(gradients)
    add = functools.partial(link.sum_gradients, weigh=weigh, of=[of[index] for index in there] if of else ())
    shapes = [tuple((gradients if variables is None else variables)[index].shape) for index in there]
    sums = iter(_BACKENDS[keras.backend.backend()](add, [gradients[index] for index in there], shapes))
    return [None if gradient is None else next(sums) for gradient in gradients]


def in_graph(tensors: Iterable[Any]) -> bool:
    """Return whether tensors are symbolic, in a function that is being compiled."""
    if keras.backend.backend() == "torch":
        import torch

        return bool(torch.compiler.is_compiling())
    if keras.backend.backend() == "jax":
        import jax

        return any(isinstance(tensor, jax.core.Tracer) for tensor in tensors)
    import tensorflow as tf

    return not tf.executing_eagerly()


def _torch_add(add: _Add, tensors: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    return _outside_of_torch_graphs()(add, [tensor.to_dense() if tensor.is_sparse else tensor for tensor in tensors])


@functools.cache
def _outside_of_torch_graphs() -> Callable[[_Add, list[Any]], list[Any]]:
    """Return the function that sums tensors, for which torch.compile leaves its graph."""
    import torch

    from ..torch.tensors import array_of, tensor_of

    def summed(add: _Add, tensors: list[Any]) -> list[Any]:
        totals = add(*(array_of(tensor.detach().cpu()) for tensor in tensors))
        return [tensor_of(total).to(tensor.device) for total, tensor in zip(totals, tensors, strict=True)]

    disabled: Callable[[_Add, list[Any]], list[Any]] = torch.compiler.disable(summed)
    return disabled


@functools.cache
def _torch_update() -> Callable[[Any, list[Any], list[Any]], bool]:
    """Return the function that sums and updates in one pass, if it can; torch.compile leaves its graph for it."""
    import torch

    from .fused import TorchUpdate, fits, goes_on

    def update(optimizer: Any, gradients: list[Any], variables: list[Any]) -> bool:
        fused = optimizer.mpistrat_update
        known = optimizer._trainable_variables
        if fused is None and fits(optimizer) and all(variable.value.device.type == "cpu" for variable in known):
            fused = vars(optimizer)["mpistrat_update"] = TorchUpdate(optimizer.mpistrat, optimizer)
        elif fused is not None and not goes_on(optimizer):
            fused.leave()
            fused = vars(optimizer)["mpistrat_update"] = None
        if fused is not None:
            fused.step(gradients, variables, optimizer.mpistrat.weigher(optimizer, False)())
        return fused is not None

    disabled: Callable[[Any, list[Any], list[Any]], bool] = torch.compiler.disable(update)
    return disabled


def _jax_add(add: _Add, tensors: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    import jax
    from jax.experimental.buffer_callback import buffer_callback

    forms = [jax.ShapeDtypeStruct(tensor.shape, tensor.dtype) for tensor in tensors]

    def add_buffers(_: Any, totals: Sequence[Any], *buffers: Any) -> None:
        for target, total in zip(totals, add(*map(np.asarray, buffers)), strict=True):
            np.copyto(np.asarray(target), total)

    # Totals replace gradients. Steps are in order since each needs the weights of the one before.
    places = {index: index for index in range(len(forms))}
    return list(buffer_callback(add_buffers, forms, has_side_effect=True, input_output_aliases=places)(*tensors))


def _tensorflow_add(add: _Add, tensors: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    import tensorflow as tf

    totals = tf.numpy_function(add, tensors, [tensor.dtype for tensor in tensors], stateful=True)
    for total, shape in zip(totals, shapes, strict=True):
        total.set_shape(shape)
    return list(totals)


_BACKENDS: dict[str, Callable[..., list[Any]]] = {
    "torch": _torch_add,
    "jax": _jax_add,
    "tensorflow": _tensorflow_add,
}

"""A Keras optimizer whose update begins with the sum of the gradients over all ranks, in one collective for each dtype."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from ..errors import ContextError, explain
from .link import Link, subclass

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


def sum_over_ranks(link: Link, gradients: Sequence[Any], variables: Sequence[Any] | None) -> list[Any]:
    """Return the mean over all ranks, weighted by rows, of each gradient; None stays None. Collective, in the step that runs.

    Args:
        link: of the model.
        gradients: the backend's tensors.
        variables: theirs, where known: TensorFlow's sparse gradients do not tell their shape.
    """
    if link.size == 1:
        return list(gradients)
    prepare, add = _BACKENDS[keras.backend.backend()]
    tensors: list[Any] = [None if gradient is None else prepare(gradient) for gradient in gradients]
    by_dtype: dict[str, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if tensor is not None:
            by_dtype.setdefault(keras.backend.standardize_dtype(tensor.dtype), []).append(index)
    for members in by_dtype.values():
        shapes = [tuple((tensors if variables is None else variables)[index].shape) for index in members]
        totals = add(link, [tensors[index] for index in members], shapes)
        for index, total in zip(members, totals, strict=True):
            tensors[index] = total
    return tensors


def _torch_prepare(gradient: Any) -> Any:
    gradient = gradient.detach()
    return gradient.to_dense() if gradient.is_sparse else gradient


def _torch_add(link: Link, tensors: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    import torch

    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    parts = _outside_of_torch_graphs()(link, flat).split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@functools.cache
def _outside_of_torch_graphs() -> Callable[[Link, Any], Any]:
    """What sums a flat tensor; torch.compile leaves its graph for it."""
    import torch

    from ..torch.tensors import array_of, tensor_of

    def add(link: Link, flat: Any) -> Any:
        return tensor_of(link.sum_gradients(array_of(flat.cpu()))).to(flat.device)

    disabled: Callable[[Link, Any], Any] = torch.compiler.disable(add)
    return disabled


def _jax_add(link: Link, tensors: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    import jax
    import jax.numpy as jnp
    from jax.experimental import io_callback

    flat = jnp.concatenate([tensor.reshape(-1) for tensor in tensors])
    result = jax.ShapeDtypeStruct(flat.shape, flat.dtype)
    total = io_callback(lambda array: link.sum_gradients(np.asarray(array)), result, flat, ordered=True)
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(jnp.split(total, ends[:-1]), shapes, strict=True)]


def _tensorflow_prepare(gradient: Any) -> Any:
    import tensorflow as tf

    return tf.convert_to_tensor(gradient)


def _tensorflow_add(link: Link, tensors: list[Any], shapes: list[tuple[int, ...]]) -> list[Any]:
    import tensorflow as tf

    sizes = [math.prod(shape) for shape in shapes]
    flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
    total = tf.numpy_function(link.sum_gradients, [flat], flat.dtype, stateful=True)
    total.set_shape([sum(sizes)])
    return [tf.reshape(part, shape) for part, shape in zip(tf.split(total, sizes), shapes, strict=True)]


_BACKENDS: dict[str, tuple[Callable[[Any], Any], Callable[..., list[Any]]]] = {
    "torch": (_torch_prepare, _torch_add),
    "jax": (lambda gradient: gradient, _jax_add),
    "tensorflow": (_tensorflow_prepare, _tensorflow_add),
}

"""Tensors and arrays of the same memory; the tensor that shows a gradient before its sum."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NoReturn, final

import numpy as np
import torch

from ..base.errors import explain
from ..base.types import IndexedSlices
from ..comm.arrays import as_array, is_bfloat16, is_gpu

__all__ = ["LocalGradient", "array_of", "copy_of", "slices_of", "tensor_of"]


def tensor_of(array: Any) -> torch.Tensor:
    """Return a tensor that shares the memory of a NumPy or CuPy array, of any dtype that torch knows."""
    if type(array) is np.ndarray and array.dtype.kind == "f":
        return torch.from_numpy(array)
    if is_gpu(array):
        return torch.from_dlpack(array)
    if is_bfloat16(array.dtype):
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def copy_of(array: Any) -> torch.Tensor:
    """Return a tensor with a copy of a NumPy or CuPy array, on the array's device."""
    return tensor_of(array).clone()


def array_of(tensor: torch.Tensor) -> Any:
    """Return an array that shares the memory of a tensor, without its history."""
    return as_array(tensor, "mpistrat.torch", "tensor")


def slices_of(tensor: torch.Tensor) -> IndexedSlices:
    """Return the rows of a sparse tensor, such as an embedding's gradient."""
    tensor = tensor.detach().coalesce()
    return IndexedSlices(array_of(tensor.values()), array_of(tensor.indices()[0]), tuple(tensor.shape))


# Allowed on the gradient of one replica: reading its properties, and `zero_grad(set_to_none=False)`.
_ALLOWED = {
    *("__get__", "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "data_ptr", "storage_offset"),
    *("is_contiguous", "is_floating_point", "is_complex", "__len__", "__hash__"),
    *("_is_view", "untyped_storage", "is_conj", "is_neg"),  # by torch's compiler, which describes a parameter's gradient
    *("zero_", "detach_", "requires_grad_", "_foreach_zero_"),
}  # fmt: skip


@final
class LocalGradient(torch.Tensor):
    """The value of `parameter.grad` between `backward` and `zero_grad`: this replica's gradient, not summed yet.

    Functions that compute with it raise an error: clipping by one replica's norm, or a step of a plain optimizer, would make
    the ranks' weights differ. `local_gradient` returns the plain tensor.

    Attributes:
        strategy: a weak reference to the strategy whose replicas' gradients are summed.
    """

    strategy: weakref.ref[Any]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a harmless function, or one of a GradScaler, collectively.

        Raises:
            RuntimeError: for all other functions that compute.
        """
        name = getattr(function, "__name__", str(function))
        if name == "_amp_foreach_non_finite_check_and_unscale_":
            return _unscale(*args)
        if name in _ALLOWED:
            return super().__torch_function__(function, types, args, kwargs or {})
        return _refuse(name)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<LocalGradient of shape {tuple(self.shape)}, not summed over the replicas yet>"


def _unscale(gradients: Sequence[LocalGradient], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Scale gradients, and record whether any replica's have an infinity or NaN. Collective.

    Raises:
        RuntimeError: on a rank with several local replicas, whose threads share the GradScaler.
    """
    strategy = gradients[0].strategy()
    assert strategy is not None
    if len(strategy.extended.replicas) > 1:
        expected, got = "one replica on each rank", f"{len(strategy.extended.replicas)}, which share the GradScaler"
        remedy = "Start a rank for each replica, or leave the GradScaler out: bfloat16 needs none"
        raise RuntimeError(explain("GradScaler", "", expected=expected, got=got, remedy=remedy))
    with torch._C.DisableTorchFunctionSubclass():
        torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found_inf, inverse_scale)
        for gradient in gradients:
            torch.autograd.graph.increment_version(gradient)  # which torch's function does not, and `Overlap` needs
    group = strategy.extended.process_group
    with group.collective("GradScaler.unscale_"):
        found = group.agree(int(bool(found_inf)), "max")
    found_inf.fill_(float(found))


def _refuse(name: str) -> NoReturn:
    remedy = (
        "To clip, pass max_norm= to ms.torch.distribute(module, optimizer); to update, call step() of the optimizer that "
        "it returned; to look at this replica's own gradient, ms.torch.local_gradient(parameter)"
    )
    expected, got = "a gradient summed over all replicas", f"{name} of one replica's own"
    raise RuntimeError(explain("parameter.grad", "", expected=expected, got=got, remedy=remedy))

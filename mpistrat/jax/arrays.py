"""Trees of JAX, and arrays that share the memory of variables: created, recognized, and released before a write.

assign: write new weights into a distributed tree.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import numpy as np

from ..arena.values import checksum, move_like
from ..base import agree
from ..base.errors import ContextError, explain
from ..base.masks import plain_array
from ..base.types import Quality
from ..base.waiting import Backoff, Deadline
from ..comm.arrays import as_array, import_cupy, is_bfloat16, is_gpu
from ..comm.gpu import lend
from ..strategy.contexts import stepping
from ..variables import Variable
from ..variables.variable import box_of

__all__ = [
    "ByIdentity",
    "JaxLink",
    "assign",
    "current",
    "flatten",
    "is_array",
    "is_parameter",
    "link_of",
    "memory_of",
    "names_of",
    "of_memory",
    "release",
]


_PATIENCE = 10.0  # seconds after the last computation until a remaining reference to an array cannot be a computation's


@final
class ByIdentity:
    """Values of existing arrays, which cannot be hashed."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def set(self, array: Any, value: Any) -> None:
        """Set the value of an array, until the array is deleted."""
        key, known = id(array), self._known
        known[key] = weakref.ref(array, lambda _: known.pop(key, None)), value

    def get(self, array: Any) -> Any:
        """Return the value of an array; None without one."""
        reference, value = self._known.get(id(array), (None, None))
        return value if reference is not None and reference() is array else None


_links = ByIdentity()


@final
class JaxLink:
    """The link of a leaf to a variable: one array at a time has the variable's memory.

    Attributes:
        name: of the leaf in its tree.
        variable: the variable.
        mean: True if a replica differentiates the mean over its own rows.
        own: True if this rank has the variable's memory.
        weighted: by local replica, True if `value_and_grad` has differentiated the leaf since the last `apply`, False if it
            did before.
    """

    __slots__ = ("__weakref__", "_array", "_lent", "mean", "name", "own", "variable", "weighted")

    def __init__(self, name: str, variable: Variable, mean: bool) -> None:
        self.name, self.variable, self.mean = name, variable, mean
        self.own = not variable.placement.lacks(Quality.OWN_VARIABLES)
        self.weighted: dict[int, bool] = {}
        self._array: weakref.ref[Any] | None = None
        self._lent: list[weakref.ref[Any]] = []  # one per array; they die when JAX has released its memory

    @property
    def array(self) -> Any:
        """The array of the leaf; None without references to it."""
        return None if self._array is None else self._array()

    @property
    def lent(self) -> bool:
        """True if JAX uses the variable's memory: in an array, or in a computation that reads a deleted one."""
        return any(reference() is not None for reference in self._lent)

    def make(self) -> Any:
        """Return a new array of the variable's memory, or of its current value on a server."""
        variable = self.variable
        if self.own:
            array, reference = _alias(variable.storage(), self.name)
            self._lent = [reference, *(known for known in self._lent if known() is not None)]
        else:
            array = jax.numpy.array(variable.array)
        self._array = weakref.ref(array)
        _links.set(array, self)
        return array

    def delete(self) -> None:
        """Delete the leaf's array: later uses of it raise an error."""
        array = self.array
        if array is not None:
            array.delete()


def link_of(array: Any) -> JaxLink | None:
    """Return the link of an array of a leaf, also of a deleted one; None for other values."""
    link: JaxLink | None = _links.get(array)
    return link


def _alias(memory: np.ndarray, name: str) -> tuple[Any, weakref.ref[Any]]:
    """Return a JAX array that shares the memory, and a reference that dies when JAX has released it.

    JAX releases it when the array is deleted or dead and computations with it have ended.
    """
    if is_gpu(memory):
        lent, reference = lend(memory)
        array = of_memory(lent)
        _check_pointer(array, lent.data.ptr, name)
        return array, reference
    lent = memory.view(np.int16) if is_bfloat16(memory.dtype) else memory[...]
    array = _from_dlpack()(_Bfloat16Capsule(lent) if lent.dtype != memory.dtype else lent)
    _check_pointer(array, memory.ctypes.data, name)
    return array, weakref.ref(lent)


def _check_pointer(array: Any, pointer: int, name: str) -> None:
    if array.size and array.unsafe_buffer_pointer() != pointer:
        raise RuntimeError(explain("ms.jax.distribute", name, expected="the variable's memory", got="a copy by JAX"))


def of_memory(array: Any) -> Any:
    """Convert an array to an argument of JAX, without a copy: NumPy's unchanged, CuPy's to a JAX array."""
    return jax.dlpack.from_dlpack(array) if is_gpu(array) else array


def memory_of(array: Any, like: Any) -> Any:
    """Wait for an array of JAX, and convert it to one of NumPy or CuPy, as `like`."""
    if type(like) is np.ndarray:
        return np.asarray(array)
    return move_like(as_array(jax.block_until_ready(array)), like)


@functools.cache
def _from_dlpack() -> Callable[[Any], Any]:
    """Return `jax.dlpack.from_dlpack` without a copy, or the equal function that it calls.

    The public one takes 80 µs per array, mostly for a stream, which CPUs lack, and for checked dtypes; a tree has hundreds.
    """
    probe = np.zeros(64, np.float32)
    probe = probe[-probe.ctypes.data % 64 // probe.itemsize :][:16]
    device, on_cpu = jax.devices("cpu")[0], 1
    try:  # not public: other versions of JAX may differ
        from jaxlib import _jax

        read = _jax.dlpack_managed_tensor_to_buffer
        if read(probe.__dlpack__(), device, None, False, on_cpu).unsafe_buffer_pointer() == probe.ctypes.data:
            return lambda array: read(array.__dlpack__(), device, None, False, on_cpu)
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
        pass
    return functools.partial(jax.dlpack.from_dlpack, copy=False)


@final
class _Bfloat16Capsule:
    """16-bit integers for DLPack as bfloat16, which NumPy itself does not support."""

    def __init__(self, integers: np.ndarray) -> None:
        self._integers = integers

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._integers.__dlpack_device__()  # type: ignore[return-value]

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._integers.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # DLTensor: void *data; int32 device[2]; int32 ndim; uint8 code, bits; uint16 lanes; ...
        ctypes.c_uint8.from_address(pointer(capsule, b"dltensor") + 20).value = 4  # kDLBfloat
        return capsule


def release(links: Sequence[JaxLink]) -> None:
    """Delete the arrays of leaves, and wait until no computation of this rank reads their memory.

    Raises:
        RuntimeError: another reference keeps the memory.
    """
    for link in links:
        link.delete()
    backoff, deadline = Backoff(yields=0), Deadline(_PATIENCE)
    while kept := [link.name for link in links if link.lent]:
        if deadline.passed:
            if not _computing():
                expected, got = "that nothing keeps the memory of an array", "a NumPy view or another reference of it"
                remedy = "Keep copies: np.array(leaf) instead of np.asarray(leaf)"
                raise RuntimeError(explain("ms.jax.apply", kept[0], expected=expected, got=got, remedy=remedy))
            deadline = Deadline(_PATIENCE)
        backoff.pause()
    if links and links[0].variable.placement.arenas.on_gpu:  # JAX has its own streams there
        import_cupy("ms.jax.apply").cuda.Device(links[0].variable.storage().device.id).synchronize()


def _computing() -> bool:
    """Return whether a computation is still running."""
    return any(not array.is_deleted() and not array.is_ready() for array in jax.live_arrays())


def current(params: Any) -> Any:
    """Return a tree with the current arrays of its parameters.

    For a tree that `apply` consumed before an error; and, if servers have the variables, after another change, as by
    `strategy.restore`: then in a step or outside, on every worker. Leaves that are not parameters of a strategy do not
    change.

    Example:
        >>> params = ms.jax.current(params)  # doctest: +SKIP
    """
    leaves, structure = flatten(params)
    links = [link_of(leaf) for leaf in leaves]
    return structure.unflatten([_now(link, leaf) if link else leaf for link, leaf in zip(links, leaves, strict=True)])


def _now(link: JaxLink, leaf: Any) -> Any:
    array = link.array
    if link.own and array is not None and not array.is_deleted():
        return array
    return link.make()


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a tree, None among them, and the structure."""
    return jax.tree.flatten(tree, is_leaf=lambda leaf: leaf is None)


def names_of(tree: Any) -> list[str]:
    """Return the names of the leaves of a tree, None among them."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return ["/".join(map(_word, path)) or "leaf" for path, _ in pairs]


def _word(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array of numbers, of JAX or NumPy; random keys are not."""
    return isinstance(leaf, (np.ndarray, np.generic)) or (
        isinstance(leaf, jax.Array) and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
    )


def is_parameter(leaf: Any) -> bool:
    """Return whether a leaf is an array of floating numbers."""
    return is_array(leaf) and jax.dtypes.issubdtype(leaf.dtype, np.floating)


_FUNCTION = "ms.jax.assign"


def assign(params: Any, values: Any) -> Any:
    """Write new weights, of a checkpoint or a pretrained model, into a distributed tree, and return it. Collective.

    Outside of steps, with equal values on every rank. `params` is consumed, as by `apply`. An optimizer's state does not
    change.

    Args:
        params: the result of `distribute` or the last `apply`, or a subtree of it; the arrays may be consumed ones.
        values: a tree like it, of arrays of the same shapes; for a leaf that ranks divide, the whole or this rank's slice.
            They are rounded to the parameters' dtypes. Leaves that are not parameters are used unchanged.

    Returns:
        The tree `params` with its arrays after the change.

    Raises:
        ContextError: in a step.
        ValueError: another structure or shape; no parameter of a strategy.
        CollectiveMismatchError: on every rank, when ranks pass different values.

    Example:
        >>> params = ms.jax.assign(params, pretrained)  # doctest: +SKIP
    """
    leaves, structure = flatten(params)
    links = [link_of(leaf) for leaf in leaves]
    known = [link for link in links if link is not None]
    if not known:
        expected, got = "a tree that ms.jax.distribute returned", "none of its arrays"
        raise ValueError(explain(_FUNCTION, "params", expected=expected, got=got))
    placement = known[0].variable.placement
    if stepping(placement.strategy):
        raise ContextError(explain(_FUNCTION, "", expected="a call outside of steps", got="one in strategy.run"))
    exchange = functools.partial(placement.creators.exchange, _FUNCTION)
    others: list[str] = []
    arrays: list[Any] = []
    with agree.together(exchange):
        given, form = flatten(values)
        if form != structure:
            raise ValueError(explain(_FUNCTION, "values", expected=f"a tree like params, {structure}", got=form))
        for leaf, link, name in zip(given, links, names_of(params), strict=True):
            arrays.append(leaf if link is None else _fitting(leaf, link.variable, name))
            if link is None and is_array(leaf):
                others.append(f"{name} #{checksum(np.ascontiguousarray(leaf).reshape(-1)):08x}")
    agree.same(exchange, ", ".join([f"{_FUNCTION} of {len(known)} parameters", *others]), agree.mismatch)
    if known[0].own:
        release(known)
    for link, array in zip(links, arrays, strict=True):
        if link is not None:
            link.variable.assign(array)
    return structure.unflatten(
        [array if link is None else link.make() for link, array in zip(links, arrays, strict=True)]
    )


def _fitting(value: Any, variable: Any, name: str) -> np.ndarray:
    """Convert a value to an array of a variable's shape and dtype."""
    if not is_parameter(value):
        got = type(value).__name__ if not is_array(value) else f"{value.dtype}{value.shape}"
        raise ValueError(explain(_FUNCTION, name, expected="a floating array", got=got))
    array, box = plain_array(jax.block_until_ready(value), _FUNCTION, name), box_of(variable)
    if array.shape == box.shape:
        array = box.cut(array)
    if array.shape != variable.shape:
        raise ValueError(explain(_FUNCTION, name, expected=f"shape {variable.shape}", got=f"shape {array.shape}"))
    return np.array(array, variable.dtype)

"""The ShardedVariable: variables with blocks of rows of one array, used as that array."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np

from ..arena.values import as_flat, check_name, one_value, read_only, zeros
from ..base.arguments import tensorflow_names
from ..base.errors import explain
from ..base.masks import unmasked
from ..base.types import IndexedSlices
from ..comm.arrays import array_module, as_array, on_device_of, to_host
from .array_like import ArrayVariable
from .scatter import checked_slices, row_numbers, row_ranges, rows_of
from .variable import Variable

__all__ = ["ShardedVariable", "each_variable"]

_KIND = ("dtype", "trainable", "synchronization", "aggregation")


@final
class ShardedVariable(ArrayVariable):
    """Variables with consecutive blocks of rows of one array, used as that array (TF: ShardedVariable).

    A strategy with a `variable_partitioner` creates them, so that several servers share a large variable. NumPy sees one array,
    as for a `Variable`. It is written, saved and restored as one, into any number of parts. It is not a `Variable`:
    `v.variables` are its parts.

    Reading fetches only the requested parts, and by row numbers only the requested rows. Values from several parts are a copy.
    Each part is read at its own moment: a write by another worker may be in one part and not yet in another. A call is
    collective if it is for its parts.

    Args:
        variables: made in the scope of one strategy, of one dtype and kind, and one shape except for the first axis.
        name: the name in files; a used name gets a suffix.

    Raises:
        TypeError: no list of variables.
        ValueError: an empty list; a variable without rows, twice, or in another ShardedVariable; variables that differ.

    Attributes:
        variables: the parts.
        offsets: number of the first row of each part.
        shape, dtype, placement: of the whole.

    Example:
        >>> first = ms.Variable([[1.0], [2.0]], name="a")
        >>> parts = [first, ms.Variable([[3.0]], name="b")]
        >>> v = ShardedVariable(parts, name="table")
        >>> v.assign_add([[10.0], [20.0], [30.0]])[::-1].tolist()
        [[33.0], [22.0], [11.0]]
    """

    __slots__ = ("_bounds", "_ends", "_gradients", "offsets", "variables")

    def __init__(self, variables: Sequence[Variable], name: str = "ShardedVariable") -> None:
        """Join the parts. Call it on every rank."""
        _check(variables)
        check_name("ShardedVariable", name)
        self._join(variables, variables[0].placement.unique_name(name))

    @classmethod
    def of(cls, variables: Sequence[Variable], name: str) -> ShardedVariable:
        """Return the variables as one, under a unique name. Call it on every rank."""
        self = cls.__new__(cls)
        self._join(variables, name)
        return self

    def _join(self, variables: Sequence[Variable], name: str) -> None:
        self.variables = tuple(variables)
        first = self.variables[0]
        self._ends = np.cumsum([v.shape[0] for v in self.variables])
        self.offsets: tuple[int, ...] = (0, *self._ends[:-1].tolist())
        self._bounds = tuple(zip(self.offsets, self._ends.tolist(), strict=True))
        shape = (int(self._ends[-1]), *first.shape[1:])
        self._hold(first.placement, replace(first._description, name=name, shape=shape))
        self._gradients: dict[int, Any] = {}
        self.placement.sharded.append(self)

    # attributes

    def part_of(self, rows: Any) -> np.ndarray:
        """Return the number of the part of each of these rows.

        Raises:
            IndexError: there is no such row.
        """
        numbers, _ = row_numbers(self.shape, rows, "part_of")
        return np.searchsorted(self._ends, numbers, side="right").reshape(np.shape(rows))

    def _by_part(self, rows: np.ndarray) -> Iterator[tuple[Variable, np.ndarray, np.ndarray]]:
        """Yield each part, the positions in `rows` of its rows, and their numbers in the part."""
        owners = np.searchsorted(self._ends, rows, side="right")
        order = np.argsort(owners, kind="stable")
        edges = np.searchsorted(owners[order], np.arange(len(self.variables) + 1))
        for part, (variable, offset) in enumerate(zip(self.variables, self.offsets, strict=True)):
            positions = order[edges[part] : edges[part + 1]]
            yield variable, positions, rows[positions] - offset

    # reading

    @property
    def array(self) -> Any:
        """The numbers, read-only; a copy if there are several parts."""
        if len(self.variables) == 1:
            return self.variables[0].array
        return read_only(self.value())

    def numpy(self) -> np.ndarray:
        """Return a copy in the host's memory. Collective if reading a part is."""
        if len(self.variables) == 1:
            return self.variables[0].numpy()
        return np.concatenate([to_host(v.array) for v in self.variables])

    def value(self) -> Any:
        """Return a copy on the variables' device. Collective if reading a part is."""
        if len(self.variables) == 1:
            return self.variables[0].value()
        return _joined([v.array for v in self.variables])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        several = len(self.variables) > 1
        if several and copy is False:
            raise ValueError("ShardedVariable: an array of several parts needs a copy, got copy=False")
        array = super().__array__(dtype, None if several else copy)
        return array if array.flags.writeable or not copy else array.copy()

    def __getitem__(self, index: Any) -> Any:
        wanted = rows_of(unmasked(index, "Variable", f"{self.name}[...]"), self.shape)
        if wanted is None:
            return self.array[index]
        rows, rest = wanted
        block = self._range(rows) if isinstance(rows, range) else self._gather(rows)
        return block[rest]

    def _range(self, rows: range) -> Any:
        """Return rows at equal distances, read from the parts that have any."""
        if rows.step < 0:
            return self._range(rows[::-1])[::-1]
        slices = zip(self.variables, row_ranges(rows, self._bounds), strict=True)
        blocks = [variable[part] for variable, part in slices if part is not None]
        return _joined(blocks) if blocks else zeros((0, *self.shape[1:]), self.dtype, self.variables[0].device)

    def _gather(self, rows: np.ndarray) -> Any:
        """Return rows by their numbers, read from the parts that have any."""
        return self._collect(rows, self.shape[1:], lambda variable, at, local: variable.sparse_read(local))

    def _collect(self, rows: np.ndarray, shape: tuple[int, ...], read: Callable[..., Any]) -> Any:
        """Return the results of `read(part, positions, rows of the part)` for all rows, of that shape, in their order."""
        blocks = [(at, read(variable, at, local)) for variable, at, local in self._by_part(rows) if at.size]
        if len(blocks) == 1:
            return blocks[0][1]
        if not blocks:
            return zeros((0, *shape), self.dtype, self.variables[0].device)
        first = blocks[0][1]
        with on_device_of(first):
            result = array_module(first).empty((rows.size, *shape), self.dtype)
            for at, block in blocks:
                result[at] = block
        return result

    @tensorflow_names()
    def sparse_read(self, indices: Any) -> Any:
        rows, shape = row_numbers(self.shape, indices, "sparse_read")
        return self._gather(rows).reshape(shape)

    @tensorflow_names()
    def gather_nd(self, indices: Any) -> Any:
        array = to_host(as_array(indices, "Variable.gather_nd", "indices"))
        if not array.ndim or not array.size or array.shape[-1] > self.ndim:
            return super().gather_nd(indices)
        rows, _ = row_numbers(self.shape, array[..., 0], "gather_nd")
        flat, rest = array.reshape(rows.size, -1), self.shape[array.shape[-1] :]

        def read(variable: Variable, at: np.ndarray, local: np.ndarray) -> Any:
            return variable.gather_nd(np.column_stack([local, flat[at, 1:]]))

        return self._collect(rows, rest, read).reshape(array.shape[:-1] + rest)

    # writing

    def _update(self, op: str, value: Any) -> ShardedVariable:
        function = f"Variable.{op}"
        whole = as_flat(one_value(value, function), self.shape, self.dtype, function).reshape(self.shape)
        for variable, rows in zip(self.variables, self.cut(whole, function), strict=True):
            getattr(variable, op)(rows)
        return self

    def _scatter(self, op: str, depth: int, indices: np.ndarray, updates: np.ndarray) -> ShardedVariable:
        """Apply updates to all parts, also to those without rows: other ranks or replicas may have some."""
        if depth == 0:  # the whole, seen as one row
            indices, depth = np.tile(np.arange(self.shape[0]), indices.size), 1
            updates = updates.reshape(indices.size, int(np.prod(self.shape[1:], dtype=np.int64)))
        height = int(np.prod(self.shape[1:depth], dtype=np.int64))
        rows, inner = np.divmod(indices, max(height, 1))
        for variable, at, local in self._by_part(rows):
            variable._scatter(op, depth, local * height + inner[at], updates[at])
        return self

    # gradients

    def _local_replica(self, function: str) -> int:
        return self.variables[0]._local_replica(function)

    def gradient(self, local_replica: int) -> Any:
        part = self.variables[0].gradient(local_replica)
        if len(self.variables) == 1:
            return part
        if local_replica not in self._gradients:
            with on_device_of(part):
                self._gradients[local_replica] = array_module(part).zeros(self.shape, part.dtype)
        return self._gradients[local_replica]

    def parts(self, gradient: Any) -> list[tuple[Any, Variable]]:
        """Return pairs of gradient and part, for `apply_gradients`.

        Args:
            gradient: an array, of which views are returned; IndexedSlices, which are divided among the parts; or None for all.

        Raises:
            ValueError: it has another shape, or rows that do not exist.
            TypeError: no array.
        """
        if gradient is None:
            return [(None, variable) for variable in self.variables]
        if isinstance(gradient, IndexedSlices):
            return self._cut_slices(gradient)
        return list(zip(self.cut(gradient, "apply_gradients"), self.variables, strict=True))

    def cut(self, value: Any, function: str) -> list[Any]:
        """Return each part's rows of an array of the whole's shape, as views. Errors name `function`.

        Raises:
            ValueError: it has another shape.
            TypeError: no array.
        """
        array = as_array(value, function, self.name)
        if tuple(array.shape) != self.shape:
            got = f"shape {tuple(array.shape)}"
            raise ValueError(explain(function, self.name, expected=f"shape {self.shape}", got=got))
        return [array[low:high] for low, high in self._bounds]

    def _cut_slices(self, gradient: IndexedSlices) -> list[tuple[Any, Variable]]:
        slices = checked_slices(gradient, self, "apply_gradients")
        found = self._by_part(to_host(slices.indices).astype(np.int64, copy=False))
        return [(IndexedSlices(slices.values[at], local, variable.shape), variable) for variable, at, local in found]

    # where it is used

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"of {len(self.variables)} parts"
        return f"<ShardedVariable {self.name!r} shape={self.shape} dtype={self.dtype} {state}>"

    @property
    def closed(self) -> bool:
        return self.variables[0].closed

    def _close(self) -> None:
        self._gradients.clear()
        for variable in self.variables:
            variable._close()


def each_variable(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return pairs of gradient and variable, with each ShardedVariable replaced by its parts."""
    found: list[tuple[Any, Any]] = []
    for gradient, variable in pairs:
        if type(variable) is ShardedVariable:  # a final class; asking its metaclass costs more than the rest
            found.extend(variable.parts(gradient))
        else:
            found.append((gradient, variable))
    return found


def _joined(blocks: Sequence[Any]) -> Any:
    if len(blocks) == 1:
        return blocks[0]
    with on_device_of(blocks[0]):
        return array_module(blocks[0]).concatenate(blocks)


def _check(variables: Any) -> None:
    function = "ShardedVariable"
    if not isinstance(variables, (list, tuple)) or not all(isinstance(v, Variable) for v in variables):
        raise TypeError(explain(function, "variables", expected="a list of Variables", got=f"{variables!r:.80}"))
    if not variables:
        raise ValueError(explain(function, "variables", expected="at least one", got="none"))
    for v in variables:
        if not v.shape:
            raise ValueError(explain(function, v.name, expected="a variable with rows", got="a scalar"))
        if v.placement is not variables[0].placement:
            raise ValueError(explain(function, v.name, expected="variables of one strategy", got="one of another"))
        for what in _KIND:
            if getattr(v, what) != getattr(variables[0], what):
                expected = f"{what} {getattr(variables[0], what)}, as {variables[0].name!r} has"
                raise ValueError(explain(function, v.name, expected=expected, got=getattr(v, what)))
        if v.shape[1:] != variables[0].shape[1:]:
            expected = f"rows of shape {variables[0].shape[1:]}, as {variables[0].name!r} has"
            raise ValueError(explain(function, v.name, expected=expected, got=v.shape[1:]))
    taken = {id(v) for whole in variables[0].placement.sharded for v in whole.variables}
    for v in variables:
        if id(v) in taken:
            raise ValueError(explain(function, v.name, expected="each variable in one place", got=f"{v.name!r} twice"))
        taken.add(id(v))

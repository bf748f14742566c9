"""Operations on variables, each encoded in one integer, and the pushes that carry them to a server's handler."""

from __future__ import annotations

import enum
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..base.errors import explain
from ..comm.arrays import accumulation_dtype, check_reducible
from ..variables.scatter import scatter

if TYPE_CHECKING:
    from ..optimizers.optimizer import Optimizer

__all__ = ["Handler", "Operation", "Push", "apply_operation", "optimizer_key", "pack", "sum_duplicate_rows", "unpack"]


class Operation(enum.IntEnum):
    """An operation on a variable.

    A GRADIENT is applied by an optimizer; a SKIPPED step of one has no gradients of this worker. ASSIGN, ASSIGN_ADD and
    ASSIGN_SUB take a whole array; the others rows, with duplicates applied one by one: of several SCATTER_UPDATEs of a row the
    last one wins.
    """

    GRADIENT = 1
    ASSIGN = 2
    ASSIGN_ADD = 3
    ASSIGN_SUB = 4
    SCATTER_UPDATE = 5
    SCATTER_ADD = 6
    SCATTER_SUB = 7
    SCATTER_MUL = 8
    SCATTER_DIV = 9
    SCATTER_MIN = 10
    SCATTER_MAX = 11
    SKIPPED = 12


ORDINALS = 1 << 24  # of optimizers that a key distinguishes
_OPERATIONS = {int(operation): operation for operation in Operation}
_SCATTERS = {o: o.name.removeprefix("SCATTER_").lower() for o in Operation if o.name.startswith("SCATTER_")}


def pack(operation: Operation, optimizer: int = 0) -> int:
    """Return the integer that a push carries as its `what`.

    Args:
        operation: what to do; it fills the low byte.
        optimizer: of a GRADIENT, which optimizer's it is; at least 0.

    Example:
        >>> unpack(pack(Operation.GRADIENT, 3))
        (<Operation.GRADIENT: 1>, 3)
    """
    return optimizer << 8 | operation


def unpack(what: int) -> tuple[Operation, int]:
    """Return the operation and the optimizer from `pack`.

    Raises:
        ValueError: there is no such operation.
    """
    operation = _OPERATIONS.get(what & 0xFF)
    if operation is None:
        raise ValueError(explain("unpack", "what", expected="an integer that pack made", got=what))
    return operation, what >> 8


def optimizer_key(optimizer: Optimizer) -> int:
    """Return the number by which worker and server identify an optimizer, from its ordinal and description.

    The same program creates the same optimizers in the same order on every rank. Each worker has its own scale of losses.
    """
    core = optimizer._core
    words = core.describe(without=("loss_scale_factor",))
    return core.ordinal % ORDINALS + ORDINALS * (zlib.crc32(words.encode()) & 0x7FFF)


def apply_operation(operation: Operation, array: np.ndarray, rows: np.ndarray | None, values: np.ndarray) -> None:
    """Change an array in place by any operation except GRADIENT.

    Args:
        operation: the operation.
        array: C-contiguous.
        rows: (k,) int64; None for ASSIGN, ASSIGN_ADD and ASSIGN_SUB. They count rows of the shape of one entry of `values`.
        values: of the array's dtype and shape, or k rows.

    Raises:
        ValueError: an operation on a whole array with rows, or one on rows without.

    Example:
        >>> array = np.zeros((2, 2))
        >>> apply_operation(Operation.SCATTER_ADD, array, np.array([1, 1]), np.array([[1.0, 2.0], [10.0, 20.0]]))
        >>> array.tolist()
        [[0.0, 0.0], [11.0, 22.0]]
    """
    op = _SCATTERS.get(operation)
    if operation is Operation.GRADIENT or (op is None) != (rows is None):
        got = f"{operation.name} {'of a whole array' if rows is None else 'of rows'}"
        raise ValueError(explain("apply_operation", "operation", expected="one that fits", got=got))
    if rows is not None and op is not None:
        if array.size:
            scatter(op, array.reshape(-1, *values.shape[1:]), 0, rows, values)
    elif operation is Operation.ASSIGN:
        np.copyto(array, values)
    elif operation is Operation.ASSIGN_ADD:
        np.add(array, values, out=array)
    else:
        np.subtract(array, values, out=array)


def sum_duplicate_rows(rows: np.ndarray, values: np.ndarray, function: str) -> tuple[np.ndarray, np.ndarray]:
    """Return each row once, in ascending order, with the sum of its values.

    Sums are formed in `accumulation_dtype`, in the order of the values.

    Example:
        >>> rows, values = sum_duplicate_rows(np.array([5, 1, 5]), np.array([1.0, 2.0, 3.0]), "push_rows")
        >>> rows.tolist(), values.tolist()
        ([1, 5], [2.0, 4.0])
    """
    if (rows[1:] > rows[:-1]).all():
        return rows, values
    order = _order(rows)
    ordered = rows[order]
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    if first.all():
        return ordered, values[order]
    check_reducible(values.dtype, function, "values")
    wide = values[order].astype(accumulation_dtype(values.dtype), copy=False)
    starts = np.flatnonzero(first)
    return ordered[starts], np.add.reduceat(wide, starts, axis=0, dtype=wide.dtype).astype(values.dtype, copy=False)


def _order(rows: np.ndarray) -> np.ndarray:
    """Return the positions of rows in ascending order, stable for equal rows.

    Sorting numbers takes a third of the time of an argsort, so each number carries its position in its low bits.
    """
    bits = int(rows.size).bit_length()
    if int(rows.max()) >> (62 - bits) or int(rows.min()) < 0:
        return np.argsort(rows, kind="stable")
    wide = rows.astype(np.int64, copy=False)  # any integer type, perhaps without room for a position
    return np.sort(wide << bits | np.arange(rows.size)) & ((1 << bits) - 1)


class Push(NamedTuple):
    """A message of a worker to a server: a whole variable, rows of one, or a commit, which carries a number only.

    Attributes:
        worker: the sender, counted from 0.
        variable: its number; -1 for a commit.
        number: of the push; a commit that came with a push has the push's.
        what: an integer from the worker, opaque to the transport.
        version: the version of the variable that the worker had read; -1 for none.
        rows: int64 row numbers, unique and ascending unless the worker sent them as they were; None for a whole variable and
            for a commit.
        values: of the variable's dtype, whole or one entry for each row; None for a commit. Read-only, like `rows`, and both
            valid during the call only.
    """

    worker: int
    variable: int
    number: int
    what: int = 0
    version: int = 0
    rows: np.ndarray | None = None
    values: np.ndarray | None = None


# A server's handling of pushes. A handler that returns False has deferred the push: it counts as applied when
# `VariableServer.acknowledge` is called.
Handler = Callable[[Push], Any]

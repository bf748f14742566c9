"""Sources in memory: rows of arrays, and elements of a Python generator."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.errors import explain
from ...base.files import with_zero_padding
from ...base.masks import check_lossless, plain_array
from ...base.text import encoded
from ..buffers import RowBuffers, take_rows
from ..spec import ArraySpec, conform, spec_of_element, spec_of_rows, stack_rows
from .node import UNKNOWN, Batching, Node
from .stage import InputRows

__all__ = [
    "Held",
    "array_of_list",
    "array_rows",
    "check_element_spec",
    "generated",
    "is_plain",
    "plain_lists",
    "row_content",
]

_EPOCHS = 8  # epochs for which a generator stores the first element's digest
_COMPARED, _ELEMENTS = 64, 4096  # rows that ranks compare, and about the number of elements of each


@final
class _Arrays(InputRows):
    """Rows of arrays in memory."""

    def __init__(self, arrays: Any, length: int) -> None:
        self._arrays = arrays
        self._length = length
        self._row_spec = spec_of_rows(arrays)
        self._buffers = RowBuffers()

    @property
    def row_spec(self) -> Any:
        return self._row_spec

    def cardinality(self) -> int:
        return self._length

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        picked = []
        for field, array in enumerate(nest.flatten(self._arrays)):
            picked.append(self._buffers.empty(field, (positions.size, *array.shape[1:]), array.dtype))
            take_rows(array, positions, picked[-1])
        return nest.pack_like(self._arrays, picked)

    def describe(self) -> str:
        leaves = zip(nest.paths(self._arrays), nest.flatten(self.row_spec), strict=True)
        fields = ", ".join(f"{name.strip('[]')} {spec}".strip() for name, spec in leaves)
        return f"from_arrays: {self._length} rows of {fields}"

    def fingerprint(self) -> int:
        """Return a number below 2**63 that differs if any of 64 rows at fixed positions do."""
        hasher = hashlib.sha256(encoded(self.describe()))
        for array in nest.flatten(self._arrays):
            for row in np.unique(np.linspace(0, self._length - 1, _COMPARED, dtype=np.int64)) if self._length else ():
                hasher.update(row_content(array[row]))
        return short_digest(hasher)


def short_digest(hasher: hashlib._Hash) -> int:
    """Return a fingerprint: the first bits of a digest, as a number below 2**63."""
    return int.from_bytes(hasher.digest()[:8], "big") >> 1


def row_content(row: Any) -> bytes:
    """Return bytes that identify a row: those of some elements, or their text where the bytes are pointers."""
    values = np.asarray(row)
    some = values.reshape(1) if values.ndim == 0 else values.flat[:: max(1, values.size // _ELEMENTS)]
    if some.dtype.hasobject:  # pointers
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(some.tolist())).encode()
    return with_zero_padding(some.astype(some.dtype.newbyteorder("<"), copy=False)).tobytes()


def array_rows(arrays: Any, copy: bool = False) -> Node:
    """Return a node of the rows of a nest of arrays, or of copies of them; see `from_arrays`."""
    given = plain_lists(arrays)
    named = zip(nest.paths(given), nest.flatten(given), strict=True)
    leaves = [plain_array(leaf, "from_arrays", f"arrays{name}") for name, leaf in named]
    held = nest.pack_like(given, list(map(_copied, leaves)) if copy else leaves)
    if not leaves:
        raise ValueError(explain("from_arrays", "arrays", expected="at least one array", got=repr(arrays)))
    for name, leaf in zip(nest.paths(held), leaves, strict=True):
        if leaf.ndim == 0:
            raise ValueError(
                explain("from_arrays", f"arrays{name}", expected="rows along a first axis", got="a scalar")
            )
        if len(leaf) != len(leaves[0]):
            expected = f"{len(leaves[0])} rows, as arrays{nest.paths(held)[0]} has"
            raise ValueError(explain("from_arrays", f"arrays{name}", expected=expected, got=f"{len(leaf)} rows"))
    return _Arrays(held, len(leaves[0]))


def _copied(array: NDArray[Any]) -> NDArray[Any]:
    return deepcopy(array) if array.dtype.hasobject else np.array(array)


def plain_lists(arrays: Any) -> Any:
    """Return a nest in which lists of numbers and strings are arrays, not structures."""
    if isinstance(arrays, list) and arrays and is_plain(arrays):
        return array_of_list(arrays, "from_arrays", "arrays")
    if type(arrays) is tuple:
        return tuple(plain_lists(each) for each in arrays)
    if type(arrays) is dict:
        return {name: plain_lists(each) for name, each in arrays.items()}
    return arrays


def array_of_list(values: list[Any], function: str, argument: str) -> NDArray[Any]:
    """Return the array of a list for which `is_plain` is true; errors name the function and its argument."""
    try:
        found = np.asanyarray(values)
    except ValueError:
        expected, remedy = "lists of one length", "Rows of different shapes are a 1-D object array of arrays."
        got = "lists of different lengths"
        raise ValueError(explain(function, argument, expected=expected, got=got, remedy=remedy)) from None
    return check_lossless(values, found, function, argument)


def is_plain(values: list[Any]) -> bool:
    """Return True for a list of numbers and strings, or of such lists: an array, not a structure."""
    kinds = (int, float, complex, str, bytes, np.generic)
    return all(isinstance(each, kinds) or (isinstance(each, list) and is_plain(each)) for each in values)


@final
class Held(InputRows):
    """Elements that were read before and are in memory. Rows have random access."""

    def __init__(self, elements: Sequence[Any], row_spec: Any, batching: Batching | None) -> None:
        self._elements = elements
        self._row_spec = row_spec
        self._batching = batching

    @property
    def random_access(self) -> bool:
        return self._batching is None

    @property
    def batching(self) -> Batching | None:
        return self._batching

    @property
    def row_spec(self) -> Any:
        return self._row_spec

    def cardinality(self) -> int:
        return len(self._elements)

    def elements(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return itertools.islice(self._elements, start, None)

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        return stack_rows([self._elements[position] for position in positions.tolist()], self._row_spec)

    def describe(self) -> str:
        return f"{len(self._elements)} {'rows' if self._batching is None else 'batches'} in memory"


@final
class _Generated(InputRows):
    """Elements from a function's iterator."""

    def __init__(self, function: Callable[..., Iterable[Any]], element_spec: Any) -> None:
        self._function = function
        self._given = element_spec is not None
        self._spec = element_spec
        self._start = _epoch_argument(function)
        self._firsts: dict[int, int] = {}  # digests of the first elements read, by epoch, for the last epochs

    @property
    def random_access(self) -> bool:
        return False

    @property
    def row_spec(self) -> Any:
        if self._spec is None and next(self.elements(0), None) is None:
            remedy = "Give element_spec."
            expected = "a first element, to learn what elements look like"
            raise ValueError(explain("from_generator", "function", expected=expected, got="none", remedy=remedy))
        return self._spec

    def cardinality(self) -> int:
        return UNKNOWN

    def _all(self, epoch: int) -> Iterator[Any]:
        made: object = self._start(epoch)
        if not isinstance(made, Iterable):
            expected, got = "a function that returns an iterator", type(made).__name__
            raise TypeError(explain("from_generator", "function", expected=expected, got=got))
        for position, element in enumerate(made):
            if self._spec is None:
                self._spec = spec_of_element(element)
            try:
                arrays = conform(element, self._spec)
            except TypeError as error:
                raise TypeError(f"from_generator: element {position}: {error}") from None
            except ValueError as error:
                why = "as element_spec says" if self._given else "as the first element was: give element_spec otherwise"
                raise ValueError(f"from_generator: element {position}: {error} ({why})") from None
            if position == 0:
                self._firsts[epoch] = zlib.crc32(b"".join(map(row_content, nest.flatten(arrays))))
                if len(self._firsts) > _EPOCHS:
                    self._firsts.pop(next(iter(self._firsts)))
            yield arrays

    def first_read(self, epoch: int) -> int:
        return self._firsts.get(epoch, 0)

    def describe(self) -> str:
        name = getattr(self._function, "__name__", None) or type(self._function).__name__
        if self._spec is None:
            return f"from_generator({name})"
        leaves = zip(nest.paths(self._spec), nest.flatten(self._spec), strict=True)
        fields = ", ".join(f"{path.strip('[]')} {spec}".strip() for path, spec in leaves)
        return f"from_generator({name}): {fields}"


def _epoch_argument(function: Callable[..., Any]) -> Callable[[int], Any]:
    """Return a function of the epoch. It passes the epoch as the parameter of that name, or as the only required one."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return lambda epoch: function()
    if "epoch" in signature.parameters:
        return lambda epoch: function(epoch=epoch)
    try:
        signature.bind()
    except TypeError:
        return function
    return lambda epoch: function()


def generated(function: Callable[..., Iterable[Any]], element_spec: Any = None) -> Node:
    """Return a node of a function's iterators; see `from_generator`."""
    given: object = function
    if not callable(given):
        remedy = "Pass the function itself, not its result: every epoch calls it again."
        got = type(given).__name__
        raise TypeError(explain("from_generator", "function", expected="a callable", got=got, remedy=remedy))
    check_element_spec("from_generator", element_spec)
    return _Generated(function, element_spec)


def check_element_spec(function: str, element_spec: Any) -> None:
    """Raise TypeError unless it is None or a nest of ArraySpec."""
    if element_spec is None:
        return
    for name, leaf in zip(nest.paths(element_spec), nest.flatten(element_spec), strict=True):
        if not isinstance(leaf, ArraySpec):
            raise TypeError(explain(function, f"element_spec{name}", expected="an ArraySpec", got=repr(leaf)))

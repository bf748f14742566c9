"""Samples of an object with a length and an item per row: PyTorch's map-style Dataset, a list, your own class."""

from __future__ import annotations

import copy
import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.errors import explain
from ...base.text import counted
from ..options import number_of_calls
from ..spec import ArraySpec
from .calls import Calls, SeveralAtOnce
from .map import Mapped
from .node import Node, Traits
from .sources import array_of_list, check_element_spec, is_plain, row_content, short_digest
from .stage import InputRows

if TYPE_CHECKING:
    from ...comm.process_group import ProcessGroup

__all__ = ["FileSamples", "samples_of", "samples_of_files"]

_COMPARED = 64  # items of a list that ranks compare


class _Items:
    """A function from row numbers to samples, as nests of arrays. Picklable."""

    def __init__(self, samples: Any) -> None:
        self._samples = samples
        self.__name__ = type(samples).__name__

    def __call__(self, row: Any) -> Any:
        return _sample(self._samples[int(row)])

    def __repr__(self) -> str:
        return repr(self._samples)


@final
class _ItemsTogether(_Items, SeveralAtOnce):
    """The same for an object with `__getitems__`, which returns the samples of several rows as a list."""

    def together(self, elements: Sequence[Any]) -> list[Any]:
        rows = [int(row) for row in elements]
        found = self._samples.__getitems__(rows)
        if len(found) != len(rows):
            raise ValueError(f"__getitems__ returned {len(found)} samples of {len(rows)} rows")
        return [_sample(sample) for sample in found]


def _sample(sample: Any) -> Any:
    """Return a sample with arrays in place of tensors, images and lists of numbers, and strings in place of paths.

    A process converts them before it sends the sample, since tensors and images are slower to send.
    """
    if isinstance(sample, (np.ndarray, np.generic, str, bytes, int, float, complex)):
        return sample
    if isinstance(sample, list) and is_plain(sample):
        return array_of_list(sample, "from_map_style", "samples")
    if nest.is_nested(sample):
        return nest.map_children(_sample, sample)
    if isinstance(sample, os.PathLike):
        return os.fspath(sample)
    return np.asanyarray(sample) if hasattr(sample, "__array__") or hasattr(sample, "__array_interface__") else sample


@final
class _RowNumbers(InputRows):
    """The row numbers from 0 on."""

    def __init__(self, length: int) -> None:
        self._length = length

    @property
    def row_spec(self) -> ArraySpec:
        return ArraySpec((), np.int64)

    def cardinality(self) -> int:
        return self._length

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        return positions

    def describe(self) -> str:
        return f"{self._length} rows"


class _Samples(Mapped):
    """The samples of an object: a source, implemented as a function of row numbers."""

    _noun = "row"
    _without_samples = "Give element_spec."
    _remedy = (
        "Map the object's samples to such values; ms.data.Dataset.ignore_errors leaves out rows that raise an error."
    )

    def __init__(self, samples: Any, calls: Calls, element_spec: Any) -> None:
        self._samples = samples
        self._length = len(samples)
        self._rank: int | None = None
        super().__init__(_RowNumbers(self._length), calls, element_spec)

    @property
    def parents(self) -> tuple[Node, ...]:
        return ()

    def rebuild(self, parents: Sequence[Node]) -> Node:
        return self

    @property
    def traits(self) -> Traits:
        return Traits(calls_functions=True)

    def bind(self, group: ProcessGroup) -> Node:
        """Return the same samples, whose errors name the rank."""
        if group.topology.size == 1:
            return self
        bound = copy.copy(self)
        bound._rank = group.topology.rank
        return bound

    def check(self) -> None:
        length = len(self._samples)
        if length != self._length:
            expected, got = f"{self._length} samples, as when the dataset was made", length
            remedy = "Make a new dataset of the object after it has changed."
            raise ValueError(explain(self._name, "samples", expected=expected, got=got, remedy=remedy))

    def _learn(self) -> Any:
        if self._length:
            return super()._learn()
        expected = "a first sample, to learn what samples look like"
        raise ValueError(explain(self._name, "samples", expected=expected, got="none", remedy=self._without_samples))

    def fingerprint(self) -> int | None:
        """Return a number that differs if the items of a list do; None for other objects, whose samples may be random."""
        if not isinstance(self._samples, (list, tuple, range, np.ndarray)):
            return None
        rows = np.unique(np.linspace(0, self._length - 1, _COMPARED, dtype=np.int64)).tolist() if self._length else []
        hasher = hashlib.sha256(self.describe().encode())
        for row in rows:
            for leaf in nest.flatten(_sample(self._samples[row])):
                hasher.update(row_content(leaf))
        return short_digest(hasher)

    @property
    def _name(self) -> str:
        rank = "" if self._rank is None else f"rank {self._rank}: "
        return f"{rank}{self._source}"

    @property
    def _source(self) -> str:
        return f"from_map_style({self._calls.function.__name__})"

    def describe(self) -> str:
        return f"{self._source}: {counted(self._length, 'row')}{self._workers()}"

    def _workers(self) -> str:
        calls = self._calls
        return "" if calls.parallel is None else f", {calls.told} {'processes' if calls.processes else 'threads'}"


def samples_of(samples: Any, workers: int, processes: bool, element_spec: Any) -> Node:
    """Return a node of the samples of an object; see `from_map_style`."""
    function = "from_map_style"
    _check_samples(function, samples)
    check_element_spec(function, element_spec)
    parallel = number_of_calls(function, workers or None, "workers")
    items = _ItemsTogether(samples) if callable(getattr(samples, "__getitems__", None)) else _Items(samples)
    calls = Calls(items, parallel, True, bool(processes), (function, "samples"))
    return _Samples(samples, calls, element_spec)


def _check_samples(function: str, samples: Any) -> None:
    expected, kind = "an object with __len__ and __getitem__ by row number", type(samples).__name__

    def refuse(got: str, remedy: str) -> NoReturn:
        raise TypeError(explain(function, "samples", expected=expected, got=got, remedy=remedy))

    if isinstance(samples, (str, bytes, Mapping)):
        refuse(f"a {kind}", "Pass a list, or ms.data.from_arrays a dict of arrays.")
    if not hasattr(samples, "__getitem__"):
        inner = "Pass its `dataset`." if hasattr(samples, "dataset") else "ms.data.from_generator reads an iterable."
        refuse(f"a {kind}, which has no __getitem__", inner)
    try:
        len(samples)
    except (TypeError, NotImplementedError) as error:
        refuse(f"a {kind} without a length ({error})", "ms.data.from_generator reads an iterable.")


class SourceFiles(ABC):
    """The files of a source.

    Attributes:
        function: the function that made the dataset, for errors.
    """

    function: str

    @abstractmethod
    def check(self) -> None:
        """Raise if a file has changed."""

    @abstractmethod
    def fingerprint(self) -> int:
        """Return a number below 2**63 that is the same wherever the files have the same names and rows."""

    @abstractmethod
    def describe(self) -> str:
        """Return one line about the files."""


class FileSamples(SourceFiles):
    """Samples in files, by row number.

    Attributes:
        without_samples: what to do if there is none, for errors.
    """

    without_samples = "Give element_spec."

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, row: int) -> Any: ...


@final
class _SamplesOfFiles(_Samples):
    """Samples in files, which are compared between ranks and must not change."""

    def check(self) -> None:
        self._samples.check()

    def fingerprint(self) -> int:
        return int(self._samples.fingerprint())

    @property
    def _source(self) -> str:
        return str(self._samples.function)

    @property
    def _without_samples(self) -> str:  # type: ignore[override]
        return str(self._samples.without_samples)

    def describe(self) -> str:
        return str(self._samples.describe()) + self._workers()


def samples_of_files(samples: FileSamples, workers: int, processes: bool, element_spec: Any) -> Node:
    """The samples of files; see `from_tar`."""
    check_element_spec(samples.function, element_spec)
    parallel = number_of_calls(samples.function, workers or None, "workers")
    calls = Calls(_Items(samples), parallel, True, bool(processes), (samples.function, "decode"))
    return _SamplesOfFiles(samples, calls, element_spec)

"""Input of a distributed model: this rank's rows of each batch, as a data adapter of Keras."""

from __future__ import annotations

import logging
import random
import zlib
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, final

import keras
import numpy as np
from keras.src.trainers.data_adapters import (
    array_data_adapter,
    array_slicing,
    data_adapter,
    data_adapter_utils,
    get_data_adapter,
)
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter

from ..base import log
from ..base.context import OBSERVERS
from ..base.distributed_values import PerReplica
from ..base.errors import CollectiveMismatchError, explain
from ..base.global_batch import BatchPart
from ..base.masks import plain_array
from ..base.partition import block
from ..comm.arrays import is_gpu, to_host
from ..data import Dataset, DistributedDataset, from_arrays
from ..data.nodes.sources import row_content
from ..strategy.loss import weight_of_pass
from .link import ModelLink
from .observed import inputs_of

__all__ = ["KerasBatches", "arrays_in", "batches_of", "with_row"]

_COMPARED = 64  # rows of an array that ranks compare


class KerasBatches(data_adapter.DataAdapter):
    """This rank's rows of each batch, as a data adapter of Keras. Each iterator is one epoch.

    Attributes:
        counts: this rank's number of rows in each batch of the last epoch.
        training: True if a training step takes each batch.
    """

    def __init__(self, link: ModelLink) -> None:
        self.link = link
        self.training = False
        self.counts: list[int] = []

    @abstractmethod
    def describe(self) -> str:
        """Describe the properties that must be equal on all ranks."""

    @abstractmethod
    def example(self) -> Any:
        """Return a batch to build a model with."""

    def compare_first(self, example: Any) -> None:
        """Warn if ranks that need different rows have the same ones. Collective.

        Args:
            example: a result of `example`.
        """

    def begin(self, model: Any, steps: int | None) -> int | None:
        """Begin a `fit`, given the steps of an epoch; return those of this rank. Collective."""
        return steps

    def dealt(self) -> KerasBatches:
        """Return them dealt to workers, of which each has whole batches. Collective."""
        return self

    @abstractmethod
    def local_batches(self) -> Iterator[tuple[Any, int | None, int]]:
        """Iterate over an epoch: a batch, this rank's number of rows, and that of all ranks.

        None and 0 if the batches of all ranks count equally.
        """

    def close(self) -> None:
        """Stop reading, after `fit`."""

    def __iter__(self) -> Iterator[Any]:
        self.counts, self.link.counts = [], True
        for batch, rows, total in self.local_batches():
            self.link.begin_batch(rows, total, batch, self.training)
            if OBSERVERS and self.training:
                self.link.read.append(inputs_of(batch, rows == 0))
            self.counts.append(_rows(batch) if rows is None else rows)
            yield _converted(batch)

    def get_numpy_iterator(self) -> Iterable[Any]:
        """Return an object whose iterators are epochs."""
        return self

    get_jax_iterator = get_torch_dataloader = get_tf_dataset = get_numpy_iterator

    @property
    def num_batches(self) -> int | None:
        """The number of batches of an epoch; None if unknown."""
        return None

    @property
    def batch_size(self) -> int | None:
        """None: a rank's share of a batch is smaller."""
        return None


def _rows(batch: Any) -> int:
    return next(int(leaf.shape[0]) for leaf in keras.tree.flatten(batch) if leaf is not None)


def with_row(array: Any) -> Any:
    """Return an array of a batch; an empty one gets a row that does not count."""
    if array.shape[0]:
        return array
    return np.zeros((1, *array.shape[1:]), keras.backend.standardize_dtype(array.dtype))


def _converted(batch: Any) -> Any:
    """Convert a batch to the backend's types. Keras takes no CuPy arrays."""
    takes_arrays = keras.backend.backend() == "jax"

    def converted(leaf: Any) -> Any:
        if leaf is None or (takes_arrays and not is_gpu(leaf)):
            return leaf
        array = to_host(leaf) if is_gpu(leaf) else leaf
        return array if takes_arrays else keras.ops.convert_to_tensor(array)

    return keras.tree.map_structure(converted, batch)


def _plain(leaf: Any) -> Any:
    """Convert a masked array to a plain one; return other inputs unchanged."""
    if not isinstance(leaf, np.ma.MaskedArray):
        return leaf
    return plain_array(leaf, "Model.fit, evaluate and predict", "x, y, sample_weight")


@final
class ArrayBatches(KerasBatches):
    """Batches of arrays that every rank has whole: each rank takes contiguous rows of each batch."""

    def __init__(self, link: ModelLink, arrays: Any, shuffle: bool | str = False, **settings: Any) -> None:
        super().__init__(link)
        arrays = keras.tree.map_structure(_plain, arrays)
        whole = array_data_adapter.ArrayDataAdapter(*arrays, **settings)
        self._arrays = array_slicing.convert_to_sliceable(_weighted_arrays(whole), target_backend="numpy")
        self._rows = _rows(_weighted_arrays(whole))
        self._size = int(whole.batch_size)
        self._shuffle = shuffle
        self._epoch = 0
        self._seed = 0
        if shuffle:
            seeds = link.broadcast([np.array([random.getrandbits(62)])])
            self._seed = int(seeds[0][0])

    @property
    def num_batches(self) -> int:
        return -(-self._rows // self._size)

    def describe(self) -> str:
        some = self._taken(np.unique(np.linspace(0, self._rows - 1, min(_COMPARED, self._rows)).astype(int)))
        leaves = [leaf for leaf in keras.tree.flatten(some) if isinstance(leaf, np.ndarray)]
        forms = ", ".join(f"{leaf.dtype} {(self._rows, *leaf.shape[1:])}" for leaf in leaves)
        digest = 0
        for leaf in leaves:
            if leaf.dtype != object:
                digest = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), digest)
        return f"arrays {forms} in batches of {self._size} rows, digest of some rows {digest:08x}"

    def example(self) -> Any:
        whole = min(self._size, self._rows)
        low, high = block(whole, self.link.size, self.link.rank)
        return self._taken(slice(low, max(high, low + 1)))

    def _taken(self, rows: Any) -> Any:
        take = lambda leaf: leaf.convert_to_numpy(leaf[rows])  # noqa: E731
        return keras.tree.map_structure(take, self._arrays, none_is_leaf=False)

    def local_batches(self) -> Iterator[tuple[Any, int | None, int]]:
        order = self._order()
        for start in range(0, self._rows, self._size):
            total = min(self._size, self._rows - start)
            low, high = block(total, self.link.size, self.link.rank)
            rows = high - low
            low, high = (start + low, start + high) if rows else (start, start + 1)
            yield self._taken(slice(low, high) if order is None else order[low:high]), rows, total

    def dealt(self) -> KerasBatches:
        rows = from_arrays(self._taken(slice(0, self._rows)))
        dataset = (rows.shuffle(seed=self._seed) if self._shuffle else rows).batch(self._size)
        return DatasetBatches(self.link, self.link.strategy.distribute_dataset(dataset), None)

    def _order(self) -> np.ndarray | None:
        if not self._shuffle:
            return None
        rng = np.random.default_rng([self._seed, self._epoch])
        self._epoch += 1
        if self._shuffle != "batch":
            return rng.permutation(self._rows)
        starts = range(0, self._rows, self._size)
        return np.concatenate([low + rng.permutation(min(self._size, self._rows - low)) for low in starts])


def _weighted_arrays(adapter: Any) -> Any:
    """Return the arrays of an adapter of Keras, with weights."""
    return vars(adapter)["_inputs"]


@final
class DatasetBatches(KerasBatches):
    """Batches of a distributed dataset of this package; each iterator is its next epoch."""

    def __init__(self, link: ModelLink, dataset: DistributedDataset, class_weight: Any) -> None:
        super().__init__(link)
        self._dataset, self._class_weight = dataset, class_weight

    @property
    def num_batches(self) -> int | None:
        count = self._dataset.cardinality()
        return count if count >= 0 else None

    def describe(self) -> str:
        count = f", {self._dataset.cardinality()} batches" if self.link.meets else ""  # each worker has its own
        return f"a dataset of {self._dataset.element_spec}{count}"

    def example(self) -> Any:
        spec = self._dataset.element_spec
        if spec is None:
            remedy = "Call the model on one batch before fit, so that it is built"
            got = "a dataset function whose rows are not known yet"
            raise ValueError(explain("fit", "x", expected="a dataset with known rows", got=got, remedy=remedy))
        return self._weighted(keras.tree.map_structure(lambda leaf: np.zeros((1, *leaf.shape[1:]), leaf.dtype), spec))

    def _weighted(self, batch: Any) -> Any:
        batch = tuple(batch) if isinstance(batch, list) else batch
        if self._class_weight is None:
            return batch
        x, y, weight = data_adapter_utils.unpack_x_y_sample_weight(batch)
        if weight is not None:
            got = "weights in the dataset, too"
            raise ValueError(explain("fit", "class_weight", expected="batches of (x, y)", got=got))
        return x, y, data_adapter_utils.class_weight_to_sample_weights(y, self._class_weight)

    def local_batches(self) -> Iterator[tuple[Any, int | None, int]]:
        iterator = iter(self._dataset)
        try:
            for batch in iterator:
                if not self.link.alone:
                    batch = _joined(batch)
                rows = _rows(batch)
                if not rows:
                    batch = keras.tree.map_structure(lambda leaf: np.zeros((1, *leaf.shape[1:]), leaf.dtype), batch)
                yield self._weighted(batch), rows, iterator.global_batch_size or 1
        finally:
            iterator.close()


_MORE, _END, _FAILED = range(3)
_PARTS = (  # how a rank takes its share
    (TFDatasetAdapter, "Give each its part: dataset.shard(strategy.size, strategy.rank), before batch"),
    (
        TorchDataLoaderAdapter,
        "Give each its part: sampler=torch.utils.data.DistributedSampler(dataset, strategy.size, strategy.rank)",
    ),
)
_OTHER_PART = "Give each its part: every strategy.size-th batch, from number strategy.rank on"


@final
class OwnBatches(KerasBatches):
    """Batches that each rank reads by itself, from any input of Keras; all count equally."""

    def __init__(self, link: ModelLink, adapter: Any, kind: str) -> None:
        super().__init__(link)
        self._adapter, self._kind = adapter, kind

    @property
    def num_batches(self) -> int | None:
        count = self._adapter.num_batches
        return None if count is None else int(count)

    def describe(self) -> str:
        return f"{self._kind}, {self.num_batches} batches"

    def example(self) -> Any:
        return next(iter(self._adapter.get_numpy_iterator()))  # without reading ahead

    def compare_first(self, example: Any) -> None:
        if self.link.size == 1:
            return
        digest = zlib.crc32(b"".join(map(row_content, arrays_in(example))))
        if len(set(self.link.numbers("first batch", digest)[:, 0].tolist())) == 1:
            remedy = next((text for kind, text in _PARTS if isinstance(self._adapter, kind)), _OTHER_PART)
            log.once(
                logging.WARNING,
                f"fit: all ranks have the same first batch, and each trains on all rows of its own {self._kind}. {remedy}; or "
                "pass arrays or an ms.data dataset, whose batches the ranks divide",
            )

    def _source(self) -> Iterable[Any]:
        made: Iterable[Any]
        backend = keras.backend.backend()
        if isinstance(self._adapter, TFDatasetAdapter) and backend == "tensorflow":
            made = self._adapter.get_tf_dataset()
        elif isinstance(self._adapter, TorchDataLoaderAdapter) and backend == "torch":
            made = self._adapter.get_torch_dataloader()
        elif backend == "jax":
            made = self._adapter.get_jax_iterator()
        else:
            made = self._adapter.get_numpy_iterator()
        return made

    def on_epoch_begin(self) -> None:
        self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._adapter.on_epoch_end()

    def local_batches(self) -> Iterator[tuple[Any, int | None, int]]:
        iterator = iter(self._source())
        number = 0
        while True:
            state, batch, part = _MORE, None, None
            try:
                batch = next(iterator)
                part = self._part_of(batch)
            except StopIteration:
                state = _END
            except Exception:
                if not self.link.in_epoch:
                    self.link.numbers("batch", _FAILED, 0)
                raise
            total = 0 if part is None else part.total
            if not self.link.in_epoch:
                table = self.link.numbers("batch", state, total)
                self._check(number, table[:, 0].tolist())
                total = int(table[:, 1].max())  # an empty share has no memory
            if state == _END:
                return
            self.link.compare_replicas("fit, evaluate or predict", f"batch {number}", arrays_in(batch))
            number += 1
            if total:
                rows = _rows(batch) if part is None else part.rows
                yield keras.tree.map_structure(with_row, batch, none_is_leaf=False), rows, total
            else:
                yield batch, None, 0

    def _part_of(self, batch: Any) -> BatchPart | None:
        """Return the share of a batch from a distributed dataset with unequal shares.

        Raises:
            BatchError: it has arrays of batches of different weights.
        """
        ledger = self.link.strategy.extended.batches
        if not ledger.uneven:
            return None
        parts = ledger.parts_of(keras.tree.flatten(batch))
        if len({part.weight for part in parts}) > 1:
            weight_of_pass(self.link.strategy, keras.tree.flatten(batch), "fit")
        return next(iter(parts), None)

    def _check(self, number: int, states: list[int]) -> None:
        """Check that all ranks have a batch, or none.

        Raises:
            CollectiveMismatchError: some ranks have no more batches.
            RuntimeError: the input of a rank failed.
        """
        function = "fit, evaluate or predict"
        if _FAILED in states:
            got = f"an error in that of rank {states.index(_FAILED)}"
            raise RuntimeError(explain(function, "x", expected=f"batch {number} of every rank's {self._kind}", got=got))
        if len(set(states)) > 1:
            ended = [rank for rank, state in enumerate(states) if state == _END]
            remedy = "Give every rank as many batches, as by steps_per_epoch and .repeat(), or pass an ms.data dataset"
            got = f"{number} on rank {', '.join(map(str, ended))}, and more on the others"
            expected = f"as many batches of every rank's own {self._kind}"
            raise CollectiveMismatchError(explain(function, "x", expected=expected, got=got, remedy=remedy))


def arrays_in(batch: Any) -> Iterator[np.ndarray]:
    """Yield the arrays of a batch of any library, on the host."""
    return (keras.ops.convert_to_numpy(leaf) for leaf in keras.tree.flatten(batch) if leaf is not None)


def batches_of(
    link: ModelLink, function: str, x: Any, y: Any, sample_weight: Any, batch_size: int | None, steps: int | None,
    class_weight: Any = None, shuffle: bool | str = False, training: bool = False,
) -> KerasBatches:  # fmt: skip
    """Return this rank's batches of the input of `fit`, `evaluate` or `predict`. Collective.

    Raises:
        ValueError: arguments that exclude each other.
        TypeError: a PyDataset.
    """
    if isinstance(x, (Dataset, DistributedDataset)):
        for name, value in (("y", y), ("sample_weight", sample_weight), ("batch_size", batch_size)):
            if value is not None:
                remedy = "Put it into the dataset: batches of (x, y) or (x, y, sample_weight)"
                raise ValueError(explain(function, name, expected="None with a dataset", got="a value", remedy=remedy))
        batches: KerasBatches = DatasetBatches(link, link.distributed(function, x, training), class_weight)
    elif isinstance(x, keras.utils.PyDataset):
        expected = "arrays, a dataset of ms.data, or batches of this rank's own"
        remedy = (
            "Keras draws the order of a PyDataset by each process's random numbers, and reads it ahead in threads: "
            "ranks would mix batches. Make an ms.data.from_generator of it"
        )
        raise TypeError(explain(function, "x", expected=expected, got="a PyDataset", remedy=remedy))
    elif array_data_adapter.can_convert_arrays((x, y, sample_weight)):
        settings = {"batch_size": batch_size, "steps": steps, "class_weight": class_weight}
        batches = ArrayBatches(link, (x, y, sample_weight), shuffle, **settings)
    else:
        adapter = get_data_adapter(x, y, sample_weight, batch_size, steps, False, class_weight)
        batches = OwnBatches(link, adapter, type(x).__name__)
    batches = link.input(batches, training)
    batches.training = training
    return batches


def _joined(batch: Any) -> Any:
    """Concatenate the rows of all local replicas."""

    def join(leaf: Any) -> Any:
        return np.concatenate(leaf.values) if isinstance(leaf, PerReplica) else leaf

    return keras.tree.map_structure(join, batch)

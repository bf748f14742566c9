"""tf.data.Datasets as the input of a strategy, divided as tf.distribute divides them: by files, or else by batches."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, final

import numpy as np

from ...base import nest
from ...base.errors import explain
from ..nodes.node import UNKNOWN
from ..spec import ArraySpec
from .from_function import InputContext

__all__ = ["TensorFlowBatches", "is_tensorflow", "tensorflow_text"]

_FUNCTION = "distribute_dataset"


def is_tensorflow(dataset: object) -> bool:
    """Return True for a tf.data.Dataset. TensorFlow is not imported.

    Example:
        >>> is_tensorflow([1, 2])
        False
    """
    tf: Any = sys.modules.get("tensorflow")
    return tf is not None and isinstance(dataset, tf.data.Dataset)


def tensorflow_text(dataset: Any) -> str:
    """Return the text that must be equal on all ranks."""
    policy = dataset.options().experimental_distribute.auto_shard_policy
    return f"a tf.data.Dataset of {dataset.element_spec}, {int(dataset.cardinality())} batches, policy {policy.name}"


@final
class TensorFlowBatches:
    """One worker's part of a dataset of global batches: a batch for each of its replicas in turn.

    Args:
        dataset: equal on all workers.
        context: the worker. As in tf.distribute, batches become smaller, so that those of all replicas have the rows of one.

    Attributes:
        row_spec: of a row; None where TensorFlow does not know it.
        length: the number of batches for replicas; UNKNOWN or INFINITE as in tf.data.

    Raises:
        ValueError: the dataset is not batched, or TensorFlow cannot divide it.
    """

    def __init__(self, dataset: Any, context: InputContext) -> None:
        tf: Any = sys.modules["tensorflow"]

        spec = dataset.element_spec
        leaves = nest.flatten(spec)
        if not all(isinstance(leaf, tf.TensorSpec) for leaf in leaves):
            expected, remedy = "batches of dense tensors", "Map the others with to_tensor or tf.sparse.to_dense."
            raise ValueError(explain(_FUNCTION, "dataset", expected=expected, got=spec, remedy=remedy))
        if any(leaf.shape.rank == 0 for leaf in leaves):
            remedy = "Add .batch(global_batch_size)."
            raise ValueError(explain(_FUNCTION, "dataset", expected="batches", got=f"rows of {spec}", remedy=remedy))
        try:
            self._dataset = _divided(tf, dataset, context)
        except (tf.errors.OpError, ValueError) as error:
            raise _cannot_divide(error) from error
        known = all(leaf.shape.rank is not None and None not in leaf.shape[1:] for leaf in leaves)
        self.row_spec = nest.map_structure(_row_spec, spec) if known else None
        self.length = max(int(self._dataset.cardinality()), UNKNOWN)

    def __iter__(self) -> Iterator[Any]:
        tf: Any = sys.modules["tensorflow"]

        elements = self._dataset.as_numpy_iterator()
        while True:
            try:
                element = next(elements, None)
            except tf.errors.InvalidArgumentError as error:
                if "sharding" not in str(error):
                    raise
                raise _cannot_divide(error) from error  # known only now, on all workers
            if element is None:
                return
            yield element


def _cannot_divide(error: Exception) -> ValueError:
    expected, text = "a dataset that TensorFlow can divide", str(error).splitlines()[0]
    remedy = "tf.data.Options().experimental_distribute.auto_shard_policy chooses the way: FILE, DATA or OFF."
    return ValueError(explain(_FUNCTION, "dataset", expected=expected, got=text, remedy=remedy))


def _row_spec(leaf: Any) -> ArraySpec:
    dtype = np.dtype(leaf.dtype.as_numpy_dtype)
    return ArraySpec(tuple(leaf.shape[1:]), dtype)


def _divided(tf: Any, dataset: Any, context: InputContext) -> Any:
    """Return a worker's part: first smaller batches, then one worker's files or batches, as tf.distribute does it."""
    workers, replicas = context.num_input_pipelines, context.num_replicas_in_sync
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if replicas > 1:
        dataset = _rebatched(tf, dataset, context).prefetch(replicas // workers)
    if policy == tf.data.experimental.AutoShardPolicy.OFF:
        return dataset
    return _made(tf, tf.raw_ops.AutoShardDataset, dataset, num_workers=workers, index=context.input_pipeline_id,
        auto_shard_policy=int(policy), num_replicas=replicas,
    )  # fmt: skip


def _rebatched(tf: Any, dataset: Any, context: InputContext) -> Any:
    replicas = context.num_replicas_in_sync
    size = _batch_size(tf, dataset)
    if size < 0:
        return _made(tf, tf.raw_ops.RebatchDataset, dataset, num_replicas=replicas)
    each, more = divmod(size, replicas)
    sizes = [each + (replica < more) for replica in range(replicas)]
    first = context.input_pipeline_id * (replicas // context.num_input_pipelines)
    return dataset.rebatch(sizes[first:] + sizes[:first])  # each worker begins with the sizes of its own replicas


def _batch_size(tf: Any, dataset: Any) -> int:
    """Return the size of batches, except a smaller last one; -1 if TensorFlow cannot tell."""
    known = {None if leaf.shape.rank is None else leaf.shape[0] for leaf in nest.flatten(dataset.element_spec)}
    (size,) = known if len(known) == 1 else (None,)
    if size is not None:
        return int(size)
    return int(tf.raw_ops.ComputeBatchSize(input_dataset=tf.data.experimental.to_variant(dataset)))


def _made(tf: Any, operation: Any, dataset: Any, **arguments: Any) -> Any:
    """Return the result of one of TensorFlow's operations on datasets, with batches of any size."""
    spec = nest.map_structure(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), dataset.element_spec)
    leaves = nest.flatten(spec)
    variant = operation(
        input_dataset=tf.data.experimental.to_variant(dataset), output_types=[leaf.dtype for leaf in leaves],
        output_shapes=[leaf.shape for leaf in leaves], **arguments,
    )  # fmt: skip
    made = tf.data.experimental.from_variant(variant, spec)
    return made.with_options(dataset.options())

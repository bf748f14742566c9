"""tf.data.Datasets divided among workers, next to the datasets that tf.distribute itself makes of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpistrat.data import INFINITE, UNKNOWN, ArraySpec
from mpistrat.data.feed.from_function import InputContext
from mpistrat.data.feed.from_tensorflow import TensorFlowBatches, is_tensorflow

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

_DATA = ("range", "files", "unknown")  # under every policy; the others under AUTO
POLICY = tf.data.experimental.AutoShardPolicy
LAYOUTS = [(1, 3), (2, 1), (3, 1), (2, 2)]  # workers, and the replicas of each


def plain(element: Any) -> Any:
    """An element with lists in place of arrays."""
    return tf.nest.map_structure(lambda leaf: np.asarray(leaf).tolist(), element)


def files(folder: Path, count: int, rows: int = 7) -> list[str]:
    paths = [str(folder / f"{number}.tfrecord") for number in range(count)]
    for number, path in enumerate(paths):
        with tf.io.TFRecordWriter(path) as writer:
            for row in range(rows):
                writer.write(np.int64(number * 100 + row).tobytes())
    return paths


def numbers(records: Any) -> Any:
    return records.map(lambda record: tf.io.decode_raw(record, tf.int64)[0])


DATASETS: dict[str, Callable[[Path], Any]] = {
    "range": lambda folder: tf.data.Dataset.range(23).batch(8),
    "remainder is dropped": lambda folder: tf.data.Dataset.range(23).batch(8, drop_remainder=True),
    "small batches": lambda folder: tf.data.Dataset.range(7).batch(3),
    "empty": lambda folder: tf.data.Dataset.range(0).batch(4),
    "a dict of pairs": lambda folder: tf.data.Dataset.from_tensor_slices(
        {"x": np.arange(22.0).reshape(11, 2), "y": (np.arange(11), np.array([b"a", b"b"] * 5 + [b"c"]))}
    ).batch(4),
    "map after batch": lambda folder: tf.data.Dataset.range(23).batch(8).map(lambda x: (x, x * 2)),
    "shuffled": lambda folder: tf.data.Dataset.range(23).shuffle(23, seed=3, reshuffle_each_iteration=False).batch(5),
    "padded": lambda folder: tf.data.Dataset.range(1, 9).map(lambda n: tf.fill([n], n)).padded_batch(3),
    "unknown": lambda folder: tf.data.Dataset.range(23).filter(lambda x: x % 3 > 0).batch(4),
    "no batch size": lambda folder: tf.data.Dataset.range(12).batch(4).map(lambda x: tf.boolean_mask(x, x < 9)),
    "prefetched": lambda folder: tf.data.Dataset.range(23).batch(8).prefetch(2),
    "files": lambda folder: numbers(tf.data.TFRecordDataset(files(folder, 5))).batch(6),
    "one file": lambda folder: numbers(tf.data.TFRecordDataset(files(folder, 1))).batch(3),
    "interleaved": lambda folder: numbers(
        tf.data.Dataset.from_tensor_slices(files(folder, 5)).interleave(tf.data.TFRecordDataset, cycle_length=2)
    ).batch(6),
    "listed": lambda folder: numbers(
        tf.data.Dataset.list_files(files(folder, 4), shuffle=False).flat_map(tf.data.TFRecordDataset)
    ).batch(6),
}


def of_tensorflow(dataset: Any, workers: int, index: int, replicas: int) -> list[Any]:
    """The batches of a worker as tf.distribute makes them."""
    from tensorflow.python.distribute import input_lib

    devices = input_lib.InputWorkers([("/device:CPU:0", ("/device:CPU:0",) * (replicas // workers))])
    made = input_lib.DistributedDataset(
        devices, tf.distribute.OneDeviceStrategy("/device:CPU:0"), dataset, num_replicas_in_sync=replicas,
        input_context=tf.distribute.InputContext(workers, index, replicas),
    )  # fmt: skip
    return [plain(element) for element in made._cloned_datasets[0]]


@pytest.mark.parametrize(
    ("name", "policy"),
    [*((name, "AUTO") for name in DATASETS), *((name, policy) for name in _DATA for policy in ("DATA", "FILE", "OFF"))],
)
def test_next_to_tf_distribute(name: str, policy: str, tmp_path: Path) -> None:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = POLICY[policy]
    dataset = DATASETS[name](tmp_path).with_options(options)
    compared = 0
    for workers, each in LAYOUTS:
        for index in range(workers):
            try:
                expected = of_tensorflow(dataset, workers, index, workers * each)
            except tf.errors.OpError:
                with pytest.raises(ValueError, match="expected a dataset that TensorFlow can divide"):
                    list(TensorFlowBatches(dataset, InputContext(workers, index, workers * each)))
                continue
            batches = TensorFlowBatches(dataset, InputContext(workers, index, workers * each))
            for _ in range(2):
                found = list(batches)
                assert [plain(element) for element in found] == expected
                assert all(type(leaf) is np.ndarray for element in found for leaf in tf.nest.flatten(element))
            assert batches.length in (len(expected), UNKNOWN)
            compared += 1
    assert compared >= (1 if policy == "FILE" or name == "one file" else sum(workers for workers, _ in LAYOUTS))


def test_specs_and_lengths() -> None:
    dataset = DATASETS["a dict of pairs"](Path())
    batches = TensorFlowBatches(dataset, InputContext(1, 0, 1))
    expected = {"x": ArraySpec((2,), np.float64), "y": (ArraySpec((), np.int64), ArraySpec((), object))}
    assert batches.row_spec == expected
    assert batches.length == 3
    assert TensorFlowBatches(dataset.repeat(), InputContext(1, 0, 1)).length == INFINITE
    assert TensorFlowBatches(DATASETS["padded"](Path()), InputContext(1, 0, 1)).row_spec is None
    assert is_tensorflow(dataset)
    assert not is_tensorflow(np.arange(3))


def test_what_cannot_be_divided() -> None:
    with pytest.raises(ValueError, match=r"distribute_dataset: dataset: expected batches, got rows of .* Add \.batch"):
        TensorFlowBatches(tf.data.Dataset.range(3), InputContext(1, 0, 1))
    ragged = tf.data.Dataset.range(6).map(lambda n: tf.range(n)).ragged_batch(2)
    with pytest.raises(ValueError, match="expected batches of dense tensors, got RaggedTensorSpec"):
        TensorFlowBatches(ragged, InputContext(1, 0, 1))

"""tf.data.Datasets on ranks: divided as by TensorFlow, ending on all ranks at once, equal on all of them."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed: make test-frameworks")


@pytest.mark.ranks(1, 2, 3)
def test_datasets_on_ranks(mpi_tmp_path):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        gather = strategy.comm.allgather
        size, rank = strategy.size, strategy.rank
        numbers = tf.data.Dataset.range(23).batch(8).map(lambda x: {"x": x, "y": tf.cast(x, tf.float32) * 2})
        data = strategy.distribute_dataset(numbers)
        assert data.cardinality() == (
            3 if size == 1 else ms.data.UNKNOWN
        )  # TensorFlow knows no more of what it divides
        for _ in range(2):  # of each batch a part for each rank, as of ms.data
            steps = [(batch["x"], batch["y"]) for batch in data]
            assert all(type(leaf) is np.ndarray and leaf.dtype.kind in "if" for pair in steps for leaf in pair)
            for step, parts in enumerate(zip(*gather(steps), strict=True)):
                x = np.concatenate([part[0] for part in parts])
                np.testing.assert_array_equal(np.sort(x), np.arange(23)[8 * step : 8 * step + 8])
                np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), x * 2)
        paths = [str(mpi_tmp_path / f"{number}.tfrecord") for number in range(4)]
        if rank == 0:
            for number, path in enumerate(paths):
                with tf.io.TFRecordWriter(path) as writer:
                    for row in range(number + 1):
                        writer.write(np.int64(number * 10 + row).tobytes())
        strategy.comm.barrier()
        records = tf.data.TFRecordDataset(paths).map(lambda record: tf.io.decode_raw(record, tf.int64)[0])
        data = strategy.distribute_dataset(records.batch(6))
        steps = [batch.tolist() for batch in data]
        own = [number * 10 + row for number in range(rank, 4, size) for row in range(number + 1)]
        assert [row for batch in steps for row in batch] == own  # whole files
        assert len(set(gather(len(steps)))) == 1  # also those without rows take part
        iterator = iter(data)
        next(iterator)
        with pytest.raises(
            ValueError, match="restore: expected a dataset of ms.data, to start after the first element"
        ):
            again = iter(data)
            again.restore(iterator.state())
            next(again)
        with pytest.raises(ValueError, match=r"expected batches, got rows .*Add \.batch"):
            strategy.distribute_dataset(tf.data.Dataset.range(5))
        if size > 1:
            with pytest.raises(CollectiveMismatchError, match=r"(?s)different datasets.*4 batches"):
                strategy.distribute_dataset(tf.data.Dataset.range(8 + rank).batch(2))

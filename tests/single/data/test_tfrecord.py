"""TFRecord files of tf.train.Example beside TensorFlow: shapes, lengths that vary, decoders, and records that are damaged."""

from __future__ import annotations

import gzip
import pickle
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpistrat.data import ArraySpec, from_tfrecord
from mpistrat.errors import MissingDependencyError, ShardError
from tests.harness.examples import example

pytest.importorskip("google_crc32c")
pytest.importorskip("google.protobuf")
writers = pytest.importorskip("tensorboardX.record_writer")

ROWS = 6


def write(path: Path, messages: Iterable[bytes]) -> Path:
    writer = writers.RecordWriter(str(path))
    for message in messages:
        writer.write(message)
    writer.close()
    return path


def features(row: int) -> dict[str, Any]:
    return {
        "label": [row - 2],
        "pair": [row, 2**40 + row],
        "image": [float(value) for value in range(row, row + 6)],
        "text": [f"row {row}".encode()],
        "ids": list(range(row % 3)),
        "raw": [np.arange(row, row + 4, dtype=np.uint8).tobytes()],
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "a.tfrecord", (example(features(row)) for row in range(ROWS)))


SPECS = {
    "label": ArraySpec((), "int64"),
    "pair": ArraySpec((2,), "int64"),
    "image": ArraySpec((2, 3), "float32"),
    "ids": ArraySpec((None,), "int64"),
    "text": ArraySpec((), object),
    "raw": ArraySpec((4,), "uint8"),
}


def pixels(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8)


def test_features_in_the_shapes_of_their_specs(path: Path) -> None:
    dataset = from_tfrecord(path, SPECS, decode={"raw": pixels})
    assert dataset.element_spec == SPECS
    rows = [5, 0, 1, 1]
    found = dataset.rows(rows)
    assert found["label"].tolist() == [3, -2, -1, -1]
    assert found["pair"].tolist() == [[row, 2**40 + row] for row in rows]
    assert found["image"].tolist() == [np.arange(row, row + 6).reshape(2, 3).tolist() for row in rows]
    assert found["image"].dtype == np.float32
    assert found["text"].tolist() == [f"row {row}".encode() for row in rows]
    assert [ids.tolist() for ids in found["ids"]] == [[0, 1], [], [0], [0]]
    assert found["raw"].tolist() == [list(range(row, row + 4)) for row in rows]
    assert dataset.padded_batch(ROWS).element(0, 0)["ids"].tolist() == [[0, 0], [0, 0], [0, 1], [0, 0], [0, 0], [0, 1]]


def test_beside_tensorflow(tmp_path: Path) -> None:
    """Files of its writer: each feature is what tf.io.parse_single_example makes of it."""
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

    def feature(values: Any) -> Any:
        if values and isinstance(values[0], bytes):
            return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
        if values and isinstance(values[0], float):
            return tf.train.Feature(float_list=tf.train.FloatList(value=values))
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    for number in range(2):
        with tf.io.TFRecordWriter(str(tmp_path / f"train-{number}.tfrecord")) as writer:
            for row in range(number * ROWS, number * ROWS + ROWS):
                made = {name: feature(values) for name, values in features(row).items()}
                message = tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString()
                writer.write(message)
                if row % 3:  # else TensorFlow also writes that a list without values is one of integers
                    assert tf.train.Example.FromString(example(features(row))) == tf.train.Example.FromString(message)
    names = {
        "label": tf.io.FixedLenFeature([], tf.int64),
        "pair": tf.io.FixedLenFeature([2], tf.int64),
        "image": tf.io.FixedLenFeature([2, 3], tf.float32),
        "ids": tf.io.VarLenFeature(tf.int64),
        "text": tf.io.FixedLenFeature([], tf.string),
    }
    files = sorted(map(str, tmp_path.glob("*")))
    expected = [tf.io.parse_single_example(record, names) for record in tf.data.TFRecordDataset(files)]
    found = list(from_tfrecord(tmp_path, {name: SPECS[name] for name in names}))
    assert len(found) == len(expected) == 2 * ROWS
    for ours, theirs in zip(found, expected, strict=True):
        for name in ("label", "pair", "image"):
            np.testing.assert_array_equal(ours[name], theirs[name].numpy(), strict=True)
        np.testing.assert_array_equal(ours["ids"], tf.sparse.to_dense(theirs["ids"]).numpy(), strict=True)
        assert ours["text"] == theirs["text"].numpy()


def test_features_of_the_first_record(path: Path) -> None:
    """Without specs, shapes are those of the first record; features without values there are not known."""
    dataset = from_tfrecord(path)
    assert dataset.element_spec == {
        "image": ArraySpec((6,), "float32"),
        "label": ArraySpec((), "int64"),
        "pair": ArraySpec((2,), "int64"),
        "raw": ArraySpec((), object),
        "text": ArraySpec((), object),
    }
    assert dataset.rows([2])["label"].tolist() == [0]
    text, number = from_tfrecord(path, ("text", "label")).rows([4])
    assert (text.tolist(), number.tolist()) == ([b"row 4"], [2])
    assert list(from_tfrecord(path, {"y": "label"}).rows([0])) == ["y"]
    assert from_tfrecord(path, "raw", decode={"raw": pixels}).element_spec == ArraySpec((4,), "uint8")
    assert "1 TFRecord file in" in str(from_tfrecord(path, "label"))
    assert "6 records of label int64[]; left out: image, pair, raw, text" in str(from_tfrecord(path, "label"))
    with pytest.raises(
        ValueError, match=r"a\.tfrecord: record at byte 12: ids: expected values, got none.*may be missing"
    ):
        from_tfrecord(path, "ids")


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (ArraySpec((3,), "int64"), r"pair: expected values for int64\[3\], got 2 of int64. Where lengths vary"),
        (ArraySpec((), "int64"), r"pair: expected values for int64\[\], got 2 of int64"),
        (ArraySpec((2,), "int32"), r"pair: expected values for int32\[2\], got 2 of int64"),
        (ArraySpec((None, 3), "int64"), r"pair: expected values for int64\[\?, 3\], got 2 of int64"),
    ],
)
def test_values_that_do_not_fit(path: Path, spec: ArraySpec, reason: str) -> None:
    with pytest.raises(ValueError, match=rf"from_tfrecord: .*a\.tfrecord: record at byte \d+: {reason}"):
        from_tfrecord(path, {"pair": spec}).rows([1])


def test_records_that_differ_from_the_first(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tfrecord", [example({"x": [1, 2]}), example({"x": [3, 4, 5]}), example({"y": [1]})])
    assert from_tfrecord(path).rows([0])["x"].tolist() == [[1, 2]]
    for row, reason in ((1, r"expected values for int64\[2\], got 3"), (2, "expected values, got none")):
        with pytest.raises(ValueError, match=reason):
            from_tfrecord(path).rows([row])
    varying = from_tfrecord(path, {"x": ArraySpec((None,), "int64")}).rows([0, 1, 2])["x"]
    assert [row.tolist() for row in varying] == [[1, 2], [3, 4, 5], []]


def test_what_is_no_example(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tfrecord", [example({"x": [1]}), b"\xff\xff\xff"])
    with pytest.raises(ValueError, match=r"a\.tfrecord: record at byte \d+: expected a tf\.train\.Example"):
        from_tfrecord(path).rows([1])


def test_several_byte_strings(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tfrecord", [example({"x": [b"a", b"b"]})])
    with pytest.raises(ValueError, match="x: expected one byte string, got 2"):
        from_tfrecord(path, "x")


def test_arguments(path: Path) -> None:
    with pytest.raises(ValueError, match="from_tfrecord: features: expected None, a name"):
        from_tfrecord(path, [])
    with pytest.raises(ValueError, match=r"from_tfrecord: features\['b'\]: expected an ArraySpec"):
        from_tfrecord(path, {"a": ArraySpec((), "int64"), "b": "label"})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"from_tfrecord: decode\['raw'\]: expected a function"):
        from_tfrecord(path, decode={"raw": 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"raw: expected bytes that can be decoded, got ZeroDivisionError"):
        from_tfrecord(path, "raw", decode={"raw": lambda data: 1 / 0})


def test_every_flipped_bit_is_found(path: Path) -> None:
    """In a length and its checksum when the dataset is made, elsewhere when the record is read."""
    whole = path.read_bytes()
    (count,) = struct.unpack("<Q", whole[:8])
    for position in range(12 + count + 4):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        with pytest.raises(ShardError, match=r"from_tfrecord: .*a\.tfrecord"):
            from_tfrecord(path, {"label": SPECS["label"]}).rows([0])


def test_every_truncated_file_is_found(path: Path) -> None:
    """But for one that ends between two records, which TensorFlow reads, too."""
    whole = path.read_bytes()
    ends, position = {0: 0}, 0
    while position < len(whole):
        position += 16 + struct.unpack("<Q", whole[position : position + 8])[0]
        ends[position] = len(ends)
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        if cut in ends:
            assert len(from_tfrecord(path, SPECS)) == ends[cut]
        else:
            with pytest.raises(ShardError, match=r"a\.tfrecord: expected a record.*Copy the file again"):
                from_tfrecord(path, SPECS)


def test_a_compressed_file(path: Path) -> None:
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(ShardError, match=r"expected the length of a record at byte 0.*decompress it"):
        from_tfrecord(path)


@pytest.mark.parametrize("module", ["google_crc32c", "google.protobuf.descriptor_pb2"])
def test_without_a_library(path: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    from mpistrat.data.files import examples

    examples._example.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=r'from_tfrecord: expected .*pip install "mpistrat\[tfrecord\]"'):
        from_tfrecord(path)


def test_other_records_have_other_fingerprints(tmp_path: Path) -> None:
    prints = []
    for number, rows in enumerate([[[1], [2]], [[1], [2]], [[1]], [[1], [2, 3]], [[1.0], [2.0]]]):
        (tmp_path / str(number)).mkdir()
        path = write(tmp_path / str(number) / "a.tfrecord", (example({"x": row}) for row in rows))
        prints.append(from_tfrecord(path).node.fingerprint())
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


def test_samples_can_be_sent_to_processes(path: Path) -> None:
    samples = from_tfrecord(path, "label").node._samples
    assert pickle.loads(pickle.dumps(samples))[4] == 2


@pytest.mark.parametrize("workers", [{"workers": 3}, {"workers": 2, "processes": True}], ids=["threads", "processes"])
def test_workers(path: Path, workers: dict[str, Any]) -> None:
    dataset = from_tfrecord(path, "label", **workers)
    assert [int(x) for batch in dataset.batch(4) for x in batch] == [row - 2 for row in range(ROWS)]


def test_a_decoder_of_no_field_is_refused(path: Path) -> None:
    with pytest.raises(
        ValueError, match="from_tfrecord: decode: expected names of the fields label, text, got 'image'"
    ):
        list(from_tfrecord(path, ["label", "text"], decode={"image": bytes}))


def test_a_decoder_of_numbers_is_refused(path: Path) -> None:
    decode = {"label": bytes}
    reason = "record at byte 12: label: expected bytes, which its decoder gets, got int64"
    with pytest.raises(ValueError, match=reason):
        from_tfrecord(path, "label", decode=decode)
    with pytest.raises(ValueError, match=reason):
        list(from_tfrecord(path, {"label": SPECS["label"]}, decode=decode))


def test_files_without_records(path: Path, tmp_path: Path) -> None:
    """One of several is left out; of these alone the specs are needed."""
    empty = tmp_path / "0.tfrecord"
    empty.write_bytes(b"")
    assert [int(x) for x in from_tfrecord([empty, path, empty], "label")] == [row - 2 for row in range(ROWS)]
    dataset = from_tfrecord(empty, {"label": SPECS["label"]})
    assert (len(dataset), list(dataset.batch(2))) == (0, [])
    for features in (None, ["label"]):
        with pytest.raises(
            ValueError, match="from_tfrecord: samples: expected a first sample.*Give specs of the features"
        ):
            _ = from_tfrecord(empty, features).element_spec


def test_compressed_files_of_a_folder_are_not_left_out(path: Path) -> None:
    assert len(from_tfrecord(path.parent)) == ROWS
    (path.parent / "b.tfrecord.gz").write_bytes(b"")
    with pytest.raises(ShardError, match=r"b\.tfrecord\.gz: expected a file with an ending that is read from a folder"):
        from_tfrecord(path.parent)

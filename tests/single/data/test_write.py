"""Writing shards: whatever goes in, in whatever pieces, comes out."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.data import HDF5Dataset, ShardWriter, from_arrays, from_generator, write_shards
from mpistrat.data.shards.manifest import read_manifest
from mpistrat.data.spec import ArraySpec

ROWS = 103
FORMATS: list[dict[str, Any]] = [
    {},
    {"layout": "chunked"},
    {"layout": "chunked", "chunk_rows": 7, "fletcher32": False},
    {"compression": "gzip"},
    {"compression": "lzf", "shuffle": False, "chunk_rows": 3},
    {"compression": 9, "chunk_rows": 50},
]
DTYPES = ["?", "u1", "<i2", ">i4", "<i8", "<f2", "<f4", ">f8", "<c8", "<c16", "S3"]


def columns(rows: int = ROWS, dtypes: tuple[str, ...] = ("<i8", ">i4", "S3"), shape: tuple[int, ...] = (2,)) -> Any:
    rng = np.random.default_rng(rows)
    made = {f"f{i}": rng.integers(0, 100, (rows, *shape)).astype(dtype) for i, dtype in enumerate(dtypes)}
    return {"number": np.arange(rows), **made}


def read(target: Any) -> dict[str, np.ndarray]:
    dataset = HDF5Dataset(target, verify=True)
    return dataset.rows(range(len(dataset)))


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return list(found) == list(expected) and all(np.array_equal(found[name], expected[name]) for name in expected)


def sizes(paths: list[Path]) -> list[int]:
    with_sizes = []
    for path in paths:
        with h5py.File(path) as file:
            with_sizes.append(len(next(iter(file.values()))))
    return with_sizes


# What comes out.


@settings(max_examples=25)
@given(data=st.data())
def test_pieces_of_any_size_come_out_as_rows(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("set")
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES), max_size=3).map(tuple))
    shape = data.draw(st.sampled_from([(), (3,), (2, 2), (0,)]))
    cuts = sorted(data.draw(st.lists(st.integers(0, ROWS), max_size=5)))
    rows_per_shard = data.draw(st.integers(6, 110))  # few files: each waits for the disk
    expected = columns(ROWS, dtypes, shape)
    with ShardWriter(directory, rows_per_shard=rows_per_shard, **data.draw(st.sampled_from(FORMATS))) as writer:
        for start, stop in zip([0, *cuts], [*cuts, ROWS], strict=True):
            piece = {name: array[start:stop] for name, array in expected.items()}
            if stop - start < 5 and start and "S3" not in dtypes:
                for i in range(stop - start):
                    writer.write_row({name: array[i] for name, array in piece.items()})
            else:
                writer.write(piece)
    assert same(read(directory), expected)
    full, rest = divmod(ROWS, rows_per_shard)
    assert sizes(writer.paths) == [rows_per_shard] * full + [rest] * (rest > 0)


def test_rows_of_any_byte_order_after_a_piece(tmp_path: Path) -> None:
    data = {"x": np.arange(6, dtype=">i4"), "y": np.arange(12.0).reshape(6, 2).astype(">f8")}
    for first in (data["x"], data["x"].astype("<i4")):
        with ShardWriter(tmp_path) as writer:
            writer.write({"x": first[:3], "y": data["y"][:3]})
            writer.write_row({"x": data["x"][3], "y": data["y"][3]})
            writer.write_row({"x": 4, "y": data["y"][4].astype("<f8")})
            writer.write_row({"x": np.int32(5), "y": [10.0, 11.0]})
        assert same(read(tmp_path), data)


@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.parametrize("rows_per_shard", [25, 103, 1000])
def test_the_layout_is_the_one_asked_for(tmp_path: Path, options: dict[str, Any], rows_per_shard: int) -> None:
    expected = columns()
    for path in write_shards(tmp_path, expected, rows_per_shard=rows_per_shard, **options):
        with h5py.File(path) as file:
            for name, dataset in file.items():
                assert dataset.dtype == expected[name].dtype
                if not options:
                    assert dataset.chunks is None
                    assert dataset.id.get_storage_size() == dataset.nbytes
                    continue
                assert dataset.chunks[0] == min(options.get("chunk_rows", 10**6), min(rows_per_shard, ROWS)) or (
                    rows_per_shard == 25 and dataset.chunks[0] <= 25
                )
                assert dataset.compression == {9: "gzip"}.get(options.get("compression"), options.get("compression"))
                assert dataset.fletcher32 == options.get("fletcher32", True)
                wanted = options.get("shuffle", "compression" in options)
                assert dataset.shuffle == (wanted and dataset.dtype.itemsize > 1)
    assert same(read(tmp_path), expected)


def test_one_set_whatever_the_pieces(tmp_path: Path) -> None:
    """The bytes depend on the rows, the format and the shards' sizes, not on how the rows came."""
    data = columns(1000)
    for name, cuts in (("a", [0, 1000]), ("b", [0, 1, 400, 990, 1000])):
        with ShardWriter(tmp_path / name, rows_per_shard=300, compression="gzip", chunk_rows=64) as writer:
            for start, stop in itertools.pairwise(cuts):
                writer.write({key: array[start:stop] for key, array in data.items()})
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in "ab"]
    assert [shard["rows"] for shard in manifests[0]["shards"]] == [300, 300, 300, 100]
    assert manifests[0]["fields"] == manifests[1]["fields"]
    assert same(read(tmp_path / "a"), read(tmp_path / "b"))


def rows_of(data: dict[str, np.ndarray]) -> Iterator[dict[str, Any]]:
    return ({name: array[i] for name, array in data.items()} for i in range(ROWS))


@pytest.mark.parametrize(
    "form",
    [
        lambda data: data,
        rows_of,
        lambda data: from_arrays(data),
        lambda data: from_arrays(data).batch(10),
        lambda data: lambda rank, size: data if (rank, size) == (0, 1) else None,
        lambda data: lambda rank, size: from_generator(lambda: rows_of(data)),
    ],
    ids=["arrays", "rows", "dataset", "batches", "function", "function-dataset"],
)
@pytest.mark.parametrize("options", [{}, {"rows_per_shard": 40}, {"bytes_per_shard": 40 * 24, "compression": "gzip"}])
def test_every_form_of_data(tmp_path: Path, form: Any, options: dict[str, Any]) -> None:
    expected = columns(ROWS, ("<f8",), ())
    expected["f1"] = expected["f0"] * 2
    paths = write_shards(tmp_path, form(expected), **options)
    assert same(read(tmp_path), expected)
    assert sizes(paths) == ([40, 40, 23] if options else [103])


def test_pieces_of_an_iterable(tmp_path: Path) -> None:
    data = columns()
    pieces = ({name: array[i : i + 10] for name, array in data.items()} for i in range(0, ROWS, 10))
    assert sizes(write_shards(tmp_path, pieces, batched=True, rows_per_shard=100)) == [100, 3]
    assert same(read(tmp_path), data)


LEAVES = st.sampled_from(["<i1", ">i4", "<u8", "<f2", ">f8", "<c16", "?", "S3"])


@st.composite
def structures(draw: st.DrawFn, depth: int = 2) -> np.dtype[Any]:
    """Members that are numbers, arrays or structures, in any place and with gaps."""
    names = draw(st.lists(st.sampled_from("abcdéx/y z"), min_size=1, max_size=4, unique=True))
    formats, offsets, end = [], [], 0
    for _ in names:
        member = np.dtype(draw(LEAVES) if not depth or draw(st.booleans()) else draw(structures(depth - 1)))
        shape = draw(st.sampled_from([(), (2,), (2, 3)]))
        formats.append(np.dtype((member, shape)) if shape else member)
        offsets.append(end + draw(st.integers(0, 3)))
        end = offsets[-1] + formats[-1].itemsize
    order = draw(st.permutations(range(len(names))))
    members = {"names": names, "formats": [formats[i] for i in order], "offsets": [offsets[i] for i in order]}
    return np.dtype({**members, "itemsize": end + draw(st.integers(0, 3))})


def same_members(one: Any, other: Any) -> bool:
    """Whether the members are equal; what lies between them does not count."""
    if one.dtype.names is None:
        return bool(np.array_equal(one, other))
    return one.dtype.names == other.dtype.names and all(
        same_members(one[name], other[name]) for name in one.dtype.names
    )


@settings(max_examples=40)
@given(dtype=structures(), row=st.sampled_from([(), (2,)]), options=st.sampled_from([{}, {"compression": "gzip"}]))
def test_structures_come_back(
    tmp_path_factory: pytest.TempPathFactory, dtype: np.dtype[Any], row: tuple[int, ...], options: dict[str, Any]
) -> None:
    directory = tmp_path_factory.mktemp("set")
    rows = np.zeros((7, *row), dtype)
    flat = rows.reshape(-1)
    for i in range(flat.size):
        flat[i] = numbered(dtype, i)
    with ShardWriter(directory, rows_per_shard=5, **options) as writer:
        writer.write({"x": rows[:3]})
        writer.write({"x": rows[3:6]})
        writer.write_row({"x": rows[6]})
    dataset = HDF5Dataset(directory, "x", verify=True)
    assert read_manifest(directory / "manifest.json").fields["x"].dtype == dtype
    with h5py.File(writer.paths[0]) as file:
        assert file["x"].dtype == dtype
    found = dataset.rows(range(7))
    assert found.dtype.isnative
    assert dataset.node.row_spec.dtype == dtype.newbyteorder("=")
    assert same_members(found, rows)
    assert same_members(dataset.rows([6, 0]), rows[[6, 0]])


def numbered(dtype: np.dtype[Any], number: int) -> Any:
    """A value for a place of this dtype, which has the number in it everywhere."""
    if dtype.subdtype is not None:
        return np.full(dtype.shape, np.array(numbered(dtype.base, number), dtype.base), dtype.base)
    if dtype.names is not None:
        return tuple(numbered(dtype[name], number + 1) for name in dtype.names)
    return str(number).encode() if dtype.kind == "S" else bool(number % 2) if dtype.kind == "b" else number


def test_a_shuffled_dataset_is_written_in_its_order(tmp_path: Path) -> None:
    dataset = from_arrays({"x": np.arange(50)}).shuffle(seed=3)
    expected = [int(row["x"]) for row in from_arrays({"x": np.arange(50)}).shuffle(seed=3)]
    write_shards(tmp_path, dataset)
    assert read(tmp_path)["x"].tolist() == expected != list(range(50))


def test_nested_dicts_become_groups(tmp_path: Path) -> None:
    path = write_shards(tmp_path, {"in": {"x": np.arange(3), "deep": {"y": np.ones(3)}}, "z": np.zeros(3)})[0]
    assert list(read(tmp_path)) == ["in/x", "in/deep/y", "z"]
    with h5py.File(path) as file:
        assert file["in"]["deep"]["y"][...].tolist() == [1, 1, 1]


@pytest.mark.parametrize("options", [{"rows_per_shard": 3}, {"bytes_per_shard": 1}, {}, {"num_shards": 3}])
def test_strings_and_rows_of_varying_length(tmp_path: Path, options: dict[str, Any]) -> None:
    texts = ["", "a", "bcd", "äöü€", "e" * 100, "f", "gh"]
    ragged = np.empty(7, object)
    ragged[:] = [np.arange(n, dtype=np.float32) for n in (3, 0, 1, 1, 1, 1, 2)]
    data = {"text": np.array(texts), "names": np.array([[t, "-"] for t in texts], object), "ragged": ragged}
    write_shards(tmp_path, data, layout="chunked", **options)
    found = read(tmp_path)
    assert found["text"].tolist() == texts
    assert found["names"].tolist() == [[t, "-"] for t in texts]
    assert [row.tolist() for row in found["ragged"]] == [row.tolist() for row in ragged]
    assert found["ragged"][0].dtype == np.float32
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["fields"]["ragged"] == {"dtype": "<f4", "shape": [None]}
    assert manifest["fields"]["text"] == {"dtype": "|O", "shape": []}


def test_rows_of_varying_length_out_of_a_generator(tmp_path: Path) -> None:
    spec = {"x": ArraySpec((None,), np.int64), "t": ArraySpec((), object)}
    dataset = from_generator(lambda: ({"x": np.arange(i % 4), "t": "ab" * i} for i in range(200)), spec)
    paths = write_shards(tmp_path, dataset, compression="gzip", rows_per_shard=150)
    assert sizes(paths) == [150, 50]
    found = read(tmp_path)
    assert [len(row) for row in found["x"]] == [i % 4 for i in range(200)]
    assert found["t"].tolist() == ["ab" * i for i in range(200)]


def test_bytes_per_shard(tmp_path: Path) -> None:
    data = {"x": np.zeros((1000, 16)), "y": np.zeros(1000, np.int64)}  # 136 bytes a row
    assert sizes(write_shards(tmp_path, data, bytes_per_shard=136 * 300)) == [300, 300, 300, 100]
    with ShardWriter(tmp_path, bytes_per_shard=1) as writer:
        writer.write({"x": np.zeros((3, 16))})
    assert sizes(writer.paths) == [1, 1, 1]


@pytest.mark.parametrize(
    ("options", "expected"), [({"num_shards": 3}, [35, 34, 34]), ({"rows_per_shard": 50}, [50, 50, 3]), ({}, [103])]
)
def test_shard_sizes(tmp_path: Path, options: dict[str, int], expected: list[int]) -> None:
    paths = write_shards(tmp_path, {"x": np.arange(ROWS)}, **options)
    assert [path.name for path in paths] == [f"{i:05d}-of-{len(expected):05d}.h5" for i in range(len(expected))]
    assert sizes(paths) == expected
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["rows"] == ROWS
    assert [shard["rows"] for shard in manifest["shards"]] == expected
    assert [shard["bytes"] for shard in manifest["shards"]] == [path.stat().st_size for path in paths]


def test_attributes(tmp_path: Path) -> None:
    data = {"label": np.arange(4)}
    for path in write_shards(tmp_path, data, num_shards=2, attributes={"label": {"classes": ["cat", "dög"]}}):
        with h5py.File(path) as file:
            assert list(file["label"].attrs["classes"]) == ["cat", "dög"]
    with pytest.raises(ValueError, match=r"attributes of \['other'\]"):
        write_shards(tmp_path, data, attributes={"other": {}})


def test_a_piece_may_be_changed_after_it_was_written(tmp_path: Path) -> None:
    buffer = np.zeros((2, 3))
    with ShardWriter(tmp_path) as writer:
        for i in range(5):
            buffer[...] = i
            writer.write({"x": buffer})
            writer.write_row({"x": buffer[0]})
        buffer[...] = -1
    assert read(tmp_path)["x"][:, 0].tolist() == [i for i in range(5) for _ in range(3)]


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}])
def test_no_rows_at_all(tmp_path: Path, options: dict[str, Any]) -> None:
    write_shards(tmp_path, {"x": np.zeros((0, 3), np.float32)}, **options)
    dataset = HDF5Dataset(tmp_path)
    assert (len(dataset), dataset.rows([])["x"].shape) == (0, (0, 3))
    with pytest.raises(ValueError, match="expected rows to write, got none"):
        write_shards(tmp_path / "other", iter([]))
    assert not list((tmp_path / "other").iterdir())


def test_the_digest_is_of_the_files_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    monkeypatch.setitem(sys.modules, "xxhash", None)  # as where xxhash is not installed
    path = write_shards(tmp_path, {"x": np.arange(10)})[0]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["shards"][0]["digest"] == "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    assert len(HDF5Dataset(tmp_path, verify=True)) == 10


# Memory.


@pytest.mark.parametrize("options", [{}, {"compression": 1}, {"rows_per_shard": 3000}], ids=str)
@pytest.mark.parametrize("piece", [1, 100, 5000])
def test_memory_is_bounded(tmp_path: Path, options: dict[str, Any], piece: int) -> None:
    """16 or 40 MB through a writer that holds less than 10 MB: NumPy's memory, which tracemalloc sees."""
    total, row = 4000 if piece == 1 else 10_000, np.arange(1000, dtype=np.float32)
    pieces = ({"x": np.broadcast_to(row, (piece, 1000))} for _ in range(total // piece))
    tracemalloc.start()
    try:
        with ShardWriter(tmp_path, **options) as writer:
            for one in pieces:
                writer.write(one)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10e6, f"{peak / 1e6:.1f} MB"
    assert sum(sizes(writer.paths)) == total


def test_memory_of_the_process_is_bounded(tmp_path: Path) -> None:
    """What HDF5 itself holds, too: 200 MB in contiguous shards that are not full."""
    program = (
        "import resource, sys, numpy as np, h5py, mpistrat as ms\n"
        "data = np.ones((250, 1000))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "ms.data.write_shards(sys.argv[1], ({'x': data} for _ in range(100)), batched=True)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 40_000, "KiB"
    assert len(HDF5Dataset(tmp_path)) == 25_000

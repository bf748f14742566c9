"""Sources at URLs, read in place: a web server with range requests, S3, fsspec's memory, and servers that fail."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data.files import handles
from mpistrat.data.files import remote as remotes
from mpistrat.errors import ShardError
from tests.harness.object_store import s3_server
from tests.harness.range_server import RangeServer, serving_ranges
from tests.harness.sources import ROWS, SOURCES, WITH_FILES, V, X, npy, write_tar, written

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

ORDER = [22, 0, 3, 3, 9]
NAMES = [name for name in WITH_FILES if not name.startswith("zarr")]  # which test_remote_zarr.py reads
KEPT = ("sparse", "netcdf", "netcdf_by_h5netcdf")  # the open file has kept the only block


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remotes, "_PAUSE", 0.01)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RangeServer, Path]]:
    folder = tmp_path_factory.mktemp("served")
    with serving_ranges(folder) as server:
        yield server, folder


@pytest.fixture
def server(served: tuple[RangeServer, Path], tmp_path: Path) -> RangeServer:
    """The server of tmp_path/remote."""
    server, folder = served
    (folder / tmp_path.name).mkdir()
    (tmp_path / "remote").symlink_to(folder / tmp_path.name)
    server.behave.clear()
    return server.within(tmp_path.name)


def same_rows(dataset: ms.data.Dataset) -> None:
    rows = dataset.rows(ORDER)
    np.testing.assert_array_equal(rows["x"], X[ORDER], strict=True)
    np.testing.assert_array_equal(rows["v"], V[ORDER], strict=True)


def same_as_local(url: str, local: ms.data.Dataset, opened: Callable[[Any], ms.data.Dataset]) -> None:
    """Rows, shuffled epochs, another iterator's position, what ranks compare."""
    dataset = opened(url)
    same_rows(dataset)
    assert dataset.element_spec == local.element_spec
    assert dataset.node.fingerprint() == local.node.fingerprint()
    shuffled = dataset.shuffle(seed=5, mode="full").batch(4)
    for epoch in range(2):
        found = [int(x) // 3 for batch in shuffled for x in batch["x"]]
        assert found == ms.data.permute(np.arange(ROWS), ROWS, seed=5, epoch=epoch).tolist()
    assert url.partition("//")[2].rstrip("/") in str(dataset)


@pytest.mark.parametrize("source", NAMES)
def test_next_to_local_files(source: str, tmp_path: Path, server: RangeServer) -> None:
    local = written(source, tmp_path / "remote/files")
    same_as_local(f"{server.url}/files/", local, SOURCES[source].opened)
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "remote/files"), "/here/files", recursive=True)
    try:
        same_as_local("memory://here/files", local, SOURCES[source].opened)
    finally:
        memory.rm("/here", recursive=True)
    same_as_local(f"file://{tmp_path}/remote/files", local, SOURCES[source].opened)


@pytest.mark.parametrize("source", NAMES)
def test_a_server_that_fails_between(source: str, tmp_path: Path, server: RangeServer) -> None:
    """Each error names the URL; rows that are kept are right, and so are all when the server works again."""
    written(source, tmp_path / "remote/files")
    for behaviour in (403, 404, 500, "cut"):
        dataset = SOURCES[source].opened(f"{server.url}/files/")
        assert len(dataset) == ROWS
        server.fail(tmp_path / "remote/files", behaviour)
        if behaviour == "cut" and source in KEPT:
            same_rows(dataset)
        else:
            with pytest.raises(ShardError, match=rf"{server.url}/files/.*: expected ") as raised:
                dataset.rows(ORDER)
            assert {403: "403", 404: "no such file", 500: "500", "cut": ""}[behaviour] in str(raised.value)
        with pytest.raises(ShardError, match=f"{server.url}/files/"):
            len(SOURCES[source].opened(f"{server.url}/files/"))
        server.behave.clear()
        with contextlib.suppress(ShardError):  # of a chunk that was being read ahead
            same_rows(dataset)
        same_rows(dataset)


@pytest.mark.parametrize("source", ["tar", "hdf5_chunked", "parquet"])
def test_a_server_that_goes_silent(
    source: str, tmp_path: Path, server: RangeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(source, tmp_path / "remote/files")
    monkeypatch.setattr(remotes, "_SILENCE", 0.4)
    dataset = SOURCES[source].opened(f"{server.url}/files/")
    assert len(dataset) == ROWS
    server.fail(tmp_path / "remote/files", "stall")
    began = time.monotonic()
    with pytest.raises(ShardError, match=rf"{server.url}/files/.*[Tt]imeout"):
        dataset.rows(ORDER)
    assert time.monotonic() - began < 15  # not 23 times three times of silence


@pytest.mark.parametrize("source", NAMES)
def test_a_connection_that_breaks_once(source: str, tmp_path: Path, server: RangeServer) -> None:
    written(source, tmp_path / "remote/files")
    server.fail(tmp_path / "remote/files", "cut once")
    same_rows(SOURCES[source].opened(f"{server.url}/files/"))


@pytest.mark.parametrize("source", NAMES)
def test_a_file_that_changes_between(source: str, tmp_path: Path, server: RangeServer) -> None:
    """Another version of the same size: never a mix of both."""
    files = tmp_path / "remote/files"
    written(source, files)
    dataset = SOURCES[source].opened(f"{server.url}/files/")
    assert len(dataset) == ROWS
    for path in files.iterdir():
        if path.suffix != ".json":
            path.write_bytes(path.read_bytes())
            os.utime(path, (1, 1))
    with pytest.raises(ShardError, match=rf"{server.url}/files/.*must not change"):
        dataset.rows(ORDER)
    with pytest.raises(ShardError, match=rf"{server.url}/files/.*must not change"):
        next(iter(dataset.batch(4)))


@pytest.mark.parametrize("source", ["tar", "tfrecord", "hdf5_chunked"])
def test_a_file_that_changes_in_the_middle_of_an_epoch(source: str, tmp_path: Path, server: RangeServer) -> None:
    """Its open file would give bytes of the new version."""
    files = tmp_path / "remote/files"
    written(source, files)
    dataset = SOURCES[source].opened(f"{server.url}/files/")
    first, others = np.zeros(1, np.int64), np.arange(5, 8)
    dataset.node.gather(first, first)
    changed = list(files.iterdir())
    for path in changed:
        path.write_bytes(path.read_bytes())
        os.utime(path, (1, 1))
    with pytest.raises(ShardError, match=rf"{server.url}/files/.*must not change"):
        dataset.node.gather(np.zeros(3, np.int64), others)


def test_what_is_not_there(server: RangeServer) -> None:
    for source in NAMES:
        for url in (f"{server.url}/no/", "memory://no", "http://127.0.0.1:9/a/", "no://a"):
            with pytest.raises(ShardError, match=url.replace("//", "///?")):
                len(SOURCES[source].opened(url))


LARGE: dict[str, Callable[[Any], ms.data.Dataset]] = {
    "contiguous": lambda url: ms.data.HDF5Dataset([url], "x"),
    "chunked": lambda url: ms.data.HDF5Dataset([url], "x"),
    "parquet": lambda url: ms.data.from_tables(url, "x"),
    "arrow": lambda url: ms.data.from_tables(url, "x"),
    "groups": lambda url: ms.data.from_groups(url, "x", within="/"),
    "netcdf": lambda url: ms.data.from_netcdf(url, "x"),
}


def large(source: str, folder: Path) -> tuple[str, np.ndarray]:
    """Write a file of 16 MB, and return its name and the rows."""
    rows = np.random.default_rng(0).integers(0, 256, (4000, 4096)).astype(np.uint8)
    folder.mkdir()
    if source in ("contiguous", "chunked"):
        ms.data.write_shards(folder, {"x": rows}, layout=source)
        (path,) = folder.glob("*.h5")
        return path.name, rows
    if source in ("parquet", "arrow"):
        pyarrow = pytest.importorskip("pyarrow")
        column = pyarrow.FixedSizeListArray.from_arrays(rows.reshape(-1), 4096)
        if source == "parquet":
            pytest.importorskip("pyarrow.parquet").write_table(
                pyarrow.table({"x": column}), folder / "a.parquet", row_group_size=100, compression="none"
            )
        else:
            table = pyarrow.table({"x": column, "n": np.arange(4000)})
            with pyarrow.OSFile(str(folder / "a.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as out:
                out.write_table(table, max_chunksize=100)
        return f"a.{source}", rows
    if source == "groups":
        with h5py.File(folder / "a.h5", "w") as file:
            for row in range(10):
                file[f"{row}/x"] = rows[400 * row : 400 * row + 400]
        return "a.h5", rows.reshape(10, 400, 4096)
    netcdf = pytest.importorskip("netCDF4")
    with netcdf.Dataset(folder / "a.nc", "w") as file:
        file.createDimension("time", None)
        file.createDimension("place", 4096)
        file.createVariable("x", "u1", ("time", "place"), chunksizes=(16, 4096))[:] = rows
    return "a.nc", rows


@pytest.mark.parametrize("source", LARGE)
def test_only_the_parts_that_are_needed(source: str, tmp_path: Path, server: RangeServer) -> None:
    """Three rows of a file of 16 MB take less than a third of its bytes, of groups two of ten; and few requests."""
    name, rows = large(source, tmp_path / "remote/files")
    path = f"/files/{name}"
    where = [0, 5] if source == "groups" else [0, 1, 2000]
    np.testing.assert_array_equal(LARGE[source](server.url + path).rows(where), rows[where], strict=True)
    part = 2 if source == "groups" else 3
    assert 0 < server.sent[server.path(path)] < (tmp_path / "remote" / path[1:]).stat().st_size / part
    headers = 40 if source == "arrow" else 0  # of its batches, whose rows are stored nowhere else
    assert server.gets[server.path(path)] <= 25 + headers


@pytest.mark.parametrize("source", LARGE)
def test_rows_in_order_are_read_ahead(source: str, tmp_path: Path, server: RangeServer) -> None:
    """By requests that grow to 4 MiB; nearly no byte twice."""
    name, rows = large(source, tmp_path / "remote/files")
    dataset = LARGE[source](f"{server.url}/files/{name}")
    assert len(dataset) == len(rows)
    server.gets.clear()
    server.sent.clear()
    batches = list(dataset.batch(1 if source == "groups" else 50))
    np.testing.assert_array_equal(np.concatenate(batches), rows, strict=True)
    path = server.path(f"/files/{name}")
    assert server.sent[path] < 1.25 * rows.nbytes
    assert server.gets[path] <= 15


@pytest.mark.parametrize("processes", [False, True])
def test_workers(processes: bool, tmp_path: Path, server: RangeServer) -> None:
    (tmp_path / "remote/files").mkdir()
    write_tar(tmp_path / "remote/files", X, V)
    dataset = ms.data.from_tar(f"{server.url}/files/", "v.npy", workers=2, processes=processes)
    np.testing.assert_array_equal(dataset.rows(ORDER), V[ORDER], strict=True)


def test_members_of_archives_are_read_alone(tmp_path: Path, server: RangeServer) -> None:
    """The headers of small members are read with them, once; after that each sample is a request."""
    (tmp_path / "remote/files").mkdir()
    write_tar(tmp_path / "remote/files", X, V)
    dataset = ms.data.from_tar([f"{server.url}/files/part-{number}.tar" for number in range(2)], "v.npy")
    assert dataset.element_spec == ms.data.ArraySpec((3,), np.float32)
    server.sent.clear()
    np.testing.assert_array_equal(dataset.rows([3, 20]), V[[3, 20]])
    sent = {server.path(f"/files/part-{number}.tar"): len(npy(V[row])) for number, row in enumerate((3, 20))}
    assert server.sent == sent


def test_shards_in_the_order_of_the_manifest(tmp_path: Path, server: RangeServer) -> None:
    """Of a folder only; the ends of each file are compared with it."""
    folder = tmp_path / "remote/files"
    ms.data.write_shards(folder, {"x": X}, rows_per_shard=9)
    assert [path.name for path in ms.data.HDF5Dataset(f"{server.url}/files/").node.paths] == [
        path.name for path in ms.data.HDF5Dataset(folder).node.paths
    ]
    first, *_, last = sorted(folder.glob("*.h5"))
    whole = last.read_bytes()
    last.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(ShardError, match=rf"{server.url}/files/{last.name}: expected digest .*manifest"):
        len(ms.data.HDF5Dataset(f"{server.url}/files/"))
    last.write_bytes(whole)
    (folder / "part-9.h5").write_bytes(first.read_bytes())
    with pytest.raises(ShardError, match="an unlisted file"):
        ms.data.HDF5Dataset(f"{server.url}/files/")


def test_files_of_other_endings_are_not_left_out(tmp_path: Path, server: RangeServer) -> None:
    folder = tmp_path / "remote/files"
    ms.data.write_shards(folder, {"x": X}, num_shards=1)
    (folder / "b.h5ad").write_bytes(b"")
    assert len(ms.data.HDF5Dataset(f"{server.url}/files/")) == len(X)  # those of the manifest
    (folder / "manifest.json").unlink()
    for made in (ms.data.HDF5Dataset, ms.data.from_groups):
        with pytest.raises(ShardError, match=r"b\.h5ad: expected a file with an ending that is read from a folder"):
            made(f"{server.url}/files/")


def test_texts_and_rows_of_other_lengths(tmp_path: Path, server: RangeServer) -> None:
    folder = tmp_path / "remote/files"
    folder.mkdir()
    words = ["a", "", "ä" * 300, "b"]
    with h5py.File(folder / "a.h5", "w") as file:
        file["words"] = words
        rows = file.create_dataset("rows", 4, h5py.vlen_dtype(np.int32))
        for number in range(4):
            rows[number] = np.arange(number)
    for name in ("a.csv", "a.jsonl"):
        lines = ["text,n", *(f"{word},{n}" for n, word in enumerate(words))]
        if name == "a.jsonl":
            lines = [f'{{"text": "{word}", "n": {n}}}' for n, word in enumerate(words)]
        (folder / name).write_text("\n".join(lines) + "\n")
    found = ms.data.HDF5Dataset([f"{server.url}/files/a.h5"], ("words", "rows")).rows([2, 0, 3])
    assert found[0].tolist() == [words[2], "a", "b"]
    assert [row.tolist() for row in found[1]] == [[0, 1], [], [0, 1, 2]]
    if pytest.importorskip("pyarrow"):
        for name in ("a.csv", "a.jsonl"):
            table = ms.data.from_tables(f"{server.url}/files/{name}", ("text", "n")).rows([2, 0])
            assert (table[0].tolist(), table[1].tolist()) == ([words[2], "a"], [2, 0])


def test_what_cannot_be_read_in_place(tmp_path: Path, server: RangeServer) -> None:
    folder = tmp_path / "remote/files"
    folder.mkdir()
    with h5py.File(folder / "data.h5", "w") as file:
        file["x"] = np.arange(5)
    layout = h5py.VirtualLayout((5,), np.int64)
    layout[:] = h5py.VirtualSource("data.h5", "x", (5,))
    with h5py.File(folder / "virtual.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    with pytest.raises(ShardError, match=r"virtual\.h5: x: .*a virtual dataset of a remote file: .*download"):
        len(ms.data.HDF5Dataset([f"{server.url}/files/virtual.h5"], "x"))
    with pytest.raises(ShardError, match="Leave driver out"):
        handles.open_hdf5(remotes.RemotePath("f", f"{server.url}/files/data.h5", {}), "mpio")


def test_a_program_that_ends_with_open_files(tmp_path: Path, server: RangeServer) -> None:
    """HDF5 closes file objects when the process ends."""
    written("hdf5", tmp_path / "remote/files")
    lines = [
        "import mpistrat as ms",
        "from mpistrat.data.files.handles import open_hdf5",
        f"data = ms.data.HDF5Dataset('{server.url}/files/')",
        "file = open_hdf5(data.node.paths[0])",
        "print(data.rows([3])['x'], file['x'][3])",
    ]
    program = "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[9] 9\n", "")


def test_garbage_of_h5py_does_not_block(tmp_path: Path, server: RangeServer) -> None:
    """fsspec's thread collects it while the thread that reads has h5py's lock; and at each allocation, before and after."""
    written("hdf5", tmp_path / "remote/files")
    dataset = ms.data.HDF5Dataset(f"{server.url}/files/")
    done = threading.Event()

    def leave_garbage() -> None:
        with h5py.File(tmp_path / "remote/files" / dataset.node.paths[0].name) as file:
            ring: list[Any] = [file["x"]]
            ring.append(ring)

    async def collect() -> int:
        return gc.collect()

    def read() -> None:
        handles.open_hdf5(dataset.node.paths[0]).close()
        for locked in (True, False):
            leave_garbage()
            with h5py._objects.phil if locked else contextlib.nullcontext():
                found = fsspec.asyn.sync(fsspec.asyn.get_loop(), collect)
            assert (found == 0) == locked
        kept = gc.get_threshold()
        try:
            gc.set_threshold(1, 1, 1)  # each allocation collects
            for _ in range(20):
                leave_garbage()
                handles.open_hdf5(dataset.node.paths[0]).close()
        finally:
            gc.set_threshold(*kept)
        done.set()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(60)
    assert done.is_set()
    assert gc.get_freeze_count() == 0


def test_s3(tmp_path: Path) -> None:
    """moto's server speaks S3, with versions."""
    with s3_server() as (system, options):

        def opener(source: str) -> Callable[[Any], ms.data.Dataset]:
            calls = {
                "tar": lambda url: ms.data.from_tar(url, {"x": "x.cls", "v": "v.npy"}, storage_options=options),
                "tfrecord": lambda url: ms.data.from_tfrecord(url, storage_options=options),
                "parquet": lambda url: ms.data.from_tables(url, storage_options=options),
                "hdf5_chunked": lambda url: ms.data.HDF5Dataset(url, storage_options=options),
                "hdf5": lambda url: ms.data.HDF5Dataset(url, storage_options=options),
                "netcdf": lambda url: ms.data.from_netcdf(url, ["x", "v"], storage_options=options),
                "groups": lambda url: ms.data.from_groups(
                    url, {"x": "@x", "v": "obs/v"}, within="data", storage_options=options
                ),
            }
            return calls[source]

        for source in ("tar", "tfrecord", "parquet", "hdf5", "hdf5_chunked", "netcdf", "groups"):
            local = written(source, tmp_path / source)
            system.put(str(tmp_path / source), f"bucket/{source}", recursive=True)
            same_as_local(f"s3://bucket/{source}", local, opener(source))
            dataset = opener(source)(f"s3://bucket/{source}")
            assert len(dataset) == ROWS
            for path in (tmp_path / source).iterdir():
                if path.suffix != ".json":
                    system.pipe_file(f"bucket/{source}/{path.name}", path.read_bytes()[:-1] + b"\1")
            with pytest.raises(ShardError, match=f"s3://bucket/{source}/.*must not change"):
                dataset.rows(ORDER)
            for missing in (f"s3://bucket/no-{source}", f"s3://absent/{source}/"):
                with pytest.raises(ShardError, match=missing.rstrip("/")):
                    len(opener(source)(missing))

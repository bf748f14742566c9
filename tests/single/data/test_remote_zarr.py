"""Zarr groups that are read in place, on a web server and in fsspec's memory: rows, and servers that fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data import from_zarr
from mpistrat.data.files import remote as remotes
from mpistrat.errors import ShardError
from tests.harness.file_server import FileServer, serving

zarr = pytest.importorskip("zarr")
fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

ROWS = 23
ORDER = [22, 0, 3, 3, 9, 10, 21]
X = np.arange(1, ROWS * 6 + 1, dtype="f4").reshape(ROWS, 2, 3)


def write(store: object, zarr_format: int = 3) -> None:
    group = zarr.open_group(store, mode="w", zarr_format=zarr_format)
    codec = pytest.importorskip("numcodecs").Zstd() if zarr_format == 2 else "auto"
    group.create_array("x", data=X, chunks=(5, 2, 3), compressors=codec)
    group.create_array("train/label", data=np.arange(ROWS) + 1, chunks=(ROWS,), compressors=codec)
    zarr.consolidate_metadata(store)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FileServer]:
    write(tmp_path / "a.zarr")
    with serving(tmp_path) as server:
        yield server


@pytest.mark.filterwarnings("ignore:.*onsolidated")
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_rows_next_to_the_local_ones(zarr_format: int, tmp_path: Path) -> None:
    write(tmp_path / "a.zarr", zarr_format)
    local = from_zarr(tmp_path / "a.zarr", ("x", "train/label"))
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "a.zarr"), "/b/a.zarr", recursive=True)
    try:
        with serving(tmp_path) as server:
            for url in (f"{server.url}/a.zarr", f"{server.url}/a.zarr/", "memory://b/a.zarr"):
                dataset = from_zarr(url, ("x", "train/label"))
                for found, expected in zip(dataset.rows(ORDER), local.rows(ORDER), strict=True):
                    np.testing.assert_array_equal(found, expected, strict=True)
                assert dataset.node.fingerprint() == local.node.fingerprint()
                labels = [int(y) - 1 for _, label in dataset.shuffle(seed=2, mode="full").batch(4) for y in label]
                assert labels == ms.data.permute(np.arange(ROWS), ROWS, seed=2, epoch=0).tolist()
                assert str(dataset).startswith(f"from_zarr: {url.rstrip('/')}, 23 rows of x float32[2, 3], ")
    finally:
        memory.rm("/b", recursive=True)


@pytest.mark.filterwarnings("ignore:.*onsolidated")
def test_only_the_chunks_that_are_needed(server: FileServer) -> None:
    dataset = from_zarr(f"{server.url}/a.zarr", "x")
    dataset.rows([7, 8])
    read = {path for path in server.gets if "/c/" in path}
    assert read == {"/a.zarr/x/c/1/0/0"}


@pytest.mark.filterwarnings("ignore:.*onsolidated")
@pytest.mark.parametrize("behaviour", [403, 500, "cut"])
def test_a_chunk_that_fails(behaviour: int | str, server: FileServer) -> None:
    dataset = from_zarr(f"{server.url}/a.zarr", "x")
    server.behave["/a.zarr/x/c/1/0/0"] = behaviour
    with pytest.raises(ShardError, match=rf"from_zarr: {server.url}/a\.zarr: x: rows 5 to 10: expected chunks"):
        dataset.rows([7])
    assert dataset.rows([0]).tolist() == X[:1].tolist()


@pytest.mark.filterwarnings("ignore:.*onsolidated")
def test_a_server_that_goes_silent(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remotes, "_SILENCE", 0.3)
    dataset = from_zarr(f"{server.url}/a.zarr", "x")
    server.behave["/a.zarr/x/c/1/0/0"] = "stall"
    with pytest.raises(ShardError, match=r"x: rows 5 to 10: expected chunks that can be decoded, got .*[Tt]imeout"):
        dataset.rows([7])


@pytest.mark.filterwarnings("ignore:.*onsolidated")
def test_a_group_that_goes_away_is_an_error_and_not_its_fill_value(server: FileServer, tmp_path: Path) -> None:
    dataset = from_zarr(f"{server.url}/a.zarr", "x")
    assert dataset.rows([0]).tolist() == X[:1].tolist()
    (tmp_path / "a.zarr").rename(tmp_path / "b.zarr")
    with pytest.raises(ShardError, match=rf"{server.url}/a\.zarr.*no such file"):
        dataset.node.gather(np.zeros(1, np.int64), np.array([7]))  # in the middle of an epoch


@pytest.mark.filterwarnings("ignore:.*onsolidated")
def test_a_group_that_changes_is_an_error(server: FileServer, tmp_path: Path) -> None:
    dataset = from_zarr(f"{server.url}/a.zarr", "x")
    path = tmp_path / "a.zarr" / "x" / "zarr.json"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(ShardError, match=r"x/zarr\.json.*must not change"):
        iter(dataset)


def test_what_is_not_there(server: FileServer) -> None:
    for url in (f"{server.url}/no.zarr", "memory://no.zarr", "http://127.0.0.1:9/a.zarr"):
        with pytest.raises(ShardError, match=f"from_zarr: {url}: expected a Zarr group or array, got"):
            from_zarr(url)
    with pytest.raises(ShardError, match="from_zarr: no://a: expected a URL that fsspec knows"):
        from_zarr("no://a")


def test_shards_on_a_server_without_ranges(tmp_path: Path) -> None:
    """It answers with the whole shard where a part was wanted."""
    zarr.create_array(tmp_path / "a.zarr", data=X, chunks=(2, 2, 3), shards=(8, 2, 3))
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "a.zarr"), "/s/a.zarr", recursive=True)
    try:
        np.testing.assert_array_equal(from_zarr("memory://s/a.zarr").rows(ORDER), X[ORDER], strict=True)
    finally:
        memory.rm("/s", recursive=True)
    with (
        serving(tmp_path) as server,
        pytest.raises(ShardError, match=rf"from_zarr: {server.url}/a\.zarr: rows 6 to 8: "),
    ):
        from_zarr(f"{server.url}/a.zarr").rows([7])

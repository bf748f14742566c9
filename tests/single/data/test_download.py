"""Copies of remote files next to the originals: a web server, S3 and fsspec's own file systems, and servers that fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data import copies, download
from mpistrat.data.files import remote as remotes
from mpistrat.errors import MissingDependencyError, ShardError
from tests.harness.file_server import FileServer, serving
from tests.harness.object_store import s3_server
from tests.harness.sources import ROWS, SOURCES, WITH_FILES, V, X, written

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("aiohttp")

ORDER = [22, 0, 3, 3, 9]
PROGRAM = "import sys, mpistrat as ms; print(ms.data.download(sys.argv[1], sys.argv[2]))"


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    folder = tmp_path / "remote"
    folder.mkdir()
    return folder


@pytest.fixture
def server(remote: Path) -> Iterator[FileServer]:
    with serving(remote) as server:
        yield server


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remotes, "_PAUSE", 0.01)


def filled(folder: Path, names: list[str], size: int = 100_000) -> None:
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(np.random.default_rng(number).bytes(size + number))


def same_files(made: Path, folder: Path) -> None:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert sorted(str(path.relative_to(made)) for path in made.rglob("*") if path.is_file()) == names
    for name in names:
        assert (made / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("source", WITH_FILES)
def test_each_source_reads_copies(source: str, tmp_path: Path, server: FileServer, remote: Path) -> None:
    """In order, by number, shuffled; a second call copies nothing, as after a restart."""
    written(source, remote / "files")
    for _ in range(2):
        folder = download(f"{server.url}/files/", tmp_path / "node")
        same_files(folder, remote / "files")
        dataset = SOURCES[source].opened(folder)
        rows = dataset.rows(ORDER)
        np.testing.assert_array_equal(rows["x"], X[ORDER], strict=True)
        np.testing.assert_array_equal(rows["v"], V[ORDER], strict=True)
        shuffled = [int(x) // 3 for batch in dataset.shuffle(seed=5, mode="full").batch(4) for x in batch["x"]]
        assert shuffled == ms.data.permute(np.arange(ROWS), ROWS, seed=5, epoch=0).tolist()
    copied = [count for path, count in server.gets.items() if not path.endswith("/") and (remote / path[1:]).is_file()]
    assert set(copied) == {1}


def test_one_file_a_list_and_a_pattern(tmp_path: Path, server: FileServer, remote: Path) -> None:
    filled(remote, ["a-1.bin", "a-2.bin", "b/c.bin"])
    one = download(f"{server.url}/b/c.bin", tmp_path / "node")
    assert one.name == "c.bin"
    assert one.read_bytes() == (remote / "b/c.bin").read_bytes()
    two = download([f"{server.url}/a-2.bin", f"{server.url}/b/c.bin"], str(tmp_path / "node"))
    assert [path.name for path in two] == ["a-2.bin", "c.bin"]
    assert two[1] == one
    for url in (f"{server.url}/a-*.bin", f"file://{remote}/a-*.bin", str(remote / "a-*.bin"), remote / "a-*.bin"):
        paths = download(url, tmp_path / "node")
        assert [path.name for path in paths] == ["a-1.bin", "a-2.bin"]
        assert [path.read_bytes() for path in paths] == [(remote / f"a-{n}.bin").read_bytes() for n in (1, 2)]
        assert paths[0].parent == paths[1].parent
    assert server.gets["/b/c.bin"] == 1


def test_folders_of_other_file_systems(tmp_path: Path, remote: Path) -> None:
    filled(remote, ["a.bin", "deep/er/b.bin"])
    memory = fsspec.filesystem("memory")
    memory.pipe({f"/set/{path.relative_to(remote)}": path.read_bytes() for path in remote.rglob("*") if path.is_file()})
    try:
        for url in ("memory://set", "memory://set/", str(remote), f"file://{remote}", f"local://{remote}/"):
            same_files(download(url, tmp_path / "node"), remote)
    finally:
        memory.rm("/set", recursive=True)


def test_s3(tmp_path: Path, remote: Path) -> None:
    """moto's server speaks S3."""
    filled(remote, ["train/a.bin", "train/b.bin"])
    with s3_server() as (system, options):
        system.put(str(remote / "train"), "bucket/train", recursive=True)
        for url in ("s3://bucket/train", "s3://bucket/train/"):
            same_files(download(url, tmp_path / "node", storage_options=options), remote / "train")
        assert [path.name for path in download("s3://bucket/train/*.bin", tmp_path / "node", storage_options=options)] == [
            "a.bin", "b.bin",
        ]  # fmt: skip
        for missing in ("s3://bucket/train/no.bin", "s3://absent/train/"):
            with pytest.raises(ShardError, match=f"download: {missing}"):
                download(missing, tmp_path / "node", storage_options=options)


@pytest.mark.parametrize(
    ("behaviour", "text", "gets"),
    [
        (404, "no such file", 0),
        (403, "403", 0),
        (500, "500", 0),
        ("cut", "expected 100000 bytes, got ", 3),
        ("short", "expected 100000 bytes, got .*50000 bytes, then the end", 3),
        ("no size", "the size of the file.*a server that does not give it", 0),
    ],
)
def test_a_server_that_fails(
    behaviour: int | str, text: str, gets: int, tmp_path: Path, server: FileServer, remote: Path
) -> None:
    """The error names the URL; nothing is left that looks like a copy; later the copy is made."""
    filled(remote, ["a.bin"])
    server.behave["/a.bin"] = behaviour
    with pytest.raises(ShardError, match=rf"download: {server.url}/a\.bin: .*{text}"):
        download(f"{server.url}/a.bin", tmp_path / "node")
    assert server.gets["/a.bin"] >= gets
    assert not list((tmp_path / "node").rglob("a.bin"))
    assert not list((tmp_path / "node").rglob("*.part"))
    server.behave.clear()
    assert download(f"{server.url}/a.bin", tmp_path / "node").read_bytes() == (remote / "a.bin").read_bytes()


def test_a_connection_that_breaks_once(tmp_path: Path, server: FileServer, remote: Path) -> None:
    filled(remote, ["a.bin"])
    server.behave["/a.bin"] = "cut once"
    assert download(f"{server.url}/a.bin", tmp_path / "node").read_bytes() == (remote / "a.bin").read_bytes()
    assert server.gets["/a.bin"] == 2


def test_a_server_that_goes_silent(
    tmp_path: Path, server: FileServer, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(remote, ["a.bin"])
    monkeypatch.setattr(remotes, "_SILENCE", 0.3)
    server.behave["/a.bin"] = "stall"
    began = time.monotonic()
    with pytest.raises(ShardError, match=rf"{server.url}/a\.bin: expected 100000 bytes, got .*[Tt]imeout"):
        download(f"{server.url}/a.bin", tmp_path / "node")
    assert time.monotonic() - began < 10


def test_no_server(tmp_path: Path) -> None:
    for url in ("http://127.0.0.1:9/a.bin", "http://127.0.0.1:9/a/"):
        with pytest.raises(ShardError, match=f"download: {url}: expected .* got "):
            download(url, tmp_path / "node")


def test_a_new_version_is_copied_again(tmp_path: Path, server: FileServer, remote: Path) -> None:
    """Of another size, or of the same size and another time. Who has the old copy open keeps it."""
    filled(remote, ["a.bin"])
    path = download(f"{server.url}/a.bin", tmp_path / "node")
    with path.open("rb") as old:
        for number, content in enumerate((b"longer" * 100_000, b"LONGER" * 100_000), 1):
            (remote / "a.bin").write_bytes(content)
            os.utime(remote / "a.bin", (0, 1_600_000_000 + 1000 * number))
            assert download(f"{server.url}/a.bin", tmp_path / "node").read_bytes() == content
        assert len(old.read()) == 100_000


def test_a_file_that_the_remote_folder_no_longer_has(tmp_path: Path, server: FileServer, remote: Path) -> None:
    """Its copy would give rows that are no longer there."""
    filled(remote, ["a/1.bin", "a/2.bin", "b/3.bin"])
    same_files(download(f"{server.url}/a/", tmp_path / "node"), remote / "a")
    download(f"{server.url}/b/3.bin", tmp_path / "node")
    (remote / "a/2.bin").unlink()
    same_files(download(f"{server.url}/a/", tmp_path / "node"), remote / "a")
    filled(remote, ["a/2.bin"])
    same_files(download(f"{server.url}/a/", tmp_path / "node"), remote / "a")
    download(f"{server.url}/b/3.bin", tmp_path / "node")
    assert server.gets["/b/3.bin"] == 1


@pytest.mark.parametrize("damage", ["truncated", "gone", "note"])
def test_a_damaged_copy_is_made_again(damage: str, tmp_path: Path, server: FileServer, remote: Path) -> None:
    """As after a crash of the node in the middle of a copy."""
    filled(remote, ["a.bin"])
    path = download(f"{server.url}/a.bin", tmp_path / "node")
    if damage == "truncated":
        os.truncate(path, 99)
    elif damage == "gone":
        path.unlink()
    else:
        (note,) = (tmp_path / "node" / ".mpistrat").glob("*.json")
        note.write_text(note.read_text()[:20])
    assert download(f"{server.url}/a.bin", tmp_path / "node").read_bytes() == (remote / "a.bin").read_bytes()


def test_a_limit(tmp_path: Path, server: FileServer, remote: Path) -> None:
    filled(remote, ["a/1.bin", "a/2.bin", "b/3.bin"])
    with pytest.raises(
        ShardError, match=r"node: expected at most 150 kB of copies \(limit\), got 2 files of 200 kB, next to 0"
    ):
        download(f"{server.url}/a/", tmp_path / "node", limit=150_000)
    assert not server.gets["/a/1.bin"]
    folder = download(f"{server.url}/a/", tmp_path / "node", limit=250_000)
    with pytest.raises(
        ShardError, match=r"got 1 file of 100 kB, next to 200 kB\. Raise the limit, or remove the folders"
    ):
        download(f"{server.url}/b/", tmp_path / "node", limit=250_000)
    download(f"{server.url}/a/", tmp_path / "node", limit=250_000)
    shutil.rmtree(folder)
    download(f"{server.url}/b/", tmp_path / "node", limit=250_000)


def test_a_disk_that_is_too_small(
    tmp_path: Path, server: FileServer, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(remote, ["a.bin"])
    monkeypatch.setattr(copies.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 10**4))
    with pytest.raises(ShardError, match="expected 100 kB of free space, got 10 kB, for 1 file of 100 kB"):
        download(f"{server.url}/a.bin", tmp_path / "node")


def processes(url: str, folder: Path, count: int) -> list[subprocess.CompletedProcess[str]]:
    started = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, url, str(folder)], stdout=-1, stderr=-1, text=True)
        for _ in range(count)
    ]
    ended = []
    for process in started:
        output, errors = process.communicate(timeout=60)
        ended.append(subprocess.CompletedProcess(PROGRAM, process.returncode, output, errors))
    return ended


def test_processes_of_a_node_copy_each_file_once(tmp_path: Path, server: FileServer, remote: Path) -> None:
    names = [f"{number}.bin" for number in range(12)]
    filled(remote, names, 1 << 20)
    server.behave = dict.fromkeys([f"/{name}" for name in names], "slow")
    for process in processes(f"{server.url}/", tmp_path / "node", 4):
        assert process.returncode == 0, process.stderr
        same_files(Path(process.stdout.strip()), remote)
    assert {server.gets[f"/{name}"] for name in names} == {1}


def test_processes_that_wait_get_the_error(tmp_path: Path, server: FileServer, remote: Path) -> None:
    filled(remote, ["a.bin"])
    server.behave["/a.bin"] = "cut"
    for process in processes(f"{server.url}/a.bin", tmp_path / "node", 3):
        assert process.returncode == 1
        assert f"ShardError: download: {server.url}/a.bin: expected 100000 bytes, got" in process.stderr


def test_a_thread_that_waits_does_not_try_again(
    tmp_path: Path, server: FileServer, remote: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the last of many ranks would get the error after as many time limits."""
    filled(remote, ["a.bin"])
    monkeypatch.setattr(remotes, "_SILENCE", 0.5)
    server.behave["/a.bin"] = "stall"
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(download, f"{server.url}/a.bin", tmp_path / "node") for _ in range(2)]
        errors = [str(each.exception(timeout=30)) for each in both]
    assert errors[0] == errors[1]
    assert f"{server.url}/a.bin: expected 100000 bytes" in errors[0]
    assert server.gets["/a.bin"] == 3


def test_a_process_that_is_killed_leaves_no_lock(tmp_path: Path, server: FileServer, remote: Path) -> None:
    filled(remote, ["a.bin"])
    server.behave["/a.bin"] = "stall"
    command = [sys.executable, "-c", PROGRAM, f"{server.url}/a.bin", str(tmp_path / "node")]
    process = subprocess.Popen(command)
    while not server.gets["/a.bin"]:
        time.sleep(0.02)
    process.kill()
    process.wait()
    server.behave.clear()
    assert download(f"{server.url}/a.bin", tmp_path / "node").read_bytes() == (remote / "a.bin").read_bytes()


def test_wrong_arguments(tmp_path: Path, remote: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShardError, match="download: files: expected at least one URL, got none"):
        download([], tmp_path)
    with pytest.raises(ShardError, match="no://a: expected a URL that fsspec knows"):
        download("no://a", tmp_path)
    with pytest.raises(ShardError, match="no match"):
        download(str(remote / "*.bin"), tmp_path)
    with pytest.raises(ShardError, match="no such file"):
        download(str(remote / "no.bin"), tmp_path)
    with pytest.raises(ShardError, match="expected a folder of files, got an empty one"):
        download(remote, tmp_path)
    with pytest.raises(TypeError, match="download: limit: expected an integer"):
        download(remote, tmp_path, limit="10 GB")  # type: ignore[arg-type]
    for package, url in (("fsspec", str(remote)), ("aiohttp", "http://127.0.0.1/a")):
        with monkeypatch.context() as context:
            context.setitem(sys.modules, package, None)
            with pytest.raises(
                MissingDependencyError, match=rf'download: expected {package}.*pip install "mpistrat\[remote\]"'
            ):
                download(url, tmp_path)


def test_the_example_of_the_page(tmp_path: Path, server: FileServer, remote: Path) -> None:
    """That of docs/input.md, with another host and folder."""
    ms.data.write_shards(remote / "train", {"x": np.arange(600)}, num_shards=3)
    page = (Path(__file__).parents[3] / "docs/input.md").read_text()
    example = page.partition("### Remote files")[2].partition("```python")[2].partition("```")[0]
    assert "https://host/" in example
    assert "/local/" in example
    example = example.replace("https://host/", f"{server.url}/").replace("/local/", f"{tmp_path}/local/")
    batches: list[Any] = []
    names: dict[str, Any] = {"ms": ms, "strategy": ms.OneDeviceStrategy(), "batches": batches}
    exec(example.replace("...", "batches.append(batch['x'])"), names)
    names["strategy"].close()
    assert sorted(np.concatenate(batches).tolist()) == list(range(600))
    assert len(batches) == 3


def test_notes_of_copies_are_plain(tmp_path: Path, remote: Path) -> None:
    filled(remote, ["a.bin"])
    path = download(remote / "a.bin", tmp_path / "node")
    (note,) = (tmp_path / "node" / ".mpistrat").glob("*.json")
    known: dict[str, Any] = json.loads(note.read_text())
    assert (known["size"], known["path"], known["url"]) == (100_000, str(path), f"file://{remote}/a.bin")

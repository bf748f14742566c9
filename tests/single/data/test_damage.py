"""Missing, damaged and mismatching shards: an error that names the file, before training starts where it can be known."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpistrat import OneDeviceStrategy
from mpistrat.data import HDF5Dataset, write_shards
from mpistrat.data.feed.distributed import distribute
from mpistrat.data.feed.plan import Workers
from mpistrat.data.files.handles import OpenFiles, ShardFile
from mpistrat.errors import ShardError
from tests.harness.shard_sets import open_all, plain, small_set


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return small_set(tmp_path)


def test_no_match_names_the_pattern(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"nothing-\*\.h5.*no match"):
        HDF5Dataset(tmp_path / "nothing-*.h5")
    with pytest.raises(ShardError, match="no match"):
        HDF5Dataset(tmp_path)
    with pytest.raises(ShardError, match="no match"):
        HDF5Dataset([])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (5, "files: expected a path, a directory, a pattern or a list of paths, got 5"),
        (None, "files: expected a path"),
        (["a.h5", 5], r"files\[1\]: expected a path, got 5"),
    ],
)
def test_what_is_no_path_is_named(files: Any, message: str) -> None:
    with pytest.raises(TypeError, match=f"^HDF5Dataset: {message}"):
        HDF5Dataset(files)


def test_a_file_that_somebody_writes_is_not_called_damaged(tmp_path: Path) -> None:
    path = plain(tmp_path / "x.h5", x=np.arange(3))
    program = "import sys, h5py; file = h5py.File(sys.argv[1], 'r+'); print('open', flush=True); sys.stdin.read()"
    writer = subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        with pytest.raises(ShardError, match=r"x\.h5.*unable to lock.*HDF5_USE_FILE_LOCKING=FALSE") as caught:
            open_all(path)
        assert "damaged" not in str(caught.value)
    finally:
        writer.communicate("")
    assert open_all(path) == 3


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Root may read everything: then go on as somebody else."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        if user == 0:
            os.seteuid(0)


def test_a_file_that_may_not_be_read_is_not_called_damaged() -> None:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        path = plain(Path(directory) / "x.h5", x=np.arange(3))
        path.chmod(0)
        with nobody(), pytest.raises(ShardError, match=r"x\.h5.*Permission denied.*chmod") as caught:
            open_all(path)
        assert "damaged" not in str(caught.value)
        os.chmod(directory, 0)
        with nobody(), pytest.raises(ShardError, match=r"x\.h5.*may look at.*permissions of its directories"):
            HDF5Dataset(path)
        os.chmod(directory, 0o700)


def test_a_missing_file_is_named(shards: list[Path]) -> None:
    with pytest.raises(ShardError, match=r"absent\.h5.*no such file"):
        HDF5Dataset(shards[0].parent / "absent.h5")
    shards[1].unlink()
    for files in (shards[0].parent, shards[0].parent / "*.h5", shards):
        with pytest.raises(ShardError, match=f"{shards[1].name}.*no such file"):
            open_all(files)


@pytest.mark.parametrize("keep", [0, 1, 100, 1500])
@pytest.mark.parametrize("with_manifest", [True, False])
def test_a_truncated_file_is_named(shards: list[Path], keep: int, with_manifest: bool) -> None:
    os.truncate(shards[1], min(keep, shards[1].stat().st_size - 1))
    if not with_manifest:
        (shards[0].parent / "manifest.json").unlink()
    with pytest.raises(ShardError, match=f"{shards[1].name}.*bytes"):
        open_all(shards[0].parent)


def test_cutting_one_byte_is_seen(shards: list[Path]) -> None:
    os.truncate(shards[2], shards[2].stat().st_size - 1)
    with pytest.raises(ShardError, match=f"{shards[2].name}.*truncated"):
        open_all(shards[0].parent)


def test_what_is_no_hdf5_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.h5").write_text("not HDF5 at all" * 100)
    with pytest.raises(ShardError, match=r"text\.h5.*HDF5"):
        open_all(tmp_path)


def deep(file: Any) -> None:
    for _ in range(3000):
        file = file.create_group("g")
    file["x"] = np.arange(3)


def of_three_bytes(file: Any) -> None:
    kind = h5py.h5t.NATIVE_INT32.copy()
    kind.set_size(3)
    dataset = h5py.h5d.create(file.id, b"x", kind, h5py.h5s.create_simple((4,)))
    dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(4, dtype=np.int32), mtype=h5py.h5t.NATIVE_INT32)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (deep, "groups nested more than 64 deep, at g/g/"),
        (
            lambda file: file.create_dataset("x", (4, 1 << 45), "f8", chunks=(1, 1024), fillvalue=1),
            "x: .*rows of 281.5 TB",
        ),
        (lambda file: file.create_dataset("x", (4, 2), "f8"), "x: .*4 rows that were never written"),
        (lambda file: file.create_dataset("x", (4, 2), "f8", chunks=(2, 2)), "x: .*4 rows that were never written"),
        (of_three_bytes, "x: .*got elements of 3 bytes for which h5py has no dtype"),
    ],
)
def test_what_would_be_made_up_or_fit_nowhere_is_named(tmp_path: Path, make: Any, told: str) -> None:
    with h5py.File(tmp_path / "odd.h5", "w") as file:
        make(file)
    with pytest.raises(ShardError, match=rf"odd\.h5: .*{told}"):
        open_all(tmp_path / "odd.h5")


def test_fill_values_of_the_files_own_are_read_and_told(tmp_path: Path, caplog: Any) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", (4,), "f8", fillvalue=-1.0)
    assert HDF5Dataset(tmp_path, "x").rows(range(4)).tolist() == [-1.0] * 4
    assert "a.h5: x: none of 4 rows was ever written; all of them read as -1.0" in caplog.text


def test_verify_needs_a_manifest(tmp_path: Path) -> None:
    plain(tmp_path / "a.h5", x=np.arange(3))
    with pytest.raises(ShardError, match=r"a\.h5.*digest.*write_shards"):
        len(HDF5Dataset(tmp_path, verify=True))


@pytest.mark.parametrize(
    ("second", "message"),
    [
        ({"x": np.zeros((5, 3), np.float64), "y": np.arange(5)}, "'x'.*float32.*float64"),
        ({"x": np.zeros((5, 4), np.float32), "y": np.arange(5)}, r"'x'.*\(3,\).*\(4,\)"),
        ({"x": np.zeros((5, 3), np.float32)}, r"'y'"),
        ({"x": np.zeros((5, 3), np.float32), "y": np.arange(5), "z": np.arange(5)}, "'z'"),
        ({"x": np.zeros((5, 3), np.float32), "y": np.arange(6)}, "5 rows.*6 rows"),
        ({}, "at least one dataset"),
    ],
)
def test_a_shard_unlike_its_siblings_is_named(tmp_path: Path, second: dict[str, np.ndarray], message: str) -> None:
    plain(tmp_path / "a.h5", x=np.zeros((5, 3), np.float32), y=np.arange(5))
    plain(tmp_path / "b.h5", **second)
    with pytest.raises(ShardError, match=f"b.h5.*{message}"):
        open_all(tmp_path)


def rewrite(shards: list[Path], **arrays: np.ndarray) -> None:
    """Put another file where the second shard was, and make the manifest agree with its size."""
    plain(shards[1], **arrays)
    manifest = shards[0].parent / "manifest.json"
    document = json.loads(manifest.read_text())
    document["shards"][1]["bytes"] = shards[1].stat().st_size
    manifest.write_text(json.dumps(document))


def test_a_shard_unlike_the_manifest_is_named(shards: list[Path]) -> None:
    rewrite(shards, x=np.zeros((33, 3), np.float32), y=np.arange(33))
    with pytest.raises(ShardError, match=f"{shards[1].name}.*float64.*the manifest.*float32"):
        open_all(shards[0].parent)
    rewrite(shards, x=np.zeros((32, 3)), y=np.arange(32))
    with pytest.raises(ShardError, match=f"{shards[1].name}.*33 rows.*manifest.*got 32 rows"):
        open_all(shards[0].parent)
    rewrite(shards, y=np.arange(33))
    with pytest.raises(ShardError, match=f"{shards[1].name}.*'x'"):
        open_all(shards[0].parent)


def test_a_file_that_the_manifest_does_not_list_is_named(shards: list[Path]) -> None:
    plain(shards[0].parent / "extra.h5", x=np.zeros((1, 3)), y=np.arange(1))
    with pytest.raises(ShardError, match=r"extra\.h5"):
        HDF5Dataset(shards[0].parent / "*.h5")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b""), "an empty file, of 0 bytes"),
        (lambda path: path.mkdir(), "a directory"),
        (lambda path: os.mkfifo(path), "a special file"),
        (lambda path: path.symlink_to("nowhere"), "no such file"),
        (lambda path: plain(path), "at least one dataset with rows, got none"),
        (lambda path: plain(path, mean=np.array(3.0)), r"only mean \(no rows\)"),
    ],
)
def test_what_is_no_file_with_rows_is_named(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "odd.h5")
    plain(tmp_path / "good.h5", x=np.arange(3))
    with pytest.raises(ShardError, match=rf"odd\.h5: .*{message}"):
        open_all([tmp_path / "good.h5", tmp_path / "odd.h5"])


# Files left out.


def bad_set(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """Eight files of which three are good, and what is wrong with the others."""
    paths = [directory / f"{number}.h5" for number in range(8)]
    for number, path in enumerate(paths):
        plain(path, x=np.arange(number * 10, number * 10 + 5))
    plain(paths[0], x=np.zeros(5))
    paths[2].write_text("not HDF5")
    os.truncate(paths[3], 2060)
    paths[5].unlink()
    plain(paths[7], y=np.arange(5))
    return paths, {"0": "float64", "2": "HDF5", "3": "HDF5", "5": "no such file", "7": "'x'|'y'"}


@pytest.mark.parametrize("fields", ["x", None])
def test_bad_files_are_left_out_on_request(tmp_path: Path, fields: str | None, caplog: Any) -> None:
    paths, wrong = bad_set(tmp_path)
    dataset = HDF5Dataset(paths, fields, on_error="skip")
    rows = dataset.rows(range(len(dataset)))
    found = rows if fields else rows["x"]
    assert found.tolist() == [*range(10, 15), *range(40, 45), *range(60, 65)]
    assert {path.stem: bool(re.search(wrong[path.stem], why)) for path, why in dataset.skipped} == dict.fromkeys(
        wrong, True
    )
    assert "5 of 8 files skipped" in str(dataset)
    assert "5 of 8 files skipped" in caplog.text
    with pytest.raises(ShardError):
        open_all(paths, fields=fields)


def test_wrong_digests_and_counts_of_rows_are_left_out_on_request(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, {"x": np.arange(100)}, num_shards=5)
    damaged = bytearray(paths[1].read_bytes())
    damaged[-1] ^= 1
    paths[1].write_bytes(damaged)
    document = json.loads((tmp_path / "manifest.json").read_text())
    document["shards"][3]["rows"] = 19
    (tmp_path / "manifest.json").write_text(json.dumps(document))
    dataset = HDF5Dataset(tmp_path, "x", verify=True, on_error="skip")
    assert dataset.rows(range(60)).tolist() == [*range(20), *range(40, 60), *range(80, 100)]
    assert [path for path, _ in dataset.skipped] == [paths[1], paths[3]]


def test_one_file_at_least_must_be_good(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_text("not HDF5")
    with pytest.raises(ShardError, match=r"a\.h5: expected a set with a good file, got 1 of 1 files skipped"):
        open_all(tmp_path, on_error="skip")
    (tmp_path / "a.h5").unlink()
    with pytest.raises(ShardError, match=r"a\.h5: expected a set with a good file"):
        open_all([tmp_path / "a.h5"], on_error="skip")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"format": "mpistrat.shards", "version": 99}'])
def test_a_damaged_manifest_is_named(shards: list[Path], text: str) -> None:
    (shards[0].parent / "manifest.json").write_text(text)
    with pytest.raises(ShardError, match=r"manifest\.json"):
        HDF5Dataset(shards[0].parent)


@pytest.mark.parametrize(
    "dtype",
    [
        "i4,f8", "(2,i4", "", 7, None, [], {}, {"shape": [10**30], "dtype": "<i4"},
        {"names": ["a"], "dtypes": ["<i4"], "offsets": [-1], "bytes": 4},
        {"names": ["a"], "dtypes": ["<i4"], "offsets": [10**20], "bytes": 10**30},
        {"names": ["a", "a"], "dtypes": ["<i4", "<i4"], "offsets": [0, 4], "bytes": 8},
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_with_a_dtype_that_is_none_is_named(shards: list[Path], dtype: Any) -> None:
    manifest = shards[0].parent / "manifest.json"
    document = json.loads(manifest.read_text())
    next(iter(document["fields"].values()))["dtype"] = dtype
    manifest.write_text(json.dumps(document))
    with pytest.raises(ShardError, match=r"manifest\.json"):
        HDF5Dataset(shards[0].parent)


def test_nesting_without_end_is_a_damaged_manifest(shards: list[Path]) -> None:
    (shards[0].parent / "manifest.json").write_text('{"a":' * 100_000)
    with pytest.raises(ShardError, match=r"manifest\.json"):
        HDF5Dataset(shards[0].parent)


def test_a_manifest_cannot_point_out_of_its_directory(shards: list[Path]) -> None:
    manifest = shards[0].parent / "manifest.json"
    document = json.loads(manifest.read_text())
    document["shards"][0]["name"] = "../other.h5"
    manifest.write_text(json.dumps(document))
    with pytest.raises(ShardError, match=r"manifest\.json"):
        HDF5Dataset(shards[0].parent)


def test_two_sets_in_a_directory_must_be_named(tmp_path: Path) -> None:
    for name in ("train", "test"):
        write_shards(tmp_path / f"{name}-*.h5", {"x": np.arange(3)})
    with pytest.raises(ShardError, match=r"one set.*test-\*\.h5"):
        HDF5Dataset(tmp_path)


def test_an_unknown_field_is_named_with_those_there_are(shards: list[Path]) -> None:
    with pytest.raises(ShardError, match=r"'z'.*\['x', 'y'\]"):
        open_all(shards[0].parent, fields="z")


def test_a_file_that_changes_between_epochs_is_named(shards: list[Path]) -> None:
    dataset = HDF5Dataset(shards[0].parent).batch(10)
    list(dataset)
    os.truncate(shards[2], 100)
    with pytest.raises(ShardError, match=f"{shards[2].name}.*as it was opened"):
        iter(dataset)
    shards[2].unlink()
    with pytest.raises(ShardError, match=f"{shards[2].name}.*no such file"):
        iter(dataset)


@pytest.mark.parametrize("chain", ["rows", "batches", "in order", "shuffled", "distributed"])
@pytest.mark.parametrize("change", ["cut", "touched"])
def test_a_file_that_changes_between_two_passes_is_named(shards: list[Path], chain: str, change: str) -> None:
    """The files are mapped: reading what was cut off would kill the process."""
    rows = HDF5Dataset(shards[0].parent)
    repeated: Any = {
        "rows": lambda: rows.repeat().batch(10),
        "batches": lambda: rows.batch(10).repeat(3),
        "in order": lambda: rows.filter(lambda row: True).repeat().batch(10),
        "shuffled": lambda: rows.shuffle(seed=1).repeat().batch(10),
        "distributed": lambda: rows.repeat().batch(10),
    }[chain]()
    if chain == "distributed":
        repeated = distribute(repeated, Workers([1], 0), buffer_size=0)
    steps = iter(repeated)
    for _ in range(20):  # two passes
        next(steps)
    if change == "cut":
        os.truncate(shards[1], 100)
    else:
        os.utime(shards[1])
    with pytest.raises(ShardError, match=f"{shards[1].name}.*as it was opened"):
        next(steps)


def test_files_are_looked_at_before_other_rows_are_asked_for(shards: list[Path]) -> None:
    rows = HDF5Dataset(shards[0].parent)
    batches = rows.batch(10)
    iterators = [iter(batches), iter(distribute(batches, Workers([1], 0)))]
    os.truncate(shards[1], 100)
    asked = [
        lambda: rows.rows([50]),
        lambda: rows.element(0, 50),
        lambda: batches.element(0, 5),
        *(functools.partial(iterator.restore, {"epoch": 0, "next": 5}) for iterator in iterators),
    ]
    for ask in asked:
        with pytest.raises(ShardError, match=f"{shards[1].name}.*as it was opened"):
            ask()


def test_files_are_looked_at_once_a_pass(shards: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Path] = []
    check = ShardFile.check

    def spy(file: ShardFile, descriptor: int | None = None) -> None:
        if descriptor is None:  # not as it is mapped
            looked.append(file.path)
        check(file, descriptor)

    dataset = HDF5Dataset(shards[0].parent)
    len(dataset)
    monkeypatch.setattr(ShardFile, "check", spy)
    assert len(list(dataset.shuffle(seed=1).repeat(4).batch(7))) == 58
    assert looked == shards * 4
    del looked[:]
    assert len(list(dataset.repeat(4).shuffle(seed=1).batch(7))) == 58  # rows of all passes in each batch
    assert len(looked) <= 4 * 3


def test_damage_is_found_when_the_dataset_is_distributed(shards: list[Path]) -> None:
    rewrite(shards, x=np.zeros((33, 3), np.float32), y=np.arange(33))
    dataset = HDF5Dataset(shards[0].parent).batch(10)
    with OneDeviceStrategy("cpu:0") as strategy, pytest.raises(ShardError, match=shards[1].name):
        strategy.distribute_dataset(dataset)


def test_a_damaged_chunk_is_named(tmp_path: Path) -> None:
    path = write_shards(tmp_path, {"x": np.random.default_rng(0).random(100_000)}, compression="gzip")[0]
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(ShardError, match=path.name):
        list(HDF5Dataset(tmp_path).batch(1000))


def external_link(file: h5py.File) -> None:
    file["x"] = np.arange(3)
    file["away"] = h5py.ExternalLink("/etc/passwd", "/")


def external_storage(file: h5py.File) -> None:
    file.create_dataset("x", (10,), "i1", external=[("/etc/passwd", 0, 10)])


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((3,), "i8")
    layout[:] = h5py.VirtualSource("/elsewhere.h5", "x", (3,))
    file.create_virtual_dataset("x", layout)


def references(file: h5py.File) -> None:  # beside what can be read they are left out
    file.create_dataset("x", (3,), h5py.ref_dtype)


@pytest.mark.parametrize("make", [external_link, external_storage, virtual, references])
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, make: Any) -> None:
    with h5py.File(tmp_path / "odd.h5", "w") as file:
        make(file)
    with pytest.raises(ShardError, match=r"odd\.h5"):
        open_all(tmp_path)


@contextlib.contextmanager
def open_files(limit: int) -> Iterator[None]:
    """Let the process have file numbers below a limit only."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_a_set_may_have_more_files_than_a_process_may_open(tmp_path: Path, compression: str | None) -> None:
    write_shards(tmp_path, {"x": np.arange(120)}, num_shards=60, compression=compression)
    rows = np.random.default_rng(0).permutation(120)
    with open_files(len(os.listdir("/proc/self/fd")) + 40):
        assert np.array_equal(HDF5Dataset(tmp_path, "x").rows(rows), rows)


def test_threads_that_find_no_room_wait_for_each_others_files(tmp_path: Path) -> None:
    """Room that one thread makes may be taken by another one before it is used."""
    paths = [tmp_path / str(number) for number in range(12)]
    for path in paths:
        path.touch()
    files = [ShardFile.of(path) for path in paths]
    lock, count, most = threading.Lock(), [0], 3

    class Limited:
        def __init__(self, file: ShardFile) -> None:
            with lock:
                if count[0] == most:
                    raise ShardError(str(file.path)) from OSError(errno.EMFILE, "too many")
                count[0] += 1
            time.sleep(1e-4)

        def close(self) -> None:
            with lock:
                count[0] -= 1

    opened = OpenFiles(Limited)

    def read(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(0, len(files), 100):
            with opened.lend(files[number]):
                time.sleep(1e-4)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(read, range(8)))
    opened.close()
    assert count == [0]


def test_too_many_open_files_are_no_damage(tmp_path: Path) -> None:
    write_shards(tmp_path, {"x": np.arange(6)}, num_shards=3)
    dataset = HDF5Dataset(tmp_path)
    with open_files(3), pytest.raises(ShardError, match=r"of-00003\.h5.*ulimit -n") as caught:
        len(dataset)
    assert "damaged" not in str(caught.value)

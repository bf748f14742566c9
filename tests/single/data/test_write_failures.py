"""Writing shards where something goes wrong: nothing new is left, what was there stays, and the error names its cause."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpistrat.data import HDF5Dataset, ShardWriter, from_arrays, write_shards
from mpistrat.errors import ClosedError, ShardError


def read(target: Any) -> dict[str, np.ndarray]:
    dataset = HDF5Dataset(target, verify=True)
    return dataset.rows(range(len(dataset)))


# Nothing new, and the old set whole.


def old_set(directory: Path) -> list[Path]:
    write_shards(directory, {"x": np.arange(10)}, num_shards=2)
    return sorted(directory.iterdir())


def check_old_set(directory: Path, before: list[Path]) -> None:
    assert sorted(directory.iterdir()) == before
    assert read(directory)["x"].tolist() == list(range(10))


def test_an_exception_in_the_context_leaves_the_old_set_whole(tmp_path: Path) -> None:
    before = old_set(tmp_path)
    with pytest.raises(KeyError), ShardWriter(tmp_path, rows_per_shard=2) as writer:
        writer.write({"x": np.arange(1_000_00)[:9]})
        writer._flush()
        assert len(list(tmp_path.iterdir())) > len(before)  # the premise
        raise KeyError("mine")
    check_old_set(tmp_path, before)
    assert writer.paths == []
    with pytest.raises(ClosedError):
        writer.write({"x": np.arange(3)})


def test_a_disk_that_fails_leaves_the_old_set_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpistrat.data.shards.new_shard import NewShard

    before = old_set(tmp_path)
    finished = []
    original = NewShard.finish

    def fail(self: NewShard, name: str) -> Any:
        finished.append(name)
        if len(finished) == 2:
            raise OSError("no space left on device")
        return original(self, name)

    monkeypatch.setattr(NewShard, "finish", fail)
    with pytest.raises(OSError, match="no space"):
        write_shards(tmp_path, {"x": np.arange(50)}, num_shards=4)
    assert len(finished) == 2
    check_old_set(tmp_path, before)


def test_a_write_that_failed_cannot_be_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpistrat.data.shards.new_shard import NewShard

    def fail(*args: Any) -> None:
        raise OSError("no space left on device")

    before = old_set(tmp_path)
    monkeypatch.setattr(NewShard, "_append", fail)
    writer = ShardWriter(tmp_path)
    with pytest.raises(OSError, match="no space"):
        writer.write({"x": np.arange(1_000_000)})
    with pytest.raises(ShardError, match="a write that failed"):
        writer.close()
    check_old_set(tmp_path, before)


def test_a_kill_leaves_the_old_set_whole(tmp_path: Path) -> None:
    before = old_set(tmp_path)
    program = (
        "import os, sys, numpy as np, mpistrat as ms\n"
        "writer = ms.data.ShardWriter(sys.argv[1], rows_per_shard=100)\n"
        "writer.write({'x': np.arange(100_000)})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60)
    assert done.returncode == -9
    left = set(tmp_path.iterdir()) - set(before)
    assert all(path.name.startswith(".shards-") for path in left)
    assert len(left) == 1
    assert read(tmp_path)["x"].tolist() == list(range(10))


@pytest.mark.parametrize("step", range(3))
def test_a_crash_while_files_get_their_names_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Old and new files have the same names and sizes: only the manifest can tell that they are mixed."""
    before = [path.name for path in old_set(tmp_path)]
    original, renamed = Path.replace, []

    def crash(self: Path, target: Any) -> Any:
        if Path(target).suffix == ".h5":
            if len(renamed) == step:
                raise OSError("crash")
            renamed.append(target)
        elif step == 2 and len(renamed) == 2:
            raise OSError("crash")
        return original(self, target)

    monkeypatch.setattr(Path, "replace", crash)
    with pytest.raises(OSError, match="crash"):
        write_shards(tmp_path, {"x": np.arange(100, 110)}, num_shards=2)
    monkeypatch.undo()
    with pytest.raises(ShardError, match=r"manifest\.json.*interrupted.*again"):
        HDF5Dataset(tmp_path)
    with pytest.raises(ShardError, match="interrupted"):
        HDF5Dataset(str(tmp_path / "*.h5"))
    write_shards(tmp_path, {"x": np.arange(5)}, num_shards=1)
    assert read(tmp_path)["x"].tolist() == list(range(5))
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["00000-of-00001.h5", "manifest.json"]
    assert before == ["00000-of-00002.h5", "00001-of-00002.h5", "manifest.json"]


def test_nothing_is_left_aside_and_an_older_set_is_replaced(tmp_path: Path) -> None:
    write_shards(tmp_path / "train-*.h5", {"x": np.arange(10)}, num_shards=5)
    write_shards(tmp_path / "test-*.h5", {"x": np.arange(100, 103)})
    write_shards(tmp_path / "train-*.h5", {"x": np.arange(20, 26)}, num_shards=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "test-00000-of-00001.h5",
        "test-manifest.json",
        "train-00000-of-00002.h5",
        "train-00001-of-00002.h5",
        "train-manifest.json",
    ]
    assert HDF5Dataset(tmp_path / "train-*.h5", "x").rows(range(6)).tolist() == list(range(20, 26))
    assert HDF5Dataset(tmp_path / "test-*.h5", "x").rows(range(3)).tolist() == [100, 101, 102]


# Wrong use.


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data": {"x": np.zeros(3), "y": np.zeros(4)}}, r"data\['y'\]: expected 3 rows"),
        ({"data": {}}, "a dict of arrays"),
        ({"data": [np.zeros(3)]}, "a dict of arrays"),
        ({"data": 3}, "a function of the rank, got a int"),
        ({"data": {"x": 3}}, r"data\['x'\]: expected rows along a first axis, got a scalar"),
        ({"data": {"x": [[1], [1, 2]]}}, r"data\['x'\]: expected an array"),
        ({"data": {"x": np.array(["a"])}}, r"\['x'\].*got strings .*layout=.chunked."),
        ({"data": {"x": np.array([None])}}, "dtype object"),
        ({"data": {"x": np.zeros(3, "M8[s]")}}, "dtype datetime64"),
        ({"data": {"x": np.zeros(3, [("a", "U4")])}}, "structures of numbers and bytes"),
        ({"data": {"x": np.zeros(3, [("a", [("b", "M8[s]")], (2,))])}}, "structures of numbers and bytes"),
        ({"data": {"x": np.zeros(3, [("a", "i4", (0,))])}}, "structures of numbers and bytes"),
        ({"data": {"/x": np.zeros(3)}}, "leading slash"),
        ({"data": {"x\udcff": np.zeros(3)}}, "a name in UTF-8"),  # as of a file whose name is not
        ({"data": {"a": np.zeros(3), "a/b": np.zeros(3)}}, "no array where a group is"),
        ({"data": {"a": {"b": np.zeros(3)}, "a/b": np.zeros(3)}}, "two of 'a/b'"),
        ({"data": from_arrays((np.zeros(3), np.zeros(3)))}, "a dataset of dicts.*Name the arrays"),
        ({"data": from_arrays({"x": np.zeros(3)}).repeat()}, "a dataset with an end"),
        ({"data": iter([{"x": 1}]), "num_shards": 2}, "num_shards.*a dict of arrays only"),
        ({"num_shards": 0}, "num_shards"),
        ({"rows_per_shard": 0}, "rows_per_shard"),
        ({"bytes_per_shard": -1}, "bytes_per_shard"),
        ({"num_shards": 1, "rows_per_shard": 1}, "got both"),
        ({"bytes_per_shard": 1, "rows_per_shard": 1}, "got both"),
        ({"layout": "rows"}, "layout.*contiguous.*got 'rows'"),
        ({"compression": "szip"}, "compression.*'szip'"),
        ({"compression": True}, "compression.*True"),
        ({"compression": 10}, "compression.*10"),
        ({"fletcher32": True}, "fletcher32.*chunks only.*layout=.chunked."),
        ({"layout": "contiguous", "fletcher32": True}, "fletcher32.*chunks only"),
        ({"layout": "contiguous", "compression": "gzip"}, "compression.*chunks only"),
        ({"shuffle": True}, "shuffle.*chunks only"),
        ({"chunk_rows": 3}, "chunk_rows.*chunks only"),
        ({"layout": "chunked", "chunk_rows": 0}, "chunk_rows"),
        ({"layout": "chunked", "chunk_rows": 10**9}, "below 4 GiB"),
    ],
)
def test_what_cannot_be_written_is_named(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"data": {"x": np.zeros(3)}, **changed}
    with pytest.raises(ValueError, match=f"^write_shards: .*{message}"):
        write_shards(tmp_path, **options)
    assert not list(tmp_path.iterdir())
    options.pop("data")
    if options and "num_shards" not in options:
        with (
            pytest.raises(ValueError, match=f"^ShardWriter(.write)?: .*{message}"),
            ShardWriter(tmp_path, **options) as writer,
        ):
            writer.write({"x": np.zeros(3)})


@pytest.mark.parametrize(
    "options",
    [
        {"bytes_per_shard": 1e9 + 0.5},
        {"rows_per_shard": "3"},
        {"num_shards": 1.5},
        {"layout": "chunked", "chunk_rows": 2.5},
        {"bytes_per_shard": float("inf")},
    ],
)
def test_sizes_are_whole_numbers(tmp_path: Path, options: dict[str, Any]) -> None:
    name = list(options)[-1]
    with pytest.raises(TypeError, match=f"^write_shards: {name}: expected a whole number, got {options[name]!r}"):
        write_shards(tmp_path, {"x": np.zeros(3)}, **options)
    assert not list(tmp_path.iterdir())


def test_whole_floats_are_whole_numbers(tmp_path: Path) -> None:
    assert len(write_shards(tmp_path / "a", {"x": np.zeros(3)}, bytes_per_shard=1e9)) == 1
    assert len(write_shards(tmp_path / "b", {"x": np.zeros(3)}, bytes_per_shard=8.0)) == 3
    assert len(write_shards(tmp_path / "c", iter([{"x": 1}] * 3), rows_per_shard=2.0)) == 2
    assert len(write_shards(tmp_path / "d", {"x": np.zeros(3)}, num_shards=2.0)) == 2


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([{"x": 1}, {"x": 2.5}], r"^write_shards: data\[1\]: at \['x'\]: expected int64"),
        ([{"x": 1}, {"x": 1}, {"y": 2}], r"^write_shards: data\[2\]: expected the structure"),
        ([{"x": 1}, 5], r"^write_shards: data\[1\]: expected a dict of arrays, numbers and strings by name, got int"),
        ([{"x": None}], r"^write_shards: data\[0\]: element: expected arrays, numbers or strings, got a NoneType"),
        (from_arrays({"x": np.array(["a"])}), r"^write_shards: data\['x'\]: .*got strings"),
    ],
)
def test_items_that_cannot_be_written_are_named(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_shards(tmp_path, data)
    assert not list(tmp_path.iterdir())


def test_wrong_pieces_are_named(tmp_path: Path) -> None:
    pieces = [{"x": np.zeros(3)}, {"x": np.zeros((3, 2))}]
    with pytest.raises(ValueError, match=r"^write_shards: data\[1\]\['x'\]: expected float64 rows of shape \(\)"):
        write_shards(tmp_path, pieces, batched=True)


@pytest.mark.parametrize(
    ("method", "second", "message"),
    [
        ("write", {"x": np.zeros((2, 3))}, r"the arrays \['x', 'y'\]"),
        ("write", {"x": np.zeros((2, 4)), "y": np.zeros(2, "i4")}, r"\['x'\]: expected float64 rows of shape \(3,\)"),
        ("write", {"x": np.zeros((2, 3)), "y": np.zeros(2, "i8")}, r"\['y'\]: expected int32 rows"),
        ("write_row", {"x": np.zeros(4), "y": np.int32(3)}, r"at \['x'\]"),
        ("write_row", {"x": np.zeros(3), "y": 3.5}, r"at \['y'\]"),
        ("write_row", {"x": np.zeros(3)}, "structure"),
        ("write_row", 5, "a dict of arrays, numbers and strings"),
    ],
)
def test_rows_unlike_those_before_are_refused(tmp_path: Path, method: str, second: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^ShardWriter\.{method}: row.*{message}"), ShardWriter(tmp_path) as writer:
        writer.write({"x": np.zeros((2, 3)), "y": np.zeros(2, "i4")})
        getattr(writer, method)(second)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["a-*-*.h5", "a-?.h5", "one.h5", "*-a.h5", "a-*"])
def test_targets_that_are_no_set(tmp_path: Path, target: str) -> None:
    with pytest.raises(ValueError, match=r"^write_shards: target"):
        write_shards(tmp_path / target, {"x": np.zeros(3)})


@pytest.mark.parametrize("finished", [False, True])
def test_only_shards_of_the_set_are_removed(tmp_path: Path, finished: bool) -> None:
    """Whatever a manifest says: it may have been written by somebody else."""
    kept = ["precious.py", "b-00000-of-00001.h5", "a-1.h5", "a-00000-of-00001.h5.bak"]
    for name in kept:
        (tmp_path / name).write_text("kept")
    (tmp_path / "a-00008-of-00009.h5").symlink_to("precious.py")
    (tmp_path / "a-00007-of-00009.h5").write_text("an older shard")
    names = [*kept, "a-00007-of-00009.h5", "a-00008-of-00009.h5", "a-00006-of-00009.h5"]
    document: dict[str, Any] = {"format": "mpistrat.shards", "version": 1, "unfinished": names}
    if finished:
        write_shards(tmp_path / "a-*.h5", {"x": np.arange(3)})
        document = json.loads((tmp_path / "a-manifest.json").read_text())
        document["shards"] = [{**document["shards"][0], "name": name} for name in names]
    (tmp_path / "a-manifest.json").write_text(json.dumps(document))
    write_shards(tmp_path / "a-*.h5", {"x": np.arange(4)}, num_shards=2)
    assert [path.exists() for path in map(tmp_path.joinpath, kept)] == [True] * 4
    assert (tmp_path / "a-00008-of-00009.h5").is_symlink() and not (tmp_path / "a-00007-of-00009.h5").exists()
    (tmp_path / "a-00008-of-00009.h5").unlink()
    (tmp_path / "a-1.h5").unlink()
    (tmp_path / "a-00000-of-00001.h5").unlink(missing_ok=True)
    assert read(tmp_path / "a-*.h5")["x"].tolist() == [0, 1, 2, 3]


def test_a_damaged_manifest_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(ShardError, match=r"manifest\.json"):
        write_shards(tmp_path, {"x": np.zeros(3)})
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


_FULL = """
import errno, os, resource, shutil, sys
import numpy as np
from mpistrat.data import HDF5Dataset, write_shards

folder, layout, compression = sys.argv[1], sys.argv[2], sys.argv[3] or None
rng = np.random.default_rng(0)
data = {"x": rng.normal(size=(300, 40)), "group/y": np.arange(300)}
if layout == "chunked":
    data["text"] = np.array([f"row {i}" * (i % 7) for i in range(300)])
    ragged = np.empty(300, object)
    ragged[:] = [np.arange(i % 5) for i in range(300)]
    data["ragged"] = ragged
settings = {"layout": layout, "compression": compression, "num_shards": 2}
paths = write_shards(folder + "/whole", data, **settings)
largest = max(path.stat().st_size for path in paths)
refused = 0
for limit in [1, 100, *range(700, largest + 4000, largest // 12)]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))  # as a disk that is full, for one process
    try:
        write_shards(folder + "/set", data, **settings)
        assert limit >= largest
    except OSError as error:
        assert error.errno == errno.EFBIG and folder in str(error), error
        assert limit < largest
        assert os.listdir(folder + "/set") == []
        refused += 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert len(HDF5Dataset(folder + "/set", verify=True)) == 300
print("refused", refused)
"""


@pytest.mark.parametrize(("layout", "compression"), [("contiguous", ""), ("chunked", ""), ("chunked", "gzip")])
def test_a_disk_that_is_full_is_an_error(tmp_path: Path, layout: str, compression: str) -> None:
    """HDF5 ended the process by a segmentation fault, as it closed a file in chunks."""
    words = [sys.executable, "-c", _FULL, str(tmp_path), layout, compression]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("refused 1")  # 10 to 19


def test_hdf5_reads_what_it_wrote_after_an_error(tmp_path: Path) -> None:
    """So that it closes a file that cannot be written."""
    import resource

    from mpistrat.data.shards.unfailing_file import UnfailingFile

    file = UnfailingFile(tmp_path / "x", new=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    expected, rng = bytearray(), np.random.default_rng(0)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, before[1]))
        for _ in range(50):
            at, data = int(rng.integers(0, 600)), rng.bytes(int(rng.integers(1, 90)))
            expected.extend(bytes(max(0, at + len(data) - len(expected))))
            expected[at : at + len(data)] = data
            assert (file.seek(at), file.write(memoryview(data)), file.tell()) == (at, len(data), at + len(data))
            assert file.seek(0, 2) == len(expected)
            start, count = sorted(int(n) for n in rng.integers(0, len(expected) + 1, 2))
            file.seek(start)
            assert file.read(count - start) == bytes(expected[start:count])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        file.close()
    with pytest.raises(OSError, match="File too large"):
        file.check()

"""`python -m mpistrat shards`: other files become shards, are described and checked, by one process or under mpiexec."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mpistrat.data import write_shards
from tests.harness.shards_command import ROWS, mpistrat, python, read, table
from tests.launch.launcher import ROOT


@pytest.fixture
def arrays(tmp_path: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {"x": rng.standard_normal((ROWS, 4)).astype(np.float32), "y": np.arange(ROWS) % 3}
    for name, array in found.items():
        np.save(tmp_path / f"{name}.npy", array)
    return found


def photos(folder: Path, sizes: list[tuple[int, int]] | None = None) -> np.ndarray:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(1).integers(0, 256, (12, 6, 5, 3), dtype=np.uint8)
    for i, one in enumerate(pixels):
        path = folder / ["dog", "cat"][i % 2] / f"p{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(one[: sizes[i][0], : sizes[i][1]] if sizes else one).save(path)
    return pixels


# Writing.


def test_write_info_check(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    words = ["--field", "x=x.npy", "--field", "label=y.npy", "--rows-per-shard", 20]
    done = mpistrat("shards", "write", "set/train-*.h5", *words, cwd=tmp_path)
    assert "set/train-*.h5: 3 shards, 50 rows" in done.stdout
    found = read(tmp_path / "set/train-*.h5")
    assert np.array_equal(found["x"], arrays["x"])
    assert np.array_equal(found["label"], arrays["y"])

    done = mpistrat("shards", "info", "set/train-*.h5", cwd=tmp_path)
    lines = [line.split() for line in done.stdout.splitlines()]
    assert "3 files in set: 50 rows" in done.stdout
    assert ["x", "float32", "4", "contiguous", "800", "B", "1.00", "memory", "map"] in lines
    assert ["label", "int64", "()", "contiguous", "400", "B", "1.00", "memory", "map"] in lines
    document = json.loads(mpistrat("shards", "info", "--json", "set", cwd=tmp_path).stdout)
    assert (document["rows"], document["manifest"]) == (50, True)
    assert [file["rows"] for file in document["files"]] == [20, 20, 10]
    assert document["bytes"] == sum(path.stat().st_size for path in (tmp_path / "set").glob("*.h5"))

    done = mpistrat("shards", "check", "set", cwd=tmp_path)
    assert "3 compared with the manifest's digest" in done.stdout
    assert "no damage found" in done.stdout


def test_a_set_is_replaced_only_when_told(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    mpistrat("shards", "write", "set", "x.npy", cwd=tmp_path)
    done = mpistrat("shards", "write", "set", "y.npy", cwd=tmp_path, status=2)
    assert "--overwrite" in done.stderr
    assert list(read(tmp_path / "set")) == ["x"]
    mpistrat("shards", "write", "set", "y.npy", "--overwrite", cwd=tmp_path)
    assert list(read(tmp_path / "set")) == ["y"]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz(tmp_path: Path, save: Any) -> None:
    data = {"x": np.arange(ROWS * 6.0).reshape(ROWS, 2, 3), "name": np.array([f"é{i}" for i in range(ROWS)])}
    save(tmp_path / "a.npz", **data, other=np.arange(ROWS))
    mpistrat("shards", "write", "set", "a.npz", "--select", "x,name", "--compression", "gzip", cwd=tmp_path)
    found = read(tmp_path / "set")
    assert np.array_equal(found["x"], data["x"])
    assert found["name"].tolist() == data["name"].tolist()


def test_a_large_archive_is_read_in_batches(tmp_path: Path) -> None:
    from mpistrat.data.shards.converters.numpy_files import NpzFile

    data = {"x": np.arange(3_000_000.0).reshape(-1, 10), "y": np.arange(300_000, dtype=np.int16)}
    np.savez(tmp_path / "a.npz", **data)
    batches = list(NpzFile(tmp_path / "a.npz", None).batches(1000, 299_000))
    assert len(batches) == 3  # 24.4 MB in batches of 8.4 MB
    for name, array in data.items():
        assert np.array_equal(np.concatenate([batch[name] for batch in batches]), array[1000:299_000])


def test_images(tmp_path: Path) -> None:
    pixels = photos(tmp_path / "photos")
    (tmp_path / "photos/readme.txt").write_text("hello")
    done = mpistrat("shards", "write", "set", "photos", "--rows-per-shard", 5, cwd=tmp_path)
    assert "2 classes: cat, dog" in done.stdout
    assert "not images: 1" in done.stdout
    found = read(tmp_path / "set")
    order = [1, 3, 5, 7, 9, 11, 0, 2, 4, 6, 8, 10]  # cats first; p2 before p10
    assert np.array_equal(found["image"], pixels[order])
    assert found["label"].tolist() == [0] * 6 + [1] * 6
    with h5py.File(tmp_path / "set/00000-of-00003.h5") as file:
        assert list(file["label"].attrs["classes"]) == ["cat", "dog"]
    mpistrat("shards", "write", "small", "photos", "--resize", "4x3", "--color", "gray", cwd=tmp_path)
    assert read(tmp_path / "small")["image"].shape == (12, 4, 3)


def test_images_of_different_sizes_are_named(tmp_path: Path) -> None:
    photos(tmp_path / "photos", [(6, 5)] * 11 + [(6, 4)])
    done = mpistrat("shards", "write", "set", "photos", cwd=tmp_path, status=1)
    assert "p11.png" in done.stderr
    assert "expected 6x5 pixels" in done.stderr
    assert "--resize 6x5" in done.stderr
    assert not list((tmp_path / "set").glob("*")) if (tmp_path / "set").exists() else True


def test_images_without_pillow(tmp_path: Path) -> None:
    photos(tmp_path / "photos")
    program = "import sys; sys.modules['PIL'] = None\nfrom mpistrat.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    done = python("-c", program, "shards", "write", "set", "photos", cwd=tmp_path)
    assert done.returncode == 1
    assert "pip install 'mpistrat[images]'" in done.stderr


def npy(path: Path) -> None:
    np.save(path, np.arange(10))


def pickled(path: Path) -> None:
    np.save(path, np.array([{}]), allow_pickle=True)


def cut(path: Path) -> None:
    np.save(path, np.arange(1000))
    path.write_bytes(path.read_bytes()[:500])


def damaged(path: Path) -> None:
    """Write a compressed archive, and invert a byte where the compressed data begins."""
    np.savez_compressed(path, x=np.random.default_rng(0).normal(size=1000))
    data = bytearray(path.read_bytes())
    data[70] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "make", "words", "message", "status"),
    [
        ("a.npy", lambda path: path.write_bytes(b"nonsense"), [], "a.npy: expected an array", 1),
        ("a.npy", pickled, [], "without pickled objects", 1),
        ("a.npy", cut, [], "a.npy: expected an array", 1),
        ("a.npy", npy, ["--select", "x"], "--select: expected none; it is for .npz and .csv", 2),
        ("a.npy", npy, ["--dtype", "b=int8"], "fields among ['a']", 2),
        (
            "a.npy",
            lambda path: np.save(path, np.arange(300)),
            ["--dtype", "a=uint8"],
            "--dtype a: expected values that uint8 holds, got 256",
            2,
        ),
        ("a.npy", npy, ["--field", "x=a.npy"], "got both", 2),
        ("a.npz", lambda path: path.write_bytes(b"nonsense"), [], "a.npz: expected an archive", 1),
        ("a.npz", damaged, [], "a.npz: expected an archive", 1),
        ("a.npz", lambda path: np.savez(path, x=np.zeros(3), y=np.zeros(4)), [], "3 rows in 'y', as 'x' has", 1),
        ("a.npz", lambda path: np.savez(path, x=np.zeros(3)), ["--select", "z"], "arrays ['z']", 1),
        ("a.csv", lambda path: path.write_text(""), [], "a first line that names the columns", 1),
        ("a.csv", lambda path: path.write_text("a,b\n1,2\n3\n"), [], "got 1 in line 3", 1),
        ("a.csv", lambda path: path.write_bytes(b"a\n\xff\n"), [], "text in UTF-8", 1),
        ("a.csv", lambda path: path.write_text("a\n1\n"), ["--select", "q"], "--select", 2),
        ("a.csv", lambda path: path.write_text("a\n"), [], "expected rows to write, got none", 2),
        ("a.txt", lambda path: path.write_text("a\n"), [], "got a .txt file", 2),
        ("a.npy", lambda path: None, [], "no such file", 1),
        ("a", lambda path: path.mkdir(), [], "no sub-folder", 1),
    ],
)
def test_bad_input_is_named(tmp_path: Path, name: str, make: Any, words: list[str], message: str, status: int) -> None:
    if name == "a":
        pytest.importorskip("PIL.Image")
    make(tmp_path / name)
    done = mpistrat("shards", "write", "set", name, *words, cwd=tmp_path, status=status)
    assert message in done.stderr
    assert not list(tmp_path.glob("set/*"))


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["shards"],
        ["shards", "nothing"],
        ["shards", "write"],
        ["shards", "write", "set"],
        ["shards", "write", "one.h5", "a.npy"],
        ["shards", "write", "set", "a.npy", "--bytes-per-shard", "many"],
        ["shards", "write", "set", "a.npy", "--resize", "3"],
        ["shards", "write", "set", "a.npy", "--layout", "rows"],
        ["shards", "write", "set", "a.npy", "--compression", "best"],
        ["shards", "write", "set", "a.npy", "--layout", "contiguous", "--compression", "gzip"],
        ["shards", "write", "set", "a.npy", "--rows-per-shard", "0"],
        ["shards", "write", "set", "a.npy", "--rows-per-shard", "1", "--bytes-per-shard", "1k"],
        ["shards", "check"],
    ],
)
def test_wrong_use(tmp_path: Path, words: list[str]) -> None:
    np.save(tmp_path / "a.npy", np.arange(3))
    done = mpistrat(*words, cwd=tmp_path, status=2)
    assert "error: " in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]


def test_help() -> None:
    for words in ([], ["shards"], ["shards", "write"], ["shards", "info"], ["shards", "check"]):
        text = mpistrat(*words, "--help").stdout
        assert "exit status: 0 fine, 1 a problem was found, 2 wrong use" in text
        if len(words) == 2:
            assert f"examples:\n  mpistrat shards {words[1]}" in text


def test_as_a_program_of_its_own(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    done = python("-m", "mpistrat", "shards", "write", "set", "x.npy", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (tmp_path / "set/00000-of-00001.h5").write_bytes(b"nonsense")
    done = python("-m", "mpistrat", "shards", "check", "set", cwd=tmp_path)
    assert done.returncode == 1
    assert "1 BAD:" in done.stdout
    done = python("-m", "mpistrat", "shards", "ceck", "set", cwd=tmp_path)
    assert done.returncode == 2
    assert "invalid choice: 'ceck'" in done.stderr


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("--help", 0),
        ("shards info set", 0),
        ("shards info set --json", 0),
        ("shards check bad", 1),
        ("shards write new x.npy", 0),
        ("shards info none", 1),
        ("shards write", 2),
    ],
)
def test_the_status_is_the_same_when_nobody_reads(
    tmp_path: Path, arrays: dict[str, np.ndarray], words: str, status: int
) -> None:
    for name in ("set", "bad"):
        path = write_shards(tmp_path / name, arrays)[0]
    path.write_bytes(path.read_bytes()[:-1])
    reader, writer = os.pipe()
    os.close(reader)
    streams = {"stderr": writer if status else subprocess.PIPE, "stdout": writer}
    command, env = [sys.executable, "-m", "mpistrat", *words.split()], {"PYTHONPATH": str(ROOT)}
    try:
        done = subprocess.run(command, **streams, text=True, timeout=60, cwd=tmp_path, env=env)
    finally:
        os.close(writer)
    assert done.returncode == status, done.stderr
    assert not done.stderr


# What there is.


def test_info_of_foreign_files(tmp_path: Path) -> None:
    for i in range(25):
        with h5py.File(tmp_path / f"part{i}.h5", "w") as file:
            file.create_dataset("g/x", data=np.zeros((40, 3)), chunks=(10, 3), compression="gzip", shuffle=True)
            file["y"] = np.arange(40)
            file["y"].attrs["unit"] = "m"
    document = json.loads(mpistrat("shards", "info", tmp_path, "--json").stdout)
    assert (document["rows"], document["manifest"], len(document["files"])) == (1000, False, 25)
    x, y = document["fields"]
    assert (x["name"], x["filters"], x["chunk_rows"]) == ("g/x", ["shuffle", "gzip 4"], 10)
    assert x["data_bytes"] == 1000 * 24
    assert (y["layout"], y["stored_bytes"], y["attributes"]) == ("contiguous", 8000, {"unit": "m"})
    text = mpistrat("shards", "info", tmp_path).stdout
    assert "manifest: none" in text
    assert "… and 5 more" in text
    mpistrat("shards", "info", tmp_path / "part99.h5", status=1)


def test_info_of_some_fields(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["g/x"], file["y"], file["other"] = np.zeros((5, 2)), np.zeros(5), np.zeros(3)
    done = mpistrat("shards", "info", tmp_path, status=1)
    assert "expected 5 rows" in done.stderr
    document = json.loads(mpistrat("shards", "info", tmp_path, "--json", "--fields", "y,/g/x").stdout)
    assert (document["rows"], [field["name"] for field in document["fields"]]) == (5, ["y", "g/x"])
    done = mpistrat("shards", "info", tmp_path, "--fields", "z", status=1)
    assert "expected a dataset 'z'" in done.stderr


def test_damaged_files_are_found(tmp_path: Path) -> None:
    paths = write_shards(tmp_path, {"x": np.arange(1000)}, num_shards=5)
    with paths[1].open("r+b") as file:
        file.seek(-100, 2)
        byte = file.read(1)
        file.seek(-100, 2)
        file.write(bytes([byte[0] ^ 1]))
    with paths[2].open("r+b") as file:
        file.truncate(paths[2].stat().st_size // 2)
    paths[4].unlink()
    done = mpistrat("shards", "check", tmp_path, status=1)
    assert "2 compared with the manifest's digest" in done.stdout
    assert "3 BAD:" in done.stdout
    for path, what in ((paths[1], "expected digest"), (paths[2], "truncated"), (paths[4], "no such file")):
        assert f"{path}: " in done.stdout
        assert what in done.stdout
    document = json.loads(mpistrat("shards", "check", tmp_path, "--json", status=1).stdout)
    assert document["bad"] == [str(paths[i]) for i in (1, 2, 4)]


@pytest.mark.parametrize(
    ("options", "by"), [({"fletcher32": True}, "checksums"), ({"compression": "gzip"}, "checksums")]
)
def test_chunks_are_checked_without_a_manifest(tmp_path: Path, options: dict[str, Any], by: str) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        data = np.random.default_rng(0).integers(0, 9, 10_000)
        place = file.create_dataset("x", data=data, chunks=(1000,), **options).id.get_chunk_info(7)
    document = json.loads(mpistrat("shards", "check", path, "--json").stdout)
    assert [file["by"] for file in document["files"]] == [by]
    with path.open("r+b") as raw:
        raw.seek(place.byte_offset + place.size // 2)
        raw.write(b"\x5a\xa5\x5a")
    done = mpistrat("shards", "check", path, status=1)
    assert "a.h5: /x: expected rows 7000 to 7999 that can be read" in done.stdout


def test_what_cannot_be_checked_is_said(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(10)
    done = mpistrat("shards", "check", tmp_path)
    assert "1 cannot be checked" in done.stdout
    assert "no damage found in what can be checked" in done.stdout


def test_sources_of_virtual_datasets(tmp_path: Path) -> None:
    layout = h5py.VirtualLayout((4,), "i8")
    for i in range(2):
        with h5py.File(tmp_path / f"part{i}.h5", "w") as file:
            file["x"] = np.arange(2 * i, 2 * i + 2)
        layout[2 * i : 2 * i + 2] = h5py.VirtualSource(f"part{i}.h5", "x", (2,))
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file.create_virtual_dataset("all", layout)
    document = json.loads(mpistrat("shards", "info", "--json", tmp_path).stdout)
    assert document["rows"] == 4
    assert [file["rows"] for file in document["files"]] == [4, None, None]
    assert "part0.h5  source" in mpistrat("shards", "info", tmp_path).stdout
    assert "no damage found" in mpistrat("shards", "check", tmp_path).stdout
    with (tmp_path / "part1.h5").open("r+b") as file:
        file.truncate(1000)
    done = mpistrat("shards", "check", tmp_path, status=1)
    assert "part1.h5" in done.stdout


def test_mpi_is_not_started_by_one_process(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    program = (
        "import sys\nfrom mpistrat.cli.main import main\n"
        "for words in (['write', 'set', 'x.npy'], ['info', 'set'], ['check', 'set']): assert main(['shards', *words]) == 0\n"
        "assert 'mpi4py.MPI' not in sys.modules"
    )
    done = python("-c", program, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


# Under mpiexec.


def test_ranks_share_the_work(tmp_path: Path, mpi_run: Any) -> None:
    table(tmp_path / "t.csv")
    words = ["t.csv", "--layout", "chunked", "--rows-per-shard", "20"]
    mpistrat("shards", "write", "one", *words, cwd=tmp_path)
    done = mpi_run(["-m", "mpistrat", "shards", "write", "two", *words], 2, cwd=tmp_path)
    assert done.returncode == 0, done
    assert "two/*.h5: 4 shards, 50 rows" in done.out[0]  # 20 + 5 of each rank
    assert done.out[1] == ""
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    for name in one:
        assert np.array_equal(one[name], two[name], equal_nan=name == "b")

    with (tmp_path / "two/00001-of-00004.h5").open("r+b") as file:  # rank 1's file
        file.write(b"nonsense")
    done = mpi_run(["-m", "mpistrat", "shards", "check", "two", "--json"], 2, cwd=tmp_path)
    assert done.returncode == 1
    document = json.loads(done.out[0])
    assert document["bad"] == ["two/00001-of-00004.h5"]
    assert [file["by"] for file in document["files"]] == ["digest", None, "digest", "digest"]
    assert done.out[1] == ""
    done = mpi_run(["-m", "mpistrat", "shards", "info", "one"], 2, cwd=tmp_path)
    assert done.returncode == 0
    assert "3 files in one: 50 rows" in done.out[0]
    assert "\x1b" not in done.stdout


def test_ranks_end_together_when_input_is_bad(tmp_path: Path, mpi_run: Any) -> None:
    photos(tmp_path / "photos", [(6, 5)] * 10 + [(6, 4), (6, 5)])  # p10 is rank 1's
    done = mpi_run(["-m", "mpistrat", "shards", "write", "set", "photos"], 2, cwd=tmp_path)
    assert done.returncode not in (0, None)
    assert "p10.png" in done.err[0]
    assert not list(tmp_path.glob("set/*"))
    done = mpi_run(["-m", "mpistrat", "shards", "write", "set", "none.npy"], 2, cwd=tmp_path)
    assert done.returncode == 1
    assert "no such file" in done.err[0]
    assert done.err[1] == ""
    done = mpi_run(["-m", "mpistrat", "shards", "write"], 2, cwd=tmp_path)
    assert done.returncode == 2

"""Samples of tar archives beside the webdataset package: names, decoders, fields, and archives that are damaged."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpistrat.data import ArraySpec, from_tar
from mpistrat.errors import MissingDependencyError, ShardError

ROWS = 7


def npy(array: Any) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def png(pixels: Any) -> bytes:
    image, buffer = pytest.importorskip("PIL.Image"), io.BytesIO()
    image.fromarray(pixels).save(buffer, "png")
    return buffer.getvalue()


def write(path: Path, members: Mapping[str, bytes], mode: Any = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, data in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(data)
            archive.addfile(header, io.BytesIO(data))
    return path


@pytest.fixture
def words(tmp_path: Path) -> Path:
    members = {}
    for row in range(ROWS):
        members[f"{row}.txt"] = f"word {row}".encode()
        members[f"{row}.cls"] = str(row % 3).encode()
    return write(tmp_path / "words.tar", members)


def pixels(row: int) -> Any:
    return np.random.default_rng(row).integers(0, 256, (4, 5, 3), np.uint8)


def test_beside_the_webdataset_package(tmp_path: Path) -> None:
    """Archives that it writes: each sample, decoded, is what it reads itself."""
    webdataset = pytest.importorskip("webdataset")
    pytest.importorskip("PIL")
    for number in range(3):
        with webdataset.TarWriter(str(tmp_path / f"part-{number}.tar")) as writer:
            for row in range(number * 4, number * 4 + 4):
                writer.write(
                    {
                        "__key__": f"set.1/{row:03}",
                        "png": pixels(row),
                        "jpg": pixels(row),
                        "seg.png": png(pixels(row)[..., 0]),
                        "cls": row % 3,
                        "txt": f"the {row}th",
                        "json": {"box": [row, 2, 3, 4], "name": {"de": "Katze"}},
                        "npy": np.full((2, row % 2 + 1), row),
                        "npz": {"a": np.arange(row)},
                        "bin": bytes([row, 0, 255]),
                    }
                )
    archives = sorted(str(path) for path in tmp_path.glob("*.tar"))
    expected = list(webdataset.WebDataset(archives, shardshuffle=False).decode("rgb8"))
    spec = {
        **{name: ArraySpec((4, 5, 3), np.uint8) for name in ("png", "jpg", "seg.png")},
        "cls": ArraySpec((), np.int64),
        "txt": ArraySpec((), object),
        "bin": ArraySpec((), object),
        "__key__": ArraySpec((), object),
        "json": {"box": ArraySpec((4,), np.int64), "name": {"de": ArraySpec((), object)}},
        "npy": ArraySpec((2, None), np.int64),
        "npz": {"a": ArraySpec((None,), np.int64)},
    }
    found = list(from_tar(tmp_path, list(spec), element_spec=spec))
    assert len(found) == len(expected) == 12
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours["__key__"] == theirs["__key__"] == f"set.1/{row:03}"
        for name in ("png", "jpg", "seg.png", "npy"):
            np.testing.assert_array_equal(ours[name], theirs[name], strict=True)
        np.testing.assert_array_equal(ours["png"], pixels(row), strict=True)
        np.testing.assert_array_equal(ours["npz"]["a"], theirs["npz"]["a"], strict=True)
        assert (ours["cls"], ours["txt"], ours["bin"]) == (theirs["cls"], theirs["txt"], theirs["bin"])
        assert ours["json"]["name"] == theirs["json"]["name"]
        assert ours["json"]["box"].tolist() == theirs["json"]["box"]


def test_members_of_any_name(tmp_path: Path) -> None:
    """The rules of WebDataset: the key ends at the first dot of the file's name, and extensions are in small letters."""
    long = "a/" * 80 + "name"
    members = {
        "__meta__/shard.json": b"{}",
        "README": b"no extension",
        "dir.with.dots/1.seg.TXT": b"a",
        "dir.with.dots/1.Cls": b"1",
        f"{long}.seg.txt": b"b",
        f"{long}.cls": b"2",
        "größe.seg.txt": b"c",
        "größe.cls": b"3",
    }
    path = write(tmp_path / "a.tar", members)
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("größe.link")
        link.type, link.linkname = tarfile.SYMTYPE, "größe.cls"
        archive.addfile(link)
    rows = from_tar(path, ("__key__", "seg.txt", "cls")).rows([0, 1, 2])
    assert [array.tolist() for array in rows] == [["dir.with.dots/1", long, "größe"], ["a", "b", "c"], [1, 2, 3]]
    webdataset = pytest.importorskip("webdataset")
    theirs = [
        (each["__key__"], each["seg.txt"], each["cls"]) for each in webdataset.WebDataset(str(path), shardshuffle=False)
    ]
    assert [key for key, *_ in theirs] == rows[0].tolist()


def test_fields_have_the_form_that_was_asked_for(words: Path) -> None:
    assert from_tar(words).element_spec == {"txt": ArraySpec((), object), "cls": ArraySpec((), np.int64)}
    assert [int(x) for x in from_tar(words, "cls")] == [0, 1, 2, 0, 1, 2, 0]
    text, label = from_tar(words, ("txt", "cls")).rows([4])
    assert (text.tolist(), label.tolist()) == (["word 4"], [1])
    assert list(from_tar(words, {"label": "cls"}).rows([0])) == ["label"]
    assert "1 tar file in" in str(from_tar(words, "cls"))
    assert "7 samples of cls; left out: txt" in str(from_tar(words, "cls"))
    with pytest.raises(ShardError, match=r"words\.tar: 0: expected a member 'jpg', got members \['txt', 'cls'\]"):
        from_tar(words, "jpg")
    with pytest.raises(ValueError, match="from_tar: fields: expected None, a name"):
        from_tar(words, [])


def test_decoders_of_the_user(words: Path) -> None:
    assert from_tar(words, "cls", decode={"cls": bytes}).rows([1]).tolist() == [b"1"]
    assert from_tar(words, "cls", decode={".CLS": lambda data: float(data) / 2}).rows([1]).tolist() == [0.5]
    with pytest.raises(TypeError, match=r"from_tar: decode\['cls'\]: expected a function of the bytes, got 'int'"):
        from_tar(words, decode={"cls": "int"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"from_tar: .*words\.tar: 0\.txt: .* got ZeroDivisionError"):
        from_tar(words, "txt", decode={"txt": lambda data: 1 / 0}).rows([3])


def test_compressed_members(tmp_path: Path) -> None:
    members = {"0.json.gz": gzip.compress(json.dumps({"a": [1, 2]}).encode()), "0.gz": gzip.compress(b"plain")}
    rows = from_tar(write(tmp_path / "a.tar", members)).rows([0])
    assert rows["json.gz"]["a"].tolist() == [[1, 2]]
    assert rows["gz"].tolist() == [b"plain"]


def test_samples_of_other_shapes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", {f"{row}.npy": npy(np.arange(row)) for row in range(4)})
    with pytest.raises(ValueError, match=r"from_tar: row 1: expected int64\[0\], got int64\[1\].*element_spec"):
        from_tar(path, "npy").rows([0, 1])
    padded = from_tar(path, "npy", element_spec=ArraySpec((None,), np.int64)).padded_batch(4)
    assert padded.element(0, 0).tolist() == [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 1, 2]]


def test_bytes_that_cannot_be_decoded(tmp_path: Path) -> None:
    members = {"0.cls": b"1", "1.cls": b"one", "2.cls": b"2"}
    dataset = from_tar(write(tmp_path / "a.tar", members), "cls")
    with pytest.raises(
        ValueError, match=r"a\.tar: 1\.cls: expected bytes that can be decoded, got ValueError: invalid"
    ):
        dataset.rows([1])
    assert [int(x) for x in dataset.ignore_errors()] == [1, 2]


def test_arrays_of_objects_are_not_unpickled(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([print], object), allow_pickle=True)
    with pytest.raises(ValueError, match=r"0\.npy: .*allow_pickle"):
        from_tar(write(tmp_path / "a.tar", {"0.npy": buffer.getvalue()}), "npy").rows([0])


def test_images_of_more_bits_keep_their_values(tmp_path: Path) -> None:
    """They would be cut off at 255."""
    path = write(tmp_path / "a.tar", {"0.png": png(np.array([[1, 70, 60000]], np.uint16))})
    with pytest.raises(ValueError, match=r"0\.png: .*expected 8 bits a channel, got uint16. Pass decode="):
        from_tar(path, "png").rows([0])


def test_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.tar", {"0.png": png(np.zeros((1, 1), np.uint8))})
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(MissingDependencyError, match=r"from_tar: expected Pillow.*mpistrat\[images\]"):
        from_tar(path, "png").rows([0])


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_compressed_archives(tmp_path: Path, mode: str) -> None:
    path = write(tmp_path / "a.tar", {"0.cls": b"1"}, mode)
    with pytest.raises(ShardError, match=r"a\.tar: expected a whole tar archive.*decompress it"):
        from_tar(path)


def test_an_archive_that_ends_between_members(words: Path) -> None:
    """tarfile reads it as a whole one."""
    with tarfile.open(words) as archive:
        ends = [member.offset for member in archive.getmembers()][1:]
    whole = words.read_bytes()
    for end in ends:
        words.write_bytes(whole[:end])
        with pytest.raises(ShardError, match=rf"words\.tar: expected a member or the end of the archive at byte {end}"):
            from_tar(words)


def test_a_damaged_header(words: Path) -> None:
    """tarfile ends there silently."""
    with tarfile.open(words) as archive:
        place = archive.getmembers()[3].offset
    data = bytearray(words.read_bytes())
    data[place + 1] ^= 1
    words.write_bytes(data)
    with pytest.raises(ShardError, match=rf"words\.tar: expected a member .* at byte {place}, got neither"):
        from_tar(words)


def test_a_field_twice(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", {"0.cls": b"1", "0.CLS": b"2"})
    with pytest.raises(ShardError, match=r"a\.tar: 0: expected one member 'cls' of a sample, got two"):
        from_tar(path)


def test_a_sparse_member(tmp_path: Path) -> None:
    """Its bytes are not those of the file."""
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        header = tarfile.TarInfo("GNUSparseFile.0/0.bin")
        data = b"1\n0\n2\n".ljust(512, b"\0") + b"xy"
        header.size = len(data)
        header.pax_headers = {
            "GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "0.bin", "GNU.sparse.realsize": "4",
        }  # fmt: skip
        archive.addfile(header, io.BytesIO(data))
    with pytest.raises(ShardError, match=r"0\.bin: expected a member that is stored as a whole, got a sparse one"):
        from_tar(path)


@pytest.mark.parametrize("padding", [0, 512, 20_000, 3 << 20])
def test_archives_one_after_the_other_in_a_file(padding: int, tmp_path: Path) -> None:
    """As `cat` makes them: tarfile ends at the first end of an archive."""
    parts = [write(tmp_path / f"{n}.tar", {f"{n}.txt": b"word", f"{n}.cls": b"%d" % n}).read_bytes() for n in range(3)]
    path = tmp_path / "all.tar"
    path.write_bytes(bytes(padding // 512 * 512).join(parts) + bytes(padding))
    assert [int(x) for x in from_tar(path, "cls")] == [0, 1, 2]
    path.write_bytes(path.read_bytes() + b"rubbish" * 100)
    with pytest.raises(
        ShardError, match=r"all\.tar: expected a member or the end of the archive at byte \d+, got neither"
    ):
        from_tar(path, "cls")
    path.write_bytes(b"".join(parts)[:-10240] + parts[2][:512])
    with pytest.raises(ShardError, match=r"all\.tar: expected"):
        from_tar(path, "cls")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_are_refused_where_they_are_read(kind: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", {"0.txt": b"word", "0.cls": b"0"})
    with tarfile.open(path, "a") as archive:
        for name, target in (("1.txt", "0.txt"), ("1.cls", "0.cls"), ("2.txt", "0.txt")):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = (kind, target) if name != "2.txt" else (tarfile.DIRTYPE, "")
            archive.addfile(link)
    with pytest.raises(ShardError, match=r"1\.cls: expected a member that is stored as a whole, got a link to 0\.cls"):
        from_tar(path, "cls")


def test_fields_in_capitals(words: Path) -> None:
    """Extensions of members are in small letters, those of fields and decoders in any, and with or without a dot."""
    row = from_tar(words, ["TXT", ".Cls"], decode={".TXT": len}).rows([4])
    assert {name: array.tolist() for name, array in row.items()} == {"TXT": [6], ".Cls": [1]}


@pytest.mark.parametrize("ending", ["tar.gz", "TGZ", "tar.zst"])
def test_compressed_archives_of_a_folder_are_not_left_out(ending: str, words: Path) -> None:
    (words.parent / f"more.{ending}").write_bytes(b"")
    with pytest.raises(ShardError, match=rf"from_tar: .*more\.{ending}: expected a file with an ending that is read"):
        from_tar(words.parent)
    assert len(from_tar(words)) == len(from_tar(words.parent / "*.tar")) == ROWS


def test_an_iterator_of_paths(tmp_path: Path) -> None:
    """It can be read once."""
    for number in range(2):
        write(tmp_path / f"{number}.tar", {f"{number}.txt": b"word"})
    assert len(from_tar(tmp_path.glob("*.tar"))) == 2


def test_without_samples(tmp_path: Path) -> None:
    assert len(from_tar(write(tmp_path / "a.tar", {}))) == 0
    with pytest.raises(ShardError, match="from_tar: .*expected at least one file, got none"):
        from_tar(tmp_path / "*.tgz")


def test_other_samples_have_other_fingerprints(tmp_path: Path) -> None:
    prints = []
    for number, members in enumerate([{"0.a": b"1"}, {"0.a": b"1"}, {"1.a": b"1"}, {"0.a": b"12"}, {"0.b": b"1"}]):
        (tmp_path / str(number)).mkdir()
        prints.append(from_tar(write(tmp_path / str(number) / "a.tar", members)).node.fingerprint())
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


def test_samples_can_be_sent_to_processes(words: Path) -> None:
    samples = from_tar(words, "cls").node._samples
    assert pickle.loads(pickle.dumps(samples))[4] == 1


@pytest.mark.parametrize("workers", [{"workers": 3}, {"workers": 2, "processes": True}], ids=["threads", "processes"])
def test_workers(words: Path, workers: dict[str, Any]) -> None:
    dataset = from_tar(words, ("txt", "cls"), **workers)
    assert [int(x) for _, label in dataset.batch(4) for x in label] == [row % 3 for row in range(ROWS)]
    assert f"{workers['workers']} " in str(dataset)

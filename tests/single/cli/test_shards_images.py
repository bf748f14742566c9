"""Images as input of `mpistrat shards`: their values and dtypes as the files have them, or an error."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpistrat.data.shards.converters.image_folder import ImageFolder
from mpistrat.errors import ShardError
from tests.harness.shards_command import mpistrat

Image = pytest.importorskip("PIL.Image")

SIZE = 8, 6
RAMP = np.linspace(0, 65535, 48).reshape(SIZE).astype(np.uint16)
EIGHT = (RAMP >> 8).astype(np.uint8)


def tiff(values: np.ndarray, order: str = "<") -> bytes:
    """A TIFF with one strip: its format is given by the tags for bits and sample format."""
    height, width = values.shape[:2]
    data = np.ascontiguousarray(values).astype(values.dtype.newbyteorder(order)).tobytes()
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    colors = values.shape[2] if values.ndim == 3 else 1
    bits = 8 * values.itemsize
    more = struct.pack(f"{order}{colors}H", *[bits] * colors) if colors > 1 else b""
    tags: list[tuple[int, int, int, Any]] = [
        (256, 3, 1, width), (257, 3, 1, height), (258, 3, colors, 8 if more else bits), (259, 3, 1, 1),
        (262, 3, 1, 2 if more else 1), (273, 4, 1, 8 + len(more)), (277, 3, 1, colors), (278, 3, 1, height),
        (279, 4, 1, len(data)), (339, 3, 1, kind),
    ]  # fmt: skip
    start = 8 + len(more) + len(data)
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, start)
    ifd = struct.pack(f"{order}H", len(tags))
    for tag, form, count, value in tags:
        short = form == 3 and count == 1
        ifd += struct.pack(f"{order}HHI{'HH' if short else 'I'}", tag, form, count, value, *[0] * short)
    return head + more + data + ifd + bytes(4)


def png(values: np.ndarray, color: int) -> bytes:
    """A PNG of 16 bits a channel, which Pillow does not write in color."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    height, width = values.shape[:2]
    lines = b"".join(b"\0" + line.astype(">u2").tobytes() for line in values)
    head = struct.pack(">IIBBBBB", width, height, 16, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def pgm(largest: int) -> bytes:
    values = (RAMP.astype(np.int64) * largest // 65535).astype(">u2")
    return f"P5 {SIZE[1]} {SIZE[0]} {largest}\n".encode() + values.tobytes()


def written(folder: Path, name: str, image: Any, color: str = "gray", resize: tuple[int, int] | None = None) -> Any:
    """The pixels of one image, as `mpistrat shards write` puts them into a set."""
    path = folder / "a" / name
    path.parent.mkdir(exist_ok=True)
    if isinstance(image, bytes):
        path.write_bytes(image)
    else:
        image.save(path)
    source = ImageFolder(folder, color, resize)
    return np.concatenate([batch["image"] for batch in source.batches(0, source.rows)])


SIGNED = (RAMP.astype(np.int64) - 32768).astype(np.int16)
EXACT = {
    "a.png": (lambda: Image.fromarray(RAMP), RAMP),
    "a.tif": (lambda: Image.fromarray(RAMP), RAMP),
    "12 bits.tif": (lambda: Image.fromarray(RAMP >> 4), RAMP >> 4),
    "floats.tif": (lambda: Image.fromarray((RAMP / 65535).astype(np.float32)), (RAMP / 65535).astype(np.float32)),
    "int32.tif": (lambda: Image.fromarray(SIGNED.astype(np.int32) * 9), SIGNED.astype(np.int32) * 9),
    "big.tif": (lambda: tiff(RAMP, ">"), RAMP),
    "int16.tif": (lambda: tiff(SIGNED), SIGNED),
    "big int16.TIFF": (lambda: tiff(SIGNED, ">"), SIGNED),
    "int8.tif": (lambda: tiff((SIGNED >> 8).astype(np.int8)), (SIGNED >> 8).astype(np.int8)),
    "uint32.tif": (lambda: tiff(RAMP.astype(np.uint32) << 16), RAMP.astype(np.uint32) << 16),
    "big floats.tif": (lambda: tiff(RAMP.astype(np.float32), ">"), RAMP.astype(np.float32)),
    "a.pgm": (lambda: pgm(65535), RAMP),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("color", ["gray", "rgb"])
def test_gray_images_of_more_bits_keep_their_values(tmp_path: Path, name: str, color: str) -> None:
    """They were cut off at 255."""
    make, expected = EXACT[name]
    found = written(tmp_path, name, make(), color)
    assert found.dtype == expected.dtype
    assert np.array_equal(found[0], expected if color == "gray" else np.stack([expected] * 3, axis=-1))


@pytest.mark.parametrize("largest", [256, 1023, 4095, 65534])
@pytest.mark.parametrize("plain", [False, True])
def test_values_of_netpbm_are_those_of_the_file(tmp_path: Path, largest: int, plain: bool) -> None:
    values = (RAMP.astype(np.int64) * largest // 65535).astype(np.uint16)
    text = f"P2 {SIZE[1]} {SIZE[0]} {largest}\n{' '.join(map(str, values.ravel()))}\n"
    found = written(tmp_path, "a.pgm", text.encode() if plain else pgm(largest))
    assert found.dtype == np.uint16
    assert np.array_equal(found[0], values)


@pytest.mark.parametrize("name", ["a.png", "floats.tif", "int16.tif", "int8.tif"])
def test_such_images_are_resized(tmp_path: Path, name: str) -> None:
    make, expected = EXACT[name]
    found = written(tmp_path, name, make(), resize=(4, 3))[0]
    assert found.dtype == expected.dtype and found.shape == (4, 3)
    assert expected.min() <= found.min() and found.max() <= expected.max()
    assert abs(found.mean(dtype=float) - expected.mean(dtype=float)) < 0.01 * np.ptp(expected.astype(float))
    assert (np.diff(found.astype(float).ravel()) > 0).all()  # a ramp still


MODES = {
    "1.png": ("1", 255 * (EIGHT > 127)),
    "L.png": ("L", EIGHT),
    "LA.png": ("LA", EIGHT),
    "P.png": ("P", EIGHT),
    "P.gif": ("P", EIGHT),
    "RGB.bmp": ("RGB", EIGHT),
    "RGBA.png": ("RGBA", EIGHT),
    "CMYK.tif": ("CMYK", EIGHT),
}


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("color", ["gray", "rgb"])
def test_all_others_are_brought_to_8_bits(tmp_path: Path, name: str, color: str) -> None:
    mode, expected = MODES[name]
    gray = Image.fromarray(EIGHT)
    image = gray.convert("RGB").convert(mode) if mode == "CMYK" else gray.convert(mode, dither=Image.Dither.NONE)
    found = written(tmp_path, name, image, color)
    assert found.dtype == np.uint8
    assert np.array_equal(found[0], expected if color == "gray" else np.stack([expected] * 3, axis=-1))


@pytest.mark.parametrize(
    ("name", "image"),
    [
        ("rgb.png", lambda: png(np.stack([RAMP] * 3, axis=-1), 2)),
        ("rgba.png", lambda: png(np.stack([RAMP] * 4, axis=-1), 6)),
        ("la.png", lambda: png(np.stack([RAMP] * 2, axis=-1), 4)),
        ("rgb.tif", lambda: tiff(np.stack([RAMP] * 3, axis=-1))),
        (
            "rgb.ppm",
            lambda: f"P6 {SIZE[1]} {SIZE[0]} 65535\n".encode() + np.stack([RAMP] * 3, -1).astype(">u2").tobytes(),
        ),
    ],
)
def test_colors_of_16_bits_are_refused(tmp_path: Path, name: str, image: Any) -> None:
    """Of which Pillow keeps eight."""
    with pytest.raises(ShardError, match=f"{name}: .*got 16 bits, mode RGB"):
        written(tmp_path, name, image())


@pytest.mark.parametrize("name", ["a.tif", "a.gif", "a.png", "a.webp"])
def test_several_images_in_one_file_are_refused(tmp_path: Path, name: str) -> None:
    """Only the first one was written."""
    frames = [Image.fromarray(EIGHT), Image.fromarray(EIGHT[::-1].copy()), Image.fromarray(EIGHT // 2)]
    path = tmp_path / "photos" / "a" / name
    path.parent.mkdir(parents=True)
    frames[0].save(path, save_all=True, append_images=frames[1:])
    done = mpistrat("shards", "write", "set", "photos", cwd=tmp_path, status=1)
    assert f"{name}: expected one image, got 3 frames or pages" in done.stderr
    assert not list(tmp_path.glob("set/*"))


def test_a_photo_with_previews_behind_it_is_one_image(tmp_path: Path) -> None:
    """Cameras write the JPEGs of the format MPO: readers of JPEGs show the first one."""
    path = tmp_path / "a" / "a.jpg"
    path.parent.mkdir()
    flat = [Image.fromarray(np.full(SIZE, value, np.uint8)) for value in (200, 10)]
    flat[0].save(path, format="MPO", save_all=True, append_images=flat[1:])
    assert Image.open(path).n_frames == 2
    source = ImageFolder(tmp_path, "gray", None)
    assert np.abs(next(source.batches(0, 1))["image"].astype(int) - 200).max() <= 2


def test_images_of_different_dtypes_are_named(tmp_path: Path) -> None:
    written(tmp_path, "a.png", Image.fromarray(EIGHT))
    with pytest.raises(ShardError, match="b.png: expected pixels of uint8, as .*a.png has, got uint16"):
        written(tmp_path, "b.png", Image.fromarray(RAMP))

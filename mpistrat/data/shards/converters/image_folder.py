"""The converter of a folder with one sub-folder of images per class: rows of pixels and class number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, final

import numpy as np

from ....base.cores import usable_cores
from ....base.errors import MissingDependencyError, ShardError, explain
from ..columns import Columns
from ..files import natural_key
from .converter import Converter, bad_input, batch_rows

__all__ = ["ImageFolder", "channel_dtype"]

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_MOST_THREADS = 8  # other ranks of the node may use the same number
_MODES = {"rgb": "RGB", "gray": "L"}


@final
class ImageFolder(Converter):
    """Images of one size: `image` [height, width, 3], or [height, width] in gray, and `label` int64.

    Values are uint8; gray images with more bits, signs or floats have their file's dtype. Alpha channels are dropped.
    Classes are numbered by their folders' names in alphabetical order; the names are an attribute of `label`. Rows are
    sorted by class.
    """

    def __init__(self, path: Path, color: str, resize: tuple[int, int] | None) -> None:
        self._pillow = _pillow()
        self._mode = _MODES[color]
        self._resize = resize
        folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
        self._files: list[tuple[Path, int]] = []
        others = [entry for entry in path.iterdir() if entry.is_file()]
        for label, folder in enumerate(folders):
            found = sorted((file for file in folder.rglob("*") if file.is_file()), key=natural_key)
            images = [file for file in found if file.suffix.lower() in _SUFFIXES]
            if not images:
                raise bad_input(folder, "images of a class", f"{len(found)} files, none of them an image")
            others += [file for file in found if file.suffix.lower() not in _SUFFIXES]
            self._files += [(file, label) for file in images]
        if not self._files:
            raise bad_input(path, "a sub-folder of images for each class", "no sub-folder")
        self.rows = len(self._files)
        self.attributes: dict[str, Any] = {"label": {"classes": [folder.name for folder in folders]}}
        self.notes = [f"{len(folders)} classes: {', '.join(folder.name for folder in folders[:10])}"]
        if len(folders) > 10:
            self.notes[0] += ", ..."
        if others:
            self.notes.append(f"left out, as they are not images: {len(others)}, such as {others[0]}")
        self._first = self._read(self._files[0][0])

    def batches(self, start: int, stop: int) -> Iterator[Columns]:
        step = batch_rows((self._first.dtype, self._first.shape))
        pool = ThreadPoolExecutor(min(usable_cores(), _MOST_THREADS), "mpistrat-images")  # decoding is outside Python
        try:
            for first in range(start, stop, step):
                files = self._files[first : min(first + step, stop)]
                images = np.empty((len(files), *self._first.shape), self._first.dtype)
                # The first invalid image raises its error, whichever was read first.
                for _ in pool.map(self._read_into, images, (path for path, _ in files)):
                    pass
                yield {"image": images, "label": np.array([label for _, label in files], np.int64)}
        finally:
            pool.shutdown(cancel_futures=True)

    def _read_into(self, image: np.ndarray[Any, Any], path: Path) -> None:
        pixels = self._read(path)
        first = self._files[0][0]
        if pixels.shape != self._first.shape:
            height, width = self._first.shape[:2]
            expected = f"{height}x{width} pixels (height x width), as {first} has"
            remedy = f"Bring all images to one size: --resize {height}x{width}."
            raise bad_input(path, expected, f"{pixels.shape[0]}x{pixels.shape[1]}", remedy)
        if pixels.dtype != self._first.dtype:
            remedy = "Write the images of each dtype as a separate set."
            raise bad_input(path, f"pixels of {self._first.dtype}, as {first} has", str(pixels.dtype), remedy)
        image[...] = pixels

    def _read(self, path: Path) -> np.ndarray[Any, Any]:
        try:
            with self._pillow.open(path) as image:
                frames = getattr(image, "n_frames", 1)
                if frames > 1 and image.format != "MPO":  # a camera's JPEG, followed by previews
                    remedy = "Write each to a separate file."
                    raise bad_input(path, "one image", f"{frames} frames or pages", remedy)
                dtype = channel_dtype(image)
                return self._usual(image) if dtype == np.uint8 else self._exact(path, image, dtype)
        except (OSError, ValueError, SyntaxError) as error:  # Pillow raises SyntaxError for damaged PNGs
            if isinstance(error, ShardError):
                raise
            raise bad_input(path, "an image that Pillow reads", error) from error

    def _usual(self, image: Any) -> np.ndarray[Any, Any]:
        image = image.convert(self._mode)
        return np.asarray(image if self._resize is None else self._resized(image))

    def _exact(self, path: Path, image: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return the pixels of other images, with their values, which `convert` would clip at 255."""
        largest = _largest(image)
        values = np.asarray(image)
        if values.ndim > 2 or values.itemsize < dtype.itemsize:
            expected = "8 bits a channel, or one channel: Pillow reads only 8 bits of each of several"
            remedy = "Read the images with another library, and write the arrays with ms.data.write_shards."
            raise bad_input(path, expected, f"{8 * dtype.itemsize} bits, mode {image.mode}", remedy)
        values = values.astype(values.dtype.newbyteorder("="), copy=False)
        values = values.view(dtype) if values.itemsize == dtype.itemsize else values.astype(dtype)
        if largest is not None:  # Pillow scales this maximum to 65535
            values = np.rint(values * (largest / 65535)).astype(dtype)
        if self._resize is not None:
            wide = np.dtype(np.float32 if dtype.kind == "f" else np.int32)  # dtype that Pillow can interpolate
            if not np.can_cast(dtype, wide):
                raise bad_input(path, f"pixels that {wide} holds, for --resize", str(dtype), "Resize them beforehand.")
            values = np.asarray(self._resized(self._pillow.fromarray(values.astype(wide)))).astype(dtype)
        return np.stack([values] * 3, axis=-1) if self._mode == "RGB" else values

    def _resized(self, image: Any) -> Any:
        height, width = self._resize or (image.height, image.width)
        return image.resize((width, height), self._pillow.Resampling.BILINEAR)


_SAMPLE_FORMATS = {2: "i", 3: "f"}  # TIFF's; all others are unsigned
_BITS_PER_SAMPLE, _SAMPLE_FORMAT = 258, 339  # TIFF's tags


def channel_dtype(image: Any) -> np.dtype[Any]:
    """Return the dtype of a channel in an image's file: uint8 for up to 8 bits, which Pillow scales to 8."""
    if image.format == "TIFF":
        bits = max(image.tag_v2.get(_BITS_PER_SAMPLE, (1,)))
        kind = _SAMPLE_FORMATS.get(image.tag_v2.get(_SAMPLE_FORMAT, (1,))[0], "u")
        return np.dtype(f"{kind}{max(8, 1 << (bits - 1).bit_length()) // 8}")
    if image.mode == "F":
        return np.dtype(np.float32)
    raw = image.tile[0][3] if image.tile else image.mode
    name = raw[0] if isinstance(raw, tuple) else raw  # Pillow's name of the file's layout, such as "RGB;16B"
    sixteen = re.search(r";16[BLN]", str(name)) or (_largest(image) or 0) > 255
    if sixteen or image.mode.startswith("I;16"):
        return np.dtype(np.uint16)
    return np.dtype(np.int32 if image.mode == "I" else np.uint8)


def _largest(image: Any) -> int | None:
    """Return the maximum value of a Netpbm file if Pillow scales its values; before they are read."""
    raw = image.tile[0][3] if image.format == "PPM" and image.tile else ()
    return raw[1] if isinstance(raw, tuple) and len(raw) > 1 and raw[0] in ("L", "I", "RGB") else None


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        expected, remedy = "Pillow, which reads images", "pip install 'mpistrat[images]'"
        text = explain("shards write", "", expected=expected, got="no module PIL", remedy=remedy)
        raise MissingDependencyError(text) from error
    return Image

"""A folder with a sub-folder of images for each class as rows: the pixels, and the number of the class."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, final

import numpy as np

from ....cluster.cores import usable_cores
from ....errors import MissingDependencyError, explain
from ..columns import Columns
from ..files import natural_key
from .converter import Converter, bad_input, batch_rows

__all__ = ["ImageFolder"]

_SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
_MOST_THREADS = 8  # other ranks of the node may have as many
_MODES = {"rgb": "RGB", "gray": "L"}


@final
class ImageFolder(Converter):
    """Images of one size: `image` uint8 [height, width, 3], or [height, width] in gray, and `label` int64.

    Classes are numbered by their folders' names in alphabetical order; the names are an attribute of `label`. Rows come
    class by class.
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
            self.notes.append(f"left out, as they are no images: {len(others)}, such as {others[0]}")
        self._shape = self._read(self._files[0][0], None).shape

    def batches(self, start: int, stop: int) -> Iterator[Columns]:
        step = batch_rows((np.dtype(np.uint8), self._shape))
        pool = ThreadPoolExecutor(min(usable_cores(), _MOST_THREADS), "mpistrat-images")  # decoding is outside Python
        try:
            for first in range(start, stop, step):
                files = self._files[first : min(first + step, stop)]
                images = np.empty((len(files), *self._shape), np.uint8)
                # The error of the first image that is wrong is raised, whichever was read first.
                for _ in pool.map(self._read_into, images, (path for path, _ in files)):
                    pass
                yield {"image": images, "label": np.array([label for _, label in files], np.int64)}
        finally:
            pool.shutdown(cancel_futures=True)

    def _read_into(self, image: np.ndarray[Any, Any], path: Path) -> None:
        image[...] = self._read(path, self._shape)

    def _read(self, path: Path, shape: tuple[int, ...] | None) -> np.ndarray[Any, Any]:
        try:
            with self._pillow.open(path) as image:
                if self._resize is not None:
                    height, width = self._resize
                    image = image.convert(self._mode).resize((width, height), self._pillow.Resampling.BILINEAR)
                pixels = np.asarray(image.convert(self._mode))
        except (OSError, ValueError, SyntaxError) as error:  # Pillow raises SyntaxError for damaged PNGs
            raise bad_input(path, "an image that Pillow reads", error) from error
        if shape is not None and pixels.shape != shape:
            first = self._files[0][0]
            expected = f"{shape[0]}x{shape[1]} pixels (height x width), as {first} has"
            remedy = f"Bring all images to one size: --resize {shape[0]}x{shape[1]}."
            raise bad_input(path, expected, f"{pixels.shape[0]}x{pixels.shape[1]}", remedy)
        return pixels


def _pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as error:
        expected, remedy = "Pillow, which reads images", "pip install 'mpistrat[images]'"
        text = explain("shards write", "", expected=expected, got="no module PIL", remedy=remedy)
        raise MissingDependencyError(text) from error
    return Image

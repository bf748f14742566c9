"""Files of safetensors: weights alone, as other programs write and read them. Needs the extra `safetensors`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, final

import numpy as np

from ..._util.files import replacing
from ...errors import missing_framework
from .hdf5_file import DamagedError, Form, key_of, name_of

__all__ = ["SUFFIX", "SafetensorsFile", "write_safetensors"]

SUFFIX = ".safetensors"


def _library() -> Any:
    try:
        return importlib.import_module("safetensors.numpy")
    except ModuleNotFoundError as error:
        raise missing_framework("safetensors", "safetensors", error) from error


def write_safetensors(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name; `path` is whole, or as it was.

    Raises:
        MissingDependencyError: safetensors is not installed.
        OSError: it cannot be written.
    """
    library = _library()
    with replacing(path) as beside:
        library.save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, str(beside))


@final
class SafetensorsFile:
    """Weights that are being read, as `CheckpointFile` reads its own. There are no optimizers in it.

    Raises:
        MissingDependencyError: safetensors is not installed.
        DamagedError: it is no such file.
        OSError: the file is not there or cannot be read.
    """

    weights_only = True

    def __init__(self, path: Path) -> None:
        self.optimizers: list[dict[str, Any]] = []
        library = _library()
        if not path.is_file():
            raise FileNotFoundError(str(path))
        try:
            self._arrays: dict[str, np.ndarray] = library.load_file(str(path))
        except Exception as error:  # the library has an error of its own
            raise DamagedError(f"no file of safetensors: {error}") from error

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._arrays = {}

    def names(self) -> list[str]:
        """Return the links of all variables, as `CheckpointFile` has them."""
        return list(map(key_of, self._arrays))

    def forms(self, names: Iterable[str]) -> dict[str, Form]:
        """Return shape and dtype of the variables of these links, where they are there."""
        found = {link: self._arrays.get(name_of(link)) for link in names}
        return {f"variables/{link}": (a.shape, a.dtype.name) for link, a in found.items() if a is not None}

    def read_array(self, key: str, form: Form) -> np.ndarray:
        """Return the values of a variable."""
        return self._arrays[name_of(key.removeprefix("variables/"))]

    def places(self, keys: Iterable[str]) -> None:
        """None: no digest tells whether another rank has the same file."""

    def extra(self) -> None:
        """Nothing is beside them."""

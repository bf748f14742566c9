"""Files of safetensors: weights alone, compatible with other programs. Needs the extra `safetensors`."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, final

import numpy as np

from ..arena.values import parse_dtype
from ..base.errors import missing_framework
from ..base.files import replacing
from .file import DamagedError
from .list import Form, key_of, name_of

__all__ = ["SUFFIX", "SafetensorsFile", "is_safetensors", "write_safetensors"]

SUFFIX = ".safetensors"
# NumPy's and ml_dtypes' names of the format's types. Other types keep the format's name, for errors.
_DTYPES = {
    "BOOL": "bool", "F16": "float16", "F32": "float32", "F64": "float64", "C64": "complex64", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    **{f"{sign}{bits}": f"{name}{bits}" for sign, name in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)},
}  # fmt: skip


def is_safetensors(path: Path) -> bool:
    """Return whether a file's name ends in ".safetensors", in any case."""
    return path.suffix.lower() == SUFFIX


def _library() -> Any:
    try:
        return importlib.import_module("safetensors.numpy")
    except ModuleNotFoundError as error:
        raise missing_framework("safetensors", "safetensors", error) from error


def write_safetensors(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays by name, atomically.

    Raises:
        MissingDependencyError: safetensors is not installed.
        OSError: the file cannot be written.
    """
    library = _library()
    with replacing(path) as beside:
        library.save_file({name: np.asarray(array, order="C") for name, array in arrays.items()}, str(beside))


@final
class SafetensorsFile:
    """A file of weights open for reading, like `CheckpointFile`, without optimizers.

    A tensor is read when its values are needed. One of a type that NumPy lacks does not affect the others.

    Raises:
        MissingDependencyError: safetensors is not installed.
        DamagedError: it is not a safetensors file.
        OSError: the file does not exist or cannot be read.
    """

    weights_only = True

    def __init__(self, path: Path) -> None:
        self.optimizers: list[dict[str, Any]] = []
        _library()
        from safetensors import safe_open

        if not path.is_file():
            raise FileNotFoundError(str(path))
        try:
            self._file = safe_open(str(path), framework="numpy")
            self._names = list(self._file.keys())
        except Exception as error:  # the library's own error class
            raise DamagedError(f"no file of safetensors: {error}") from error

    def __enter__(self) -> SafetensorsFile:
        self._file.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)

    def names(self) -> list[str]:
        """Return the links of all variables, like `CheckpointFile.names`."""
        return list(map(key_of, self._names))

    def forms(self, names: Iterable[str]) -> dict[str, Form]:
        """Return shape and dtype of the existing variables of these links."""
        there = set(self._names)
        return {f"variables/{link}": self._form(name_of(link)) for link in names if name_of(link) in there}

    def _form(self, name: str) -> Form:
        tensor = self._file.get_slice(name)
        kind = tensor.get_dtype()
        return Form(tuple(tensor.get_shape()), _DTYPES.get(kind, kind))

    def read_array(self, key: str, form: Form) -> np.ndarray:
        """Return the values of a variable."""
        parse_dtype(form.dtype)  # imports ml_dtypes: the library needs NumPy to know bfloat16
        name = name_of(key.removeprefix("variables/"))
        try:
            return np.asarray(self._file.get_tensor(name))
        except Exception as error:
            raise DamagedError(f"{name}: {error}") from error

    def places(self, keys: Iterable[str]) -> None:
        """Return None: without digests, ranks cannot check that they have the same file."""

    def extra(self) -> None:
        """Return None: the format has no `extra`."""

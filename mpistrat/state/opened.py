"""A file or snapshot that one rank opened for all: its list of arrays, its comparison with the digests, its values.

If all ranks find the root's file, each rank reads its own elements. Otherwise the root reads and sends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

from ..base.text import printable
from ..comm.process_group import ProcessGroup
from ..variables import Receiver
from .file import CheckpointFile, from_rank_0, on_all
from .list import Form, key_of
from .reading import FileSlices, SliceReader, read_own, send
from .safetensors import SafetensorsFile, is_safetensors
from .snapshot import SnapshotFile

__all__ = ["OpenState"]


@final
class OpenState:
    """A file or snapshot during a restore. A `with` block closes it. Call its methods in the order of this class.

    Args:
        group: the ranks.
        path: the file, or its description in errors.
        opening: opens the file on the root, if the path does not name it.
        root: the rank that reads.
    """

    def __init__(self, group: ProcessGroup, path: str, opening: Callable[[], SnapshotFile] | None, root: int) -> None:
        self._group, self._path, self._opening, self._root = group, path, opening, root
        self._file: CheckpointFile | SafetensorsFile | SnapshotFile | None = None  # on the root
        self._reader: SliceReader | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> OpenState:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._stack.close()

    def look(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the contents: optimizers, forms of the arrays of these names, all names. Collective.

        Raises:
            OSError: on every rank: the file cannot be read.
        """
        return from_rank_0(self._group, "restore", self._path, partial(self._look, names), self._root)

    def _look(self, names: Iterable[str]) -> dict[str, Any]:
        path = Path(self._path)
        if self._opening is not None:
            file: CheckpointFile | SafetensorsFile | SnapshotFile = self._opening()
        elif is_safetensors(path):
            file = SafetensorsFile(path)
        else:
            file = CheckpointFile(path)
        self._file = file
        self._stack.enter_context(file)
        forms = file.forms(map(key_of, names))
        about = {"optimizers": file.optimizers, "weights_only": file.weights_only, "forms": forms}
        return {**about, "names": file.names(), "places": file.places(forms)}

    def check(self, places: Mapping[str, Any] | None, forms: Mapping[str, Form]) -> None:
        """Compare arrays with their digests. Collective.

        Args:
            places: the offsets of the arrays in the file, from `look`.
            forms: the arrays to restore.

        Raises:
            OSError: on every rank: an array differs.
        """
        self._reader = self._own_reader(places)
        on_all(self._group, "restore", self._path, partial(self._compare, forms))

    def _own_reader(self, places: Mapping[str, Any] | None) -> SliceReader | None:
        """Return the reader of this rank's elements; None unless all ranks find the root's file. Collective."""
        if places is None:
            return None
        reader: SliceReader | None = None
        with contextlib.suppress(OSError, ValueError, ImportError):
            if self._opening is not None:
                reader = self._opening()
            else:
                reader = self._stack.enter_context(contextlib.closing(FileSlices(Path(self._path), places)))
        with self._group.collective("restore", "parts"):
            return reader if self._group.agree(int(reader is not None), "min") else None

    def _compare(self, forms: Mapping[str, Form]) -> None:
        topology = self._group.topology
        if self._reader is not None:
            self._reader.check(forms, topology.local_rank, topology.local_size)
        elif self._file is not None:
            for key, form in forms.items():
                self._file.read_array(key, form)

    def extra(self) -> Any:
        """Return the program's `extra`. Collective."""
        return from_rank_0(self._group, "restore", self._path, self._extra, self._root)["extra"]

    def _extra(self) -> dict[str, Any]:
        assert self._file is not None
        return {"extra": self._file.extra()}

    def take(self, forms: Mapping[str, Form], receivers: Mapping[str, Sequence[Receiver]]) -> None:
        """Read this rank's elements. Collective.

        Raises:
            OSError: on every rank: the file cannot be read; variables are partly changed.
        """
        problem: Exception | None = None
        self._group.barrier("restore")  # no rank still reads the values that are overwritten
        if self._reader is None:
            read = None if self._file is None else self._file.read_array
            problem = send(self._group, self._root, read, forms, receivers)
        on_all(self._group, "restore", self._path, partial(self._change, problem, forms, receivers))
        self._group.barrier("restore")

    def _change(
        self, problem: Exception | None, forms: Mapping[str, Form], receivers: Mapping[str, Sequence[Receiver]]
    ) -> None:
        """Read this rank's elements unless they were sent; raise errors with the note that the state is partly changed."""
        try:
            if problem is not None:
                raise problem
            if self._reader is not None:
                read_own(self._reader, forms, receivers)
        except Exception as error:
            left = "variables and optimizers have been changed in part: restore a file before you continue"
            raise OSError(printable(f"{type(error).__name__}: {error}; {left}")) from error

"""The folder of a recorded run: a file of each step, and how far rounding carried in repetitions of it."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np

from ..base.errors import explain
from ..base.files import replacing

__all__ = ["Folder", "Point", "RecordedPass", "RecordedStep", "ShadowError", "joint_digests", "packed", "unpacked"]

_FORMAT = 1
_END = "end.json"


class ShadowError(ValueError):
    """A run that cannot be recorded or compared."""


class Point(NamedTuple):
    """A recorded tensor.

    Attributes:
        key: unique in its step.
        operation: in words.
        kind: "rows", "sum" or "all", as for `ms.shadow.tensor`; "draw" for the state of a random generator.
        pass_: number of its pass, from 0.
        about: more on the operation, such as a class.
        summands: of each element.
        shape, axis: of the tensor, and its axis of rows.
    """

    key: str
    operation: str
    kind: str
    pass_: int
    about: str = ""
    summands: float = 1.0
    shape: Sequence[int] = ()
    axis: int | None = None


def joint_digests(digests: np.ndarray) -> list[bytes]:
    """Return a digest for each row of all inputs together, of digests of shape (inputs, rows)."""
    return [column.tobytes() for column in np.ascontiguousarray(digests.T)]


class RecordedPass(NamedTuple):
    """The rows of a pass.

    Attributes:
        order: the number of points before it.
        names: of the inputs that have rows.
        digests: of shape (inputs, rows).
    """

    order: int
    names: Sequence[str]
    digests: np.ndarray

    @property
    def joint(self) -> list[bytes]:
        """A digest for each row of all inputs together."""
        return joint_digests(self.digests)


class RecordedStep(NamedTuple):
    """The recorded tensors of a step, in the order of the program.

    Attributes:
        points: what was recorded.
        passes: the rows.
        values: of each point.
        epsilon: of the coarsest dtype up to the end of the step.
    """

    points: list[Point]
    passes: list[RecordedPass]
    values: list[np.ndarray]
    epsilon: float


def packed(meta: Any, arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return arrays, and a value of JSON, as the bytes of an .npz file."""
    buffer = io.BytesIO()
    text = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    np.savez(buffer, meta=text, **arrays)  # type: ignore[arg-type]  # names are texts
    return buffer.getvalue()


def unpacked(data: bytes) -> tuple[Any, dict[str, np.ndarray]]:
    """Return what `packed` got."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files if name != "meta"}
        return json.loads(file["meta"].tobytes()), arrays


@final
class Folder:
    """The folder of a recorded run.

    Args:
        path: of the folder.
        function: the public caller, for errors.
    """

    def __init__(self, path: Path, function: str) -> None:
        self.path, self.function = path, function

    def clear(self) -> None:
        """Create the folder, or remove what an earlier run recorded in it."""
        self.path.mkdir(parents=True, exist_ok=True)
        for found in (*self.path.glob("step-*.npz"), *self.path.glob("rounding-*.json"), *self.path.glob(_END)):
            found.unlink()

    def _of(self, step: int) -> Path:
        return self.path / f"step-{step:06}.npz"

    def write(self, number: int, step: RecordedStep) -> None:
        """Write a step."""
        meta = {
            "format": _FORMAT,
            "points": [tuple(each) for each in step.points],
            "passes": [(each.order, each.names) for each in step.passes],
            "epsilon": step.epsilon,
        }
        arrays = {f"value{index}": array for index, array in enumerate(step.values)}
        arrays |= {f"rows{index}": each.digests for index, each in enumerate(step.passes)}
        with replacing(self._of(number)) as path:
            path.write_bytes(packed(meta, arrays))

    def read(self, number: int) -> RecordedStep | None:
        """Return a recorded step; None if the recorded run had fewer.

        Raises:
            ShadowError: nothing was recorded, or by another version, or a file is damaged.
        """
        path = self._of(number)
        if not path.exists():
            if number == 1:
                remedy = "Record on one process first: mpistrat shadow does, or ms.shadow.record"
                got = f"a folder without one: {self.path}"
                raise ShadowError(explain(self.function, "folder", expected="a recorded run", got=got, remedy=remedy))
            return None
        try:
            meta, arrays = unpacked(path.read_bytes())
        except (zipfile.BadZipFile, KeyError, EOFError, ValueError) as error:
            got, remedy = f"a damaged one: {path}: {error}", "Record again"
            raise ShadowError(
                explain(self.function, "folder", expected="a recorded step", got=got, remedy=remedy)
            ) from error
        if meta["format"] != _FORMAT:
            got = f"format {meta['format']}: {path}"
            raise ShadowError(explain(self.function, "folder", expected=f"format {_FORMAT}", got=got))
        points = [Point(*each) for each in meta["points"]]
        passes = [
            RecordedPass(order, names, arrays[f"rows{index}"]) for index, (order, names) in enumerate(meta["passes"])
        ]
        return RecordedStep(points, passes, [arrays[f"value{index}"] for index in range(len(points))], meta["epsilon"])

    def count(self) -> int:
        """Return the number of recorded steps."""
        return len(list(self.path.glob("step-*.npz")))

    def write_end(self, by_itself: bool) -> None:
        """Record whether the program ended by itself, before the last step that was to be recorded."""
        with replacing(self.path / _END) as path:
            path.write_text(json.dumps({"by_itself": by_itself}))

    def ended(self) -> bool:
        """Return True if the recorded program ended by itself."""
        path = self.path / _END
        return path.exists() and bool(json.loads(path.read_text())["by_itself"])

    def rows(self) -> dict[bytes, str]:
        """Return the step and number of each row that was recorded, by its digest."""
        found: dict[bytes, str] = {}
        number = 1
        while (step := self.read(number)) is not None:
            for each in step.passes:
                for row, digest in enumerate(each.joint):
                    found.setdefault(digest, f"row {row} of step {number}")
            number += 1
        return found

    def write_deviations(self, steps: Mapping[int, Mapping[str, float]]) -> None:
        """Add the differences of one repetition, by step and point."""
        number = len(list(self.path.glob("rounding-*.json"))) + 1
        with replacing(self.path / f"rounding-{number}.json") as path:
            path.write_text(json.dumps(steps))

    def deviations(self) -> tuple[int, dict[int, dict[str, float]]]:
        """Return the number of repetitions, and the largest difference by step and point in any."""
        found: dict[int, dict[str, float]] = {}
        files = sorted(self.path.glob("rounding-*.json"))
        for path in files:
            for step, values in json.loads(path.read_text()).items():
                known = found.setdefault(int(step), {})
                for key, value in values.items():
                    known[key] = max(known.get(key, 0.0), value)
        return len(files), found

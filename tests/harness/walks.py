"""The lists of docs/walks.md, and a recorder of the functions that an operation calls."""

from __future__ import annotations

import ast
import functools
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "mpistrat"
TITLE = re.compile(r"^## ([^\n]*): (\d+) hops$\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^(\d+)\. `([\w/]+\.py)` `([\w.]+)`(?: \(([\w ]+)\))?(?=:|$)", re.MULTILINE)


class Hop(NamedTuple):
    """A line of a walk: a function of a file, and where it is called ("" means everywhere)."""

    number: int
    file: str
    name: str
    where: str


def walks() -> dict[str, tuple[int, list[Hop]]]:
    """Return for each walk the number of hops in its title, and its hops."""
    found = TITLE.findall((ROOT / "docs" / "walks.md").read_text())
    return {
        title: (int(count), [Hop(int(number), *words) for number, *words in ROW.findall(table)])
        for title, count, table in found
    }


class Recorder:
    """Records each function of the package at its first call, in all threads that start while it is on."""

    def __init__(self) -> None:
        self._known: set[CodeType] = set()
        self._order: list[CodeType] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code not in self._known:
            self._known.add(frame.f_code)
            self._order.append(frame.f_code)

    def __enter__(self) -> Recorder:
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def functions(self) -> list[tuple[str, str]]:
        """Return the file and the qualified name of each function, in the order of the first calls."""
        return [place for code in list(self._order) if (place := _place(code))]


def _place(code: CodeType) -> tuple[str, str] | None:
    path = Path(code.co_filename)
    if PACKAGE not in path.parents or path.suffix != ".py":  # templates are compiled, too
        return None
    return str(path.relative_to(PACKAGE)), _names(path).get(code.co_firstlineno, code.co_name)


@functools.cache
def _names(path: Path) -> dict[int, str]:
    """Return the qualified name of the function whose code begins at a line. Python 3.10 has no `co_qualname`."""
    return dict(_named(ast.parse(path.read_text()), ""))


def _named(node: ast.AST, prefix: str) -> Iterator[tuple[int, str]]:
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            inner = f"{prefix}{child.name}."
            if isinstance(child, ast.FunctionDef):
                yield min([child.lineno, *(one.lineno for one in child.decorator_list)]), inner[:-1]
        yield from _named(child, inner)

"""Which test files a change can break: from the files that changed, along the imports of the package, to the tests.

A test counts as near as the nearest module it names is to a changed file, in imports.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path


def distances(root: Path, since: str | None, tests: Iterable[Path]) -> dict[Path, int]:
    """Of each test file that a change touches how many imports lie between: 0 for one that was changed itself.

    The change is everything from the commit `since` to the files as they are; without one, everything counts as changed.
    """
    changed = _changed(root, since)
    near = _spread(changed, _importers(root))
    found = {}
    for test in set(tests):
        reached = [near[path] for path in _reached(root, test) if path in near]
        if reached:
            found[test] = 0 if test in changed else 1 + min(reached)
    return found


_COMPILED = "mpistrat/base/loops/__init__.py"  # who imports it calls what is written in C


def _changed(root: Path, since: str | None) -> set[Path]:
    command = ["git", "diff", "--name-only", since, "--"] if since else ["git", "ls-files"]
    reply = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    names = {_COMPILED if line.endswith((".c", ".h")) else line for line in reply.stdout.splitlines()}
    return {root / name for name in names if name.endswith(".py")}


def _spread(changed: set[Path], importers: dict[Path, set[Path]]) -> dict[Path, int]:
    """Breadth first from the changed files to all that import them, directly or not."""
    near, front, steps = dict.fromkeys(changed, 0), set(changed), 0
    while front:
        steps += 1
        front = set().union(*(importers[path] for path in front)) - near.keys()
        near.update(dict.fromkeys(front, steps))
    return near


def _importers(root: Path) -> dict[Path, set[Path]]:
    importers: dict[Path, set[Path]] = defaultdict(set)
    for path in (root / "mpistrat").rglob("*.py"):
        if path.name == "__init__.py":  # a package's front door passes everything on; who wants what is said by name
            continue
        for name in _imports(root, path):
            if module := _module(root, name):
                importers[module].add(path)
    return importers


def _imports(root: Path, path: Path) -> Iterator[str]:
    package = path.relative_to(root).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            full = ".".join(filter(None, [base, node.module]))
            yield from (f"{full}.{alias.name}" for alias in node.names)


def _module(root: Path, name: str) -> Path | None:
    """The file of the longest part of a dotted name that is a module; a name in a front door is followed to its home."""
    words = name.split(".")
    for end in range(len(words), 1, -1):
        place = root.joinpath(*words[:end])
        if place.with_suffix(".py").exists():
            return place.with_suffix(".py")
        if (place / "__init__.py").exists() and end < len(words):
            return _home(".".join(words[:end]), words[end]) or place / "__init__.py"
    return _home(words[0], words[1]) if words[0] == "mpistrat" and len(words) > 1 else None


@functools.cache
def _home(package: str, name: str) -> Path | None:
    """Where a name that a package hands on was made."""
    try:
        thing = getattr(__import__(package, fromlist=[name]), name, None)
    except ImportError:  # a package about a framework that is not installed; so are its tests skipped
        return None
    home = getattr(thing, "__module__", None) or getattr(thing, "__name__", "")
    if not str(home).startswith("mpistrat"):
        return None
    module = __import__(home, fromlist=["_"])
    return Path(module.__file__) if module.__file__ else None


def _reached(root: Path, test: Path) -> set[Path]:
    """The modules that a test file names, or a helper or a program beside it; programs in strings count, so the text is read."""
    found, files = {test}, [test]
    while files:
        text = files.pop().read_text()
        names = [
            *re.findall(r"\b(?:mpistrat|tests)(?:\.\w+)+", text),
            *(f"mpistrat.{n}" for n in re.findall(r"\bms\.(\w+(?:\.\w+)*)", text)),
        ]
        for base, imported in re.findall(r"from ((?:mpistrat|tests)[\w.]*) import ([\w, ]+)", text):
            names += [f"{base}.{name.strip()}" for name in imported.split(",")]
        modules = {module for name in names if (module := _module(root, name))}
        modules |= {path for name in re.findall(r"\"(\w+\.py)\"", text) if (path := test.with_name(name)).exists()}
        files += [path for path in modules - found if root / "tests" in path.parents]
        found |= modules
    return found

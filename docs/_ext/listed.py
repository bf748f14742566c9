"""The names that a line of the directive `api` stands for. It needs no Sphinx: the test of the reference runs it, too."""

from __future__ import annotations

from operator import attrgetter

import mpistrat


def expanded(line: str) -> list[str]:
    """Return the lines that `MODULE.*` stands for: its names that are no other spellings and not at the top; else the line."""
    if not line.endswith(".*"):
        return [line]
    module = attrgetter(line[:-2])(mpistrat)
    own = [name for name in module.__all__ if getattr(module, name).__name__ == name and name not in mpistrat.__all__]
    return [f"{line[:-2]}.{name}" for name in own]

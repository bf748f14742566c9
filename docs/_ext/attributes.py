"""Docstrings whose colons and commas napoleon would take for types.

This package writes types as annotations only. So "The number of workers: all but the chief." is one sentence about a property,
and the line "rank, size: in `comm`." describes two attributes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx  # a test reads this file without Sphinx

LINE = re.compile(r"    (?P<names>\w+(?:, \w+)+): ")
COLON = "\ufdd0"  # in the place of a colon while napoleon reads a line
DOTTED = re.compile(r"(?<![~\w.])(?:\w+\.)+\w+")


def prepare(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Before napoleon: keep a property's first line whole, and give each attribute of a line its own."""
    if what in ("property", "attribute"):
        lines[:1] = [line.replace(":", COLON) for line in lines[:1]]
    elif what in ("class", "exception") and "Attributes:" in lines:
        start = lines.index("Attributes:") + 1
        end = next((number for number, line in enumerate(lines[start:], start) if not line.strip()), len(lines))
        lines[start:end] = one_each(lines[start:end])


def one_each(lines: list[str]) -> list[str]:
    """The lines of a section in which a text that several names share is repeated for each."""
    texts: list[list[str]] = []
    for line in lines:
        texts.append([line]) if re.match(r"    \S", line) or not texts else texts[-1].append(line)
    made = []
    for first, *others in texts:
        match = LINE.match(first)
        if match is None:
            made += [first, *others]
            continue
        for name in match["names"].split(", "):
            made += [f"    {name}: {first[match.end() :]}", *others]
    return made


def finish(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """After napoleon: show types by their last name, and warn if a colon in a Returns section became a type."""
    from sphinx.util import logging

    for number, line in enumerate(lines):
        lines[number] = line.replace(COLON, ":")
        if line.startswith(":vartype "):
            lines[number] = DOTTED.sub(r"~\g<0>", line)
        elif line.startswith(":rtype:"):
            logging.getLogger(__name__).warning("%s: write its Returns without a colon in the first line", name)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", prepare, priority=400)  # napoleon has 500
    app.connect("autodoc-process-docstring", finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""What the values of a job and of a site may be: nothing that a batch system or a shell could take for something else."""

from __future__ import annotations

import re

from ..errors import explain

__all__ = ["chosen", "matching", "text", "whole"]

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_LONGEST = 4096


def _wrong(owner: str, name: str, expected: str, value: object, remedy: str = "") -> ValueError:
    return ValueError(explain(owner, name, expected=expected, got=f"{value!r:.80}", remedy=remedy))


def whole(owner: str, name: str, value: object, low: int, high: int) -> None:
    """Raise unless the value is an integer from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise _wrong(owner, name, f"a whole number from {low} to {high}", value)


def chosen(owner: str, name: str, value: object, legal: tuple[str, ...]) -> None:
    """Raise unless the value is one of some words."""
    if value not in legal:
        raise _wrong(owner, name, f"one of {', '.join(word or repr(word) for word in legal)}", value)


def matching(owner: str, name: str, value: object, pattern: str, expected: str) -> None:
    """Raise unless the whole value, of ASCII characters, matches."""
    if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII):
        raise _wrong(owner, name, expected, value)


def text(owner: str, name: str, value: object, *, dash: bool = False, path: bool = False) -> None:
    """Raise unless the value is one line of text, to be quoted wherever it is written.

    Args:
        dash: it may be empty and may begin with a dash, as the argument of a program may.
        path: it is a path that nobody expands.
    """
    if not isinstance(value, str) or _CONTROL.search(value) or not _encodes(value):
        raise _wrong(owner, name, "one line of text without control characters", value)
    if len(value) > _LONGEST:
        raise _wrong(owner, name, f"at most {_LONGEST} characters", f"{len(value)} characters")
    if not dash and (not value or value.startswith("-")):
        raise _wrong(owner, name, "text that does not begin with a dash", value)
    if path and (value.startswith("~") or "$" in value):
        raise _wrong(owner, name, "a path", value, "~ and $ are not expanded: write the path itself")


def _encodes(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True

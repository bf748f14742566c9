"""Text for people: counts with nouns, lists of numbers, sizes, exceptions, and untrusted text."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

__all__ = [
    "binary_size",
    "class_name",
    "counted",
    "decimal_size",
    "did_you_mean",
    "displayable",
    "duration",
    "encoded",
    "error_text",
    "is_utf8",
    "named",
    "plural",
    "printable",
    "ranges",
    "shortened",
    "traceback_text",
]


def printable(text: object, keep: str = "") -> str:
    """Return a text with its control characters and line breaks escaped, like `repr`.

    Use it for all output that comes from a file, from the environment or from another process: it must neither move the cursor of
    a terminal nor look like a separate line.

    Args:
        text: any object whose text is printed.
        keep: characters that are not escaped: "\\n" for text of several lines.

    Example:
        >>> printable("w\\x1b[2J\\nrank 9: lost"), printable("größe")
        ('w\\\\x1b[2J\\\\nrank 9: lost', 'größe')
    """
    text = str(text)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return a question that names the nearest of some words; "" if none is near. Local.

    Example:
        >>> did_you_mean("frontire", ["frontier", "lumi"])
        'Did you mean frontier?'
    """
    import difflib

    near = difflib.get_close_matches(word, list(words), 1)
    return f"Did you mean {near[0]}?" if near else ""


def plural(number: int, noun: str) -> str:
    """Return a noun as it follows a number."""
    return noun if number == 1 else f"{noun}s"


def counted(number: int, noun: str) -> str:
    """Return a number and its noun.

    Example:
        >>> counted(1, "rank"), counted(2, "rank")
        ('1 rank', '2 ranks')
    """
    return f"{number} {plural(number, noun)}"


def named(noun: str, items: Sequence[object], most: int | None = None) -> str:
    """Return a noun and the names of its items.

    Example:
        >>> named("rank", [3]), named("rank", [0, 1, 2], most=2)
        ('rank 3', 'ranks 0, 1, ...')
    """
    shown = [*map(str, items[:most]), *["..."] * (most is not None and len(items) > most)]
    return f"{plural(len(items), noun)} {', '.join(shown)}"


def shortened(items: Sequence[object], most: int) -> str:
    """Return a list of the first items and the number of the others.

    Example:
        >>> shortened([4, 5], most=2), shortened([4, 5, 6], most=2)
        ('4, 5', '4, 5 and 1 more')
    """
    return ", ".join(map(str, items[:most])) + (f" and {len(items) - most} more" if len(items) > most else "")


def ranges(numbers: Iterable[int]) -> list[str]:
    """Return numbers in ascending order, with runs merged.

    Example:
        >>> ranges([7, 1, 2, 3])
        ['1-3', '7']
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [f"{low}-{high}" if high > low else str(low) for low, high in runs]


def decimal_size(nbytes: float) -> str:
    """Return the size of files or rows.

    Example:
        >>> decimal_size(999), decimal_size(1_234_567), decimal_size(123e6)
        ('999 B', '1.2 MB', '123 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 9.95 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.1f} TB"


def binary_size(nbytes: int) -> str:
    """Return the size of memory in the units of containers and mounts.

    Example:
        >>> binary_size(3 << 20), binary_size(16 << 30)
        ('3.0 MiB', '16.0 GiB')
    """
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 10 << 30 else f"{nbytes / 2**20:.1f} MiB"


def duration(seconds: float) -> str:
    """Return a time with a fitting unit.

    Example:
        >>> duration(0.0123), duration(0.0000123), duration(12.3)
        ('12.3 ms', '12.3 µs', '12.3 s')
    """
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def encoded(text: str) -> bytes:
    r"""Return any text in UTF-8. A surrogate, Python's form of a byte that is not UTF-8, becomes an escape.

    Example:
        >>> encoded("donn\udce9es")
        b'donn\\udce9es'
    """
    return text.encode(errors="backslashreplace")


def is_utf8(text: str) -> bool:
    r"""Return True if UTF-8 can encode a text, that is, if it has no surrogate.

    Example:
        >>> is_utf8("données"), is_utf8("donn\udce9es")
        (True, False)
    """
    return not any("\ud800" <= sign <= "\udfff" for sign in text)


def error_text(error: BaseException) -> str:
    """Return the class and the text of an exception, even if its class or metaclass raises.

    Example:
        >>> error_text(ValueError("no number"))
        'ValueError: no number'
    """
    name = class_name(type(error))
    try:
        return f"{name}: {error}"
    except BaseException:  # of the program's own class
        return f"{name}: <exception str() failed>"


def class_name(kind: type) -> str:
    """Return the name of a class, even if its metaclass overrides `__name__` or raises.

    Example:
        >>> class_name(int)
        'int'
    """
    return str(type.__dict__["__name__"].__get__(kind))


def traceback_text(error: BaseException, trace: TracebackType | None) -> str:
    """Return Python's traceback of an exception, or less if its class raises meanwhile."""
    try:
        return "".join(traceback.format_exception(type(error), error, trace))
    except BaseException:  # of the program's own class
        return error_text(error)


_ASCII = str.maketrans({
    "…": "...", "×": "x", "≥": ">=", "≤": "<=", "±": "+-", "µ": "u", "→": "->", "·": "-", "–": "-", "²": "^2",
    "└": "`", "─": "-", "│": "|", "┌": ",", "├": "|",
})  # fmt: skip


def displayable(text: str, stream: Any) -> str:
    """Return a text that a stream can encode: in ASCII if its encoding lacks a character.

    Example:
        >>> import io
        >>> displayable("2 × 4", io.TextIOWrapper(io.BytesIO(), "ascii"))
        '2 x 4'
    """
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(_ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text

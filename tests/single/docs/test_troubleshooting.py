"""The page that is searched by error text: it has every error of ours, and what it quotes of our texts is in the code."""

import re
from pathlib import Path

import pytest

import mpistrat as ms

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SOURCE = " ".join(path.read_text() for path in (ROOT / "mpistrat").rglob("*.py"))
ERRORS = [name for name in ms.errors.__all__ if isinstance(getattr(ms.errors, name), type)]


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_on_the_page(name):
    error = getattr(ms.errors, name)
    beside = [base.__name__ for base in error.__bases__ if not issubclass(base, ms.errors.MpistratError)]
    beside = beside or [base.__name__ for base in error.__bases__]  # of a kind of another error
    text = f"`{name}` ({beside[0]})" if name != "MpistratError" else f"`{name}`"
    assert re.search(rf"^- {re.escape(text)}(: |$)", PAGE, re.MULTILINE)


def test_what_it_quotes_of_ours_is_said():
    """After "expected", a quoted text has the words of an error in the code, up to the first thing that differs."""
    rows = [line for line in re.sub(r"\n  ", " ", PAGE).splitlines() if line.startswith(("|", "- "))]
    quoted = [code for row in rows for code in re.findall(r"`([^`]+)`", row)]
    said = [
        re.split(r"[…,(]|\b(?:got|'|\d)", code.split("expected ", 1)[1])[0].strip()
        for code in quoted
        if "expected " in code
    ]
    assert len(said) > 15
    missing = [text for text in said if text not in SOURCE]
    assert not missing

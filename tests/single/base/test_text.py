"""Text from outside, as it is printed."""

import logging

import pytest

from mpistrat.base.log import logger
from mpistrat.base.text import printable
from mpistrat.errors import explain

BAD = "w\x1b]0;owned\x07\r\nmpistrat WARNING rank 9: forged\x9b2J\u2028\u202e\udcff"


@pytest.mark.parametrize("text", [BAD, *map(chr, range(32)), *map(chr, range(127, 160))])
def test_nothing_moves_the_cursor_or_begins_a_line(text):
    assert printable(text).isprintable() and printable(printable(text)) == printable(text)


def test_what_can_be_printed_stays():
    assert printable("größe/∂w 日本語 \\x1b") == "größe/∂w 日本語 \\x1b"
    assert printable("two\nlines\x1b", keep="\n") == "two\nlines\\x1b"


def test_errors_are_one_line():
    assert explain(BAD, BAD, expected=BAD, got=BAD, remedy=BAD).isprintable()


def test_the_log_has_no_control_characters(caplog):
    with caplog.at_level(logging.WARNING, "mpistrat"):
        logger.warning("%s of %d:\n %s", "a\x1b[2J", 3, OSError("b\x07"))
    assert caplog.messages == ["a\\x1b[2J of 3:\n b\\x07"]

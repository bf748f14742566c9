"""The log: what a job says of itself is said once, by rank 0."""

import io
import logging
import sys

import pytest

from mpistrat.base import log


@pytest.fixture(autouse=True)
def rank_unknown(monkeypatch):
    monkeypatch.setattr(log._filter, "rank", "-")
    log.once.cache_clear()


@pytest.mark.parametrize(("rank", "level"), [("-", "WARNING"), (0, "WARNING"), (3, "INFO")])
def test_once(rank, level, caplog):
    if rank != "-":
        log.set_rank(rank)
    with caplog.at_level(logging.DEBUG, "mpistrat"):
        log.once(logging.WARNING, "the cores are few")
        log.once(logging.WARNING, "the cores are few")
        log.once(logging.DEBUG, "a detail")
    assert [(r.levelname, r.rank, r.getMessage()) for r in caplog.records] == [
        (level, rank, "the cores are few"),
        ("DEBUG", rank, "a detail"),
    ]


def test_a_wrong_format_is_left_to_the_handler():
    record = logging.LogRecord("mpistrat", logging.ERROR, "a.py", 1, "%d", ("x",), None)
    assert all(each.filter(record) for each in log.logger.filters)
    assert record.args == ("x",)


def test_a_stream_that_the_program_has_closed(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    handler = log._Handler(stream)
    stream.close()
    handler.handle(logging.LogRecord("mpistrat", logging.ERROR, "a.py", 1, "text", (), None))

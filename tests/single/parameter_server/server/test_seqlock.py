"""The server's end of the gate: it waits for a reader once, a bounded time, and for nobody else."""

import threading
import time

import pytest

from mpistrat.parameter_server.server.atomic_reads import _VARIABLES, SeqLockReader, SeqLockWriter


@pytest.fixture
def gate(monkeypatch):
    """A gate over three words of which the first two are readers', with a short patience."""
    monkeypatch.setattr("mpistrat.parameter_server.server.atomic_reads._SECONDS", 0.3)
    words = memoryview(bytearray(24)).cast("q")
    return words, SeqLockWriter(words, [0, 8], lambda: None, lambda: None)


def seconds(gate, variable=4, nbytes=0):
    start = time.monotonic()
    gate.wait(variable, nbytes)
    return time.monotonic() - start


def test_nobody_reads(gate):
    words, writer = gate
    words[0] = 7 * _VARIABLES + 3 + 1  # another variable
    words[2] = 7 * _VARIABLES + 4 + 1  # nobody's gate
    assert seconds(writer) < 0.1


def test_a_reader_is_waited_for_until_it_is_done(gate):
    words, writer = gate
    words[1] = 7 * _VARIABLES + 4 + 1
    timer = threading.Timer(0.1, lambda: words.__setitem__(1, 0))
    timer.start()
    assert 0.08 < seconds(writer) < 0.25
    timer.join()


def test_a_reader_that_never_ends_is_waited_for_once(gate):
    words, writer = gate
    words[0] = 7 * _VARIABLES + 4 + 1
    assert seconds(writer) > 0.29
    assert seconds(writer) < 0.1
    words[0] = 8 * _VARIABLES + 4 + 1  # its next attempt
    assert seconds(writer) > 0.29


def test_a_reader_of_a_large_variable_holds_nobody_up_for_long_and_gets_more_time_if_it_goes_on(gate, monkeypatch):
    monkeypatch.setattr("mpistrat.parameter_server.server.atomic_reads._MOST_SECONDS", 0.4)
    words, writer = gate
    for number, expected in (7, 0.4), (8, 0.8), (9, 1.6):  # the last is longer than 50 MB take, 1.3 s
        words[0] = number * _VARIABLES + 4 + 1
        assert expected - 0.01 < seconds(writer, nbytes=50_000_000) < expected + 0.25
    words[0] = 10 * _VARIABLES + 4 + 1
    timer = threading.Timer(0.1, lambda: words.__setitem__(0, 0))
    timer.start()
    assert seconds(writer, nbytes=50_000_000) < 0.35
    timer.join()
    words[0] = 11 * _VARIABLES + 4 + 1  # once it has come to an end, it is as at first
    assert seconds(writer, nbytes=50_000_000) < 0.65


def test_a_slow_reader_of_a_small_variable_gets_more_time_at_each_attempt(gate):
    words, writer = gate
    for number, expected in (7, 0.3), (8, 0.6), (9, 1.2):
        words[0] = number * _VARIABLES + 4 + 1
        assert expected - 0.01 < seconds(writer) < expected + 0.25


def test_a_reader_that_waited_for_a_writer_announces_itself_anew():
    """Meanwhile the writer may have given up the old announcement, and would wait for it no more."""
    announced, versions = [], iter([1, 3, 4, 4])  # odd: it is being written

    class Words:
        def put_word(self, rank, offset, word):
            announced.append(word)

        def get_word(self, rank, offset):
            return next(versions)

        def sync(self):
            pass

    class Wait:
        def pause(self):
            pass

    copied = []
    assert SeqLockReader(Words(), 0, 0, Wait).read(4, Words(), 0, copied.append, "copy") == 2
    assert copied == ["copy"]
    assert announced == [number * _VARIABLES + 4 + 1 for number in (1, 2, 3)] + [0]


def test_readers_are_waited_for_together(gate):
    words, writer = gate
    words[0] = words[1] = 7 * _VARIABLES + 4 + 1
    assert 0.29 < seconds(writer) < 0.5

"""The server's end of the gate: it waits for a reader once, a bounded time, and for nobody else."""

import pytest

from mpistrat.base import waiting
from mpistrat.parameter_server.server import atomic_reads
from mpistrat.parameter_server.server.atomic_reads import _SLEEP, _VARIABLES, SeqLockReader, SeqLockWriter
from tests.harness.clock import Clock


class Gate:
    """Three words of which the first two are readers', and their writer, with a short patience and a clock of its own."""

    def __init__(self, clock):
        self.clock, self.ends = clock, {}
        self.words = memoryview(bytearray(24)).cast("q")
        self.writer = SeqLockWriter(self.words, [0, 8], lambda: None, self.progress)

    def progress(self):
        for word, end in self.ends.items():
            if self.clock.now >= end:
                self.words[word] = 0

    def announce(self, word, number, lasts=1e9):
        """Begin a reading that goes on for so many seconds."""
        self.words[word], self.ends[word] = number * _VARIABLES + 4 + 1, self.clock.now + lasts

    def seconds(self, nbytes=0):
        start = self.clock.now
        self.writer.wait(4, nbytes)
        return self.clock.now - start


@pytest.fixture
def gate(monkeypatch):
    monkeypatch.setattr(atomic_reads, "_SECONDS", 0.3)
    monkeypatch.setattr(atomic_reads, "_YIELDS", 10)  # on a busy machine each takes milliseconds
    clock = Clock()
    clock.replace_time(monkeypatch, atomic_reads, waiting)
    return Gate(clock)


def about(seconds):
    return pytest.approx(seconds, abs=3 * _SLEEP)


def test_nobody_reads(gate):
    gate.words[0] = 7 * _VARIABLES + 3 + 1  # another variable
    gate.words[2] = 7 * _VARIABLES + 4 + 1  # nobody's gate
    assert gate.seconds() == 0


def test_a_reader_is_waited_for_until_it_is_done(gate):
    gate.announce(1, 7, lasts=0.1)
    assert gate.seconds() == about(0.1)


def test_a_reader_that_never_ends_is_waited_for_once(gate):
    gate.announce(0, 7)
    assert gate.seconds() == about(0.3)
    assert gate.seconds() == 0
    gate.announce(0, 8)  # its next attempt
    assert gate.seconds() == about(0.6)


def test_a_reader_of_a_large_variable_holds_nobody_up_for_long_and_gets_more_time_if_it_goes_on(gate, monkeypatch):
    monkeypatch.setattr(atomic_reads, "_MOST_SECONDS", 0.4)
    for number, expected in (7, 0.4), (8, 0.8), (9, 1.6):  # the last is longer than 50 MB take, 1.3 s
        gate.announce(0, number)
        assert gate.seconds(nbytes=50_000_000) == about(expected)
    gate.announce(0, 10, lasts=0.1)
    assert gate.seconds(nbytes=50_000_000) == about(0.1)
    gate.announce(0, 11)  # once it has come to an end, it is as at first
    assert gate.seconds(nbytes=50_000_000) == about(0.4)


def test_a_slow_reader_of_a_small_variable_gets_more_time_at_each_attempt(gate):
    for number, expected in (7, 0.3), (8, 0.6), (9, 1.2):
        gate.announce(0, number)
        assert gate.seconds() == about(expected)


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
    gate.announce(0, 7)
    gate.announce(1, 7)
    assert gate.seconds() == about(0.3)

"""The server's end of the gate: it waits for a reader once, a bounded time, and for nobody else."""

import threading
import time

import pytest

from mpistrat.parameter_server.gate import _VARIABLES, WriterGate


@pytest.fixture
def gate(monkeypatch):
    """A gate over three words of which the first two are readers', with a short patience."""
    monkeypatch.setattr("mpistrat.parameter_server.gate._SECONDS", 0.3)
    words = memoryview(bytearray(24)).cast("q")
    return words, WriterGate(words, [0, 8], lambda: None, lambda: None)


def seconds(gate, variable=4):
    start = time.monotonic()
    gate.wait(variable, 0)
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

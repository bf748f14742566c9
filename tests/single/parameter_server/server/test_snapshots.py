"""Versions of a variable that workers hold where they lie: whatever they and the server do in turn, none changes meanwhile."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.parameter_server.layout import Address, VariableSpec
from mpistrat.parameter_server.server.atomic_reads import HeldSnapshot
from mpistrat.parameter_server.server.version_buffers import SnapshotBuffers


class Memory:
    """A server's segment, as its slab and as a worker's window."""

    def __init__(self, nbytes):
        self.own = np.zeros(nbytes, np.uint8)
        self.words, self.segments, self.there = memoryview(self.own).cast("q"), [self.own], True
        self.get_word = lambda rank, offset: self.words[offset // 8]
        self.put_word = lambda rank, offset, value: self.words.__setitem__(offset // 8, value)
        self.before_sync = lambda: None

    def sync(self):
        self.before_sync()

    def find(self, low, high):
        return self.there


class SnapshotHarness:
    """A server and some workers; the variable is full of its version."""

    def __init__(self, workers):
        address = Address.after(0, 0, VariableSpec("v", (5,), np.dtype(np.float32)), 0, tuple(range(1, workers + 1)))
        self.memory = Memory(address.end)
        self.buffers = SnapshotBuffers(address, self.memory)
        self.workers = [HeldSnapshot(address, w, self.memory, 0) for w in address.near]
        self.version = address.version // 8

    def write(self):
        """Write a new version apart, if that is allowed; return whether it was."""
        words = self.memory.words
        if not self.buffers.open():
            return False
        buffer = self.buffers.free()
        self.buffers.view(buffer)[...] = words[self.version] // 2 + 1
        words[self.version] += 1
        self.buffers.make_current(buffer)
        words[self.version] += 1
        return True

    def write_rows(self):
        """Write in place, where that is allowed."""
        words = self.memory.words
        words[self.version] += 1
        if self.buffers.close():
            before, buffer = self.buffers.view(self.buffers.current), self.buffers.free()
            self.buffers.view(buffer)[...] = before
            self.buffers.make_current(buffer)
        self.buffers.view(self.buffers.current)[...] = words[self.version] // 2 + 1
        words[self.version] += 1


def check(version, array):
    assert array.tolist() == [version] * 5
    assert not array.flags.writeable


def test_rooms_open_when_somebody_has_asked():
    harness = SnapshotHarness(2)
    assert not harness.write()
    assert harness.workers[0].read() is None
    assert harness.write()
    version, array = harness.workers[0].read()
    check(version, array)
    assert version == 1


def test_without_memory_everybody_copies():
    harness = SnapshotHarness(1)
    harness.memory.there = False
    assert harness.workers[0].read() is None
    assert not harness.write()
    harness.memory.there = True
    assert not harness.write()
    assert harness.workers[0].read() is None


def test_who_holds_an_old_version_copies_the_new_one():
    harness = SnapshotHarness(1)
    assert harness.workers[0].read() is None
    harness.write()
    version, array = harness.workers[0].read()
    again = harness.workers[0].read()
    assert again[1].ctypes.data == array.ctypes.data  # the same version
    harness.write()
    assert harness.workers[0].read() is None
    check(version, array)
    view = array[1:]  # a part holds all of it
    del array, again
    assert harness.workers[0].read() is None
    del view
    assert harness.workers[0].read()[0] == 2


def test_a_version_that_is_made_meanwhile_is_not_missed():
    """The server makes the buffer old, and writes into it, between a worker's looking and its noting."""
    harness = SnapshotHarness(1)
    harness.workers[0].read()
    harness.write()
    meanwhile = [harness.write, harness.write]
    harness.memory.before_sync = lambda: meanwhile and meanwhile.pop()()
    version, array = harness.workers[0].read()
    check(version, array)
    assert version == 3


ACTIONS = st.sampled_from(["write", "rows", "read", "keep", "drop"])


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 3), st.lists(st.tuples(ACTIONS, st.integers(0, 2)), max_size=60))
def test_what_is_held_never_changes(workers, actions):
    harness, held, kept = SnapshotHarness(workers), [None] * workers, []
    for action, who in actions:
        worker = who % workers
        if action == "write":
            harness.write()
        elif action == "rows":
            harness.write_rows()
        elif action == "drop":
            held[worker] = None
            kept.clear()
        elif action == "keep":
            kept.append(held[worker])
        else:
            held[worker] = None
            held[worker] = harness.workers[worker].read()
        for pair in [*held, *kept]:
            if pair is not None:
                check(*pair)
        newest = harness.buffers.view(harness.buffers.current)
        assert newest.tolist() == [harness.memory.words[harness.version] // 2] * 5


@pytest.mark.parametrize("workers", [1, 4])
def test_there_is_always_room(workers):
    harness = SnapshotHarness(workers)
    harness.workers[0].read()
    held = []
    for worker in harness.workers:
        harness.write()
        held.append(worker.read())
    harness.write()
    harness.write()
    for index, pair in enumerate(held):
        check(*pair)
        assert pair[0] == index + 1

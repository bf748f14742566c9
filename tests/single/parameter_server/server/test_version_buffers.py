"""Versions of a variable that a server sends: whatever is written meanwhile, none changes; and nothing is copied in vain."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.server_harness import ServerHarness, Weights

SIZES = st.sampled_from([0, 1, 1000, 100_000])  # the last is kept in the pool


@given(SIZES, st.lists(st.tuples(st.sampled_from(["lend", "drop", "rows", "whole"]), st.integers(0, 3)), max_size=30))
def test_what_is_lent_never_changes(size, actions):
    server = ServerHarness(1, [Weights(np.zeros(size, np.float32))]).server
    lent, first = [], server.version(0)
    for action, which in actions:
        number = server.version(0) - first
        if action == "lend":
            version, data = server.lend(0)
            assert version == first + number
            lent.append((number, data.view(np.float32)))
        elif action == "drop" and lent:
            lent.pop(which % len(lent))
        elif action == "rows":
            with server.writing(0) as array:
                assert (array == number).all()
                array += 1
        elif action == "whole":
            with server.replacing(0) as (old, new):
                assert (old == number).all()
                np.add(old, 1, out=new)
        assert (server.array(0) == server.version(0) - first).all()
        for number, data in lent:
            assert data.size == size
            assert (data == number).all()
            assert not (size and data.flags.writeable)


def address(array):
    return array.__array_interface__["data"][0]


def test_memory_that_is_not_lent_any_more_is_written_in_place():
    server = ServerHarness(1, [Weights(np.zeros(100_000, np.float32))]).server
    _, data = server.lend(0)
    _, again = server.lend(0)
    assert address(data) == address(again) == address(server.array(0))  # no copy
    with server.replacing(0) as (old, new):
        assert address(new) != address(old) == address(data)
    del data, again
    before = address(server.array(0))
    with server.replacing(0) as (old, new):
        assert address(new) == address(old) == before


def test_no_more_memory_than_is_lent():
    """A version that is lent moves the next one to other memory, and that is left again for the first when it is lent."""
    server = ServerHarness(1, [Weights(np.zeros(100_000, np.float32))]).server
    places = []
    for _ in range(4):
        _, data = server.lend(0)
        with server.writing(0) as array:
            array += 1
        places.append(address(server.array(0)))
        del data
    assert places[0] == places[2] != places[1] == places[3]


@pytest.mark.parametrize("replacing", [False, True])
def test_an_error_while_it_is_written_leaves_what_is_lent(replacing):
    server = ServerHarness(1, [Weights(np.zeros(1000, np.float32))]).server
    _, data = server.lend(0)
    with pytest.raises(ZeroDivisionError), server.replacing(0) if replacing else server.writing(0):
        1 // 0  # noqa: B018
    assert not data.any()

"""`ms.variable_creator_scope`: functions of the program take part in the creation of variables."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import mpistrat as ms


def test_creators_of_inner_scopes_are_called_first_and_end_with_their_block():
    calls = []

    def creator(word):
        def create(next_creator, **arguments):
            calls.append((word, arguments.get("name")))
            return next_creator(**{**arguments, "name": f"{word}_{arguments['name']}"})

        return create

    with ms.variable_creator_scope(creator("outer")), ms.variable_creator_scope(creator("inner")):
        v = ms.Variable(np.zeros(2), True, "v", dtype="float32")
    assert (calls, v.name[:13], v.dtype) == ([("inner", "v"), ("outer", "inner_v")], "outer_inner_v", np.float32)
    ms.Variable(0.0, name="after")
    assert len(calls) == 2


def test_a_creator_may_return_a_known_variable():
    known = ms.Variable(3.0)
    with ms.variable_creator_scope(lambda next_creator, **arguments: known):
        assert ms.Variable(1.0) is known


def test_too_many_arguments_are_an_error_as_outside():
    with (
        ms.variable_creator_scope(lambda next_creator, **arguments: next_creator(**arguments)),
        pytest.raises(TypeError),
    ):
        ms.Variable(1.0, *[None] * 12)


def test_other_threads_create_as_usual():
    made = []
    with ms.variable_creator_scope(lambda next_creator, **arguments: None):
        thread = threading.Thread(target=lambda: made.append(ms.Variable(1.0)))
        thread.start()
        thread.join()
    assert float(made[0]) == 1.0


def test_a_scope_ends_with_an_error():
    with pytest.raises(KeyError), ms.variable_creator_scope(lambda next_creator, **arguments: None):
        raise KeyError("in the block")
    assert float(ms.Variable(2.0)) == 2.0

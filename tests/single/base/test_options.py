"""Settings are parsed once, refused with their name and legal values, and merged field by field."""

from __future__ import annotations

import pytest

import mpistrat as ms
from mpistrat.base.environment import Environment
from mpistrat.base.options import CommunicationOptions
from mpistrat.types import CommunicationImplementation, ReduceOp, VariableAggregation


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MPISTRAT_WARN_AFTER", "soon"),
        ("MPISTRAT_ABORT_AFTER", "-1"),
        ("MPISTRAT_ABORT_AFTER", "nan"),
        ("MPISTRAT_CHECK_EVERY", "0"),
        ("MPISTRAT_SHARED_MEMORY", "yes"),
        ("MPISTRAT_COMPILED_LOOPS", "on"),
        ("MPISTRAT_LOG", "loud"),
        ("MPISTRAT_TORCH", "yes"),
        ("MPISTRAT_TRACEBACK", "long"),
        ("MPISTRAT_STRATEGY", "Mirrored"),
        ("MPISTRAT_NUM_PS", "0"),
        ("MPISTRAT_NUM_PS", "1.5"),
        ("MPISTRAT_NUM_PS", "-1"),
    ],
)
def test_environment_names_the_variable(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected .*{text}"):
        Environment.read({name: text})


def test_environment_reads() -> None:
    found = Environment.read({"MPISTRAT_SHARED_MEMORY": "0", "MPISTRAT_WARN_AFTER": "2.5", "MPISTRAT_LOG": "DEBUG"})
    assert (found.shared_memory, found.warn_after, found.log) == (False, 2.5, "debug")
    assert Environment.read({}) == Environment()
    served = Environment.read({"MPISTRAT_STRATEGY": "parameter_server", "MPISTRAT_NUM_PS": "2"})
    assert (served.strategy, served.num_ps) == ("parameter_server", 2)


def test_merge_takes_every_field_that_is_said() -> None:
    base = CommunicationOptions(bytes_per_pack=100, timeout_seconds=3.0)
    merged = base.merge(CommunicationOptions(bytes_per_pack=0, implementation="mpi"))
    assert merged == CommunicationOptions(0, 3.0, CommunicationImplementation.MPI)
    assert base.merge(None) is base


def test_options_are_shown_as_they_are_written() -> None:
    for text in ("CommunicationOptions()", "CommunicationOptions(timeout_seconds=3.0, implementation='NCCL')"):
        assert repr(eval(text)) == text


@pytest.mark.parametrize("wrong", [{"bytes_per_pack": -1}, {"timeout_seconds": 0.0}, {"implementation": "TCP"}])
def test_wrong_options_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CommunicationOptions(**wrong)


def test_reduce_op_parses_names_and_refuses_an_aggregation() -> None:
    assert ReduceOp.parse("mean") is ReduceOp.MEAN
    assert ReduceOp.parse("Max") is ReduceOp.MAX
    with pytest.raises(ValueError, match="expected a ReduceOp"):
        ReduceOp.parse(VariableAggregation.SUM)


def test_tensorflow_s_names_of_implementations():
    for name in ("AUTO", "RING", "NCCL"):
        chosen = CommunicationOptions(implementation=name).implementation
        assert chosen is CommunicationImplementation[name] is ms.tf.CollectiveCommunication[name]
    assert CommunicationImplementation.RING is CommunicationImplementation.MPI


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"every": 0}, ValueError, "every: expected an integer of at least 1, got 0"),
        ({"every": 2.0}, TypeError, "every: expected an integer of at least 1, got 2.0"),
        ({"every": True}, TypeError, "every"),
        ({"every": 2, "outer_learning_rate": 0.0}, ValueError, "outer_learning_rate: expected a number > 0"),
        ({"every": 2, "outer_momentum": 1.0}, ValueError, "outer_momentum: expected 0 <= value < 1"),
    ],
)
def test_local_steps_out_of_range(given, error, text) -> None:
    with pytest.raises(error, match=text):
        ms.LocalSteps(**given)


def test_local_steps_are_those_of_the_paper() -> None:
    assert ms.LocalSteps(500) == ms.LocalSteps(every=500, outer_learning_rate=0.7, outer_momentum=0.9)


def test_a_wire_has_a_name_of_the_list() -> None:
    with pytest.raises(ValueError, match=r"wire: expected None or one of bfloat16, int8, got 'float16'"):
        CommunicationOptions(wire="float16")
    merged = CommunicationOptions(wire="int8").merge(CommunicationOptions(bytes_per_pack=0))
    assert repr(merged) == "CommunicationOptions(bytes_per_pack=0, wire='int8')"

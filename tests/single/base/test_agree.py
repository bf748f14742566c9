"""Agreement without MPI: what errors become on other ranks, and what of a difference is told."""

from __future__ import annotations

import pytest

from mpistrat import errors
from mpistrat.base.agree import Failure, Ranks, as_told, first, same, together


def told_by(*others: str):
    """An exchange in which this rank is 0, and the others say that."""
    return lambda text: [text, *others]


@pytest.mark.parametrize(
    "kind", [TypeError, ValueError, FileNotFoundError, KeyError, errors.ShardError, errors.DeviceError]
)
def test_a_failure_elsewhere_is_an_error_of_the_same_class(kind):
    with pytest.raises(kind) as raised, together(told_by("", f"{kind.__name__}\nno such thing")):
        pass
    assert type(raised.value) is kind
    assert raised.value.args == ("rank 2: no such thing",)


@pytest.mark.parametrize("kind", ["UnicodeDecodeError", "KeyboardInterrupt", "StopIteration", "MyError", "print", "E"])
def test_a_class_that_cannot_be_made_here_is_ours(kind):
    with pytest.raises(errors.MpistratError, match="^rank 1: two\nlines$"), together(told_by(f"{kind}\ntwo\nlines")):
        pass


def test_who_acts_for_all_is_not_named():
    with pytest.raises(OSError, match="^no room$"), together(told_by("OSError\nno room"), as_told):
        pass


def test_an_exception_of_its_own_is_told_and_stays():
    said: list[str] = []
    error = ValueError("mine")
    with pytest.raises(ValueError, match="^mine$") as raised, together(lambda text: said.append(text) or [text]):
        raise error
    assert raised.value is error
    assert said == ["ValueError\nmine"]


def test_an_error_without_a_text_is_told():
    said: list[str] = []
    with pytest.raises(KeyError), together(lambda text: said.append(text) or [text]):
        raise KeyError
    assert said == ["KeyError\nKeyError()"]


def test_an_error_whose_text_cannot_be_made_is_told():
    class Odd(ValueError):
        def __str__(self) -> str:
            raise OSError("no text")

    said: list[str] = []
    with pytest.raises(Odd), together(lambda text: said.append(text) or [text]):
        raise Odd
    assert said == ["Odd\n<exception str() failed>"]


def test_the_caller_may_make_the_error():
    with pytest.raises(OSError, match="^1: A, 2: B$"):
        failures = {1: Failure("A", "x"), 2: Failure("B", "y")}
        with together(
            told_by("A\nx", "B\ny"),
            lambda found: OSError(", ".join(f"{rank}: {one.kind}" for rank, one in found.items())),
        ):
            pass
    assert str(failures[1]) == "A: x"
    assert str(first(failures)) == "rank 1: x"


def test_what_is_the_same_passes_and_what_is_not_is_told():
    same(told_by("a"), "a", lambda texts: AssertionError(texts))
    with pytest.raises(ValueError, match="0: 'a', 1: 'b'"):
        same(told_by("b"), "a", ValueError)


def test_what_is_shown_stands_for_what_is_compared():
    other: list[str] = []
    same(lambda text: other.append(text) or [text], "a long text", ValueError, "short")
    with pytest.raises(ValueError, match="0: 'short', 1: 'short'"):
        same(told_by(*other), "another long text", ValueError, "short")
    same(told_by(other[0].replace("short", "brief")), "a long text", ValueError, "short")


def test_ranks_without_mpi_are_one():
    ranks = Ranks(None, "write_shards")
    ranks.agree("anything")
    with ranks.together():
        pass
    with pytest.raises(OSError, match="no room"), ranks.together():
        raise OSError("no room")
    assert (ranks.rank, ranks.size, ranks.exchange("me")) == (0, 1, ["me"])

"""MPISTRAT_COLORS: which ranks are a world of their own."""

import pytest

from mpistrat.cluster.world import ranks_of_colors
from mpistrat.errors import LayoutError


def test_ranks_of_colors():
    assert ranks_of_colors("train=2-3", 4) == {"train": (2, 3)}
    assert ranks_of_colors("a=0,5,2-3:b=1:c=4", 6) == {"a": (0, 2, 3, 5), "b": (1,), "c": (4,)}


@pytest.mark.parametrize(
    "text",
    ["train", "train=", "=1", "train=1-", "train=4", "train=2-9", "a=0:a=1", "a=0-1:b=1", "a=3-2", "a=0;b=1", "a=-1"],
)
def test_wrong_colors_are_named(text):
    with pytest.raises(LayoutError, match=rf"environment: MPISTRAT_COLORS: expected COLOR=RANKS.*got '{text}'"):
        ranks_of_colors(text, 4)

"""The page of a run: round numbers at its axes, and whatever results there are."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.timeline import RankTimes
from mpistrat.train.run_page import RunRecord, _powers, _ticks, page


@given(st.floats(-1e12, 1e12), st.floats(-1e12, 1e12))
def test_ticks_enclose_what_they_measure(a, b):
    low, high = sorted((a, b))
    ticks = _ticks(low, high)
    assert ticks[0] <= low + 1e-6 * abs(low) + 1e-300 and ticks[-1] >= high - 1e-6 * abs(high) - 1e-300
    assert 2 <= len(ticks) <= 8
    assert len(set(ticks)) == len(ticks)


@given(st.floats(1e-300, 1e300), st.floats(2, 1e20))
def test_powers_enclose_what_they_measure(low, factor):
    high = min(low * factor, 1e300)
    ticks = _powers(low, high)
    assert ticks[0] <= low * 1.0000001 and ticks[-1] * 1.0000001 >= high and len(ticks) <= 9


def record(**results):
    epochs = [
        {"epoch": i, "step": 5 * i, "seconds": 1.0, "samples_per_second": 10.0, **{k: v[i] for k, v in results.items()}}
        for i in range(len(next(iter(results.values()))))
    ]
    ranks = [RankTimes(0, "a<b", 9.0, 0.1, 0.5, 0.1, 0.2, 0.0, 9, 0, 9, 0.0)]
    return RunRecord("a & b", "ended", {"x": "<y>"}, epochs, ranks, ["<w>"])


@pytest.mark.parametrize(
    "results",
    [
        {"loss": [1.0]},
        {"loss": [1.0, 1.0]},
        {"loss": [1e-9, 1e9, 0.0]},
        {"loss": [math.nan, math.inf]},
        {"loss": [-1.0, 2.0], "val_loss": [math.nan, 3.0]},
        {"recall": [[0.5, 0.6], [0.5, 0.7]], "loss": [5, 4]},
        {"loss": [1e-30, 1.0]},
    ],
)
def test_any_results_make_a_page(results):
    text = page(record(**results))
    assert text.count("<svg") == text.count("</svg>") >= 1
    assert "a &amp; b" in text and "&lt;y&gt;" in text and "<w>" not in text and "a<b" not in text
    assert "nan" not in text.partition("After epoch")[0].partition("</style>")[2]


def test_of_very_many_ranks_those_are_shown_for_whom_others_waited():
    ranks = [
        RankTimes(i, f"n{i}", 9.0, 0.1, 0.5, 0.1, 0.2, 0.0, 9, int(i == 999), 9, float(i == 999)) for i in range(1000)
    ]
    text = page(RunRecord("many", ranks=ranks))
    assert "936 more ranks are not shown" in text and "rank 999: waiting" in text

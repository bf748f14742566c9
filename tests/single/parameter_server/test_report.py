"""What workers and servers exchanged, put together from the ranks' counts."""

import numpy as np

from mpistrat.parameter_server.layout import VariableSpec
from mpistrat.parameter_server.report import combine

SPECS = [VariableSpec("w", (3,), np.dtype("f4"), 0), VariableSpec("b", (1,), np.dtype("f4"), 1)]


def by_rank(pulls=(), pushes=()):
    return {"pulls": pulls, "pushes": pushes, "dropped": []}


def server(staleness, busy=1.0, idle=3.0, waiting=2, dropped=()):
    return {"staleness": staleness, "busy": busy, "idle": idle, "most_waiting": waiting, "dropped": list(dropped)}


def test_counts_of_all_ranks_come_together():
    ranks = [
        server([[], [[0, [[0, 3], [2, 1]]]]], dropped=(0, 5)),
        by_rank(),
        by_rank([[[0, [4, 48]]], [[1, [2, 8]]]], [[[0, [4, 48]]], []]),
        server([[], []], busy=0.0),
    ]
    stats = combine(SPECS, workers=(1, 2), servers=(0, 3), by_rank=ranks)
    found = [(e.variable, e.worker, e.pulls, e.pulled_bytes, e.pushes, e.pushed_bytes) for e in stats.exchanges]
    assert found == [("w", 1, 4, 48, 4, 48), ("b", 1, 2, 8, 0, 0)]
    assert dict(stats.exchanges[0].staleness) == {0: 3, 2: 1}
    assert stats.exchanges[0].mean_staleness == 0.5
    assert [load.dropped for load in stats.servers] == [(0, 5), ()]
    lines = str(stats).splitlines()
    assert lines[0].split() == [
        "variable",
        "server",
        "worker",
        "pulls",
        "MB",
        "pushes",
        "MB",
        "staleness",
        "mean",
        "largest",
    ]
    assert lines[1].split() == ["w", "0", "1", "4", "0.0", "4", "0.0", "0.50", "2"]
    assert lines[3:] == [
        "server 0: busy 25%, at most 2 parts waiting, 5 steps dropped",
        "server 1: busy 0%, at most 2 parts waiting",
    ]

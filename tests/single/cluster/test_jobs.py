"""Ranks are divided into jobs by counts, lists or programs."""

import pytest

from mpistrat.cluster.resolvers.mpi import split_apps, split_counts, split_lists
from mpistrat.errors import ClusterError


def test_counts_take_successive_ranks_in_the_order_given():
    assert split_counts("f", {"worker": 2, "ps": 1}, 3) == {"worker": [0, 1], "ps": [2]}
    assert split_counts("f", {"ps": 1, "worker": 2}, 3) == {"ps": [0], "worker": [1, 2]}
    assert split_counts("f", {"worker": 3, "ps": 0}, 3) == {"worker": [0, 1, 2], "ps": []}


def test_lists_keep_the_order_of_tasks():
    assert split_lists("f", {"worker": [2, 0], "ps": (1,)}, 3) == {"worker": [2, 0], "ps": [1]}


def test_programs_may_share_a_job():
    assert split_apps("f", ["worker", "ps"], [0, 0, 1]) == {"worker": [0, 1], "ps": [2]}
    assert split_apps("f", ["worker", "ps", "worker"], [0, 1, 2]) == {"worker": [0, 2], "ps": [1]}


@pytest.mark.parametrize(
    ("split", "arguments", "named"),
    [
        (split_counts, ({"worker": 2}, 3), "3 tasks"),
        (split_counts, ({"worker": 4}, 3), "4 in"),
        (split_counts, ({"worker": "3"}, 3), "'3'"),
        (split_counts, ({"worker": True}, 1), "True"),
        (split_lists, ({"worker": [0, 1]}, 3), "0 to 2"),
        (split_lists, ({"worker": [0, 1], "ps": [1]}, 2), "once"),
        (split_lists, ({"worker": [0, 3]}, 2), "0 to 1"),
        (split_lists, ({"worker": ["0"]}, 1), "'0'"),
        (split_apps, (["worker", "ps"], [0, 0]), "2 programs"),
        (split_apps, (["worker"], [0, 1]), "got 2"),
        (split_apps, (["worker"], [-1]), "MPI_APPNUM"),
        (split_apps, ([3], [0]), "names of jobs"),
    ],
)
def test_what_does_not_fit_is_named(split, arguments, named):
    with pytest.raises(ClusterError) as error:
        split("f", *arguments)
    assert named in str(error.value)

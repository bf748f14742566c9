"""The comparison of collectives between two nodes of several ranks."""

import pytest

from mpistrat.errors import CollectiveMismatchError
from tests.harness.process_groups import open_group


def use(group, *names):
    for name in names:
        with group.collective("assign", name):
            pass


@pytest.mark.ranks(4)
def test_ranks_of_a_node_that_differed_expect_nothing():
    """Else some of them would take the next call for an expected one, and others would wait for them in the comparison."""
    with open_group("nodes") as group:
        use(group, *"abcabc")
        with pytest.raises(CollectiveMismatchError):
            use(group, "a" if group.node.rank == 0 else "b")
        with pytest.raises(CollectiveMismatchError, match="1 collective ago"):
            use(group, "b")
        use(group, *"cabcab")

"""What the suites of strategies share: each strategy on the ranks of a start, one after the other."""

import pytest

from tests.harness.strategies import STRATEGIES, layout_for, made


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    from mpi4py import MPI

    devices = layout_for(request.param, MPI.COMM_WORLD.size)
    if devices is None:
        pytest.skip("the strategy takes one rank")
    with made(request.param, devices) as strategy:
        yield strategy

"""What tests of data on ranks share."""

import pytest

import mpistrat as ms


@pytest.fixture
def strategy():
    """A strategy over all ranks, closed at the end."""
    made = ms.MultiWorkerMirroredStrategy()
    yield made
    made.close()

"""Which server a variable comes to: TensorFlow's counter, and the one that counts bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.parameter_server.layout import PLACEMENTS, Balanced, RoundRobin

sizes = st.lists(st.integers(0, 1000), max_size=40)


def histogram(placing, sizes):
    servers = [placing((nbytes,), "int8") for nbytes in sizes]
    return servers, [sum(n for s, n in zip(servers, sizes, strict=True) if s == server) for server in range(3)]


@given(sizes)
def test_round_robin_is_a_counter(sizes):
    placing = RoundRobin(3)
    servers, expected = histogram(placing, sizes)
    assert servers == [i % 3 for i in range(len(sizes))]
    assert placing.nbytes == expected


@given(sizes)
def test_balanced_differs_by_at_most_the_largest_variable(sizes):
    placing = Balanced(3)
    _, expected = histogram(placing, sizes)
    assert placing.nbytes == expected
    assert max(placing.nbytes) - min(placing.nbytes) <= max(sizes, default=0)


def test_layers_of_a_network_are_balanced_where_round_robin_puts_all_weights_on_one_server():
    layers = [(784, 512), (512,)] * 4  # weights and bias, in turn
    round_robin, balanced = RoundRobin(2), Balanced(2)
    for shape in layers:
        round_robin(shape, np.float32)
        balanced(shape, np.float32)
    assert round_robin.nbytes == [4 * 784 * 512 * 4, 4 * 512 * 4]
    assert max(balanced.nbytes) / (sum(balanced.nbytes) / 2) < 1.01


def test_of_equals_the_first():
    assert [Balanced(3)((), "int8") for _ in range(2)] == [0, 0]
    placing = Balanced(3)
    assert [placing((nbytes,), "int8") for nbytes in (5, 5, 5, 1, 1, 1)] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("name", ["round_robin", "bytes"])
def test_by_name(name):
    assert [PLACEMENTS[name](1)((7, 2), "int8") for _ in range(3)] == [0, 0, 0]
    with pytest.raises(ValueError, match="num_servers: expected >= 1, got 0"):
        PLACEMENTS[name](0)

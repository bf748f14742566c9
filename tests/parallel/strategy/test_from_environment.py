"""Parameter servers as the environment counts them."""

import pytest

import mpistrat as ms


@pytest.mark.ranks(3, 4)
def test_the_last_ranks_are_servers(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("MPISTRAT_STRATEGY", "parameter_server")
    monkeypatch.setenv("MPISTRAT_NUM_PS", "2")
    with_two = ms.strategy_from_environment()
    ranks = tuple(range(with_two.size))
    assert with_two.servers == ranks[-2:]
    with_two.close()
    with_one = ms.strategy_from_environment(num_ps=1)
    assert with_one.servers == ranks[-1:]
    with_one.close()

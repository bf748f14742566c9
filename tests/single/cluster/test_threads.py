"""BLAS gets this rank's share of the cores, unless the user chose."""

import logging

import numpy as np
import pytest
import threadpoolctl

from mpistrat.cluster import threads
from mpistrat.cluster.threads import set_blas_threads
from mpistrat.log import once


@pytest.fixture
def machine(monkeypatch):
    """So many cores for this process, no choice by the user; BLAS is as before afterwards."""
    for name in threads._USER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    once.cache_clear()
    with threadpoolctl.threadpool_limits():
        yield lambda cores: monkeypatch.setattr(threads, "available_cores", lambda: list(range(cores)))


@pytest.mark.parametrize(
    ("cores", "ranks", "replicas", "node_cores", "share"),
    [
        (8, 1, 1, None, 8),
        (8, 4, 1, None, 2),
        (8, 3, 1, None, 2),
        (8, 4, 2, None, 1),
        (8, 4, 1, 32, 8),  # bound: each rank has 8 cores of its own
        (8, 4, 2, 32, 4),
        (32, 4, 1, 32, 8),  # not bound: all ranks share 32
        (2, 4, 1, None, 1),
    ],
)
def test_shares(machine, cores, ranks, replicas, node_cores, share):
    machine(cores)
    assert set_blas_threads(ranks, replicas, node_cores) == share


def test_blas_obeys(machine):
    np.ones((4, 4)) @ np.ones((4, 4))
    machine(2)
    assert set_blas_threads(2) == 1
    pools = [pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"]
    assert pools
    assert {pool["num_threads"] for pool in pools} == {1}


def test_the_user_has_the_last_word(machine, monkeypatch):
    machine(8)
    before = threadpoolctl.threadpool_info()
    for name in threads._USER_VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(name, "3")
            assert set_blas_threads(4) is None
    assert threadpoolctl.threadpool_info() == before


def test_more_threads_than_cores_are_said_once(machine, caplog):
    machine(2)
    with caplog.at_level(logging.WARNING, "mpistrat"):
        set_blas_threads(4)
        set_blas_threads(4)
        set_blas_threads(2)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "4 ranks with 1 replicas of 1 BLAS threads share 2 cores"
    ]

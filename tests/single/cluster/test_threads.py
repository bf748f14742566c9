"""BLAS gets this rank's share of the cores, unless the user chose."""

import logging
import sys

import numpy as np
import pytest
import threadpoolctl

import mpistrat as ms
from mpistrat.base import cores as machine_cores
from mpistrat.base.cores import set_blas_threads
from mpistrat.base.log import once


@pytest.fixture
def machine(monkeypatch):
    """So many cores for this process, no choice by the user; BLAS is as before afterwards."""
    for name in machine_cores.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(machine_cores, "_limit", None)
    monkeypatch.setattr(machine_cores, "threads_per_core", lambda: 1)
    once.cache_clear()
    with threadpoolctl.threadpool_limits():
        yield lambda cores: monkeypatch.setattr(machine_cores, "usable_cores", lambda: cores)


def blas() -> set[int]:
    return {pool["num_threads"] for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas"}


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
    assert blas() == {1}


def test_the_user_has_the_last_word(machine, monkeypatch):
    machine(8)
    before = threadpoolctl.threadpool_info()
    for name in machine_cores.THREAD_VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(name, "3")
            assert set_blas_threads(4) is None
    assert threadpoolctl.threadpool_info() == before


def test_replicas_share_what_the_user_gave_the_rank(machine, monkeypatch):
    machine(8)
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")  # of nested regions
    assert set_blas_threads(2, 2) == 2
    assert set_blas_threads(2, 2) == 2  # not divided again
    assert set_blas_threads(2, 8) == 1
    assert threadpoolctl.threadpool_info()[0]["num_threads"] == 1


def test_a_library_that_is_imported_later_obeys(machine, monkeypatch):
    np.ones((4, 4)) @ np.ones((4, 4))
    machine(1)
    assert set_blas_threads(1) == 1
    threadpoolctl.ThreadpoolController().limit(limits=2)  # a new library begins with all cores
    machine_cores.limit_new_libraries()
    assert blas() == {2}, "nothing was imported: nobody looks"
    monkeypatch.setitem(sys.modules, "a_new_library", machine_cores)
    with ms.get_strategy().scope():
        assert blas() == {1}


def test_hardware_threads_are_no_reason_to_warn(machine, monkeypatch, caplog):
    machine(2)
    monkeypatch.setattr(machine_cores, "threads_per_core", lambda: 2)
    with caplog.at_level(logging.WARNING, "mpistrat"):
        assert set_blas_threads(4) == 1  # a rank on each hardware thread
        assert not caplog.records
        set_blas_threads(5)
    assert len(caplog.records) == 1


def test_more_threads_than_cores_are_said_once(machine, caplog):
    machine(2)
    with caplog.at_level(logging.WARNING, "mpistrat"):
        set_blas_threads(4)
        set_blas_threads(4)
        set_blas_threads(2)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "4 ranks with 1 replicas of 1 BLAS threads share 2 cores"
    ]

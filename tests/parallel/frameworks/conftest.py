"""Ranks share the cores of a machine: PyTorch computes with one thread in each."""

import sys

import pytest


@pytest.fixture(autouse=True)
def one_thread():
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

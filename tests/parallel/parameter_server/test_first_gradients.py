"""Gradients that the replicas of a worker ask for at the same time."""

import sys
import threading

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.parameter_server_strategies import made

pytestmark = pytest.mark.ranks(2, 3)


def test_replicas_that_ask_for_a_first_gradient_together_get_theirs():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads meet in more places
    try:
        with made(num_ps=1, devices=["cpu:0", "cpu:1"]) as strategy:
            variables = [ms.Variable(np.zeros(2000), name=f"v{i}") for i in range(300)]
            optimizer, meet = ms.optimizers.SGD(1.0), threading.Barrier(2)

            def step():
                for v in variables:
                    meet.wait()
                    v.grad[...] = 1.0
                optimizer.apply_gradients([(v.grad, v) for v in variables])

            if strategy.is_server:
                strategy.serve()
            else:
                strategy.run(step)
                strategy.flush()
                strategy.leave()
            strategy.barrier()
            if not strategy.is_server:
                right = -2.0 * strategy.num_workers
                assert [v.name for v in variables if (v.numpy() != right).any()] == []
    finally:
        sys.setswitchinterval(before)

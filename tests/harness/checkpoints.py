"""A small model to save and restore in tests of checkpoints: variables of every kind, and steps of training."""

import numpy as np

import mpistrat as ms
from mpistrat import VariableAggregation, VariableSynchronization

ON_READ = VariableSynchronization.ON_READ


def model(strategy, shape=(5, 3), dtype=np.float64):
    with strategy.scope():
        return {
            "w": ms.Variable(np.arange(np.prod(shape), dtype=dtype).reshape(shape), name="dense/w"),
            "steps": ms.Variable(0, name=".", synchronization=ON_READ, aggregation=VariableAggregation.SUM),
            "half": ms.Variable(np.ones(3, np.float16), name="50%", trainable=False),
        }


def train(strategy, variables, optimizer, steps):
    def step():
        w = variables["w"]
        w.grad[...] = np.sin(np.arange(w.size)).reshape(w.shape) / strategy.num_replicas_in_sync
        optimizer.apply_gradients([(w.grad, w)])
        variables["steps"].assign_add(1)

    for _ in range(steps):
        strategy.run(step)

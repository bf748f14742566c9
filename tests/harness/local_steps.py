"""Training by local steps on nodes that are made up on this machine, and DiLoCo in NumPy, in float64."""

from __future__ import annotations

import numpy as np

import mpistrat as ms
from tests.harness.process_groups import nodes_of

LAYOUTS = ("private", "nodes")
SIZES = (7001, 15, 1, 3301)


def of_node(strategy, layout):
    return nodes_of(strategy.size, layout)[strategy.rank]


def opened(every, rate=0.7, momentum=0.9, **more):
    how = ms.LocalSteps(every, outer_learning_rate=rate, outer_momentum=momentum)
    return ms.MultiWorkerMirroredStrategy(local_steps=how, **more)


BUILDS = {
    "adam": lambda o: o.Adam(0.01),
    "sgd": lambda o: o.SGD(0.05),
    "accumulates": lambda o: o.Adam(0.01, gradient_accumulation_steps=2, use_ema=True),
}


def make(strategy, build, dtype="float64", sizes=SIZES, **more):
    rng = np.random.default_rng(99)
    with strategy.scope():
        variables = [
            ms.Variable(rng.normal(size=size), name=f"v{i}", dtype=dtype, **more) for i, size in enumerate(sizes)
        ]
        return variables, build(ms.optimizers)


def gradient_of(weights, number, index, replica, replicas):
    """The gradient of a replica: of its part of a loss that is a mean over all, at the weights of its node."""
    rng = np.random.default_rng((number, index, replica))
    return (np.tanh(weights) + rng.normal(size=weights.shape)) / replicas


def train(strategy, variables, optimizer, steps):
    replicas, replica = strategy.num_replicas_in_sync, strategy.rank

    def step(number):
        gradients = [gradient_of(v.array, number, i, replica, replicas) for i, v in enumerate(variables)]
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))

    for number in steps:
        strategy.run(step, args=(number,))


def state_of(variables):
    return [v.numpy() for v in variables]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


class Model:
    """DiLoCo in NumPy: nodes with weights and moments of their own, an anchor, and outer momentum."""

    def __init__(self, nodes, sizes=SIZES):
        rng = np.random.default_rng(99)
        self.anchor = [rng.normal(size=size) for size in sizes]
        self.nodes, self.number = nodes, max(nodes) + 1
        self.weights = [[a.copy() for a in self.anchor] for _ in range(self.number)]
        self.moments = [[(np.zeros(size), np.zeros(size)) for size in sizes] for _ in range(self.number)]
        self.outer = [np.zeros(size) for size in sizes]
        self.steps = 0

    def gradients(self, node, number):
        """The gradient of the mean over the rows of a node: its replicas' parts, not scaled by the others'."""
        replicas, mine = len(self.nodes), [r for r, at in enumerate(self.nodes) if at == node]
        for i, weights in enumerate(self.weights[node]):
            parts = [gradient_of(weights, number, i, replica, replicas) for replica in mine]
            yield i, np.sum(parts, axis=0) * replicas / len(mine)

    def sgd(self, rate, number):
        for node in range(self.number):
            for i, gradient in list(self.gradients(node, number)):
                self.weights[node][i] = self.weights[node][i] - rate * gradient

    def adam(self, rate, number, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
        self.steps += 1
        scale = rate * np.sqrt(1 - beta_2**self.steps) / (1 - beta_1**self.steps)
        for node in range(self.number):
            for i, gradient in list(self.gradients(node, number)):
                m, v = self.moments[node][i]
                m, v = beta_1 * m + (1 - beta_1) * gradient, beta_2 * v + (1 - beta_2) * gradient**2
                self.moments[node][i] = m, v
                self.weights[node][i] = self.weights[node][i] - scale * m / (np.sqrt(v) + epsilon)

    def outer_step(self, rate, momentum):
        share = [self.nodes.count(node) / len(self.nodes) for node in range(self.number)]
        for i, anchor in enumerate(self.anchor):
            delta = anchor - sum(s * weights[i] for s, weights in zip(share, self.weights, strict=True))
            self.outer[i] = momentum * self.outer[i] + delta
            self.anchor[i] = anchor - rate * (delta + momentum * self.outer[i])
            for weights in self.weights:
                weights[i] = self.anchor[i].copy()

    def check(self, strategy, variables, tolerance=1e-12):
        node = self.nodes[strategy.rank]
        for variable, expected in zip(variables, self.weights[node], strict=True):
            np.testing.assert_allclose(variable.numpy(), expected, rtol=tolerance, atol=tolerance)

"""Local steps: nodes train by themselves, and take outer steps; against a NumPy model of DiLoCo in float64.

Nodes are ranks without shared memory, or made up on this machine: of 3 ranks one of two and one of one.
"""

import secrets

import numpy as np
import pytest
from process_groups import fake_nodes

import mpistrat as ms
from mpistrat.cluster.topology import Topology
from mpistrat.comm import job_files
from mpistrat.strategy.checkpoint import Checkpoint

SIZES = (7001, 15, 1, 3301)
pytestmark = pytest.mark.ranks(2, 3, 4)


def nodes_of(size, layout):
    """The node of each rank."""
    if layout == "private":
        return list(range(size))
    return [rank * 2 // size if size != 3 else rank // 2 for rank in range(size)]


@pytest.fixture(params=("private", "nodes"))
def layout(request, monkeypatch):
    if request.param == "private":
        monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")
    else:

        def create(comm=None, **more):
            from mpi4py import MPI

            comm = comm or MPI.COMM_WORLD
            return fake_nodes(comm, nodes_of(comm.size, "nodes"))

        monkeypatch.setattr(Topology, "create", create)
    return request.param


def opened(every, rate=0.7, momentum=0.9, **more):
    how = ms.LocalSteps(every, outer_learning_rate=rate, outer_momentum=momentum)
    return ms.MultiWorkerMirroredStrategy(local_steps=how, **more)


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


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_against_diloco_in_numpy(layout, rule):
    with opened(3) as strategy:
        model = Model(nodes_of(strategy.size, layout))
        build = {"sgd": lambda o: o.SGD(0.05), "adam": lambda o: o.Adam(0.01)}[rule]
        variables, optimizer = make(strategy, build)
        for number in range(8):  # two outer steps, and two steps more
            train(strategy, variables, optimizer, [number])
            getattr(model, rule)({"sgd": 0.05, "adam": 0.01}[rule], number)
            if number % 3 == 2:
                model.outer_step(0.7, 0.9)
            model.check(strategy, variables)
            assert strategy.nodes_differ == (number % 3 != 2)
        strategy.outer_step()  # cuts a round short
        model.outer_step(0.7, 0.9)
        model.check(strategy, variables)
        assert not strategy.nodes_differ
        train(strategy, variables, optimizer, [8, 9])
        assert strategy.nodes_differ  # the next round is a whole one
        train(strategy, variables, optimizer, [10])
        assert not strategy.nodes_differ


def test_every_step_is_synchronous_training_of_sgd(layout):
    """Means of weights after each step of SGD, from gradients of the means over nodes' rows, are those of one step together."""
    with opened(1, 1.0, 0.0) as strategy:
        variables, optimizer = make(strategy, lambda o: o.SGD(0.05))
        train(strategy, variables, optimizer, range(4))
        found = [v.numpy() for v in variables]
    rng = np.random.default_rng(99)
    expected = [rng.normal(size=size) for size in SIZES]
    for number in range(4):
        for i, weights in enumerate(expected):
            parts = [gradient_of(weights, number, i, replica, strategy.size) for replica in range(strategy.size)]
            expected[i] = weights - 0.05 * np.sum(parts, axis=0)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)

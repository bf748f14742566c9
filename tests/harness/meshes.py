"""A network of two layers, the first split by columns and the second by rows over a mesh, and the same in plain NumPy."""

import numpy as np

import mpistrat as ms
from tests.models import optimizer_reference as reference

LAYOUTS = {"w1": (None, "model"), "b1": ("model",), "w2": ("model", None), "b2": None}
CLIP = 0.5
BATCH, STEPS = 32, 12


def start():
    rng = np.random.default_rng(0)
    shapes = {"w1": (12, 16), "b1": (16,), "w2": (16, 4), "b2": (4,)}
    return {name: rng.normal(size=shape) / 3 for name, shape in shapes.items()}


def data():
    rng = np.random.default_rng(1)
    return rng.normal(size=(BATCH * STEPS // 2, 12)), rng.normal(size=(BATCH * STEPS // 2, 4))


def expected():
    """The last loss and the weights after all steps, by plain NumPy on whole batches."""
    weights, slots, (x, y) = start(), {name: {} for name in LAYOUTS}, data()
    rule, loss = reference.adam(), None
    for number in range(STEPS):
        rows = slice(number * BATCH % len(x), number * BATCH % len(x) + BATCH)
        before = x[rows] @ weights["w1"] + weights["b1"]
        hidden = np.maximum(before, 0)
        error = hidden @ weights["w2"] + weights["b2"] - y[rows]
        loss, error = (error**2).sum() / BATCH, 2 * error / BATCH
        back = (error @ weights["w2"].T) * (before > 0)
        gradients = {"w1": x[rows].T @ back, "b1": back.sum(axis=0), "w2": hidden.T @ error, "b2": error.sum(axis=0)}
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        for name, gradient in gradients.items():
            clipped = gradient * min(1, CLIP / norm)
            weights[name] = rule(weights[name], clipped, slots[name], number + 1, 0.01)
    return loss, weights


class Network:
    """The network under a MeshStrategy, with an optimizer or without one."""

    def __init__(self, strategy, values=None, trained=True):
        self.strategy = strategy
        values = start() if values is None else values
        with strategy.scope():
            self.variables = {n: ms.Variable(v, name=n, layout=LAYOUTS[n]) for n, v in values.items()}
        if trained:
            self.make_optimizer()

    def make_optimizer(self, **settings):
        with self.strategy.scope():
            self.optimizer = ms.optimizers.Adam(0.01, global_clipnorm=CLIP, **settings)

    def step(self, x, y):
        mesh = ms.get_replica_context().mesh
        w1, b1, w2, b2 = self.variables.values()
        before = x @ w1.array + b1.array
        hidden = np.maximum(before, 0)
        error = mesh.all_reduce("SUM", hidden @ w2.array, mesh_axis="model") + b2.array - y
        loss = (error**2).sum() / BATCH
        error = mesh.all_reduce_backward(2 * error / BATCH, mesh_axis="model")
        back = (error @ w2.array.T) * (before > 0)
        np.matmul(x.T, back, out=w1.grad)
        np.matmul(hidden.T, error, out=w2.grad)
        b1.grad[...], b2.grad[...] = back.sum(axis=0), error.sum(axis=0)
        self.optimizer.apply_gradients([(v.grad, v) for v in self.variables.values()])
        return loss

    def train(self):
        """Train; return the last loss."""
        loss = None
        batches = self.strategy.distribute_dataset(ms.data.from_arrays(data()).batch(BATCH))
        for _ in range(2):
            for batch in batches:
                loss = self.strategy.reduce("SUM", self.strategy.run(self.step, args=batch), axis=None)
        return loss

    def wholes(self):
        """The variables, and what the optimizer keeps of each, whole, on every rank. Collective."""
        found = {name: variable.gathered() for name, variable in self.variables.items()}
        for name, variable in self.variables.items():
            for slot, array in self.optimizer.slots(variable).items():
                found[f"{name} {slot}"] = array
        return found


def meshes(ranks):
    """All lengths of "data" and "model" for so many ranks."""
    return [{"data": data, "model": ranks // data} for data in range(1, ranks + 1) if ranks % data == 0]

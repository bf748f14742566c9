"""What the job of the campaign trains, by NumPy, PyTorch or JAX, with a rate that decays, which files and snapshots must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

import mpistrat as ms

COLUMNS, BATCH = 500, 8
DECAY = 0.98  # of the rate, after each step


class Model(Protocol):
    """Weights, their optimizer, and its scheduler."""

    objects: Mapping[str, Any]  # for Checkpoints

    def step(self, numbers: np.ndarray, x: np.ndarray) -> None:
        """Take a step with rows, which have numbers. Collective."""

    def decay(self) -> None:
        """Reduce the rate, after a step."""

    def content(self) -> list[bytes]:
        """Return all that must have the bits of the undisturbed job."""


class Plain:
    """Variables, and gradients by NumPy; the program sets the rate."""

    def __init__(self, strategy: Any) -> None:
        self.objects: Mapping[str, Any] = {}
        with strategy.scope():
            self._weights = (
                ms.Variable(np.zeros(COLUMNS), name="w"),
                ms.Variable(np.zeros(COLUMNS, np.float32), name="b"),
            )
            self._optimizer: Any = self._rule()

    def _rule(self) -> Any:
        return ms.optimizers.Adam(0.1)

    def step(self, numbers: np.ndarray, x: np.ndarray) -> None:
        w, b = self._weights
        gradients = (np.asarray(w) - x).sum(0) / BATCH, np.asarray(b) - x.astype(np.float32).sum(0)
        self._optimizer.apply_gradients(zip(gradients, (w, b), strict=True))

    def decay(self) -> None:
        self._optimizer.learning_rate *= DECAY

    def content(self) -> list[bytes]:
        slots = [self._optimizer.slots(v)[name] for v in self._weights for name in sorted(self._optimizer.slot_names)]
        return [np.asarray(array).tobytes() for array in (*self._read(), *slots)]

    def _read(self) -> list[Any]:
        return [v.numpy() for v in self._weights]


class Served(Plain):
    """Variables of parameter servers. Of asynchronous training only what each row adds is sure, and no rate decays."""

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self._reads = not strategy.is_server  # a server has some of them

    def _rule(self) -> Any:
        return ms.optimizers.Adagrad(0.1)

    def _read(self) -> list[Any]:
        return super()._read() if self._reads else []

    def step(self, numbers: np.ndarray, x: np.ndarray) -> None:
        ones = np.zeros(COLUMNS)
        ones[numbers] = 1
        w, b = self._weights
        self._optimizer.apply_gradients([(ones, w), (ones.astype(np.float32), b)])

    def decay(self) -> None:
        pass


class Torch:
    """A module of PyTorch with Adam, and a scheduler that computes the rate from steps that it counts itself."""

    def __init__(self, strategy: Any) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._torch = torch
        module = torch.nn.Sequential(torch.nn.Linear(COLUMNS, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)).double()
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        with strategy.scope():
            self._module, self._optimizer = ms.torch.distribute(module, optimizer)
        self._scheduler = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: DECAY**step)
        self.objects: Mapping[str, Any] = {"scheduler": self._scheduler}

    def step(self, numbers: np.ndarray, x: np.ndarray) -> None:
        self._optimizer.zero_grad()
        self._module(self._torch.from_numpy(x)).square().mean().backward()
        self._optimizer.step()

    def decay(self) -> None:
        self._scheduler.step()

    def content(self) -> list[bytes]:
        state = self._optimizer.state_dict()["state"]
        tensors = [*self._module.parameters(), *(state[n][key] for n in sorted(state) for key in sorted(state[n]))]
        rates = [str(group["lr"]).encode() for group in self._optimizer.param_groups]
        return [np.asarray(tensor.detach()).tobytes() for tensor in tensors] + rates


class Jax:
    """A tree of JAX with Adam of optax, whose schedule counts steps in its state."""

    objects: Mapping[str, Any] = {}

    def __init__(self, strategy: Any) -> None:
        import jax
        import jax.numpy as jnp
        import optax

        jax.config.update("jax_enable_x64", True)
        numbers = np.random.default_rng(0)
        tree = {
            "a": numbers.normal(size=(COLUMNS, 8)) / COLUMNS**0.5,
            "b": numbers.normal(size=(8, 4)).astype(np.float32),
        }
        with strategy.scope():
            self._params, self._optimizer = ms.jax.distribute(tree, optax.adam(optax.exponential_decay(0.01, 1, DECAY)))
        self._gradients = ms.jax.grad(
            jax.jit(lambda params, x: jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"]) ** 2))
        )

    def step(self, numbers: np.ndarray, x: np.ndarray) -> None:
        params = self._params  # of both replicas of a rank; apply returns when each has given its gradients
        self._params = ms.jax.apply(self._optimizer, self._gradients(params, x), params)

    def decay(self) -> None:
        pass

    def content(self) -> list[bytes]:
        weights = [np.asarray(self._params[name]).tobytes() for name in "ab"]  # moments and rates show in them
        return [*weights, str(self._optimizer.iterations).encode()]


MODELS: dict[str, Any] = {"numpy": Plain, "torch": Torch, "jax": Jax}

"""torch's update rules on blocks of weights, as an optimizer of ours.

The rules work element by element, so any block of any parameter may be updated apart, by the rank that owns it, with state that
lies in our slots. Adam's blocks go to torch's fused kernel at once, others to torch's own optimizer, whose one parameter becomes
each block in turn.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch

from ..errors import explain
from ..optimizers import Optimizer
from ..optimizers.rule import Block
from ..optimizers.settings import as_attribute, check_groups, group_settings
from .tensors import array_of, tensor_of

__all__ = ["TorchRule", "check_kind", "slots_of"]

ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "RAdam", "NAdam")
_KERNELS = {"Adam": getattr(torch, "_fused_adam_", None), "AdamW": getattr(torch, "_fused_adamw_", None)}
_OURS = {"foreach": False, "capturable": False, "differentiable": False, "fused": None}
_UNCOMPARED = {"params", "lr", "initial_lr", "param_names", *_OURS}
_UNSAVED = {"params", "param_names", *_OURS}


@final
class _BlockStep:
    """torch's step of one group on one block after the other. A thread's own.

    Attributes:
        revision: of the rule, whose numbers it has.
    """

    def __init__(self, kind: type[torch.optim.Optimizer], group: Mapping[str, Any], dtype: Any, revision: int) -> None:
        self.revision = revision
        decoupled = kind.__name__ == "Adam" and group.get("decoupled_weight_decay")
        self._kernel = _KERNELS.get("AdamW" if decoupled else kind.__name__)
        self._parameter = torch.nn.Parameter(torch.zeros(1, dtype=dtype))
        self._optimizer = kind([self._parameter], lr=1.0)  # type: ignore[call-arg]
        self._group = self._optimizer.param_groups[0]
        self._group.update({name: value for name, value in group.items() if name != "params"} | _OURS)
        self._raw_step = inspect.unwrap(kind.step)  # hooks of a profiler and a compiler take as long as a block
        self._step = torch.tensor(0.0)
        self._numbers: dict[str, Any] = {}
        if self._kernel is not None:
            beta1, beta2 = group["betas"]
            self._numbers = {
                "beta1": float(beta1),
                "beta2": float(beta2),
                "weight_decay": float(group["weight_decay"]),
                "eps": float(group["eps"]),
                "amsgrad": bool(group["amsgrad"]),
                "maximize": bool(group["maximize"]),
            }

    def names(self) -> list[str]:
        """Return the names of what torch keeps for each element: found by a step on one number."""
        self._parameter.grad = torch.zeros_like(self._parameter)
        with torch.no_grad():
            self._raw_step(self._optimizer)
        state = self._optimizer.state[self._parameter]
        return [name for name, value in state.items() if torch.is_tensor(value) and value.shape == (1,)]

    def update(self, block: Block, rate: float, scalars: Mapping[str, torch.Tensor]) -> None:
        """Update a block."""
        weights, gradient = tensor_of(block.weights), tensor_of(block.gradient)
        slots = {name: tensor_of(slot) for name, slot in block.slots.items()}
        if self._kernel is not None and not weights.is_cuda:
            self._call_kernel(weights, gradient, slots, block.step, rate)
            return
        parameter = self._parameter
        parameter.grad = None
        parameter.data, parameter.grad = weights, gradient
        self._group["lr"] = rate
        state = self._optimizer.state[parameter]
        state.clear()
        first = block.step == 1 and self._group.get("dampening", 0) != 0  # then torch begins with the gradient itself
        if not first:
            state.update(slots)
            state["step"] = self._step.fill_(block.step - 1)
            state.update({name: value.clone() for name, value in scalars.items()})
        with torch.no_grad():
            self._raw_step(self._optimizer)
        if first:
            for name, slot in block.slots.items():
                slot[...] = array_of(state[name])

    def _call_kernel(
        self, weights: torch.Tensor, gradient: torch.Tensor, slots: Mapping[str, torch.Tensor], step: int, rate: float
    ) -> None:
        averages, squares, largest = [slots["exp_avg"]], [slots["exp_avg_sq"]], []
        if self._numbers["amsgrad"]:
            largest = [slots["max_exp_avg_sq"]]
        steps = [self._step.fill_(step)]
        self._kernel([weights], [gradient], averages, squares, largest, steps, lr=rate, **self._numbers)  # type: ignore[misc]


@final
class TorchRule(Optimizer):
    """torch's rule, as an optimizer of ours.

    Attributes:
        rule: the name of torch's class.
        settings: the numbers of each group, which ranks compare.
        scale: what sums of gradients are multiplied by.
    """

    def __init__(
        self, kind: type[torch.optim.Optimizer], optimizer: torch.optim.Optimizer, replicas: int, limit: float | None
    ) -> None:
        self.kind, self._optimizer = kind, optimizer
        names, start = slots_of(kind, optimizer.param_groups)
        super().__init__(self._rate_of_first, slot_names=names, slot_start=start, global_clipnorm=limit)
        self.scale = 1.0 / replicas
        self.rule, self.settings = kind.__name__, _settings(optimizer.param_groups)
        self.__group_of: dict[Any, int] = {}  # not compared: the settings have the number of each
        self.__seen: list[dict[str, Any]] = []
        self.__local = threading.local()

    def _rate_of_first(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def follow(self) -> None:
        """Take over what the program, or a scheduler, has changed in the groups."""
        groups = self._optimizer.param_groups
        if groups == self.__seen:  # mostly of identities
            return
        settings = _settings(groups)
        if settings != self.settings:
            self.settings = settings
        changing = any(map(_has_tensor, groups))  # in place; then it would be equal to itself
        self.__seen = [] if changing else [dict(group) for group in groups]

    def get_settings(self) -> list[dict[str, Any]]:
        """Return what each group holds but for its parameters, as JSON holds it: files and snapshots have it."""
        return [group_settings(group, _UNSAVED) for group in self._optimizer.param_groups]

    def set_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Take the settings of each group, as torch's `load_state_dict` does; tensors are filled in place.

        Raises:
            ValueError: another number of groups.
        """
        groups = self._optimizer.param_groups
        check_groups(self.rule, settings, len(groups))
        for group, new in zip(groups, settings, strict=True):
            for name, value in new.items():
                if torch.is_tensor(group.get(name)):
                    group[name].fill_(value)
                elif name not in _UNSAVED:
                    group[name] = as_attribute(value, group.get(name))
        self.follow()

    @property
    def by_rows(self) -> bool:
        """Whether numbers whose gradient is zero stay as they are, so that an update of some rows is one of all."""
        still = self.rule == "Adagrad" or (self.rule == "SGD" and all(not each["momentum"] for each in self.settings))
        return still and all(not each["weight_decay"] for each in self.settings)

    def assign_group(self, variable: Any, group: int) -> None:
        """Say which group a variable belongs to."""
        self.__group_of[variable] = group

    def group_of(self, variable: Any) -> int:
        """Return the number of the variable's group."""
        return self.__group_of.get(variable, 0)

    def update(self, *_: Any) -> None:
        """Not called: see `update_block`."""
        raise NotImplementedError("TorchRule.update")

    def update_block(self, block: Block) -> None:
        """Update a block by torch's own optimizer."""
        if self.scale != 1:
            np.multiply(block.gradient, self.scale, out=block.gradient)
        group = self._optimizer.param_groups[block.group]
        self._block_step(block, group).update(block, float(group["lr"]), self.scalars(block.step, group))

    def _block_step(self, block: Block, group: Mapping[str, Any]) -> _BlockStep:
        known: dict[Any, Any] = self.__local.__dict__
        key = block.group, block.weights.dtype
        step = known.get(key)
        if step is None or step.revision != self.revision:
            step = known[key] = _BlockStep(self.kind, group, tensor_of(block.weights).dtype, self.revision)
        return step

    def scalars(self, step: int, group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return what torch keeps once for all elements, as it is before a step."""
        if self.rule != "NAdam":
            return {}
        known: dict[Any, Any] = self.__local.__dict__
        key = "mu_product", group["betas"][0], group["momentum_decay"]
        taken, product = known.get(key, (0, torch.ones(())))
        if taken > step - 1:
            taken, product = 0, torch.ones(())
        for i in range(taken + 1, step):
            product = product * (group["betas"][0] * (1.0 - 0.5 * 0.96 ** (i * group["momentum_decay"])))
        known[key] = step - 1, product
        return {"mu_product": product}


def _has_tensor(group: Mapping[str, Any]) -> bool:
    values = (value for name, value in group.items() if name != "params")
    return any(torch.is_tensor(part) for value in values for part in (value if isinstance(value, tuple) else (value,)))


def _number(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_number(part) for part in value)
    return float(value) if torch.is_tensor(value) else value


def _settings(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    chosen = [
        {name: _number(value) for name, value in group.items() if name not in _UNCOMPARED}
        | {"parameters": len(group["params"])}
        for group in groups
    ]
    for settings, group in zip(chosen[1:], groups[1:], strict=True):
        settings["lr"] = float(group["lr"])  # that of the first group is compared as the rule's own
    return chosen


def slots_of(kind: type[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], float]:
    """Return what torch's rule keeps for each element, and its value before the first step."""
    names = [name for group in groups for name in _BlockStep(kind, group, torch.float32, 0).names()]
    return tuple(dict.fromkeys(names)), float(groups[0].get("initial_accumulator_value", 0.0))


def check_kind(optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer's rule works on blocks.

    Raises:
        TypeError: it does not.
    """
    kind = type(optimizer)
    if kind.__name__ in ELEMENTWISE and kind is getattr(torch.optim, kind.__name__, None):
        return
    expected = f"one of torch.optim's {', '.join(ELEMENTWISE)}, which update each number by itself"
    remedy = (
        "Rules on whole tensors cannot be cut into slices: choose another, or write one with ms.optimizers.Optimizer"
    )
    got = f"{kind.__module__}.{kind.__qualname__}"
    raise TypeError(explain("ms.torch.distribute", "optimizer", expected=expected, got=got, remedy=remedy))

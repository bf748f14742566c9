"""The buffers of a distributed module: each replica writes its own, as BatchNorm its statistics; `eval` makes them equal."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch

from ..arena.values import checksum
from ..base import context
from ..base.errors import explain
from ..base.types import VariableAggregation, VariableSynchronization
from ..variables import Variable
from .tensors import array_of, tensor_of

__all__ = ["Buffers"]


class _Known(NamedTuple):
    """A buffer of one local replica: its name in the module, and the tensor that has the variable's memory."""

    place: str
    tensor: torch.Tensor


_known: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, _Known]] = (
    weakref.WeakKeyDictionary()
)  # by layer, then by name


@final
class Buffers:
    """The buffers of a module, of all local replicas. Making them is collective.

    Attributes:
        variables: by name: of statistics the mean over the replicas counts, of counters the first replica's.
    """

    def __init__(self, strategy: Any, replicas: Sequence[torch.nn.Module]) -> None:
        self._strategy = strategy
        self.variables: dict[str, Variable] = {}
        self._replicas = [weakref.ref(each) for each in replicas]
        for place, buffer in replicas[0].named_buffers():
            mean = buffer.is_floating_point()
            self.variables[place] = variable = Variable(
                array_of(buffer),
                name=place,
                synchronization=VariableSynchronization.ON_READ,
                aggregation=VariableAggregation.MEAN if mean else VariableAggregation.ONLY_FIRST_REPLICA,
            )
            for replica, each in enumerate(replicas):
                layer, name = _layer_of(each, place)
                tensor = tensor_of(variable.storage(replica))
                own = each.get_buffer(place)
                own.data = tensor
                _known.setdefault(layer, {})[name] = _Known(place, own)

    def average(self) -> None:
        """Replace the buffers that replicas have changed differently by their means. Collective.

        Raises:
            ContextError: in a step.
            RuntimeError: a buffer was replaced by one of another shape or dtype.
        """
        if not self.variables:
            return
        if context.current().strategy is self._strategy:
            context.expect_cross(self._strategy, "Module.eval")
        self.collect()
        replicas = len(self._replicas)
        digests = [
            checksum(np.ascontiguousarray(variable.storage(replica)).reshape(-1)) & ((1 << 62) - 1)
            for replica in range(replicas)
            for variable in self.variables.values()
        ]
        group = self._strategy.extended.placement.group
        with group.collective("Module.eval", "buffers", str(len(self.variables))):
            everyones = np.asarray(group.all_gather_int(digests)).reshape(-1, len(self.variables))
        for number, variable in enumerate(self.variables.values()):
            if (everyones[:, number] != everyones[0, number]).any():
                variable.assign(variable.numpy())

    def collect(self) -> None:
        """Copy what the program put in the places of buffers into their variables."""
        for reference in self._replicas:
            module = reference()
            for layer in module.modules() if module is not None else ():
                buffers = vars(layer)["_buffers"]
                for name in _known.get(layer, {}):
                    buffers[name] = _assigned(layer, name, buffers.get(name))


def _layer_of(module: torch.nn.Module, place: str) -> tuple[torch.nn.Module, str]:
    path, _, name = place.rpartition(".")
    return module.get_submodule(path), name


@torch.compiler.disable
def _assigned(layer: torch.nn.Module, name: str, value: torch.Tensor | None) -> torch.Tensor | None:
    """Return what stands in a buffer's place after an assignment: its own tensor with the value, or a value with a history."""
    known = _known[layer].get(name)
    if known is None or value is None or value is known.tensor:
        return value
    own = known.tensor
    if value.shape != own.shape or value.dtype != own.dtype or value.device != own.device:
        expected = f"a tensor {own.dtype}{tuple(own.shape)} on {own.device}, as when the module was distributed"
        got = f"{value.dtype}{tuple(value.shape)} on {value.device}"
        remedy = "Keep what changes its shape or dtype as a plain attribute, or convert the module before ms.torch.distribute"
        raise RuntimeError(
            explain(type(layer).__name__, f"buffer {known.place}", expected=expected, got=got, remedy=remedy)
        )
    with torch.no_grad():
        own.copy_(value)
    return value if value.requires_grad else own


def _registered(layer: torch.nn.Module, name: str, value: torch.Tensor | None) -> torch.Tensor | None:
    """Called by torch for each buffer that is registered or assigned, of any module."""
    return _assigned(layer, name, value) if layer in _known else None


torch.nn.modules.module.register_module_buffer_registration_hook(_registered)

"""A torch.optim optimizer that sums over the replicas and updates in one pass; its state is divided over the ranks."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling
from torch.optim import optimizer as base

from ..base import context
from ..base.errors import explain
from ..base.types import Quality
from ..comm.arrays import accumulation_dtype, to_host
from ..strategy.contexts import in_step, local_replica, stepping
from ..strategy.loss import summed_replicas
from ..variables import Variable
from ..variables.sharded import each_variable
from .closure import step_with_closure
from .loss_count import LossCount
from .module import TorchLink, check_parameters, forget_gradients, link_of, pairs_of_links
from .overlap import Overlap
from .rule import StepsTaken, TorchRule, is_elementwise, slots_of
from .tensors import array_of, tensor_of
from .torch_step import sums_of

__all__ = ["TorchOptimizer", "distribute_optimizer"]


class _OptimizerState(defaultdict[Any, Any]):
    """`optimizer.state` of a distributed optimizer: it can be cleared; its entries are in `state_dict()`."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(dict)
        self._optimizer = weakref.ref(optimizer)

    def clear(self) -> None:
        """Delete all state, as before the first step. Every rank must do it."""
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.load_state_dict({"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})

    def __missing__(self, parameter: Any) -> NoReturn:
        expected, got = (
            "optimizer.state_dict(), which all ranks call",
            "optimizer.state[parameter], whose state is divided over ranks",
        )
        raise RuntimeError(explain("Optimizer.state", "", expected=expected, got=got))

    def __setitem__(self, parameter: Any, state: Any) -> NoReturn:
        expected, got = "optimizer.load_state_dict(...), which all ranks call", "optimizer.state[parameter] = ..."
        raise RuntimeError(explain("Optimizer.state", "", expected=expected, got=got))


class TorchOptimizer(torch.optim.Optimizer):
    """Methods that `distribute` adds before those of an optimizer's class, in a subclass of both."""

    mpistrat_rule: TorchRule
    mpistrat_strategy: Any
    mpistrat_module: Any
    mpistrat_links: Sequence[Sequence[TorchLink]]  # of the parameters of each local replica
    mpistrat_overlap: Overlap | None
    mpistrat_counts: Sequence[LossCount]  # of each local replica
    mpistrat_weighs: bool  # True if losses are means, weighted by rows

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Sum the gradients over all replicas, and update. Collective.

        In replica context, or outside of `strategy.run` on ranks with one replica each. Hooks of the optimizer are called as in
        plain torch. Without any gradient nothing happens. A closure is called once before the update, and its loss, of this
        replica's rows, returned. An optimizer that calls it itself, such as LBFGS, gets the loss and the gradients of the whole
        batch in each call, and returns that loss.

        Raises:
            ContextError: outside of `strategy.run` on a rank with several local replicas.
            RuntimeError: a parameter has lost the memory of its variable; groups have other parameters than when distributed; a
                setting needs state that does not exist.
            CollectiveMismatchError: on every rank, when gradients are of different parameters, or ranks have other values.
            TypeError: no closure, for an optimizer that calls it itself.
            BatchError: the loss that a closure returns is of several batches, of which replicas have unequal shares.
        """
        if is_dynamo_compiling():  # asking costs less than torch.compiler.disable
            return _step_untraced(self, closure)
        if torch.is_inference_mode_enabled():  # tensors of that mode cannot be used later
            with torch.inference_mode(False):
                return self.step(closure)
        of_all = base._global_optimizer_pre_hooks or base._global_optimizer_post_hooks
        if of_all or self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks:
            return _with_hooks(self, closure)
        return self._step(closure)

    step.__dict__.update(
        hooked=True,  # as torch marks a step that calls hooks
        _wrapped_by_lr_sched=True,  # so that a scheduler does not wrap it
    )

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        whole = self.mpistrat_rule.on_whole_tensors
        if whole is not None and whole.calls_closure:
            return step_with_closure(self, whole, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.__dict__.update(_opt_called=True)  # torch's schedulers check it, for a warning
        strategy = self.mpistrat_strategy
        check_parameters(self.mpistrat_module, self._own_replica())
        remedy = "Put forward, backward and step into a function, and call that by strategy.run(step, args=(batch,))"
        in_step(strategy, self._apply, "Optimizer.step", remedy)
        return loss

    def _apply(self) -> None:
        rule = self.mpistrat_rule
        rule.follow()
        if self.mpistrat_overlap is not None:
            self.mpistrat_overlap.settle()
        replica = self._own_replica()
        pairs = pairs_of_links(self.mpistrat_links[replica], rule.by_rows)
        count = self.mpistrat_counts[replica]
        if count.value is not None:
            count.used = True
            rule.counts.append(count.value)
        rule.take(context.expect_replica("Optimizer.step"), pairs)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; assigning an empty `state` deletes all state, as before the first step."""
        if name != "state" or isinstance(value, _OptimizerState):
            super().__setattr__(name, value)
            return
        for parameter in value:
            self.state[parameter] = value[parameter]  # raises
        self.state.clear()

    def _own_replica(self) -> int:
        """Return this local replica; outside of steps, the first one."""
        return local_replica(self.mpistrat_strategy) if len(self.mpistrat_counts) > 1 else 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Delete the gradients: of this replica in a step, of all local ones outside."""
        if is_dynamo_compiling():
            _zero_grad_untraced(self, set_to_none)
            return
        own = slice(None)
        if len(self.mpistrat_counts) > 1 and stepping(self.mpistrat_strategy):
            own = slice(first := local_replica(self.mpistrat_strategy), first + 1)
        for links, count in zip(self.mpistrat_links[own], self.mpistrat_counts[own], strict=True):
            count.clear()
            forget_gradients(links, set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the module, also while training. All ranks must do it before the same step.

        Raises:
            ValueError: parameters that are not the distributed module's, or that a group has already.
            RuntimeError: with parameter servers or a rule on whole tensors; a group that needs state that does not exist.
        """
        if "mpistrat_rule" not in vars(self):
            super().add_param_group(param_group)
            return
        function = "Optimizer.add_param_group"
        rule, placement = self.mpistrat_rule, self.mpistrat_strategy.extended.placement
        lacking = placement.lacks(Quality.OWN_VARIABLES)
        if lacking or rule.on_whole_tensors is not None:
            why = lacking or f"{rule.rule}, which runs on whole tensors"
            remedy = "Give it all parameters before, and set requires_grad of those that are trained later"
            expected, got = "all groups before ms.torch.distribute", f"one after it, with {why}"
            raise RuntimeError(explain(function, "", expected=expected, got=got, remedy=remedy))
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        links = [link_of(parameter) for parameter in group["params"]]
        own = set(map(id, self.mpistrat_module.mpistrat_links))
        known = [link for link in links if link is not None and id(link.replicas[0]) in own and not link.optimized]
        try:
            if len(known) < len(links):
                expected = "parameters of the distributed module that no optimizer has"
                got = f"{len(links) - len(known)} that are not"
                remedy = "Add layers to the module before ms.torch.distribute, frozen ones if they are trained later"
                raise ValueError(explain(function, "", expected=expected, got=got, remedy=remedy))
            rule.add_group([link.variable for link in known])
        except BaseException:
            self.param_groups.pop()
            raise
        for link in known:
            link.optimized = True
        added = zip(*(link.replicas for link in known), strict=True)
        self.mpistrat_links = [(*old, *new) for old, new in zip(self.mpistrat_links, added, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state, as plain torch does, on every rank. Collective."""
        rule, state = self.mpistrat_rule, dict[int, dict[str, Any]]()
        whole = rule.on_whole_tensors
        for index, (group, parameter) in enumerate(self._parameters()):
            link = link_of(parameter)
            if link is not None and whole is not None:
                if found := whole.state_of(link.variable.name):
                    state[index] = found
                continue
            slots = {} if link is None or not parameter.requires_grad else rule.slots(link.variable)
            if link is not None and slots:
                taken = rule.taken_of(link.variable)
                if not taken.begun and taken.lag == rule.iterations:
                    continue
                kept = {name: tensor_of(slots[name]) for name in slots_of(rule.kind, [group])[0]}
                numbers = {"step": float(rule.iterations - taken.lag)} | taken.scalars
                made = {
                    name: torch.tensor(number, dtype=torch.float32, device="cpu") for name, number in numbers.items()
                }
                state[index] = made | kept
        return {**super().state_dict(), "state": state}

    def __reduce_ex__(self, protocol: Any) -> Any:
        expected, got = (
            "optimizer.state_dict(), which all ranks call",
            "the optimizer itself, whose state is divided over ranks",
        )
        raise TypeError(explain("Optimizer: copying or saving", "", expected=expected, got=got))

    def _parameters(self) -> Iterator[tuple[dict[str, Any], torch.nn.Parameter]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                yield group, parameter

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load a state of `state_dict`, or of plain torch. Every rank must load the same.

        Raises:
            ValueError: the groups differ.
        """
        rule, taken = self.mpistrat_rule, {}
        super().load_state_dict({**state_dict, "state": {}})
        self.state = _OptimizerState(self)
        rule.follow()
        states = state_dict["state"]
        steps = [int(state["step"]) for state in states.values() if "step" in state]
        if steps or not states:
            rule.iterations = max(steps, default=0)
        for index, (_, parameter) in enumerate(self._parameters()):
            state, link = states.get(index, {}), link_of(parameter)
            if link is not None and rule.on_whole_tensors is not None:
                rule.on_whole_tensors.load(link.variable.name, state)
                continue
            if link is None or not parameter.requires_grad:
                continue
            numbers = {name: value for name, value in state.items() if torch.is_tensor(value)}
            slots = {name: np.array(to_host(array_of(numbers[name]))) for name in rule.slot_names if name in numbers}
            for _, variable in each_variable([(None, link.variable)]):
                if state:
                    scalars = {
                        name: float(value)
                        for name, value in numbers.items()
                        if name not in slots and name != "step" and not value.shape
                    }
                    lag = rule.iterations - int(state.get("step", rule.iterations))
                    taken[variable] = StepsTaken(0, lag, _has_begun(state), scalars)
            if slots or any(link.variable is known for known in rule.variables):
                _give(rule, link.variable, slots)
        rule.load_taken(taken)


_step_untraced = torch.compiler.disable(TorchOptimizer.step)
_zero_grad_untraced = torch.compiler.disable(TorchOptimizer.zero_grad)


@torch.optim.Optimizer.profile_hook_step
def _with_hooks(optimizer: Any, closure: Callable[[], Any] | None) -> Any:
    return optimizer._step(closure)


def _give(rule: TorchRule, variable: Variable, slots: dict[str, Any]) -> None:
    """Set a variable's slots, now or at its first step."""
    starts = rule._core.slot_start
    slots |= {
        name: np.full(variable.shape, starts.get(name, 0.0), accumulation_dtype(variable.dtype))
        for name in rule.slot_names
        if name not in slots
    }
    if any(variable is known for known in rule.variables):
        rule.set_slots(variable, slots)
    else:
        rule._core.slots.pending[variable.name] = slots


def distribute_optimizer(
    module: Any,
    optimizer: torch.optim.Optimizer,
    max_norm: float | None,
    weighs: bool,
    overlap: bool,
    finds_unused: bool,
) -> None:
    """Make an optimizer of a distributed module's parameters a distributed one. Collective, in the strategy's scope."""
    strategy = module.mpistrat_strategy
    kind = type(optimizer)
    own = not strategy.extended.placement.lacks(Quality.OWN_VARIABLES)
    replicas = summed_replicas(strategy) if weighs and own else 1  # else each worker divides before it sends
    limit = None if max_norm is None else max_norm * replicas  # of the sum, not of the mean
    device = optimizer.param_groups[0]["params"][0].device
    sums = sums_of(strategy, device) if is_elementwise(kind) else None
    rule = TorchRule(kind, optimizer, replicas, limit, finds_unused, own, sums)
    links: list[TorchLink] = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            link = link_of(parameter)
            if link is not None:
                links.append(link)
                link.optimized = True
                for _, variable in each_variable([(None, link.variable)]):
                    rule.assign_group(variable, number)
    rule.serve([link.variable for link in links])
    before = optimizer.state_dict()
    vars(optimizer).pop("step", None)  # a scheduler's wrapper of the class's own step
    vars(optimizer).pop(
        "_step_supports_amp_scaling", None
    )  # of a fused rule: a GradScaler unscales before the step instead
    optimizer.__class__ = type(kind.__name__, (TorchOptimizer, kind), {"__module__": kind.__module__})
    distributed: Any = optimizer
    distributed.mpistrat_rule, distributed.mpistrat_strategy, distributed.mpistrat_module = rule, strategy, module
    distributed.mpistrat_links = tuple(zip(*(link.replicas for link in links), strict=True))
    distributed.mpistrat_counts = tuple(LossCount() for _ in strategy.extended.replicas)
    distributed.mpistrat_weighs = weighs
    distributed.mpistrat_overlap = Overlap(rule, strategy, links) if overlap else None
    optimizer.state = _OptimizerState(optimizer)
    if any(_has_begun(state) for state in before["state"].values()):
        distributed.load_state_dict(before)


def _has_begun(state: Mapping[str, Any]) -> bool:
    """Return whether a parameter's state is of at least one step: Adagrad has some from the start."""
    if "step" in state:
        return bool(state["step"])
    return any(value is not None for value in state.values())

"""torch's update rules on blocks of weights, as an optimizer of this package.

The rules are elementwise, so the rank that owns a block of a parameter can update it separately, with state in the package's
slots. Adam's blocks go to torch's fused kernel directly, others to torch's own optimizer, whose single parameter becomes each
block in turn. As in torch, each parameter counts the steps in which it had a gradient.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import threading
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from ..base import log
from ..base.errors import explain
from ..optimizers.foreign import ForeignRule
from ..optimizers.gradients import ReplicaPairs, pairs_of
from ..optimizers.rule import Block, UpdateRun
from ..optimizers.settings import as_attribute, check_groups, group_settings
from ..strategy.contexts import in_step
from ..variables import Variable, make_trainable
from .tensors import tensor_of
from .torch_step import BegunInBackward, GradientSums, OwnState, TorchStep, steps_by_torch
from .whole import TorchWholeRule

if TYPE_CHECKING:
    from .module import TorchLink

__all__ = ["StepsTaken", "TorchRule", "slots_of"]

ELEMENTWISE = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "Adamax", "RAdam", "NAdam", "ASGD", "Rprop")
_KERNELS = {"Adam": getattr(torch, "_fused_adam_", None), "AdamW": getattr(torch, "_fused_adamw_", None)}
_OURS = {"foreach": False, "capturable": False, "differentiable": False, "fused": None}
_WITH_SCALARS = ("NAdam", "ASGD")  # have numbers that all elements share
_UNCOMPARED = {"params", "lr", "initial_lr", "param_names"}
_UNSAVED = {"params", "param_names", *_OURS}


@final
class StepsTaken:
    """The number of steps of some variables of a group, and their state in torch that all elements share.

    Attributes:
        group: the number of the group.
        lag: the number of the optimizer's steps without a gradient of theirs.
        begun: True if they have state already, perhaps before any step: it was loaded.
        scalars: the shared state, by torch's name.
    """

    __slots__ = ("begun", "group", "lag", "next_scalars", "scalars")

    def __init__(
        self, group: int, lag: int = 0, begun: bool = False, scalars: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        self.group, self.lag, self.begun = group, lag, begun
        self.scalars = self.next_scalars = dict(scalars)

    def copy(self) -> StepsTaken:
        """Return a copy, for those variables whose steps differ from now on."""
        return StepsTaken(self.group, self.lag, self.begun, self.scalars)


@final
class _BlockStep:
    """torch's step of one group, on one block after the other. One per thread.

    Attributes:
        revision: of the rule, whose settings it has.
    """

    def __init__(self, kind: type[torch.optim.Optimizer], group: Mapping[str, Any], dtype: Any, revision: int) -> None:
        self.revision = revision
        decoupled = kind.__name__ == "Adam" and group.get("decoupled_weight_decay")
        self._kernel = _KERNELS.get("AdamW" if decoupled else kind.__name__)
        self._parameter = torch.nn.Parameter(torch.zeros(1, dtype=dtype, device="cpu"))
        self._optimizer = kind([self._parameter], lr=1.0)  # type: ignore[call-arg]
        self._at_once = bool(self._optimizer.state)  # Adagrad makes its state before the first step
        self._group = self._optimizer.param_groups[0]
        self._group.update({name: value for name, value in group.items() if name != "params"} | _OURS)
        self._raw_step = inspect.unwrap(kind.step)  # hooks of a profiler and a compiler take as long as a block
        self._count = np.zeros((), np.float32)  # the memory of the next: NumPy writes a number in less time
        self._step = torch.from_numpy(self._count)
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
        """Return the names of torch's state per element, by trying a step on one number."""
        state = self._tried(1, True, {}, 1.0)
        return [name for name, value in state.items() if torch.is_tensor(value) and value.shape == (1,)]

    def scalars(self, step: int, first: bool, scalars: Mapping[str, float], rate: float) -> dict[str, float]:
        """Return torch's state that all elements share, after a step."""
        state = self._tried(step, first, scalars, rate)
        return {
            name: float(value)
            for name, value in state.items()
            if name != "step" and torch.is_tensor(value) and not value.shape
        }

    def _tried(self, step: int, first: bool, scalars: Mapping[str, float], rate: float) -> Mapping[str, Any]:
        parameter = self._parameter
        parameter.grad = None
        parameter.data = torch.zeros(1, dtype=parameter.dtype, device="cpu")
        parameter.grad = torch.zeros_like(parameter)
        state = self._optimizer.state[parameter]
        if not self._at_once:
            state.clear()
            if not first:
                for name in self._known:
                    state[name] = torch.zeros(1, dtype=parameter.dtype, device="cpu")
                self._set_scalars(state, step, scalars)
        self._group["lr"] = rate
        with torch.no_grad():
            self._raw_step(self._optimizer)
        self._known = [name for name, value in state.items() if torch.is_tensor(value) and value.shape == (1,)]
        return state

    _known: Sequence[str] = ()

    def _set_scalars(self, state: dict[str, Any], step: int, scalars: Mapping[str, float]) -> None:
        self._count[()] = step - 1
        state["step"] = self._step
        for name, value in scalars.items():
            state[name] = torch.tensor(value, dtype=torch.float32, device="cpu")

    def update(self, block: Block, rate: float, step: int, first: bool, scalars: Mapping[str, float]) -> None:
        """Update a block.

        Args:
            block: the block.
            rate: the learning rate.
            step: the number of this step among those of the parameter, from 1.
            first: True if torch creates its state now.
            scalars: torch's state that all elements share.
        """
        weights, gradient = tensor_of(block.weights), tensor_of(block.gradient)
        slots = {name: tensor_of(slot) for name, slot in block.slots.items()}
        if self._kernel is not None:
            self._call_kernel(weights, gradient, slots, step, rate)
            return
        parameter = self._parameter
        parameter.grad = None
        parameter.data, parameter.grad = weights, gradient
        self._group["lr"] = rate
        state = self._optimizer.state[parameter]
        state.clear()
        first = first and not self._at_once
        if not first:
            state.update(slots)
            self._set_scalars(state, step, scalars)
        with torch.no_grad():
            self._raw_step(self._optimizer)
        if first:
            for name, slot in slots.items():
                if torch.is_tensor(state.get(name)):
                    slot.copy_(state[name])

    def _call_kernel(
        self, weights: torch.Tensor, gradient: torch.Tensor, slots: Mapping[str, torch.Tensor], step: int, rate: float
    ) -> None:
        averages, squares, largest = [slots["exp_avg"]], [slots["exp_avg_sq"]], []
        if self._numbers["amsgrad"]:
            largest = [slots["max_exp_avg_sq"]]
        self._count[()] = step
        steps = [self._step if weights.is_cpu else self._step.to(weights.device)]
        self._kernel([weights], [gradient], averages, squares, largest, steps, lr=rate, **self._numbers)  # type: ignore[misc]


@final
class TorchRule(ForeignRule):
    """torch's rule, as an optimizer of this package.

    Args:
        own: True if the ranks of the strategy store and update the variables themselves.

    Attributes:
        rule: the name of torch's class.
        settings: the settings of each group, which ranks compare.
        scale: the factor of sums of gradients.
        counts: the counts of the local replicas' losses in the step that starts, if losses are counted.
    """

    _function = "ms.torch.distribute"
    _remedy = "Take SGD, Adam, AdamW or another rule that updates each number by itself"
    _whole: TorchWholeRule | None

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        optimizer: torch.optim.Optimizer,
        replicas: int,
        limit: float | None,
        finds_unused: bool,
        own: bool,
        sums: GradientSums | None = None,
    ) -> None:
        self.kind, self._optimizer = kind, optimizer
        self.__finds_unused, self.__own = finds_unused, own
        whole = not is_elementwise(kind)
        names, start = ((), 0.0) if whole else slots_of(kind, optimizer.param_groups)
        name = f"torch {kind.__name__}{' on whole tensors' if whole else ''}"  # which files compare
        super().__init__(self._rate_of_first, slot_names=names, slot_start=start, global_clipnorm=limit, name=name)
        self._whole = TorchWholeRule(optimizer) if whole else None
        self.__own_state = self.__started = None
        if sums is not None:
            self.__own_state = OwnState(self, optimizer)
            self._core.begun = self.__started = BegunInBackward(sums)
        self.scale = 1.0 / replicas
        self.counts: list[int] = []
        # A step on blocks is the same with each of these settings; torch's own has other bits.
        self.__uncompared = _UNCOMPARED if whole or sums is not None else _UNCOMPARED | _OURS.keys()
        self.rule, self.settings = kind.__name__, self._settings()
        self.__taken = [StepsTaken(number) for number in range(len(optimizer.param_groups))]
        self.__taken_by: dict[Any, int] = {}  # not compared: the settings have the number of each group
        self.__variables: dict[int, list[Any]] = {}  # by group
        self.__frozen: set[Any] = set()  # variables without memory for gradients
        self.__together = False  # True if all have taken a step, and no state is shared by all elements
        self.__seen: list[dict[str, Any]] = []
        self.__served = [_read(group) for group in optimizer.param_groups]
        self.__local = threading.local()
        self.__held: list[list[int]] = []  # the ids of each group's parameters
        self.follow()

    def _rate_of_first(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])

    def follow(self) -> None:
        """Read changes of the groups by the program or a scheduler.

        Raises:
            RuntimeError: groups or their lists of parameters are others.
        """
        groups = self._optimizer.param_groups
        held = [list(map(id, group["params"])) for group in groups]
        if self.__held not in ([], held):
            expected = "the groups of parameters that were distributed, in their order"
            got = f"others, of {[len(group['params']) for group in groups]} parameters, in optimizer.param_groups"
            remedy = "Call optimizer.add_param_group to add parameters, and set requires_grad to leave some out"
            raise RuntimeError(explain(f"{self.rule}.step", "", expected=expected, got=got, remedy=remedy))
        self.__held = held
        if groups == self.__seen:  # mostly compares identities
            return
        settings = self._settings()
        if settings != self.settings:
            self._check_state(settings)
            self.settings = settings
        changing = any(map(_has_tensor, groups))  # in place, so it would equal itself
        self.__seen = [] if changing else [dict(group) for group in groups]

    def _settings(self) -> list[dict[str, Any]]:
        """Return the settings of each group that ranks compare."""
        groups = self._optimizer.param_groups
        chosen = [
            {name: _number(value) for name, value in group.items() if name not in self.__uncompared}
            | {"parameters": len(group["params"])}
            for group in groups
        ]
        for settings, group in zip(chosen[1:], groups[1:], strict=True):
            settings["lr"] = float(group["lr"])  # the first group's is compared as the rule's own
        return chosen

    def _check_state(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Raise RuntimeError if new settings need state that does not exist."""
        turned_on = [
            name
            for before, now in zip(self.settings, settings, strict=True)
            for name in now
            if name != "lr" and now[name] and not before.get(name)
        ]
        if turned_on:
            self._require_slots(", ".join(dict.fromkeys(turned_on)))

    def _require_slots(self, names: str) -> None:
        """Raise RuntimeError if the groups need state that does not exist; `names` are of settings."""
        if self._on_wholes:
            return
        needed = set(slots_of(self.kind, self._optimizer.param_groups)[0]) - set(self.slot_names)
        if needed:
            expected = (
                f"{names} to be on before ms.torch.distribute, where the state {', '.join(sorted(needed))} is made"
            )
            remedy = "Make the optimizer with it, if only with a small number, and change it later"
            raise RuntimeError(explain(f"{self.rule}.step", names, expected=expected, got="set later", remedy=remedy))

    def get_settings(self) -> list[dict[str, Any]]:
        """Return the settings of each group without its parameters, as JSON, for files and snapshots."""
        groups = enumerate(self._optimizer.param_groups)
        return [group_settings(group, _UNSAVED) | self._saved_steps(number) for number, group in groups]

    def _saved_steps(self, group: int) -> dict[str, Any]:
        """Return the steps of the variables of a group, as JSON."""
        numbers = [self._group_of(variable) for variable in self.__variables.get(group, [])]
        known = list(dict.fromkeys(numbers))
        taken = [self.__taken[number] for number in known]
        return {
            "steps": [[each.lag, each.begun, each.scalars] for each in taken],
            "steps_of": [known.index(number) for number in numbers] if len(known) > 1 else [],
        }

    def _restore_steps(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Restore the steps of each group that `_saved_steps` returned; older files have none."""
        found: dict[Any, StepsTaken] = {}
        for number, saved in enumerate(groups):
            steps = [StepsTaken(number, *each) for each in saved.get("steps", ())]
            variables = self.__variables.get(number, [])
            for variable, index in zip(variables, saved.get("steps_of") or [0] * len(variables), strict=True):
                if steps:
                    found[variable] = steps[index]
        if found:
            self.load_taken(found)

    def set_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Set each group's settings, as torch's `load_state_dict` does; tensors are filled in place.

        Raises:
            ValueError: another number of groups.
        """
        groups = self._optimizer.param_groups
        check_groups(self.rule, settings, len(groups))
        for group, new in zip(groups, settings, strict=True):
            for name, value in new.items():
                if torch.is_tensor(group.get(name)):
                    group[name].fill_(value)
                elif name not in _UNSAVED and name not in ("steps", "steps_of"):
                    group[name] = as_attribute(value, group.get(name))
        self._restore_steps(settings)
        self.__served = [_read(group) for group in groups]
        self.follow()

    @property
    def by_rows(self) -> bool:
        """True if elements without a gradient do not change, so rows can be updated alone."""
        still = self.rule == "Adagrad" or (self.rule == "SGD" and all(not each["momentum"] for each in self.settings))
        return still and all(not each["weight_decay"] for each in self.settings)

    def _update_whole(self, gradients: dict[str, Any], weights: dict[str, Any]) -> Mapping[str, Any]:
        """Return new weights, by torch's own step on whole tensors."""
        scaled = {name: gradient * gradient.dtype.type(self.scale) for name, gradient in gradients.items()}
        return super()._update_whole(scaled, weights)

    def mean_loss(self, total: float) -> float:
        """Return the loss of the whole batch, given the sum of the replicas' losses in the last step."""
        return total * self.scale / self._core.divisor

    @property
    def on_whole_tensors(self) -> TorchWholeRule | None:
        """The rule on whole tensors, with its state; None if it runs on blocks."""
        return self._whole

    def assign_group(self, variable: Any, group: int) -> None:
        """Set the group of a variable: one of those that the optimizer was created with."""
        self.__taken_by[variable] = group
        self._note(variable, group)

    def add_group(self, variables: Sequence[Any]) -> None:
        """Update more variables by the optimizer's last group, just added.

        Raises:
            RuntimeError: the group needs state that does not exist.
        """
        groups = self._optimizer.param_groups
        number = len(groups) - 1
        self._require_slots(", ".join(name for name in groups[-1] if name not in self.__uncompared))
        self.settings = self._settings()
        self.__taken.append(StepsTaken(number, self.iterations))
        for variable in variables:
            self.__taken_by[variable] = len(self.__taken) - 1
            self._note(variable, number)
        self.__together, self.__held = False, []
        self.follow()

    def _note(self, variable: Any, group: int) -> None:
        self.__variables.setdefault(group, []).append(variable)
        if not variable.trainable:
            self.__frozen.add(variable)

    def _group_of(self, variable: Any) -> int:
        """Return the number of the variables with the same steps as this one."""
        return self.__taken_by.get(variable, 0)

    def taken_of(self, variable: Any) -> StepsTaken:
        """Return the steps of a variable."""
        return self.__taken[self._group_of(variable)]

    def load_taken(self, taken: Mapping[Any, StepsTaken]) -> None:
        """Set the steps of variables; those that are not named have taken none."""
        self.__taken = [StepsTaken(number) for number in range(len(self._optimizer.param_groups))]
        known: dict[Any, int] = {}
        for group, variables in self.__variables.items():
            self.__taken[group].lag = self.iterations
            for variable in variables:
                found = taken.get(variable)
                key = None if found is None else (group, found.lag, found.begun, tuple(found.scalars.items()))
                if key is not None and key not in known:
                    known[key] = len(self.__taken)
                    self.__taken.append(StepsTaken(group, found.lag, found.begun, found.scalars))  # type: ignore[union-attr]
                self.__taken_by[variable] = group if key is None else known[key]
        self.__together = False
        self._core.steps.clear()

    def take(self, replica: Any, pairs: list[tuple[Any, Variable]]) -> None:
        """Take a replica's step, as `apply_gradients` of variables and parts of them. Collective; in replica context."""
        replica.merge_call(self._take_step, args=(ReplicaPairs(pairs), True))

    def _take_step(self, strategy: Any, pairs: Any, aggregate: bool) -> None:
        """Take a step; parameters without a gradient take none. Collective; in cross-replica context."""
        if not self.__own:
            self._check_served()
        else:
            self._core.divisor = self._all_counts(strategy) if self.counts else 1.0
            if self.__finds_unused:
                self._add_zeros(strategy, pairs_of(pairs))
            if not any(gradient is not None for each in pairs_of(pairs) for gradient, _ in each):
                with strategy.extended.process_group.collective(f"{self.rule}.step", "no gradient"):
                    return
            if self.__frozen:
                self._thaw({variable for gradient, variable in pairs_of(pairs)[0] if gradient is not None})
        if self._on_wholes or not self.__own:  # servers count themselves
            super()._take_step(strategy, pairs, aggregate)
            return
        given = pairs_of(pairs)[0]
        if self.__together and len(given) == len(self.__taken_by) == sum([each[0] is not None for each in given]):
            super()._take_step(strategy, pairs, aggregate)
            return
        stepping = self._stepping(given)
        if self.rule in _WITH_SCALARS:
            for number in stepping:
                taken, step = self.__taken[number], self.iterations + 1 - self.__taken[number].lag
                rate = float(self._optimizer.param_groups[taken.group]["lr"])
                first = not taken.begun and step == 1
                taken.next_scalars = self._trial(taken.group).scalars(step, first, taken.scalars, rate)
        super()._take_step(strategy, pairs, aggregate)
        for number, taken in enumerate(self.__taken):
            if number in stepping:
                taken.begun, taken.scalars = True, taken.next_scalars
            else:
                taken.lag += 1
        # Then a step in which all have gradients changes none of these counts.
        plain = self.rule not in _WITH_SCALARS
        self.__together = plain and all(taken.begun for taken in self.__taken)

    def begin_in_backward(self, strategy: Any, links: Sequence[TorchLink]) -> None:
        """Start to sum gradients that a backward pass has completed. Collective."""
        if self.__started is not None:
            self.__started.start(links)  # a backward pass has its own thread
            return
        remedy = "Call backward in the function that strategy.run runs"
        in_step(strategy, lambda: self.begin([link.variable for link in links]), "backward", remedy)

    def _run_on(self, variables: Sequence[Variable], left_out: Sequence[str]) -> UpdateRun:
        started, state = self.__started, self.__own_state
        if started is None or state is None:
            return super()._run_on(variables, left_out)
        if not steps_by_torch(variables):
            why = "parameters have 16 bits, or their slots are divided over nodes"
            log.once(logging.INFO, f"{self._function}: sums and updates go by CuPy: {why}")
            return super()._run_on(variables, left_out)
        return TorchStep(self, state, started, variables, left_out)

    def _add_zeros(self, strategy: Any, replicas: Sequence[list[tuple[Any, Any]]]) -> None:
        """Give a replica a gradient of zeros for each parameter that only has one on other replicas. Collective."""
        variables = list(self.__taken_by)
        known = [{variable: gradient for gradient, variable in pairs if gradient is not None} for pairs in replicas]
        group = strategy.extended.process_group
        with group.collective("find_unused_parameters"):
            counts = group.sum_int([any(variable in each for each in known) for variable in variables])
        self._thaw(set(itertools.compress(variables, counts)))
        for replica, (pairs, found) in enumerate(zip(replicas, known, strict=True)):
            for variable in itertools.compress(variables, counts):
                if variable not in found:
                    found[variable] = variable.gradient(replica)
                    found[variable][...] = 0
            pairs[:] = [(found.get(variable), variable) for variable in variables]

    def _all_counts(self, strategy: Any) -> float:
        """Return the sum of all replicas' counts of losses, by which the step divides. Collective.

        Raises:
            ValueError: on every rank, when all counts are 0.
        """
        counts = self.counts.copy()
        self.counts.clear()  # setting the attribute would make all ranks describe their settings anew
        group = strategy.extended.process_group
        with group.collective("counted_loss"):
            total = int(group.sum_int([sum(counts)])[0])
        if not total:
            expected, remedy = "a term of the loss on any replica", "Skip such steps, on all ranks"
            raise ValueError(
                explain("ms.torch.counted_loss", "count", expected=expected, got="0 in all", remedy=remedy)
            )
        return float(total)

    def _thaw(self, given: Set[Any]) -> None:
        """Allocate memory for gradients of parameters frozen when distributed. Collective."""
        for variable in [each for each in self.__taken_by if each in self.__frozen and each in given]:
            make_trainable(variable)
            self.__frozen.remove(variable)

    def _check_served(self) -> None:
        """Raise RuntimeError if settings have changed: servers have their own."""
        now = [_read(group) for group in self._optimizer.param_groups]
        if now == self.__served:
            return
        changed = {n for old, new in zip(self.__served, now, strict=True) for n in new if new[n] != old.get(n)}
        names = ", ".join(sorted(changed))
        expected, got = (
            "settings that stay, as servers update the parameters by their own optimizers",
            f"{names} changed on a worker",
        )
        remedy = (
            "Use an optimizer of ms.optimizers with a schedule (its gradients: ms.torch.gradients(module)), or a strategy "
            "without servers"
        )
        raise RuntimeError(explain(f"{self.rule}.step", names, expected=expected, got=got, remedy=remedy))

    def _stepping(self, pairs: Sequence[tuple[Any, Any]]) -> set[int]:
        """Return the numbers of the sets of variables that take this step, after splitting sets."""
        given = {variable for gradient, variable in pairs if gradient is not None}
        numbers = {self._group_of(variable) for variable in given}
        if len(given) == len(self.__taken_by):
            return numbers
        parted = {
            number: [v for v, n in self.__taken_by.items() if n == number and v not in given] for number in numbers
        }
        if any(parted.values()):
            for number, variables in parted.items():
                if variables:
                    self.__taken.append(self.__taken[number].copy())
                    self.__taken_by.update(dict.fromkeys(variables, len(self.__taken) - 1))
            self._core.steps.clear()
        return numbers

    def _update_by_library(self, block: Block) -> None:
        if self.scale != 1:
            np.multiply(block.gradient, self.scale, out=block.gradient)
        taken = self.__taken[block.group]
        group, step = self._optimizer.param_groups[taken.group], block.step - taken.lag
        first, rate = step == 1 and not taken.begun, float(group["lr"])
        scalars: Mapping[str, float] = taken.scalars
        if self.rule in _WITH_SCALARS and not self.__own:
            scalars = self._served_scalars(taken.group, step, rate)
        key = taken.group, block.weights.dtype
        self._kept(key, group, block.weights)[0].update(block, rate, step, first, scalars)

    def _served_scalars(self, group: int, step: int, rate: float) -> Mapping[str, float]:
        """Return torch's shared state before a step on a server, which counts all steps."""
        known: dict[Any, Any] = self.__local.__dict__
        taken: int
        scalars: dict[str, float]
        taken, scalars = known.get(("scalars", group), (0, {}))
        if taken >= step:
            taken, scalars = 0, {}
        trial = self._trial(group)
        for number in range(taken + 1, step):
            scalars = trial.scalars(number, number == 1, scalars, rate)
        known["scalars", group] = step - 1, scalars
        return scalars

    def _trial(self, number: int) -> _BlockStep:
        """Return the step of a group that computes torch's shared state."""
        trial, new = self._kept(("trial", number), self._optimizer.param_groups[number], np.zeros(1, np.float32))
        if new:
            trial.names()
        return trial

    def _kept(self, key: Any, group: Mapping[str, Any], weights: Any) -> tuple[_BlockStep, bool]:
        """Return this thread's step under a key, and whether it is new: the first, or with changed settings."""
        known: dict[Any, Any] = self.__local.__dict__
        step = known.get(key)
        if step is not None and step.revision == self._core.revision:
            return step, False
        step = known[key] = _BlockStep(self.kind, group, tensor_of(weights).dtype, self._core.revision)
        return step, True


def _read(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that its updates depend on."""
    left_out = _UNCOMPARED | _OURS.keys()
    return {name: _number(value) for name, value in group.items() if name == "lr" or name not in left_out}


def _has_tensor(group: Mapping[str, Any]) -> bool:
    values = (value for name, value in group.items() if name != "params")
    return any(torch.is_tensor(part) for value in values for part in (value if isinstance(value, tuple) else (value,)))


def _number(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_number(part) for part in value)
    return float(value) if torch.is_tensor(value) else value


def slots_of(kind: type[torch.optim.Optimizer], groups: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], float]:
    """Return the names of torch's state per element, and its value before the first step."""
    names = [name for group in groups for name in _BlockStep(kind, group, torch.float32, 0).names()]
    return tuple(dict.fromkeys(names)), float(groups[0].get("initial_accumulator_value", 0.0))


def is_elementwise(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether a rule is one of torch's elementwise rules."""
    return kind.__name__ in ELEMENTWISE and kind is getattr(torch.optim, kind.__name__, None)

"""The Optimizer: the common base of all update rules, and `apply_gradients`."""

from __future__ import annotations

import copy
import inspect
import logging
import re
import zlib
from abc import ABCMeta, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arena.values import check_name, checksum
from ..base import context, log
from ..base.arguments import integer
from ..base.errors import explain
from ..comm.arrays import accumulation_dtype, as_array, to_host
from ..variables.sharded import ShardedVariable, each_variable
from ..variables.variable import Variable
from .config import attributes_of, config_of, made_from
from .core import OptimizerCore
from .gradients import ReplicaPairs, check_rule, check_variables, pairs_of
from .hyperparameters import AVERAGE, GRADIENT_SUM, CommonSettings, Rate, as_rate, fixed_at
from .rule import Block, UpdateRule, UpdateRun
from .settings import as_attribute, changed, check_groups, saved_settings
from .slots import whole_slots

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Optimizer"]

_KEPT_STEPS = 1024  # cached steps, one for each set of variables with gradients


class _Counted(ABCMeta):
    """The metaclass that numbers an optimizer once it is complete: a server's thread finds optimizers by ordinal."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        made._core.take_next_ordinal()
        return made

    @property
    def __signature__(cls) -> inspect.Signature:
        """The arguments of the class; without this, `inspect` shows those of `__call__`."""
        kind: Any = cls
        return inspect.Signature(list(inspect.signature(kind.__init__).parameters.values())[1:])


class Optimizer(UpdateRule, metaclass=_Counted):
    """The base class of update rules. Subclass it for your own rule, with `__init__` and `update`.

    An update works on flat blocks, element by element, so it can run on any part of any variable: each rank of a node updates
    its part, and stores only the slots of that part.

    An optimizer serves the variables of one strategy. Its hyperparameters must be the same on every rank. Ranks compare its
    attributes that are numbers or lists of numbers; names with one leading underscore are compared at the first step. Use names
    with two for values that may differ between ranks, such as counters.

    Args:
        learning_rate: a number; a schedule, called once a step; or a callable without arguments, as in Keras, or with the
            number of previous steps.
        slot_names: the numbers stored for each weight between steps.
        slot_start: their value before the first step: one for all, or by name, 0 for the others.
        weight_decay: before each update, weights shrink by this fraction times the rate.
        clipnorm: scales each variable's gradient, summed over the replicas, down to at most this norm.
        clipvalue: clips each number of the sum to ± this.
        global_clipnorm: scales all gradients, summed over the replicas, down together to at most this norm. Only one of the
            three can be given. `clipnorm` and this one need memory for the sums, on each rank for its part.
        use_ema: store a moving average of each weight in the slot "average": ema_momentum · average + (1 - ema_momentum) ·
            weight. Each step updates the averages of all variables of the optimizer, also of those whose gradient is None.
        ema_momentum: from 0 to 1.
        ema_overwrite_frequency: every n-th step the weights become their averages; None for never: call
            `finalize_variable_values` at the end.
        loss_scale_factor: `scale_loss` multiplies losses by it, so that small 16-bit gradients do not become 0; sums of
            gradients are divided by it. `LossScaleOptimizer` adapts it.
        gradient_accumulation_steps: update the weights only at every n-th call, by the mean of the gradients since the last
            update; schedules count calls, `iterations` counts updates.
        check_numerics: raise if a summed gradient has a NaN or an infinity. It costs a pass over the gradients, and memory for
            them, on each rank for its part.
        name: default the class's.

    Raises:
        ValueError: a number out of range; two kinds of clipping.
        TypeError: learning_rate is neither a number nor callable.

    Source: keras.optimizers.Optimizer of Keras 3; `check_numerics` is an addition.
    """

    def __init__(
        self,
        learning_rate: Rate,
        *,
        slot_names: tuple[str, ...] = (),
        slot_start: float | Mapping[str, float] = 0.0,
        weight_decay: float | None = None,
        clipnorm: float | None = None,
        clipvalue: float | None = None,
        global_clipnorm: float | None = None,
        use_ema: bool = False,
        ema_momentum: float = 0.99,
        ema_overwrite_frequency: int | None = None,
        loss_scale_factor: float | None = None,
        gradient_accumulation_steps: int | None = None,
        check_numerics: bool = False,
        name: str | None = None,
    ) -> None:
        self.clipnorm = clipnorm
        self.clipvalue = clipvalue
        self.global_clipnorm = global_clipnorm
        self.loss_scale_factor = loss_scale_factor
        self.weight_decay = weight_decay
        self.use_ema = use_ema
        self.ema_momentum = ema_momentum
        self.ema_overwrite_frequency = ema_overwrite_frequency
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.check_numerics = check_numerics
        self._excluded = set()
        self._excluded_names = []
        self.name = name or type(self).__name__.lower()
        check_name(type(self).__name__, self.name)
        added = (AVERAGE,) * self.use_ema + (GRADIENT_SUM,) * bool(self.gradient_accumulation_steps)
        self.slot_names = (*slot_names, *added)
        starts = slot_start if isinstance(slot_start, Mapping) else dict.fromkeys(slot_names, slot_start)
        start = {name: float(number) for name, number in starts.items() if number}
        self._core = OptimizerCore(self, start)
        self.learning_rate = learning_rate

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set up a copy: a separate optimizer with its own ordinal."""
        self.__dict__.update(state)
        if self._core.optimizer is not self:  # of a shallow copy
            self._core = copy.copy(self._core)
            self._core.optimizer = self
        self._core.take_next_ordinal()

    def __setattr__(self, name: str, value: Any) -> None:
        core: OptimizerCore | None = self.__dict__.get("_core")
        fixed = "" if core is None else fixed_at(name, bool(core.steps))
        if fixed and value != getattr(self, name, value):
            remedy, expected = "Make another optimizer", f"the value that it {fixed} with"
            raise ValueError(explain(type(self).__name__, name, expected=expected, got=repr(value), remedy=remedy))
        super().__setattr__(name, value)
        if core is not None and not name.startswith("_"):
            core.describe_steps()

    def __repr__(self) -> str:
        return self._core.describe()

    # the rule

    @abstractmethod
    def update(
        self,
        gradient: Any,
        weights: Any,
        slots: Mapping[str, Any],
        step: int,
        rate: float,
        scratch: Sequence[Any],
    ) -> None:
        """Update a block of weights and slots in place. Threads may have a block each.

        Args:
            gradient: flat array, the sum over all replicas; it may be overwritten.
            weights: flat array of the same size and dtype, never 16-bit.
            slots: one array like it for each of `slot_names`.
            step: number of this step, counted from 1.
            rate: the learning rate.
            scratch: two flat arrays of the same dtype, at least as large.
        """

    def update_block(self, block: Block) -> None:
        """Update a block in a step: call `update` with its fields."""
        self.update(*block[:-1])

    def _slot_start(self) -> Mapping[str, float]:
        return self._core.start

    # rate and count

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step. Can be set to a number, a schedule or a callable, on every rank."""
        return self._core.rate_at(self._core.calls + 1)

    @learning_rate.setter
    def learning_rate(self, value: Rate) -> None:
        self._core.rate = as_rate(type(self).__name__, value)

    @property
    def iterations(self) -> int:
        """The number of updates so far. Can be set, on every rank."""
        return self._core.updates

    @iterations.setter
    def iterations(self, value: int) -> None:
        updates = integer(type(self).__name__, "iterations", value, 0)
        self._core.set_calls(updates * (self.gradient_accumulation_steps or 1))

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The variables updated or restored so far, in that order."""
        return tuple(self._core.variables)

    def exclude_from_weight_decay(
        self, var_list: Iterable[Variable] | None = None, var_names: Iterable[str] | None = None
    ) -> None:
        """Exclude variables from weight decay. Call it on every rank, before the first step.

        Args:
            var_list: variables.
            var_names: regular expressions, searched for in the names of variables.

        Raises:
            RuntimeError: after the first `apply_gradients`.
        """
        if self._core.steps:
            expected, got = "a call before the first apply_gradients", "a later one"
            function = f"{type(self).__name__}.exclude_from_weight_decay"
            raise RuntimeError(explain(function, "", expected=expected, got=got))
        # New containers: a server's thread may be reading the old ones.
        self._excluded = self._excluded.union(v for _, v in each_variable((None, v) for v in var_list or ()))
        self._excluded_names = [*self._excluded_names, *map(re.compile, var_names or ())]
        self._core.describe_steps()

    # steps

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable | ShardedVariable]],
        *,
        experimental_aggregate_gradients: bool = True,
        name: str | None = None,
    ) -> int:
        """Sum gradients over all replicas and update the variables, in one pass. Collective; in replica context.

        Gradients in `v.grad` are not copied; others are copied there. After the step `v.grad` is still this replica's own
        gradient, so a program can add to it; under `sharded_gradients` it is zeros again. Gradients are summed over replicas:
        scale the loss accordingly, with `ms.nn.compute_average_loss`. Constraints of variables are applied at the end.

        Args:
            grads_and_vars: pairs. Each gradient has its variable's shape, or is IndexedSlices, or None, on all replicas of all
                ranks, to leave the variable unchanged.
            experimental_aggregate_gradients: False if the gradients are already summed and equal on all replicas.
            name: accepted for TF's programs, without effect.

        Returns:
            `iterations`, the number of updates so far.

        Raises:
            ContextError: outside of `strategy.run`.
            ValueError: another shape than the variable's; no gradient at all; a variable twice, of another strategy, or without
                gradients; local replicas that differ.
            TypeError: a pair without a variable; numbers that do not fit the variable's dtype.
            CollectiveMismatchError: on every rank: ranks update other variables, or with other hyperparameters.
            FloatingPointError: on every rank, with `check_numerics`: a sum is not finite; no variable has changed.

        Example:
            >>> optimizer.apply_gradients([(w.grad, w), (b.grad, b)])  # doctest: +SKIP
            1
        """
        replica = context.expect_replica("apply_gradients")
        pairs = ReplicaPairs(each_variable(grads_and_vars))
        replica.merge_call(self._take_step, args=(pairs, bool(experimental_aggregate_gradients)))
        return self.iterations

    def scale_loss(self, loss: Any) -> Any:
        """Return a loss times `loss_scale_factor`, for the computation of gradients."""
        return loss if self.loss_scale_factor is None else loss * self.loss_scale_factor

    def begin(self, variables: Iterable[Variable | ShardedVariable]) -> None:
        """Start to sum the final gradients of some variables while others are still computed. Collective.

        Call it in replica context, on all replicas, with the same variables in the same order, each once per step. The next
        `apply_gradients` takes the sums, with the same bits as without this call. Do not change these gradients in `v.grad`
        before. A thread exchanges them between nodes; the first steps measure and log whether that is faster. On GPUs NCCL sums
        them, on one node too, and ranks do not wait for each other here.

        Under `sharded_gradients` the gradients are submitted: `v.grad` cannot be read or written until the end of the step, and
        its memory is free.

        Raises:
            ContextError, ValueError: outside of `strategy.run`; a variable twice, without gradients, or of another strategy.
            CollectiveMismatchError: on every rank: ranks pass other variables.

        Source: the overlap of torch.nn.parallel.DistributedDataParallel, arXiv:2006.15704.
        """
        replica = context.expect_replica("Optimizer.begin")
        if replica.strategy.extended.placement.store is None:
            pairs = ReplicaPairs(each_variable((None, variable) for variable in variables))
            replica.merge_call(lambda strategy, pairs: self._core.begun.add(strategy, pairs_of(pairs)), args=(pairs,))

    def _take_step(self, strategy: Any, pairs: Any, aggregate: bool) -> None:
        """Take a step with the local replicas' gradients, for `apply_gradients`. Collective; in cross-replica context."""
        core, replicas = self._core, pairs_of(pairs)
        for observer in context.OBSERVERS:
            observer.gradients(strategy, self, replicas, aggregate)
        key = tuple([id(variable) if gradient is not None else -id(variable) for gradient, variable in replicas[0]])
        step = core.steps.get(key)
        if step is None or step.strategy is not strategy:
            if len(core.steps) >= _KEPT_STEPS:
                core.steps.clear()
            step = core.steps[key] = self._new_step(strategy, replicas[0])
        try:
            if core.before_step is not None:
                core.before_step(step)
            core.begun.check(strategy, replicas, aggregate)
            step.load(replicas, key)
            step.run(aggregate)
            core.started += 1
            core.begun.note_step(strategy)
        except BaseException:
            core.forget_first_update(key)
            raise
        finally:
            core.begun.forget()
        if core.updated_first:
            core.updated_first = []
        for observer in context.OBSERVERS:
            observer.updated(strategy, self, replicas)

    def _new_step(self, strategy: Any, pairs: Sequence[tuple[Any, Variable]]) -> UpdateRun:
        """Return the step of the variables of some pairs. Call it on all ranks."""
        core = self._core
        chosen, left_out = check_variables(strategy, pairs)
        core.join(strategy)
        known, pending = set(map(id, core.variables)), core.slots.pending
        placement = chosen[0].placement
        new = [variable for variable in chosen if id(variable) not in known]
        if self.use_ema:  # all variables have averages, with or without a gradient
            others = [*left_out, *(v for v in placement.variables if v.name in pending)]
            known |= set(map(id, new))
            new += [
                v for v in dict.fromkeys(others) if id(v) not in known and v.arena is not None and v.arena.gradients
            ]
        check_rule(self, chosen)
        step: UpdateRun = placement.optimizers.make_step(self, chosen, left_out)
        core.updated_first = [variable for variable in new if variable.name not in pending]
        core.variables.extend(new)
        core.slots.fill_pending(new)
        return step

    def _run_on(self, variables: Sequence[Variable], left_out: Sequence[str]) -> UpdateRun:
        """Return the step of variables in arenas; `left_out` are names of those without a gradient. Call it on all ranks."""
        step: UpdateRun = variables[0].placement.steps.new_step(self._core, variables, left_out)
        return step

    # state

    def finalize_variable_values(self, var_list: Iterable[Variable | ShardedVariable]) -> None:
        """Overwrite variables with the averages of their weights, at the end of training with `use_ema`. Collective.

        Variables that were never updated are not changed.

        Raises:
            ValueError: the optimizer has no averages.
        """
        if not self.use_ema:
            expected, got = "an optimizer with use_ema=True", "use_ema=False"
            raise ValueError(explain("Optimizer.finalize_variable_values", self.name, expected=expected, got=got))
        for variable in var_list:
            average = self.slots(variable).get(AVERAGE)
            if average is not None:
                part = None if isinstance(variable, ShardedVariable) else variable.part
                variable.assign((average if part is None else part.cut(average)).astype(variable.dtype))

    def slots(self, variable: Variable | ShardedVariable) -> dict[str, np.ndarray]:
        """Return new arrays with a variable's slots, whole, on the host; {} if it was never updated. Collective.

        After `restore` they are those of the file, also before the first step. Slots of 16-bit variables are float32. A
        ShardedVariable has slots if one of its parts does; other parts have start values. Slots of a variable divided by a
        layout are whole, too.
        """
        if isinstance(variable, ShardedVariable):
            parts = [(part, self.slots(part)) for part in variable.variables]
            names = self.slot_names if any(slots for _, slots in parts) else ()
            return {name: np.concatenate([self._part_of(part, slots, name) for part, slots in parts]) for name in names}
        return whole_slots(variable.part, variable.placement.optimizers.read_slots(self, variable))

    def _part_of(self, part: Variable, slots: Mapping[str, np.ndarray], name: str) -> np.ndarray:
        """Return a slot of a part of a ShardedVariable; the start value if the part was never updated."""
        if slots:
            return slots[name]
        return np.full(part.shape, self._slot_start().get(name, 0.0), accumulation_dtype(part.dtype))

    def set_slots(self, variable: Variable | ShardedVariable, values: Mapping[str, Any]) -> None:
        """Overwrite a variable's slots; each rank takes its part. Call it on every rank.

        Args:
            variable: of this optimizer's strategy.
            values: arrays of the variable's shape, or of the whole's if it has a layout; one for each of `slot_names`.

        Raises:
            ValueError: names or shapes do not fit; the optimizer serves another strategy.
        """
        if isinstance(variable, ShardedVariable):
            cut = {name: variable.cut(value, "Optimizer.set_slots") for name, value in values.items()}
            for index, part in enumerate(variable.variables):
                self.set_slots(part, {name: rows[index] for name, rows in cut.items()})
            return
        core = self._core
        core.join(variable.placement.strategy)
        core.memory.write_slots(self, variable, values)
        core.slots.pending.pop(variable.name, None)
        given = {name: to_host(as_array(values[name], "Optimizer.set_slots", name)) for name in self.slot_names}
        wholes = whole_slots(variable.part, given)  # ranks compare these, also within a replica
        mine = checksum(*(np.ascontiguousarray(array).reshape(-1) for array in wholes.values()))
        core.slots_words = f", slots set #{zlib.crc32(f'{core.slots_words} {variable.name} {mine}'.encode()):08x}"
        core.describe_steps()
        if not any(variable is known for known in core.variables):
            core.variables.append(variable)

    def get_settings(self) -> list[dict[str, Any]]:
        """Return the numbers that a program may change: one dict for each group of variables.

        They are the public attributes that hold numbers or texts, or lists and dicts of them. "learning_rate" is None if a
        schedule or a callable computes it. Files and snapshots contain them. Optimizers of this package have one group.

        Example:
            >>> ms.optimizers.SGD(0.1, momentum=0.9).get_settings()[0]["momentum"]
            0.9
        """
        given = self._core.given_rate
        return [{"learning_rate": None if callable(given) else given, **saved_settings(self, self._core.unsaved)}]

    def set_settings(self, settings: Sequence[Mapping[str, Any]]) -> None:
        """Restore the settings of `get_settings`. Call it on every rank with the same.

        A schedule or a callable is not replaced by a number. If only one of this optimizer and the settings has a number as its
        learning rate, the learning rate is not changed, with a warning.

        Raises:
            ValueError: another number of groups.
        """
        check_groups(self.name, settings, 1)
        now = self.get_settings()[0]
        for name, value in changed(now, settings[0]).items():
            if name != "learning_rate":
                setattr(self, name, as_attribute(value, getattr(self, name)))
            elif value is not None and now[name] is not None:
                self.learning_rate = value
            else:
                what = ("a schedule", f"the number {value}") if now[name] is None else (f"{now[name]}", "a schedule")
                text = f"optimizer {self.name!r} keeps {what[0]} as its learning_rate: the saved state has {what[1]}"
                log.once(logging.WARNING, f"{text}. Set optimizer.learning_rate to continue with another one")

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of this optimizer as they are now, as JSON holds them. Local.

        Raises:
            TypeError: the learning rate is a callable of the program, or an optimizer of your own has an argument without an
                attribute of the same name: override this method.

        Example:
            >>> ms.optimizers.SGD(0.5, momentum=0.9).get_config()["momentum"]
            0.9
        """
        arguments = attributes_of(self, CommonSettings.__annotations__)
        if "learning_rate" in arguments:
            arguments["learning_rate"] = self._core.given_rate
        return config_of(self, arguments)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Self:
        """Return a new optimizer whose arguments are those of `get_config`, of this package or of Keras. Local.

        Args:
            config: the arguments by name.
            custom_objects: classes of the program by name, such as that of a schedule.

        Raises:
            ValueError: a schedule's class is not known.
            TypeError: an argument that the class does not have.

        Example:
            >>> config = {"learning_rate": 0.25, "beta_1": 0.5}
            >>> ms.optimizers.Adam.from_config(config).learning_rate
            0.25
        """
        return made_from(cls, config, custom_objects)

    def get_state(self) -> dict[str, Any]:
        """Return {"iterations": int, "settings": as `get_settings`, "slots": {name of variable: {name of slot: array}}}.

        Collective. With gradient accumulation, "iterations" counts the calls of `apply_gradients`. The slots include those of
        `set_state` for variables not updated since.
        """
        core = self._core
        return {"iterations": core.calls, "settings": self.get_settings(), "slots": dict(core.memory.each_slots(self))}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `get_state`, on any layout. Call it on every rank with the same.

        Slots of variables not updated yet are stored until their first update; variables without slots in the state get start
        values. Settings are not changed if the state has none.

        Raises:
            ValueError: slots of another optimizer, or of variables of another shape; settings of other groups.
        """
        self._core.set_counts(state["iterations"], state.get("settings"))
        self._core.restart_slots(None)
        self._core.fill_slots(state["slots"])

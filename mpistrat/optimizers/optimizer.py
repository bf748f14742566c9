"""The Optimizer: what all update rules have in common, and `apply_gradients`."""

from __future__ import annotations

import itertools
import weakref
import zlib
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .. import context
from ..comm.arrays import accumulation_dtype, as_array, to_host
from ..errors import explain
from ..variables.layout import Receiver
from ..variables.placement import ORDINAL_STEP, SlotsHere, Store
from ..variables.sharded import ShardedVariable, each_variable
from ..variables.values import checksum
from ..variables.variable import Variable
from .begun import Begun
from .fused_step import FusedStep
from .gradients import ReplicaPairs, check_rule, check_variables, pairs_of
from .hyperparameters import AVERAGE, GRADIENT_SUM, Rate
from .rule import Block, Rule, UpdateRun
from .slots import SlotStore, whole_slots

__all__ = ["Optimizer", "find", "known"]

_ordinals = itertools.count(step=ORDINAL_STEP)
_known: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
_KEPT_STEPS = 1024  # one for each set of variables that had gradients together


class Optimizer(Rule):
    """Updates variables by their gradients. Subclass it for a rule of your own: `__init__` and `update`.

    An update works on flat blocks, element by element, so that it may be done on any part of any variable: each rank of a
    node updates its part, and keeps the slots of that part only.

    An optimizer serves the variables of one strategy. Its hyperparameters must be the same on every rank: its attributes,
    numbers and lists of them, are compared, those under a name with one underscore as they are at the first step. What may
    differ from rank to rank, say a counter, belongs under a name with two.

    Args:
        learning_rate: a number; a schedule, which is called once a step; or a callable without an argument, as in Keras, or with
            one, the number of steps before.
        slot_names: what is kept for each weight between steps, one number each.
        slot_start: their value before the first step: one for all, or by name, 0 for the others.
        weight_decay: which part of each weight, times the rate, is taken off before each update.
        clipnorm: each variable's gradient, summed over the replicas, is scaled down so that its norm does not exceed it.
        clipvalue: each number of the sum is clipped to ± this.
        global_clipnorm: all gradients, summed over the replicas, are scaled down together so that their norm does not exceed
            it. Only one of the three may be given. `clipnorm` and this one need memory for the sums, each rank a part.
        use_ema: keep a moving average of each weight in the slot "average": ema_momentum · average + (1 - ema_momentum) · weight.
            Each step updates those of all variables that the optimizer knows, also of one whose gradient is None.
        ema_momentum: from 0 to 1.
        ema_overwrite_frequency: each so many steps the weights become their averages; None for never: call
            `finalize_variable_values` at the end.
        loss_scale_factor: what `scale_loss` multiplies losses by, so that small gradients of 16-bit numbers do not become 0; sums
            of gradients are divided by it. `LossScaleOptimizer` finds it by itself.
        gradient_accumulation_steps: update the weights at each so many-th call only, by the mean of the gradients since the
            last update; schedules count calls, `iterations` counts updates.
        check_numerics: refuse a step whose summed gradients have a NaN or an infinity. It costs a pass over the gradients, and
            memory for them, each rank a part.
        name: default the class's.

    Raises:
        ValueError: a number out of range; two kinds of clipping.
        TypeError: learning_rate is no number and cannot be called.

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
        self._take_settings(
            weight_decay,
            clipnorm,
            clipvalue,
            global_clipnorm,
            use_ema,
            ema_momentum,
            ema_overwrite_frequency,
            loss_scale_factor,
            gradient_accumulation_steps,
            check_numerics,
        )
        self._count()
        self.name = name or type(self).__name__.lower()
        added = (AVERAGE,) * self.use_ema + (GRADIENT_SUM,) * bool(self.gradient_accumulation_steps)
        self.slot_names = (*slot_names, *added)
        starts = slot_start if isinstance(slot_start, Mapping) else dict.fromkeys(slot_names, slot_start)
        self._slot_start = {name: float(start) for name, start in starts.items() if start}
        self._slots = SlotStore(self)
        self.begun = Begun()
        self._variables: list[Variable] = []
        self._strategy: Any = None
        self._ordinal: int
        self._steps: dict[tuple[int, ...], UpdateRun] = {}
        self.learning_rate = learning_rate

    def _count(self) -> None:
        placement = context.get_strategy().extended.placement if context.has_strategy() else None
        self._made_in: Store | None = None if placement is None else placement.store
        self._number = None if placement is None else (weakref.ref(placement), placement.note_optimizer(self))
        if placement is None or placement.store is None:
            self.take_ordinal(next(_ordinals))
            return
        self.take_ordinal(placement.store.next_ordinal())
        placement.optimizers.append(self)

    def take_ordinal(self, ordinal: int) -> None:
        """Have `find` find it by an ordinal."""
        self._ordinal = ordinal
        _known[ordinal] = self

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy."""
        return {name: value for name, value in vars(self).items() if name not in ("_made_in", "_number")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy: an optimizer of its own, counted like any other."""
        self.__dict__.update(state)
        self._count()

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
        """Update a block: what a step calls. It calls `update` with the block's fields."""
        self.update(*block[:-1])

    # identity

    @property
    def ordinal(self) -> int:
        """A number by which the same program names an optimizer on every rank: those of a scope are counted.

        In the scope of a ParameterServerStrategy each has its own count, elsewhere there is one. Copies, by
        `copy.deepcopy` or from a pickle, count as well: make them on every rank or on none.
        """
        return self._ordinal

    def number_in(self, placement: Any) -> int | None:
        """Return how many optimizers were made in a scope before this one; None if it was not made there."""
        if self._number is None or self._number[0]() is not placement:
            return None
        return self._number[1]

    @property
    def pending_slots(self) -> dict[str, dict[str, Any]]:
        """What `set_state` gave for variables that were not updated since, by name of variable."""
        return self._slots.pending

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The variables that were updated or restored so far, in that order."""
        return tuple(self._variables)

    # steps

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Variable | ShardedVariable]],
        *,
        experimental_aggregate_gradients: bool = True,
        name: str | None = None,
    ) -> int:
        """Sum gradients over all replicas and update the variables, in one pass. Collective; in replica context.

        A gradient that was written to `v.grad` is not copied; others are copied there. After the step `v.grad` is still this
        replica's own gradient, whatever the settings, so that a program can add to it; under `sharded_gradients` it is zeros
        again. The replicas' gradients are summed: scale the loss, with `ms.nn.compute_average_loss`, so that the sum is what you
        want. Constraints of variables are applied at the end.

        Args:
            grads_and_vars: pairs; each gradient has its variable's shape, or is IndexedSlices, or None, on all replicas
                of all ranks, where a variable shall stay as it is.
            experimental_aggregate_gradients: False if the gradients were summed already and are equal on all replicas.
            name: accepted for TF's programs, without effect.

        Returns:
            `iterations`, the number of updates so far.

        Raises:
            ContextError: outside of `strategy.run`.
            ValueError: another shape than the variable's; no gradient at all; a variable twice, one of another strategy,
                or one without gradients; local replicas that differ.
            TypeError: a pair without a variable; numbers that do not fit the variable's dtype.
            CollectiveMismatchError: on every rank, when they update other variables, or with other hyperparameters.
            FloatingPointError: on every rank, with `check_numerics`, when a sum is not finite; no variable has changed then.

        Example:
            >>> optimizer.apply_gradients([(w.grad, w), (b.grad, b)])  # doctest: +SKIP
            1
        """
        replica = context.expect_replica("apply_gradients")
        pairs = ReplicaPairs(each_variable(grads_and_vars))
        replica.merge_call(self.take_step, args=(pairs, bool(experimental_aggregate_gradients)))
        return self.iterations

    def scale_loss(self, loss: Any) -> Any:
        """Return a loss times `loss_scale_factor`: what gradients are computed of."""
        return loss if self.loss_scale_factor is None else loss * self.loss_scale_factor

    def begin(self, variables: Iterable[Variable | ShardedVariable]) -> None:
        """Start to sum the gradients of some variables, which are final, while others are still computed. Collective.

        In replica context, of all replicas, with the same variables in the same order, each once in a step. The next
        `apply_gradients` takes the sums: the same bits as without this call. Until then these gradients, in `v.grad`, must not
        be changed. A thread carries them between nodes; whether that takes less time is measured in the first steps, and logged.

        Under `sharded_gradients` the gradients are handed over: `v.grad` cannot be read or written until the step has ended, and
        its memory is free.

        Raises:
            ContextError, ValueError: outside of `strategy.run`; a variable twice, without gradients, or of another strategy.
            CollectiveMismatchError: on every rank, when they begin others.

        Source: the overlap of torch.nn.parallel.DistributedDataParallel, arXiv:2006.15704.
        """
        replica = context.expect_replica("Optimizer.begin")
        if replica.strategy.extended.placement.store is None:
            pairs = ReplicaPairs(each_variable((None, variable) for variable in variables))
            replica.merge_call(lambda strategy, pairs: self.begun.add(strategy, pairs_of(pairs)), args=(pairs,))

    def take_step(self, strategy: Any, pairs: Any, aggregate: bool) -> None:
        """Take a step with the local replicas' gradients: what `apply_gradients` merges. Collective; in cross-replica context."""
        replicas = pairs_of(pairs)
        key = tuple([id(variable) if gradient is not None else -id(variable) for gradient, variable in replicas[0]])
        step = self._steps.get(key)
        if step is None or step.strategy is not strategy:
            if len(self._steps) >= _KEPT_STEPS:
                self._steps.clear()
            step = self._steps[key] = self._new_step(strategy, replicas[0])
        try:
            self.begun.check(strategy, replicas, aggregate)
            step.load(replicas, key)
            step.run(aggregate)
            self._iterations += 1
            self.begun.note_step(strategy)
        finally:
            self.begun.forget()

    def join(self, strategy: Any) -> None:
        """Serve the variables of a strategy from now on; strategies and the first step do it.

        Raises:
            ValueError: it serves another strategy.
        """
        if self._strategy is None:
            strategy.extended.register_optimizer(self)
            self._strategy = strategy
            self._slots.join(strategy.extended.placement)
        elif strategy is not self._strategy:
            expected, got = "the strategy of the earlier steps", "another one"
            remedy = "Make an optimizer for each strategy"
            raise ValueError(explain("apply_gradients", self.name, expected=expected, got=got, remedy=remedy))

    def may_join(self, strategy: Any) -> bool:
        """Return whether it serves no other strategy."""
        return self._strategy is None or self._strategy is strategy

    def _new_step(self, strategy: Any, pairs: Sequence[tuple[Any, Variable]]) -> UpdateRun:
        chosen, left_out = check_variables(strategy, pairs)
        self.join(strategy)
        known = set(map(id, self._variables))
        placement = chosen[0].placement
        new = [variable for variable in chosen if id(variable) not in known]
        if self.use_ema:  # averages are of all variables, with a gradient or without
            others = [*left_out, *(v for v in placement.variables if v.name in self._slots.pending)]
            known |= set(map(id, new))
            new += [
                v for v in dict.fromkeys(others) if id(v) not in known and v.arena is not None and v.arena.gradients
            ]
        check_rule(self, chosen)
        if placement.store is not None:
            step: UpdateRun = placement.store.make_step(self, chosen)
        else:
            names, number = [variable.name for variable in left_out], self.number_in(placement)
            step = FusedStep(self, strategy, chosen, names, self._slots, self.begun, number, self._variables)
        self._variables.extend(new)
        self._slots.fill_pending(new)
        return step

    def take_outer_step(self) -> None:
        """Take an outer step now, if nodes have taken local ones: what `Strategy.outer_step` calls. Collective."""
        outer = self._slots.outer
        if outer is not None and outer.begun:
            outer.take()

    # state

    def finalize_variable_values(self, var_list: Iterable[Variable | ShardedVariable]) -> None:
        """Overwrite variables with the averages of their weights, at the end of training with `use_ema`. Collective.

        Variables that were never updated stay as they are.

        Raises:
            ValueError: the optimizer keeps no averages.
        """
        if not self.use_ema:
            expected, got = "an optimizer with use_ema=True", "one without"
            raise ValueError(explain("Optimizer.finalize_variable_values", self.name, expected=expected, got=got))
        for variable in var_list:
            average = self.slots(variable).get(AVERAGE)
            if average is not None:
                part = None if isinstance(variable, ShardedVariable) else variable.part
                variable.assign((average if part is None else part.cut(average)).astype(variable.dtype))

    def slots(self, variable: Variable | ShardedVariable) -> dict[str, np.ndarray]:
        """Return new arrays with a variable's slots, whole, on the host; {} if it was never updated. Collective.

        After `restore` they are those of the file, also before the first step. Slots of 16-bit variables are float32. A
        ShardedVariable has slots when all its parts have. Of one that is divided by a layout they are whole, too.
        """
        if isinstance(variable, ShardedVariable):
            parts = [self.slots(part) for part in variable.variables]
            return {name: np.concatenate([part[name] for part in parts]) for name in self.slot_names if all(parts)}
        if variable.placement.store is None and not any(variable is known for known in self._variables):
            waiting = self._slots.pending.get(variable.name, {}) if self.may_join(variable.placement.strategy) else {}
            known = {name: np.array(array) for name, array in waiting.items() if name in self.slot_names}
            return whole_slots(variable.part, known)
        return whole_slots(variable.part, self._slots.read(variable))

    def set_slots(self, variable: Variable | ShardedVariable, values: Mapping[str, Any]) -> None:
        """Overwrite a variable's slots; each rank takes its part. Every rank must do it.

        Args:
            variable: of the strategy that this optimizer serves.
            values: arrays of the variable's shape, or of the whole's if it has a layout; one for each of `slot_names`.

        Raises:
            ValueError: names or shapes do not fit.
        """
        if isinstance(variable, ShardedVariable):
            cut = {name: variable.cut(value, "Optimizer.set_slots") for name, value in values.items()}
            for index, part in enumerate(variable.variables):
                self.set_slots(part, {name: rows[index] for name, rows in cut.items()})
            return
        self._slots.write(variable, values)
        given = {name: to_host(as_array(values[name], "Optimizer.set_slots", name)) for name in self.slot_names}
        wholes = whole_slots(variable.part, given)  # what is compared, by the ranks of a replica, too
        mine = checksum(*(np.ascontiguousarray(array).reshape(-1) for array in wholes.values()))
        self._slots_words = f", slots set #{zlib.crc32(f'{self._slots_words} {variable.name} {mine}'.encode()):08x}"
        self._describe_steps()
        if not any(variable is known for known in self._variables):
            self._variables.append(variable)

    def get_state(self) -> dict[str, Any]:
        """Return {"iterations": int, "slots": {name of variable: {name of slot: array}}}. Collective.

        Where gradients are accumulated, "iterations" counts the calls of `apply_gradients`. What `set_state` gave for variables
        that were not updated since is in it.
        """
        return {"iterations": self._iterations, "slots": dict(self.each_slots())}

    def each_slots(self) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        """Yield each variable's name with its slots, as `slots` gives them, one variable at a time. Collective.

        What `set_state` gave for variables that were not updated since is among them.
        """
        store = self._store()
        if store is not None:
            yield from store.each_slots(self)
            return
        strategy = self._strategy
        variables = [] if strategy is None else strategy.extended.placement.variables
        parts = {variable.name: variable.part for variable in variables}
        for name, slots in self.slots_of_parts():
            yield name, whole_slots(parts.get(name), slots)

    def slots_of_parts(self) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        """Yield what `each_slots` does, but of what a replica's ranks divide this rank's part. Collective; for files.

        What waits for a first update may be whole.
        """
        yield from self._slots.pending.items()
        for variable in self._variables:
            if self._slots.stored_of(variable):
                yield variable.name, self._slots.read(variable)

    def slots_here(
        self, writers: Collection[int] | None, all_else: bool, each_node: bool = False
    ) -> Iterator[SlotsHere]:
        """Yield this rank's part of the slots of each variable, each element on one rank; for files. Collective.

        Args:
            writers: the ranks that write; None for all, among whom nodes divide what they have alike.
            all_else: whether this rank gives what all ranks have alike: what waits for the first update.
            each_node: whether the ranks of each node give all.
        """
        store = self._store()
        if store is not None:
            yield from store.slots_here(self, writers, each_node)
            return
        yield from self._slots.waiting(writers, all_else, each_node)
        for variable in self._variables:
            if not self._slots.stored_of(variable) and self._slots.outer is None:
                continue
            parts = self._slots.here(variable, writers, each_node)
            yield variable.name, variable.shape, accumulation_dtype(variable.dtype), parts

    def all_iterations(self) -> int:
        """Return the number of calls that all ranks made, together where they step together. Collective."""
        store = self._store()
        return self._iterations if store is None else store.iterations(self)

    def _store(self) -> Store | None:
        """The store of the slots, where these are not beside arenas."""
        return self._made_in if self._strategy is None else self._strategy.extended.placement.store

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Take over what `get_state` gave, on any layout. Every rank must do it.

        Slots of variables that this optimizer has not updated yet are kept until it does.

        Raises:
            ValueError: slots of another optimizer, or of variables of another shape.
        """
        self._iterations = self._counted_from = int(state["iterations"])
        self._describe_steps()
        self._slots.forget_unsent()
        if self._slots.outer is not None:
            self._slots.outer.reset()
        self._slots.pending = {name: dict(values) for name, values in state["slots"].items()}
        self._slots.fill_pending(self._variables)

    def take_slots(self, variable: Variable, names: Collection[str]) -> dict[str, Receiver] | None:
        """Return what this rank takes of a variable's slots that are read from a file, by name. All ranks call it.

        None where they must be given whole, to `set_state`: they are others, or kept elsewhere, or averages, which begin with
        the weights of the first step, or nodes train by themselves.
        """
        if self._store() is not None or self._slots.outer is not None or variable.arena is None or self.use_ema:
            return None
        if set(names) != set(self._slots.stored_of(variable)):
            return None
        if not any(variable is known for known in self._variables):
            self._variables.append(variable)
        return {name: self._slots.receiver(variable, name) for name in names}


def find(ordinal: int) -> Optimizer | None:
    """Return the optimizer with an ordinal, if this process has made it and still has it.

    Example:
        >>> optimizer = ms.optimizers.SGD(0.1)
        >>> find(optimizer.ordinal) is optimizer
        True
    """
    return _known.get(ordinal)


def known() -> list[Optimizer]:
    """Return the optimizers that this process has made and still has, by ordinal."""
    return [optimizer for _, optimizer in sorted(_known.items())]

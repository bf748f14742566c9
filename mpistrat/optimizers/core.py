"""The core of an optimizer: its counts, steps and slots, for steps, strategies and files."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..arena.layout import Receiver
from ..base import context, log
from ..base.errors import explain
from ..base.limits import AT_LEAST_ZERO
from ..comm.arrays import accumulation_dtype
from ..variables.placement import ORDINAL_STEP, OptimizerMemory, SlotsHere
from ..variables.variable import Variable
from .begun import Begun
from .hyperparameters import CallableRate, Rate, numbers_of, private_numbers_of
from .rule import UpdateRule, UpdateRun
from .schedules import LearningRateSchedule
from .settings import changed
from .slots import SlotStore, waiting_slots, whole_slots

if TYPE_CHECKING:
    from .device_scale import DeviceLossScale

__all__ = ["ArenaMemory", "OptimizerCore", "find", "known"]

_ROUNDING = 1e-12  # of a schedule that ends at 0
_ordinals = itertools.count(step=ORDINAL_STEP)
_known: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class OptimizerCore:
    """The counts, steps and slots of one optimizer, for the package's own use.

    Attributes:
        optimizer: the optimizer.
        ordinal: a number that identifies it on every rank of the same program. Each scope of a ParameterServerStrategy has its
            own count, all else shares one. Copies, by `copy.deepcopy` or from a pickle, count too: make them on every rank or
            on none.
        taken: the number of steps of each set of variables that all ranks have started, by names. It schedules the comparison
            of weights, so refused steps do not count.
        started: the number of calls of `apply_gradients`, with those that a GPU has skipped since the host last asked; equal on
            all ranks.
        rate: the learning rate, as it was set.
        revision: a number that grows whenever an attribute is set: `describe` may have changed.
        strategy: the strategy that it serves; None before the first step.
        variables: those updated or restored so far, in that order.
        updated_first: those that the current step updates for the first time.
        steps: the step of each set of variables that had gradients together.
        slots: the slots of all variables.
        slots_words: a hash of the arguments of `set_slots`, which ranks compare.
        begun: the variables passed to `begin` since the last step.
        unsaved: the settings that are not in files: the program, or a wrapping optimizer, sets them.
        divisor: divides the next step's sums of gradients, equal on all ranks.
        before_step: called with each step before it is taken: a LossScaleOptimizer's.
        overflow: the LossScaleOptimizer's part on the GPU, if that decides which steps are skipped.
        start: the value before the first step of each slot that does not start at 0, as given.
    """

    ordinal: int
    rate: Rate

    def __init__(self, optimizer: UpdateRule, start: Mapping[str, float]) -> None:
        self.optimizer, self.start = optimizer, start
        self.started, self.revision = 0, 0
        self.before_step: Callable[[UpdateRun], None] | None = None
        self.overflow: DeviceLossScale | None = None
        self.strategy: Any = None
        self.variables: list[Variable] = []
        self.updated_first: list[Variable] = []
        self.steps: dict[tuple[int, ...], UpdateRun] = {}
        self.taken = Counter[str]()
        self.slots = SlotStore(optimizer)
        self.slots_words = ""
        self.begun: Any = Begun()  # a framework's adapter may replace it
        self.divisor = 1.0
        self._counted_from = 0  # compared: ranks count equal steps, but may set other numbers
        self._private_words = ""
        self.unsaved: frozenset[str] = frozenset()
        self._made_in: OptimizerMemory
        self._number: tuple[weakref.ref[Any], int] | None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which `take_next_ordinal` completes."""
        state = {name: value for name, value in vars(self).items() if name not in ("_made_in", "_number")}
        return {**state, "started": self.calls, "before_step": None, "overflow": None}

    # identity

    def take_next_ordinal(self) -> None:
        """Register the complete optimizer for `find`, with the next ordinal."""
        placement = context.get_strategy().extended.placement if context.has_strategy() else None
        self._made_in = _NO_STRATEGY if placement is None else placement.optimizers
        self._number, self.taken = None, Counter()
        if placement is not None:
            self._number = weakref.ref(placement), placement.note_optimizer(self.optimizer)
        self.take_ordinal(self._made_in.next_ordinal())

    def take_ordinal(self, ordinal: int) -> None:
        """Register the optimizer for `find`, with an ordinal."""
        self.ordinal = ordinal
        _known[ordinal] = self.optimizer

    def number_in(self, placement: Any) -> int | None:
        """Return the number of optimizers created in a scope before this one; None if it was created elsewhere."""
        if self._number is None or self._number[0]() is not placement:
            return None
        return self._number[1]

    def join(self, strategy: Any) -> None:
        """Start to serve the variables of a strategy; strategies and the first step call it.

        Raises:
            ValueError: it serves another strategy.
        """
        if self.strategy is None:
            strategy.extended.register_optimizer(self.optimizer)
            self.strategy = strategy
            self.slots.join(strategy.extended.placement)
        elif strategy is not self.strategy:
            expected, got = "the strategy of the earlier steps", "another strategy"
            remedy = "Create one optimizer for each strategy"
            raise ValueError(explain("apply_gradients", self.optimizer.name, expected=expected, got=got, remedy=remedy))

    def may_join(self, strategy: Any) -> bool:
        """Return whether it serves no other strategy."""
        return self.strategy is None or self.strategy is strategy

    # counts, rate and decay

    @property
    def calls(self) -> int:
        """The number of calls of `apply_gradients` that were not skipped: more than `iterations` with gradient accumulation.

        If a GPU decides about that, the host waits for it.
        """
        return self.started - (0 if self.overflow is None else self.overflow.skipped)

    @property
    def updates(self) -> int:
        """The number of updates so far."""
        return self.calls // (self.optimizer.gradient_accumulation_steps or 1)

    def update_of(self, call: int) -> int:
        """Return the number of the update that a call belongs to, both counted from 1."""
        return (call - 1) // (self.optimizer.gradient_accumulation_steps or 1) + 1

    def set_calls(self, calls: int) -> None:
        """Set the number of calls; ranks compare it, because they may set different numbers."""
        self.started = self._counted_from = calls
        self.overflow = None

    def count_on_host(self) -> None:
        """Take the count over from a GPU that has decided about overflow, which the host waits for."""
        self.started, self.overflow = self.calls, None

    def updates_at(self, call: int) -> bool:
        """Return whether a call of `apply_gradients`, counted from 1, is an update."""
        return call % (self.optimizer.gradient_accumulation_steps or 1) == 0

    def changes_weights(self, call: int) -> bool:
        """Return whether a call changes weights: updates do, and calls that may overwrite them with averages."""
        return self.updates_at(call) or self.optimizer.ema_overwrite_frequency is not None

    @property
    def given_rate(self) -> Rate:
        """The value given as `learning_rate`: a number, a schedule, or a callable."""
        return self.rate.function if isinstance(self.rate, CallableRate) else self.rate

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1.

        Raises:
            ValueError: a schedule or callable returned NaN, an infinity or a negative number.
        """
        rate = self.rate
        if not callable(rate):
            return rate
        found = float(rate(step - 1))
        found = 0.0 if -_ROUNDING < found < 0 else found
        if not AT_LEAST_ZERO.legal(found):
            kind, got = type(self.optimizer).__name__, f"{found} from {rate} in step {step}"
            raise ValueError(explain(kind, "learning_rate", expected=AT_LEAST_ZERO.text, got=got))
        return found

    def decay_of(self, variable: Variable) -> float:
        """Return the fraction of a variable's weights that, times the rate, is subtracted before each update."""
        optimizer = self.optimizer
        if variable in optimizer._excluded or any(p.search(variable.name) for p in optimizer._excluded_names):
            return 0.0
        return optimizer.weight_decay or 0.0

    def group_of(self, variable: Variable) -> int:
        """Return the number of a variable's group; groups have their own hyperparameters."""
        return self.optimizer._group_of(variable)

    # the rule's hooks for passes of a step

    @property
    def passes(self) -> tuple[str, ...]:
        """The passes over kept sums before the update; none if the rule updates while it sums."""
        optimizer = self.optimizer
        clips = optimizer.clipnorm is not None or optimizer.global_clipnorm is not None or self.check_numerics
        return ("unscale",) * (self.overflow is not None) + ("clip",) * clips + optimizer._passes

    @property
    def check_numerics(self) -> bool:
        """True if the host checks that sums are finite."""
        return self.optimizer.check_numerics and self.overflow is None

    @property
    def may_skip(self) -> bool:
        """True if nothing but numbers of the rule's kernel depends on the number of a step."""
        rule = self.optimizer
        counts = rule.use_ema or rule.gradient_accumulation_steps or isinstance(self.rate, CallableRate)
        return not (counts or rule._passes) and rule._kernel(1, 0.0) is not None

    def ratio(self, weights: float, direction: float, size: int, rate: float) -> float:
        """Return the factor of a variable's direction in the next update, see `UpdateRule._ratio`."""
        return self.optimizer._ratio(weights, direction, size, self.updates + 1, rate)

    def update_whole(self, gradients: dict[str, Any], weights: dict[str, Any]) -> Mapping[str, Any]:
        """Return new weights by name of variable, see `UpdateRule._update_whole`."""
        return self.optimizer._update_whole(gradients, weights)

    def store_whole(self) -> None:
        """Store this rank's part of the rule's state, see `UpdateRule._store_whole`."""
        self.optimizer._store_whole()

    # settings, and their comparison between ranks

    def describe(self, without: Collection[str] = ()) -> str:
        """Return the rule and its numbers as text, which ranks compare, without the named settings."""
        optimizer = self.optimizer
        rate: Any = self.rate
        if isinstance(rate, LearningRateSchedule) and not is_dataclass(rate):
            rate = f"{type(rate).__name__}({numbers_of(rate)})"
        counted = f", counted from {self._counted_from}" if self._counted_from else ""
        self._private_words = self._private_words or private_numbers_of(optimizer)
        excluded = [*sorted(v.name for v in optimizer._excluded), *(p.pattern for p in optimizer._excluded_names)]
        spared = f", without decay of {excluded}" if excluded else ""
        words = f"{numbers_of(optimizer, without)}{self._private_words}{spared}{counted}{self.slots_words}"
        return f"{type(optimizer).__name__}(learning_rate={rate}, {words})"

    def describe_steps(self) -> None:
        """Update the descriptions of the steps, after the optimizer's numbers have changed."""
        self.revision += 1
        for step in self.steps.values():
            step.describe()

    def forget_first_update(self, key: tuple[int, ...]) -> None:
        """Drop the variables that a failed step would have updated first, and its plan."""
        if self.updated_first:
            new = set(map(id, self.updated_first))
            self.variables[:] = [variable for variable in self.variables if id(variable) not in new]
            self.updated_first = []
            self.steps.pop(key, None)

    # slots in files

    @property
    def slot_start(self) -> Mapping[str, float]:
        """The value before the first step of each slot that does not start at 0."""
        return self.optimizer._slot_start()

    @property
    def memory(self) -> OptimizerMemory:
        """The memory of its slots and count: of its strategy, or of the scope in which it was made."""
        found: OptimizerMemory = self._made_in if self.strategy is None else self.strategy.extended.placement.optimizers
        return found

    def early_state(self) -> dict[str, Any]:
        """Return the state, like `get_state`, of an optimizer that has taken no step. Local."""
        slots = {name: dict(values) for name, values in self.slots.pending.items()}
        return {"iterations": self.calls, "settings": self.optimizer.get_settings(), "slots": slots}

    def slots_of_parts(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each variable's name with this rank's part of its slots, for files. Collective.

        Pending slots may be whole.
        """
        yield from self.slots.pending.items()
        for variable in self.variables:
            if self.slots.stored_of(variable):
                yield variable.name, self.slots.read(variable)

    def all_iterations(self) -> int:
        """Return the number of calls of all ranks, together if they step together. Collective."""
        return self.memory.iterations(self.optimizer)

    def set_counts(self, iterations: int, settings: Sequence[Mapping[str, Any]] | None) -> None:
        """Set the number of calls, and settings if given; drop pending slots. Call it on every rank."""
        self.set_calls(int(iterations))
        if settings is not None:
            optimizer = self.optimizer
            before = optimizer.get_settings()
            optimizer.set_settings(settings)
            pairs = zip(before, optimizer.get_settings(), strict=True)
            for number, (old, new) in enumerate(pairs):
                for name, value in changed(old, new).items():
                    group = f" of group {number}" if len(before) > 1 else ""
                    text = f"optimizer {optimizer.name!r}: {name}{group} is {value} as saved, not {old[name]}"
                    log.once(logging.INFO, text)
        self.describe_steps()
        self.slots.reset()

    def restart_slots(self, variables: Collection[Variable] | None) -> None:
        """Reset the slots of variables, None for all, to their start values. Call it on all ranks."""
        self.memory.forget_slots(self.optimizer, variables)
        self.optimizer._on_restart(self.variables if variables is None else variables)

    def fill_slots(self, slots: Mapping[str, Mapping[str, Any]]) -> None:
        """Overwrite the slots of variables, by name, now or at their first update. Call it on every rank."""
        self.slots.pending.update((name, dict(values)) for name, values in slots.items() if values)
        self.slots.fill_pending(self.variables)

    def take_slots(self, variable: Variable, names: Collection[str]) -> dict[str, Receiver] | None:
        """Return this rank's receivers of a variable's slots from a file, by name. Call it on all ranks.

        None if they must be given whole, to `set_state`: other slots, slots on servers, averages, which start from the weights
        of the first step, or local steps.
        """
        if not self.slots.alike or variable.arena is None or self.optimizer.use_ema:
            return None
        if set(names) != set(self.slots.stored_of(variable)):
            return None
        if not any(variable is known for known in self.variables):
            self.variables.append(variable)
        return {name: self.slots.receiver(variable, name) for name in names}

    def take_outer_step(self) -> None:
        """Take an outer step now, if nodes have taken local ones, for `Strategy.outer_step`. Collective."""
        self.slots.end_round()


@final
class ArenaMemory(OptimizerMemory):
    """The memory of optimizers next to arenas. In files their numbers are in the order of their first steps.

    Args:
        placement: of the strategy, which optimizers do not keep alive; None for optimizers that have no strategy yet.
    """

    def __init__(self, placement: Any = None) -> None:
        self._placement: Callable[[], Any] = (lambda: None) if placement is None else weakref.ref(placement)

    def next_ordinal(self) -> int:
        return next(_ordinals)

    def number_of(self, optimizer: Any) -> int | None:
        number: int | None = optimizer._core.number_in(self._placement())
        return number

    def made(self) -> Sequence[Any]:
        return [*self._placement().made]

    made_everywhere = made

    def numbers_made(self, names: Sequence[str], made: Sequence[int | None]) -> Sequence[int | None]:
        return made

    def free_number(self, number: int | None, taken: set[int | None], least: int = 0) -> int:
        """Return the first free number, and take it."""
        found = next(number for number in itertools.count(least) if number not in taken)
        taken.add(found)
        return found

    def make_step(self, optimizer: Any, variables: Sequence[Any], left_out: Sequence[Any]) -> Any:
        step = optimizer._run_on(variables, [variable.name for variable in left_out])
        return self._placement().steps.in_order(step)

    def iterations(self, optimizer: Any) -> int:
        return int(optimizer._core.calls)

    def each_slots(self, optimizer: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the name and the whole slots of each variable, also of those not updated since `set_state`. Collective."""
        core = optimizer._core
        variables = [] if core.strategy is None else core.strategy.extended.placement.variables
        parts = {variable.name: variable.part for variable in variables}
        for name, slots in core.slots_of_parts():
            yield name, whole_slots(parts.get(name), slots)

    def slots_here(
        self, optimizer: Any, writers: Collection[int] | None, all_else: bool, each_node: bool
    ) -> Iterator[SlotsHere]:
        core = optimizer._core
        for name, slots in core.slots.pending.items():
            yield from waiting_slots(self._placement(), name, slots, writers, all_else, each_node)
        for variable in core.variables:
            if core.slots.in_files(variable):
                parts = core.slots.here(variable, writers, each_node)
                yield variable.name, variable.shape, accumulation_dtype(variable.dtype), parts

    def read_slots(self, optimizer: Any, variable: Any) -> dict[str, Any]:
        core = optimizer._core
        if any(variable is known for known in core.variables):
            return dict(core.slots.read(variable))
        waiting = core.slots.pending.get(variable.name, {}) if core.may_join(variable.placement.strategy) else {}
        return {name: np.array(array) for name, array in waiting.items() if name in optimizer.slot_names}

    def write_slots(self, optimizer: Any, variable: Any, values: Mapping[str, Any]) -> None:
        optimizer._core.slots.write(variable, values)

    def forget_slots(self, optimizer: Any, variables: Collection[Any] | None) -> None:
        core = optimizer._core
        core.slots.restart(core.variables if variables is None else variables)


_NO_STRATEGY = ArenaMemory()


def find(ordinal: int) -> Any:
    """Return this process's optimizer of an ordinal; None if it does not exist.

    Example:
        >>> from mpistrat.optimizers import SGD
        >>> optimizer = SGD(0.1)
        >>> find(optimizer._core.ordinal) is optimizer
        True
    """
    return _known.get(ordinal)


def known() -> list[Any]:
    """Return this process's existing optimizers, by ordinal."""
    return [optimizer for _, optimizer in sorted(_known.items())]

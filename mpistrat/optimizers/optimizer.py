"""The Optimizer: what all update rules have in common, and `apply_gradients`."""

from __future__ import annotations

import inspect
import itertools
import weakref
from abc import ABCMeta, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..arena.values import check_name
from ..base import context
from ..variables.placement import ORDINAL_STEP, Store
from ..variables.sharded import ShardedVariable, each_variable
from ..variables.variable import Variable
from .begun import Begun
from .fused_step import FusedStep
from .gradients import ReplicaPairs, check_rule, check_variables, pairs_of
from .hyperparameters import AVERAGE, GRADIENT_SUM, Rate
from .rule import Block, UpdateRun
from .slots import SlotStore
from .state import StatefulRule

__all__ = ["Optimizer", "find", "known"]

_ordinals = itertools.count(step=ORDINAL_STEP)
_known: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
_KEPT_STEPS = 1024  # one for each set of variables that had gradients together


class _Counted(ABCMeta):
    """Counts an optimizer when it is complete: a server's thread looks for it by its ordinal, and must not find half of one."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        made.take_next_ordinal()
        return made

    @property
    def __signature__(cls) -> inspect.Signature:
        """The arguments of the class; else `inspect` shows those of `__call__`."""
        kind: Any = cls
        return inspect.Signature(list(inspect.signature(kind.__init__).parameters.values())[1:])


class Optimizer(StatefulRule, metaclass=_Counted):
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
        self.name = name or type(self).__name__.lower()
        check_name(type(self).__name__, self.name)
        added = (AVERAGE,) * self.use_ema + (GRADIENT_SUM,) * bool(self.gradient_accumulation_steps)
        self.slot_names = (*slot_names, *added)
        starts = slot_start if isinstance(slot_start, Mapping) else dict.fromkeys(slot_names, slot_start)
        self._slot_start = {name: float(start) for name, start in starts.items() if start}
        self._slots = SlotStore(self)
        self.begun = Begun()
        self._variables: list[Variable] = []
        self._updated_first: list[Variable] = []  # by the step that is being taken
        self._strategy: Any = None
        self._ordinal: int
        self._steps: dict[tuple[int, ...], UpdateRun] = {}
        self.learning_rate = learning_rate

    def take_next_ordinal(self) -> None:
        """Have `find` find it, when it is complete."""
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
        self.take_next_ordinal()

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
        except BaseException:
            self._forget_first_update(key)
            raise
        finally:
            self.begun.forget()
        if self._updated_first:
            self._updated_first = []

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
        self._updated_first = [variable for variable in new if variable.name not in self._slots.pending]
        self._variables.extend(new)
        self._slots.fill_pending(new)
        return step

    def _forget_first_update(self, key: tuple[int, ...]) -> None:
        """After a step that failed, forget the variables that it would have updated first, and plan it again."""
        if self._updated_first:
            new = set(map(id, self._updated_first))
            self._variables[:] = [variable for variable in self._variables if id(variable) not in new]
            self._updated_first = []
            self._steps.pop(key, None)

    def take_outer_step(self) -> None:
        """Take an outer step now, if nodes have taken local ones: what `Strategy.outer_step` calls. Collective."""
        outer = self._slots.outer
        if outer is not None and outer.begun:
            outer.take()


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

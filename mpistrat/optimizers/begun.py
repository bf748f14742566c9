"""What `Optimizer.begin` was called for since the last step, and the choice whether sums start then."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..arena.arena import Arena, by_arena, padded
from ..arena.reduction import ArenaSum
from ..arena.values import checksum
from ..base import log
from ..base.errors import explain
from ..base.partition import merge
from ..comm.process_group import ProcessGroup
from ..variables.kinds import own_gradients_of
from ..variables.variable import Variable, explain_foreign, require_gradient
from .gradients import Pairs, flat_gradient, in_place

if TYPE_CHECKING:
    from ..arena.buckets import BucketSums

__all__ = ["Begun", "EarlyChoice"]

LEAST_BYTES = 4 << 20  # of gradients that are begun together: with fewer, what it costs to agree counts
_TRIES = 7  # steps of each way
_WARM = 2  # steps before that
_GAIN = 0.98  # of the time without, and all but one of the tries with less: the rest may be chance
_KEPT = 1000  # steps that go one way: of one that takes half as long again, trying costs 0.4 %
_FUNCTION = "Optimizer.begin"


@final
class EarlyChoice:
    """Whether sums start in `begin`: both ways in turns for some steps, then the faster one for many, and so on.

    Which one it is has no influence on numbers. All ranks choose the same.

    Attributes:
        early: whether sums start in `begin` now.
        words: what was chosen last, and by which times.
    """

    def __init__(self) -> None:
        self.early, self.words = True, "not decided"
        self._kept: bool | None = None  # the way that was chosen last
        self._left = 0  # steps until both ways are measured again
        self._number, self._ended = 0, 0
        self._times: dict[bool, list[int]] = {True: [], False: []}

    @property
    def open(self) -> bool:
        """Whether sums start early, or are tried to."""
        return self.early or not self._left

    def note_step(self, group: ProcessGroup, begun: bool) -> None:
        """Note the end of a step, and whether something was begun in it. Collective, as some of these calls compare times."""
        now, ended = perf_counter_ns(), self._ended
        self._ended = now
        if self._left:
            self._left -= 1
            self.early = bool(self._kept) or not self._left
        elif begun:
            if self._number >= _WARM:
                self._times[self.early].append(now - ended)
            self._number += 1
            self.early = self._number % 2 == 0
            if self._number == _WARM + 2 * _TRIES:
                self._decide(group)

    def _decide(self, group: ProcessGroup) -> None:
        with group.collective("begin: choice"):
            sums = group.sum_int(self._times[True] + self._times[False]).reshape(2, _TRIES) / group.topology.size / 1e6
        ratios = np.sort(sums[0] / sums[1])  # of neighbours, so that a machine that drifts drifts for both
        self.early = bool(np.median(ratios) < _GAIN and ratios[-2] < 1)
        early, late = np.median(sums, axis=1)
        what, ours, other = ("start there", early, late) if self.early else ("wait for apply_gradients", late, early)
        self.words = f"sums of gradients {what}: a step took {ours:.1f} ms so, {other:.1f} ms otherwise"
        if self.early is not self._kept:
            log.once(logging.INFO, f"{_FUNCTION}: {self.words}")
        self._kept, self._left, self._number = self.early, _KEPT, 0
        for times in self._times.values():
            times.clear()


@final
class Begun:
    """The variables whose gradients one optimizer's program has announced to be final, until the next step.

    Attributes:
        words: what ranks compare in the step: the names, in order.
        on_one_node: False: sums start early between nodes.
    """

    on_one_node = False

    def __init__(self) -> None:
        self.words = ""
        self._names: list[str] = []  # of each call
        self._variables: dict[int, Variable] = {}
        self._waiting: list[Variable] = []  # until they are enough to be sent
        self._sent: list[tuple[ArenaSum, str, list[tuple[int, int]]]] = []
        self._marks: dict[int, int] = {}  # checksums of gradients
        self._steps = 0
        self._able: bool | None = None  # whether sums can start early; None: not asked yet
        self._buckets: BucketSums | None = None  # what they were handed over to
        self.choice = EarlyChoice()

    @property
    def able(self) -> bool:
        """Whether sums can start early, as far as it is known; the same on every rank."""
        return self._able is not False

    @property
    def early(self) -> bool:
        """Whether sums start early in this step, or are tried to; the same on every rank."""
        return self.able and self.choice.open

    def __bool__(self) -> bool:
        return bool(self._variables)

    def add(self, strategy: Any, replicas: Sequence[Pairs]) -> None:
        """Note variables, the same of each local replica, and start their sums. Collective, in cross-replica context.

        Raises:
            ValueError: a variable twice in a step, without a gradient, or of another strategy; replicas that differ.
        """
        try:
            first, *others = [[variable for _, variable in pairs] for pairs in replicas]
            if any(list(map(id, other)) != list(map(id, first)) for other in others):
                expected, got = "the same variables on all replicas", "others on some local replica"
                raise ValueError(explain(_FUNCTION, "variables", expected=expected, got=got))
            self._add(strategy, first)
        except BaseException:
            self.forget()
            raise

    def _add(self, strategy: Any, variables: Sequence[Variable]) -> None:
        strategy.extended.begun.add(self)
        for variable in variables:
            self._check(strategy, variable)
            self._variables[id(variable)] = variable
        names = ", ".join(variable.name for variable in variables)
        self._names.append(names)
        self.words = f", begun: {'; '.join(self._names)}"
        group = strategy.extended.placement.group
        due = self._steps % group.environment.check_every == 0
        buckets, replicas = strategy.extended.placement.buckets, range(len(strategy.extended.placement.devices))
        if buckets is not None:
            handed_over = [(v, [v.gradient(i).reshape(-1) for i in replicas]) for v in variables]
            self._hand_over(buckets, handed_over, noted=due)
            return
        if due:
            self._marks.update((id(variable), _mark(variable)) for variable in variables)
        if group.num_nodes > 1 and self.able and self.choice.early:
            self._waiting += variables
            if sum(v.size * v.dtype.itemsize for v in self._waiting) >= LEAST_BYTES:
                self._send(group, strategy.extended.placement.ops)

    def _check(self, strategy: Any, variable: Any) -> None:
        if getattr(variable, "placement", None) is None:
            raise TypeError(explain(_FUNCTION, "variables", expected="variables", got=type(variable).__name__))
        if variable.placement.strategy is not strategy:
            raise ValueError(explain_foreign(_FUNCTION, variable, strategy))
        require_gradient(variable)
        if id(variable) in self._variables:
            remedy = "Call apply_gradients between two calls of begin for a variable"
            expected, got = "each variable once in a step", "it twice"
            raise ValueError(explain(_FUNCTION, variable.name, expected=expected, got=got, remedy=remedy))

    def _send(self, group: ProcessGroup, ops: Any) -> None:
        names = ", ".join(variable.name for variable in self._waiting)
        with group.collective("begin", detail=f"of {names}"):
            members = by_arena(self._waiting)
            if self._able is None:
                self._able = _is_able(group, ops, list(members))
            for arena, some in members.items():
                sums = ops.early_sums(arena.gradients) if self._able else None
                if sums is not None:
                    ranges = merge(list(padded(arena, some).items()))
                    sums.begin(arena.gradients, ranges)
                    self._sent.append((sums, arena.key, ranges))
        self._waiting = []

    def _hand_over(
        self, buckets: BucketSums, gradients: Sequence[tuple[Variable, Sequence[Any]]], noted: bool = False
    ) -> None:
        """Hand over the gradients of variables, flat, of each local replica. Collective."""
        self._buckets = buckets
        for variable, flat in sorted(gradients, key=lambda pair: _place(pair[0]), reverse=True):
            arena, offset = variable.arena, variable.offset
            if arena is not None and arena.gradients is not None and variable.size:
                buckets.put(self, arena.gradients, offset, padded(arena, [variable])[offset], flat, variable.name)
            own = own_gradients_of(variable)
            if own is not None:
                own.hand_over(noted)

    def add_rest(self, buckets: BucketSums, replicas: Sequence[Pairs]) -> None:
        """Hand over the gradients of a step that were not begun, and have all of it summed. Collective.

        Raises:
            ValueError, TypeError: gradients that do not fit.
        """
        rest = [
            (pairs[0][1], [flat_gradient(gradient, variable) for gradient, variable in pairs])
            for pairs in zip(*replicas, strict=True)
            if pairs[0][0] is not None and id(pairs[0][1]) not in self._variables
        ]
        self._variables.update((id(variable), variable) for variable, _ in rest)
        self._hand_over(buckets, rest)
        buckets.send()

    def check(self, strategy: Any, replicas: Sequence[Pairs], aggregate: bool) -> None:
        """Check what `apply_gradients` was called with.

        Raises:
            ValueError: variables that were begun are missing; their gradients were changed, or are elsewhere.
        """
        if strategy.extended.placement.buckets is not None and not aggregate:
            raise _unfit("", "gradients that sharded_gradients sums", "experimental_aggregate_gradients=False")
        if not self:
            return
        if not aggregate:
            raise _unfit("", "gradients that are summed over the replicas", "experimental_aggregate_gradients=False")
        for replica, pairs in enumerate(replicas):
            found = {id(variable): gradient for gradient, variable in pairs}
            for key, variable in self._variables.items():
                if found.get(key) is None:
                    raise _unfit(variable.name, "a gradient for each variable that was begun", "none")
                own = own_gradients_of(variable)
                if own is None:
                    as_begun = in_place(found[key], variable.gradient(replica))
                else:
                    as_begun = own.stands_for(replica, found[key])
                if not as_begun:
                    raise _unfit(variable.name, "its gradient in v.grad", "one elsewhere")
                if own is not None and own.changed(replica, found[key]):
                    raise _unfit(variable.name, "a final gradient", "one that was changed after begin")
        for key, mark in self._marks.items():
            if _mark(self._variables[key]) != mark:
                got = "one that was changed after begin"
                raise _unfit(self._variables[key].name, "a final gradient", got)

    def note_step(self, strategy: Any) -> None:
        """Note that a step has taken what was begun. Collective."""
        self._steps += bool(self)
        if self._able:
            self.choice.note_step(strategy.extended.placement.group, bool(self))

    def forget(self) -> None:
        """Forget what was begun. Every rank does it."""
        if not self:
            return
        for sums, key, ranges in self._sent:
            sums.forget(key, ranges)
        if self._buckets is not None:
            self._renew(self._buckets)
        self._variables.clear()
        self._marks.clear()
        self._names, self._waiting, self._sent, self.words = [], [], [], ""

    def _renew(self, buckets: BucketSums) -> None:
        """Let variables have gradients again, and forget the sums of those that were handed over."""
        for variable in self._variables.values():
            own = own_gradients_of(variable)
            if own is not None:
                own.renew()
        for arena, some in by_arena(self._variables.values()).items():
            if arena.gradients is not None:
                buckets.forget(arena.gradients, merge(list(padded(arena, some).items())))


def _is_able(group: ProcessGroup, ops: Any, arenas: Sequence[Arena]) -> bool:
    """Return whether sums can start before the step, and log why not. Collective, inside one."""
    from mpi4py import MPI

    why = ""
    if all(ops.early_sums(arena.gradients) is None for arena in arenas):
        why = "each node, or a GPU, sums and updates all weights"
    elif not group.agree(int(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)):
        why = "MPI was started without THREAD_MULTIPLE"
    if why:
        log.once(logging.INFO, f"{_FUNCTION}: sums of gradients wait for apply_gradients: {why}")
    return not why


def _place(variable: Variable) -> tuple[str, int]:
    """Return where a variable lies: an arena has buckets of its own, so what is in one is handed over together."""
    return "" if variable.arena is None else variable.arena.key, variable.offset


def _mark(variable: Variable) -> int:
    """Return a checksum of the local replicas' gradients."""
    replicas = range(len(variable.placement.devices))
    return checksum(*(variable.gradient(replica).reshape(-1) for replica in replicas)) if variable.size else 0


def _unfit(name: str, expected: str, got: str) -> ValueError:
    remedy = "Pass apply_gradients (v.grad, v) of all that Optimizer.begin was called for in the step"
    return ValueError(explain("apply_gradients", name, expected=expected, got=got, remedy=remedy))

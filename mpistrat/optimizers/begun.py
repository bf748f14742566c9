"""The variables passed to `Optimizer.begin` since the last step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

from ..arena.values import checksum
from ..base.errors import explain
from ..variables.variable import Variable, explain_foreign, require_gradient
from .gradients import Pairs

__all__ = ["Begun", "changed", "elsewhere", "unfit"]

_FUNCTION = "Optimizer.begin"


@final
class Begun:
    """The variables whose gradients one optimizer's program has announced as final, until the next step.

    Attributes:
        words: the names in order, which ranks compare in the step.
        on_one_node: False: sums start early between nodes.
    """

    on_one_node = False

    def __init__(self) -> None:
        self.words = ""
        self._names: list[str] = []  # of each call
        self._variables: dict[int, Variable] = {}
        self._marks: dict[int, int] = {}  # checksums of gradients
        self._steps = 0
        self._strategy: Any = None  # the starter's strategy
        self._starter: Any = None  # a `step.interface.Starter`; None until a strategy is known

    @property
    def able(self) -> bool:
        """True until it is known that sums cannot start early; the same on every rank."""
        return self._starter is None or bool(self._starter.able)

    @property
    def early(self) -> bool:
        """True if sums start early in this step, or on trial; the same on every rank."""
        return self._starter is None or bool(self._starter.early)

    def __bool__(self) -> bool:
        return bool(self._variables)

    def starter(self, strategy: Any) -> Any:
        """Return the starter of a strategy's sums; only the last strategy's is cached."""
        if self._strategy is not strategy:
            if self._starter is not None:
                self._starter.forget([*self._variables.values()])
            self._strategy, self._starter = strategy, strategy.extended.placement.steps.new_starter(self)
        return self._starter

    def least_bytes(self, strategy: Any) -> int:
        """Return the bytes of gradients below which a strategy's sums do not start early."""
        return int(self.starter(strategy).least_bytes)

    def add(self, strategy: Any, replicas: Sequence[Pairs]) -> None:
        """Record variables, the same of each local replica, and start their sums. Collective, in cross-replica context.

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
        for variable in variables:
            self._check(strategy, variable)
            self._variables[id(variable)] = variable
        names = ", ".join(variable.name for variable in variables)
        self._names.append(names)
        self.words = f", announced: {'; '.join(self._names)}"
        starter, group = self.starter(strategy), strategy.extended.placement.group
        due = self._steps % group.environment.check_every == 0
        if due:
            self._marks.update((id(variable), _mark(variable)) for variable in starter.kept(variables))
        starter.start(variables, due)

    def _check(self, strategy: Any, variable: Any) -> None:
        if getattr(variable, "placement", None) is None:
            raise TypeError(explain(_FUNCTION, "variables", expected="variables", got=type(variable).__name__))
        if variable.placement.strategy is not strategy:
            raise ValueError(explain_foreign(_FUNCTION, variable, strategy))
        require_gradient(variable)
        if id(variable) in self._variables:
            remedy = "Call apply_gradients between two calls of begin for a variable"
            expected, got = "each variable once in a step", f"{variable.name!r} twice"
            raise ValueError(explain(_FUNCTION, variable.name, expected=expected, got=got, remedy=remedy))

    def __contains__(self, variable: Variable) -> bool:
        return id(variable) in self._variables

    def note(self, variables: Sequence[Variable]) -> None:
        """Record variables as announced."""
        self._variables.update((id(variable), variable) for variable in variables)

    def check(self, strategy: Any, replicas: Sequence[Pairs], aggregate: bool) -> None:
        """Check the arguments of `apply_gradients`.

        Raises:
            ValueError: announced variables are missing; their gradients were changed, or are elsewhere.
        """
        if not aggregate:
            self.starter(strategy).check_unsummed()
        if not self:
            return
        if not aggregate:
            raise unfit("", "gradients that are summed over the replicas", "experimental_aggregate_gradients=False")
        for replica, pairs in enumerate(replicas):
            found = {id(variable): gradient for gradient, variable in pairs}
            for key, variable in self._variables.items():
                if found.get(key) is None:
                    raise unfit(variable.name, "a gradient for each variable passed to begin", "none")
                self.starter(strategy).require(variable, replica, found[key])
        for key, mark in self._marks.items():
            if _mark(self._variables[key]) != mark:
                raise changed(self._variables[key].name)

    def note_step(self, strategy: Any) -> None:
        """Record the end of a step, which took the announced gradients. Collective."""
        self._steps += bool(self)
        if self._starter is not None:
            self._starter.note_step()

    def forget(self) -> None:
        """Drop the announced variables. Call it on every rank."""
        if not self:
            return
        if self._starter is not None:
            self._starter.forget([*self._variables.values()])
        self._variables.clear()
        self._marks.clear()
        self._names, self.words = [], ""


def _mark(variable: Variable) -> int:
    replicas = range(len(variable.placement.devices))
    return checksum(*(variable.gradient(replica).reshape(-1) for replica in replicas)) if variable.size else 0


def unfit(name: str, expected: str, got: str) -> ValueError:
    """Return the error of gradients that do not fit the announced ones; `name`: of the variable."""
    remedy = "Pass apply_gradients (v.grad, v) of all variables that this step passed to Optimizer.begin"
    return ValueError(explain("apply_gradients", name, expected=expected, got=got, remedy=remedy))


def elsewhere(name: str) -> ValueError:
    """Return the error of a gradient that is not the announced one of a variable."""
    return unfit(name, "its gradient in v.grad", "one elsewhere")


def changed(name: str) -> ValueError:
    """Return the error of an announced gradient of a variable that has changed since."""
    return unfit(name, "a final gradient", "one that was changed after begin")

"""Sessions: what sees a program's tensors, one step after the other. `Recording` writes them, `Rounding` changes parameters
by rounding and measures how far it carries, `compare.Comparing` compares them on several ranks.
"""

from __future__ import annotations

import collections
import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from ..base import nest
from ..base.context import Observer, Parameter
from ..base.distributed_values import DistributedValues
from ..base.errors import explain
from ..base.types import Quality
from .folder import Folder, Point, RecordedPass, RecordedStep, ShadowError
from .samples import difference, epsilon_of, host, row_digests, sample, sample_like

__all__ = ["Recording", "Replay", "Rounding", "Session"]

_AFTER = "parameter {} after the update"
_START = "parameter {} at the start of the step"


class Replay(NamedTuple):
    """The random numbers of the recorded run at an operation.

    Attributes:
        state: of the generator before it.
        shape: of the tensor of the whole batch.
        axis: its axis of rows.
        mine: the numbers of this rank's rows.
    """

    state: np.ndarray
    shape: Sequence[int]
    axis: int
    mine: np.ndarray


class Session(Observer):
    """An observer of the tensors of a program's first steps.

    Args:
        folder: of the recorded run.
        steps: that it sees.
        stop: True to end the program after them.

    Attributes:
        done: True after the last step.
        begun: True once a pass of this step has started.
        inputs_known: True if the rows of this pass are those of the arguments of `strategy.run`.
    """

    def __init__(self, folder: Folder, steps: int, stop: bool = False) -> None:
        self.folder, self.steps, self._stop = folder, steps, stop
        self.done, self.number = False, 1
        self.epsilon = 0.0
        self._unseen: dict[str, str] = {}  # what cannot be seen or compared, with the reason
        self._rows, self._widest = 0, 1.0
        self._start_step()

    def _start_step(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        self._summands = self._widest * max(self._rows, 1)  # of the last update
        self._passes, self.begun, self._rows = 0, False, 0
        self._widest = 1.0
        self._gradients: list[Parameter] = []
        self.inputs_known = False
        self._batch: Any = ()
        self._about = ""

    # the calls of strategies and optimizers

    def batch(self, element: Any) -> None:
        self._batch = element

    def run(self, strategy: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        if self.done or strategy.extended.is_default:
            return
        self.check(strategy)
        inputs = _inputs("argument", (tuple(args), dict(kwargs)))
        self.inputs_known = False
        if not inputs:  # its rows may be those of the last batch
            if self.begun:
                return
            inputs = _inputs("batch", self._batch)
        self.begin(inputs, self.variables_of(strategy))
        self.inputs_known = bool(inputs)

    def gradients(
        self, strategy: Any, optimizer: Any, replicas: Sequence[Sequence[tuple[Any, Any]]], aggregate: bool
    ) -> None:
        if self.done or strategy.extended.is_default:
            return
        self.check(strategy)
        if not self.begun:  # a program without strategy.run, or modules
            self.begin(_inputs("batch", self._batch), self.variables_of(strategy))
        factor = getattr(optimizer, "scale", 1.0)  # of torch's sums of means
        for gradient, variable in replicas[0]:
            if gradient is not None:
                self.gradient(variable.name, gradient, factor if isinstance(factor, float) else 1.0, aggregate)

    def updated(self, strategy: Any, optimizer: Any, replicas: Sequence[Sequence[tuple[Any, Any]]]) -> None:
        if self.done or strategy.extended.is_default:
            return
        pairs = replicas[0]
        self.end(strategy, [Parameter(variable.name, variable.storage(0)) for _, variable in pairs])

    def begin_pass(self, strategy: Any, inputs: Mapping[str, Any] | None, parameters: Sequence[Parameter]) -> None:
        if self.done or strategy.extended.is_default:
            return
        self.check(strategy)
        if inputs is not None:
            self.begin(inputs, parameters)
        elif not self.begun:
            inputs = _inputs("batch", self._batch)
            if not inputs:
                self.leave_out("the rows of batches", "as a loop of the program's own does not show which they are")
            self.begin(inputs, parameters)

    def leave_out(self, operation: str, reason: str, rest: bool = False) -> None:
        if not self.done:
            self._unseen[operation] = reason

    def end_step(self, strategy: Any, parameters: Sequence[Parameter]) -> None:
        if not self.done and not strategy.extended.is_default:
            self.end(strategy, parameters)

    def check(self, strategy: Any) -> None:
        """Raise ShadowError for a strategy whose replicas are not its ranks.

        Raises:
            ShadowError: several replicas on a rank, several ranks of a replica, or parameter servers.
        """
        placement = strategy.extended.placement
        lacking = placement.lacks(Quality.COMMON_STEPS)
        if lacking or strategy.num_replicas_in_sync != strategy.size:
            got = lacking or f"{strategy.num_replicas_in_sync} on {strategy.size} ranks"
            remedy = "Run the program with one device on each rank, without servers or a mesh that divides a replica"
            expected = "one replica on each rank"
            raise ShadowError(explain("ms.shadow", "", expected=expected, got=got, remedy=remedy))

    @staticmethod
    def variables_of(strategy: Any) -> list[Parameter]:
        """Return the trainable variables of a strategy."""
        variables = strategy.extended.variables
        return [Parameter(each.name, each.storage(0)) for each in variables if each.trainable]

    # the parts of a step

    def begin(self, inputs: Mapping[str, Any], parameters: Iterable[Parameter]) -> None:
        """Begin a pass with these inputs; the first of a step begins the step."""
        if not self.begun:
            self.begun = True
            parameters = list(parameters)
            self._step_begins(parameters)
            for each in parameters:
                self.value("all", _START.format(each.name), each.value)
        rows = next((len(each) for each in inputs.values() if getattr(each, "ndim", 0)), None)
        self._rows = 0 if rows is None else rows
        named = {} if rows is None else {name: x for name, x in inputs.items() if x.ndim and len(x) == rows}
        if named:
            self._widest = max(self._widest, *(math.prod(x.shape[1:]) for x in named.values()))
            digests = np.array([row_digests(each, self._rows) for each in named.values()])
            self._pass_begins(list(named), digests.reshape(len(named), self._rows))
            self._passes += 1

    def value(self, kind: str, operation: str, value: Any, factor: float = 1.0, about: str = "") -> None:
        """Handle a tensor; without floating numbers it is left out. `about` may differ from the recorded run."""
        found = None if self.done else host(value)
        if found is None:
            return
        array, dtype = found
        self.epsilon = max(self.epsilon, epsilon_of(dtype))
        if kind == "rows":
            if not self._passes:
                return
            self._widest = max(self._widest, array.size / max(self._rows, 1))
        self._about = about
        self._handle(self._key(operation, kind), operation, kind, array * factor if factor != 1.0 else array)

    def gradient(self, name: str, value: Any, factor: float = 1.0, local: bool = True) -> None:
        self.value("sum" if local else "all", f"gradient of {name}", value, factor)

    def end(self, ranks: Any, parameters: Iterable[Parameter]) -> None:
        """End a step after the update of these parameters. Collective."""
        if not self.begun:
            return
        for each in parameters:
            self.value("all", _AFTER.format(each.name), each.value)
        self._step_ends(ranks)
        self._start_step()
        self.number += 1
        if self.number > self.steps:
            self.finish(ranks)

    def finish(self, ranks: Any) -> None:
        """End the session, and the program if that was asked for. Call it on every rank."""
        self.close()
        if self._stop:
            raise SystemExit(0)

    def close(self) -> None:
        """End the session at its last step, or at the end of the program. Local.

        Raises:
            ShadowError: it has seen no step.
        """
        if self.done:
            return
        self.done = True
        if self.number == 1:
            why = "".join(f". Not seen were {each}, {reason}" for each, reason in self._unseen.items())
            half = ". A step started, and no optimizer ended it" if self.begun else ""
            raise ShadowError(
                f"{self.folder.function}: the program took no step that ms.shadow sees{half}{why}. Steps are those of "
                "ms.optimizers in strategy.run, of torch.optim, and of Keras models of ms.keras.distribute, inside a strategy "
                "or DDP, after the session has started. Check that the program trains: a strategy's scope, or "
                'init_process_group("mpi"), and data for at least one step'
            )
        self._closed()

    def _closed(self) -> None:
        """Handle the end, after some steps."""

    def draw(self, operation: str, state: np.ndarray, shape: Sequence[int] | None) -> Replay | None:
        """Handle an operation that draws random numbers; return the recorded ones to replay, if there are any.

        Args:
            operation: its name.
            state: of the generator before it.
            shape: of the tensor, one number for each element of it; None if they cannot be replayed.
        """
        return None if self.done else self._draw(self._key(operation, "draw"), operation, state, shape)

    def _key(self, operation: str, kind: str) -> str:
        """Return a name that is unique in the step: of the number of the pass too, unless it is the same in all passes."""
        where = f"{self._passes}: " if kind in ("rows", "draw") else ""
        self._counts[where + operation] += 1
        return f"{where}{operation} #{self._counts[where + operation]}"

    def _step_begins(self, parameters: Sequence[Parameter]) -> None:
        """Handle the begin of a step."""

    @abstractmethod
    def _pass_begins(self, names: Sequence[str], digests: np.ndarray) -> None:
        """Handle the begin of a pass of rows; `digests` has a row for each input."""

    @abstractmethod
    def _handle(self, key: str, operation: str, kind: str, array: np.ndarray) -> None:
        """Handle a tensor."""

    def _draw(self, key: str, operation: str, state: np.ndarray, shape: Sequence[int] | None) -> Replay | None:
        """Handle random numbers."""
        return None

    def _step_ends(self, ranks: Any) -> None:
        """Handle the end of a step. Collective."""

    def summands(self, kind: str, rows: int) -> float:
        """Return the number of summands of a tensor's elements: see `samples`."""
        if not self._passes:  # at the start of a step
            return self._summands
        return self._widest * (1 if kind == "rows" else max(rows, 1))


class _OfOneProcess(Session):
    """A session of one process."""

    def check(self, strategy: Any) -> None:
        super().check(strategy)
        if strategy.size > 1:
            got = f"{strategy.size} ranks"
            raise ShadowError(explain("ms.shadow", "", expected="one process, of which the run is recorded", got=got))


@final
class Recording(_OfOneProcess):
    """Writes the steps of one process into a folder.

    Args:
        folder, steps, stop: as of `Session`.
        elements: that are kept of each tensor; 0 for all.
    """

    def __init__(self, folder: Folder, steps: int, elements: int, stop: bool = False) -> None:
        super().__init__(folder, steps, stop)
        self._elements = elements
        self._step = RecordedStep([], [], [], 0.0)

    def _pass_begins(self, names: Sequence[str], digests: np.ndarray) -> None:
        self._step.passes.append(RecordedPass(len(self._step.points), names, digests))

    def _handle(self, key: str, operation: str, kind: str, array: np.ndarray) -> None:
        found = sample(array, self._rows if kind == "rows" else None, self._elements)
        if found is not None:
            number = self.summands(kind, self._rows)
            about = (self._passes - 1, self._about, number, found.shape, found.axis)
            self._add(Point(key, operation, kind, *about), found.values)

    def _draw(self, key: str, operation: str, state: np.ndarray, shape: Sequence[int] | None) -> Replay | None:
        axis = next((axis for axis, extent in enumerate(shape or ()) if extent == self._rows), None)
        self._add(Point(key, operation, "draw", self._passes - 1, shape=tuple(shape or ()), axis=axis), state)
        return None

    def _add(self, point: Point, values: np.ndarray) -> None:
        self._step.points.append(point)
        self._step.values.append(values)

    def _step_ends(self, ranks: Any) -> None:
        self.folder.write(self.number, self._step._replace(epsilon=self.epsilon))
        self._step = RecordedStep([], [], [], 0.0)

    def _closed(self) -> None:
        self.folder.write_end(self.number <= self.steps)


@final
class Rounding(_OfOneProcess):
    """Repeats the recorded run with parameters changed by rounding, and adds the differences to its folder.

    Args:
        folder, steps, stop: as of `Session`.
    """

    def __init__(self, folder: Folder, steps: int, stop: bool = False) -> None:
        super().__init__(folder, steps, stop)
        number = folder.deviations()[0]
        self._random = np.random.default_rng(number)
        self._found: dict[int, dict[str, float]] = {}
        self._known: dict[str, tuple[Point, np.ndarray]] = {}
        self._passes_known: Sequence[RecordedPass] = ()

    def _step_begins(self, parameters: Sequence[Parameter]) -> None:
        step = self.folder.read(self.number)
        points = [] if step is None else zip(step.points, step.values, strict=True)
        self._known = {point.key: (point, values) for point, values in points}
        self._passes_known = () if step is None else step.passes
        self._found[self.number] = {}
        if self.number == 1:
            self._check_start(parameters)
        for each in parameters:
            _round(each, self._random)

    def _check_start(self, parameters: Sequence[Parameter]) -> None:
        """Raise ShadowError unless the program starts with the recorded parameters."""
        for each in parameters:
            known, found = self._known.get(f"{_START.format(each.name)} #1"), host(each.value)
            if known is None or found is None:
                continue
            point, values = known
            mine = sample_like(found[0], None, point.shape, point.axis, values.shape[-1])
            if mine is None or difference(mine.values, values).any():
                raise self._other(f"parameter {each.name} starts with other numbers")

    def _other(self, what: str) -> ShadowError:
        return ShadowError(
            f"{self.folder.function}: two runs of the program on one process differ: {what}. Nothing can be compared with such "
            "a program. Seed its random numbers: of weights, of the order of rows (keras.utils.set_random_seed, "
            "torch.manual_seed, np.random.seed)"
        )

    def _pass_begins(self, names: Sequence[str], digests: np.ndarray) -> None:
        if self.number == 1 and not self._passes and self._passes_known:  # later rows may be computed by parameters
            first = self._passes_known[0]
            if first.digests.shape != digests.shape or (first.digests != digests).any():
                raise self._other("the first batch has other rows")

    def _handle(self, key: str, operation: str, kind: str, array: np.ndarray) -> None:
        known = self._known.get(key)
        if known is None:
            return
        point, values = known
        rows = self._rows if kind == "rows" else None
        found = sample_like(array, rows, point.shape, point.axis, values.shape[-1])
        same = found is not None and found.values.shape == values.shape
        far = difference(found.values, values).max(initial=0.0) if found is not None and same else math.inf
        self._found[self.number][key] = float(far)

    def _closed(self) -> None:
        recorded = self.folder.count()
        if self.number <= min(recorded, self.steps):
            raise self._other(f"the second took {self.number - 1} of {recorded} steps")
        self.folder.write_deviations(self._found)


def _inputs(name: str, structure: Any) -> dict[str, Any]:
    """Return the arrays of nested arguments, by name."""
    found = {}
    for path, leaf in zip(nest.paths(structure), nest.flatten(structure), strict=True):
        value = leaf.values[0] if isinstance(leaf, DistributedValues) else leaf
        if getattr(value, "ndim", 0) and not hasattr(value, "placement"):
            found[f"{name} {path}"] = value
    return found


def _round(parameter: Parameter, random: np.random.Generator) -> None:
    """Multiply a parameter, in place, by 1 ± ε √(fan-in), with random signs."""
    value = parameter.value
    found = host(value)
    if found is None:
        return
    array, dtype = found
    size = epsilon_of(dtype) * math.sqrt(math.prod(array.shape[1:]) if array.ndim > 1 else 1.0)
    factors = 1.0 + size * random.choice([-1.0, 1.0], array.shape)
    if hasattr(value, "detach"):
        tensor = value.detach()
        tensor.copy_(tensor.double().mul_(tensor.new_tensor(factors, dtype=tensor.double().dtype)))
        return
    rounded = (array.astype(np.float64) * factors).astype(array.dtype)
    if parameter.assign is not None:
        parameter.assign(rounded)
    elif hasattr(value, "set"):  # CuPy's
        value.set(rounded)
    else:
        value[...] = rounded

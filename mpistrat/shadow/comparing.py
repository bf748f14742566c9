"""The comparison of a program on several ranks with its recorded run, and the text of the first difference."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import numpy as np

from ..base.context import Parameter
from ..base.errors import DifferenceError
from ..base.text import counted, named, ranges, shortened
from .folder import Folder, Point, RecordedStep, ShadowError, joint_digests, packed, unpacked
from .samples import difference, sample_like, tolerance
from .session import Replay, Session

__all__ = ["Comparing", "ShadowReport"]

_MOST = 4  # names or rows in a text
_OWN_ROWS = "Each rank divides by its own rows, not those of the global batch"
_CLOSE = 1e-4  # the residual of explained gradients, relative to their size


class _Finding(NamedTuple):
    """A difference: where in the recorded order, the operation, the ranks, and the rest of the sentence."""

    order: int
    operation: str
    ranks: Sequence[int]
    text: str


class _Reply(NamedTuple):
    """The findings of one rank in a step."""

    differ: list[tuple[int, float, float, str]]  # point, difference, tolerance, more on the operation
    names: list[list[str]]  # of the inputs with rows, by pass
    draws: dict[str, str]  # the state of the generator by operation
    missing: list[str]  # recorded operations with other shapes here
    gradients: dict[str, np.ndarray]  # by the point's number
    rows: dict[str, np.ndarray]  # digests of rows by the pass's number
    blind: list[str]  # the operation after which nothing can be equal, and the reason; empty for none
    seen: list[int]  # the points
    extra: list[str]  # operations that were not recorded
    unseen: dict[str, str]  # operations that cannot be compared, with the reason


@final
class ShadowReport:
    """The extent of a comparison.

    Attributes:
        steps: compared steps.
        whole: True if the program has no more.
        ranks: of the program.
        points: compared tensors.
        rows: compared rows of batches.
        nearest: the largest difference relative to its tolerance, and its operation.
        left_out: operations that could not be compared, with the reason.
    """

    def __init__(self) -> None:
        self.steps = self.points = self.rows = self.ranks = 0
        self.whole = False
        self.nearest = (0.0, "")
        self.left_out: dict[str, str] = {}

    def __str__(self) -> str:
        text = f"{'all ' * self.whole}{counted(self.steps, 'step')} on {counted(self.ranks, 'rank')} equal the recorded run"
        text += f" on one process: {counted(self.points, 'tensor')} compared, {counted(self.rows, 'row')} of batches"
        if self.nearest[1]:
            text += f", the largest difference has {100 * self.nearest[0]:.0f} % of its tolerance: {self.nearest[1]}"
        for reason in dict.fromkeys(self.left_out.values()):
            some = [name for name, why in self.left_out.items() if why == reason]
            text += f"\nnot compared, {reason}: {shortened(some, _MOST)}"
        return text


@final
class Comparing(Session):
    """Compares the steps of a program on several ranks with its recorded run.

    Args:
        folder, steps, stop: as of `Session`.

    Attributes:
        report: how much was compared so far.
    """

    def __init__(self, folder: Folder, steps: int, stop: bool = False) -> None:
        super().__init__(folder, steps, stop)
        self.report = ShadowReport()
        self._repetitions, self._deviations = folder.deviations()
        self._blind: list[str] = []  # as of a reply
        self._difference: DifferenceError | None = None
        self._step: RecordedStep | None = None
        self._error = ""
        self._clear()

    def _clear(self) -> None:
        self._places: dict[str, int] = {}
        self._rows_of: dict[bytes, list[tuple[int, int]]] = {}  # pass and number of the recorded rows, by digest
        self._ambiguous = False  # True if it is unknown which of several equal rows this rank has
        self._mine: list[tuple[int, int]] | None = None
        self._seen: set[int] = set()
        self._extra: set[str] = set()
        self._reply = _Reply([], [], {}, [], {}, {}, [], [], [], {})

    def _step_begins(self, parameters: Sequence[Parameter]) -> None:
        self._clear()
        try:
            self._step = self.folder.read(self.number)
        except (OSError, ValueError) as error:  # raised on all ranks, at the end of the step
            self._step, self._error = None, str(error)
        if self._step is not None:
            self._places = {point.key: place for place, point in enumerate(self._step.points)}
            for number, each in enumerate(self._step.passes):
                for row, digest in enumerate(each.joint):
                    self._rows_of.setdefault(digest, []).append((number, row))

    def _pass_begins(self, names: Sequence[str], digests: np.ndarray) -> None:
        self._reply.rows[f"rows{len(self._reply.names)}"] = digests
        self._reply.names.append(list(names))
        found = [self._rows_of.get(digest, []) for digest in joint_digests(digests)]
        self._mine, self._ambiguous = _chosen(found) if all(found) else (None, False)

    def _recorded(self, operation: str) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """Return the recorded points of an operation on this rank's rows: the point's number, its rows, and ours."""
        count = self._counts[f"{self._passes}: {operation}"]
        mine = np.array(self._mine or (), np.int64).reshape(-1, 2)
        found = []
        for number in np.unique(mine[:, 0]):
            place = self._places.get(f"{number + 1}: {operation} #{count}")
            if place is not None:
                ours = np.flatnonzero(mine[:, 0] == number)
                found.append((place, mine[ours, 1], ours))
        return found

    def _handle(self, key: str, operation: str, kind: str, array: np.ndarray) -> None:
        if self._step is None or self._blind:
            return
        if kind == "rows":
            if self._mine is None:
                return
            recorded = self._recorded(operation)
            for number, rows, ours in recorded:
                self._seen.add(number)
                self._compare(number, array, rows, ours)
            if not recorded and self._mine:
                self._extra.add(operation)
            return
        place = self._places.get(key)
        if place is None:
            self._extra.add(operation)
            return
        self._seen.add(place)
        if kind == "all":
            self._compare(place, array, None, None)
        else:
            point, values = self._step.points[place], self._step.values[place]
            found = sample_like(array, None, point.shape, None, values.shape[-1])
            if found is not None:
                self._reply.gradients[str(place)] = found.values

    def _compare(self, place: int, array: np.ndarray, rows: np.ndarray | None, ours: np.ndarray | None) -> None:
        assert self._step is not None
        point, values = self._step.points[place], self._step.values[place]
        number = None if ours is None else self._rows
        found = sample_like(array, number, point.shape, point.axis, values.shape[-1])
        if found is None:
            self._reply.missing.append(point.operation)
            return
        theirs, mine = (values, found.values) if ours is None else (values[rows], found.values[ours])
        far, limit = float(difference(mine, theirs).max(initial=0.0)), self._limit(point, values)
        self._note(point.operation, far, limit, values)
        if far > limit:
            self._reply.differ.append((place, far, limit, self._about))

    def _limit(self, point: Point, values: np.ndarray, scale: float = 0.0) -> float:
        deviation = self._deviations.get(self.number, {}).get(point.key, 0.0 if not self._repetitions else math.inf)
        assert self._step is not None
        epsilon = max(self._step.epsilon, self.epsilon)
        return tolerance(deviation, epsilon, point.summands, max(scale, _size(values)))

    def _note(self, operation: str, far: float, limit: float, values: np.ndarray) -> None:
        report = self.report
        report.points += 1
        if limit > _size(values) / 2 and limit:
            report.left_out[f"{operation} from step {self.number}"] = "as rounding explains differences of their size"
        elif limit and far / limit > report.nearest[0] and far <= limit:
            report.nearest = far / limit, f"{operation} in step {self.number}"

    def _draw(self, key: str, operation: str, state: np.ndarray, shape: Sequence[int] | None) -> Replay | None:
        if self._rows:
            self._reply.draws[key] = state.tobytes().hex()
        if self._step is None or self._blind or self._mine is None:
            return None
        found = self._recorded(operation)
        if len(found) == 1 and shape is not None and not self._ambiguous:
            place, rows, _ = found[0]
            point = self._step.points[place]
            if point.axis is not None:
                expected = list(point.shape)
                expected[point.axis] = self._rows
                if list(shape) == expected:
                    return Replay(self._step.values[place], point.shape, point.axis, rows)
        self._blind = [f"all after {operation}", "as it draws random numbers that cannot be replayed"]
        return None

    def leave_out(self, operation: str, reason: str, rest: bool = False) -> None:
        if self.done or (rest and self._blind):
            return
        if rest:
            self._blind = [f"all after {operation}", reason]
        else:
            super().leave_out(operation, reason)

    # the end of a step

    def _step_ends(self, ranks: Any) -> None:
        replies = [self._read(data) for data in _gathered(ranks, self._sent())]
        errors = [error for _, error in replies if error]
        if errors:
            raise ShadowError(errors[0])
        if self._step is None:
            if self.folder.ended():
                text = f"one process ended after {counted(self.number - 1, 'step')}, the ranks have more"
                raise self._found(self._of_count(self.number, list(range(len(replies))), text))
            self.finish(ranks)
            return
        all_ = [reply for reply, _ in replies]
        self._blind = next((reply.blind for reply in all_ if reply.blind), [])
        if self._blind:
            self.report.left_out[self._blind[0]] = self._blind[1]
        self._account(all_)
        findings = [*self._of_points(all_), *self._of_rows(all_), *self._of_draws(all_), *self._of_sums(all_)]
        self.report.ranks = len(all_)
        for reply in all_:
            for operation in reply.missing:
                self.report.left_out[operation] = "as no axis of it is that of the rows"
        if findings:
            raise self._found(self._error_of(findings))
        self.report.steps = self.number

    def _found(self, error: DifferenceError) -> DifferenceError:
        """Return an error, after which the session ends."""
        self.done, self._difference = True, error
        return error

    def _of_count(self, step: int, ranks: Sequence[int], text: str) -> DifferenceError:
        remedy = "Give both the same data, global batches and epochs"
        return DifferenceError(f"ms.shadow: step {step}, {named('rank', ranks)}, number of steps: {text}. {remedy}",
                               step, ranks, "number of steps")  # fmt: skip

    def close(self) -> None:
        if self._difference is not None:  # the program may have caught it
            raise self._difference
        super().close()

    def _closed(self) -> None:
        report, recorded = self.report, self.folder.count()
        if self.number <= min(recorded, self.steps):
            text = f"the ranks ended after {counted(report.steps, 'step')}, one process took {recorded} or more"
            raise self._found(self._of_count(self.number, list(range(report.ranks)), text))
        if not report.points and not report.rows:
            raise ShadowError(
                f"{self.folder.function}: nothing was compared in {counted(report.steps, 'step')}: {report}"
            )
        report.whole = self.number <= self.steps and self.folder.ended()

    def _account(self, replies: Sequence[_Reply]) -> None:
        """Report what one process has and ranks have not, or ranks only."""
        assert self._step is not None
        left_out, points = self.report.left_out, self._step.points
        self.report.rows += sum(len(digests[0]) for reply in replies for digests in reply.rows.values() if len(digests))
        for reply in replies:
            left_out |= reply.unseen
        if self._blind:
            return
        lacking: dict[str, set[int]] = {}
        for place, point in enumerate(points):
            without = {rank for rank, reply in enumerate(replies) if place not in reply.seen}
            if point.kind != "draw" and (len(without) == len(replies) or (without and point.kind == "all")):
                lacking.setdefault(point.operation, set()).update(without)
        for operation, ranks in lacking.items():
            left_out[operation] = f"as {named('rank', sorted(ranks))} lacked it"
        known = {point.operation for point in points}
        left_out |= {
            each: "as only the ranks have it" for reply in replies for each in reply.extra if each not in known
        }

    def _sent(self) -> bytes:
        reply = self._reply
        meta = [reply.differ, reply.names, reply.draws, reply.missing, self._blind, self._error, sorted(self._seen),
                sorted(self._extra), self._unseen]  # fmt: skip
        return packed(meta, {**reply.rows, **{f"gradient{key}": each for key, each in reply.gradients.items()}})

    @staticmethod
    def _read(data: bytes) -> tuple[_Reply, str]:
        (differ, names, draws, missing, blind, error, *seen), arrays = unpacked(data)
        gradients = {name[8:]: each for name, each in arrays.items() if name.startswith("gradient")}
        rows = {name: each for name, each in arrays.items() if name.startswith("rows")}
        return _Reply([tuple(each) for each in differ], names, draws, missing, gradients, rows, blind, *seen), error

    def _of_points(self, replies: Sequence[_Reply]) -> list[_Finding]:
        assert self._step is not None
        first = min((place for reply in replies for place, *_ in reply.differ), default=None)
        if first is None:
            return []
        found = {rank: each for rank, reply in enumerate(replies) for each in reply.differ if each[0] == first}
        _, far, limit, about = max(found.values(), key=lambda each: each[1])
        point = self._step.points[first]
        other = f"; {point.about} on one process" if about != point.about else ""
        operation = f"{point.operation} ({about}{other})" if about else point.operation
        size = _size(self._step.values[first])
        text = f"differs by {far:.2g}, where rounding explains {limit:.1g}; its largest value is {size:.2g}"
        return [_Finding(first, operation, list(found), f"{text}. {_hint(point, about, len(found), len(replies))}")]

    def _of_rows(self, replies: Sequence[_Reply]) -> list[_Finding]:
        """Compare the rows of all ranks with the recorded ones, in any order."""
        assert self._step is not None
        recorded = collections.Counter(digest for each in self._step.passes for digest in each.joint)
        count = sum(recorded.values())
        left, extra, total = recorded.copy(), dict[int, list[tuple[int, int]]](), 0
        for rank, reply in enumerate(replies):
            for number in range(len(reply.names)):
                for row, digest in enumerate(joint_digests(reply.rows[f"rows{number}"])):
                    total += 1
                    left[digest] -= 1
                    if left[digest] < 0:
                        extra.setdefault(rank, []).append((number, row))
        missing = sum(max(number, 0) for number in left.values())
        if not extra and not missing:
            return []
        if total != count:
            text = f"the ranks have {counted(total, 'row')} together, one process {count}"
            remedy = "Give both the same global batch"
            first = self._step.passes[0].order if self._step.passes else 0
            return [_Finding(first, "input", list(extra) or range(len(replies)), f"differs: {text}. {remedy}")]
        rank, places = next(iter(extra.items()))
        number, row = places[0]
        reply = replies[rank]
        names, digests = reply.names[number], reply.rows[f"rows{number}"]
        order = self._step.passes[min(number, len(self._step.passes) - 1)].order
        where = self._whereabouts(digests[:, row], names)
        texts = ranges(row for at, row in places if at == number)
        text = f"has other rows: of {', '.join(names)} rows {', '.join(texts)} of its part; {where}"
        return [_Finding(order, "input", list(extra), text)]

    def _whereabouts(self, digests: np.ndarray, names: Sequence[str]) -> str:
        """Return where a row that is not in the step comes from."""
        assert self._step is not None
        (joint,) = joint_digests(digests[:, None])
        if joint in self._rows_of:
            return f"the first is row {self._rows_of[joint][0][1]} of the batch, which ranks have more often than one process"
        known = self.folder.rows().get(joint)
        if known:
            return f"the first is {known} on one process: the ranks read in another order"
        columns: list[str] = []
        for place, name in enumerate(names):
            rows = [int(row) for each in self._step.passes if list(each.names) == list(names)
                    for row in np.flatnonzero(each.digests[place] == digests[place])]  # fmt: skip
            columns.append(f"{name} is that of row {rows[0]}" if rows else f"{name} is not in the batch")
        if len(names) > 1 and any("row" in each for each in columns):
            return f"of the first {' and '.join(columns)}"
        return "the first is in no step of one process: other data, or computed otherwise before the step"

    def _of_draws(self, replies: Sequence[_Reply]) -> list[_Finding]:
        """Find ranks whose generators have equal states where they draw random numbers."""
        assert self._step is not None
        ranks_of: dict[tuple[str, str], list[int]] = {}
        for rank, reply in enumerate(replies):
            for key, state in reply.draws.items():
                ranks_of.setdefault((key, state), []).append(rank)
        found = []
        for (key, _), ranks in ranks_of.items():
            if len(ranks) > 1:
                operation = key.partition(": ")[2].rpartition(" #")[0]
                text = "draw equal random numbers for different rows. Seed each rank with its number"
                found.append(_Finding(self._places.get(key, 0), operation, ranks, text))
        return found

    def _of_sums(self, replies: Sequence[_Reply]) -> list[_Finding]:
        """Compare the sums of the ranks' gradients."""
        assert self._step is not None
        found: _Finding | None = None
        differ: list[int] = []
        points = [place for place, point in enumerate(self._step.points) if point.kind == "sum"]
        for place in () if self._blind else points:
            parts = [reply.gradients.get(str(place)) for reply in replies]
            there = [part for part in parts if part is not None]
            point, values = self._step.points[place], self._step.values[place]
            total = np.sum(there, axis=0) if there else np.zeros_like(values)
            far = float(difference(total, values).max(initial=0.0))
            limit = self._limit(point, values, max((_size(part) for part in there), default=0.0))
            self._note(f"sum of {point.operation}", far, limit, values)
            if far <= limit:
                continue
            differ.append(place)
            if found is None:
                text = f"differs by {far:.2g} in its sum over the ranks, where rounding explains {limit:.1g}"
                found = _Finding(place, point.operation, range(len(parts)), text)
        if found is None:
            return []
        ranks, why = self._explain(replies, differ)
        text = f"{found.text}; {len(differ)} of {counted(len(points), 'gradient')} differ. {why}"
        return [found._replace(text=text, ranks=ranks or found.ranks)]

    def _explain(self, replies: Sequence[_Reply], points: Sequence[int]) -> tuple[list[int], str]:
        """Return the ranks whose gradients count too much or too little, and how much, by least squares.

        Args:
            replies: of the ranks.
            points: the gradients that differ. Those that are equal may have other shares.
        """
        assert self._step is not None
        size = len(replies)
        rows = np.array([sum(each.shape[1] for each in reply.rows.values()) for reply in replies])
        columns = [np.concatenate([self._part(reply, place) for place in points]) for reply in replies]
        recorded = np.concatenate([self._step.values[place] for place in points])
        matrix = np.stack(columns, 1)
        odd = {"NaN or infinity": ~np.isfinite(matrix).all(0), "zeros": ~matrix.any(0) & ((rows > 0) | ~rows.any())}
        for what, found in odd.items():
            ranks = np.flatnonzero(found).tolist()
            if 0 < len(ranks) < size:
                return ranks, f"{named('rank', ranks)} add{'s' * (len(ranks) == 1)} {what}"
        if not (np.isfinite(matrix).all() and np.isfinite(recorded).all() and recorded.any()):
            return [], ""
        shares, _, independent, _ = np.linalg.lstsq(matrix, recorded, rcond=1e-4)
        if independent < size or np.linalg.norm(matrix @ shares - recorded) > _CLOSE * np.linalg.norm(recorded):
            ratio = float(matrix.sum(1) @ recorded / (recorded @ recorded))
            if np.linalg.norm(matrix.sum(1) - ratio * recorded) <= _CLOSE * np.linalg.norm(ratio * recorded):
                return [], _times(ratio, size)
            return [], "It is no multiple of one process's: look at the loss, and at what follows the last equal output"
        if size > 1 and rows.all() and np.allclose(shares, rows / rows.sum(), rtol=_CLOSE):
            return [], f"{_OWN_ROWS} ({', '.join(map(str, rows))})"
        if shares.max() - shares.min() < _CLOSE * abs(shares).max():
            return [], _times(1 / float(shares.mean()), size)
        wrong = [rank for rank, share in enumerate(shares) if abs(share - 1) > _CLOSE]
        each = ", ".join(f"rank {rank}'s {1 / shares[rank]:.3g} times" for rank in wrong if abs(shares[rank]) > _CLOSE)
        return wrong, f"It has {each} what it should be" if each else ""

    def _part(self, reply: _Reply, place: int) -> np.ndarray:
        assert self._step is not None
        found = reply.gradients.get(str(place))
        return np.zeros_like(self._step.values[place]) if found is None else found

    def _error_of(self, findings: Sequence[_Finding]) -> DifferenceError:
        assert self._step is not None
        first = min(findings, key=lambda each: each.order)
        before = [point.operation for point in self._step.points[: first.order] if point.kind != "draw"]
        equal = (
            f" Equal before it in this step: {counted(len(before), 'tensor')}, the last {before[-1]}." if before else ""
        )
        text = f"step {self.number}, {named('rank', list(first.ranks))}, {first.operation}: {first.text.rstrip('. ')}.{equal}"
        if not self._repetitions:
            text += " Rounding was not measured (ms.shadow.round_off), so the tolerance is that of one sum."
        return DifferenceError(f"ms.shadow: {text}", self.number, list(first.ranks), first.operation)


def _chosen(candidates: Sequence[Sequence[tuple[int, int]]]) -> tuple[list[tuple[int, int]], bool]:
    """Return one recorded row for each of this rank's, and True if some were guessed.

    Of equal rows it takes the one on the line through the rows that are there once: ranks have blocks of the batch, or every
    n-th row.

    Example:
        >>> _chosen([[(0, 4)], [(0, 1), (0, 5)], [(0, 6)]])
        ([(0, 4), (0, 5), (0, 6)], False)
    """
    unique = [(place, each[0]) for place, each in enumerate(candidates) if len(each) == 1]
    chosen, guessed = [], False
    for place, each in enumerate(candidates):
        if len(each) == 1 or not unique:
            chosen.append(each[0])
            guessed = guessed or len(each) > 1
            continue
        near = sorted(unique, key=lambda known: abs(known[0] - place))[:2]
        (first, (number, row)), (last, (_, end)) = near[0], near[-1]
        step = (end - row) // (last - first) if last != first else 1
        expected = (number, row + step * (place - first))
        guessed = guessed or expected not in each
        chosen.append(expected if expected in each else each[0])
    return chosen, guessed


def _times(ratio: float, size: int) -> str:
    text = f"The sum is {ratio:.4g} times that of one process"
    if abs(ratio - size) < _CLOSE * size:
        return f"{text}. {_OWN_ROWS}"
    if abs(ratio * size - 1) < _CLOSE:
        return f"{text}: the sum is divided by the number of ranks, though the loss is already"
    return f"{text}: look at the divisor of the loss"


def _hint(point: Point, about: str, differ: int, size: int) -> str:
    if point.kind == "rows":
        if "BatchNorm" in about:
            return "It uses the statistics of this rank's rows: sync_batch_norm=True uses those of all"
        return "Its inputs are equal: look for other rows of the batch, settings or weights of this rank"
    if point.operation.endswith("at the start of the step"):
        return "A write between the steps, or at the start, differs" + (" on these ranks only" if differ < size else "")
    if point.operation.startswith("gradient"):
        return (
            "It should be that of the whole batch here: is the model in DistributedDataParallel, are gradients reduced"
        )
    if point.operation.endswith("after the update"):
        return "The sum of the gradients is equal: look at the update" + (
            ", such as the learning rate, aggregation, or a write" if differ == size else " of these ranks"
        )
    return ""


def _size(values: np.ndarray) -> float:
    finite = np.abs(values[np.isfinite(values)])
    return float(finite.max(initial=0.0))


def _gathered(ranks: Any, data: bytes) -> list[bytes]:
    """Return each rank's bytes. Collective over the ranks of a strategy, or of a group of torch.distributed."""
    group = ranks.extended.process_group

    def gather() -> list[bytes]:
        """Return them. Collective."""
        with group.collective("ms.shadow"):
            return list(group.all_gather_bytes(data))

    return list(group.in_order("ms.shadow", gather))

"""The choice of an algorithm: by the name in a setting, or for each array by a table of device, layout and size.

The table was measured by benchmarks/tune_chooser.py. It is never tuned at run time: the same layout gives the same bits.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from ..arena.reduction import Consume, Gradients, StartedSums
from ..base.agree import same, together
from ..base.distributed_values import PerReplica
from ..base.errors import CollectiveMismatchError, by_rank, explain
from ..base.files import read_whole
from ..base.log import once
from ..base.options import CommunicationOptions
from ..base.text import printable
from ..base.types import CommunicationImplementation, ReduceOp
from ..comm.arrays import is_gpu
from ..comm.gpu import why_not_nccl
from ..comm.process_group import ProcessGroup
from .hierarchical import HierarchicalAllReduce
from .mpi import MpiAllReduce
from .nccl import NcclAllReduce
from .ops import IMPLEMENTATIONS, CrossDeviceOps

__all__ = ["AutoAllReduce", "Chooser", "ChooserRule", "make_cross_device_ops"]


def make_cross_device_ops(
    implementation: CommunicationImplementation | CrossDeviceOps | str | None = None,
) -> CrossDeviceOps:
    """Return an object that computes reductions; the caller binds it to its ranks.

    Args:
        implementation: an algorithm's name or member of CommunicationImplementation, your own object, or None for the chooser's
            table.

    Raises:
        MissingDependencyError: NCCL without CuPy, or CuPy without NCCL.
        ValueError: it is none of these.

    Example:
        >>> type(make_cross_device_ops("mpi")).__name__
        'MpiAllReduce'
    """
    if implementation is None:
        return AutoAllReduce()
    if isinstance(implementation, CrossDeviceOps):
        return implementation
    if isinstance(implementation, str) and implementation.upper() in CommunicationImplementation.__members__:
        implementation = CommunicationImplementation[implementation.upper()]
    if isinstance(implementation, CommunicationImplementation):
        return IMPLEMENTATIONS[implementation]()
    legal = ", ".join(CommunicationImplementation.__members__)
    expected = f"a CrossDeviceOps object, or one of {legal}"
    raise ValueError(explain("make_cross_device_ops", "implementation", expected=expected, got=repr(implementation)))


@final
class AutoAllReduce(CrossDeviceOps, implementation=CommunicationImplementation.AUTO):
    """A CrossDeviceOps that uses the algorithm in a table for each array's device, layout and size.

    The table is in the file that MPISTRAT_CHOOSER names, else in the package's. If it names NCCL, and there is none, or ranks
    share a GPU, CUDA-aware MPI or shared memory is used, which is logged once.

    Example:
        >>> print(AutoAllReduce().chooser)  # doctest: +ELLIPSIS
        all-reduce algorithms, ...
    """

    reduce_ops = tuple(ReduceOp)
    sums_pieces = True
    encodes = True

    def __init__(self) -> None:
        self.chooser = Chooser()
        self._algorithms: dict[str, CrossDeviceOps] = {}
        self._nodes = "one"

    def bind(self, group: ProcessGroup) -> None:
        """Set the ranks that this object works over. Collective if MPISTRAT_CHOOSER names a table, which they compare."""
        super().bind(group)
        if group.environment.chooser:
            with group.collective("the table of MPISTRAT_CHOOSER"):  # once, so calls do not compare their algorithms
                with together(group.all_gather_text):
                    self.chooser = _named(group.environment.chooser)
                same(group.all_gather_text, self.chooser.said(), _other_tables, self.chooser.source)
        self._nodes = "one" if group.num_nodes == 1 else "several"
        self._algorithms = {"MPI": MpiAllReduce(), "HIERARCHICAL": HierarchicalAllReduce()}
        for algorithm in self._algorithms.values():
            algorithm.bind(group)

    def close(self) -> None:
        super().close()
        for algorithm in self._algorithms.values():
            algorithm.close()

    def _algorithm_for(self, array: Any, options: CommunicationOptions | None = None) -> CrossDeviceOps:
        device = "gpu" if is_gpu(array) else "cpu"
        if self._is_undecided(device, array.nbytes):  # ranks compare only after all have arrived with such an array
            with self.group.collective("first array on a GPU"):
                self._algorithm(device, array.nbytes)
        chosen = self._algorithm(device, array.nbytes)
        self._warn_of_other(chosen, array.nbytes, options)
        return chosen

    def _said_of(self, array: Any) -> str:
        return "on a GPU" if is_gpu(array) else ""

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Return the reduced values; the choice depends on the total size on each kind of device. Collective."""
        results: list[Any] = [None] * len(value_destination_pairs)
        for on_gpu in (False, True):
            members = [i for i, (value, _) in enumerate(value_destination_pairs) if is_gpu(value.values[0]) == on_gpu]
            if not members:
                continue
            pairs = [value_destination_pairs[i] for i in members]
            nbytes = sum(value.values[0].nbytes for value, _ in pairs)
            chosen = self._algorithm("gpu" if on_gpu else "cpu", nbytes)
            self._warn_of_other(chosen, nbytes, options)
            chosen.call = self.call
            reduced = chosen.batch_reduce_implementation(reduce_op, pairs, options)
            for index, result in zip(members, reduced, strict=True):
                results[index] = result
        return results

    def node_gradients(self, arena: Gradients) -> Sequence[Any] | None:
        return self._algorithms["HIERARCHICAL"].node_gradients(arena)

    def reduce_arena(self, arena: Gradients, ranges: Sequence[tuple[int, int]], consume: Consume) -> None:
        chosen = self._algorithms["HIERARCHICAL"]
        if is_gpu(arena.local[0]):
            chosen = self._algorithm("gpu", arena.size * arena.dtype.itemsize)
        chosen.call = self.call
        chosen.reduce_arena(arena, ranges, consume)

    def early_sums(self, arena: Gradients) -> StartedSums | None:
        chosen = self._algorithms.get("NCCL" if is_gpu(arena.local[0]) else "HIERARCHICAL")
        return None if chosen is None else chosen.early_sums(arena)

    def _warn_of_other(self, chosen: CrossDeviceOps, nbytes: int, options: CommunicationOptions | None) -> None:
        """Warn that the table's algorithm does not encode sums, though the call's options ask for it."""
        if options is not None and options.between_nodes() and self._nodes != "one" and not chosen.encodes:
            from .fewer_bytes import warn

            warn(options, nbytes, f"{self.chooser.source} names {type(chosen).__name__}")

    def _algorithm(self, device: str, nbytes: int) -> CrossDeviceOps:
        """Return the table's algorithm. Collective, inside `collective()`, while that is undecided."""
        name = self.chooser.choose(device, self._nodes, nbytes).algorithm
        if name == "NCCL" and name not in self._algorithms:
            self._algorithms[name] = self._nccl_or_other()
        return self._algorithms[name]

    def _is_undecided(self, device: str, nbytes: int) -> bool:
        """Return True if the table names NCCL, and the ranks have not compared yet if they can use it."""
        wanted = device == "gpu" and self.chooser.choose(device, self._nodes, nbytes).algorithm == "NCCL"
        return wanted and "NCCL" not in self._algorithms

    def _nccl_or_other(self) -> CrossDeviceOps:
        """Return NCCL's algorithm, or its replacement. Collective, inside `collective()`."""
        reason = why_not_nccl(self.group)
        if not reason:
            nccl = NcclAllReduce()
            nccl.bind(self.group)
            return nccl
        from ..comm.gpu_support import gpu_aware

        aware = self.group.all_gather_int([int(gpu_aware())]).all()
        name, way = ("MPI", "CUDA-aware MPI") if aware else ("HIERARCHICAL", "host memory")
        once(logging.WARNING, f"arrays on GPUs go through {way}, not NCCL: {reason}")
        return self._algorithms[name]


# The table

ALGORITHMS = ("MPI", "HIERARCHICAL", "NCCL")
DEVICES = ("cpu", "gpu")
NODES = ("one", "several")


@final
@dataclass(frozen=True)
class ChooserRule:
    """One line of a chooser's table.

    Attributes:
        device: "cpu" or "gpu".
        nodes: "one" or "several".
        below: the rule applies to fewer bytes; None for any number.
        algorithm: MPI, HIERARCHICAL or NCCL.
        why: the reason, for readers.
    """

    device: str
    nodes: str
    below: int | None
    algorithm: str
    why: str = ""


@final
class Chooser:
    """A choice of an algorithm by device, number of nodes and bytes. `print(chooser)` shows the table and the reasons.

    Args:
        table: a table with the structure of the JSON file, or the path of such a file; default: the package's.

    Raises:
        ValueError: the table is malformed, or has no rule for a case; with the file and the rule.
        OSError: the file is missing, or not a regular one, or larger than 16 MiB.

    Example:
        >>> Chooser().choose("cpu", "one", 1 << 24).algorithm
        'HIERARCHICAL'
    """

    def __init__(self, table: Mapping[str, Any] | str | os.PathLike[str] | None = None) -> None:
        if table is None:
            table = Path(__file__).with_name("chooser_table.json")
        if isinstance(table, Mapping):
            self.source = "a table given as argument"
            content: Any = table
        else:
            self.source = os.fspath(table)
            content = _read(Path(self.source))
        self.measured = str(content.get("measured", "")) if isinstance(content, Mapping) else ""
        self._rules = _parse(content, self.source)

    def choose(self, device: str, nodes: str, nbytes: int) -> ChooserRule:
        """Return the rule for an array of `nbytes` bytes on a "cpu" or "gpu", on "one" node or "several"."""
        for rule in self._rules[device, nodes]:
            if rule.below is None or nbytes < rule.below:
                return rule
        raise ValueError(f"Chooser: no rule for {nbytes} bytes")  # impossible: _parse has checked the rules

    @property
    def rules(self) -> list[ChooserRule]:
        """All rules, in the order of the table."""
        return [rule for rules in self._rules.values() for rule in rules]

    def said(self) -> str:
        """Return the rules as text, equal for all tables with equal rules."""
        return repr(sorted((key, [(r.below, r.algorithm) for r in rules]) for key, rules in self._rules.items()))

    def __str__(self) -> str:
        lines = [f"all-reduce algorithms, from {self.source}", self.measured] if self.measured else [self.source]
        lines.append(f"{'device':7}{'nodes':9}{'bytes':>14}  {'algorithm':14}why")
        for rule in self.rules:
            size = "any more" if rule.below is None else f"< {rule.below:,}"
            lines.append(f"{rule.device:7}{rule.nodes:9}{size:>14}  {rule.algorithm:14}{rule.why}".rstrip())
        return "\n".join(map(printable, lines))


def _named(path: str) -> Chooser:
    """Return the table that the environment names."""
    try:
        return Chooser(path)
    except OSError as error:
        text = explain("environment", "MPISTRAT_CHOOSER", expected="the path of a JSON file", got=str(error))
        raise type(error)(text) from None


def _other_tables(sources: dict[int, str]) -> CollectiveMismatchError:
    return CollectiveMismatchError(f"MPISTRAT_CHOOSER: the ranks have tables with different rules:{by_rank(sources)}")


def _read(path: Path) -> Any:
    try:
        return json.loads(read_whole(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(explain("Chooser", "table", expected=f"JSON in {path}", got=str(error))) from error


def _parse(content: Any, source: str) -> dict[tuple[str, str], list[ChooserRule]]:
    if not isinstance(content, Mapping) or not isinstance(content.get("rules"), Sequence):
        raise ValueError(
            explain("Chooser", source, expected="an object with a list named rules", got=f"{content!r:.60}")
        )
    rules: dict[tuple[str, str], list[ChooserRule]] = {(device, nodes): [] for device in DEVICES for nodes in NODES}
    for number, entry in enumerate(content["rules"]):
        rule = _rule(entry, f"{source}, rule {number}")
        rules[rule.device, rule.nodes].append(rule)
    for (device, nodes), found in rules.items():
        borders = [rule.below for rule in found]
        finite = [border for border in borders if border is not None]
        if not borders or borders[-1] is not None or len(finite) != len(borders) - 1 or finite != sorted(finite):
            expected = f"rules for {device}, {nodes} node(s) with ascending 'below', the last one null"
            raise ValueError(explain("Chooser", source, expected=expected, got=str(borders)))
    return rules


def _rule(entry: Any, where: str) -> ChooserRule:
    try:
        rule = ChooserRule(**entry)
    except TypeError as error:
        expected = "device, nodes, below, algorithm and why"
        raise ValueError(explain("Chooser", where, expected=expected, got=f"{entry!r:.80}")) from error
    legal = {"device": DEVICES, "nodes": NODES, "algorithm": ALGORITHMS}
    for field, words in legal.items():
        if getattr(rule, field) not in words:
            expected = f"{field} to be one of {', '.join(words)}"
            raise ValueError(explain("Chooser", where, expected=expected, got=repr(getattr(rule, field))))
    if rule.below is not None and (not isinstance(rule.below, int) or rule.below < 1):
        raise ValueError(explain("Chooser", where, expected="below: a number of bytes or null", got=repr(rule.below)))
    return rule

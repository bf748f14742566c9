"""A step by PyTorch itself: its NCCL sums the gradients, and the program's optimizer updates.

The optimizer's state is tensors in the memory of the slots, so files, snapshots and `state_dict` have it as on CPUs.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from ..arena.arena import Arena, by_arena, padded
from ..base.partition import merge
from ..base.types import Quality
from ..comm.arrays import accumulation_dtype
from ..comm.call import payload_bytes
from ..comm.process_group import ProcessGroup
from ..cross_device.auto import AutoAllReduce
from ..cross_device.nccl import NcclAllReduce
from ..optimizers.gradients import Pairs, load_gradients
from ..optimizers.rule import UpdateRun
from ..variables import Variable
from ..variables.equal import different_copies
from .backend.rendezvous import store_of
from .tensors import tensor_of

if TYPE_CHECKING:
    from .backend.group import MpiProcessGroup

__all__ = ["BegunInBackward", "GradientSums", "OwnState", "TorchStep", "goes_by_torch", "steps_by_torch", "sums_of"]

_BUCKET_BYTES = 25 << 20  # as those of DistributedDataParallel
_NAME = "ms.torch.distribute"
_sums: weakref.WeakKeyDictionary[Any, GradientSums] = weakref.WeakKeyDictionary()  # by strategy


def goes_by_torch(placement: Any) -> bool:
    """Return True if variables are on devices where PyTorch itself runs steps: on GPUs."""
    return bool(placement.arenas.on_gpu)


def sums_of(strategy: Any, device: torch.device) -> GradientSums | None:
    """Return the sums of gradients by torch.distributed; None if the package itself runs steps.

    It does on CPUs, with parameter servers, a mesh, several replicas on a rank, slots divided over nodes, or an algorithm for
    sums that the program has chosen. Collective, the first time for a strategy.

    Args:
        strategy: the strategy.
        device: of its gradients.
    """
    extended = strategy.extended
    placement = extended.placement
    if not goes_by_torch(placement) or len(extended.replicas) > 1 or placement.lacks(*Quality):
        return None
    if type(placement.ops) not in (AutoAllReduce, NcclAllReduce):
        return None
    if strategy not in _sums:
        _sums[strategy] = GradientSums(placement.group, device)
    return _sums[strategy]


def steps_by_torch(variables: Sequence[Variable]) -> bool:
    """Return True if PyTorch can update variables like its own: whole on each rank, of 32 or 64 bits.

    The package stores the state of 16-bit parameters in 32 bits. All ranks call it.
    """
    return all(
        variable.arena is not None
        and not variable.arena.sharded
        and accumulation_dtype(variable.dtype) == variable.dtype
        for variable in variables
    )


@final
class GradientSums:
    """Sums over the ranks of a strategy, by a process group of torch.distributed. Collective.

    Attributes:
        group: the process group; None for one rank, which has nothing to sum.
    """

    def __init__(self, ranks: ProcessGroup, device: torch.device) -> None:
        self.group: MpiProcessGroup | None = None
        if ranks.topology.size == 1:
            return
        from .backend.group import over

        topology, limit = ranks.topology, timedelta(seconds=ranks.environment.abort_after)
        store, _, _ = store_of(topology.comm, topology.intra, limit, _NAME)
        self.group = over(topology.comm, store, limit, _NAME)
        ranks.attach(self)
        self.group.allreduce([torch.zeros(1, device=device)]).wait()  # a missing NCCL raises here, not in a step

    def start(self, flat: torch.Tensor) -> list[Any]:
        """Start to sum a flat tensor over all ranks, in buckets and in place. Return the works. Collective."""
        if self.group is None:
            return []
        length = max(1, _BUCKET_BYTES // flat.element_size())
        return [self.group.allreduce([bucket]) for bucket in flat.split(length)]

    def close(self) -> None:
        """End the process group. Collective."""
        if self.group is not None:
            self.group.shutdown()

    def leave(self) -> None:
        """Do nothing: the strategy's group shows other ranks that this one leaves."""

    def abandon(self) -> None:
        """End the process group without the other ranks, some of which are gone. Local."""
        if self.group is not None:
            self.group.abort()


class _Range(NamedTuple):
    """A contiguous range of an arena, and its variables."""

    arena: Arena
    low: int
    high: int
    variables: Sequence[Variable]


class _Sum(NamedTuple):
    """The gradients of a range of variables in separate memory, and the works of their sum."""

    range: _Range
    flat: torch.Tensor
    works: Sequence[Any]


def _ranges_of(variables: Sequence[Variable]) -> list[_Range]:
    """Return the ranges of variables, in the same order on all ranks."""
    return [
        _Range(arena, low, high, [variable for variable in some if low <= variable.offset < high])
        for arena, some in by_arena(variables).items()
        for low, high in merge(list(padded(arena, some).items()))
    ]


def _parts(found: _Range, flat: torch.Tensor) -> list[torch.Tensor]:
    """Return views of a range's flat tensor, one per variable."""
    starts = [variable.offset - found.low for variable in found.variables]
    return [flat[low : low + v.size].view(v.shape) for low, v in zip(starts, found.variables, strict=True)]


@final
class BegunInBackward:
    """The sums started by backward passes since the last step, with the methods of `Begun`.

    Attributes:
        sums: of the strategy.
        words: names in order, which ranks compare in the step.
        early, able, on_one_node: True: sums start early, also on one node.
    """

    early = able = on_one_node = True

    def __init__(self, sums: GradientSums) -> None:
        self.sums, self._started = sums, list[_Sum]()
        self._used = False  # only with overlap=True
        self.words = ""

    @torch.no_grad()
    def start(self, links: Sequence[Any]) -> None:
        """Start to sum complete gradients. Collective; in the thread of a backward pass, where CuPy has no device."""
        gradients = {link.variable: link.gradient for link in links if link.gradient is not None}
        if not steps_by_torch([*gradients]):
            return
        self._used = True
        for found in _ranges_of([*gradients]):
            own = [gradients[variable] for variable in found.variables]
            flat = own[0].new_zeros(found.high - found.low)
            torch._foreach_copy_(_parts(found, flat), own)
            self._started.append(_Sum(found, flat, self.sums.start(flat)))
        self.words += f", begun: {', '.join(variable.name for variable in gradients)}"

    def take(self) -> list[_Sum]:
        """Return the started sums, and forget them."""
        started, self._started = self._started, []
        for each in started:
            if each.flat.is_cuda:  # memory of the stream of the backward pass
                each.flat.record_stream(torch.cuda.current_stream(each.flat.device))
        return started

    def least_bytes(self, _: Any) -> int:
        """Return 0: sums of any size start early."""
        return 0

    def check(self, *_: Any) -> None:
        """Do nothing: `Overlap` has found gradients that are not final."""

    note_step = check

    def refuse(self, ranks: ProcessGroup, error: BaseException) -> None:
        """Refuse further collectives after an error: sums may be pending that other ranks have not started."""
        if not self._used:
            return
        self._started.clear()
        ranks.refuse_after(error, "in a step left sums of gradients")
        self.sums.abandon()

    def forget(self) -> None:
        """Discard the started sums. Every rank does it."""
        for each in self.take():
            for work in each.works:
                work.wait()
        self.words = ""


@final
class TorchStep(UpdateRun):
    """The step of one optimizer on one set of parameters, whole in each rank's memory."""

    def __init__(
        self,
        rule: Any,
        state: OwnState,
        started: BegunInBackward,
        variables: Sequence[Variable],
        left_out: Sequence[str],
    ) -> None:
        """Plan the step, of variables in the same order on every rank.

        Args:
            rule: the `TorchRule` of the optimizer.
            state: of the optimizer.
            started: the sums that backward passes have started.
            variables: those with a gradient.
            left_out: names of those without.
        """
        self._rule, self._core, self._state, self._started = rule, rule._core, state, started
        placement = variables[0].placement
        self.strategy = placement.strategy
        self._group, self._number = placement.group, rule._core.number_in(placement)
        self._variables, self._left_out = tuple(variables), tuple(left_out)
        self._nbytes = sum(payload_bytes(variable.dtype, variable.shape) for variable in variables)
        self._ranges = _ranges_of(variables)
        self._names = f"{[variable.name for variable in variables]}, not {self._left_out}"
        self.describe()

    def describe(self) -> None:
        """Update the text that ranks compare, after the optimizer's settings have changed."""
        names = ", ".join(variable.name for variable in self._variables)
        absent = f", not {', '.join(self._left_out)}" if self._left_out else ""
        which = "" if self._number is None else f", the scope's optimizer {self._number}"
        self._detail = f"of {names}{absent} by {self._core.describe()}{which}"

    def load(self, replicas: Sequence[Pairs], key: tuple[int, ...]) -> None:
        """Copy the gradients into the arenas unless they are there."""
        load_gradients(replicas, key)

    def run(self, aggregate: bool) -> None:
        """Take the step. Collective; in cross-replica context."""
        self._compare(aggregate)
        with torch.no_grad():
            sums = self._sum(aggregate)
            self._scale([each.flat for each in sums])
            pairs = (zip(each.range.variables, _parts(each.range, each.flat), strict=True) for each in sums)
            self._state.step(dict(itertools.chain.from_iterable(pairs)))

    def _compare(self, aggregate: bool) -> None:
        """Raise CollectiveMismatchError if steps or, checked periodically, weights differ. Collective."""
        core, group = self._core, self._group
        number = core.calls + 1
        detail = (self._detail if aggregate else f"{self._detail}, without aggregation") + self._started.words
        due = core.taken[self._names] % group.environment.check_every == 0
        words = f", step {number} at rate {core.rate_at(number)!r}"
        try:
            with group.collective("apply_gradients", detail=detail).stamp(words) as call:
                call.nbytes = self._nbytes if aggregate else 0  # which follow it
                core.taken[self._names] += 1
                if due and group.topology.size > 1:
                    error = different_copies("apply_gradients", group, self._variables, self._digests())
                    if error is not None:
                        raise error
                elif group.num_nodes > 1:
                    group.agree(0)  # NCCL would wait silently for a rank that is elsewhere
        except BaseException as error:
            self._started.refuse(group, error)
            raise

    def _digests(self) -> list[int]:
        """Return a number for each range that changes with any of its weights."""
        found = []
        for arena, low, high, _ in self._ranges:
            bits = torch.int32 if arena.dtype.itemsize == 4 else torch.int64
            found.append(tensor_of(arena.values)[low:high].view(bits).sum(dtype=torch.int64))
        return torch.stack(found).tolist() if found else []

    def _sum(self, aggregate: bool) -> list[_Sum]:
        """Return the sums of the gradients, in separate memory: arenas have the replica's own. Collective."""
        sums, ranges = self._started.take(), self._ranges
        if sums:
            known = {variable for each in sums for variable in each.range.variables}
            ranges = _ranges_of([variable for variable in self._variables if variable not in known])
        for found in ranges:
            assert found.arena.gradients is not None
            flat = tensor_of(found.arena.gradients.local[0])[found.low : found.high].clone()
            sums.append(_Sum(found, flat, self._started.sums.start(flat) if aggregate else []))
        for each in sums:
            for work in each.works:
                work.wait()
        return sums

    def _scale(self, sums: Sequence[torch.Tensor]) -> None:
        """Convert sums to the loss's gradients, clipped by norm, without reading a value from a device."""
        factor: Any = self._rule.scale / self._core.divisor
        limit = self._rule.global_clipnorm  # of sums over the counts of losses
        if limit is not None:
            # As _foreach_norm, in float64, where squares of float32 numbers do not overflow.
            norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in sums]
            norm = (
                torch.linalg.vector_norm(torch.stack([each.to(norms[0].device) for each in norms])) / self._core.divisor
            )
            clip = (limit / norm).clamp(max=1.0)
            factor = factor * torch.where(norm.isfinite(), clip, torch.nan)
        elif factor == 1:
            return
        for each in sums:
            each.mul_(factor)


@final
class OwnState:
    """The state of a program's optimizer, in the memory of its slots, and its own step.

    Args:
        rule: counts the steps, and has the slots.
        optimizer: the program's.
    """

    def __init__(self, rule: Any, optimizer: torch.optim.Optimizer) -> None:
        kind: Any = type(optimizer)
        self._rule, self._optimizer = rule, optimizer
        self._raw_step: Any = inspect.unwrap(kind.step)  # `Optimizer.step` has called the hooks
        self._at_once = bool(kind([torch.nn.Parameter(torch.zeros(1, device="cpu"))], lr=1.0).state)  # Adagrad's
        self._state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        self._slots: dict[Any, dict[str, torch.Tensor]] = {}  # by parameter
        self._counted: dict[Any, tuple[Any, int]] = {}  # the counter of its steps, and the number of the last one

    def step(self, gradients: Mapping[Variable, torch.Tensor]) -> None:
        """Update the parameters that have a gradient, with the optimizer itself."""
        optimizer: Any = self._optimizer
        stepping = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                link: Any = getattr(parameter, "mpistrat", None)
                if link is not None and link.variable in gradients:
                    self._prepare(parameter, link.variable, group)
                    stepping[parameter] = gradients[link.variable]
        with self._shown(optimizer, stepping):
            self._raw_step(optimizer)
        for parameter in stepping:
            self._keep(parameter)

    @contextlib.contextmanager
    def _shown(self, optimizer: Any, gradients: Mapping[Any, torch.Tensor]) -> Iterator[None]:
        """Set an optimizer's state and its parameters' summed gradients in a `with` block."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        before, state = [parameter.grad for parameter in parameters], optimizer.state
        try:
            for parameter in parameters:
                parameter.grad = gradients.get(parameter)
            vars(optimizer)["state"] = self._state
            yield
        finally:
            optimizer.state = state
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient

    def _prepare(self, parameter: Any, variable: Variable, group: Mapping[str, Any]) -> None:
        """Set a parameter's state before its next step, unless that step creates it."""
        taken = self._rule.taken_of(variable)
        number = self._rule.iterations + 1 - taken.lag
        known, self._counted[parameter] = self._counted.get(parameter), (taken, number)
        if known is not None and known[0] is taken and known[1] == number - 1:
            return  # created by the optimizer in the last step
        arena, low = variable.arena, variable.offset
        slots = {} if arena is None else self._rule._core.slots.of(arena).of_range(low, low + variable.size)
        found = {name: tensor_of(array).view(variable.shape) for name, array in slots.items()}
        self._slots[parameter], state = found, self._state[parameter]
        state.clear()
        if number == 1 and not taken.begun and not self._at_once:
            return
        state.update(found)
        for name, value in {"step": number - 1, **taken.scalars}.items():
            on_device = name not in ("step", "mu_product") or isinstance(self._optimizer, torch.optim.ASGD)
            on_device = on_device or bool(group.get("fused") or group.get("capturable"))
            device = parameter.device if on_device else "cpu"
            state[name] = torch.tensor(float(value), dtype=torch.float32, device=device)

    def _keep(self, parameter: Any) -> None:
        """Move state that the optimizer has newly created to the memory of the slots."""
        state = self._state[parameter]
        for name, slot in self._slots[parameter].items():
            value = state.get(name)
            if value is not slot and torch.is_tensor(value):
                state[name] = slot.copy_(value)

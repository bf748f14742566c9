"""`DistributedOptimizer`: an optimizer of PyTorch whose step uses the gradients of all ranks."""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from ...base.errors import explain
from ..process_sets import RankSet, global_process_set
from .basics import engine, size
from .calls import (
    Adasum,
    Average,
    ReductionName,
    RepeatedReduction,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)
from .compression import Compression, Compressor

__all__ = ["DistributedOptimizer"]

_FUNCTION = "hvd.DistributedOptimizer"


def _names(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Any]] | None) -> dict[torch.Tensor, str]:
    """Return the name of each parameter.

    Raises:
        ValueError: a name twice, or a parameter without one.
    """
    parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    if named is None:
        groups = enumerate(optimizer.param_groups)
        return {
            tensor: f"allreduce.noname.{place}.{number}"
            for place, group in groups
            for number, tensor in enumerate(group["params"])
        }
    pairs = list(named)
    argument = "named_parameters"
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        expected = "pairs of name and parameter, as model.named_parameters()"
        raise ValueError(explain(_FUNCTION, argument, expected=expected, got="other elements"))
    names = [name for name, _ in pairs]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise ValueError(explain(_FUNCTION, argument, expected="each name once", got=f"more of {', '.join(double)}"))
    known = {id(tensor) for _, tensor in pairs}
    missing = [tuple(tensor.shape) for tensor in parameters if id(tensor) not in known]
    if missing:
        expected, got = "all parameters of the optimizer", f"none for those of shapes {missing}"
        raise ValueError(explain(_FUNCTION, argument, expected=expected, got=got))
    return {tensor: name for name, tensor in pairs}


class _Sent:
    """Pending gradients: of a parameter, or of a group of parameters."""

    __slots__ = ("finish",)

    def __init__(self, finish: Callable[[], None]) -> None:
        self.finish = finish


class _Averaging:
    """Methods that `DistributedOptimizer` adds before those of an optimizer's class."""

    param_groups: list[dict[str, Any]]

    def _start(
        self,
        names: dict[torch.Tensor, str],
        compression: type[Compressor],
        passes: int,
        op: ReductionName,
        predivide: float,
        groups: int | Sequence[Sequence[torch.Tensor]] | None,
        sparse_as_dense: bool,
        process_set: RankSet,
    ) -> None:
        self._parameter_names, self._compression, self.backward_passes_per_step = names, compression, passes
        self._op, self._predivide, self._as_dense, self._set = op, predivide, sparse_as_dense, process_set
        self._trained: list[torch.Tensor] = []
        self._left: dict[torch.Tensor, int] = {}  # backward passes until a gradient is sent
        self._known: set[int] = set()  # the ids of trained parameters
        # By the id of a parameter, or of the first one of a call: PyTorch hashes tensors in Python.
        self._sent: dict[int, _Sent] = {}
        self._reductions: dict[int, RepeatedReduction] = {}
        self._arrived: dict[int, int] = {}  # gradients of a group that wait for its others
        self._synchronized, self._waits = False, True
        self._hooked = process_set.included() and (size() > 1 or os.environ.get("HOROVOD_ELASTIC") == "1")
        self._follow()
        self._group_of = self._grouped(groups)

    def _follow(self) -> None:
        """Note parameters that are trained from now on: all at the start; later thawed ones, and those of added groups."""
        for place, group in enumerate(self.param_groups):
            for number, tensor in enumerate(group["params"]):
                if tensor.requires_grad and id(tensor) not in self._known:
                    self._known.add(id(tensor))
                    self._trained.append(tensor)
                    self._left[tensor] = self.backward_passes_per_step
                    self._parameter_names.setdefault(tensor, f"allreduce.noname.{place}.{number}")
                    if self._hooked:
                        if tensor.grad is None:
                            tensor.grad = torch.zeros_like(tensor)
                        tensor.register_post_accumulate_grad_hook(self._add)

    def _grouped(
        self, groups: int | Sequence[Sequence[torch.Tensor]] | None
    ) -> dict[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the group of each parameter that has one."""
        if isinstance(groups, int):
            parts, extra = divmod(len(self._trained), max(groups, 1))
            ends = [0]
            for number in range(min(groups, len(self._trained))):
                ends.append(ends[-1] + parts + (number < extra))
            groups = [self._trained[low:high] for low, high in itertools.pairwise(ends)]
        found: dict[torch.Tensor, tuple[torch.Tensor, ...]] = {}
        for group in groups or ():
            members = tuple(tensor for tensor in group if tensor in self._left)
            for tensor in group:
                if tensor in found:
                    expected, got = "each parameter in one group", f"{self._parameter_names.get(tensor)!r} in two"
                    raise ValueError(explain(_FUNCTION, "groups", expected=expected, got=got))
                found[tensor] = members
        return found

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes after which gradients are sent."""
        self.backward_passes_per_step = passes
        self._left = dict.fromkeys(self._trained, passes)

    def _add(self, tensor: torch.Tensor) -> None:
        """Record that a gradient was computed, and send it after the last pass."""
        if id(tensor) in self._sent:
            remedy = "Increase backward_passes_per_step to accumulate gradients, or call step() before the next pass"
            expected = f"at most {self.backward_passes_per_step} backward passes before step()"
            raise AssertionError(
                explain(_FUNCTION, self._parameter_names[tensor], expected=expected, got="one more", remedy=remedy)
            )
        if self.backward_passes_per_step > 1:
            self._left[tensor] -= 1
            if self._left[tensor] > 0:
                return
        group = self._group_of.get(tensor) if self._group_of else None
        if group is None:
            self._send([tensor])
            return
        key = id(group)
        self._arrived[key] = self._arrived.get(key, 0) + 1
        if self._arrived[key] == len(group):
            self._arrived[key] = 0
            self._send(group)

    def _send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Start the reduction of gradients; one that was not computed counts as zero."""
        dense, gradients = [], []
        for tensor in tensors:
            gradient = tensor.grad
            if gradient is None:
                gradient = tensor.grad = torch.zeros_like(tensor)
            if gradient.is_sparse:
                if not self._as_dense:
                    self._send_sparse(tensor)
                    continue
                gradient = gradient.to_dense()
            dense.append(tensor)
            gradients.append(gradient)
        if not dense:
            return
        packed = [self._compression.compress(gradient) for gradient in gradients]
        reduction = self._reductions.get(id(dense[0]))
        if reduction is None:
            factor, name = self._predivide if self._op == Average else 1.0, self._parameter_names[dense[0]]
            reduction = RepeatedReduction(name, self._op, 1.0 / factor, factor, self._set)
            self._reductions[id(dense[0])] = reduction
        handle = reduction.start([each for each, _ in packed])

        def finish() -> None:
            for tensor, total, (_, context) in zip(dense, synchronize(handle), packed, strict=True):
                _set_gradient(tensor, self._compression.decompress(total, context))

        sent = _Sent(finish)
        for tensor in dense:
            self._sent[id(tensor)] = sent

    def _send_sparse(self, tensor: torch.Tensor) -> None:
        assert tensor.grad is not None
        wait = sparse_allreduce_async(tensor.grad, self._parameter_names[tensor], self._op, self._set)

        def finish() -> None:
            tensor.grad = wait()

        self._sent[id(tensor)] = _Sent(finish)

    def synchronize(self) -> None:
        """Wait for the gradients of all ranks, for use before `step`, such as clipping."""
        if self._set.included():
            self._follow()
            missing = len(self._sent) < len(self._trained)
            for tensor in self._trained if missing else ():
                if id(tensor) not in self._sent:  # not computed in this pass, or not often enough
                    group = self._group_of.get(tensor)
                    self._send([each for each in group if id(each) not in self._sent] if group else [tensor])
            sent, self._sent = list(dict.fromkeys(self._sent.values())), {}
            for each in sent:
                each.finish()
            if self.backward_passes_per_step > 1:
                self._left = dict.fromkeys(self._trained, self.backward_passes_per_step)
            self._arrived.clear()
        self._synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which `step` does not wait for gradients, after `synchronize`."""
        self._waits = False
        try:
            yield
        finally:
            self._waits = True

    def step(self, closure: Any = None) -> Any:
        """Wait for the gradients of all ranks, after each call of a closure, and update the parameters."""

        def computed() -> Any:
            loss = closure()
            self.synchronize()
            return loss

        waits = self._waits
        if waits and self._synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): it waits for"
                " gradients again. Call it in `with optimizer.skip_synchronize():`",
                stacklevel=2,
            )
        if waits and closure is None:
            self.synchronize()
        result = super().step(computed if waits and closure is not None else closure)  # type: ignore[misc]
        self._synchronized = False
        return result

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Set the gradients to zero; not between `backward` and `step`, while they are pending.

        Raises:
            AssertionError: they are pending.
        """
        if self._sent:
            expected, got = "step() or synchronize() before it", "pending gradients"
            raise AssertionError(explain("optimizer.zero_grad", "", expected=expected, got=got))
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state. Pending gradients are waited for, and discarded."""
        sent, self._sent = list(dict.fromkeys(self._sent.values())), {}
        for each in sent:
            each.finish()
        self._left = dict.fromkeys(self._trained, self.backward_passes_per_step)
        self._synchronized, self._waits = False, True
        super().load_state_dict(*args, **kwargs)  # type: ignore[misc]


class _CombiningDeltas:
    """Methods of an optimizer with Adasum: each rank takes its own step, and the changes are combined."""

    param_groups: list[dict[str, Any]]

    def _start(
        self, names: dict[torch.Tensor, str], compression: type[Compressor], passes: int, process_set: RankSet
    ) -> None:
        self._parameter_names, self._compression, self.backward_passes_per_step = names, compression, passes
        self._set = process_set
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.requires_grad and tensor.grad is None:
                    tensor.grad = torch.zeros_like(tensor)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set the number of backward passes before a step. It has no effect: gradients are accumulated in place."""
        self.backward_passes_per_step = passes

    def synchronize(self) -> None:
        """Do nothing: `step` combines changes of parameters, not gradients."""

    def skip_synchronize(self) -> NoReturn:
        """Raise AssertionError: `step` needs the other ranks' changes."""
        raise AssertionError(explain("optimizer.skip_synchronize", "op", expected="another than Adasum", got="Adasum"))

    def step(self, closure: Any = None) -> Any:
        """Update the parameters with this rank's gradients, and combine the changes of all ranks."""
        tensors = [tensor for group in self.param_groups for tensor in group["params"] if tensor.requires_grad]
        starts = [tensor.detach().clone() for tensor in tensors]
        result = super().step(closure)  # type: ignore[misc]
        with torch.no_grad():
            deltas = [self._compression.compress(tensor - start) for tensor, start in zip(tensors, starts, strict=True)]
            handles = [
                grouped_allreduce_async_([small], name=self._parameter_names[tensor], op=Adasum, process_set=self._set)
                for tensor, (small, _) in zip(tensors, deltas, strict=True)
            ]
            for tensor, start, handle, (_, context) in zip(tensors, starts, handles, deltas, strict=True):
                (delta,) = synchronize(handle)
                tensor.copy_(start + self._compression.decompress(delta, context))
        return result


def _set_gradient(tensor: torch.Tensor, total: torch.Tensor) -> None:
    gradient = tensor.grad
    if gradient is total:
        return
    assert gradient is not None
    if gradient.is_sparse:
        tensor.grad = total.to_sparse()
    elif gradient.data_ptr() != total.data_ptr():
        with torch.no_grad():
            gradient.copy_(total)


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, Any]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReductionName = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: RankSet = global_process_set,
) -> Any:
    """Make an optimizer's step use the gradients of all ranks. It returns the same object, with more methods.

    Each gradient is sent as soon as the backward pass has computed it. `step` waits for all of them.

    Args:
        optimizer: an optimizer of PyTorch.
        named_parameters: names of the parameters, the same on all ranks, as `model.named_parameters()`.
        compression: of sent gradients: `hvd.Compression.none` or `fp16`.
        backward_passes_per_step: the number of passes after which gradients are sent.
        op: `hvd.Average`, `Sum`, or `Adasum`, with which ranks take their own steps and combine the changes.
        gradient_predivide_factor: with `Average`, divides gradients before the sum, and multiplies them after.
        num_groups: the number of groups of gradients, one call each; 0 for one call per gradient.
        groups: their number, or a list of parameters for each group.
        sparse_as_dense: True to send sparse gradients as dense ones.
        process_set: the ranks that take part.

    Raises:
        ValueError: an option or a name is wrong.

    Example:
        >>> import mpistrat.horovod.torch as hvd
        >>> hvd.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        >>> model(torch.ones(4, 2)).sum().backward()
        >>> optimizer.step()
        >>> hvd.shutdown()
    """
    engine("DistributedOptimizer")
    if gradient_predivide_factor != 1.0 and op != Average:
        expected, got = "1 where op is not Average", gradient_predivide_factor
        raise ValueError(explain(_FUNCTION, "gradient_predivide_factor", expected=expected, got=got))
    if backward_passes_per_step < 1:
        raise ValueError(explain(_FUNCTION, "backward_passes_per_step", expected=">= 1", got=backward_passes_per_step))
    if num_groups:
        warnings.warn(
            "hvd.DistributedOptimizer: num_groups is the older name of groups", DeprecationWarning, stacklevel=2
        )
        groups = num_groups
    _check_groups(groups)
    names, kind, plain = _names(optimizer, named_parameters), type(optimizer), op != Adasum or size() == 1
    optimizer.__class__ = type(kind.__name__, (_Averaging if plain else _CombiningDeltas, kind), {})
    start: Any = optimizer
    try:
        if plain:
            start._start(
                names,
                compression,
                backward_passes_per_step,
                op,
                gradient_predivide_factor,
                groups,
                sparse_as_dense,
                process_set,
            )
        else:
            start._start(names, compression, backward_passes_per_step, process_set)
    except Exception:
        optimizer.__class__ = kind
        raise
    return optimizer


def _check_groups(groups: Any) -> None:
    good = groups is None or (isinstance(groups, int) and groups > 0) or isinstance(groups, (list, tuple))
    if not good or (
        isinstance(groups, (list, tuple))
        and not all(isinstance(tensor, torch.Tensor) for group in groups for tensor in group)
    ):
        expected = "a positive number, or lists of parameters"
        raise ValueError(explain(_FUNCTION, "groups", expected=expected, got=repr(groups)[:60]))

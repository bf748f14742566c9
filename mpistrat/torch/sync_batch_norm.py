"""Batch normalization by the statistics of all replicas, which torch only has for GPUs."""

from __future__ import annotations

from typing import Any

import torch

from ..base import context
from .tensors import array_of, copy_of

__all__ = ["SyncBatchNorm", "convert"]


class _SumOverReplicas(torch.autograd.Function):
    """The sum over replicas, differentiable any number of times. Collective.

    A replica's loss is weighted by its share. The gradient of the total for its input is divided by the share, since the
    gradients of its parameters are multiplied by it.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: SyncBatchNorm, share: float, weighted: bool) -> torch.Tensor:
        ctx.layer, ctx.share, ctx.weighted = layer, share, weighted
        total = layer.all_reduce(x * share if weighted else x)
        if weighted:
            return total / share if share else torch.zeros_like(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _SumOverReplicas.apply(gradient, ctx.layer, ctx.share, not ctx.weighted), None, None, None


class _Merge(torch.autograd.Function):
    """The mean and variance of all rows, from replicas' means and sums of squared deviations. Collective.

    Source: T. Chan, G. Golub, R. LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
    """

    @staticmethod
    def forward(
        ctx: Any, mean: torch.Tensor, squares: torch.Tensor, count: float, layer: SyncBatchNorm, share: float
    ) -> Any:
        rows = layer.all_gather(torch.stack([torch.full_like(mean, count), mean, squares]))
        counts, means = rows[:, 0], rows[:, 1]
        n = counts[:, :1].sum()
        merged = means[0] + (counts * (means - means[0])).sum(0) / n
        deviation = means - merged
        variance = (rows[:, 2] + counts * deviation**2).sum(0) / n
        ctx.save_for_backward(mean, merged)
        ctx.part, ctx.n, ctx.layer, ctx.share = count / float(n), float(n), layer, share
        ctx.mark_non_differentiable(n)
        return merged, variance, n

    @staticmethod
    def backward(ctx: Any, of_mean: torch.Tensor, of_variance: torch.Tensor, _: Any) -> Any:
        mean, merged = ctx.saved_tensors
        of_mean, of_variance = _SumOverReplicas.apply(torch.stack([of_mean, of_variance]), ctx.layer, ctx.share, True)
        return ctx.part * (of_mean + 2 * (mean - merged) * of_variance), of_variance / ctx.n, None, None, None


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """A BatchNorm layer with the statistics of all replicas' batches. In training its calls are collective.

    Attributes:
        strategy: the strategy of the replicas.
        share: the weight of the current pass, a factor of this replica's gradients.
        place: the name of the layer in its module.

    Source: S. Ioffe, C. Szegedy, Batch Normalization, 2015; torch.nn.SyncBatchNorm.
    """

    strategy: Any = None
    share = 1.0
    place = ""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: in a plain module it has no strategy."""
        return {name: value for name, value in vars(self).items() if name not in ("strategy", "share")}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the same strategy."""
        import copy

        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__getstate__().items()})
        if "strategy" in vars(self):
            made.strategy = self.strategy
        return made

    def all_reduce(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the replicas. Collective."""
        frame, mine = context.current(), array_of(rows.contiguous())
        if frame.replica is not None and self.strategy in (None, frame.strategy):
            return copy_of(frame.replica.all_reduce("SUM", mine))
        return copy_of((self.strategy or frame.strategy).reduce("SUM", mine))

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all replicas, stacked. Collective."""
        frame, mine = context.current(), array_of(rows.contiguous())[None]
        if frame.replica is not None and self.strategy in (None, frame.strategy):
            return copy_of(frame.replica.all_gather(mine, axis=0))
        return copy_of((self.strategy or frame.strategy).gather(mine, axis=0))

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"{self._name()}: expected an input of at least 2 dimensions, got shape {tuple(input.shape)}"
            )

    def _name(self) -> str:
        return f"SyncBatchNorm {self.place!r}" if self.place else "SyncBatchNorm"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize. Collective in training.

        Raises:
            ValueError: on every rank, for fewer than two values per channel over all replicas.
        """
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        axes, shape = [0, *range(2, input.dim())], [1, input.shape[1], *([1] * (input.dim() - 2))]
        wide = input.double()
        own = wide if self.share else wide[:0]  # placeholder rows do not count
        count = own.numel() // max(input.shape[1], 1)
        if count:
            shift = (
                own.detach().transpose(0, 1).flatten(1)[:, 0]
            )  # one value of each channel, which keeps the digits of large means
            mean = (own - shift.view(shape)).mean(axes) + shift
        else:
            mean = own.sum(axes)
        squares = ((own - mean.view(shape)) ** 2).sum(axes)
        mean, variance, total = _Merge.apply(mean, squares, float(count), self, self.share)
        n = float(total)
        if n < 2:
            got = f"{n:.0f} of all replicas together; input {tuple(input.shape)} here"
            raise ValueError(f"{self._name()}: expected more than 1 value per channel when training, got {got}")
        normal = ((wide - mean.view(shape)) * (variance + self.eps).rsqrt().view(shape)).to(input.dtype)
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                self.num_batches_tracked += 1
                momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
                unbiased = variance * (n / (n - 1))
                self.running_mean += momentum * (mean.to(self.running_mean.dtype) - self.running_mean)
                self.running_var += momentum * (unbiased.to(self.running_var.dtype) - self.running_var)
        return normal if self.weight is None else normal * self.weight.view(shape) + self.bias.view(shape)


def convert(module: torch.nn.Module) -> None:
    """Replace a module's BatchNorm layers by SyncBatchNorm, with the same parameters and buffers."""
    for name, child in module.named_children():
        if isinstance(child, torch.nn.modules.batchnorm._BatchNorm) and not isinstance(child, SyncBatchNorm):
            layer = SyncBatchNorm(
                child.num_features, child.eps, child.momentum, child.affine, child.track_running_stats
            )
            for tensor in (*dict(child.named_parameters()), *dict(child.named_buffers())):
                setattr(layer, tensor, getattr(child, tensor))
            layer.training = child.training
            setattr(module, name, layer)
        else:
            convert(child)

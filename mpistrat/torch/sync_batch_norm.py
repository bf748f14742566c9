"""Batch normalization by the statistics of all replicas, which torch itself has for GPUs only."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .. import context
from .tensors import array_of

__all__ = ["SyncBatchNorm", "convert"]


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float, share: float, sums: Any) -> Any:
        axes, shape = [0, *range(2, x.dim())], [1, x.shape[1], *([1] * (x.dim() - 2))]
        wide = x.double()
        count = torch.full((x.shape[1],), x.numel() / max(x.shape[1], 1), dtype=torch.float64)
        total = sums(count, wide.sum(axes), (wide**2).sum(axes))
        n, mean = total[0, 0], total[1] / total[0]
        variance = total[2] / total[0] - mean**2
        scale = (variance + eps).rsqrt().to(x.dtype).view(shape)
        normal = (x - mean.to(x.dtype).view(shape)) * scale
        ctx.save_for_backward(normal, weight, scale)
        ctx.n, ctx.axes, ctx.shape, ctx.share, ctx.sums = float(n), axes, shape, share, sums
        ctx.mark_non_differentiable(mean, variance)
        out = normal if weight is None else normal * weight.view(shape) + bias.view(shape)
        return out, mean, variance, n

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        normal, weight, scale = ctx.saved_tensors
        axes, shape = ctx.axes, ctx.shape
        of_bias, of_weight = gradient.sum(axes), (gradient * normal).sum(axes)
        # Each replica's loss counts by its share, which its own gradients are multiplied by later.
        total = ctx.sums(of_bias * ctx.share, of_weight * ctx.share).to(gradient.dtype) / (ctx.n * (ctx.share or 1.0))
        factor = scale if weight is None else scale * weight.view(shape)
        of_x = factor * (gradient - total[0].view(shape) - normal * total[1].view(shape))
        if weight is None:
            return of_x, None, None, None, None, None
        return of_x, of_weight, of_bias, None, None, None


class SyncBatchNorm(torch.nn.modules.batchnorm._BatchNorm):
    """A BatchNorm layer whose statistics are of the batches of all replicas together. In training its calls are collective.

    Attributes:
        strategy: whose replicas they are.
        share: by what this replica's gradients are multiplied before the sum.

    Source: S. Ioffe, C. Szegedy, Batch Normalization, 2015; torch.nn.SyncBatchNorm.
    """

    strategy: Any = None
    share = 1.0

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has: one of a plain module is of no strategy."""
        return {name: value for name, value in vars(self).items() if name not in ("strategy", "share")}

    def _sum(self, *rows: torch.Tensor) -> torch.Tensor:
        """Return tensors of one length stacked and summed over the replicas. Collective."""
        frame = context.current()
        mine = array_of(torch.stack(rows))
        if frame.replica is not None and self.strategy in (None, frame.strategy):
            return torch.from_numpy(np.array(frame.replica.all_reduce("SUM", mine)))
        return torch.from_numpy(np.array((self.strategy or frame.strategy).reduce("SUM", mine)))

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"SyncBatchNorm: expected an input of at least 2 dimensions, got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize. Collective in training."""
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        out, mean, variance, n = _Normalize.apply(input, self.weight, self.bias, self.eps, self.share, self._sum)
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            with torch.no_grad():
                self.num_batches_tracked += 1
                momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
                unbiased = variance * (n / (n - 1))
                self.running_mean += momentum * (mean.to(input.dtype) - self.running_mean)
                self.running_var += momentum * (unbiased.to(input.dtype) - self.running_var)
        return out


def convert(module: torch.nn.Module) -> None:
    """Replace a module's BatchNorm layers by SyncBatchNorm; parameters and buffers are kept."""
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

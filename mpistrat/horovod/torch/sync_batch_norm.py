"""Batch normalization by the statistics of all ranks' batches together."""

from __future__ import annotations

import torch

from ...torch.sync_batch_norm import SyncBatchNorm
from .basics import size
from .calls import Sum, allgather, allreduce

__all__ = ["RankBatchNorm"]


class RankBatchNorm(SyncBatchNorm):
    """A BatchNorm layer over the batches of all ranks; `hvd.SyncBatchNorm`. In training its calls are collective.

    The arguments are those of `torch.nn.BatchNorm2d`; an input has two dimensions or more.
    """

    def all_reduce(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over the ranks. Collective."""
        return allreduce(rows.contiguous(), op=Sum)

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, stacked. Collective."""
        return allgather(rows.contiguous()[None])

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize. Collective in training."""
        if size() > 1:
            return super().forward(input)
        self._check_input_dim(input)
        return torch.nn.modules.batchnorm._BatchNorm.forward(self, input)

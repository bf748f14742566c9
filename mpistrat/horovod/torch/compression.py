"""Compression of gradients for sending: none, or to 16 bits."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Base of compressions, without an effect. Subclasses override both methods."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and an argument for `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return a received tensor in its original form."""
        return tensor


class HalfCompressor(Compressor):
    """Compression of floating-point numbers to float16. They are summed in float32 and rounded once.

    Example:
        >>> sent, dtype = HalfCompressor.compress(torch.ones(2))
        >>> sent.dtype, HalfCompressor.decompress(sent, dtype).dtype
        (torch.float16, torch.float32)
    """

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor as float16, and its dtype; integers unchanged."""
        return (tensor.to(torch.float16) if tensor.dtype.is_floating_point else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return a received tensor in its original dtype."""
        return tensor.to(ctx)


class Compression:
    """The compressions for `hvd.allreduce` and `hvd.DistributedOptimizer`.

    Attributes:
        none: no compression.
        fp16: floating-point numbers are sent as float16.
    """

    none = Compressor
    fp16 = HalfCompressor

"""PyTorch: your module and optimizer under every strategy. Needs the extra `torch`.

`distribute` moves the parameters to memory that a node's ranks share, makes each backward pass write its gradients there, and
makes the optimizer's step one fused collective that sums and updates.
"""

from __future__ import annotations

from ..base.errors import missing_framework

try:
    import torch as _  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_framework("torch", "PyTorch", error) from error

from .backend.rendezvous import use
from .counted_loss import counted_loss
from .distribute import distribute
from .module import gradients, local_gradient
from .sync_batch_norm import SyncBatchNorm
from .training_state import TrainingState

__all__ = ["SyncBatchNorm", "TrainingState", "counted_loss", "distribute", "gradients", "local_gradient", "use"]

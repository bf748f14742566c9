"""PyTorch: your module and optimizer under every strategy. Needs the extra `torch`.

`distribute` moves the parameters to memory that a node's ranks share, makes each backward pass write its gradients there, and
makes the optimizer's step one fused collective that sums and updates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.errors import missing_framework
from ..base.lazy import lazy

try:
    import torch as _  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_framework("torch", "PyTorch", error) from error

# A process group needs only `backend`, and the rest imports torch._dynamo, which takes a second.
if TYPE_CHECKING:
    from .backend.rendezvous import use
    from .distribute_model import distribute
    from .loss_count import counted_loss
    from .module import gradients, local_gradient
    from .sync_batch_norm import SyncBatchNorm
    from .training_state import TrainingState
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["SyncBatchNorm", "TrainingState", "counted_loss", "distribute", "gradients", "local_gradient", "use"]

"""JAX: a tree of parameters under every strategy. Needs the extra `jax`.

`distribute` moves the parameters to memory that a node's ranks share, which jitted functions read without a copy; `apply`
sums the gradients and updates in one collective pass. `initialize` starts jax.distributed over MPI, for arrays divided over
all ranks.
"""

from __future__ import annotations

from ..base.errors import check_framework, missing_framework

try:
    import jax as _
except ModuleNotFoundError as error:
    raise missing_framework("jax", "JAX", error) from error
else:
    check_framework("mpistrat.jax", "jax", _.__version__, "0.6", "older versions keep the memory of deleted arrays")

from .apply import apply
from .arrays import assign, current
from .distribute import distribute
from .gradients import grad, value_and_grad
from .initialize import initialize
from .random import key

__all__ = ["apply", "assign", "current", "distribute", "grad", "initialize", "key", "value_and_grad"]

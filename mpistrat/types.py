"""`ms.types`: enumerations, such as ReduceOp."""

from .base.types import *  # noqa: F403 - the names of its __all__
from .base.types import __all__ as __all__

"""`ms.random`: random numbers that do not depend on the number of ranks."""

from .base.random import *  # noqa: F403 - the names of its __all__
from .base.random import __all__ as __all__

"""`ms.errors`: the errors that mpistrat raises."""

from .base.errors import *  # noqa: F403 - the names of its __all__
from .base.errors import __all__ as __all__

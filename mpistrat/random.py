"""`ms.random`: random numbers that do not depend on the number of ranks."""

from .base.random import (
    rng,
)

__all__ = [
    "rng",
]

"""JAX: a tree of parameters under every strategy. Needs the extra `jax`."""

from __future__ import annotations

from ..errors import missing_framework

try:
    import jax as _  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_framework("jax", "JAX", error) from error

__all__: list[str] = []

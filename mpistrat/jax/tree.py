"""Trees of JAX: their leaves with names, and which of them are parameters."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

__all__ = ["flatten", "is_array", "is_parameter"]


def flatten(tree: Any) -> tuple[list[Any], list[str], Any]:
    """Return the leaves of a tree, None among them, their names, and the structure."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return [leaf for _, leaf in pairs], ["/".join(map(_word, path)) or "leaf" for path, _ in pairs], structure


def _word(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array of numbers, of JAX or NumPy; keys of random numbers are none."""
    return isinstance(leaf, (np.ndarray, np.generic)) or (
        isinstance(leaf, jax.Array) and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended)
    )


def is_parameter(leaf: Any) -> bool:
    """Return whether a leaf is an array of floating numbers."""
    return is_array(leaf) and jax.dtypes.issubdtype(leaf.dtype, np.floating)

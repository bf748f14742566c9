"""The cluster: its description, roles, resolvers, topology and devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base.lazy import lazy

if TYPE_CHECKING:
    from .spec import ClusterSpec
    from .topology import Topology
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["ClusterSpec", "Topology"]

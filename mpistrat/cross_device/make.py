"""The CrossDeviceOps that a setting names."""

from __future__ import annotations

from ..errors import explain
from ..types import CommunicationImplementation
from .auto_all_reduce import AutoAllReduce
from .cross_device_ops import CrossDeviceOps
from .hierarchical_all_reduce import HierarchicalAllReduce
from .mpi_all_reduce import MpiAllReduce
from .nccl_all_reduce import NcclAllReduce

__all__ = ["make_cross_device_ops"]

_CLASSES = {
    CommunicationImplementation.AUTO: AutoAllReduce,
    CommunicationImplementation.MPI: MpiAllReduce,
    CommunicationImplementation.HIERARCHICAL: HierarchicalAllReduce,
    CommunicationImplementation.NCCL: NcclAllReduce,
}


def make_cross_device_ops(
    implementation: CommunicationImplementation | CrossDeviceOps | str | None = None,
) -> CrossDeviceOps:
    """Return the object that carries out reductions; the caller binds it to its ranks.

    Args:
        implementation: an algorithm's name or member of CommunicationImplementation, an object of one's own, or None
            for the chooser's table.

    Raises:
        MissingDependencyError: NCCL without CuPy, or CuPy without NCCL.
        ValueError: it is nothing of that.

    Example:
        >>> type(make_cross_device_ops("mpi")).__name__
        'MpiAllReduce'
    """
    if implementation is None:
        return AutoAllReduce()
    if isinstance(implementation, CrossDeviceOps):
        return implementation
    if isinstance(implementation, str) and implementation.upper() in CommunicationImplementation.__members__:
        implementation = CommunicationImplementation[implementation.upper()]
    if isinstance(implementation, CommunicationImplementation):
        return _CLASSES[implementation]()
    legal = ", ".join(CommunicationImplementation.__members__)
    expected = f"a CrossDeviceOps object, or one of {legal}"
    raise ValueError(explain("make_cross_device_ops", "implementation", expected=expected, got=repr(implementation)))

"""The strategy that holds outside every scope: this process alone, one replica on its CPU, no MPI."""

from __future__ import annotations

from typing import final

from .. import context
from ..comm.process_group import ProcessGroup
from ..context import Frame
from ..cross_device.mpi import MpiAllReduce
from .assemble import Parts
from .layout import Layout
from .strategy import Strategy

__all__ = ["DefaultStrategy"]


@final
class DefaultStrategy(Strategy):
    """What `ms.get_strategy()` returns outside every scope. It is this process alone."""

    def __init__(self) -> None:
        group = ProcessGroup.single()
        ops = MpiAllReduce()
        ops.bind(group)
        layout = Layout("DefaultStrategy", many_ranks=False, distributed=False)
        super().__init__(Parts(layout, group, ops, is_default=True))


def _frame() -> Frame:
    return DefaultStrategy().extended.replicas[0].frame


context.set_default(_frame)

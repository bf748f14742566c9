"""The exceptions of Horovod, under Horovod's names."""

from __future__ import annotations

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]


class HorovodInternalError(RuntimeError):
    """A failed collective. Its text names the tensor and the ranks; its cause may be an error of this package."""


class HostsUpdatedInterrupt(RuntimeError):
    """A change of the job's hosts. If a function of `elastic.run` raises it, it is restarted.

    Args:
        skip_sync: True if the ranks have equal states.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the hosts of the job changed")
        self.skip_sync = skip_sync

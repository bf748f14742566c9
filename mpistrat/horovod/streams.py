"""The order of work on GPUs around Horovod's calls.

The engine's operations run on its own stream. A call waits there for work queued on its caller's current stream. The thread
that takes the result makes its own stream wait for the call. No thread waits for a GPU, unless data moves through host
memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, final

import torch

from ..torch.backend.gpus import queued

__all__ = ["EngineStreams", "queued", "show"]


@final
class EngineStreams:
    """The streams of the engine's operations."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, Any] = {}

    @contextlib.contextmanager
    def after(self, device: torch.device, events: Iterable[Any], tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
        """Return a context whose work on a GPU runs on the engine's stream.

        Args:
            device: the GPU.
            events: of the callers' streams, before the work.
            tensors: used by the work; their memory must not be reused before.
        """
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = torch.cuda.Stream(device)
        for event in events:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield stream
        _keep(tensors, stream)

    def finish(self) -> None:
        """Wait for all work of the streams."""
        for stream in self._streams.values():
            stream.synchronize()


def show(event: Any, device: torch.device, result: Any) -> None:
    """Make this thread's current stream wait for an event after which a result is complete."""
    current = torch.cuda.current_stream(device)
    current.wait_event(event)
    _keep(result if isinstance(result, (list, tuple)) else (), current)


def _keep(values: Iterable[Any], stream: Any) -> None:
    """Prevent reuse of the memory of tensors on GPUs until a stream has used it."""
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            value.record_stream(stream)

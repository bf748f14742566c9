"""Output of a rank for a client: what Python prints and logs while a program of the client runs, beside the job's own log."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, final

__all__ = ["STREAMS", "ForwardedStream", "forward_output"]

STREAMS: dict[int, ForwardedStream] = {}  # by file number: 1 and 2


@final
class ForwardedStream:
    """A text stream whose text a client gets too while one of its programs runs.

    Args:
        stream: gets all text.

    Attributes:
        receiver: gets the text too; None for no client.
        shown: True if the client's own stream is a terminal: progress bars are drawn then.

    Example:
        >>> import io
        >>> stream, texts = ForwardedStream(io.StringIO()), []
        >>> stream.receiver = texts.append
        >>> print("loss", 0.5, file=stream)
        >>> "".join(texts), stream.getvalue(), stream.isatty()
        ('loss 0.5\\n', 'loss 0.5\\n', False)
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.receiver: Callable[[str], object] | None = None
        self.shown = False

    def write(self, text: str) -> int:
        """Write a text."""
        receiver = self.receiver
        if receiver is not None:
            receiver(text)
        return int(self._stream.write(text))

    def isatty(self) -> bool:
        """Return True if the text reaches a terminal."""
        return self.shown or bool(self._stream.isatty())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def forward_output() -> None:
    """Replace sys.stdout and sys.stderr by streams that clients can receive. Before loggers are created, which store them."""
    STREAMS[1], STREAMS[2] = ForwardedStream(sys.stdout), ForwardedStream(sys.stderr)
    sys.stdout, sys.stderr = STREAMS[1], STREAMS[2]

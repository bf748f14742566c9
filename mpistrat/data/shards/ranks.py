"""The ranks that write or check one set of shards together, and how they learn of each other's errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from ...errors import ShardError, by_rank, explain

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Ranks"]


@final
class Ranks:
    """The ranks of a communicator; one rank alone without a communicator, and then nothing here needs MPI.

    Args:
        comm: an intracommunicator, or None.
        function: what the user called, for errors.
    """

    def __init__(self, comm: MPI.Intracomm | None, function: str) -> None:
        self._function = function
        self.comm: Any = None
        if comm is not None:
            from ...cluster.communicator import check_comm, running_mpi

            self.comm = check_comm(running_mpi(function), comm, function)
        self.rank: int = 0 if self.comm is None else self.comm.rank
        self.size: int = 1 if self.comm is None else self.comm.size

    def exchange(self, text: str) -> list[str]:
        """Return every rank's text, in rank order. Collective."""
        from ...comm.contract import gather_text

        return [text] if self.comm is None else gather_text(self.comm, text)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Meet at the end of a `with` block; an exception on one rank becomes one on every rank. Collective.

        Raises:
            ShardError: on a rank without an exception of its own, naming those that had one.
        """
        try:
            yield
        except BaseException as error:
            self.exchange(f"{type(error).__name__}: {error}")
            raise
        failed = {rank: text for rank, text in enumerate(self.exchange("")) if text}
        if failed:
            raise ShardError(explain(self._function, "", expected="every rank to get here", got=by_rank(failed)))

    def agree(self, text: str) -> None:
        """Check that all ranks say the same. Collective.

        Raises:
            CollectiveMismatchError: on every rank, with what each of them said.
        """
        texts = dict(enumerate(self.exchange(text)))
        if len(set(texts.values())) > 1:
            from ...comm.contract import mismatch

            raise mismatch(texts)

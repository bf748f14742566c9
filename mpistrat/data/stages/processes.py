"""Processes that call a function: started by Python's forkserver, and kept away from MPI.

A process that a rank has started carries the launcher's variables, so an `import mpi4py.MPI` in it would take itself for
the rank, and hang or keep the job from ending. Here it fails instead, and the variables are gone.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

from ...errors import explain
from . import no_mpi
from .call import CallError, call_each, name_of

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

__all__ = ["Processes"]

START_SECONDS = 120.0  # to import what the function needs
END_SECONDS = 2.0  # for a process to end when it is asked to


class RemoteTraceback(Exception):
    """The cause of an error from a process: its traceback there, as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def _serve(connection: Connection, function_bytes: bytes) -> None:
    """What a process does: answer requests until the other side closes the connection."""
    no_mpi.keep_away()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    from multiprocessing.reduction import ForkingPickler

    try:
        try:
            function = ForkingPickler.loads(function_bytes)
        except Exception as error:
            connection.send(("start", *_described(error)))
            return
        connection.send(("ready",))
        while True:
            _answer(connection, function, connection.recv())
    except (EOFError, OSError):
        return  # nobody is there any more


def _answer(connection: Connection, function: Callable[..., Any], elements: Sequence[Any]) -> None:
    try:
        answer: tuple[Any, ...] = ("results", call_each(function, elements))
    except CallError as failed:
        answer = ("error", failed.index, _sendable(failed.error), *_described(failed.error))
    try:
        connection.send(answer)
    except OSError:
        raise
    except Exception as error:  # what cannot be pickled, which comes before anything is sent
        connection.send(("error", 0, None, *_described(error)))


def _sendable(error: BaseException) -> BaseException | None:
    """The error, if it survives being sent; many cannot be made anew from their arguments."""
    from multiprocessing.reduction import ForkingPickler

    try:
        ForkingPickler.loads(ForkingPickler.dumps(error))
    except Exception:
        return None
    return error


def _described(error: BaseException) -> tuple[str, str]:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return f"{type(error).__name__}: {error}", text


class _Worker:
    """One process and the connection to it."""

    def __init__(self, number: int, name: str, function_bytes: bytes) -> None:
        context = multiprocessing.get_context("forkserver")
        self.connection, theirs = context.Pipe()
        self._name = f"Dataset.map: process {number} of {name}"
        self.process: ForkServerProcess = context.Process(
            target=_serve, args=(theirs, function_bytes), name=f"mpistrat-map-{number}", daemon=True
        )
        # A signal that tells the job to stop may go to all processes of its group: these go on. So does Python's server.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        try:
            no_mpi.start_server(context)
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # else nobody would notice that the process has ended
        self._started = False

    def call_each(self, elements: Sequence[Any]) -> list[Any]:
        try:
            if not self._started:
                self._wait_for_start()
            answer = self._ask(elements)
        except (EOFError, OSError):
            raise RuntimeError(self._ended()) from None
        if answer[0] == "results":
            return answer[1]
        _, index, error, said, text = answer
        if error is None:
            error = RuntimeError(f"{self._name}: {said}")
        error.__cause__ = RemoteTraceback(text)
        raise CallError(index, error)

    def _ask(self, elements: Sequence[Any]) -> tuple[Any, ...]:
        try:
            self.connection.send(elements)
            return self.connection.recv()
        except (EOFError, OSError):
            raise
        except Exception as error:  # of pickle: what was to be sent, or what came, cannot be made anew
            raise RuntimeError(f"{self._name}: an element could not be sent: {error}") from error

    def _wait_for_start(self) -> None:
        if not self.connection.poll(START_SECONDS):
            raise RuntimeError(f"{self._name} (pid {self.process.pid}) has not started within {START_SECONDS:.0f} s")
        answer = self.connection.recv()
        if answer[0] != "ready":
            error = RuntimeError(f"{self._name}: the function could not be loaded there: {answer[1]}")
            raise error from RemoteTraceback(answer[2])
        self._started = True

    def _ended(self) -> str:
        self.process.join(END_SECONDS)
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        text = f"{self._name} (pid {self.process.pid}) {how}"
        if self._started:
            return text
        return (
            f"{text} before it had started, and wrote the reason to stderr. It imports the main program: "
            'put what that does, MPI too, under `if __name__ == "__main__":`'
        )


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        worker.process.join(END_SECONDS)
        if worker.process.exitcode is None:
            worker.process.kill()
            worker.process.join(END_SECONDS)
    workers.clear()


@final
class Processes:
    """A number of processes that call one function. They start at the first call, and end with this object.

    Args:
        function: one that pickle can name or pack: of a module, not a lambda.
        count: how many processes.

    Raises:
        TypeError: for a function that cannot be sent to a process.
    """

    def __init__(self, function: Callable[..., Any], count: int) -> None:
        from multiprocessing.reduction import ForkingPickler

        try:
            self._function = bytes(ForkingPickler.dumps(function))
        except Exception as error:
            expected = "a function that can be pickled, such as one defined at the top of a module"
            got = f"{function!r:.80} ({error})"
            remedy = "Lambdas and functions inside functions work in threads: leave processes=True out."
            raise TypeError(explain("Dataset.map", "function", expected=expected, got=got, remedy=remedy)) from None
        self._name = name_of(function)
        self._count = count
        self._workers: list[_Worker] = []
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def call_each(self, elements: Sequence[Any]) -> list[Any]:
        """Return the function's results on these elements, made in one process. Raises CallError."""
        with self._lock:
            if not self._workers:
                weakref.finalize(self, _end, self._workers)
                for number in range(self._count):
                    self._workers.append(_Worker(number, self._name, self._function))
                    self._free.put(self._workers[-1])
        worker = self._free.get()
        try:
            return worker.call_each(elements)
        finally:
            self._free.put(worker)

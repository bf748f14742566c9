"""`ms.MultiProcessRunner`: run a function on ranks from a program that is not a rank, follow each rank, and kill one.

`ms.launch`: call a function on several ranks of this machine, from a notebook or any single-process program.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, final

from ..base import nest
from ..base.arguments import integer
from ..base.errors import LaunchError, explain
from ..base.lazy import load_cloudpickle
from ..base.programs import isolated, program
from ..base.text import named
from . import end_with_parent
from .launched import STACKS
from .plan import Start, plan

__all__ = [
    "MultiProcessRunner",
    "RankResult",
    "launch",
]


_GRACE = 5.0  # seconds between SIGTERM and SIGKILL
_LOOK = 0.02  # seconds between two checks for a rank's files
_STACKS = 1.0  # seconds that ranks have to print their stacks
_TAGGED = re.compile(r"\[(\d+)\] (.*)", re.DOTALL)


class RankResult(NamedTuple):
    """The result of one rank of `MultiProcessRunner`.

    Attributes:
        return_value: the function's return value, or None if it did not return.
        returned: True if the function returned.
        error: the traceback if it raised.
        output: the lines that it printed to stdout and stderr.
    """

    return_value: Any
    returned: bool
    error: str | None
    output: list[str]


@final
class MultiProcessRunner:
    """Ranks of this machine that call a function, for tests of your own program: start them, kill one, and check each result.

    They start at once, and end with the `with` statement and with this process, however these end. This process is not a rank.
    The ranks get the function and its arguments in their current state, by cloudpickle. Their output is printed here too. In a
    SLURM job they run on all of its nodes, as under `mpistrat run`. Use `ms.launch` to only call a function.

    Args:
        f: creates and uses the strategy. Its return value must be picklable.
        args, kwargs: its arguments.
        ranks: number of ranks; default one for each GPU, without GPUs for each core.
        restarts: the most times that they are restarted after a death, as under `mpistrat run --restarts`.
        survive: the others continue after a death, as under `mpistrat run --survive`; needs Open MPI 5.

    Raises:
        ClusterError: no launcher fits the MPI that mpi4py loads, or that MPI cannot survive a death.
        MissingDependencyError: cloudpickle is not installed.
        TypeError, ValueError: `ranks` is not an integer ≥ 1, or `restarts` not one ≥ 0.
        ValueError: this process is a rank already.

    Source: `multi_process_runner` of TensorFlow's own tests, `tf.__internal__.distribute`.

    Example:
        >>> def train():  # doctest: +SKIP
        ...     with ms.MultiWorkerMirroredStrategy() as strategy:
        ...         print("ready")
        ...         while True:
        ...             strategy.barrier()
        >>> with ms.MultiProcessRunner(train, ranks=3) as runner:  # doctest: +SKIP
        ...     runner.wait_for("ready", rank=1)
        ...     runner.terminate(1)
        ...     with pytest.raises(ms.errors.LaunchError):
        ...         runner.join(timeout=30)
        ...     print(runner.results()[0].output)
    """

    def __init__(
        self,
        f: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        ranks: int | None = None,
        restarts: int = 0,
        survive: bool = False,
    ) -> None:
        if ranks is not None:
            ranks = integer("ms.launch", "ranks", ranks, 1)
        restarts = integer("ms.MultiProcessRunner", "restarts", restarts, 0)
        cloudpickle = load_cloudpickle("ms.MultiProcessRunner")
        # Only this user can enter the folder. Nodes of a SLURM job share its working directory, rarely the temporary
        # directory.
        shared = os.getcwd() if int(os.environ.get("SLURM_JOB_NUM_NODES", "1")) > 1 else None
        self._folder = tempfile.TemporaryDirectory(
            prefix=".mpistrat-launch-" if shared else "mpistrat-launch-", dir=shared
        )
        self._path, self._loads, self._survives = Path(self._folder.name), cloudpickle.loads, survive
        self._lines = dict[int, list[str]]()
        self._job: subprocess.Popen[bytes] | None = None
        try:
            with _sent_whole(nest.flatten((f, list(args), list((kwargs or {}).values()))), cloudpickle):
                call = cloudpickle.dumps((f, tuple(args), dict(kwargs or {})))
            (self._path / "call").write_bytes(cloudpickle.dumps((sys.path, call)))
            start = _start(self._path, ranks, restarts, survive)
            self._ranks = start.ranks
            begun = queue.SimpleQueue[Any]()
            self._reader = threading.Thread(target=self._run, args=(start, begun), daemon=True)
            self._reader.start()
            self._job = begun.get()
            if isinstance(self._job, BaseException):
                raise self._job
        except BaseException:
            self._folder.cleanup()
            raise

    def join(self, timeout: float | None = 60.0) -> list[RankResult]:
        """Wait until all ranks have ended, and return their results, by rank.

        Args:
            timeout: seconds after which all ranks are ended; None for no limit.

        Raises:
            LaunchError: a rank raised, with its traceback; died, unless the others survive that; or returned an unpicklable
                object.
            TimeoutError: the ranks took longer. Their output ends with their stacks.
        """
        assert self._job is not None
        try:
            status = self._job.wait(timeout)
        except subprocess.TimeoutExpired:
            self._print_stacks()
            left = [rank for rank in range(self._ranks) if not self._has_ended(rank)]
            still = f"{named('rank', left)} that still ran" if left else "ranks that had returned, but did not end"
            self.terminate_all()
            expected, got = f"all ranks to return within {timeout:g} s", f"{still}; they were ended"
            remedy = "Their output ends with where they were"
            raise TimeoutError(explain("ms.launch", "timeout", expected=expected, got=got, remedy=remedy)) from None
        except BaseException:
            self.terminate_all()
            raise
        self._reader.join(_GRACE)
        failures = sorted(self._path.glob("failure-*"), key=lambda path: path.stat().st_mtime_ns)
        if failures:
            rank = failures[0].name.partition("-")[2]
            raise LaunchError(f"ms.launch: rank {rank} failed:\n{failures[0].read_text(encoding='utf-8')}")
        results = self.results()
        died = [rank for rank, result in enumerate(results) if not result.returned]
        if len(died) == len(results) or (died and not self._survives) or (status and not died):
            got = f"exit status {status}" + (f", and nothing of {named('rank', died)}" if died else "")
            remedy = "Check their output"
            raise LaunchError(explain("ms.launch", "", expected="all ranks to return", got=got, remedy=remedy))
        return results

    def results(self) -> list[RankResult]:
        """Return the current result of each rank, by rank; also after `join` has raised."""
        return [self._result(rank) for rank in range(self._ranks)]

    def wait_for(self, text: str, *, rank: int | None = None, timeout: float = 60.0) -> None:
        """Wait until a rank, or any rank, has printed a line that contains this text.

        Raises:
            LaunchError: the ranks have ended without printing it.
            TimeoutError: `timeout` seconds have passed; all ranks were ended.
        """
        wanted = [*range(self._ranks)] if rank is None else [self._known(rank)]

        def printed() -> bool | None:
            return any(text in line for one in wanted for line in self._lines.get(one, [])) or None

        self._wait(printed, f"a line with {text!r} of {'any rank' if rank is None else f'rank {rank}'}", timeout)

    def get_process_id(self, rank: int) -> int:
        """Return a rank's process id, once it has started.

        Raises:
            LaunchError, TimeoutError: it does not start.
            ValueError: it is on another node.
        """
        path = self._path / f"process-{self._known(rank)}"
        node, number = self._wait(
            lambda: path.read_text().split() if path.exists() else None, f"rank {rank} to begin", 60.0
        )
        if node != socket.gethostname():
            expected, got = f"a rank of this node ({socket.gethostname()})", f"rank {rank} on {node}"
            raise ValueError(explain("MultiProcessRunner", "rank", expected=expected, got=got))
        return int(number)

    def terminate(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Kill a rank, or send it another signal.

        Raises:
            LaunchError, TimeoutError, ValueError: as for `get_process_id`.
        """
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.get_process_id(rank), number)

    def terminate_all(self) -> None:
        """End the launcher and all ranks. They are in its process group or, on other nodes, end with it."""
        assert self._job is not None
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._job.poll() is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._job.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._job.wait(_GRACE)
        self._reader.join(_GRACE)

    def __enter__(self) -> MultiProcessRunner:
        """Return the runner."""
        return self

    def __exit__(self, *exception: object) -> None:
        """End all ranks, and delete their results."""
        self.terminate_all()
        self._folder.cleanup()

    def _known(self, rank: int) -> int:
        if not 0 <= rank < self._ranks:
            raise ValueError(explain("MultiProcessRunner", "rank", expected=f"0 to {self._ranks - 1}", got=f"{rank}"))
        return rank

    def _result(self, rank: int) -> RankResult:
        value, failure = self._path / f"result-{rank}", self._path / f"failure-{rank}"
        error = failure.read_text(encoding="utf-8") if failure.exists() else None
        returned = value.exists()
        return RankResult(
            self._loads(value.read_bytes()) if returned else None, returned, error, [*self._lines.get(rank, [])]
        )

    def _wait(self, look: Callable[[], Any], expected: str, seconds: float) -> Any:
        """Return the first value of `look` that is not None."""
        assert self._job is not None
        end, ended = time.monotonic() + seconds, False
        while (found := look()) is None:
            if ended:
                got = f"the end of all ranks, with exit status {self._job.returncode}"
                raise LaunchError(explain("MultiProcessRunner", "", expected=expected, got=got))
            if time.monotonic() > end:
                self._print_stacks()
                self.terminate_all()
                got = f"none within {seconds:g} s; all ranks were ended"
                remedy = "Their output ends with where they were"
                raise TimeoutError(explain("MultiProcessRunner", "", expected=expected, got=got, remedy=remedy))
            if self._job.poll() is not None:
                self._reader.join(_GRACE)
                ended = True  # and check once more
            else:
                time.sleep(_LOOK)
        return found

    def _has_ended(self, rank: int) -> bool:
        return any((self._path / f"{kind}-{rank}").exists() for kind in ("result", "failure"))

    def _print_stacks(self) -> None:
        """Make the running ranks of this node print their stacks."""
        for path in self._path.glob("process-*"):
            node, number = path.read_text().split()
            if node == socket.gethostname() and not self._has_ended(int(path.name.partition("-")[2])):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(number), STACKS)
        time.sleep(_STACKS)

    def _run(self, start: Start, begun: queue.SimpleQueue[Any]) -> None:
        """Start the launcher, in a thread that outlives it: Linux signals the launcher when the thread that started it ends."""
        try:
            job = subprocess.Popen(
                isolated(end_with_parent.__file__, str(os.getpid()), *start.command),
                env={"PYTHONUNBUFFERED": "1", **os.environ, **start.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except BaseException as error:
            begun.put(error)
            return
        begun.put(job)
        assert job.stdout is not None
        self._read(job.stdout)
        job.wait()

    def _read(self, stream: IO[bytes]) -> None:
        """Print the ranks' output, and store their lines."""
        for data in stream:
            line = data.decode(errors="replace")
            if found := _TAGGED.fullmatch(line):
                line = found[2]
                self._lines.setdefault(int(found[1]), []).append(line.rstrip("\n"))
            # An error here, of a closed stdout or its encoding, would block the ranks.
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.write(line)  # a notebook's stdout has no buffer
                sys.stdout.flush()


def _start(folder: Path, ranks: int | None, restarts: int, survive: bool) -> Start:
    """Return how to start the ranks."""
    words = program("mpistrat.launcher.launched", str(folder))
    start = plan(words, ranks, None, None, survive=survive, tag=True)
    if restarts or survive:  # then a supervisor starts them
        options = [*(["--restarts", str(restarts)] if restarts else []), *(["--survive"] if survive else [])]
        command = program("mpistrat", "run", "-n", str(start.ranks), "--tag", *options, *words[1:])
        return Start(command, start.ranks)
    return start


@contextlib.contextmanager
def _sent_whole(parts: Sequence[Any], cloudpickle: Any) -> Iterator[None]:
    """Pickle functions by value if ranks cannot import them, such as those of a test module outside the path."""
    known, modules = cloudpickle.list_registry_pickle_by_value(), []
    for part in parts:
        while isinstance(part, functools.partial):
            part = part.func
        name = getattr(part, "__module__", None) or "__main__"
        if name != "__main__" and name in sys.modules and not _is_found(name.partition(".")[0]):
            modules.append(sys.modules[name])
            cloudpickle.register_pickle_by_value(sys.modules[name])
    try:
        yield
    finally:
        for module in {module.__name__: module for module in modules if module.__name__ not in known}.values():
            cloudpickle.unregister_pickle_by_value(module)


def _is_found(package: str) -> bool:
    """Return True if an import would find a package, also one with an editable install outside the path."""
    return any(finder.find_spec(package, None) is not None for finder in sys.meta_path)


def launch(
    f: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: int | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Call a function on several ranks of this machine, and return their return values, by rank.

    For notebooks and tests: the ranks are separate processes, which end with the call. This process is not a rank. They get the
    function and its arguments in their current state, by cloudpickle, and their output is printed here. In a SLURM job they run
    on all of its nodes, as under `mpistrat run`. `ms.MultiProcessRunner` also returns each rank's output and can kill a rank.

    Args:
        f: creates and uses the strategy. Its return value must be picklable.
        args, kwargs: its arguments.
        ranks: number of ranks; default one for each GPU, without GPUs for each core.
        timeout: seconds after which all ranks are ended.

    Raises:
        LaunchError: a rank raised, with its traceback; or returned an unpicklable object.
        TimeoutError: the ranks took longer.
        ClusterError: no launcher fits the MPI that mpi4py loads.
        MissingDependencyError: cloudpickle is not installed.
        TypeError, ValueError: `ranks` is not an integer ≥ 1.
        ValueError: this process is a rank already.

    Example:
        >>> def train():  # doctest: +SKIP
        ...     with ms.MultiWorkerMirroredStrategy() as strategy:
        ...         return strategy.rank, strategy.reduce("SUM", 1)
        >>> ms.launch(train, ranks=2)  # doctest: +SKIP
        [(0, 2), (1, 2)]
    """
    with MultiProcessRunner(f, args, kwargs, ranks=ranks) as runner:
        return [result.return_value for result in runner.join(timeout)]

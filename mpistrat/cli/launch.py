"""`ms.launch`: call a function on several ranks of this machine, from a notebook or any program that runs as one process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ..errors import LaunchError, explain
from ..parameter_server.coordinator.registry import load_cloudpickle
from .run import plan

__all__ = ["launch"]

_GRACE = 5.0  # seconds between SIGTERM and SIGKILL


def launch(
    f: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: int | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Call a function on each of some ranks of this machine, and return what each has returned, by rank.

    For notebooks: the ranks are processes of their own, which end with the call; this process is none of them. They get the
    function and its arguments as they are now, by cloudpickle, and what they print comes here. In a SLURM job they are
    on all of its nodes, as by `mpistrat run`.

    Args:
        f: makes the strategy, and does all that uses it. What it returns must be picklable.
        args, kwargs: its arguments.
        ranks: how many; default one for each GPU, without GPUs for each core.
        timeout: seconds after which all ranks are ended.

    Raises:
        LaunchError: a rank failed, with its traceback; or returned what cannot be pickled.
        TimeoutError: they took longer.
        ClusterError: no launcher fits the MPI that mpi4py loads.
        MissingDependencyError: cloudpickle is not installed.
        ValueError: this process is a rank already.

    Example:
        >>> def train():  # doctest: +SKIP
        ...     with ms.MultiWorkerMirroredStrategy() as strategy:
        ...         return strategy.rank, strategy.reduce("SUM", 1)
        >>> ms.launch(train, ranks=2)  # doctest: +SKIP
        [(0, 2), (1, 2)]
    """
    cloudpickle = load_cloudpickle("ms.launch")
    with tempfile.TemporaryDirectory(prefix="mpistrat-launch-") as name:
        folder = Path(name)  # nobody else may enter it
        (folder / "call").write_bytes(cloudpickle.dumps((f, tuple(args), dict(kwargs or {}))))
        start = plan([sys.executable, "-m", "mpistrat.cli.launched", name], ranks, None, None)
        job = subprocess.Popen(
            start.command,
            env={"PYTHONUNBUFFERED": "1", **os.environ, **start.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert job.stdout is not None
        reader = threading.Thread(target=_show, args=(job.stdout,), daemon=True)
        reader.start()
        try:
            status = job.wait(timeout)
        except BaseException as error:
            _end(job)
            if isinstance(error, subprocess.TimeoutExpired):
                expected, got = f"all ranks to return within {timeout:g} s", "ranks that still ran; they were ended"
                raise TimeoutError(explain("ms.launch", "timeout", expected=expected, got=got)) from None
            raise
        finally:
            reader.join(_GRACE)
        return _results(folder, status, cloudpickle.loads)


def _show(stream: IO[bytes]) -> None:
    for line in stream:
        sys.stdout.write(line.decode(errors="replace"))  # that of a notebook's cell has no buffer
        sys.stdout.flush()


def _end(job: subprocess.Popen[bytes]) -> None:
    """End the launcher and the ranks, which are in its process group or, elsewhere, end with it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(job.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(_GRACE)
            return


def _results(folder: Path, status: int, loads: Callable[[bytes], Any]) -> list[Any]:
    failures = sorted(folder.glob("failure-*"), key=lambda path: path.stat().st_mtime_ns)
    if failures:
        rank = failures[0].name.partition("-")[2]
        raise LaunchError(f"ms.launch: rank {rank} failed:\n{failures[0].read_text()}")
    found = {int(path.name.partition("-")[2]): path for path in folder.glob("result-*")}
    size = folder / "size"
    if status or not size.exists() or len(found) != int(size.read_text()):
        expected, got = "all ranks to return", f"exit status {status}, and results of {len(found)}"
        raise LaunchError(explain("ms.launch", "", expected=expected, got=got, remedy="See what they have printed"))
    return [loads(found[rank].read_bytes()) for rank in sorted(found)]

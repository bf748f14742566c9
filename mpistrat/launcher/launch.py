"""`ms.launch`: call a function on several ranks of this machine, from a notebook or any program that runs as one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .multi_process_runner import MultiProcessRunner

__all__ = ["launch"]


def launch(
    f: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: int | None = None,
    timeout: float | None = None,
) -> list[Any]:
    """Call a function on each of some ranks of this machine, and return what each has returned, by rank.

    For notebooks and tests: the ranks are processes of their own, which end with the call; this process is none of them. They get
    the function and its arguments as they are now, by cloudpickle, and what they print comes here. In a SLURM job they are
    on all of its nodes, as by `mpistrat run`. `ms.MultiProcessRunner` also has what each rank printed, and kills one.

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

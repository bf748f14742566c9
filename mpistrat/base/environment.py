"""The environment variables of the package.

| variable | default | meaning |
|---|---|---|
| MPISTRAT_WARN_AFTER | 10 | seconds in a collective after which a warning names the missing ranks |
| MPISTRAT_ABORT_AFTER | 600 | seconds after which a collective fails with an error |
| MPISTRAT_CHECK_EVERY | 64 | number of expected collectives between nodes after which the ranks compare their calls |
| MPISTRAT_SHARED_MEMORY | 1 | 0: every rank has a private copy of the variables |
| MPISTRAT_COMPILED_LOOPS | 1 | 0: NumPy computes sums and update rules; read on import |
| MPISTRAT_CHOOSER | | JSON file with a table for the chooser, instead of the package's |
| MPISTRAT_TRANSPORT | | between workers and servers: shared_window, one_sided or messages, instead of the automatic choice |
| MPISTRAT_STRATEGY | | the strategy of `strategy_from_environment`: one_device, mirrored, multi_worker_mirrored, … |
| MPISTRAT_NUM_PS | 1 | number of servers with MPISTRAT_STRATEGY=parameter_server: the last ranks |
| MPISTRAT_EVALUATOR | 0 | 1: the job's last rank evaluates, see `estimator.split_evaluator`; `mpistrat run --evaluator` sets it |
| MPISTRAT_COLORS | | ranks that form a separate world, such as `train=2-3`: see `cluster.world` |
| MPISTRAT_TORCH | 1 | 0: `import torch` registers no backend; mpi: "mpi" is this package's even if PyTorch has its own |
| MPISTRAT_END_TIME | | end of the job's time, in seconds since 1970, if the scheduler does not report it |
| MPISTRAT_STOP_BEFORE | | seconds before that at which `should_stop` is True; default 60, but at most a tenth of the time left |
| MPISTRAT_JOB | | key of the job's snapshots; `mpistrat run --restarts` sets it |
| MPISTRAT_GENERATION | 0 | number of restarts of the job; `mpistrat run --restarts` sets it |
| MPISTRAT_UNTIL | | the step at which `train.Checkpoints` saves and ends the program; `mpistrat replay` sets it |
| MPISTRAT_LOG | warning | level of the package's log: debug, info, warning, error |
| MPISTRAT_TERMINAL | | which of stdout and stderr, `stdout,stderr`, a launcher shows on a terminal; `mpistrat run` sets it |
| MPISTRAT_EVENTS | 16384 | number of a rank's last events to store for reports and the timeline; 32 bytes each |
| MPISTRAT_TRACEBACK | short | full: the traceback of an exception that ends the job includes the lines inside this package |
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import explain

__all__ = [
    "RANK_PROCESS",
    "RESTART_EXIT_CODE",
    "STANDBY",
    "STARTED",
    "STRATEGIES",
    "Environment",
    "not_by_name",
    "number_in",
]

RESTART_EXIT_CODE = 42  # of a program that has saved and requests to be requeued, as TensorFlow's

RANK_PROCESS = "MPISTRAT_RANK_PROCESS"  # the rank's process id, which distinguishes it from its children
STARTED = "MPISTRAT_STARTED"  # of a rank that runs MPI, for its children: its process id and its rank at the launcher
STANDBY = "MPISTRAT_STANDBY"  # index of the job's standby launcher that a process belongs to, from 1

STRATEGIES = ("one_device", "mirrored", "multi_worker_mirrored", "central_storage", "parameter_server")


def not_by_name(strategy: str) -> str:
    """Return how to create a strategy that needs more than its name; "" for all others."""
    remedy = "Call ms.MeshStrategy(axes={...}) in the program: only it knows the axes"
    return remedy if strategy.lower() in ("mesh", "meshstrategy") else ""


def number_in(env: Mapping[str, str], name: str, default: float, low: float = 0.0) -> float:
    """Return the number in an environment variable; the default if it is unset or empty.

    Raises:
        ValueError: it is not a number, or less than `low`.

    Example:
        >>> number_in({"SECONDS": "2.5"}, "SECONDS", 1.0)
        2.5
    """
    text = env.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = low - 1
    if not value >= low:
        raise ValueError(explain("environment", name, expected=f"a number of at least {low:g}", got=repr(text)))
    return value


def _number_or_none(env: Mapping[str, str], name: str) -> float | None:
    return number_in(env, name, 0.0, 0.0) if env.get(name) else None


def _switch(env: Mapping[str, str], name: str, default: str) -> bool:
    text = env.get(name, default)
    if text not in ("0", "1"):
        raise ValueError(explain("environment", name, expected="0 or 1", got=repr(text)))
    return text == "1"


def _word(env: Mapping[str, str], name: str, default: str, legal: tuple[str, ...]) -> str:
    word = (env.get(name) or default).lower()
    if word not in legal:
        expected = f"{', '.join(legal[:-1])} or {legal[-1]}"
        raise ValueError(explain("environment", name, expected=expected, got=repr(word)))
    return word


def _key(env: Mapping[str, str]) -> str:
    key = env.get("MPISTRAT_JOB", "")
    if key and not re.fullmatch("[0-9a-f]{16}", key):
        raise ValueError(explain("environment", "MPISTRAT_JOB", expected="16 hexadecimal digits", got=repr(key)))
    return key if env.get(RANK_PROCESS) in (None, str(os.getpid())) else ""


@dataclass(frozen=True)
class Environment:
    """The values of the environment variables in the table above."""

    warn_after: float = 10.0
    abort_after: float = 600.0
    check_every: int = 64
    shared_memory: bool = True
    compiled_loops: bool = True
    chooser: str = ""
    transport: str = ""
    strategy: str = ""
    num_ps: int | None = None
    evaluator: bool = False
    colors: str = ""
    torch: str = "1"
    job: str = ""
    generation: int = 0
    until: int = 0
    log: str = "warning"
    traceback: str = "short"
    events: int = 16384
    terminal: tuple[str, ...] = ()
    end_time: float | None = None
    stop_before: float | None = None

    @classmethod
    def read(cls, env: Mapping[str, str] | None = None) -> Environment:
        """Return the settings of environment variables.

        Raises:
            ValueError: an invalid value, with the variable's name.

        Example:
            >>> Environment.read({"MPISTRAT_ABORT_AFTER": "5"}).abort_after
            5.0
        """
        env = os.environ if env is None else env
        level = _word(env, "MPISTRAT_LOG", "warning", ("debug", "info", "warning", "error"))
        strategy = env.get("MPISTRAT_STRATEGY", "")
        if strategy and strategy not in STRATEGIES:
            legal = ", ".join(STRATEGIES)
            raise ValueError(
                explain(
                    "environment", "MPISTRAT_STRATEGY", expected=f"one of {legal}", got=repr(strategy),
                    remedy=not_by_name(strategy),
                )
            )  # fmt: skip
        servers = env.get("MPISTRAT_NUM_PS", "")
        if servers and not (servers.isascii() and servers.isdigit() and 0 < int(servers) < 1 << 20):
            raise ValueError(explain("environment", "MPISTRAT_NUM_PS", expected="a number >= 1", got=repr(servers)))
        return cls(
            warn_after=number_in(env, "MPISTRAT_WARN_AFTER", 10.0, 0.001),
            abort_after=number_in(env, "MPISTRAT_ABORT_AFTER", 600.0, 0.001),
            check_every=int(number_in(env, "MPISTRAT_CHECK_EVERY", 64, 1)),
            shared_memory=_switch(env, "MPISTRAT_SHARED_MEMORY", "1"),
            compiled_loops=_switch(env, "MPISTRAT_COMPILED_LOOPS", "1"),
            chooser=env.get("MPISTRAT_CHOOSER", ""),
            transport=env.get("MPISTRAT_TRANSPORT", ""),
            strategy=strategy,
            num_ps=int(servers) if servers else None,
            evaluator=_switch(env, "MPISTRAT_EVALUATOR", "0"),
            colors=env.get("MPISTRAT_COLORS", ""),
            torch=_word(env, "MPISTRAT_TORCH", "1", ("0", "1", "mpi")),
            job=_key(env),
            generation=int(number_in(env, "MPISTRAT_GENERATION", 0, 0)),
            until=int(number_in(env, "MPISTRAT_UNTIL", 0, 0)),
            log=level,
            events=int(number_in(env, "MPISTRAT_EVENTS", 16384, 0)),
            terminal=tuple(filter(None, env.get("MPISTRAT_TERMINAL", "").split(","))),
            traceback=_word(env, "MPISTRAT_TRACEBACK", "short", ("short", "full")),
            end_time=_number_or_none(env, "MPISTRAT_END_TIME"),
            stop_before=_number_or_none(env, "MPISTRAT_STOP_BEFORE"),
        )

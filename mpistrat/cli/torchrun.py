"""The command line of torchrun, for `mpistrat run --torchrun`: MPI starts the ranks that its options ask for.

Options that describe how torchrun's processes find each other are accepted and reported as unused. An option whose
effect `mpistrat run` does not have is an error that names it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..base.cores import usable_cores
from ..base.errors import explain
from ..cluster.launchers import allocation_of_job
from ..doctor.libraries import gpus_of_machine

__all__ = ["TorchrunWords", "read_torchrun"]

_FUNCTION = "mpistrat run --torchrun"
_UNUSED = {
    "--standalone": "store_true", "--rdzv-backend": "store", "--rdzv-endpoint": "store", "--rdzv-id": "store",
    "--rdzv-conf": "store", "--master-addr": "store", "--master-port": "store", "--local-addr": "store",
    "--monitor-interval": "store", "--start-method": "store", "--role": "store",
}  # fmt: skip
_REFUSED = {
    "--event-log-handler": "store", "--local-ranks-filter": "store", "--duplicate-stdout-filters": "store",
    "--duplicate-stderr-filters": "store", "--logs-specs": "store", "--numa-binding": "store", "--signals-to-handle": "store",
    "--shutdown-timeout": "store", "--virtual-local-rank": "store_true",
}  # fmt: skip
_ALL, _NONE = ("3",), (None, "0")  # of -r and -t: stdout and stderr of all ranks; neither


@dataclass(frozen=True)
class TorchrunWords:
    """The meaning of torchrun's words for `mpistrat run`.

    Attributes:
        ranks: on all nodes.
        restarts: how often the ranks are started again.
        tag: each line begins with its rank.
        log_dir: folder for a file of each rank.
        program: the words of the program, those of Python included.
        unused: the options that have no effect.
    """

    ranks: int
    restarts: int
    tag: bool
    log_dir: str | None
    program: tuple[str, ...]
    unused: tuple[str, ...]


def read_torchrun(words: Sequence[str]) -> TorchrunWords:
    """Return the meaning of torchrun's options and program.

    Raises:
        ValueError: an option cannot be kept, or has a value that MPI's ranks cannot have.

    Example:
        >>> read_torchrun(["--standalone", "--nproc_per_node=4", "-m", "package.train", "--lr", "1"]).ranks
        4
    """
    parser = _parser()
    args = parser.parse_args(words)
    for option in _REFUSED:
        if getattr(args, _name(option)) not in (None, False):
            _refuse(
                option, "an option that ranks of MPI can keep", f"{option}, which has no counterpart", "Leave it out"
            )
    nodes, program = _nodes(args.nnodes), [args.training_script, *args.training_script_args]
    if args.node_rank not in (None, "0"):
        remedy = "Call it once in the batch script: the launcher starts the ranks on all nodes"
        _refuse("--node-rank", "0, or none: one call starts all ranks", args.node_rank, remedy)
    if args.node_rank is not None and nodes > 1:
        remedy = "Leave it out, and call it once, in the batch script: a call on each node would start all ranks again"
        _refuse("--node-rank", f"none with --nnodes {nodes}: one call starts the ranks of all nodes", "0", remedy)
    if args.module and args.no_python:
        _refuse("--no-python", "no -m", "both")
    if args.module:
        program = [sys.executable, "-m", *program]
    elif args.run_path or not args.no_python:
        if not os.path.exists(program[0]):
            _refuse("training_script", "a file that is there", program[0])
        program = [sys.executable, *program]
    elif (found := shutil.which(program[0])) is not None:
        program[0] = found
    else:
        _refuse("training_script", "a program on PATH", program[0])
    for option, value in (("--redirects", args.redirects), ("--tee", args.tee)):
        if value not in (*_ALL, *_NONE):
            _refuse(option, "0 or 3: neither or both streams, of all ranks", value)
    if args.redirects in _ALL and args.log_dir is None:
        _refuse("--redirects", "--log-dir with it", "none")
    if not args.max_restarts.isdigit():
        _refuse("--max-restarts", "a number >= 0", args.max_restarts)
    tee = args.tee in _ALL
    unused = [option for option in _UNUSED if getattr(args, _name(option)) not in (None, False)]
    return TorchrunWords(
        ranks=nodes * _ranks_per_node(args.nproc_per_node),
        restarts=int(args.max_restarts),
        tag=tee,
        log_dir=args.log_dir if tee or args.redirects in _ALL else None,
        program=tuple(program),
        unused=(*unused, *(["--log-dir"] if args.log_dir and not tee and args.redirects in _NONE else [])),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        _FUNCTION,
        usage=f"{_FUNCTION} [--nnodes N] [--nproc-per-node N] [--max-restarts N] [option of torchrun …] PROGRAM [ARGUMENT …]",
        description="Starts the ranks of a command line of torchrun under MPI.",
    )

    def add(option: str, action: str, text: str, **more: Any) -> None:
        names = dict.fromkeys((option, "--" + option[2:].replace("-", "_")))
        parser.add_argument(*names, dest=_name(option), action=action, help=text, **more)

    add("--nnodes", "store", "number of nodes; more than 1 in a SLURM job only", default="1")
    add("--nproc-per-node", "store", "ranks of each node: a number, auto, cpu or gpu", default="1")
    add("--max-restarts", "store", "as --restarts of mpistrat run", default="0")
    add("--node-rank", "store", "0")
    add("--no-python", "store_true", "the program is started as it is")
    add("--run-path", "store_true", "the program is a file of Python")
    add("--log-dir", "store", "folder for the output of the ranks, with --redirects or --tee")
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module of Python")
    parser.add_argument(
        "-r", "--redirects", metavar="0|3", help="3: the output of each rank goes to a file of --log-dir"
    )
    parser.add_argument("-t", "--tee", metavar="0|3", help="3: each line of output begins with its rank, as with --tag")
    for option, action in _UNUSED.items():
        add(option, action, "accepted, and not used")
    for option, action in _REFUSED.items():
        add(option, action, "not supported: an error")
    parser.add_argument("training_script", metavar="PROGRAM", help="a file of Python, or what -m and --no-python say")
    parser.add_argument("training_script_args", metavar="…", nargs=argparse.REMAINDER, help="its arguments")
    return parser


def _name(option: str) -> str:
    return option[2:].replace("-", "_")


def _refuse(argument: str, expected: str, got: object, remedy: str = "") -> None:
    raise ValueError(explain(_FUNCTION, argument, expected=expected, got=got, remedy=remedy))


def _nodes(text: str) -> int:
    low, _, high = text.partition(":")
    if not re.fullmatch(r"[1-9]\d{0,5}(:[1-9]\d{0,5})?", text) or low != (high or low):
        _refuse("--nnodes", "a number >= 1: ranks of MPI are as many from start to end", text)
    nodes, there = int(low), len(allocation_of_job().living) or 1
    if nodes > there:
        remedy = "Ask the batch system for as many nodes, and call it once, in the batch script"
        _refuse("--nnodes", f"at most {there}, the nodes that this job has", text, remedy)
    return nodes


def _ranks_per_node(text: str) -> int:
    if re.fullmatch(r"[1-9]\d{0,3}", text):
        return int(text)
    gpus = _visible_gpus()
    if text == "gpu" and not gpus:
        _refuse(
            "--nproc-per-node", "a GPU that this process may use", "gpu, and there is none", "Use auto, cpu or a number"
        )
    if text not in ("auto", "cpu", "gpu"):
        _refuse("--nproc-per-node", "a number >= 1, auto, cpu or gpu", text)
    return usable_cores() if text == "cpu" else gpus or usable_cores()


def _visible_gpus() -> int:
    """Return the number of NVIDIA's GPUs for this process; CUDA is not started."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([name for name in chosen.split(",") if name.strip() not in ("", "-1")])
    return len(gpus_of_machine())

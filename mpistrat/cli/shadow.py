"""`mpistrat shadow`: find the first tensor in which a program on several ranks differs from one process."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from ..base.agree import Ranks
from ..base.errors import ClusterError, explain
from ..base.programs import program as own_program
from ..launcher.plan import MOST_RANKS, plan
from ..launcher.standby import environment_with
from ..shadow.contexts import ELEMENTS, STEPS
from .command import DONE, PROBLEM, Command
from .run import program_of
from .terminal import complain, whole

__all__ = ["COMMAND"]

_REPETITIONS = 2
_MODULE = "mpistrat.shadow.start"


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "mpistrat shadow [options] PROGRAM [ARGUMENT …]\n       mpistrat shadow [options] -m MODULE [ARGUMENT …]"
    )
    parser.add_argument(
        "-n", "--ranks", type=whole(1, MOST_RANKS - 1), metavar="N", help="ranks; default as mpistrat run"
    )
    parser.add_argument("--steps", type=whole(1), default=STEPS, metavar="N", help="to compare; default %(default)s")
    parser.add_argument(
        "--elements", type=whole(0), default=ELEMENTS, metavar="N",
        help="of each tensor, at equal distances; 0 for all; default %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--reference", metavar="WORDS",
        help='the arguments of the program on one process, if they differ, as "--batch 64" for "--batch 16" on 4 ranks',
    )  # fmt: skip
    parser.add_argument("--folder", metavar="DIR", help="keep the recorded run there; default a temporary folder")
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE …", help="a module, as python -m takes it"
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="PROGRAM …", help="a file of Python, and its arguments"
    )


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    words = program_of(args)
    if words[0] != sys.executable:
        raise ValueError(explain("mpistrat shadow", "program", expected="a program of Python", got=words[0]))
    program = words[1:]
    count = 2 if program[0] == "-m" else 1
    alone = program if args.reference is None else [*program[:count], *shlex.split(args.reference)]
    with tempfile.TemporaryDirectory(prefix="mpistrat-shadow-") as temporary:
        folder = str(Path(args.folder or temporary).resolve())
        settings = [folder, str(args.steps), str(args.elements)]
        try:
            for mode in ("record", *["round"] * _REPETITIONS):
                print(f"mpistrat shadow: {mode} on one process", file=sys.stderr, flush=True)
                status = _start([mode, *settings, *alone], 1, quiet=True)
                if status:
                    return PROBLEM
            print("mpistrat shadow: compare", file=sys.stderr, flush=True)
            status = _start(["compare", *settings, *program], args.ranks, quiet=False)
        except ClusterError as error:
            complain(error)
            return PROBLEM
    return PROBLEM if status else DONE


def _start(words: list[str], ranks: int | None, quiet: bool) -> int:
    """Run the program, and return its status; a quiet one's output is printed if it fails."""
    start = plan(own_program(_MODULE, *words), ranks, None, None)
    environment = environment_with(start.environment)
    if not quiet:
        return subprocess.call(start.command, env=environment)
    result = subprocess.run(
        start.command, env=environment, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode:
        print(result.stdout, end="", file=sys.stderr)
    return result.returncode


COMMAND = Command(
    summary="find the first tensor in which a program on several ranks differs from one process",
    text="""\
Run a program on one process, then on several ranks, and compare their first steps: parameters, the rows of each batch,
outputs of torch modules, gradients, updates, and tensors that the program names by ms.shadow.tensor. The first
difference is printed with its step, ranks and operation, and the program ends there. The end reports what was compared
and what was left out. A program in which no step is seen is an error, as is another number of steps on the ranks.

The program needs a seed, and no other change; Keras models are those of ms.keras.distribute. Its batches must be global
ones, as of distribute_dataset; else give the arguments of one process by --reference. It runs three times on one process:
two runs change the parameters by rounding, and measure how far that carries; so no tolerance must be chosen. Masks of
torch.nn.Dropout are replayed. After other random layers, and after Keras's BatchNormalization, only rows
are compared.""",
    examples=(
        "mpistrat shadow -n 4 train.py",
        "mpistrat shadow -n 4 --steps 100 train.py --epochs 1",
        'mpistrat shadow -n 4 --reference "--batch 64" train.py --batch 16',
    ),
    arguments=_arguments,
    run=_run,
    collective=False,
    status="0 equal, 1 a difference was found, no step was, or the program failed, 2 for wrong use",
)

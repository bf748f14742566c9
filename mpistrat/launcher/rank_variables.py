"""A process between a launcher and a rank's program: sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, like torchrun.

`mpistrat run` runs it by its path, with the standard library only: `rank_variables.py RANKS SIZES WORD …`. Batch jobs run it as a
module: `python -m mpistrat.launcher.rank_variables WORD …`. The program replaces this process. Libraries such as Accelerate and
Transformers read the variables on import, before MPI starts.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence

_LOCAL_RANKS = "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"
_LOCAL_SIZES = "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"


def main(ranks: str, sizes: str, *words: str) -> None:
    """Replace this process with a program, with the variables of its rank.

    Args:
        ranks: names of launchers' variables with the rank; the first that is set counts.
        sizes: the same with the number of ranks.
        words: of the program.
    """
    found = variables_of(os.environ, ranks.split(","), sizes.split(","))
    missing = [name for name, value in found.items() if not value]
    if missing:
        sys.exit(f"mpistrat: the launcher does not show {' and '.join(missing)} of this process in its environment")
    os.environ.update(found)
    os.execvp(words[0], words)


def variables_of(env: Mapping[str, str], ranks: Sequence[str], sizes: Sequence[str]) -> dict[str, str]:
    """Return the four variables; "" for a value that the launcher does not set.

    Example:
        >>> env = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
        >>> variables_of(env, ["PMI_RANK"], ["PMI_SIZE"])
        {'RANK': '3', 'WORLD_SIZE': '4', 'LOCAL_RANK': '1', 'LOCAL_WORLD_SIZE': '2'}
    """
    return {
        "RANK": _first(env, ranks),
        "WORLD_SIZE": _first(env, sizes),
        "LOCAL_RANK": _first(env, _LOCAL_RANKS),
        "LOCAL_WORLD_SIZE": _first(env, _LOCAL_SIZES) or _slurm_tasks(env),
    }


def _first(env: Mapping[str, str], names: Sequence[str]) -> str:
    return next((env[name] for name in names if env.get(name)), "")


def _slurm_tasks(env: Mapping[str, str]) -> str:
    """Return the number of tasks on this node in a step of srun, from a variable such as "4(x2),3"."""
    text, node = env.get("SLURM_STEP_TASKS_PER_NODE", ""), env.get("SLURM_NODEID", "")
    counts = list[str]()
    for part in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [part[0]] * int(part[1] or 1)
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else ""


if __name__ == "__main__":
    arguments: Sequence[str] = sys.argv[1:]
    if __package__:
        from ..cluster.launcher_variables import RANK_VARIABLES

        arguments = [",".join(RANK_VARIABLES.values()), ",".join(RANK_VARIABLES), *arguments]
    main(*arguments)

"""Random combinations of training options next to a reference in one process, in NumPy float64.

    mpiexec -n 3 python -m tests.nets.differential --seed 1 --count 40     (1 to 4 ranks)

Each case is drawn from the seed, its number and the number of ranks, the same on all ranks: a strategy with its options,
optimizers with their settings, variables, data, and what happens between stretches of steps (save and restore into another
strategy, assign, other settings, ...). After each step all weights and the loss are compared, after each stretch slots and
counters, too.

The reference keeps a world of weights and slots for each node (they differ under local steps), each three times: exactly, and
with gradients that are wrong by + and - the rounding of their dtype. How far these drift apart is how far rounding may carry
the package. The tolerance of each element is ten times that, plus a small part of the number.

Rank 0 prints a line of JSON before and after each case. The exit status is 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys


def prepare(seed: int) -> None:
    """Vary by the seed what does not change numbers, before the package is imported."""
    os.environ["MPISTRAT_COMPILED_LOOPS"] = "0" if seed % 4 == 3 else "1"
    os.environ["MPISTRAT_CHECK_EVERY"] = "1" if seed % 2 else "64"
    os.environ.setdefault("MPISTRAT_ABORT_AFTER", "60")
    os.environ.setdefault("MPISTRAT_LOG", "error")
    if seed % 3 == 2:
        sys.setswitchinterval(1e-5)  # threads of replicas meet in more places


def main() -> int:
    """Run the cases of the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="tests.nets.differential", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--count", type=int, default=20, help="the number after the last case")
    parser.add_argument("--kinds", nargs="*", default=(), help="strategies to draw from, such as ParameterServer Mesh")
    options = parser.parse_args()
    prepare(options.seed)
    from tests.nets.differential.cases import run_cases
    from tests.nets.differential.layouts import RANK

    failed = 0
    for record in run_cases(options.seed, options.first, options.count, tuple(options.kinds)):
        failed += record.get("result") == "wrong"
        if RANK == 0:
            print(json.dumps(record, default=str), flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m mpistrat.torch.run`, instead of `torchrun` and `python -m torch.distributed.run`: the ranks start under MPI.

It is `mpistrat run --torchrun` with the same arguments.
"""

from __future__ import annotations

import os
import sys

from ..base.programs import program

if __name__ == "__main__":
    words = program("mpistrat", "run", "--torchrun", *sys.argv[1:])
    os.execv(words[0], words)

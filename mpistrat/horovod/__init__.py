"""Horovod's calls for PyTorch, on MPI alone: programs with `import horovod.torch as hvd` run unchanged.

`mpistrat run --horovod train.py`, or `mpistrat.horovod.install()` before the import, makes `horovod.torch` an alias of
`mpistrat.horovod.torch`. This package has no module named `horovod` of its own.
"""

from __future__ import annotations

from .install import install

__all__ = ["install"]

"""The modules of Horovod's names: after `install`, `import horovod.torch as hvd` is `mpistrat.horovod.torch`."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
import types

from ..base import log
from ..base.errors import ContextError, explain

__all__ = ["VERSION", "install"]

VERSION = "0.28.1"  # of Horovod, whose calls these are
_HOME = "mpistrat.horovod"
_TORCH = {
    "": "torch",
    ".mpi_ops": "torch.mpi_ops",
    ".compression": "torch.compression",
    ".functions": "torch.objects",
    ".optimizer": "torch.optimizer",
    ".sync_batch_norm": "torch",
    ".elastic": "torch.elastic",
    ".elastic.state": "torch.elastic",
    ".elastic.sampler": "torch.elastic",
}
_COMMON = {"exceptions": "errors", "process_sets": "torch", "elastic": "torch.elastic"}


def install() -> None:
    """Make `import horovod.torch` import `mpistrat.horovod.torch`. A second call has no effect. Local.

    Call it before the import, or use `mpistrat run --horovod train.py`. If another Horovod is installed, the log says that it
    is not used.

    Raises:
        ContextError: another Horovod was imported before.
        MissingDependencyError: PyTorch is not installed.

    Example:
        >>> import mpistrat.horovod
        >>> mpistrat.horovod.install()
        >>> import horovod.torch as hvd
        >>> hvd.__name__
        'mpistrat.horovod.torch'
    """
    there = sys.modules.get("horovod")
    if getattr(there, "of_mpistrat", False):
        return
    if there is not None and "horovod.torch" in sys.modules:
        got, remedy = f"that of {there.__file__}", "Call install() before the program imports horovod"
        text = explain("mpistrat.horovod.install", "", expected="no imported horovod", got=got, remedy=remedy)
        raise ContextError(text)
    _report_other()
    top, common = _package("horovod"), _package("horovod.common")
    top.__dict__.update(__version__=VERSION, of_mpistrat=True, common=common)
    modules = {"horovod": top, "horovod.common": common}
    for name, home in _TORCH.items():
        modules[f"horovod.torch{name}"] = importlib.import_module(f"{_HOME}.{home}")
    for name, home in _COMMON.items():
        modules[f"horovod.common.{name}"] = common.__dict__[name] = importlib.import_module(f"{_HOME}.{home}")
    top.__dict__["torch"] = modules["horovod.torch"]
    sys.modules.update(modules)


def _package(name: str) -> types.ModuleType:
    made = types.ModuleType(name, "Horovod's calls on MPI, by mpistrat.horovod.")
    made.__path__ = []
    return made


def _report_other() -> None:
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return
    log.setup()
    log.once(logging.WARNING, f"Horovod {version} is installed, and not used: horovod.torch is mpistrat.horovod.torch")

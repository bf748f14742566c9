"""Launchers: checks that mpiexec belongs to mpi4py's MPI, and that srun supports its protocol."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence

from ..cluster.launcher_variables import fitting_pmi, offered_pmis, pmi2_remedy, unset_variable, wanted_pmis
from ..cluster.launchers import (
    USER,
    Launcher,
    MPILibrary,
    choose_launcher,
    family_to_load,
    find_launchers,
    mismatch,
)
from .finding import Finding, ok, problem, warning

__all__ = ["TOO_LONG", "check_launchers", "is_root"]

TOO_LONG = "the lines of {library} over UCX are too long for SLURM's PMI2: MPI_Init fails, or hangs, now and then"


def check_launchers(library: MPILibrary, launchers: Sequence[Launcher] | None = None) -> Iterator[Finding]:
    """Yield the launcher to use, and those not to use; default: of all found."""
    launchers = find_launchers(library) if launchers is None else launchers
    fitting = choose_launcher(library, launchers)
    srun = shutil.which("srun")
    found = [] if srun is None else list(_srun(library, fitting))
    yield from _mpiexec(library, launchers, fitting, any(finding.status != "problem" for finding in found))
    yield from found


def _mpiexec(
    library: MPILibrary, launchers: Sequence[Launcher], fitting: Launcher | None, srun: bool
) -> Iterator[Finding]:
    name = "mpiexec"
    typed = _typed(launchers)
    root = " --allow-run-as-root" if library.family == "openmpi" and is_root() else ""
    use = "" if fitting is None else f"{' '.join(fitting.command)}{root} -n 4 python train.py"
    install = (
        f"install the launcher of {library}, or mpi4py for the launcher's MPI (pip install --no-binary=mpi4py mpi4py)"
    )
    if typed is not None and (why := mismatch(library, typed)):
        where = "in $MPIEXEC" if typed.where == USER else "on PATH"
        what = (
            f"{typed.path}, the one {where}, is the launcher of another MPI: {why}. Under it each process is rank 0 of 1, or "
            "fails at the start"
        )
        remedy = f"Start with {use}, or put its folder first on PATH" if use else install.capitalize()
        if family_to_load() is not None and typed.family in ("mpich", "openmpi") and typed.family != library.family:
            remedy += (
                f". Or export MPI4PY_MPIABI={typed.family}: then mpi4py loads that launcher's MPI, if it is installed"
            )
        yield problem(name, what, remedy)
    elif fitting is not None:
        yield ok(name, f"{fitting}: start with {use}")
    elif srun:
        yield ok(name, "none on PATH or with mpi4py: srun is there")
    else:
        yield problem(name, f"no launcher of {library} is on PATH or with mpi4py", install.capitalize())


def _typed(launchers: Sequence[Launcher]) -> Launcher | None:
    """Return the launcher used without a path: the user's $MPIEXEC, else `mpiexec` on PATH."""
    given = next((launcher for launcher in launchers if launcher.where == USER), None)
    path = shutil.which("mpiexec") or shutil.which("mpirun")
    if given is not None or path is None:
        return given
    file = os.path.realpath(path)
    same = [launcher for launcher in launchers if os.path.realpath(launcher.path) == file]
    # Of several launchers in a folder with the same version only one is listed.
    beside = [one for one in launchers if os.path.dirname(os.path.realpath(one.path)) == os.path.dirname(file)]
    return next(iter(same + beside), None)


def _srun(library: MPILibrary, fitting: Launcher | None) -> Iterator[Finding]:
    """Yield the `--mpi=` that starts this library's ranks."""
    offered = offered_pmis()
    if not offered:
        what = "srun is on PATH, but srun --mpi=list fails: there is no SLURM behind it"
        if fitting is not None:
            yield ok("srun", f"{what}. mpiexec does without")
        else:
            yield problem("srun", what, "Try srun --mpi=list; on a cluster with SLURM ask the site")
        return
    known = " or ".join(wanted_pmis(library))
    value = fitting_pmi(library, offered)
    said = f"srun --mpi=list: {', '.join(offered)}"
    if not known:
        what = (
            f"{said}: which of them starts {library} is not known here. With another each process will be rank 0 of 1"
        )
        yield warning("srun", what, "Ask the site which srun --mpi= starts its MPI")
        return
    if value is None:
        instead = f"start with {fitting.path} in the batch script" if fitting is not None else "load the site's own MPI"
        remedy = f"Ask the site for SLURM's {known} plugin; until then {instead}"
        what = (
            f"{said}: none is a protocol of {library}, which needs {known}. Under srun each process will be rank 0 of 1"
        )
        yield problem("srun", what, remedy)
        return
    chosen = os.environ.get("SLURM_MPI_TYPE", "")
    if chosen and chosen not in offered:
        remedy = f"export SLURM_MPI_TYPE={value}"
        yield problem("srun", f"SLURM_MPI_TYPE={chosen}, which is not among {', '.join(offered)}", remedy)
    elif chosen and fitting_pmi(library, [chosen]) is None:
        what = f"SLURM_MPI_TYPE={chosen} is not a protocol of {library}: each process will be rank 0 of 1"
        yield warning("srun", what, f"export SLURM_MPI_TYPE={value}, or srun --mpi={value}")
    elif value == "pmi2" and (remedy := pmi2_remedy(library)):
        what = f"{said}: srun --mpi={value} python train.py, but {TOO_LONG.format(library=library)}"
        yield warning("srun", what, f"{remedy}. mpistrat job and mpistrat run do it themselves")
    else:
        setting = unset_variable(library)
        after = f", after export {setting}" if setting else ""
        yield ok("srun", f"{said}: start with srun --mpi={value} python train.py{after}")


def is_root() -> bool:
    """Return whether this user is root, for which Open MPI's launcher needs an option."""
    return hasattr(os, "geteuid") and os.geteuid() == 0

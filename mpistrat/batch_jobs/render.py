"""Rendering of a job at a site as a batch script. Templates quote every value for the shell."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ..base.environment import RESTART_EXIT_CODE
from ..base.errors import MissingDependencyError
from ..base.text import counted
from .job import BatchJob
from .plan import check, gpus_per_rank, launcher_of
from .schedulers import SCHEDULERS
from .site import SiteProfile

__all__ = ["FOR_PMI2", "render"]

# For an MPI that may be a wheel's MPICH, see cluster/launcher_variables.py.
FOR_PMI2 = MappingProxyType({"MPIR_CVAR_CH4_NETMOD": "ofi"})


# Like python -m mpistrat, but ignores modules in the working directory.
_MAIN = "import sys; sys.path[:] = filter(None, sys.path); from mpistrat.cli.main import main; sys.exit(main())"


class _Shell(str):
    """Text that is inserted unquoted: a template's own, quoted words, or a comment."""


def render(job: BatchJob, site: SiteProfile, for_pmi2: Mapping[str, str] = FOR_PMI2) -> str:
    """Return the batch script of a job at a site.

    Args:
        job: the program and its resources.
        site: the machine.
        for_pmi2: variables that the job's MPI needs under `srun --mpi=pmi2`; the default is for an unknown MPI.

    Raises:
        ValueError: the site's batch system does not support something that the job requests.
        MissingDependencyError: without jinja2.

    Example:
        >>> from mpistrat.batch_jobs import BatchJob, SiteProfile, render
        >>> script = render(BatchJob(program=("train.py", "a file"), nodes=4), SiteProfile())
        >>> "#SBATCH --nodes=4" in script, "program=(python train.py 'a file')" in script
        (True, True)
    """
    check(job, site)
    template = _environment().get_template(f"{site.scheduler}.sh.jinja")
    launcher, scheduler = launcher_of(site), SCHEDULERS[site.scheduler]
    if job.restarts or job.survive:
        launcher = "mpistrat"  # which runs srun or mpirun
    text: str = template.render(
        job=job,
        site=site,
        scheduler=scheduler,
        launcher=launcher,
        by=scheduler.by,
        what=_comment(_what(job, launcher)),
        reason=_reasons(site),
        main=_MAIN,
        clock=_clock(job.seconds),
        minutes=-(-job.seconds // 60),
        gpus_per_rank=gpus_per_rank(job),
        restart=RESTART_EXIT_CODE,
        program=_program(job, site),
        for_pmi2=_for_pmi2(site, for_pmi2),
        exported=_exported(job, site),
    )
    return text


@functools.cache
def _environment() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise MissingDependencyError("mpistrat job needs jinja2: pip install jinja2") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("mpistrat.batch_jobs"),
        undefined=jinja2.StrictUndefined,
        finalize=_quoted,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"words": _words, "comment": _comment, "shell": _Shell}
    return environment


def _quoted(value: object) -> str:
    """Return a value as it is written into a script."""
    return value if isinstance(value, _Shell) else shlex.quote(str(value)) if value != "" else ""


def _words(value: str | Iterable[str]) -> _Shell:
    """Return words of a command line, or an option and its value, quoted."""
    return _Shell(shlex.join(value.split(" ") if isinstance(value, str) else value))


def _comment(value: str) -> _Shell:
    """Return text for a comment line."""
    return _Shell(re.sub(r"[\x00-\x1f\x7f]", "?", value))


def _reasons(site: SiteProfile) -> Callable[[str, str], _Shell]:
    """Return a function that returns the reason for a setting: the profile's, or the usual one."""

    def reason(setting: str, usual: str) -> _Shell:
        said = site.reasons.get(setting)
        return _comment(f"At {site.name}: {said}" if said else usual)

    return reason


def _program(job: BatchJob, site: SiteProfile) -> tuple[str, ...]:
    """Return the command line of each rank."""
    words = job.program
    if job.check:
        words = (site.python, "-c", _MAIN, *words)
    elif job.module:
        words = (site.python, "-m", *words)
    elif job.program[0].endswith(".py"):
        words = (site.python, *words)
    if job.numbers:
        words = (site.python, "-m", "mpistrat.launcher.rank_variables", *words)
    if job.container:
        gpu = ("--nv",) if job.gpus_per_node else ()
        words = (*site.container_command, *gpu, job.container, *words)
    return words


def _for_pmi2(site: SiteProfile, wanted: Mapping[str, str]) -> dict[str, str]:
    """Return these variables if PMI2 may start the ranks and the site does not set them."""
    return {
        name: value for name, value in wanted.items() if site.mpi in ("auto", "pmi2") and name not in site.variables
    }


def _exported(job: BatchJob, site: SiteProfile) -> list[str]:
    """Return the variables that a launcher passes to ranks only on request."""
    roles = ["MPISTRAT_NUM_PS"] if job.num_ps else []
    names = ["MPISTRAT_STRATEGY", *roles, "OMP_NUM_THREADS", "PYTHONUNBUFFERED", *site.variables]
    return list(dict.fromkeys(names))


def _what(job: BatchJob, launcher: str) -> str:
    """Return the first comment, which describes the job."""
    ranks = f"{counted(job.ranks, 'rank')}"
    if job.num_ps:
        nodes = " on nodes of their own" if job.ps_nodes else ""
        workers = job.ranks - job.num_ps
        servers = f"{counted(job.num_ps, 'parameter server')}{nodes}"
        ranks = f"{counted(workers, 'worker')}, then {servers}"
    parts = [f"{ranks}, started by {launcher.replace('mpistrat', 'mpistrat run')}"]
    parts += [f"{job.gpus_per_node} GPUs on each node"] * bool(job.gpus_per_node)
    parts += ["in a container"] * bool(job.container)
    parts += ["an array of jobs"] * bool(job.array)
    parts += ["resumed after a preemption"] * bool(job.preemption)
    parts += ["a check of the cluster"] * job.check
    parts += ["kept running when a rank dies"] * bool(job.restarts or job.survive)
    return f"{', '.join(parts)}."


def _clock(seconds: int) -> str:
    """Return HH:MM:SS, which every batch system reads."""
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"

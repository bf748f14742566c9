"""A job and a site become a batch script. Whatever the templates write of them is quoted for the shell."""

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

FOR_PMI2 = MappingProxyType(
    {"MPIR_CVAR_CH4_NETMOD": "ofi"}
)  # as cluster/launcher_variables.py says of an MPI that may be a wheel's MPICH


# As python -m mpistrat, without modules of the working directory.
_MAIN = "import sys; sys.path[:] = filter(None, sys.path); from mpistrat.cli.main import main; sys.exit(main())"


class _Shell(str):
    """Text that is right as it is: a template's own, words that are quoted already, a comment."""


def render(job: BatchJob, site: SiteProfile, for_pmi2: Mapping[str, str] = FOR_PMI2) -> str:
    """Return the batch script of a job at a site.

    Args:
        job: what runs.
        site: where.
        for_pmi2: variables that the job's MPI wants under `srun --mpi=pmi2`; the default is for an unknown MPI.

    Raises:
        ValueError: the site's batch system cannot do what the job asks for.
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
        launcher = "mpistrat"  # which starts that
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
    """What stands for a value in a script."""
    return value if isinstance(value, _Shell) else shlex.quote(str(value)) if value != "" else ""


def _words(value: str | Iterable[str]) -> _Shell:
    """Words of a command line, or of an option with its value."""
    return _Shell(shlex.join(value.split(" ") if isinstance(value, str) else value))


def _comment(value: str) -> _Shell:
    """Text behind a # and other words."""
    return _Shell(re.sub(r"[\x00-\x1f\x7f]", "?", value))


def _reasons(site: SiteProfile) -> Callable[[str, str], _Shell]:
    """What says why a setting is what it is: in the profile's words, where it has any."""

    def reason(setting: str, usual: str) -> _Shell:
        said = site.reasons.get(setting)
        return _comment(f"At {site.name}: {said}" if said else usual)

    return reason


def _program(job: BatchJob, site: SiteProfile) -> tuple[str, ...]:
    """The words that each rank runs."""
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
    """These variables, if PMI2 may be what starts the ranks, and the site has no word of its own."""
    return {
        name: value for name, value in wanted.items() if site.mpi in ("auto", "pmi2") and name not in site.variables
    }


def _exported(job: BatchJob, site: SiteProfile) -> list[str]:
    """The variables that a launcher must be told to hand on."""
    roles = ["MPISTRAT_NUM_PS"] if job.num_ps else []
    names = ["MPISTRAT_STRATEGY", *roles, "OMP_NUM_THREADS", "PYTHONUNBUFFERED", *site.variables]
    return list(dict.fromkeys(names))


def _what(job: BatchJob, launcher: str) -> str:
    """The first comment: what kind of job this is."""
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
    parts += ["may be interrupted and goes on"] * bool(job.preemption)
    parts += ["a check of the cluster"] * job.check
    parts += ["goes on when a rank dies"] * bool(job.restarts or job.survive)
    return f"{', '.join(parts)}."


def _clock(seconds: int) -> str:
    """HH:MM:SS, which all of them read."""
    minutes, seconds = divmod(seconds, 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"

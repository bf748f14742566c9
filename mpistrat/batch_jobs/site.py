"""`SiteProfile`: the settings of one machine, each with its reason; read from JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from ..base.errors import explain
from ..base.files import read_whole
from ..base.text import did_you_mean
from .checks import chosen, matching, text
from .schedulers import LAUNCHERS, SCHEDULERS

__all__ = ["SiteProfile", "read_site", "site_names"]

_FOLDER = Path(__file__).parent / "sites"
_MOST = 1 << 16  # bytes of a profile
_NOT_SHELL = re.compile(r"BASH.*|ENV|IFS|PATH|PPID|PROMPT_COMMAND|PS\d|SHELLOPTS|E?UID|SLURM_.*|LSB_.*|PBS_.*|FLUX_.*")


@final
@dataclass(frozen=True, kw_only=True)
class SiteProfile:
    """The settings of a site for its jobs.

    Args:
        name: of the site.
        about: the source of its facts.
        scheduler: slurm, pbs, lsf or flux.
        launcher: starts the ranks in the job: srun; mpich (its mpiexec); openmpi (its mpirun); pals (Cray's mpiexec); jsrun;
            flux; or auto for the scheduler's usual one.
        mpi: interface between launcher and MPI library: pmix (or a version of it, as pmix_v4), pmi2, cray_shasta, none, or auto
            for the site's default.
        srun_cpus_per_task: export SRUN_CPUS_PER_TASK: since SLURM 22.05 srun ignores the job's --cpus-per-task.
        gpu_request: how the script requests GPUs: per_node, per_task or gres.
        gpu_bind: binding of tasks to GPUs in SLURM: closest, none, or "" for the site's default.
        directives: further options of the batch system, of an allowlist, as ("--constraint=gpu",).
        modules: environment modules to load.
        venv, conda: folder of the virtual environment, or name or folder of the conda environment, to activate.
        python: the Python of the job.
        container_command: command that runs a program in an image.
        variables: environment variables to set.
        gtl: Cray MPICH's library for GPU memory, as mpi_gtl_cuda. Scripts disable that support, or load the library before MPI
            if the job requests it (`gpu_mpi`).
        nccl_net: the network of NCCL's plugin, as "AWS Libfabric". Scripts set NCCL_NET to it if they find a plugin.
        reasons: by setting, the reason for its value; a comment in the script.

    Raises:
        ValueError: with the name of the wrong setting.
    """

    name: str = "generic"
    about: str = ""
    scheduler: str = "slurm"
    launcher: str = "auto"
    mpi: str = "auto"
    srun_cpus_per_task: bool = True
    gpu_request: str = "per_node"
    gpu_bind: str = ""
    directives: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    venv: str = ""
    conda: str = ""
    python: str = "python"
    container_command: tuple[str, ...] = ("apptainer", "exec")
    variables: MappingProxyType[str, str] = field(default_factory=lambda: MappingProxyType({}))
    gtl: str = ""
    nccl_net: str = ""
    reasons: MappingProxyType[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        matching("SiteProfile", "name", self.name, r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", "letters, digits and . _ -")
        text("SiteProfile", "about", self.about, dash=True)
        chosen("SiteProfile", "scheduler", self.scheduler, tuple(SCHEDULERS))
        chosen("SiteProfile", "launcher", self.launcher, ("auto", *LAUNCHERS))
        expected = "one of auto, pmix, pmix_vN, pmi2, cray_shasta, none"
        matching("SiteProfile", "mpi", self.mpi, r"auto|pmix(_v\d{1,2})?|pmi2|cray_shasta|none", expected)
        chosen("SiteProfile", "gpu_request", self.gpu_request, ("per_node", "per_task", "gres"))
        chosen("SiteProfile", "gpu_bind", self.gpu_bind, ("", "closest", "none"))
        chosen("SiteProfile", "gtl", self.gtl, ("", "mpi_gtl_cuda", "mpi_gtl_hsa"))
        matching(
            "SiteProfile", "nccl_net", self.nccl_net, r"[A-Za-z0-9_. -]{0,64}", "letters, digits, spaces and _ . -"
        )
        if not isinstance(self.srun_cpus_per_task, bool):
            raise _wrong("srun_cpus_per_task", "true or false", self.srun_cpus_per_task)
        for name in ("directives", "modules", "container_command"):
            if not isinstance(getattr(self, name), tuple):
                raise _wrong(name, "a list of words", getattr(self, name))
        for directive in self.directives:
            self._check_directive(directive)
        for module in self.modules:
            expected = "names of modules, as in gcc/12.3"
            matching("SiteProfile", "modules", module, r"[A-Za-z0-9_][A-Za-z0-9_.+/-]{0,127}", expected)
        self._check_environment()
        for name in ("variables", "reasons"):
            self._check_mapping(name)

    def _check_directive(self, directive: object) -> None:
        matching(
            "SiteProfile", "directives", directive, r"-{1,2}[A-Za-z][A-Za-z_-]{0,40}([= ][][()A-Za-z0-9_.,:=/%@+&|*-]{1,200})?",
            "an option, or an option=value of letters, digits and . , : = / % @ + & | * _ - [ ] ( )",
        )  # fmt: skip
        option, legal = re.split("[= ]", str(directive))[0], SCHEDULERS[self.scheduler].directives
        if option not in legal:
            raise _wrong("directives", f"one of {', '.join(sorted(legal))}", directive)

    def _check_environment(self) -> None:
        for name in ("venv", "conda", "python"):
            if getattr(self, name):
                text("SiteProfile", name, getattr(self, name), path=True)
        if self.venv and self.conda:
            raise _wrong("conda", "no conda environment next to venv", self.conda)
        if not self.python:
            raise _wrong("python", "a command", self.python)
        for place, word in enumerate(self.container_command):
            text("SiteProfile", "container_command", word, dash=place > 0)
        if not self.container_command or ":" in self.container_command:
            raise _wrong("container_command", "a command, without ':'", self.container_command)

    def _check_mapping(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, (dict, MappingProxyType)):
            raise _wrong(name, "an object", value)
        for key, said in value.items():
            if name == "reasons":
                chosen("SiteProfile", "reasons", key, tuple(each.name for each in fields(self)))
                text("SiteProfile", f"reasons: {key}", said)
                continue
            matching("SiteProfile", name, key, r"[A-Za-z_][A-Za-z0-9_]{0,127}", "names of environment variables")
            if _NOT_SHELL.fullmatch(key):
                raise _wrong(name, "variables that neither the shell nor the batch system uses", key)
            text("SiteProfile", f"variables: {key}", said, dash=True)
        object.__setattr__(self, name, MappingProxyType(dict(value)))


def _wrong(name: str, expected: str, got: object) -> ValueError:
    return ValueError(explain("SiteProfile", name, expected=expected, got=f"{got!r:.80}"))


def site_names() -> list[str]:
    """Return the names of the profiles in this package.

    Example:
        >>> "generic" in site_names()
        True
    """
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def read_site(name: str) -> SiteProfile:
    """Return a profile of this package, by name, or one of your own, by path.

    Args:
        name: of a profile, or a path, which has a slash or ends in .json.

    Raises:
        ValueError: there is no such profile, or it is invalid.
    """
    if "/" in name or name.endswith(".json"):
        path = Path(name)
    elif name in site_names():
        path = _FOLDER / f"{name}.json"
    else:
        expected = f"one of {', '.join(site_names())}, or the path of a JSON file"
        remedy = did_you_mean(name, site_names())
        raise ValueError(explain("SiteProfile", "site", expected=expected, got=f"{name!r:.80}", remedy=remedy))
    try:
        said = json.loads(read_whole(path, _MOST).decode())
    except (OSError, ValueError, RecursionError) as error:
        got = "no such file" if isinstance(error, FileNotFoundError) else str(error)[:200]
        raise ValueError(explain("SiteProfile", f"{name!r:.200}", expected="a JSON file", got=got)) from None
    return _profile(name, said)


def _profile(name: str, said: Any) -> SiteProfile:
    if not isinstance(said, dict):
        raise ValueError(explain("SiteProfile", f"{name!r:.200}", expected="a JSON object", got=type(said).__name__))
    legal = {each.name for each in fields(SiteProfile)}
    for key in said:
        if key not in legal:
            expected = f"settings of {', '.join(sorted(legal))}"
            remedy = did_you_mean(key, legal)
            raise ValueError(
                explain("SiteProfile", f"{name!r:.200}", expected=expected, got=f"{key!r:.80}", remedy=remedy)
            )
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in said.items()}
    return SiteProfile(**values)

"""Pages of sites from their profiles: the line `<!-- site: NAME -->` becomes the commands, the settings and what was tried."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from mpistrat.batch_jobs import SCHEDULERS, SiteProfile, read_site

if TYPE_CHECKING:
    from sphinx.application import Sphinx  # tests read this file without Sphinx

MARK = re.compile(r"^<!-- site: ([\w-]+) -->$", re.MULTILINE)
NOTE = re.compile(r" The built documentation fills this page in from\s+the profile\.")  # for readers of the source
QUEUE = {"slurm": "squeue --me", "pbs": 'qstat -u "$USER"', "lsf": "bjobs", "flux": "flux jobs"}
LOG = {"slurm": "train-*.out", "pbs": "train.o*", "lsf": "train-*.out", "flux": "train-*.out"}
TRIED = {
    "generic": "Tried in SLURM 22.05 on two isolated hosts of one machine, over TCP, with two ranks a host, under MPICH 5.0 and "
    "Open MPI 5.0: the check by `srun`, a job by `srun` and by `mpiexec`. Not tried: a real cluster, a fast network, GPUs in a "
    "job, PBS, LSF and Flux.",
}
NOTHING = (
    "Tried: the tests generate both scripts and check their syntax. **Nothing was tried at this site**: no command of this "
    "page has been run there, and no job, network or GPU of it has been seen."
)


def commands(site: SiteProfile) -> list[tuple[str, str]]:
    """The ten commands for a site, each with what it does."""
    submit = SCHEDULERS[site.scheduler].by.removesuffix("FILE")
    job = f"mpistrat job --site {site.name} --nodes 2 --ranks-per-node 4"
    modules = " ".join(site.modules)
    first = (f"module load {modules}", "the MPI") if modules else ("module list", "look: is an MPI loaded?")
    return [
        first,
        ("python3 -m venv venv && . venv/bin/activate", "an environment, in your clone of the repository"),
        ("pip install .", "mpistrat and mpi4py"),
        ("mpistrat doctor", "finds what is missing on the login node"),
        (f"{job} --check -o check.sh", "a job that checks the cluster"),
        (f"{submit}check.sh", "10 minutes; writes `mpistrat-check-JOB.html`"),
        (f"{job} --time 10m -o job.sh train.py", "a job for the program of the [quickstart](../quickstart.md)"),
        (f"{submit}job.sh", "submits it"),
        (QUEUE[site.scheduler], "shows your jobs"),
        (f"tail {LOG[site.scheduler]}", "shows the log"),
    ]


def page(name: str) -> str:
    """The Markdown of a site's page, without its title."""
    site = read_site(name)
    numbered = list(enumerate(commands(site), 1))
    lines = [TRIED.get(name, NOTHING), "", f"Source of the profile: {site.about}.", ""]
    lines += ["## Ten commands", "", "```console"]
    for _, (command, _) in numbered:
        lines.append("$ " + command.replace(" --nodes", " \\\n    --nodes"))
    lines += ["```", "", "| command | what it does |", "|--:|---|"]
    lines += [f"| {number} | {purpose} |" for number, (_, purpose) in numbered]
    lines += ["", "Most sites want `--account NAME` or `--partition NAME` in commands 5 and 7. For GPUs, replace"]
    lines += [
        "`--ranks-per-node 4` by `--gpus-per-node N` in command 7. [Job scripts](../job_scripts.md) has all options.",
        "",
    ]
    settings = [
        (field.name, getattr(site, field.name), site.reasons.get(field.name, ""))
        for field in dataclasses.fields(site)
        if field.name in site.reasons
        or (field.name not in ("name", "about", "reasons") and getattr(site, field.name) != default(field))
    ]
    if settings:
        lines += ["## What differs here", "", "| setting | value | reason |", "|---|---|---|"]
        lines += [
            f"| `{setting}` | {shown(value)} | {reason} |".replace("  |", " |") for setting, value, reason in settings
        ]
        lines += ["", f"`mpistrat job --site {name} --show-site > mine.json` starts a profile of your own.", ""]
    return "\n".join(lines)


def default(field: dataclasses.Field[object]) -> object:
    """The default of a setting."""
    return field.default_factory() if field.default is dataclasses.MISSING else field.default  # type: ignore[misc]


def shown(value: object) -> str:
    """A setting's value in a table."""
    if isinstance(value, tuple):
        return ", ".join(f"`{word}`" for word in value)
    if hasattr(value, "items"):
        return ", ".join(f"`{key}={word}`" for key, word in value.items())
    return f"`{value}`"


def fill(app: Sphinx, name: str, text: list[str]) -> None:
    """Put the page of a site where its mark is."""
    if MARK.search(text[0]):
        text[0] = MARK.sub(lambda match: page(match[1]), NOTE.sub("", text[0], count=1))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""`mpistrat job`: writes a batch script, and submits it."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..base.agree import Ranks
from ..base.environment import STRATEGIES
from ..base.errors import ClusterError
from ..base.files import read_whole
from ..base.text import printable
from ..batch_jobs import SCHEDULERS, Array, BatchJob, Preemption, SiteProfile, read_site, render, site_names, submit
from ..batch_jobs.plan import launcher_of
from ..batch_jobs.schedulers import LAUNCHERS
from ..cluster.launcher_variables import fitting_pmi, offered_pmis, srun_environment, unset_variable
from ..cluster.launchers import MPILibrary, loaded_library
from .command import DONE, Command
from .terminal import check_folders, strategy_name, whole

__all__ = ["COMMAND"]

_CHECK_TIME = "00:10:00"
_CHECK_MARGIN = 60  # seconds of it, for the start and the end of the job


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "mpistrat job [options] (PROGRAM [ARGUMENT …] | --check)"
    parser.add_argument("program", metavar="PROGRAM", nargs="?", help="your program; one in .py is run by Python")
    parser.add_argument("words", metavar="…", nargs=argparse.REMAINDER, help="its arguments")
    parser.add_argument("-m", "--module", action="store_true", help="PROGRAM is a Python module, as behind python -m")
    parser.add_argument(
        "--numbers", action="store_true", default=None,
        help="set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE for each rank, as torchrun does",
    )  # fmt: skip

    where = parser.add_argument_group("the script")
    where.add_argument(
        "-o", "--output", metavar="FILE", help="write it there and not to stdout; executable, for you only"
    )
    where.add_argument("--submit", action="store_true", help="give it to the batch system, and print the job's id")
    where.add_argument("--json", action="store_true", help="print JSON: the script, where it is, the job's id")

    size = functools.partial(_add, parser.add_argument_group("how much"), BatchJob)
    size("nodes", "N", "nodes")
    size("ranks_per_node", "N", "ranks of each (one for each GPU, else 1)")
    size("cpus_per_rank", "N", "cores and threads of each rank")
    size("gpus_per_node", "N", "GPUs of each node")
    size("memory", "SIZE", "of each node, as in 64G")
    size("time", "TIME", "the limit, [DAYS-]HH:MM:SS, or 90m, 1h30m, 2d", kind=_time)

    parser.add_argument(
        "--gpu-mpi", action="store_true", default=None,
        help="MPI gets memory of GPUs: for programs that pass such arrays to MPI themselves (Cray MPICH, jsrun)",
    )  # fmt: skip

    kinds = parser.add_argument_group("what kind")
    kind = functools.partial(_add, kinds)
    kinds.add_argument(
        "--strategy",
        type=strategy_name,
        choices=STRATEGIES,
        metavar="NAME",
        help=f"{', '.join(STRATEGIES)} (multi_worker_mirrored; with --ps parameter_server)",
    )
    kind(BatchJob, "num_ps", "N", "parameter servers: the last N of the ranks", "--ps")
    kind(BatchJob, "ps_nodes", "N", "nodes only for the servers, besides --nodes: a heterogeneous job")
    kind(Array, "indices", "0-9%2", "one job for each index; behind %% how many at a time", "--array")
    kind(Array, "index_argument", "NAME", "the program gets --NAME INDEX")
    kind(Array, "output_argument", "NAME", "the program gets --NAME FOLDER/INDEX")
    kind(Array, "output_folder", "FOLDER", "(the job's name); with --check that of the results (.)")
    kinds.add_argument(
        "--preemptible", action="store_true", help="signalled before its end, requeued when it ends with status 42"
    )
    kind(Preemption, "notice", "SECONDS", "before the time limit")
    kind(Preemption, "max_restarts", "N", "how often it is requeued")
    kind(BatchJob, "restarts", "N", "start the ranks again when one dies or a node is lost, N times at most")
    kinds.add_argument(
        "--survive", action="store_true", default=None, help="... in place, if a program of ms.survive can"
    )
    kinds.add_argument(
        "--check", action="store_true",
        help="no program: check network, restarts and file system in 10 minutes; the results go into --output-folder (.)",
    )  # fmt: skip
    kind(BatchJob, "container", "IMAGE", "run in this image")
    kind(BatchJob, "stage", "FOLDER", "copy the virtual environment there on each node first: /tmp, /dev/shm")

    queue = functools.partial(_add, parser.add_argument_group("for the batch system"), BatchJob)
    queue("name", "NAME", "of the job (that of the program)", dest="job_name")
    queue("partition", "NAME", "where it runs", "--partition", "--queue")
    queue("account", "NAME", "who pays")
    queue("qos", "NAME", "quality of service")
    queue("mail", "ADDRESS", "the address that gets a mail when the job ends")

    site = parser.add_argument_group("the site", "A profile has all of these; what is given here comes before it.")
    site.add_argument(
        "--site", default="generic", metavar="NAME|FILE", help=f"{', '.join(site_names())}, or your own JSON file"
    )
    site.add_argument("--show-site", action="store_true", help="print the profile, to begin one of your own with")
    site.add_argument("--scheduler", choices=tuple(SCHEDULERS), help="batch system")
    site.add_argument(
        "--launcher", choices=LAUNCHERS,
        help="what starts the ranks: srun, Open MPI's mpirun, MPICH's mpiexec, Cray's mpiexec, jsrun, flux run",
    )  # fmt: skip
    site.add_argument(
        "--mpi", metavar="TYPE",
        help="srun's --mpi: pmix, pmi2, cray_shasta, none; auto for srun's default (what the job's MPI wants, if srun has it)",
    )  # fmt: skip
    site.add_argument("--gpu-request", choices=("per_node", "per_task", "gres"), help="how GPUs are asked for")
    site.add_argument("--gpu-bind", choices=("none", "closest"), help="SLURM's --gpu-bind")
    site.add_argument("--load", action="append", metavar="MODULE", help="environment module; may be repeated")
    site.add_argument("--venv", metavar="FOLDER", help="virtual environment to activate (the one this runs in)")
    site.add_argument("--conda", metavar="NAME|FOLDER", help="conda environment to activate")
    site.add_argument("--python", metavar="COMMAND", help="Python of the job")
    site.add_argument("--env", action="append", metavar="NAME=VALUE", help="environment variable; may be repeated")
    site.add_argument(
        "--directive", action="append", metavar="=--OPTION=VALUE", help="option of the batch system; may be repeated"
    )


def _time(text: str) -> str:
    """Return a time limit as [DAYS-]HOURS:MINUTES:SECONDS, also of one like 90m or 1h30m."""
    if re.fullmatch(r"(\d{1,3}-)?\d{1,4}:\d\d:\d\d", text, re.ASCII):
        return text
    units = re.fullmatch(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", text, re.ASCII)
    if not text or units is None:
        raise argparse.ArgumentTypeError(
            f"expected [DAYS-]HOURS:MINUTES:SECONDS, or a number with d, h, m or s, as in 90m, got {text!r:.80}"
        )
    days, hours, minutes, seconds = (int(number or 0) for number in units.groups())
    minutes, seconds = divmod(((days * 24 + hours) * 60 + minutes) * 60 + seconds, 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 1000 * 24:
        raise argparse.ArgumentTypeError(f"expected less than 1000 days, got {text!r}")
    whole, hours = divmod(hours, 24) if hours > 9999 else (0, hours)  # the most hours that a job takes
    return f"{f'{whole}-' if whole else ''}{hours:02}:{minutes:02}:{seconds:02}"


def _add(
    group: Any,
    of: type,
    field: str,
    metavar: str,
    text: str,
    *flags: str,
    dest: str = "",
    kind: Callable[[str], Any] | None = None,
) -> None:
    """Add the option of a dataclass's field, with its type; not given it is None, and the field's default counts.

    Args:
        text: the help; behind it comes the field's default, where there is one and no parenthesis says it.
        flags: where it is not called like the field.
        dest: where the value lies, if not under the field's name.
        kind: reads the value, where the field's own type does not.
    """
    default = next(each.default for each in dataclasses.fields(of) if each.name == field)
    kind = kind or (whole(0) if isinstance(default, int) else str)
    if default not in ("", dataclasses.MISSING) and not text.endswith(")"):
        text += f" ({default})"
    named = flags or (f"--{field.replace('_', '-')}",)
    group.add_argument(*named, dest=dest or field, type=kind, metavar=metavar, help=text)


def _given(args: argparse.Namespace, of: type) -> dict[str, Any]:
    """The fields of a dataclass that the command line gives."""
    said = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(of)}
    return {name: value for name, value in said.items() if value is not None}


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    site = _site(args)
    if args.show_site:
        print(json.dumps(_document(site), indent=2))
        return DONE
    check_folders({"--output": args.output})
    job = _job(args)
    for warning in _missing(job):
        print(f"mpistrat job: {printable(warning)}", file=sys.stderr)
    site, library = _with_what_is_here(site, args)
    script = render(job, site, srun_environment(library, "pmi2"))
    if job.stage and (staying := _editable(site)):
        print(
            f"mpistrat job: --stage: these are installed editable, so ranks read them where they are: {', '.join(staying)}",
            file=sys.stderr,
        )
    if args.output:
        _write(args.output, script)
    job_id = submit(script, site.scheduler) if args.submit else None
    if args.json:
        told = {"scheduler": site.scheduler, "script": script, "path": args.output, "job_id": job_id}
        print(json.dumps(told, indent=1))
    elif job_id is not None:
        print(job_id)
    elif args.output:
        by = SCHEDULERS[site.scheduler].by.replace("FILE", shlex.quote(args.output))
        print(f"wrote {args.output}; submit it with: {by}")
    else:
        print(script, end="")
    return DONE


def _missing(job: BatchJob) -> list[str]:
    """Return a warning for each file that the job names and this folder does not have: it would fail in the queue."""
    found = []
    program, image = job.program[0], job.container
    if not (job.module or job.check) and (program.endswith(".py") or "/" in program) and not Path(program).exists():
        found.append(f"warning: no file {program} here. The job looks for it in the folder from which it is submitted")
    if image and (image.endswith(".sif") or image.startswith((".", "/"))) and not Path(image).exists():
        found.append(f"warning: --container: no file {image} here")
    return found


def _check(args: argparse.Namespace) -> BatchJob:
    """Return the job that checks a cluster: `mpistrat doctor --job`, by default with two nodes, two ranks on each."""
    if args.program is not None:
        raise ValueError(f"mpistrat job: --check: expected no program beside it, got {args.program!r:.80}")
    for option, given in (("--array", args.indices), ("--preemptible", args.preemptible)):
        if given:
            raise ValueError(f"mpistrat job: {option}: expected a program with it, got --check")
    _refuse("--array", None, args, "index_argument", "output_argument")
    _refuse("--preemptible", None, args, "notice", "max_restarts")
    usual = {
        "nodes": 2,
        "ranks_per_node": args.gpus_per_node or 2,
        "time": _CHECK_TIME,
        "name": args.job_name or "check",
    }
    job = BatchJob(**{**usual, **_given(args, BatchJob), "program": ("doctor",), "check": True})
    if job.seconds <= 2 * _CHECK_MARGIN:
        raise ValueError(
            f"mpistrat job: --time: expected more than {2 * _CHECK_MARGIN} seconds for --check, got {job.time}"
        )
    words = ("doctor", "--folder", args.output_folder or ".", "--time-limit", str(job.seconds - _CHECK_MARGIN), "--job")
    return dataclasses.replace(job, program=words)


def _job(args: argparse.Namespace) -> BatchJob:
    if args.check:
        return _check(args)
    if args.program is None:
        raise ValueError("mpistrat job: expected a program, got none. Put it behind the options")
    name = args.job_name or _name(args.program)
    _refuse("--array", args.indices, args, "index_argument", "output_argument", "output_folder")
    _refuse("--preemptible", args.preemptible, args, "notice", "max_restarts")
    said: dict[str, Any] = {"ranks_per_node": max(args.gpus_per_node or 0, 1)}
    if args.num_ps:
        said["strategy"] = "parameter_server"
    said |= _given(args, BatchJob) | {"program": (args.program, *args.words), "name": name}
    if args.indices:
        if not args.index_argument or not args.output_argument:
            raise ValueError(
                "mpistrat job: expected --index-argument and --output-argument with --array, got one or none of them. "
                "By the first the program learns its index, by the second its own folder"
            )
        said["array"] = Array(**{**_given(args, Array), "output_folder": args.output_folder or name})
    if args.preemptible:
        said["preemption"] = Preemption(**_given(args, Preemption))
    return BatchJob(**said)


def _refuse(option: str, given: object, args: argparse.Namespace, *parts: str) -> None:
    """Raise where an option stands without the one that it belongs to."""
    for part in parts:
        if not given and getattr(args, part) not in (None, ""):
            raise ValueError(f"mpistrat job: --{part.replace('_', '-')}: expected {option} beside it, got none")


def _name(program: str) -> str:
    """The job's name, from the program's."""
    base = os.path.basename(program).removesuffix(".py").rpartition(".")[2]
    return (
        "".join(letter for letter in base if letter.isascii() and (letter.isalnum() or letter in "_-"))[:64].lstrip("-")
        or "job"
    )


def _site(args: argparse.Namespace) -> SiteProfile:
    """The profile, with the settings of the command line."""
    site = read_site(args.site)
    said = _given(args, SiteProfile)
    if args.scheduler not in (None, site.scheduler):  # the launcher and the directives were those of another
        said = {"launcher": "auto", "mpi": "auto", "directives": (), "gpu_request": "per_node", "gpu_bind": ""} | said
    if "venv" in said or "conda" in said:
        said = {"venv": "", "conda": ""} | said
    if args.load:
        said["modules"] = (*site.modules, *args.load)
    if args.directive:
        said["directives"] = (*said.get("directives", site.directives), *args.directive)
    if args.env:
        said["variables"] = {**site.variables, **dict(_variable(text) for text in args.env)}
    return dataclasses.replace(site, **said)


def _with_what_is_here(site: SiteProfile, args: argparse.Namespace) -> tuple[SiteProfile, MPILibrary | None]:
    """The profile, completed by what this machine has: the environment, its MPI, and how srun starts that."""
    if args.container:
        return site, None
    if not (site.venv or site.conda) and site.python == "python":
        site = dataclasses.replace(site, **_here())
    if launcher_of(site) != "srun" or site.mpi not in ("auto", "pmi2") or not _loaded(site.modules):
        return site, None
    library = _library(site)
    if args.mpi is None and site.mpi == "auto" and library is not None:
        site = _with_protocol(site, library)
    return site, library


def _loaded(modules: Sequence[str]) -> bool:
    """Return whether the modules that the job loads are loaded here: they may bring another MPI."""
    return set(modules) <= set(os.environ.get("LOADEDMODULES", "").split(":"))


def _library(site: SiteProfile) -> MPILibrary | None:
    """The job's MPI, if it can be told from here."""
    python = _python(site)
    try:
        return None if python is None else loaded_library(python)
    except ClusterError:
        return None


def _with_protocol(site: SiteProfile, library: MPILibrary) -> SiteProfile:
    """The profile with the `--mpi=` that the job's MPI wants, where there is an srun to ask."""
    offered = offered_pmis()
    wanted = fitting_pmi(library, offered)
    if wanted is None:
        return site
    reason = f"srun offers {', '.join(offered)}, and {library} is started by {wanted}."
    if not srun_environment(library, wanted) and (setting := unset_variable(library)):
        reason += f" It may need --env {setting}."
    return dataclasses.replace(site, mpi=wanted, reasons=MappingProxyType({"mpi": reason, **site.reasons}))


def _python(site: SiteProfile) -> str | None:
    """The job's Python, if it can be told from here."""
    folder = site.venv or site.conda
    if folder and "/" not in folder:
        return None  # an environment of conda by its name
    return shutil.which(os.path.join(os.path.expanduser(folder), "bin", "python") if folder else site.python)


def _editable(site: SiteProfile) -> list[str]:
    """The packages of the job's environment whose files are elsewhere, if that can be told from here."""
    found = []
    for path in Path(os.path.expanduser(site.venv)).glob("lib*/python*/site-packages/*.dist-info/direct_url.json"):
        if json.loads(read_whole(path)).get("dir_info", {}).get("editable"):
            found.append(path.parent.name.partition("-")[0])
    return sorted(set(found))


def _here() -> dict[str, Any]:
    """The environment that this command runs in."""
    if sys.prefix != sys.base_prefix:
        return {"venv": sys.prefix}
    if os.environ.get("CONDA_PREFIX") == sys.prefix:
        return {"conda": sys.prefix}
    return {"python": sys.executable}


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"mpistrat job: --env: expected NAME=VALUE, got {text!r:.80}")
    return name, value


def _document(site: SiteProfile) -> dict[str, Any]:
    """The profile as JSON has it."""
    said = {field.name: getattr(site, field.name) for field in dataclasses.fields(site)}
    return {key: value if isinstance(value, (str, bool, tuple)) else dict(value) for key, value in said.items()}


def _write(path: str, script: str) -> None:
    """Write a script that only its owner may read, write and run."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700), "wb") as file:
        os.fchmod(file.fileno(), 0o700)
        file.write(script.encode())


COMMAND = Command(
    "write a batch script, and submit it",
    "Write a script for SLURM, PBS, LSF or Flux that runs a program with a strategy. What differs between sites is in a\n"
    "profile: --site. The program learns its strategy by MPISTRAT_STRATEGY and MPISTRAT_NUM_PS, which\n"
    "strategy_from_environment() reads. Options for this command come before the program, the program's own behind it.\n"
    "No MPI is needed here.",
    (
        "mpistrat job --nodes 2 --ranks-per-node 4 --time 00:30:00 train.py --epochs 10",
        "mpistrat job --nodes 4 --gpus-per-node 4 --cpus-per-rank 8 --submit train.py",
        "mpistrat job --nodes 2 --ranks-per-node 4 --ps 2 train.py",
        "mpistrat job --nodes 4 --gpus-per-node 4 --ps 4 --ps-nodes 1 -o job.sh train.py",
        "mpistrat job --array 0-9%2 --index-argument seed --output-argument output train.py",
        "mpistrat job --preemptible --mpi pmi2 --submit -m mpistrat.examples.digits --strategy multi_worker_mirrored",
        "mpistrat job --check --nodes 8 --ranks-per-node 4 --output-folder /scratch/me -o check.sh",
        "mpistrat job --launcher openmpi --venv ~/venv train.py",
        "mpistrat job --show-site --site perlmutter > mine.json",
    ),
    _arguments,
    _run,
    collective=False,
)

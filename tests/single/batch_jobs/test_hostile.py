"""Ten thousand values that would like to be shell code: each is refused, or reaches the program as it is.

A script is run with stubs for the commands of the batch system, all scripts of a batch in one bash. Everything planted runs
`canary`, which leaves a trace.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mpistrat.batch_jobs import SCHEDULERS, Array, BatchJob, Preemption, SiteProfile, read_site, render
from mpistrat.batch_jobs.plan import launcher_of
from mpistrat.cli.main import main

from .conftest import LAUNCHERS, VARIABLES, parse_calls

VALUES = 10_000
BATCH = 500

FRAGMENTS = (
    "$(canary)", "`canary`", "; canary;", "&& canary", "|| canary #", "| canary", "& canary &", "\ncanary\n", "\rcanary\r",
    "'; canary; '", '"; canary; "', "'\"'\"'; canary #", "\\'; canary #", "$'\\n'canary", "\\\ncanary", "\x00canary",
    ">(canary)", "<(canary)", "> canary_trace", "{canary,}", "${x:-$(canary)}", "${x[$(canary)]}", "$((x[$(canary)]))",
    "a[$(canary)]", "() { :; }; canary", ")\ncanary\n(", "canary", "\ncanary #", "#SBATCH --wrap=canary",
    "\n#SBATCH --wrap=canary\n", "\n#PBS -v X=$(canary)\n", "\n# flux: --setattr=x\n", "\n#BSUB -E canary\n", "EOF\ncanary\n",
    "\u2028canary\u2028", "\u2029canary", "\x85canary", "\x0bcanary", "\x0ccanary", "\x1b[31mcanary", "\u202ecanary",
    "\ufeff", "é", "😀", "\udcff", "\ud800", "-", "--", "-x", "--wrap=canary", "-o/etc/x", "-W block=true", "~", "~root",
    "$HOME", "${HOME}", "$PATH", "*", "?", "[a-z]", "!canary", "!!", "^x^canary", "%j", "%%", "%x", "\t", " ", "  ", "''",
    '""', "\\", "\\\\", "=", ":", "::", "/", "../..", "/dev/null", "//", "{{ 7*7 }}", "{% include 'x' %}", "{# x #}",
    "{{ job }}", "{{id}}", "%(x)s", "$1", "$@", "$#", "<<<canary", "<<EOF", "2>&1", "A" * 5000, "B" * 70, "0", "1e9", "nan",
    "True", "x", "a b", "train.py", "'", '"', "`", "$(", "((", ")", "]]", "fi", "done", "esac", ";;", "\r\n", "\x7f", "@",
)  # fmt: skip

PLAIN = dict.fromkeys(("name", "memory", "time", "strategy", "container", "partition", "account", "qos", "mail"))
NUMBERS = ("nodes", "ranks_per_node", "cpus_per_rank", "gpus_per_node", "num_ps", "ps_nodes")
SITE_TEXT = (
    "name", "about", "scheduler", "launcher", "mpi", "gpu_request", "gpu_bind", "gtl", "nccl_net", "venv", "conda", "python",
)  # fmt: skip
ARRAY_TEXT = ("indices", "index_argument", "output_argument", "output_folder")
STUB = 'canary() { echo fired >> canary_trace; }\ncall() { printf "%s\\0" "$@" >> "$CALLS"; }\n' + "".join(
    f'{name}() {{ call {name} "$#" "$@"; }}\n'
    for name in (*LAUNCHERS, "module", "conda", "mkdir", "source", "scontrol", "date", "sort", "paste", "apptainer")
)


def value(random: random.Random) -> str:
    return "".join(random.choice(FRAGMENTS) for _ in range(random.choice((1, 1, 1, 2, 3))))


def make(random: random.Random) -> tuple[str, BatchJob, SiteProfile]:
    """A job of some kind at some site with one hostile value, and where that is.

    Raises:
        ValueError: what is expected of most of them.
    """
    evil = value(random)
    scheduler = random.choice(["slurm"] * 3 + ["pbs", "lsf", "flux"])
    # A good job, as what is wrong with it would hide what is wrong with the value.
    job: dict[str, Any] = {"program": ("train.py", "--epochs", "10"), "nodes": 2, "ranks_per_node": 2}
    array: dict[str, Any] | None = None
    site: dict[str, Any] = {"scheduler": scheduler, "launcher": random.choice(SCHEDULERS[scheduler].launchers)}
    if scheduler != "flux" and random.random() < 0.3:
        array = dict(zip(ARRAY_TEXT, ("1-3", "seed", "output", "results"), strict=True))
    if scheduler == "slurm" and random.random() < 0.3:
        job["preemption"] = Preemption()
    elif random.random() < 0.3:
        job |= {"strategy": "parameter_server", "num_ps": 1}
        if site["launcher"] == "srun" and random.random() < 0.5:
            job["ps_nodes"] = 1
    if random.random() < 0.3:
        job["gpus_per_node"] = 2
    job["numbers"] = random.random() < 0.2
    kind = random.choice(
        ("argument", "argument", "argument", "program", "job", "number", "array", "site", "list", "mapping")
    )
    where = kind
    if kind == "argument":
        job["program"] = ("train.py", evil, value(random), "--last")
    elif kind == "program":
        job |= {"program": (evil, "x"), "module": random.random() < 0.3}
    elif kind == "job":
        job[where := random.choice(list(PLAIN))] = evil
    elif kind == "number":
        job[where := random.choice(NUMBERS)] = evil
    elif kind == "array" and array is not None:
        array[where := random.choice(ARRAY_TEXT)] = evil
    elif kind == "site":
        site[where := random.choice(SITE_TEXT)] = evil
    elif kind == "list":
        where = random.choice(("directives", "modules", "container_command"))
        site[where] = ("apptainer", evil) if where == "container_command" else (evil,)
        if where == "container_command":
            job["container"] = "image.sif"
    elif kind == "mapping":
        where = random.choice(("variables", "names of variables", "reasons"))
        if where == "names of variables":
            site["variables"] = {evil: "x"}
        else:
            site[where] = {"mpi": evil} | ({} if where == "variables" else {"gpu_request": evil, "modules": evil})
            site["modules"] = ("gcc",)
    if array is not None:
        job["array"] = Array(**array)
    return where, BatchJob(**job), SiteProfile(**site)


def words_of(job: BatchJob, site: SiteProfile) -> list[str]:
    """What the launcher must be given to run."""
    words = list(job.program)
    if job.module:
        words = [site.python, "-m", *words]
    elif job.program[0].endswith(".py"):
        words = [site.python, *words]
    if job.numbers:
        words = [site.python, "-m", "mpistrat.launcher.rank_variables", *words]
    if job.container:
        words = [*site.container_command, *["--nv"] * bool(job.gpus_per_node), job.container, *words]
    if job.array:
        folder = f"{job.array.output_folder}/4"
        words += [f"--{job.array.index_argument}", "4", f"--{job.array.output_argument}", folder]
    return words


DIRECTIVE = re.compile(
    r"""\#SBATCH\ (hetjob|'?--[a-z-]+(=[\w.,:=/%@+&|*()[\]-]+)?'?)
    |\#PBS\ -[A-Za-z](\ [\w.,:=/%@+&|*'()[\]-]+)?
    |\#BSUB\ -\w+(\ ("[\w.@+-]+\[\d+-\d+\](%\d+)?"|[\w.,:=/%@+&|*'()[\]-]+))?
    |\#\ flux:\ (\#\ )?'?--[a-z-]+(=[\w.,:=/%@+&|*{}()[\]-]+)?'?""",
    re.ASCII | re.VERBOSE,
)


def run_batch(scripts: list[str], folder: Path) -> dict[int, list[list[str]]]:
    """Check all scripts with `bash -n` and run them; return the calls by script."""
    folder.mkdir()
    for number, script in enumerate(scripts):
        (folder / f"{number}.sh").write_bytes(script.encode())
    together = folder / "together.sh"  # what is not closed in one is a mistake in the next, if not in the last
    together.write_bytes(b"\n".join(script.encode() for script in scripts))
    checked = subprocess.run(["bash", "-n", together], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    loop = STUB + (
        f"for ((n = 0; n < {len(scripts)}; n++)); do call next 1 $n; ( builtin source ./$n.sh ) || call failed 1 $n; done"
    )
    environment = {"PATH": "/usr/bin:/bin", "CALLS": str(folder / "calls"), **VARIABLES}
    ran = subprocess.run(["bash", "-c", loop], cwd=folder, env=environment, capture_output=True, timeout=100)
    assert ran.returncode == 0
    assert b"rror" not in ran.stderr, ran.stderr.decode()[:2000]
    assert not list(folder.glob("canary*"))
    assert len(list(folder.iterdir())) == len(scripts) + 2  # nothing else was written
    calls: dict[int, list[list[str]]] = {}
    for call in parse_calls((folder / "calls").read_bytes()):
        if call[0] == "next":
            mine = calls.setdefault(int(call[1]), [])
        else:
            mine.append(call)
    assert len(calls) == len(scripts)
    return calls


def check_script(job: BatchJob, site: SiteProfile, script: str, calls: list[list[str]]) -> None:
    names = [call[0] for call in calls]
    assert "failed" not in names
    command = {"srun": "srun", "openmpi": "mpirun", "jsrun": "jsrun", "flux": "flux"}.get(launcher_of(site), "mpiexec")
    started = [call for call in calls if call[0] == command and call[1:2] not in (["getattr"], ["hostlist"])]
    words = words_of(job, site)
    assert [call[-len(words) :] for call in started] == [words]
    assert [call[1:] for call in calls if call[0] == "module"] == ([["load", *site.modules]] if site.modules else [])
    if job.array:
        assert [call[1:] for call in calls if call[0] == "mkdir"] == [["-p", f"{job.array.output_folder}/4"]]
    if site.venv and not job.container:
        assert [call[1:] for call in calls if call[0] == "source"] == [[f"{site.venv}/bin/activate"]]
    if site.conda and not job.container:
        assert ["conda", "activate", site.conda] in calls
    for line in script.split("\n"):
        if re.match(r"#(SBATCH|PBS|BSUB)|\W*flux:", line, re.IGNORECASE):
            assert DIRECTIVE.fullmatch(line), line


@pytest.mark.parametrize("seed", [20261121])
def test_ten_thousand_values(tmp_path, seed):
    source = random.Random(seed)
    refused = 0
    written: dict[str, int] = {}
    batch: list[tuple[BatchJob, SiteProfile, str]] = []

    def flush() -> None:
        calls = run_batch([script for *_, script in batch], tmp_path / f"batch{sum(written.values())}")
        for number, (job, site, script) in enumerate(batch):
            check_script(job, site, script, calls[number])
        batch.clear()

    for _ in range(VALUES):
        try:
            where, job, site = make(source)
            script = render(job, site)
        except ValueError as error:  # and nothing but a ValueError
            assert re.match(
                r"(Job|Array|Preemption|SiteProfile): \w[\w :]*: expected .+, got .+", str(error), re.DOTALL
            )
            assert len(str(error)) < 1000
            assert not re.search(r"[\x00-\x1f\x7f]", str(error))
            refused += 1
            continue
        written[where] = written.get(where, 0) + 1
        batch.append((job, site, script))
        if len(batch) == BATCH:
            flush()
    flush()
    # Both ends must happen, or the test tests nothing.
    assert refused > VALUES // 5
    assert sum(written.values()) > VALUES // 5
    assert {
        "argument",
        "program",
        "container",
        "venv",
        "python",
        "variables",
        "reasons",
        "about",
        "output_folder",
    } <= set(written)


def test_a_canary_would_be_noticed(tmp_path):
    """The net holds: a template that does not quote is found out."""
    script = render(BatchJob(program=("a.py", "$(canary)")), SiteProfile()).replace("'$(canary)'", "$(canary)")
    with pytest.raises(AssertionError):
        run_batch([script], tmp_path / "batch")


@pytest.mark.parametrize("seed", [1])
def test_values_of_the_command_line_and_of_profiles(tmp_path, seed, capsys, monkeypatch):
    """The same through arguments and JSON: wrong use, said in one line, or a script with the very words."""
    monkeypatch.chdir(tmp_path)
    source = random.Random(seed)
    options = ("name", "partition", "account", "qos", "mail", "memory", "time", "container", "venv", "conda", "python",
               "env", "load", "directive", "array", "nodes", "ps", "site", "launcher")  # fmt: skip
    written = []
    for number in range(400):
        evil = value(source)
        profile = tmp_path / f"{number}.json"
        if number % 2:
            key = source.choice([field.name for field in dataclasses.fields(SiteProfile)])
            document = {key: source.choice((evil, [evil], {evil: evil}, {"mpi": evil}))}
            profile.write_text(json.dumps(document))
            words = ["job", "--site", str(profile), "--venv=x", "train.py", evil]
        else:
            words = ["job", f"--{source.choice(options)}={evil}", "train.py", evil]
        try:
            status = main(words)
        except SystemExit as end:
            status = end.code
        said = capsys.readouterr()
        assert status in (0, 2), said.err
        if status:
            assert said.err
            continue
        written.append((evil, said.out))
    assert len(written) > 20
    calls = run_batch([script for _, script in written], tmp_path / "batch")
    for number, (evil, _) in enumerate(written):
        assert [call[-1] for call in calls[number] if call[0] == "srun"] == [evil]


def test_profiles_that_ship_are_read():
    assert read_site("perlmutter").gpu_bind == "none"

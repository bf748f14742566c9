"""Run both nets over ranks, MPIs and frameworks: `make nightly`.

    python -m tests.nets.nightly --mpi-env mpich=.venv/bin/python --mpi-env openmpi=.venv-openmpi/bin/python \
        --frameworks .venv-frameworks/bin/python --seed 20260101 --output DIR

Writes nets.jsonl, a line for each case and program, and nets.md, a summary. The seed is the date unless one is given; it is
printed, and repeats a night. The exit status is 1 if a result was "wrong", or if a job died or did not end in time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launch.hosts import Hosts, why_no_hosts
from tests.launch.launcher import MpiEnv, Result, launch, mpi_env

CHUNK = 50  # cases of a job
START = 90.0  # seconds that a job may take to start
EACH = 12.0  # seconds more for each case
RESULTS = ("equal", "error", "documented", "wrong", "died")
DIFFERENTIAL = 2000  # cases, over all ranks and MPIs
PROGRAMS = {"torch": 500, "jax": 300, "keras-torch": 250, "keras-jax": 250}
RANKS = (1, 2, 3, 4)
Launch = Callable[..., Result]


@dataclass(frozen=True)
class Share:
    """Cases of one net on a number of ranks."""

    net: str  # differential, or a framework
    mpi: MpiEnv
    ranks: int
    count: int  # the number after the last case
    first: int = 0
    hosts: Hosts | None = None  # isolated ones with as many ranks each; None: this machine

    def words(self, seed: int, first: int, last: int) -> list[str]:
        """Return the arguments of Python for cases `first` to `last` - 1."""
        module = ["tests.nets.differential"] if self.net == "differential" else ["tests.nets.patterns", self.net]
        return ["-m", *module, "--seed", str(seed), "--first", str(first), "--count", str(last)]

    @property
    def title(self) -> str:
        return f"{self.net}, {self.mpi.name}, {self.where}"

    @property
    def where(self) -> str:
        return f"{self.ranks} ranks" + (f" on {len(self.hosts)} hosts" if self.hosts is not None else "")


def run(share: Share, seed: int, launch: Launch = launch) -> Iterator[dict[str, Any]]:
    """Run the cases of a share; yield a record of each. After a job that died the next one starts with the case after it."""
    env = {
        "JAX_COMPILATION_CACHE_DIR": os.path.join(tempfile.gettempdir(), "mpistrat-nets-jax")
    }  # one cache of all jobs
    env["NETS_HOSTS"] = str(len(share.hosts) if share.hosts is not None else 1)
    names = {"net": share.net, "mpi": share.mpi.name, "where": share.where, "ranks": share.ranks, "seed": seed}
    first = share.first
    while first < share.count:
        last = min(first + CHUNK, share.count)
        limit = START + EACH * (last - first)
        result = launch(share.words(seed, first, last), share.ranks, share.mpi, limit, env=env, hosts=share.hosts)
        begun = first - 1
        for record in records(result.out[0]):
            begun = max(begun, record["number"])
            if "result" in record:
                first = record["number"] + 1
                yield record | names
        if first < last:  # it died in a case, or before the first one
            ended = f"did not end within {limit:g} s" if result.timed_out else f"exit status {result.returncode}"
            told = [
                line["failed"]
                for text in result.out
                for line in records(text)
                if line["number"] == first and line.get("clear")
            ]
            clear = (
                bool(told) and not result.timed_out
            )  # the ranks that had no error were ended with the one that had it
            detail = told[0] if clear else f"{ended}\n{result.stderr[-3000:]}"
            yield {"number": first, "result": "error" if clear else "died", "detail": detail} | names
            if begun < first:  # it would not start the next time either
                return
            first += 1


def records(text: str) -> Iterator[dict[str, Any]]:
    """Return the records among the lines that rank 0 printed."""
    for line in text.splitlines():
        if line.startswith('{"number"'):
            try:
                yield json.loads(line)
            except ValueError:  # a rank died while it wrote
                return


def shares(
    mpis: Sequence[MpiEnv],
    frameworks: MpiEnv | None,
    part: float = 1.0,
    only: Sequence[str] = (),
    hosts: Hosts | None = None,
) -> list[Share]:
    """Return the shares of a night, or a part of it. Over hosts a tenth of the cases of an MPI run besides, on 4 ranks."""

    def some(count: float) -> int:
        return max(1, round(count * part))

    made = [
        Share("differential", mpi, ranks, some(DIFFERENTIAL / len(mpis) / len(RANKS)))
        for mpi in mpis
        for ranks in RANKS
    ]
    if hosts is not None:
        made += [Share("differential", mpi, 4, some(DIFFERENTIAL / 10 / len(mpis)), hosts=hosts) for mpi in mpis]
    if frameworks is not None:
        made += [Share(net, frameworks, ranks, some(count / 2)) for net, count in PROGRAMS.items() for ranks in (2, 3)]
        if hosts is not None:
            made.append(Share("torch", frameworks, 4, some(PROGRAMS["torch"] / 10), hosts=hosts))
    return [share for share in made if not only or share.net in only]


def summary(seed: int, found: Sequence[dict[str, Any]], seconds: float) -> str:
    """Return the results as a page of Markdown."""
    counts: dict[tuple[str, str, str], Counter[str]] = {}
    for record in found:
        counts.setdefault((record["net"], record["mpi"], record["where"]), Counter())[record["result"]] += 1
    lines = [
        f"# Regression nets, seed {seed}",
        "",
        f"{len(found):,} cases and programs in {seconds / 60:.0f} minutes.",
        "",
    ]
    lines += ["| net | MPI | where | " + " | ".join(RESULTS) + " |", "|---|---|---|" + "--:|" * len(RESULTS)]
    for (net, mpi, where), each in sorted(counts.items()):
        lines.append(f"| {net} | {mpi} | {where} | " + " | ".join(str(each[result]) for result in RESULTS) + " |")
    errors = Counter(
        (record["net"], (record.get("config") or {}).get("program", ""), str(record["detail"])[:160].split(" @ ")[0])
        for record in found
        if record["result"] == "error"
    )
    if errors:
        lines += ["", "## Clear errors", "", "| times | net | program | error |", "|--:|---|---|---|"]
        lines += [f"| {n} | {net} | {name} | {cell(text)} |" for (net, name, text), n in errors.most_common()]
    bad = [record for record in found if record["result"] in ("wrong", "died")]
    if bad:
        lines += ["", "## Wrong", ""]
        lines += [f"- {record['net']}, {record['mpi']}, {record['where']}, number {record['number']}: "
                  f"{record['result']}: {cell(str(record['detail'])[:300])}" for record in bad]  # fmt: skip
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """Return a text as it may stand in a table."""
    return " ".join(text.replace("|", "/").split())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the nets; return the exit status."""
    parser = argparse.ArgumentParser(prog="tests.nets.nightly", description=__doc__.splitlines()[0])
    parser.add_argument("--mpi-env", action="append", default=[], metavar="NAME=PYTHON", help="an MPI for differential")
    parser.add_argument("--frameworks", metavar="PYTHON", help="a Python with PyTorch, JAX and Keras")
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")), help="default: the date")
    parser.add_argument("--part", type=float, default=1.0, help="of a night: 0.1 takes a tenth of the cases")
    parser.add_argument("--only", nargs="*", default=(), help="nets: differential torch jax keras-torch keras-jax")
    parser.add_argument("--no-hosts", action="store_true", help="nothing over isolated hosts, which need root")
    parser.add_argument("--output", type=Path, default=Path("nets_output"))
    options = parser.parse_args(arguments)
    mpis = [mpi_env(python, name) for name, _, python in (each.partition("=") for each in options.mpi_env)]
    frameworks = mpi_env(options.frameworks) if options.frameworks else None
    print(f"nets: seed {options.seed}; SEED={options.seed} repeats it", flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    found, started = [], time.monotonic()
    reason = "--no-hosts" if options.no_hosts else why_no_hosts()
    if reason:
        print(f"nets: nothing over hosts: {reason}", flush=True)
    hosts = None if reason else Hosts(2)
    with (options.output / "nets.jsonl").open("w") as lines:
        for share in shares(mpis, frameworks, options.part, options.only, hosts):
            counts: Counter[str] = Counter()
            for record in run(share, options.seed):
                found.append(record)
                counts[record["result"]] += 1
                lines.write(json.dumps(record) + "\n")
                lines.flush()
                if record["result"] in ("wrong", "died"):
                    print(
                        f"  {share.title}, number {record['number']}: {record['result']}: {record['detail']}",
                        flush=True,
                    )
            print(f"{share.title}: {dict(counts)}", flush=True)
    if hosts is not None:
        hosts.close()
    text = summary(options.seed, found, time.monotonic() - started)
    (options.output / "nets.md").write_text(text)
    print(text)
    return 1 if any(record["result"] in ("wrong", "died") for record in found) else 0


if __name__ == "__main__":
    sys.exit(main())

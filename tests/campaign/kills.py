"""Jobs whose ranks are killed again and again: do they end with the bits of an undisturbed one?

    python -m tests.campaign.kills --kills 500 --seed 1 --mpi-env mpich=.venv/bin/python --output DIR
    python -m tests.campaign.kills --survive --ranks 4 --sweep --kills 500 --mpi-env openmpi=.venv-openmpi/bin/python
    python -m tests.campaign.kills --servers 1 --ranks 4 --kills 500 --mpi-env mpich=.venv/bin/python
    python -m tests.campaign.kills --hosts 2 --ranks 4 --kills 50 --mpi-env mpich=.venv/bin/python
    python -m tests.campaign.kills --model torch --kills 200 --mpi-env mpich=.venv-frameworks/bin/python
    python -m tests.campaign.kills --faults --mpi-env mpich=.venv/bin/python

A rank of the job (victim.py) dies where it runs its n-th line of the package in a step, begins its n-th collective, or runs
the n-th line of its first snapshot or of a later one, of its begin, of what it does to come back, or of leaving after
another's death; or it gets SIGKILL from outside, at a random moment. It dies alone, with the next rank, or with all ranks of
its host. With `--survive` the others go on in place, else all are started again. `--sweep` takes each line of snapshots, of
coming back and of leaving in turn, before chance.

Of each job is asserted: its weights and slots are, to the last bit, those of the undisturbed one; of each step the newest
generation that took it had each row of its batch once; it never stands still; no file and no process is left. What is printed,
and written as JSON, counts kills, jobs that were wrong, those that were given up, as is promised of jobs that die three times
at one step, and how long it took from a kill to the next step. The exit status is 1 where anything was wrong.

With `--servers` the job has parameter servers, which are killed like workers. Of asynchronous training bits say nothing, but
here each row of the data adds one to one element of the gradients: weights and Adagrad's accumulators are right if each row
came once in each epoch.

With `--faults` mistakes are put into the package, one at a time (faults.py): each must be found, or the campaign proves nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.campaign.faults import FAULTS, IN_PLACE
from tests.campaign.models import MODELS
from tests.campaign.places import Here, Place, TwoHosts, processes_of
from tests.campaign.victim import EPOCHS, ROWS, STEPS, Kill

LIMIT = 15.0  # seconds without a new step: it hangs; longer where others use the cores
FIRST = 45.0  # the same before the first step, and for frameworks
LOST = 20  # steps that a kill may cost: snapshots are taken every few
LIFE = 240.0  # seconds that a job with all its kills may take
TRIES = 3  # deaths at one step
ENDING = 8.0  # seconds after which nothing of a job may be left
KINDS = ("line", "call", "commit", "later", "begin", "recovery", "leave", "outside", "outside", "outside")
# Of n; other kinds: 4,000.
MOST = {"begin": 60_000, "recovery": 400, "leave": 60, "commit": 80, "later": 40, "call": 12}
SWEPT = ("commit", "later", "recovery", "leave")
MISSED = 3  # lines in a row that no rank came to: there are no more


@dataclass(frozen=True)
class Way:
    """What runs, and how it goes on."""

    python: str
    place: Place = field(default_factory=Here)
    ranks: int = 2
    survive: bool = False
    servers: int = 0
    model: str = "numpy"
    fault: str = ""
    kinds: tuple[str, ...] = KINDS


@dataclass
class Outcome:
    """What jobs did."""

    jobs: int = 0
    kills: list[dict[str, Any]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    given_up: int = 0  # jobs that died three times at one step
    recoveries: list[float] = field(default_factory=list)  # seconds from a kill to the next new step


def plan_of(rng: random.Random, kills: int, way: Way, kind: str = "", first: int = 0) -> list[Kill]:
    """Return what happens to each generation of a job: by chance, or at lines from the first on of one kind."""
    plan: list[Kill] = []
    while len(plan) < kills:
        chosen = kind or rng.choice([kind for kind in way.kinds if way.survive or kind != "leave"])
        steady = plan and (way.survive or plan[-1]["kind"] in ("line", "call", "late", "later", "outside"))
        if not steady and chosen != "outside":
            chosen = "late"  # one that dies three times at one step is given up
        who = rng.choice(("one", "one", "two", *(["host"] if way.place.hosts > 1 else [])))
        nth = rng.randrange(1, MOST.get(chosen, 4_000))
        if chosen == kind:
            nth, first, who = first, first + 1, "one"
        plan.append({
            "kind": chosen, "nth": nth, "rank": rng.randrange(way.ranks), "who": "one" if chosen == "leave" else who,
            "steps": {"commit": 1, "later": LOST + 2, "late": rng.randrange(10, 16)}.get(chosen, rng.randrange(1, 12)),
            "less": rng.randrange(0, 30), "after": rng.uniform(0.0, 0.12) if way.survive else rng.uniform(0.3, 0.7),
        })  # fmt: skip
    return plan


def run_job(way: Way, plan: list[Kill], folder: Path) -> tuple[str, list[str]]:
    """Run a job to its end, killing ranks as planned from outside; return its hash and what was wrong."""
    folder.mkdir()
    environment = {
        "KILL_PLAN": json.dumps(plan), "FAULT": way.fault, "SERVERS": str(way.servers), "MODEL": way.model,
        "OMP_NUM_THREADS": "1", "CAMPAIGN": str(folder), "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }  # fmt: skip
    words = [way.python, "-m", "mpistrat", "run", "-n", str(way.ranks), "--restarts", str(len(plan) + 5)]
    words += [*(["--survive"] if way.survive else []), str(Path(__file__).with_name("victim.py"))]
    job = way.place.start(folder, words, environment)
    began = moved = time.monotonic()
    size, done, wrong = 0, set[int](), list[str]()
    while (status := job.poll()) is None:
        time.sleep(0.005 if way.place.hosts == 1 else 0.02)
        now = time.monotonic()
        if (written := sum(path.stat().st_size for path in folder.glob("record-*"))) != size:
            size, moved = written, now
        busy = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        limit = LIMIT if size and way.model == "numpy" else FIRST  # frameworks take seconds at each start
        if now - moved > limit * busy or now - began > LIFE * busy:
            stacks = way.place.stacks(way.python)
            wrong.append(f"no new step for {now - moved:.0f} s\n{stacks}\n{_errors(folder)}")
            job.end()
            break
        for number, kill in enumerate(plan):
            if kill["kind"] == "outside" and number not in done:
                _kill_from_outside(way.place, folder, number, kill, done)
    if status and not wrong:
        wrong.append(f"status {status}: {_errors(folder)}")
    wrong += _left(way.place, folder)
    result = folder / "result"
    return (result.read_text() if result.exists() else ""), wrong


def _errors(folder: Path) -> str:
    return (folder / "stderr").read_text(errors="replace")[-3000:] if (folder / "stderr").exists() else ""


def _left(place: Place, folder: Path) -> list[str]:
    """Wait until no process and no file of a job is left; return what is when that takes too long."""
    until, key = time.monotonic() + ENDING, folder / "key"
    while (left := [*processes_of(folder), *(place.files(key.read_text()) if key.exists() else [])]) and (
        time.monotonic() < until
    ):
        time.sleep(0.1)
    return [f"left: {what}" for what in left]


def _kill_from_outside(place: Place, folder: Path, number: int, kill: Kill, done: set[int]) -> None:
    path = folder / f"pid-{number}-{kill['rank']}"
    if not path.exists() or time.time() - path.stat().st_mtime < kill["after"]:
        return
    words = path.read_text().split()
    if len(words) == 2:  # it is whole
        done.add(number)
        at = time.time()
        if place.kill(words[0], int(words[1])):
            with (folder / "killed").open("a") as file:
                file.write(json.dumps({"time": at, "kind": "outside", "nth": 0}) + "\n")


def check_rows(folder: Path) -> list[str]:
    """Return what is wrong with the rows of the generations that count, and with where they went on."""
    by_step: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for generation, step, rows, _ in _records(folder):
        by_step[step][generation] += rows
    reached: dict[int, list[int]] = defaultdict(list)
    for step, generations in by_step.items():
        for generation in generations:
            reached[generation].append(step)
    wrong, last = [], 0
    for generation in sorted(reached):
        if min(reached[generation]) <= last - LOST:
            wrong.append(f"start {generation} went on at step {min(reached[generation])}, {last} had been reached")
        last = max(last, *reached[generation])
    wrong += [f"step {step} is missing" for step in range(1, STEPS + 1) if step not in by_step]
    for epoch in range(EPOCHS):
        rows = []
        for step in range(epoch * STEPS // EPOCHS + 1, (epoch + 1) * STEPS // EPOCHS + 1):
            if step in by_step:
                rows += by_step[step][max(by_step[step])]
        if sorted(rows) != list(range(ROWS)):
            wrong.append(f"epoch {epoch}: {len(rows)} rows, {len(set(rows))} different, of {ROWS}")
    return wrong


def _records(folder: Path) -> Iterator[tuple[int, int, list[int], float]]:
    for path in folder.glob("record-*"):
        for line in path.read_text().splitlines():
            if line.endswith("]"):  # else a rank was killed in its write
                yield json.loads(line)


def kills_of(folder: Path) -> list[dict[str, Any]]:
    """Return the kills of a job, those that were planned and happened."""
    path = folder / "killed"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def recoveries(folder: Path) -> list[float]:
    """Return the seconds from each kill to the next step of ranks that went on without those it killed."""
    steps = sorted((at, generation) for generation, _, _, at in _records(folder))
    firsts = []
    for moment in (kill["time"] for kill in kills_of(folder)):
        before = max((generation for at, generation in steps if at <= moment), default=-1)
        later = [at for at, generation in steps if at > moment and generation > before]
        firsts += [at - moment for at in later[:1]]
    return firsts


class Campaign:
    """Jobs, one after the other, compared with an undisturbed one; `with` it, their folder is there."""

    def __init__(self, way: Way, seed: int, each: int = 6, show: Callable[[str], object] = lambda text: None) -> None:
        self._way, self._rng, self._each, self._show = way, random.Random(seed), each, show
        self._folder = tempfile.TemporaryDirectory(prefix="mpistrat-campaign-")
        self.outcome = Outcome()

    def __enter__(self) -> Campaign:
        path = Path(self._folder.name)
        self._expected, wrong = run_job(replace(self._way, fault=""), [], path / "alone")
        wrong = wrong or ([] if self._expected else ["it has no result"])
        self.outcome.wrong += [f"undisturbed: {text}" for text in wrong]
        for text in wrong:
            self._show(f"undisturbed: {text}")
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()

    def job(self, plan: list[Kill]) -> list[dict[str, Any]]:
        """Run one, and return its kills."""
        outcome, folder = self.outcome, Path(self._folder.name) / f"job-{self.outcome.jobs}"
        found, wrong = run_job(self._way, plan, folder)
        if not wrong and found != self._expected:
            wrong.append(f"other bits: {found[:16]} instead of {self._expected[:16]}")
        wrong += [] if wrong or self._way.servers else check_rows(folder)
        kills = kills_of(folder)
        if len(kills) >= TRIES and any("times after step" in text and "given up" in text for text in wrong):
            outcome.given_up, wrong = outcome.given_up + 1, []
        outcome.jobs += 1
        outcome.kills += kills
        outcome.recoveries += recoveries(folder)
        outcome.wrong += [f"job {outcome.jobs}, {json.dumps(plan)}: {text}" for text in wrong]
        self._show(f"{outcome.jobs} jobs, {len(outcome.kills)} kills, {len(outcome.wrong)} wrong")
        for text in wrong:
            self._show(f"  {text}")
        return kills

    def at_each_line(self, kind: str) -> int:
        """Run jobs that are killed at each line of what a kind says, and return how many lines there were."""
        nth, missed = 1, 0
        while missed < MISSED and not self.outcome.wrong:
            count = 2 if kind == "later" else self._each  # the first is another one, and a job has no steps for more
            plan = plan_of(self._rng, count, self._way, kind, nth)
            planned = [kill["nth"] for kill in plan if kill["kind"] == kind]
            hit = {kill["nth"] for kill in self.job(plan) if kill["kind"] == kind}
            for number in planned:
                missed = 0 if number in hit else missed + 1
            nth += len(planned)
        return max(0, nth - 1 - missed)

    def at_random(self, kills: int, until_wrong: bool = False) -> None:
        """Run jobs until there were so many kills, or until something is wrong."""
        while len(self.outcome.kills) < kills and not (until_wrong and self.outcome.wrong):
            self.job(plan_of(self._rng, min(self._each, kills - len(self.outcome.kills)), self._way))


def sample(python: str, kills: int, seed: int, **way: Any) -> Outcome:
    """Return what happened when ranks were killed so often: for tests."""
    with Campaign(Way(python, **way), seed, each=kills) as campaign:
        campaign.at_random(kills)
        return campaign.outcome


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=6, help="kills of a job")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--servers", type=int, default=0, help="that many of the ranks are parameter servers")
    parser.add_argument("--model", choices=sorted(MODELS), default="numpy", help="what computes gradients")
    parser.add_argument(
        "--hosts", type=int, choices=(1, 2), default=1, help="2: jobs of a real SLURM on two isolated hosts"
    )
    parser.add_argument("--survive", action="store_true", help="the ranks that are left go on in place: Open MPI")
    parser.add_argument("--sweep", nargs="*", choices=SWEPT, help="first each line of these, by default of all")
    parser.add_argument(
        "--kinds", nargs="+", choices=sorted({*KINDS}), default=KINDS, help="how ranks die, as often as it is said"
    )
    parser.add_argument("--mpi-env", required=True, metavar="NAME=PYTHON")
    parser.add_argument("--faults", action="store_true", help="see whether mistakes in the package are found")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="with --faults: this one only")
    parser.add_argument("--output", type=Path, help="folder for a JSON file")
    return parser.parse_args()


def _look_for_faults(way: Way, options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for name in options.fault or [name for name in FAULTS if way.survive or name not in IN_PLACE]:
        with Campaign(replace(way, fault=FAULTS[name]), options.seed, options.each) as campaign:
            campaign.at_random(options.kills, until_wrong=True)
        outcome = campaign.outcome
        what = outcome.wrong[0].split("}]: ", 1)[-1].strip() if outcome.wrong else "NOT FOUND"
        if "TypeError" in what or "AttributeError" in what:
            raise RuntimeError(f"the mistake {name!r} does not fit the package any more: {what}")
        found[name] = {"kills": len(outcome.kills), "found": what.splitlines()[0] if outcome.wrong else None}
        print(f"{name}: after {len(outcome.kills)} kills: {what}", flush=True)
    return found


def _spread(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "p99": times[int(0.99 * (len(times) - 1))]} if times else {}


def main() -> int:
    options = _arguments()
    name, _, python = options.mpi_env.partition("=")
    began, place = time.monotonic(), TwoHosts() if options.hosts > 1 else Here()
    way = Way(
        os.path.abspath(python),
        place,
        options.ranks,
        options.survive,
        options.servers,
        options.model,
        "",
        tuple(options.kinds),
    )
    word = ("in_place" if way.survive else "restarts") + ("_servers" if way.servers else "")
    word += "" if way.model == "numpy" else f"_{way.model}"
    word += "" if way.kinds == KINDS else "_" + "_".join(sorted({*way.kinds}))
    result: dict[str, Any] = {
        "campaign": word, "mpi": name, "date": time.strftime("%Y-%m-%d"), "seed": options.seed, "ranks": way.ranks,
        "hosts": options.hosts, "servers": way.servers, "model": way.model, "load": os.getloadavg()[0],
    }  # fmt: skip
    try:
        if options.faults:
            word = f"faults_{word}"
            result["faults"] = _look_for_faults(way, options)
            bad = sum(not about["found"] for about in result["faults"].values())
        else:
            wanted = () if options.sweep is None else options.sweep or SWEPT
            kinds = [kind for kind in wanted if way.survive or kind != "leave"]
            with Campaign(way, options.seed, options.each, lambda text: print(text, flush=True)) as campaign:
                swept = {kind: campaign.at_each_line(kind) for kind in kinds}
                campaign.at_random(options.kills)
            outcome = campaign.outcome
            times, bad = sorted(outcome.recoveries), len(outcome.wrong)
            result |= {
                "jobs": outcome.jobs, "kills": len(outcome.kills),
                "by_kind": dict(Counter(kill["kind"] for kill in outcome.kills)), "lines_in_turn": swept,
                "wrong": outcome.wrong, "given_up": outcome.given_up,
                "recovery_seconds": _spread(times),
            }  # fmt: skip
    finally:
        place.close()
    result["seconds"] = round(time.monotonic() - began)
    print(json.dumps(result, indent=1))
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        path = options.output / f"campaign_{word}-{name}-{options.hosts}x{way.ranks // options.hosts}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

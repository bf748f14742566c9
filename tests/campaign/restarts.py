"""Jobs under `mpistrat run --restarts` whose ranks are killed again and again: do they end with the bits of an undisturbed one?

    python tests/campaign/restarts.py --kills 500 --seed 1 --mpi-env mpich=.venv/bin/python --output DIR
    python tests/campaign/restarts.py --survive --ranks 4 --kills 500 --mpi-env openmpi=.venv-openmpi/bin/python
    python tests/campaign/restarts.py --servers 1 --ranks 4 --kills 500 --mpi-env mpich=.venv/bin/python
    python tests/campaign/restarts.py --faults --mpi-env mpich=.venv/bin/python

A rank is killed at the n-th line of the package that it runs in a step, a snapshot, a save, or while it begins and
restores; or from outside, at a random moment; or two ranks at once. With `--survive` the others go on in place. Of each
job is asserted: its weights and slots are, to the last bit, those of the undisturbed one; of each step the newest generation
that took it had each row of its batch once; no file and no process is left. What is printed, and written as JSON, counts
kills, jobs that were wrong, and how long it took from a kill to the next step. The exit status is 1 where anything was wrong.

With `--servers` the job has parameter servers, which are killed like workers. Of asynchronous training bits say nothing, but
here each row of the data adds one to one element of the gradients: weights and Adagrad's accumulators are right if each row
came once in each epoch.

With `--faults` mistakes are put into the package, one at a time: each must be found, or the campaign proves nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mpistrat.comm import job_files  # noqa: E402

STEPS, EPOCHS, BATCH, ROWS, REPLICAS = 60, 4, 8, 120, 4
LIMIT = 20.0  # seconds without a new step: it hangs
LOST = 20  # steps that a kill may cost: snapshots are taken every few
LIFE = 240.0  # seconds that a job with all its kills may take
KINDS = ("line", "line", "snapshot", "snapshot", "begin", "outside")
FAULTS = {  # what is put into the program
    "words before the copy": """
end = SnapshotFile.end
SnapshotFile.begin = lambda self, buffer, rank: end(self, buffer, rank, latest[0])
""",
    "old files removed early": """
make = Snapshots._make
def early(self, forms, notes_bytes):
    file = make(self, forms, notes_bytes)
    self._taken = 0
    job_files.remove_older(self._job, file.path)
    return file
Snapshots._make = early
""",
    "position of another snapshot": """
write_notes = SnapshotFile.write_notes
kept = []
def late(self, buffer, data):
    kept.append(data)
    write_notes(self, buffer, kept[-2] if len(kept) > 1 else data)
SnapshotFile.write_notes = late
""",
    "generation not grown": """
os.environ["MPISTRAT_GENERATION"] = "0"
""",
}
ONE_BUFFER = """
for name in ("begin", "write", "write_notes", "end"):
    def method(self, buffer, *args, plain=getattr(SnapshotFile, name)):
        plain(self, 0, *args)
    setattr(SnapshotFile, name, method)
"""
FAULTS_IN_PLACE = {
    "words before the copy": FAULTS["words before the copy"],
    "old files removed early": FAULTS["old files removed early"],
    "position of another snapshot": FAULTS["position of another snapshot"],
    "one buffer": ONE_BUFFER,
    "generation not grown": """
import mpistrat.cluster.world
mpistrat.cluster.world.highest = lambda value: 0
""",
    "no revoke": """
import mpistrat.cluster.world
mpistrat.cluster.world.revoke = lambda: None
""",
    "han on": """
os.environ["OMPI_MCA_coll"] = "^hcoll,portals4"
""",
}
FAULTS["one buffer"] = ONE_BUFFER

PROGRAM = f"""
import hashlib, json, os, signal, sys, time
import numpy as np
plan = json.loads(os.environ["KILL_PLAN"])
left, package = 0, ""

def trace(frame, event, arg):
    global left
    if package not in frame.f_code.co_filename:
        return None
    if event == "line":
        left -= 1
        if left <= 0:
            die()
    return trace

def die():
    with open("killed", "a") as file:
        file.write(f"{{time.time()}}\\n")
    os.kill(os.getpid(), signal.SIGKILL)

def count(kill, first, serves=False):
    global left, package
    takes = kill["kind"] == "snapshot" or serves
    package = os.sep + "snapshot.py" if takes else os.sep + "mpistrat" + os.sep
    left = kill["lines"] if first else max(1, kill["lines"] - kill["less"])  # others write no notes, and so run fewer
    sys.settrace(trace)
    frame = sys._getframe()
    while frame is not None:
        frame.f_trace = trace if package in frame.f_code.co_filename else None
        frame = frame.f_back

import mpistrat as ms
from mpistrat.comm import job_files
from mpistrat.strategy.snapshot import SnapshotFile, Snapshots
import mpistrat.train.checkpoints
mpistrat.train.checkpoints._SHARE = 1.0  # as often as it says
latest = [0]
exec(os.environ.get("FAULT", ""))
record = os.open(f"record-{{os.getpid()}}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

def train(job):
    sys.settrace(None)
    generation = job.generation
    rank, size = job.comm.rank, job.comm.size
    kill = plan[generation] if generation < len(plan) else None
    chosen = [] if kill is None else [kill["rank"] % size, *([(kill["rank"] + 1) % size] if kill["both"] else [])]
    victim = rank in chosen
    if victim and kill["kind"] == "begin":
        count(kill, rank == chosen[0])
    open(f"pid-{{generation}}-{{rank}}", "w").write(str(os.getpid()))
    servers = int(os.environ["SERVERS"])
    if servers:
        workers = size - min(servers, size - 1)
        strategy = ms.ParameterServerStrategy(num_ps=size - workers, workers_in_sync=2 - workers % 2)
    else:
        strategy = ms.MultiWorkerMirroredStrategy(replicas={REPLICAS})
    with strategy.scope():
        w = ms.Variable(np.zeros(500), name="w")
        b = ms.Variable(np.zeros(500, np.float32), name="b")
        seen = ms.train.Sum("seen")
        optimizer = ms.optimizers.Adagrad(0.1) if servers else ms.optimizers.Adam(0.1)
    rows = np.random.default_rng(0).normal(size=({ROWS}, 500))
    data = ms.data.from_arrays((np.arange({ROWS}), rows)).shuffle(seed=1).batch({BATCH} // (4 if servers else 1))
    data = strategy.distribute_dataset(data)
    taken, steps = [], 0

    def step(numbers, x):
        if servers:
            ones = np.zeros(500)
            ones[numbers] = 1
            optimizer.apply_gradients([(ones, w), (ones.astype(np.float32), b)])
            taken.extend(numbers.tolist())
            return
        optimizer.apply_gradients([((np.asarray(w) - x).sum(0) / {BATCH}, w), (np.asarray(b) - x.astype(np.float32).sum(0), b)])
        seen.update_state(x[:, 0])
        taken.extend(numbers.tolist())

    class Watch(ms.train.Callback):
        def on_step_end(self, loop):
            line = json.dumps([generation, loop.step, taken, time.time()]) + "\\n"
            taken.clear()
            os.write(record, line.encode())
            latest[0] = loop.step
            time.sleep(0.004)
            nonlocal steps
            steps += 1
            if victim and steps == kill["steps"] and kill["kind"] in ("line", "late", "snapshot"):
                count(kill, rank == chosen[0])

    if victim and servers and strategy.is_server and kill["kind"] in ("line", "late", "snapshot"):
        count(kill | {{"lines": 1 + kill["lines"] % 500}}, rank == chosen[0], serves=True)
    checkpoints = ms.train.Checkpoints(strategy, "checkpoints", snapshot_seconds=0.02, every_steps=25)
    ms.train.Trainer(strategy, step, metrics=[seen], callbacks=[Watch()], checkpoints=checkpoints).fit(data, {EPOCHS})
    sys.settrace(None)
    slots = [optimizer.slots(v)[name].tobytes() for v in (w, b) for name in sorted(optimizer.slot_names)]
    if rank == 0:
        text = hashlib.sha256(b"".join([w.numpy().tobytes(), b.numpy().tobytes(), *slots])).hexdigest()
        with open("result", "w") as file:
            file.write(text)

ms.survive(train)
"""


@dataclass
class Outcome:
    """What jobs did."""

    jobs: int = 0
    kills: int = 0
    wrong: list[str] = field(default_factory=list)
    recoveries: list[float] = field(default_factory=list)  # seconds from a kill to the next new step
    by_kind: dict[str, int] = field(default_factory=lambda: defaultdict(int))


def plan_of(rng: random.Random, kills: int, ranks: int) -> list[dict[str, object]]:
    """Return what happens to each generation of a job."""
    plan: list[dict[str, object]] = []
    for _ in range(kills):
        kind = rng.choice(KINDS)
        if not plan or plan[-1]["kind"] in ("begin", "snapshot"):  # a job that dies three times at one step is given up
            kind = "late"
        lines = rng.randrange(1, {"begin": 60_000, "snapshot": 250}.get(kind, 4_000))
        plan.append({
            "kind": kind, "rank": rng.randrange(ranks), "both": rng.random() < 0.4, "lines": lines,
            "steps": {"snapshot": 1, "late": rng.randrange(10, 16)}.get(kind, rng.randrange(1, 12)),
            "less": rng.randrange(0, 30), "after": rng.uniform(0.0, 0.4),
        })  # fmt: skip
    return plan


def run_job(
    python: str,
    plan: list[dict[str, object]],
    ranks: int,
    folder: Path,
    fault: str = "",
    survive: bool = False,
    servers: int = 0,
) -> tuple[str, list[str]]:
    """Run a job to its end, killing ranks as planned from outside; return its hash and what was wrong."""
    (folder / "train.py").write_text(PROGRAM)
    env = {**os.environ, "KILL_PLAN": json.dumps(plan), "OMP_NUM_THREADS": "1", "FAULT": fault, "SERVERS": str(servers)}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))
    command = [python, "-m", "mpistrat", "run", "-n", str(ranks), "--restarts", str(len(plan) + 5)]
    command += [*(["--survive"] if survive else []), "train.py"]
    errors = (folder / "stderr").open("w")
    job = subprocess.Popen(
        command, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
    )
    began = moved = time.monotonic()
    size, done = 0, set[int]()
    wrong: list[str] = []
    while job.poll() is None:
        time.sleep(0.005)
        now = time.monotonic()
        if (written := sum(path.stat().st_size for path in folder.glob("record-*"))) != size:
            size, moved = written, now
        if now - moved > LIMIT or now - began > LIFE:
            wrong.append(f"no new step for {now - moved:.0f} s: {(folder / 'stderr').read_text()[-2000:]}")
            os.killpg(job.pid, signal.SIGKILL)
        for number, kill in enumerate(plan):
            if kill["kind"] == "outside" and number not in done:
                _kill_from_outside(folder, number, kill, done)
    errors.close()
    if job.returncode and not wrong:
        wrong.append(f"status {job.returncode}: {(folder / 'stderr').read_text()[-2000:]}")
    result = folder / "result"
    return (result.read_text() if result.exists() else ""), wrong


def _kill_from_outside(folder: Path, number: int, kill: dict[str, object], done: set[int]) -> None:
    path = folder / f"pid-{number}-{kill['rank']}"
    if not path.exists() or time.time() - path.stat().st_mtime < float(str(kill["after"])) + 0.3:
        return
    done.add(number)
    with (folder / "killed").open("a") as file:
        file.write(f"{time.time()}\n")
    try:
        os.kill(int(path.read_text() or 0) or 1 << 22, signal.SIGKILL)
    except (OSError, ValueError):
        pass


def check_rows(folder: Path) -> list[str]:
    """Return what is wrong with the rows of the generations that count, and with where they went on."""
    by_step: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for path in folder.glob("record-*"):
        for line in path.read_text().splitlines():
            try:
                generation, step, rows, _ = json.loads(line)
            except ValueError:  # a rank was killed in its write
                continue
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


def recoveries(folder: Path) -> list[float]:
    """Return the seconds from each kill to the next step of ranks that went on without those it killed."""
    killed = [float(line) for line in (folder / "killed").read_text().split()] if (folder / "killed").exists() else []
    lines = [line for path in folder.glob("record-*") for line in path.read_text().splitlines() if line.endswith("]")]
    steps = sorted((at, generation) for generation, _, _, at in map(json.loads, lines))
    firsts = []
    for moment in killed:
        before = max((generation for at, generation in steps if at <= moment), default=-1)
        later = [at for at, generation in steps if at > moment and generation > before]
        firsts += [at - moment for at in later[:1]]
    return firsts


def left_behind() -> list[str]:
    return job_files.unsupervised()


def campaign(
    python: str,
    kills: int,
    seed: int,
    each: int,
    ranks: int = 2,
    show: bool = False,
    fault: str = "",
    survive: bool = False,
    servers: int = 0,
) -> Outcome:
    """Run jobs until there were so many kills; with a fault until it is found."""
    outcome, rng = Outcome(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="mpistrat-campaign-") as name:
        (Path(name) / "alone").mkdir()
        expected, wrong = run_job(python, [], ranks, Path(name) / "alone", servers=servers)
        outcome.wrong += wrong
        known = set(left_behind())
        while outcome.kills < kills and expected and not (fault and outcome.wrong):
            folder = Path(name) / f"job-{outcome.jobs}"
            folder.mkdir()
            plan = plan_of(rng, min(each, kills - outcome.kills), ranks)
            found, wrong = run_job(python, plan, ranks, folder, fault, survive, servers)
            if not wrong and found != expected:
                wrong.append(f"other bits: {found[:16]} instead of {expected[:16]}")
            wrong += [] if wrong or servers else check_rows(folder)
            wrong += [f"left: {path}" for path in left_behind() if path not in known]
            known |= set(left_behind())
            outcome.jobs += 1
            outcome.kills += len((folder / "killed").read_text().split()) if (folder / "killed").exists() else 0
            outcome.recoveries += recoveries(folder)
            for kill in plan:
                outcome.by_kind[str(kill["kind"])] += 1
            outcome.wrong += [f"job {outcome.jobs}, {json.dumps(plan)}: {text}" for text in wrong]
            if show:
                print(f"{outcome.jobs} jobs, {outcome.kills} kills, {len(outcome.wrong)} wrong", flush=True)
                for text in wrong:
                    print(f"  {text}", flush=True)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=6, help="kills of a job")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--servers", type=int, default=0, help="that many of the ranks are parameter servers")
    parser.add_argument("--survive", action="store_true", help="the ranks that are left go on in place: Open MPI")
    parser.add_argument("--mpi-env", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--faults", action="store_true", help="see whether mistakes in the package are found")
    parser.add_argument("--output", type=Path, help="folder for a JSON file of each MPI")
    options = parser.parse_args()
    bad = 0
    for word in options.mpi_env or [f"this={sys.executable}"]:
        name, _, python = word.partition("=")
        began = time.monotonic()
        if options.faults:
            for fault, code in (FAULTS_IN_PLACE if options.survive else FAULTS).items():
                outcome = campaign(
                    os.path.abspath(python), options.kills, options.seed, options.each, options.ranks,
                    fault=code, survive=options.survive, servers=options.servers,
                )  # fmt: skip
                bad += not outcome.wrong
                found = outcome.wrong[0].split("}]: ", 1)[-1].strip().splitlines()[-1] if outcome.wrong else "NOT FOUND"
                print(f"{fault}: after {outcome.kills} kills: {found}", flush=True)
            continue
        outcome = campaign(
            os.path.abspath(python), options.kills, options.seed, options.each, options.ranks,
            show=True, survive=options.survive, servers=options.servers,
        )  # fmt: skip
        bad += len(outcome.wrong)
        times = sorted(outcome.recoveries)
        result = {
            "campaign": "in place" if options.survive else "restarts", "mpi": name, "date": time.strftime("%Y-%m-%d"),
            "seed": options.seed, "ranks": options.ranks, "servers": options.servers,
            "jobs": outcome.jobs, "kills": outcome.kills, "planned": dict(outcome.by_kind), "wrong": outcome.wrong,
            "recovery_seconds": {"median": statistics.median(times), "p99": times[int(0.99 * (len(times) - 1))]},
            "seconds": round(time.monotonic() - began),
        }  # fmt: skip
        print(json.dumps(result, indent=1))
        if options.output is not None:
            options.output.mkdir(parents=True, exist_ok=True)
            way = ("in_place" if options.survive else "restarts") + ("_servers" if options.servers else "")
            path = options.output / f"campaign_{way}-{name}-1x{options.ranks}.json"
            path.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

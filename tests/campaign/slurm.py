"""Jobs of a real SLURM over two isolated hosts that nodes, an urgent job, the time limit and scancel interrupt again and again.

    python -m tests.campaign.slurm --cycles 50 --seed 1 --mpi-env mpich=.venv/bin/python --output DIR

The scripts are those of `mpistrat job --restarts --preemptible`. An interruption comes when the job has gone on for some steps:
SLURM takes a host from the job (and gives it back to itself), a job of higher priority takes both hosts, `scancel` ends the
step that has the ranks, a rank is killed, or the time limit of a minute comes. Each job must end with the weights and slots of an
undisturbed one, to the last bit. Needs root, iproute2 and SLURM, as tests/integration does.
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
from collections import Counter
from pathlib import Path

from tests.campaign.places import TwoHosts
from tests.launch.launcher import MpiEnv, mpi_env
from tests.launch.slurm import ENDED, Job

KINDS = ("node", "preempt", "scancel", "kill")
EACH = 4  # interruptions of a job
STEPS, EPOCHS = 480, 4
PATIENCE = 120.0  # seconds without a new step, of which a requeued job waits twenty
PROGRAM = f"""
import hashlib, os, sys, time
import numpy as np
import mpistrat as ms

ms.catch_stop_signals()
strategy = ms.MultiWorkerMirroredStrategy(replicas=4)
with strategy.scope():
    w = ms.Variable(np.zeros(500), name="w")
    optimizer = ms.optimizers.Adam(0.1)
size = 8 * {STEPS} // {EPOCHS}
rows = np.random.default_rng(0).normal(size=(size, 500))
data = strategy.distribute_dataset(ms.data.from_arrays(rows).shuffle(seed=1).batch(8))
start = 1000 * int(os.environ.get("SLURM_RESTART_COUNT", 0)) + int(os.environ["MPISTRAT_GENERATION"])
open(f"pid-{{start}}-{{os.environ['SLURMD_NODENAME']}}-{{strategy.rank}}", "w").write(str(os.getpid()))

def step(x):
    optimizer.apply_gradients([((np.asarray(w) - x).sum(0) / 8, w)])

class Watch(ms.train.Callback):
    def on_step_end(self, loop):
        if strategy.rank == 0:
            with open("progress", "a") as file:
                file.write(f"{{time.time()}} {{loop.step}} {{start}}\\n")
        time.sleep(float(sys.argv[1]))

checkpoints = ms.train.Checkpoints(strategy, "checkpoints", snapshot_seconds=0.5, every_seconds=5)
trainer = ms.train.Trainer(strategy, step, callbacks=[Watch()], checkpoints=checkpoints)
trainer.fit(data, {EPOCHS})
if strategy.should_stop():
    sys.exit(ms.RESTART_EXIT_CODE)
if strategy.rank == 0:
    slots = [value.tobytes() for _, value in sorted(optimizer.slots(w).items())]
    open("bits", "w").write(hashlib.sha256(w.numpy().tobytes() + b"".join(slots)).hexdigest())
else:
    optimizer.slots(w)
"""
URGENT = "#!/bin/bash\n#SBATCH --partition=urgent --nodes=2 --exclusive --time=1 --output=/dev/null\nsrun hostname\n"


class Run:
    """One job, and what happens to it."""

    def __init__(self, place: TwoHosts, mpi: MpiEnv, folder: Path, sleep: float, limit: str) -> None:
        self.place, self.slurm, self.folder = place, place.slurm, folder
        (folder / "train.py").write_text(PROGRAM)
        words = [mpi.python, "-m", "mpistrat", "job", "--nodes", "2", "--ranks-per-node", "2", "--cpus-per-rank", "1"]
        words += ["--venv", str(Path(mpi.python).parent.parent), "--restarts", "50", "--preemptible", "--notice", "45"]
        words += ["--max-restarts", "50", "--time", limit, "--output", str(folder / "job.sh"), "train.py", str(sleep)]
        subprocess.run(words, check=True, capture_output=True, timeout=60)
        self.job = self.slurm.submit(folder / "job.sh")
        self.recoveries: list[float] = []

    def progress(self) -> list[list[float]]:
        path = self.folder / "progress"
        lines = path.read_text().splitlines() if path.exists() else []
        return [list(map(float, line.split())) for line in lines if line.count(" ") == 2]

    def ended(self) -> bool:
        return all(state in ENDED for state in self.job.states())

    def reach(self, lines: int) -> bool:
        """Wait for so many lines of progress; return whether they came before the end.

        Raises:
            AssertionError: nothing moves.
        """
        known, moved = len(self.progress()), time.monotonic()
        while len(self.progress()) < lines:
            if self.ended():
                return False
            if (now := len(self.progress())) > known:
                known, moved = now, time.monotonic()
            if time.monotonic() - moved > PATIENCE:
                raise AssertionError(self.job.tell(f"no new step for {PATIENCE:g} s after {known} steps"))
            time.sleep(0.1)
        return True

    def interrupt(self, kind: str, rng: random.Random) -> None:
        """Interrupt the job, and wait until it has gone on."""
        before = self.progress()
        start, second = int(before[-1][2]), self.slurm.hosts.names[1]
        if kind == "node":
            self.slurm.ok("scontrol", "update", f"nodename={second}", "state=down", "reason=campaign")
            self.slurm.run("scontrol", "update", f"nodename={second}", "state=resume")  # where it has not come back
        elif kind == "preempt":
            (self.folder / "urgent.sh").write_text(URGENT)
            urgent = Job(
                self.slurm, self.slurm.ok("sbatch", "--parsable", str(self.folder / "urgent.sh")).strip(), self.folder
            )
            urgent.wait_until("the urgent job", lambda: set(urgent.states()) == {"COMPLETED"}, 90)
        elif kind == "scancel":
            steps = self.slurm.ok("squeue", "--noheader", "--steps", f"--jobs={self.job.number}", "--format=%i").split()
            numbered = [step for step in steps if step.split(".")[-1].isdigit()]
            self.slurm.run("scancel", *numbered[-1:])
        else:
            rank = rng.choice([path.name for path in self.folder.glob(f"pid-{start}-*")])
            self.place.kill(rank.split("-")[2], int((self.folder / rank).read_text()))
        count = len(before) + 1
        while self.reach(count) and self.progress()[count - 1][2] == start:
            count += 1
        later = [time for time, _, number in self.progress() if number != start and time > before[-1][0]]
        if later:
            self.recoveries.append(min(later) - max(time for time, _, number in self.progress() if number == start))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mpi-env", required=True, metavar="NAME=PYTHON")
    parser.add_argument("--output", type=Path, help="folder for a JSON file")
    options = parser.parse_args()
    name, _, python = options.mpi_env.partition("=")
    mpi, rng, began = mpi_env(python, name), random.Random(options.seed), time.monotonic()
    kinds: Counter[str] = Counter()
    recoveries: dict[str, list[float]] = {}
    wrong: list[str] = []
    expected, jobs = "", 0
    place = TwoHosts()
    try:
        with tempfile.TemporaryDirectory(prefix="mpistrat-campaign-") as base:
            while kinds.total() < options.cycles:
                folder = Path(base) / f"job-{jobs}"
                folder.mkdir()
                before = len(wrong)
                limited = bool(expected) and jobs % 5 == 4
                sleep = 0.25 if limited else 0.06 if expected else 0.0
                run = Run(place, mpi, folder, sleep, "00:01:00" if limited else "00:30:00")
                try:
                    for _ in range(EACH if expected and not limited else 0):
                        if not run.reach(len(run.progress()) + rng.randrange(10, 50)):
                            break
                        kind = rng.choice(KINDS)
                        known = len(run.recoveries)
                        run.interrupt(kind, rng)
                        kinds[kind] += 1
                        recoveries.setdefault(kind, []).extend(run.recoveries[known:])
                    while not run.ended():
                        run.reach(len(run.progress()) + 1)
                except AssertionError as error:
                    wrong.append(f"job {jobs}: {error}")
                if limited:
                    kinds["time limit"] += int(run.job.fields()["Restarts"])
                bits = (folder / "bits").read_text() if (folder / "bits").exists() else "no end"
                expected = expected or bits
                if bits != expected:
                    wrong.append(run.job.tell(f"job {jobs}: {bits[:16]} instead of {expected[:16]}"))
                jobs += 1
                print(f"{jobs} jobs, {kinds.total()} interruptions {dict(kinds)}, {len(wrong)} wrong", flush=True)
                for text in wrong[before:]:
                    print(text, flush=True)
            wrong += [f"left: {what}" for what in place.files("mpistrat")]
    finally:
        place.close()
    result = {
        "campaign": "SLURM", "mpi": name, "date": time.strftime("%Y-%m-%d"), "seed": options.seed, "ranks": 4, "hosts": 2,
        "jobs": jobs, "interruptions": dict(kinds), "wrong": [text.splitlines()[0] for text in wrong],
        "median_seconds_to_the_next_step": {kind: round(statistics.median(s), 2) for kind, s in recoveries.items() if s},
        "seconds": round(time.monotonic() - began),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / f"campaign_slurm-{name}-2x2.json").write_text(json.dumps(result, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.umask(0o022)
    sys.exit(main())

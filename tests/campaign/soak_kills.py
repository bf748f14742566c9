"""Start jobs and kill a rank of each at a random moment, under load: is the right one named, does anything hang or stay?

    python -m tests.campaign.soak_kills --kills 60 --starts 20 --load 3
    python -m tests.campaign.soak_kills --kills 60 --starts 20 --hosts 2

Counts are printed as it goes; the exit status is 1 where anything was wrong. `--mpi` takes the Python of another MPI,
`--hosts` spreads the ranks over isolated hosts of this machine. What others do in /dev/shm meanwhile counts as left behind:
where they do, give this a /dev/shm of its own (`unshare --mount sh -c "mount -t tmpfs shm /dev/shm; exec python …"`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.launch.launcher import Job, MpiEnv, mpi_env

if TYPE_CHECKING:
    from tests.launch.hosts import Hosts

PROGRAM = """
import os, sys, time
import numpy as np
import mpistrat as ms

strategy = ms.MultiWorkerMirroredStrategy()
with strategy.scope():
    variable = ms.Variable(np.zeros(1000), aggregation=ms.VariableAggregation.SUM)
    optimizer = ms.optimizers.SGD(0.1)
print(f"ready {os.getpid()}.", flush=True)


def step():
    optimizer.apply_gradients([(np.ones(1000), variable)])


until = time.monotonic() + float(sys.argv[1])
while strategy.reduce("SUM", float(time.monotonic() < until), axis=None):
    strategy.run(step)
strategy.close()
"""
LIFE = 60.0  # seconds that a job lasts that nobody ends; else it hangs
CLEAN = 10.0  # seconds after a job in which its files in /dev/shm go
NAMED = re.compile(r"mpistrat: rank (\d+) of \d+ .*was ended by|mpistrat: rank (\d+) of \d+ .*ended without a message")
TIMED = re.compile(r"mpistrat: rank (\d+) of \d+ .*? at ([\d:.]+)")


@dataclass
class Tally:
    """What happened so far."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def note(self, what: str, text: str = "") -> None:
        self.counts[what] += 1
        if text:
            self.wrong.append(f"{what}\n{text}")

    def __str__(self) -> str:
        return ", ".join(f"{number} {what}" for what, number in sorted(self.counts.items()))


@contextlib.contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep so many cores busy meanwhile."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def shared_files(hosts: Hosts | None) -> set[str]:
    """What is in /dev/shm, on each host."""
    if hosts is None:
        return set(os.listdir("/dev/shm"))
    return {f"{name}:{file}" for name in hosts.names for file in hosts.inside(name, "ls", "-A", "/dev/shm").split()}


def left_files(before: set[str], hosts: Hosts | None) -> list[str]:
    """What stays in /dev/shm after a job: who cleans up after killed ranks may take a moment."""
    until = time.monotonic() + CLEAN
    while (left := shared_files(hosts) - before) and time.monotonic() < until:
        time.sleep(0.1)
    return sorted(left)


def one_job(mpi: MpiEnv, ranks: int, rng: random.Random, kill: bool, tally: Tally, hosts: Hosts | None = None) -> None:
    """Start a job; kill a rank of it, or let it end; and judge how it went."""
    with tempfile.TemporaryDirectory(prefix="mpistrat-soak-") as name:
        folder = Path(name)
        (folder / "program.py").write_text(PROGRAM)
        life = str(LIFE if kill else 0.5)
        victim, before = rng.randrange(ranks), shared_files(hosts)
        job = Job([mpi.python, str(folder / "program.py"), life], ranks, mpi, folder, hosts=hosts)
        try:
            if not job.wait_for(".", LIFE):
                tally.note("not started", text_of(job))
                return
            if kill:
                time.sleep(rng.uniform(0, 0.5))
                end(int(job.read(f"{victim}.out").split()[1].rstrip(".")), victim, ranks, hosts)
            status = job.wait(LIFE / 2)
            left = job.leftover(5.0)
            judge(job, status, left, victim if kill else None, tally, hosts is not None)
            if files := left_files(before, hosts):
                tally.note("left files", f"{files}\n{text_of(job)}")
        finally:
            job.end()


def end(pid: int, rank: int, ranks: int, hosts: Hosts | None) -> None:
    """Kill a rank; on a host of its own it has a number of its own."""
    if hosts is None:
        os.kill(pid, signal.SIGKILL)
    else:
        hosts.inside(hosts.names[rank // (ranks // len(hosts))], "kill", "-9", str(pid))


def judge(job: Job, status: int | None, left: list[str], victim: int | None, tally: Tally, hosts: bool) -> None:
    """Count what a job did."""
    text = text_of(job)
    named = [int(a or b) for a, b in NAMED.findall(text)]
    if status is None:
        tally.note("hung", text)
    if left:
        tally.note("left processes", f"{left}\n{text}")
    if victim is None:
        good = status == 0 and not text.strip()
        tally.note("good end" if good else "bad end of a good job", "" if good else f"status {status}\n{text}")
    elif status == 0:
        tally.note("status 0 after a kill", text)
    elif named == [victim]:
        tally.note("named")
    elif hosts and victim in named:  # each host names its own; the text says that the earliest time counts
        tally.note("named, and another on another host", "" if first_named(text) == victim else text)
    else:
        tally.note("named nobody" if not named else "named another", f"victim {victim}, named {named}\n{text}")


def first_named(text: str) -> int:
    """The rank whose line has the earliest time."""
    return min((at, int(rank)) for rank, at in TIMED.findall(text))[1]


def text_of(job: Job) -> str:
    """What the ranks and the launcher said, but a warning of Open MPI's about a race within itself."""
    _, err, launcher = job.outputs()
    return "".join(err) + re.sub(r"\[.*\] plm:ssh: Warning: setpgid.*\n", "", launcher)


def soak(mpi: MpiEnv, starts: int, kills: int, *, seed: int = 0, busy: int = 0, hosts: Hosts | None = None) -> Tally:
    """Run so many jobs that end well, and so many of which a rank is killed, on 2 to 4 ranks."""
    rng, tally = random.Random(seed), Tally()
    todo = [False] * starts + [True] * kills
    rng.shuffle(todo)
    with load(busy):
        for number, kill in enumerate(todo, 1):
            one_job(mpi, 4 if hosts is not None else rng.randint(2, 4), rng, kill, tally, hosts)
            if number % 10 == 0:
                print(f"{mpi.name} on {1 if hosts is None else len(hosts)} hosts: {tally}", flush=True)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--starts", type=int, default=0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--load", type=int, default=2, help="busy processes beside the jobs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mpi", default=sys.executable, help="a Python whose mpi4py has the MPI to test")
    parser.add_argument("--hosts", type=int, default=1, help="isolated hosts over which the ranks are spread")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        hosts = None
        if options.hosts > 1:
            from tests.launch.hosts import Hosts

            hosts = Hosts(options.hosts)
            stack.callback(hosts.close)
        counts = options.starts, options.kills
        tally = soak(mpi_env(options.mpi), *counts, seed=options.seed, busy=options.load, hosts=hosts)
    print(*tally.wrong, tally, sep="\n" + "-" * 80 + "\n")
    return 1 if tally.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

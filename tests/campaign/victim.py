"""The job of the campaign of kills (kills.py): it trains, and kills itself where KILL_PLAN says.

KILL_PLAN has an entry for each generation of ranks: which rank dies, alone, with the next one, or with all of its host, and
where. FAULT is code that puts a mistake into the package.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

import mpistrat as ms
import mpistrat.train.checkpoints
from mpistrat.cluster import world
from mpistrat.comm import job_files
from mpistrat.comm.process_group import ProcessGroup
from mpistrat.state.snapshot import SnapshotFile, Snapshots
from tests.campaign.models import BATCH, COLUMNS, MODELS, Model, Served

STEPS, EPOCHS, ROWS, REPLICAS = 60, 4, 120, 4
PACKAGE = str(Path(ms.__file__).parent)
COMMIT = ("state/snapshot.py", "comm/job_files.py")
RECOVERY = (
    *COMMIT, "launcher/survive.py", "train/checkpoints.py", "cluster/world.py", "state/restore.py", "state/opened.py",
    "comm/process_group.py", "comm/shared_memory.py", "comm/node.py", "arena/arena.py",
)  # fmt: skip
LEAVING = ("launcher/survive.py", "cluster/world.py")

Kill = dict[str, Any]


def die(kill: Kill) -> None:
    """Say so, and kill this rank, with the others of its host where the plan says so."""
    with open("killed", "a") as file:
        file.write(json.dumps({"time": time.time(), "kind": kill["kind"], "nth": kill["nth"]}) + "\n")
    if kill["who"] == "host":
        for path in Path().glob(f"pid-{kill['generation']}-*"):
            host, pid = path.read_text().split()
            if host == socket.gethostname() and int(pid) != os.getpid():
                os.kill(int(pid), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


class Countdown:
    """Kills this rank at the n-th line of some files that its main thread runs.

    Args:
        kill: of the plan.
        nth: from 1.
        files: ends of paths; none for the whole package.
        once: each line counts once, however often it is run.
    """

    def __init__(self, kill: Kill, nth: int, files: tuple[str, ...] = (), once: bool = False) -> None:
        self._kill, self._left, self._once = kill, nth, once
        self._files = tuple(os.path.join(PACKAGE, name) for name in files)
        self._seen = set[tuple[str, int]]()

    def start(self) -> None:
        sys.settrace(self._trace)
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            frame.f_trace = self._trace if self._counts(frame) else None
            frame = frame.f_back

    def _counts(self, frame: FrameType) -> bool:
        name = frame.f_code.co_filename
        return name in self._files if self._files else name.startswith(PACKAGE)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self._counts(frame):
            return None
        if event == "line":
            place = (frame.f_code.co_filename, frame.f_lineno)
            if not (self._once and place in self._seen):
                self._seen.add(place)
                self._left -= 1
                if self._left <= 0:
                    die(self._kill)
        return self._trace


def count_calls(kill: Kill) -> None:
    """Kill this rank where it begins its n-th collective from now on."""
    plain, left = ProcessGroup.collective, [kill["nth"]]

    def collective(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            die(kill)
        return plain(self, *args, **kwargs)

    ProcessGroup.collective = collective  # type: ignore[method-assign]


class Victim:
    """What this rank does of a generation's plan."""

    def __init__(self, plan: list[Kill], generation: int, rank: int, size: int) -> None:
        self._kill = {**plan[generation], "generation": generation} if generation < len(plan) else None
        if self._kill is not None:
            first = self._kill["rank"] % size
            self._place = (rank - first) % size  # 0 dies, and 1 where two do
            if self._place > (self._kill["who"] == "two" or self._kill["kind"] == "leave"):
                self._kill = None

    def begin(self) -> None:
        """The ranks begin, or come back."""
        if self._kill is not None and self._kill["kind"] == "begin":
            Countdown(self._kill, self._nth()).start()
        elif self._kill is not None and self._kill["kind"] == "recovery":
            Countdown(self._kill, self._nth(), RECOVERY, once=True).start()

    def serve(self) -> None:
        """This rank is a parameter server: it sees no steps, but takes snapshots."""
        if self._kill is not None and self._kill["kind"] in ("line", "call", "late", "commit", "later"):
            Countdown(self._kill, 1 + self._nth() % 500, COMMIT).start()

    def step(self, number: int) -> None:
        """So many steps were taken since the begin."""
        kill = self._kill
        if kill is None or number != kill["steps"]:
            return
        if kill["kind"] == "leave" and self._place == 1:
            Countdown(kill, kill["nth"], LEAVING, once=True).start()
        elif kill["kind"] == "leave":
            Countdown({**kill, "kind": "late"}, 1).start()  # it is the other one's lines that count
        elif kill["kind"] in ("line", "late"):
            Countdown(kill, self._nth()).start()
        elif kill["kind"] in ("commit", "later"):
            Countdown(kill, self._nth(), COMMIT, once=True).start()
        elif kill["kind"] == "call":
            count_calls(kill)

    def _nth(self) -> int:
        """The second one's lines are others: the first rank of a node writes notes besides."""
        assert self._kill is not None
        return max(1, self._kill["nth"] - self._place * self._kill["less"])


class Watch(ms.train.Callback):
    """Writes which rows each step had, and reduces the rate."""

    def __init__(self, generation: int, victim: Victim, model: Model) -> None:
        self.rows: list[int] = []
        self._model = model
        self._generation, self._victim, self._steps = generation, victim, 0
        self._file = os.open(f"record-{socket.gethostname()}-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def on_step_end(self, loop: Any) -> None:
        self._model.decay()
        line = json.dumps([self._generation, loop.step, self.rows, time.time()]) + "\n"
        os.write(self._file, line.encode())
        self.rows.clear()
        latest[0] = loop.step
        time.sleep(0.004)
        self._steps += 1
        self._victim.step(self._steps)


latest = [0]  # step; for mistakes that are put in


def train(job: Any) -> None:
    sys.settrace(None)
    rank, size = job.comm.rank, job.comm.size
    victim = Victim(json.loads(os.environ["KILL_PLAN"]), job.generation, rank, size)
    Path(f"pid-{job.generation}-{rank}").write_text(f"{socket.gethostname()} {os.getpid()}")
    Path("key").write_text(os.environ["MPISTRAT_JOB"])
    victim.begin()
    servers = int(os.environ["SERVERS"])
    if servers:
        workers = size - min(servers, size - 1)
        strategy: Any = ms.ParameterServerStrategy(num_ps=size - workers, workers_in_sync=2 - workers % 2)
    else:
        strategy = ms.MultiWorkerMirroredStrategy(replicas=REPLICAS)
    model: Model = Served(strategy) if servers else MODELS[os.environ["MODEL"]](strategy)
    with strategy.scope():
        seen = ms.train.Sum("seen")
    rows = np.random.default_rng(0).normal(size=(ROWS, COLUMNS))
    data = ms.data.from_arrays((np.arange(ROWS), rows)).shuffle(seed=1).batch(BATCH // (4 if servers else 1))
    data = strategy.distribute_dataset(data)
    watch = Watch(job.generation, victim, model)

    def step(numbers: np.ndarray, x: np.ndarray) -> None:
        watch.rows.extend(numbers.tolist())
        model.step(numbers, x)
        if not servers:
            seen.update_state(x[:, 0])

    if servers and strategy.is_server:
        victim.serve()
    checkpoints = ms.train.Checkpoints(
        strategy, "checkpoints", snapshot_seconds=0.02, every_steps=40, objects=model.objects
    )
    ms.train.Trainer(strategy, step, metrics=[seen], callbacks=[watch], checkpoints=checkpoints).fit(data, EPOCHS)
    sys.settrace(None)
    content = b"".join(model.content())
    if rank == 0:
        Path("result").write_text(hashlib.sha256(content).hexdigest())


if __name__ == "__main__":
    mpistrat.train.checkpoints._SHARE = 1.0  # snapshots as often as it says
    names = {"SnapshotFile": SnapshotFile, "Snapshots": Snapshots, "job_files": job_files, "world": world}
    exec(os.environ.get("FAULT", ""), {**names, "latest": latest, "os": os})
    ms.survive(train)

"""What parameter servers are compared with: TensorFlow's strategy and torch's RPC, in processes of their own.

A rank starts the process of its role on its host, sends it a line of JSON on stdin for each command, and reads the reply from
its stdout. A process ends with its parent. All of them do the step of `parameter_server.py`: read all variables (or
some rows), then subtract a gradient of ones that lies there already.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

MARK = "reply: "
BATCHES = 64
LOOP = 20  # steps of TensorFlow in one call, where it is asked for several


@dataclass(frozen=True)
class Case:
    """What a step reads and pushes: variables of this shape together, float32; with `rows` only so many rows of one."""

    label: str
    shape: tuple[int, ...]
    rows: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes that a step reads, and pushes."""
        return 4 * (self.rows or self.shape[0]) * int(np.prod(self.shape[1:]))

    def shapes(self, servers: int) -> list[tuple[int, ...]]:
        """The shapes of the variables, one a server."""
        return [self.shape] if self.rows else [(self.shape[0] // servers, *self.shape[1:])] * servers

    def numbers(self, worker: int) -> np.ndarray:
        """The rows of one worker's steps, which it goes through again and again: (BATCHES, rows)."""
        return np.random.default_rng(worker).integers(0, self.shape[0], (BATCHES, self.rows))

    def description(self) -> dict[str, Any]:
        """The case as JSON has it."""
        return asdict(self)

    def exact(self, arrays: Sequence[np.ndarray], steps: int) -> bool:
        """Whether the variables, or the first column of the table, are what so many steps make of zeros."""
        if self.rows:
            return float(arrays[0][:, 0].sum(dtype=np.float64)) == -float(steps * self.rows)
        return all(float(a.min()) == float(a.max()) == -float(steps) for a in arrays)


def repeat(step: Callable[[], object], seconds: float, finish: Callable[[], object]) -> tuple[int, float]:
    """Call a step again and again for some seconds, at least twice; return how often, and how long it took with its end."""
    start, steps = time.perf_counter(), 0
    while steps < 2 or time.perf_counter() - start < seconds:
        step()
        steps += 1
    finish()
    return steps, time.perf_counter() - start


class PeerError(Exception):
    """A peer has failed, or is too late."""


class Process:
    """A peer's process."""

    def __init__(self, peer: str, role: str, index: int, cluster: Mapping[str, list[str]]) -> None:
        spec = {"peer": peer, "role": role, "index": index, "cluster": cluster}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by close()
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        self._text = b""

    def ask(self, do: str, timeout: float = 60.0, **arguments: Any) -> Any:
        """Send a command and return the reply.

        Raises:
            PeerError: the process has failed, or does not reply in time.
        """
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]
        except OSError as error:
            raise PeerError(f"{do}: {self._last_words()}") from error
        return self.reply(do, timeout)

    def reply(self, what: str, timeout: float) -> Any:
        """Wait for a reply."""
        end, output = time.monotonic() + timeout, self._process.stdout.fileno()  # type: ignore[union-attr]
        while True:
            line, newline, rest = self._text.partition(b"\n")
            if newline:
                self._text = rest
                if line.startswith(MARK.encode()):
                    return json.loads(line[len(MARK) :])
                continue
            ready, _, _ = select.select([output], [], [], max(0.0, end - time.monotonic()))
            some = os.read(output, 1 << 16) if ready else b""
            if not some:
                raise PeerError(f"{what}: {self._last_words() if ready else f'no reply in {timeout:g} s'}")
            self._text += some

    def pause(self) -> None:
        """Stop it, so that it takes nothing from others."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            stream.close()  # type: ignore[union-attr]

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:]) or "it ended without a word"


# in the process


def commands() -> Iterator[dict[str, Any]]:
    """The commands that come; the process ends with them, whatever it is doing."""
    found: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            found.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        yield json.loads(found.get())


def tell(reply: Any) -> None:
    """Answer a command."""
    print(MARK + json.dumps(reply), flush=True)


def obey(actions: Mapping[str, Callable[..., Any]]) -> None:
    """Carry out commands until they end."""
    tell("ready")
    for command in commands():
        tell(actions[command.pop("do")](**command))


def tensorflow(role: str, index: int, cluster: dict[str, list[str]]) -> None:
    """A server of TensorFlow's, or the coordinator."""
    import tensorflow as tf

    spec = tf.train.ClusterSpec(cluster)
    if role == "chief":
        obey(tensorflow_actions(tf, spec))
    kept = tf.distribute.Server(spec, role, index, "grpc")
    obey({"kept": lambda: str(kept)})


def tensorflow_actions(tf: Any, spec: Any) -> dict[str, Callable[..., Any]]:
    """What the coordinator does."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec, task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    made: dict[str, Any] = {}

    def make(case: dict[str, Any], servers: int) -> None:
        made.clear()
        what = made["case"] = Case(**case)
        with strategy.scope():
            variables = made["variables"] = [tf.Variable(tf.zeros(shape)) for shape in what.shapes(servers)]
            sgd = tf.compat.v1.train.GradientDescentOptimizer(1.0)  # Keras 3's fails under this strategy

        def inputs() -> Any:  # on each worker: gradients that lie there
            if not what.rows:
                return tf.data.Dataset.from_tensors(tuple(tf.ones(v.shape) for v in variables)).repeat()
            rows = tf.data.Dataset.from_tensor_slices(what.numbers(0)).shuffle(BATCHES).repeat()
            return tf.data.Dataset.zip(rows, tf.data.Dataset.from_tensors(tf.ones((what.rows, what.shape[1]))).repeat())

        def replica(batch: Any) -> Any:
            if what.rows:
                numbers, ones = batch
                read = [tf.gather(variables[0], numbers)]
                gradients = [tf.IndexedSlices(ones, numbers, variables[0].shape)]
            else:
                read, gradients = [v.read_value() for v in variables], list(batch)
            sgd.apply_gradients(list(zip(gradients, variables, strict=True)))
            return tf.add_n([tf.reshape(r, [-1])[0] for r in read])  # on the worker: what was read must get there

        @tf.function
        def step(iterator: Any) -> Any:
            return strategy.run(replica, args=(next(iterator),))

        @tf.function
        def loop(iterator: Any) -> Any:
            found = tf.constant(0.0)
            for _ in tf.range(LOOP):
                found = strategy.run(replica, args=(next(iterator),))
            return found

        made["input"] = iter(coordinator.create_per_worker_dataset(inputs))
        made["calls"] = {1: step, LOOP: loop}

    def run(in_a_call: int, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            coordinator.schedule(made["calls"][in_a_call], args=(made["input"],))
        coordinator.join()
        return time.perf_counter() - start

    def steps(seconds: float, in_a_call: int) -> tuple[int, int, float]:
        count = before = 4
        while (spent := run(in_a_call, count)) < 0.1:
            count *= 2
            before += count
        count = max(4, int(seconds * count / spent))
        return in_a_call * before, in_a_call * count, run(in_a_call, count)

    def exact(steps: int) -> bool:
        case = made["case"]
        if case.rows:
            return case.exact([made["variables"][0][:, :1].numpy()], steps)
        return case.exact([v.numpy() for v in made["variables"]], steps)

    return {"make": make, "steps": steps, "exact": exact}


class Parameters:
    """The variables of one server of torch's; its methods are called from afar, by threads of the RPC."""

    held: Any = None
    lock = threading.Lock()

    @classmethod
    def make(cls, shape: tuple[int, ...]) -> None:
        """Hold zeros."""
        import torch

        cls.held = torch.zeros(shape)

    @classmethod
    def pull(cls) -> Any:
        """Return a copy: what RPC sends after this call must not change."""
        with cls.lock:
            return cls.held.clone()

    @classmethod
    def pull_rows(cls, rows: Any) -> Any:
        """Return rows."""
        with cls.lock:
            return cls.held.index_select(0, rows)

    @classmethod
    def push(cls, gradient: Any) -> None:
        """Subtract."""
        with cls.lock:
            cls.held.sub_(gradient)

    @classmethod
    def push_rows(cls, rows: Any, gradient: Any) -> None:
        """Subtract from rows."""
        with cls.lock:
            cls.held.index_add_(0, rows, gradient, alpha=-1)

    @classmethod
    def column(cls) -> Any:
        """Return the first column."""
        return cls.held[:, :1].clone()


def torch_rpc(role: str, index: int, cluster: dict[str, list[str]]) -> None:
    """A server or worker of torch's RPC."""
    import torch
    from torch.distributed import rpc

    torch.set_num_threads(1)
    host, port = cluster["ps"][0].split(":")
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = host, port
    names = [f"{job}{i}" for job in ("ps", "worker") for i in range(len(cluster[job]))]
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=4, rpc_timeout=60)
    name = f"{role}{index}"
    rpc.init_rpc(name, rank=names.index(name), world_size=len(names), rpc_backend_options=options)
    servers = [name for name in names if name.startswith("ps")]
    made: dict[str, Any] = {}

    def every(function: Any, *arguments: tuple[Any, ...]) -> list[Any]:
        """Call a function on all servers at a time."""
        calls = [rpc.rpc_async(server, function, args=a) for server, a in zip(servers, arguments, strict=False)]
        return [call.wait() for call in calls]

    def make(case: dict[str, Any], servers: int) -> None:
        what = made["case"] = Case(**case)
        shapes = what.shapes(servers)
        if index == 0:
            every(Parameters.make, *((shape,) for shape in shapes))
        ones = [(torch.ones(what.rows, *shape[1:]) if what.rows else torch.ones(shape),) for shape in shapes]
        batches = itertools.cycle(torch.from_numpy(what.numbers(index)) if what.rows else ())

        def dense() -> Any:
            read = every(Parameters.pull, *((),) * len(shapes))
            every(Parameters.push, *ones)
            return float(read[0][0])

        def sparse() -> Any:
            rows = next(batches)
            read = every(Parameters.pull_rows, (rows,))
            every(Parameters.push_rows, (rows, *ones[0]))
            return float(read[0][0, 0])

        made["step"] = sparse if what.rows else dense

    def steps(seconds: float, in_a_call: int) -> tuple[int, int, float]:
        before, _ = repeat(made["step"], 0.1, lambda: None)
        return before, *repeat(made["step"], seconds, lambda: None)

    def exact(steps: int) -> bool:
        case = made["case"]
        found = every(Parameters.column, ()) if case.rows else every(Parameters.pull, *((),) * len(servers))
        return case.exact([a.numpy() for a in found], steps)

    obey({"make": make, "steps": steps, "exact": exact})


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a stopped process does not see that its stdin ends
    spec = json.loads(sys.argv[1])
    {"tensorflow": tensorflow, "torch": torch_rpc}[spec.pop("peer")](**spec)

"""What watching a run costs: an event of the recorder, and steps of about 5 ms with and without recorder and monitor.

    mpiexec -n 2 python benchmarks/watching.py --output benchmarks/results/today

A step reads a batch, multiplies matrices for about `--milliseconds`, updates a small variable and reduces a loss: four events.
The contenders take turns in blocks of steps, in one run; a block with the monitor is an epoch, with its end. What is compared is
the median block, of the slowest rank. Beside other processes a step of 5 ms varies by percents, so the same is measured without
the matrices, too: what watching adds to these short steps in microseconds it adds to long ones, but for colder caches. Peers are
the tracers that are installed: viztracer's own event beside ours.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import timeit
from typing import Any

import harness
import numpy as np

import mpistrat as ms
from mpistrat.comm.recorder import RECORDER, Recorder

WITHOUT, RECORDED, WATCHED = "without", "recorder", "recorder and monitor"
_BEGIN, _END = Recorder.begin, Recorder.end


def record(on: bool) -> None:
    """Let the recorder note events, or not; the calls stay."""
    Recorder.begin = _BEGIN if on else lambda self, name, number=0: 0  # type: ignore[method-assign,assignment]
    Recorder.end = _END if on else lambda self, at: None  # type: ignore[method-assign,assignment]


def event_ns() -> dict[str, float]:
    """Return the nanoseconds of one event, begun and ended, of each tracer here."""
    name = RECORDER.name("u", "event")

    def ours() -> None:
        RECORDER.end(RECORDER.begin(name))

    found = {"mpistrat": min(timeit.repeat(ours, number=20_000, repeat=9)) / 20_000 * 1e9}
    try:
        from viztracer import VizTracer
    except ImportError:
        return found
    tracer = VizTracer(verbose=0, max_stack_depth=0)
    tracer.start()

    def theirs() -> None:
        with tracer.log_event("event"):
            pass

    found["viztracer log_event"] = min(timeit.repeat(theirs, number=5_000, repeat=5)) / 5_000 * 1e9
    tracer.stop()
    tracer.clear()
    return found


def more(seconds: dict[str, list[float]], name: str) -> float:
    """Return by how much the steps of a contender take longer than those without, in the same round."""
    return statistics.median(a - b for a, b in zip(seconds[name], seconds[WITHOUT], strict=True))


def main() -> None:
    """Run the benchmark. Collective."""
    options = harness.arguments(__doc__, milliseconds=5.0, steps=100, rounds=15)
    strategy = ms.MultiWorkerMirroredStrategy()
    comm = strategy.comm
    size = 256
    left, right = np.ones((size, size), np.float32), np.ones((size, size), np.float32)
    out = np.empty_like(left)
    once = min(timeit.repeat(lambda: np.matmul(left, right, out=out), number=10, repeat=5)) / 10
    products = comm.bcast(max(1, round(options.milliseconds / 1e3 / once)))
    work = [products]
    with strategy.scope():
        weights = ms.Variable(np.zeros(10_000, np.float32), name="weights")
        optimizer = ms.optimizers.Adam(1e-3)
    data = strategy.distribute_dataset(ms.data.from_arrays(np.zeros((options.steps * 8, 16), np.float32)).batch(8))

    def step(batch: Any) -> float:
        for _ in range(work[0]):
            np.matmul(left, right, out=out)
        optimizer.apply_gradients([(weights.grad, weights)])
        return float(batch.sum())

    def block(run: Any) -> float:
        comm.Barrier()
        begun = time.perf_counter()
        for batch in data:
            loss = strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)
            if run is not None:
                run.step()
        ended = time.perf_counter()
        if run is not None:
            run.epoch({"loss": float(loss)})
            ends.append(harness.largest(comm, time.perf_counter() - ended))
        return ended - begun

    def compare(run: Any) -> dict[str, list[float]]:
        seconds: dict[str, list[float]] = {WITHOUT: [], RECORDED: [], WATCHED: []}
        for number in range(options.rounds + 1):  # the first is not counted
            names = list(seconds) if number % 2 else list(reversed(seconds))
            for name in names:
                record(name != WITHOUT)
                took = harness.largest(comm, block(run if name == WATCHED else None))
                if number:
                    seconds[name].append(took / options.steps)
        record(True)
        return seconds

    ends: list[float] = []
    folder = comm.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
    with ms.monitor(folder, strategy, progress=False) as run:
        seconds = compare(run)
        work[0] = 0
        short = compare(run)
    extra = {name: more(seconds, name) for name in (RECORDED, WATCHED)}
    result = {
        "benchmark": "watching",
        "machine": harness.machine(comm, ["viztracer", "tensorboardX"]),
        "event_ns": event_ns(),
        "step_seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "more_seconds": extra,
        "short_step_seconds": {name: statistics.median(times) for name, times in short.items()},
        "more_seconds_of_short_steps": {name: more(short, name) for name in (RECORDED, WATCHED)},
        "epoch_end_seconds": statistics.median(ends),
        "steps": options.steps,
        "rounds": options.rounds,
    }
    if comm.rank == 0:
        rows = [[name, f"{ns:,.0f} ns"] for name, ns in result["event_ns"].items()]
        print(harness.table("An event", ["tracer", "costs"], rows))
        for title, times, added in (
            ("A step", "step_seconds", "more_seconds"),
            ("A step without work", "short_step_seconds", "more_seconds_of_short_steps"),
        ):
            rows = [
                [name, f"{took * 1e3:.3f} ms", f"{result[added][name] * 1e6:+.1f} µs" if name in result[added] else ""]
                for name, took in result[times].items()
            ]
            print(harness.table(title, ["", "median", "more, median of rounds"], rows))
        print(f"\nThe end of an epoch with the monitor: {result['epoch_end_seconds'] * 1e3:.2f} ms")
        harness.save(options.output, result)
    strategy.close()


if __name__ == "__main__":
    main()

"""Train a network on real handwritten digits, under any strategy.

    mpiexec -n 2 python -m mpistrat.examples.digits --strategy mirrored --output digits_output
    mpiexec -n 4 python -m mpistrat.examples.digits --strategy parameter_server --num-ps 1

The weights at the end are the same under every synchronous strategy and on any number of ranks, up to rounding. With
parameter servers the batch size is that of one worker, and the weights depend on who came first.

Told to stop by SIGUSR1, SIGTERM or the end of its time, the job saves where it is and ends with status 42. The same command goes
on there, and ends with the same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpistrat as ms
from mpistrat.environment import Environment

from . import digits_data, resume
from .digits_model import Digits
from .progress import Clock, Progress, training_curves

__all__ = ["main", "train"]

SETTINGS = ("seed", "global_batch_size", "learning_rate", "dtype")  # which a job that goes on must have as it began

ALL_REDUCE: dict[str, Callable[[], Any]] = {
    "auto": lambda: None,
    "mpi": lambda: ms.MpiAllReduce(),
    "hierarchical": lambda: ms.HierarchicalAllReduce(),
    "reduction_to_one_device": lambda: ms.ReductionToOneDevice(),
}


def make_strategy(options: argparse.Namespace) -> Any:
    """Return the strategy that the command line names. Collective."""
    name, ops = options.strategy, ALL_REDUCE[options.all_reduce]()
    devices = options.devices.split(",") if options.devices else None
    if name == "one_device":
        if devices is not None and len(devices) != 1:
            raise ValueError(f"--devices: expected one device for --strategy one_device, got {','.join(devices)}")
        return ms.OneDeviceStrategy(devices[0] if devices else "cpu:0")
    if name == "central_storage":
        return ms.CentralStorageStrategy(compute_devices=devices)
    if name == "parameter_server":
        how = {"num_ps": options.num_ps, "max_staleness": options.max_staleness, "transport": options.transport}
        return ms.ParameterServerStrategy(devices=devices, cross_device_ops=ops, **how)
    kinds = {"mirrored": ms.MirroredStrategy, "multi_worker_mirrored": ms.MultiWorkerMirroredStrategy}
    return kinds[name](devices=devices, cross_device_ops=ops)


def train(strategy: Any, options: argparse.Namespace) -> dict[str, Any] | None:
    """Train, write metrics, weights and curves into the output folder, and return the summary. Collective.

    Told to stop, it writes what it needs to go on, and returns None; called again it goes on where it was.
    """
    output = Path(options.output)
    if strategy.rank == 0:
        digits_data.write(output / "shards", options.dtype)
    strategy.barrier(name="the shards are written")
    fields = ("image", "label")
    batch = options.global_batch_size
    rows = ms.data.HDF5Dataset(str(output / "shards" / "train-*.h5"), fields=fields)
    training = rows.shuffle(seed=options.seed).batch(batch).prefetch(2)
    testing = ms.data.HDF5Dataset(str(output / "shards" / "test-*.h5"), fields=fields).batch(digits_data.TEST_ROWS)
    training_data = strategy.distribute_dataset(training)
    testing_data = strategy.distribute_dataset(testing)
    with strategy.scope():
        model = Digits(options.seed, options.dtype)
        optimizer = ms.optimizers.Adam(options.learning_rate)

    serves, tells = getattr(strategy, "is_server", False), strategy.rank == resume.first_reader(strategy)

    def step(inputs: Any) -> Any:
        with clock.measure("compute"):
            loss = model.loss_and_gradients(*inputs)
        with clock.measure("communication"):
            optimizer.apply_gradients([(v.grad, v) for v in model.variables])
        return loss

    def evaluate() -> float:
        right = rows = 0
        for inputs in testing_data:
            right += int(strategy.reduce("SUM", strategy.run(model.correct, args=inputs), axis=None))
            rows += ms.context.global_batch_size() or 0
        return right / rows if rows else math.nan  # with parameter servers one worker has all test rows

    settings = {name: getattr(options, name) for name in SETTINGS}
    notes, taken = resume.read(strategy, output / "resume.h5")
    if notes.get("settings", settings) != settings:
        raise ValueError(
            f"{output / 'resume.h5'}: begun with {notes['settings']}, now {settings}: remove the file to begin anew"
        )
    losses: list[float] = notes.get("losses", [])
    epochs: list[dict[str, Any]] = notes.get("epochs", [])
    style = options.progress if tells else "none"
    with Progress(options.epochs * len(training_data), style, len(losses)) as progress:
        for epoch in range(len(epochs) + 1, options.epochs + 1):
            clock = Clock(training_data, getattr(strategy, "traffic", None))
            first = notes.pop("first", len(losses))
            batches = iter(training_data)
            if "clock" in notes:
                clock.restore(notes.pop("clock"))
                if not serves:
                    batches.restore({"epoch": epoch - 1, "next": taken})
            for inputs in batches:
                clock.samples += ms.context.global_batch_size() or 0
                parts = strategy.run(step, args=(inputs,))
                with clock.measure("communication"):
                    losses.append(float(strategy.reduce("SUM", parts, axis=None)))
                progress.step(epoch, losses[-1], clock)
                if strategy.should_stop():
                    break
            batches.close()
            if strategy.should_stop():
                state = {
                    "settings": settings,
                    "losses": losses,
                    "epochs": epochs,
                    "first": first,
                    "clock": clock.state(),
                }
                resume.save(strategy, output / "resume.h5", state, batches.state()["next"])
                return None
            clock.stop()
            mean = sum(losses[first:]) / max(len(losses) - first, 1)
            accuracy = evaluate()
            progress.epoch(epoch, mean, accuracy, clock)
            epochs.append({"epoch": epoch, "loss": mean, "test_accuracy": accuracy, "samples_per_second": clock.rate()})
            epochs[-1] |= {f"seconds_{part}": seconds for part, seconds in clock.seconds().items()}
    strategy.save(output / "weights.h5")
    exchanged = strategy.stats() if isinstance(strategy, ms.ParameterServerStrategy) else None
    if exchanged is not None and style != "none":
        print(exchanged, file=sys.stderr, flush=True)
    summary = summarise(strategy, options, epochs)
    if tells:
        (output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in epochs))
        title = f"digits, {summary['strategy']}, {summary['ranks']} ranks, {summary['replicas']} replicas"
        accuracies = [line["test_accuracy"] for line in epochs]
        if not training_curves(output / "training.png", losses, accuracies, title):
            print("no training.png: matplotlib is not installed (extra `plot`)", file=sys.stderr)
        (output / "resume.h5").unlink(missing_ok=True)
    return summary


def summarise(strategy: Any, options: argparse.Namespace, epochs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the job's last line says."""
    rates = sorted(line["samples_per_second"] for line in epochs)
    return {
        "strategy": options.strategy,
        "ranks": strategy.size,
        "replicas": strategy.num_replicas_in_sync,
        "epochs": len(epochs),
        "test_accuracy": epochs[-1]["test_accuracy"] if epochs else None,
        "samples_per_second": round(rates[len(rates) // 2], 1) if rates else None,
    }


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(
        prog="python -m mpistrat.examples.digits", description=(__doc__ or "").split("\n")[0]
    )
    names = ["one_device", "mirrored", "multi_worker_mirrored", "central_storage", "parameter_server"]
    environment = Environment.read()  # `mpistrat run --strategy` and job scripts say it there
    parser.add_argument(
        "--strategy",
        choices=names,
        default=environment.strategy or "mirrored",
        help="(MPISTRAT_STRATEGY, else mirrored)",
    )
    parser.add_argument("--epochs", type=int, default=12, help="(%(default)s)")
    parser.add_argument("--global-batch-size", type=int, default=96, help="of all replicas in sync (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of Adam (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order and the first weights (%(default)s)")
    parser.add_argument(
        "--dtype", choices=["float32", "float64"], default="float32", help="of the weights (%(default)s)"
    )
    parser.add_argument("--output", default="digits_output", metavar="DIR", help="for all that it writes (%(default)s)")
    parser.add_argument("--devices", help="this rank's devices, one replica each: cpu:0,cpu:1", metavar="LIST")
    parser.add_argument(
        "--all-reduce", choices=list(ALL_REDUCE), default="auto", help="of the mirrored strategies (%(default)s)"
    )
    parser.add_argument(
        "--num-ps",
        type=int,
        default=environment.num_ps,
        help="parameter servers: their number (MPISTRAT_NUM_PS, else those of TF_CONFIG, else 1)",
    )
    parser.add_argument(
        "--max-staleness", type=int, help="parameter servers: steps that a worker may be ahead (no bound)"
    )
    parser.add_argument(
        "--transport", default="", help="parameter servers: shared_window, one_sided or messages (what fits)"
    )
    parser.add_argument(
        "--progress", choices=["auto", "bar", "lines", "none"], default="auto", help="(a bar on a terminal, else lines)"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the job of the command line; one rank prints its summary as one line of JSON. Collective."""
    ms.catch_stop_signals()
    options = parse(arguments)
    strategy = make_strategy(options)
    tells = strategy.rank == resume.first_reader(strategy)
    summary = train(strategy, options)
    if summary is None:
        if tells:
            print(
                f"told to stop; the same command goes on from {options.output}/resume.h5", file=sys.stderr, flush=True
            )
        strategy.close()
        sys.exit(ms.RESTART_EXIT_CODE)
    if tells:
        print(f"curves, metrics and weights are in {options.output}", file=sys.stderr, flush=True)
        print(json.dumps(summary), flush=True)
    strategy.close()
    return summary


if __name__ == "__main__":
    main()

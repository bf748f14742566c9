"""Train a network on real handwritten digits, under any strategy.

    mpiexec -n 2 python -m mpistrat.examples.digits --strategy mirrored --output digits_output
    mpiexec -n 4 python -m mpistrat.examples.digits --strategy parameter_server --num-ps 1

The final weights are the same under every synchronous strategy and on any number of ranks, up to rounding. With parameter
servers the batch size is one worker's, and the weights depend on the order of arrival.

On SIGUSR1, SIGTERM or the end of its time, the job saves its state and ends with status 42. The same command resumes it, and
ends with the same weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mpistrat as ms
from mpistrat.base.environment import Environment

from . import digits_data
from .digits_model import Digits

__all__ = ["main", "train"]

SETTINGS = ("seed", "global_batch_size", "learning_rate", "dtype")  # which a resumed job must not change
SAVED = "checkpoints"

ALL_REDUCE: dict[str, Callable[[], Any]] = {
    "auto": lambda: None,
    "mpi": lambda: ms.MpiAllReduce(),
    "hierarchical": lambda: ms.HierarchicalAllReduce(),
    "reduction_to_one_device": lambda: ms.ReductionToOneDevice(),
}


def make_strategy(options: argparse.Namespace) -> Any:
    """Return the strategy of the command line. Collective."""
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
    """Train, write results, weights and the page of the run to the output folder, and return the summary. Collective.

    On a request to stop, it saves its state and returns None; another call resumes.
    """
    output = Path(options.output)
    wrong = ""
    if strategy.rank == 0:
        digits_data.write(output / "shards", options.dtype)
        wrong = other_settings(output / SAVED, options)
    if wrong := strategy.broadcast_object(wrong):  # before the shards are written
        raise ValueError(wrong)
    fields = ("image", "label")
    rows = ms.data.HDF5Dataset(str(output / "shards" / "train-*.h5"), fields=fields)
    training = strategy.distribute_dataset(rows.shuffle(seed=options.seed).batch(options.global_batch_size).prefetch(2))
    rows = ms.data.HDF5Dataset(str(output / "shards" / "test-*.h5"), fields=fields)
    testing = strategy.distribute_dataset(rows.batch(digits_data.TEST_ROWS))
    with strategy.scope():
        model = Digits(options.seed, options.dtype)
        optimizer = ms.optimizers.Adam(options.learning_rate)
        loss = ms.train.SparseCategoricalCrossentropy("loss", from_logits=True)
        accuracy = ms.train.SparseCategoricalAccuracy("accuracy")

    def update_metrics(labels: np.ndarray, scores: np.ndarray) -> None:
        loss.update_state(labels, scores)
        accuracy.update_state(labels, scores)

    def train_step(images: np.ndarray, labels: np.ndarray) -> None:
        update_metrics(labels, model.scores_and_gradients(images, labels))
        optimizer.apply_gradients([(v.grad, v) for v in model.variables])

    def test_step(images: np.ndarray, labels: np.ndarray) -> None:
        update_metrics(labels, model.forward(images)[-1])

    settings = {"strategy": options.strategy, **{name: getattr(options, name) for name in SETTINGS}}
    watch = ms.monitor(output, config=settings, progress=options.progress == "auto", steps=len(training))
    trainer = ms.train.Trainer(
        strategy, train_step, test_step, optimizer=optimizer, metrics=[loss, accuracy], callbacks=[watch],
        checkpoints=ms.train.Checkpoints(strategy, output / SAVED, keep=1),
    )  # fmt: skip
    history = trainer.fit(training, options.epochs, validation_data=testing)
    if strategy.should_stop():
        return None
    strategy.save(output / "weights.h5")
    if isinstance(strategy, ms.ParameterServerStrategy):
        exchanged = strategy.stats()
        if options.progress == "auto" and trainer.loop.tells:
            print(exchanged, file=sys.stderr, flush=True)
    if strategy.rank == 0:
        shutil.rmtree(output / SAVED, ignore_errors=True)  # the same command trains again
    rates = sorted(epoch["samples_per_second"] for epoch in watch.record.epochs)
    return {
        "strategy": options.strategy,
        "ranks": strategy.size,
        "replicas": strategy.num_replicas_in_sync,
        "epochs": len(history["loss"]),
        "test_accuracy": history["val_accuracy"][-1],
        "samples_per_second": round(rates[len(rates) // 2], 1),
    }


def other_settings(folder: Path, options: argparse.Namespace) -> str:
    """Record the settings of a new job; describe the difference of a resumed job, "" if equal."""
    settings, file = {name: getattr(options, name) for name in SETTINGS}, folder / "settings.json"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(settings))
    before = json.loads(file.read_text())
    return "" if before == settings else f"{folder}: started with {before}, now {settings}: remove the folder"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(
        prog="python -m mpistrat.examples.digits", description=(__doc__ or "").split("\n")[0]
    )
    names = ["one_device", "mirrored", "multi_worker_mirrored", "central_storage", "parameter_server"]
    environment = Environment.read()  # `mpistrat run --strategy` and job scripts set it there
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
        "--progress",
        choices=["auto", "none"],
        default="auto",
        help="a line an epoch, and a bar on a terminal (%(default)s)",
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run the job of the command line; one rank prints its summary as one line of JSON. Collective."""
    ms.catch_stop_signals()
    options = parse(arguments)
    strategy = make_strategy(options)
    tells = ms.train.Loop(strategy).tells
    summary = train(strategy, options)
    if summary is None:
        if tells:
            print(f"stopped; the same command resumes from {options.output}/{SAVED}", file=sys.stderr, flush=True)
        strategy.close()
        sys.exit(ms.RESTART_EXIT_CODE)
    if tells:
        print(f"{options.output}/run.html shows the run; weights.h5 is next to it", file=sys.stderr, flush=True)
        print(json.dumps(summary), flush=True)
    strategy.close()
    return summary


if __name__ == "__main__":
    main()

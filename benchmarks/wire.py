"""Fewer bytes between nodes: steps, bytes and learning with float32, bfloat16 and int8 on the wire.

    python benchmarks/run.py benchmarks/results/today --only wire --mpi-env mpich=.venv/bin/python
    MPISTRAT_SHARED_MEMORY=0 mpiexec -n 2 python benchmarks/wire.py --output benchmarks/results/today

Steps of Adam take turns in one run, beside MPI_Allreduce with NumPy's Adam; bytes are those that a host has sent, where it has a
network of its own. Then two models learn with each form from the same numbers: the digits, and a transformer that copies.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import harness
from wire_models import digits_curve, transformer_curve

import mpistrat as ms
from mpistrat.bench.training_step import RAW, ours, raw

FORMS = (None, "bfloat16", "int8")


def strategy_of(form: str | None) -> Any:
    """Return a strategy whose steps use a form. Collective."""
    return ms.MultiWorkerMirroredStrategy(communication_options=ms.CommunicationOptions(wire=form))


def called(form: str | None) -> str:
    return form or "float32"


def sent_bytes() -> int:
    """Return the bytes that this host has sent to others."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.split(":")[0].strip() != "lo")


def bytes_of(comm: Any, step: harness.Operation, steps: int = 5) -> float:
    """Return the bytes that the hosts send in a step, on average over hosts. Collective."""
    step()
    comm.Barrier()
    before = sent_bytes()
    comm.Barrier()
    for _ in range(steps):
        step()
    comm.Barrier()
    return harness.total(comm, (sent_bytes() - before) / steps) / comm.size


def curves(make: Any) -> dict[str, list[float]]:
    """Return what a model gives with each form. Collective."""
    found = {}
    for form in FORMS:
        with strategy_of(form) as strategy:
            found[called(form)] = make(strategy)
    return found


def main() -> None:
    """Run the benchmark. Collective."""
    options = harness.arguments(
        __doc__, parameters=1 << 22, repetitions=30, seconds=40.0, epochs=8, seeds=3, transformer=400
    )
    strategies = {called(form): strategy_of(form) for form in FORMS}
    comm = strategies["float32"].comm
    result: dict[str, Any] = {"benchmark": "wire", "machine": harness.machine(comm), "parameters": options.parameters}
    steps = {name: ours(strategy, options.parameters) for name, strategy in strategies.items()}
    result["bytes_sent"] = {name: bytes_of(comm, step) for name, step in steps.items()}
    steps[RAW] = raw(comm, options.parameters)
    result["seconds"] = harness.pair(comm, steps, repetitions=options.repetitions, seconds=options.seconds)
    steps.clear()
    began = time.perf_counter()
    digits = [curves(lambda s, seed=seed: digits_curve(s, options.epochs, seed)) for seed in range(options.seeds)]
    result["digits_accuracy"] = {name: [one[name] for one in digits] for name in digits[0]}
    result["transformer_loss"] = curves(lambda s: transformer_curve(s, options.transformer))
    if comm.rank == 0:
        report(result, options)
        print(f"learning took {time.perf_counter() - began:.0f} s", flush=True)
    for strategy in strategies.values():
        strategy.close()


def report(result: dict[str, Any], options: Any) -> None:
    """Print and write the result."""
    rows, times = [], result["seconds"]
    for name in times:
        ends = [accuracies[-1] for accuracies in result["digits_accuracy"].get(name, [])]
        loss = result["transformer_loss"].get(name, [])[-20:]
        accuracy = " ".join(f"{end:.1%}" for end in ends)
        last = f"{sum(loss) / len(loss):.4f}" if loss else ""
        sent = f"{result['bytes_sent'][name] / 1e6:.1f}" if name in result["bytes_sent"] else ""
        rows.append(
            [name, harness.duration(times[name]), f"{times['float32'] / times[name]:.2f} ×", sent, accuracy, last]
        )
    header = ["on the wire", "step", "as fast", "MB sent by a host", "digits, by seed", "transformer's loss, last 20"]
    about = result["machine"]
    title = f"{options.parameters / 1e6:.1f} M parameters, {about['ranks']} ranks on {about['nodes']} node(s)"
    print(harness.table(f"{title}, {about['mpi']}", header, rows), flush=True)
    harness.save(options.output, result)


if __name__ == "__main__":
    main()

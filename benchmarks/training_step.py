"""One synchronous step, reduce and Adam: ours against torch DDP on gloo, MPI_Allreduce with a NumPy Adam, and one loop in C.

    mpiexec -n 2 python benchmarks/training_step.py --output benchmarks/results/today
    mpiexec -n 2 python benchmarks/training_step.py --tensorflow

DDP's figure is a step less the same forward and backward pass without communication, since ours has no such pass.
Also measured: the step with nothing in it, and the memory that the ranks of a node share.
"""

from __future__ import annotations

from typing import Any

import harness
import numpy as np
from compiled_loop import LIMIT, compiled_loop

import mpistrat as ms
from mpistrat.bench.training_step import LAYERS, OURS, RAW, ours, raw

TENSORFLOW = "TensorFlow MultiWorkerMirroredStrategy, Keras Adam"


def ddp(count: int, fused: bool) -> tuple[harness.Operation, harness.Operation]:
    """Return torch DDP's whole step, and its forward and backward pass alone."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ParameterList(torch.zeros(count // LAYERS) for _ in range(LAYERS))

        def forward(self) -> torch.Tensor:
            return torch.stack([layer.sum() for layer in self.layers]).sum()

    model = DistributedDataParallel(Layers(), gradient_as_bucket_view=True)
    adam = torch.optim.Adam(model.parameters(), 1e-3, fused=fused)

    def step() -> None:
        adam.zero_grad(set_to_none=False)
        model().backward()
        adam.step()

    def compute() -> None:
        with model.no_sync():
            adam.zero_grad(set_to_none=False)
            model().backward()

    return step, compute


def tensorflow_step(workers: Any, count: int) -> harness.Operation:
    """Return a step of TensorFlow's strategy, traced once: gradients are constants, Keras's Adam sums and applies them."""
    import tensorflow as tf

    with workers.scope():
        variables = [tf.Variable(tf.zeros(count // LAYERS)) for _ in range(LAYERS)]
        adam = tf.keras.optimizers.Adam(1e-3)
        adam.build(variables)
    gradients = [tf.fill(count // LAYERS, 1e-3) for _ in range(LAYERS)]

    @tf.function
    def step() -> None:
        workers.run(lambda: adam.apply_gradients(zip(gradients, variables, strict=True)))

    return step


def communication(times: dict[str, float]) -> dict[str, float]:
    """Return the times of whole steps, those of DDP less its forward and backward pass."""
    alone = ", compute alone"
    return {name: t - times.get(name + alone, 0.0) for name, t in times.items() if not name.endswith(alone)}


def empty_step(strategy: Any, options: Any) -> dict[str, float]:
    """Return the seconds of a step with nothing in it and of one raw scalar Allreduce. Collective."""
    comm = strategy.comm
    mine, out, one = np.ones(1), np.empty(1), np.float64(1.0)

    def nothing() -> np.float64:
        return one

    operations: dict[str, harness.Operation] = {
        "empty run + scalar reduce": lambda: strategy.reduce(ms.ReduceOp.SUM, strategy.run(nothing), axis=None),
        "raw scalar Allreduce": lambda: comm.Allreduce(mine, out),
    }
    return harness.pair(comm, operations, repetitions=2000, seconds=options.seconds)


def memory(strategy: Any, count: int) -> dict[str, float]:
    """Return bytes over all ranks for variables without gradients, as multiples of one copy. Collective."""
    before = harness.proportional_memory(strategy.comm)
    with strategy.scope():
        variable = ms.Variable(np.zeros(count, np.float32), name="memory", trainable=False)
    float(np.asarray(variable).sum())
    return {"one copy": 4.0 * count, "variables": harness.proportional_memory(strategy.comm) - before}


def main() -> None:
    """Run the benchmark. Collective."""
    options = harness.arguments(__doc__, parameters=1 << 24, repetitions=30, seconds=25.0, tensorflow=False)
    strategy = ms.MultiWorkerMirroredStrategy()
    comm = strategy.comm
    workers = harness.tensorflow_strategy(comm) if options.tensorflow else None
    result: dict[str, Any] = {"benchmark": "training_step", "machine": harness.machine(comm)}
    result["parameters"] = options.parameters
    result["memory_bytes"] = memory(strategy, options.parameters)
    result["empty_step_seconds"] = empty_step(strategy, options)
    operations = {OURS: ours(strategy, options.parameters), RAW: raw(comm, options.parameters)}
    limit = compiled_loop(comm, options.parameters)
    if limit is not None:
        operations[LIMIT] = limit
    dist = harness.gloo(comm)
    if dist is not None:
        for label, fused in (("torch DDP, fused Adam", True), ("torch DDP, plain Adam", False)):
            operations[label], operations[label + ", compute alone"] = ddp(options.parameters, fused)
    if workers is not None:
        operations[TENSORFLOW] = tensorflow_step(workers, options.parameters)
    times = harness.pair(comm, operations, repetitions=options.repetitions, seconds=options.seconds)
    result["seconds"] = times
    result["seconds_without_compute"] = communication(times)
    if comm.rank == 0:
        about = result["machine"]
        times = result["seconds_without_compute"]
        rows = [[name, harness.duration(t), f"{t / times[OURS]:.2f} ×"] for name, t in times.items()]
        rows += [[name, harness.duration(t), ""] for name, t in result["empty_step_seconds"].items()]
        copies = result["memory_bytes"]["variables"] / result["memory_bytes"]["one copy"]
        rows.append(["variables' memory on all ranks", f"{copies:.2f} copies", ""])
        title = f"{options.parameters / 1e6:.1f} M parameters, {about['ranks']} ranks on {about['nodes']} node(s)"
        print(harness.table(f"{title}, {about['mpi']}", ["step", "time", "against ours"], rows), flush=True)
        harness.save(options.output, result)
    if dist is not None:
        dist.destroy_process_group()
    strategy.close()


if __name__ == "__main__":
    main()

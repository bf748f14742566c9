"""A pair of layers split by columns and rows over the ranks of a mesh, forward and backward, against one rank and its limits.

    mpiexec -n 2 python benchmarks/mesh.py --output benchmarks/results/today

Each rank has its share of the cores. The limit of the pair is its products alone; that of its messages MPI_Allreduce, and on one
node a copy of what each rank has to read of the others.
"""

from __future__ import annotations

from typing import Any

import harness
import numpy as np

import mpistrat as ms
from mpistrat.base.text import counted

WHOLE, PAIR, PRODUCTS = "the whole on one rank", "the pair", "its products alone"
MESSAGES, MPI_SUM, COPY = "its two messages alone", "MPI_Allreduce of the same", "a copy of the others' arrays"
OTHERS = {
    "all_gather": "all_gather of as much",
    "reduce_scatter": "reduce_scatter of as much",
    "reshard": "reshard of as much",
}


class Layers:
    """Weights of the pair, and what a step does with them."""

    def __init__(self, batch: int, width: int, columns: int) -> None:
        rng = np.random.default_rng(0)
        self.x = rng.normal(size=(batch, width)).astype(np.float32)
        self.w1 = rng.normal(size=(width, columns)).astype(np.float32)
        self.w2 = rng.normal(size=(columns, width)).astype(np.float32)
        self.g1, self.g2 = np.empty_like(self.w1), np.empty_like(self.w2)

    def step(self, reduce: Any = lambda array: array) -> None:
        """Forward and backward; `reduce` sums what is partial."""
        hidden = np.maximum(self.x @ self.w1, 0)
        error = reduce(hidden @ self.w2)
        back = (error @ self.w2.T) * (hidden > 0)
        np.matmul(hidden.T, error, out=self.g2)
        np.matmul(self.x.T, back, out=self.g1)
        reduce(back @ self.w1.T)


def main() -> None:
    """Run the benchmark. Collective."""
    options = harness.arguments(__doc__, width=512, batch=512, repetitions=30, seconds=40.0)
    with ms.MeshStrategy(axes={"model": -1}) as strategy:
        mesh, comm = strategy.mesh, strategy.comm
        whole = Layers(options.batch, options.width, 4 * options.width) if strategy.rank == 0 else None
        part = Layers(options.batch, options.width, 4 * options.width // comm.size)
        sent, found = np.array(part.x), np.empty((comm.size, *part.x.shape), np.float32)
        total = np.empty_like(sent)

        def twice(call: Any) -> harness.Operation:
            return lambda: [call() for _ in range(2)]

        operations: dict[str, harness.Operation] = {
            WHOLE: lambda: whole and whole.step(),
            PAIR: lambda: part.step(lambda array: mesh.all_reduce("SUM", array, mesh_axis="model")),
            PRODUCTS: part.step,
            MESSAGES: twice(lambda: mesh.all_reduce("SUM", sent, mesh_axis="model")),
            MPI_SUM: twice(lambda: comm.Allreduce(sent, total)),
            COPY: twice(lambda: found[1:].fill(0) if comm.size == 1 else np.copyto(found[1:], sent)),
            OTHERS["all_gather"]: lambda: mesh.all_gather(sent, mesh_axis="model"),
            OTHERS["reduce_scatter"]: lambda: mesh.reduce_scatter("SUM", sent, mesh_axis="model"),
            OTHERS["reshard"]: lambda: mesh.reshard(sent, old=0, new=1, mesh_axis="model"),
        }
        times = harness.pair(comm, operations, repetitions=options.repetitions, seconds=options.seconds)
        result = {"benchmark": "mesh", "machine": harness.machine(comm), "width": options.width, "batch": options.batch}
        if comm.rank == 0:
            limits = {PAIR: PRODUCTS, MESSAGES: MPI_SUM}
            rows = [[name, harness.duration(t), f"{t / times[WHOLE]:.2f} ×"] for name, t in times.items()]
            for row in rows:
                row.append(f"{times[row[0]] / times[limits[row[0]]]:.2f} ×" if row[0] in limits else "")
            about = result["machine"]
            title = f"{options.width} → {4 * options.width} → {options.width}, batch {options.batch}, float32; "
            title += f"{counted(about['ranks'], 'rank')}, {about['mpi']}"
            print(harness.table(title, ["", "time", "of the whole on one rank", "of the limit"], rows), flush=True)
            harness.save(options.output, result | {"seconds": times})


if __name__ == "__main__":
    main()

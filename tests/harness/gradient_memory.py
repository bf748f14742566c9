"""What gradients take of memory."""

import re
import tracemalloc
from pathlib import Path

import numpy as np

import mpistrat as ms


def shared_bytes():
    """Bytes of this job's shared memory, divided over the ranks that map it."""
    text = Path("/proc/self/smaps").read_text()
    maps = re.findall(r"/dev/shm/mpistrat-.*?\nPss: +(\d+) kB", text, re.DOTALL)
    return 1024 * sum(map(int, maps))


def memory_of(sharded):
    """Return what the ranks of a node have in shared memory for variables and gradients, and the most of one rank beside it."""
    from mpi4py import MPI

    layers, size = 16, 1 << 18
    with ms.MultiWorkerMirroredStrategy(sharded_gradients=sharded) as strategy:
        before = MPI.COMM_WORLD.allreduce(shared_bytes())
        with strategy.scope():
            variables = [ms.Variable(np.zeros(size, np.float32), name=f"v{i}") for i in range(layers)]
            optimizer = ms.optimizers.SGD(0.1)

        def step():
            for variable in reversed(variables):
                variable.grad[...] = 1
                if sharded:
                    optimizer.begin([variable])
            optimizer.apply_gradients([(v.grad, v) for v in variables])

        strategy.run(step)
        tracemalloc.start()
        strategy.run(step)
        private = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        MPI.COMM_WORLD.Barrier()
        return MPI.COMM_WORLD.allreduce(shared_bytes()) - before, private, 4 * layers * size

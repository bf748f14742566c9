"""Random training programs of torch, JAX and Keras, each under a strategy and in one plain process of the framework.

    mpiexec -n 2 python -m tests.nets.patterns torch --seed 1 --count 40     (2 or 3 ranks)
    mpiexec -n 2 python -m tests.nets.patterns torch --program two_losses --only '{"kind": "last"}'

FRAMEWORK is torch, jax, keras-torch or keras-jax. Rank 0 prints a line of JSON before and after each program, whose result is
one of: equal; error (a clear one, on all ranks); documented (documented.py); wrong. The exit status is 1 if any was wrong.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from typing import Any

FRAMEWORKS = ("torch", "jax", "keras-torch", "keras-jax")


def prepare(framework: str) -> None:
    """Set what is read at imports."""
    os.environ.setdefault("MPISTRAT_ABORT_AFTER", "40")
    os.environ.setdefault("NPROC", "1")  # threads of XLA
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.join(tempfile.gettempdir(), "nets-jax-cache"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "0")
    if framework.startswith("keras"):
        os.environ["KERAS_BACKEND"] = framework.split("-")[1]


def programs(framework: str) -> Any:
    """Return the module with config() and run() of a framework, all of its programs imported."""
    name = framework.split("-")[0]
    for part in {"torch": ("usual", "weights", "state"), "jax": ("usual", "weights"), "keras": ("usual", "loops")}[
        name
    ]:
        importlib.import_module(f"tests.nets.patterns.{name}_{part}")
    return importlib.import_module(f"tests.nets.patterns.{name}_program")


def run_programs(
    framework: str, seed: int, first: int, last: int, only: dict[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Run programs `first` to `last` - 1 of a seed; yield a record before and after each. Collective."""
    import numpy as np
    from mpi4py import MPI

    module, world = programs(framework), MPI.COMM_WORLD
    with tempfile.TemporaryDirectory(prefix="patterns-") as own:
        shared = world.bcast(os.path.join(own, "shared"))
        os.makedirs(shared, exist_ok=True)
        for number in range(first, last):
            rng = np.random.default_rng([seed, number])
            config = module.config(rng, number, (only or {}).get("program")) | (only or {})
            yield {"number": number, "begins": True, "config": config}
            result, detail = run_program(framework, module, number, config, world, shared, own)
            yield {"number": number, "result": result, "detail": detail, "config": config}
        world.Barrier()


def run_program(
    framework: str, module: Any, number: int, config: dict[str, Any], world: Any, shared: str, own: str
) -> tuple[str, str]:
    """Run one program both ways; return its result. Collective."""
    from tests.nets.differential.layouts import set_layout
    from tests.nets.patterns.environments import Distributed, Environment, Left
    from tests.nets.patterns.verdicts import Failure, distance, verdict

    servers = bool(config.get("servers"))
    ranks = max(world.size - servers, 1 if servers else 2)
    failure, got, left = None, {}, False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        world.Barrier()
        try:
            set_layout(config.get("layout", "shared"))
            env = Distributed(shared, servers)
            try:
                got = module.run(env, config, ranks)
            except Left:
                left = True
            except Exception as error:
                failure = Failure.of(error)
                # Other ranks may be in another collective, which ends the job: this line is what the program would have said.
                print(json.dumps({"number": number, "failed": failure.line, "clear": failure.clear}), flush=True)
            try:
                env.close()
            except Exception as error:
                failure = failure or Failure.of(error)
        except Exception as error:
            failure = Failure.of(error)
        reference, wanted = None, {}
        if world.rank == 0:
            folder = tempfile.mkdtemp(dir=own)
            try:
                wanted = module.run(Environment(folder), config, ranks)
            except Exception as error:
                reference = Failure.of(error)
    reference, wanted = from_first(world, (reference, wanted))
    apart = (0.0, "") if failure or reference or left else distance(got, wanted)
    outcomes = world.allgather((failure, apart))
    if world.rank == 0:
        for name in os.listdir(shared):
            path = os.path.join(shared, name)
            (shutil.rmtree if os.path.isdir(path) else os.remove)(path)
    return verdict(framework, config, [o[0] for o in outcomes], reference, [o[1] for o in outcomes])


def from_first(world: Any, value: Any) -> Any:
    """Return rank 0's value on all ranks. The others sleep until it comes: MPI would keep their cores busy. Collective."""
    if world.rank == 0:
        for request in [world.isend(value, dest=rank, tag=7) for rank in range(1, world.size)]:
            request.wait()
        return value
    while not world.iprobe(source=0, tag=7):
        time.sleep(0.005)
    return world.recv(source=0, tag=7)


def main() -> int:
    """Run the programs of the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="tests.nets.patterns", description=__doc__.splitlines()[0])
    parser.add_argument("framework", choices=FRAMEWORKS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--count", type=int, default=20, help="the number after the last program")
    parser.add_argument("--program", help="only this program, drawn again and again")
    parser.add_argument("--only", type=json.loads, default={}, help='JSON of what is not to be drawn: {"kind": "last"}')
    options = parser.parse_args()
    prepare(options.framework)
    only = options.only | ({"program": options.program} if options.program else {})
    from mpi4py import MPI

    wrong = 0
    for record in run_programs(options.framework, options.seed, options.first, options.count, only):
        wrong += record.get("result") == "wrong"
        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(record, default=str), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

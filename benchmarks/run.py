"""Run the benchmarks under every MPI and layout at hand, and draw the plots.

    python benchmarks/run.py benchmarks/results/DATE \\
        --mpi-env mpich=.venv/bin/python --mpi-env openmpi=.venv-openmpi/bin/python

Two hosts are isolated ones on this machine, made where root and iproute2 allow (see tests/launch/hosts.py).
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # for the launcher of the tests, and their isolated hosts

from tests.launch.hosts import Hosts, why_no_hosts  # noqa: E402
from tests.launch.launcher import MpiEnv, launch, mpi_env  # noqa: E402

LAYOUTS = {  # ranks on one host
    "all_reduce": (2, 4),
    "collectives": (2, 4),
    "training_step": (2, 4),
    "frameworks": (2, 4),
    "torch_backend": (2, 4),
    "hdf5_input": (1, 2),
    "parameter_server": (4,),
    "transports": (4,),
    "checkpoints": (2, 4),
    "watching": (2, 4),
    "local_steps": (),  # on one node it has no effect
    "wire": (),
    "early_gradients": (),
}
BENCHMARKS = tuple(LAYOUTS)
OVER_HOSTS = (
    "all_reduce",
    "collectives",
    "training_step",
    "frameworks",
    "torch_backend",
    "parameter_server",
    "local_steps",
    "wire",
    "early_gradients",
)
RANKS_OVER_HOSTS = {"early_gradients": 2}  # one on each, with a core of its own
FRAMEWORKS = ("torch", "jax", "keras")
PEERS = {"tensorflow": ("all_reduce", "training_step", "parameter_server"), "torch": ("parameter_server",)}


def run(env: MpiEnv, benchmark: str, ranks: int, hosts: Hosts | None, options: argparse.Namespace) -> None:
    """Run one benchmark, of frameworks once for each, on one layout and show what it prints."""
    if benchmark == "frameworks":
        for framework in options.framework:
            run_program(env, benchmark, ranks, hosts, options, ["--framework", framework])
        return
    peers = [f"--{peer}" for peer, known in PEERS.items() if benchmark in known and getattr(options, peer)]
    if benchmark == "early_gradients" and hosts is not None:
        peers.append("--pin")
    run_program(env, benchmark, ranks, hosts, options, peers)


def run_program(
    env: MpiEnv, benchmark: str, ranks: int, hosts: Hosts | None, options: argparse.Namespace, words: list[str]
) -> None:
    """Run a benchmark's program with some words on its command line."""
    program = [str(ROOT / "benchmarks" / f"{benchmark}.py"), "--output", str(options.output.resolve()), *words]
    result = launch(program, ranks, env, options.timeout, hosts=hosts, cwd=ROOT)
    what = " ".join([benchmark, *words])
    print(result.stdout if result.returncode == 0 else f"{what} on {ranks} ranks, {env.name}: {result}", flush=True)


def main() -> None:
    """Run every benchmark on one host and, where it communicates, on two hosts of two ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("output", type=Path)
    parser.add_argument("--mpi-env", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--only", choices=BENCHMARKS, action="append")
    text = "measure the steps of its models; none by default"
    parser.add_argument("--framework", choices=FRAMEWORKS, action="append", default=[], help=text)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one benchmark on one layout")
    for peer, known in PEERS.items():
        parser.add_argument(f"--{peer}", action="store_true", help=f"measure it in {', '.join(known)}, too")
    options = parser.parse_args()
    named = dict(word.partition("=")[::2] for word in options.mpi_env) or {"": sys.executable}
    for name, python in named.items():
        env = mpi_env(python, name or None)
        for benchmark in options.only or BENCHMARKS:
            for ranks in LAYOUTS[benchmark]:
                run(env, benchmark, ranks, None, options)
            if benchmark not in OVER_HOSTS:
                continue
            if reason := why_no_hosts():
                print(f"two hosts left out: {reason}", flush=True)
                continue
            with contextlib.closing(Hosts(2)) as hosts:
                run(env, benchmark, RANKS_OVER_HOSTS.get(benchmark, 4), hosts, options)
    if find_spec("matplotlib") is None:
        print(
            f"no plots: {sys.executable} has no matplotlib; with one that has: python benchmarks/plot.py {options.output}"
        )
        return
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "plot.py"), str(options.output)], check=True)


if __name__ == "__main__":
    main()

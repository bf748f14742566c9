"""Horovod's own tests and examples of horovod.torch on `mpistrat.horovod.torch`, next to a list of expected results.

    git clone https://github.com/horovod/horovod FOLDER
    python -m tests.peers.horovod --repository FOLDER --ranks 2 --output FOLDER [--write]

The tests need `pip install pytest-timeout cloudpickle`. Each file runs in a job of its own, those for one process on one rank.
A test has failed if it has failed on a rank. Changes of the suite: torch's Muon, which is newer than the tests and refuses
biases, is left out of the optimizers that they try, and helpers of Horovod's launcher that the tests import are here.

The examples are unchanged, and start with `mpistrat run --horovod`; `stand_ins` has the data that they would fetch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import types
import unittest.mock
from pathlib import Path

from .jobs import absolute, beside, judge, pytest_words

EXPECTED = Path(__file__).with_suffix(".json")
STAND_INS = Path(__file__).with_name("stand_ins")
FILES = {
    "parallel/test_torch.py": 0,
    "parallel/test_adasum_pytorch.py": 0,
    "parallel/test_timeline.py": 0,
    "single/test_torch_elastic.py": 1,
}
LIMIT = 200  # seconds of a test
# Each example's file, its words, what it prints if it has learned or measured, and the options to try.
EXAMPLES = (
    (
        "pytorch_mnist.py", "--batch-size 16 --epochs {ranks}", "Accuracy: (9\\d|100)",
        ("", "--fp16-allreduce", "--use-adasum", "--gradient-predivide-factor 2"),
    ),
    (
        "pytorch_synthetic_benchmark.py", "--num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 2",
        "Total img/sec on {ranks} CPU", ("", "--fp16-allreduce", "--use-adasum", "--batch-size 8"),
    ),
)  # fmt: skip


def prepare():
    """Let `horovod` be this package's, and give the tests what they import besides."""
    import torch

    import mpistrat.horovod

    mpistrat.horovod.install()
    found = type.__subclasses__(torch.optim.Optimizer)
    kept = [each for each in found if each.__name__ != "Muon"]
    torch.optim.Optimizer.__subclasses__ = staticmethod(lambda: kept)

    def in_thread(target, args=(), daemon=True):
        thread = threading.Thread(target=target, args=args, daemon=daemon)
        thread.start()
        return thread

    @contextlib.contextmanager
    def env(**variables):
        with unittest.mock.patch.dict(os.environ, variables):
            yield

    for name, content in {
        "horovod.runner": {},
        "horovod.runner.util": {},
        "horovod.runner.util.threads": {"in_thread": in_thread},
        "horovod.common.util": {"env": env},
    }.items():
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__dict__.update(content)
    sys.modules.setdefault("mock", unittest.mock)


def run_tests(path, output):
    """Run the tests of a file on this rank, and write the result of each."""
    import pytest
    from mpi4py import MPI

    prepare()
    results = {}

    class Results:
        def pytest_runtest_logreport(self, report):
            name = report.nodeid.rpartition("::")[2]
            if report.failed:
                results[name] = "FAIL"
            elif report.skipped:
                results[name] = "SKIP"
            elif report.when == "call":
                results.setdefault(name, "PASS")

        def pytest_runtest_logstart(self, nodeid):
            Path(f"{output}.{MPI.COMM_WORLD.rank}.now").write_text(nodeid.rpartition("::")[2])

    words = [*pytest_words(Path(path).parent), "--timeout", str(LIMIT), "--timeout-method", "thread", path]
    pytest.main(words, plugins=[Results()])
    Path(f"{output}.{MPI.COMM_WORLD.rank}").write_text(json.dumps(results))


def run_examples(arguments):
    """Return the results of the examples, by their options."""
    folder, found = arguments.output, {}
    path = os.pathsep.join(filter(None, [str(STAND_INS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "HOME": str(folder)}  # one of them locks a file there
    for file, words, shown, options in EXAMPLES:
        for each in options:
            name = f"{file} {each}".rstrip()
            command = [sys.executable, "-m", "mpistrat", "run", "--horovod", "-n", str(arguments.ranks)]
            command += [
                f"{arguments.repository}/examples/pytorch/{file}",
                *words.format(ranks=arguments.ranks).split(),
                *each.split(),
            ]
            log = folder / f"{name.replace(' ', '_')}.log"
            with open(log, "w") as out:
                try:
                    status = subprocess.run(
                        command, stdout=out, stderr=subprocess.STDOUT, env=environment, timeout=LIMIT, check=False
                    ).returncode
                except subprocess.TimeoutExpired:
                    status = None
            good = status == 0 and re.search(shown.format(ranks=arguments.ranks), log.read_text())
            found[f"examples::{name}"] = "PASS" if good else f"FAIL ended with {status}: see {log.name}"
    return found


def drive(arguments):
    """Return the results of all files, by test."""
    folder, found = arguments.output, {}
    folder.mkdir(parents=True, exist_ok=True)
    tests = folder / "test"
    shutil.rmtree(tests, ignore_errors=True)
    shutil.copytree(arguments.repository / "test", tests, ignore=shutil.ignore_patterns("conftest.py"))
    for file, fixed in FILES.items():
        ranks, output = fixed or arguments.ranks, folder / Path(file).stem
        for path in folder.glob(f"{output.name}.*"):
            path.unlink()
        command = [*arguments.mpiexec.split(), "-n", str(ranks), sys.executable, "-m", __spec__.name]
        command += ["--job", str(tests / file), "--output", str(output)]
        with open(f"{output}.log", "w") as log:
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        texts = [Path(f"{output}.{rank}") for rank in range(ranks)]
        if not all(path.exists() for path in texts):
            now = {path.read_text() for path in folder.glob(f"{output.name}.*.now")}
            found[f"{file} ended with {status} in {', '.join(sorted(now)) or 'its import'}"] = "FAIL"
            continue
        results = [json.loads(path.read_text()) for path in texts]
        for name in results[0]:
            kinds = [each.get(name, "FAIL") for each in results]
            found[f"{Path(file).stem}::{name}"] = "FAIL" if "FAIL" in kinds else kinds[0]
    return found | run_examples(arguments)


def main():
    """Run the suite and compare it with the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repository", type=absolute, help="a folder with Horovod's repository")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mpiexec", default=beside("mpiexec"), help="the launcher")
    parser.add_argument("--output", type=absolute, required=True, help="a folder for the results")
    parser.add_argument("--write", action="store_true", help="write the list instead of comparing with it")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        run_tests(arguments.job, arguments.output)
        return
    results = drive(arguments)
    sys.exit(bool(judge(results, EXPECTED, f"{arguments.ranks} ranks", arguments.write)))


if __name__ == "__main__":
    main()

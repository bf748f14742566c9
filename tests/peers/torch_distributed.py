"""PyTorch's own tests of torch.distributed on this package's backend, next to a list of expected results.

    python -m tests.peers.torch_distributed --ranks 2 --output FOLDER [--backend mpi] [--match all_reduce] [--write]

The tests are those of torch.testing._internal.distributed.distributed_test, which need `pip install expecttest`. Those of "gloo"
run on the backend "mpistrat", or on gloo itself with `--backend gloo`. `--backend mpi` runs those of "mpi": with
`--match all_to_all` the tests that torch makes of that backend alone. A job ends with a test that fails.

Two changes of the suite: its lists of backends whose profiler events are compared are emptied, for Python cannot emit
asynchronous events, and on four ranks or more no test is skipped because of few ranks.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
import unittest
from pathlib import Path

from .jobs import LIMIT, Ranks, absolute, beside, drive, judge, let_gloo_be

EXPECTED = Path(__file__).with_suffix(".json")


def names():
    """Return the tests of the suite."""
    code = (
        "from torch.testing._internal.distributed.distributed_test import DistributedTest as D;"
        "print(*sorted(name for name in dir(D._DistTestBase) if name.startswith('test_')))"
    )
    more = {"BACKEND": "gloo", "WORLD_SIZE": "2", "TEMP_DIR": "/tmp"}
    result = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **more}, capture_output=True, text=True, check=True
    )
    return result.stdout.split()


# the ranks


def run_tests(folder, backend):
    """Run the tests of FOLDER/todo.json, on every rank of a job."""
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    ranks, scratch = Ranks(folder, rank, size), Path(folder) / "scratch"
    os.environ.update(BACKEND=shown_as(backend), WORLD_SIZE=str(size), TEMP_DIR=str(scratch), MASTER_ADDR="localhost")
    suite, exits = prepared(backend, size)
    for number, test in enumerate(json.loads((Path(folder) / "todo.json").read_text())):
        run_test(suite, number, test, ranks, scratch, exits)


def shown_as(backend):
    """Return the name that the tests see."""
    return "mpi" if backend == "mpi" else "gloo"


def prepared(backend, size):
    """Return the suite as a class, and the names of its exit codes."""
    from torch.testing._internal import common_distributed

    if backend != "gloo":
        from tests.harness.torch_groups import register

        register()
    if backend != "mpi":
        let_gloo_be(backend)
    if size >= 4:
        common_distributed.skip_if_small_worldsize = lambda function: function
    for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        common_distributed.DistTestCases.backend_feature[feature].add(shown_as(backend))
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed import distributed_test

    if backend != "gloo":
        distributed_test.PROFILING_SUPPORTED_BACKENDS.clear()
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()
    suite = type(
        "Suite", (distributed_test.DistributedTest._DistTestBase, TestCase), {"world_size": property(lambda self: size)}
    )
    return suite, {skip.exit_code: name for name, skip in common_distributed.TEST_SKIPS.items()}


def run_test(suite, number, test, ranks, scratch, exits):
    """Run one test on all ranks."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import distributed_test

    result = "PASS"
    if ranks.rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
        for folder in ("barrier", "test_dir", "init_dir"):
            (scratch / folder).mkdir(parents=True)
    ranks.begin(number)
    try:
        case = suite(test)
        case.rank, case.file_name, case.skip_return_code_checks = ranks.rank, str(scratch / "store"), []
        method = getattr(suite, test)
        if getattr(method, "__unittest_skip__", False):
            raise unittest.SkipTest(method.__unittest_skip_why__)
        limit = datetime.timedelta(seconds=distributed_test.CUSTOM_PG_TIMEOUT.get(test, 30))
        dist.init_process_group(
            os.environ["BACKEND"],
            init_method=f"file://{case.file_name}",
            world_size=ranks.size,
            rank=ranks.rank,
            timeout=limit,
        )
        distributed_test.Barrier.barrier_id = 0
        distributed_test.Barrier.sync(timeout=LIMIT)
        case.setUp()
        getattr(case, test)()
        case.tearDown()
        ranks.put(f"{number}.ran")
        ranks.all(f"{number}.ran")
        dist.destroy_process_group()
    except unittest.SkipTest as error:
        result = f"SKIP {error}"
    except SystemExit as error:
        result = f"SKIP {exits[error.code]}" if error.code in exits else f"FAIL exit {error.code}"
    except BaseException as error:
        ranks.log.write(f"=== {test}\n{traceback.format_exc()}\n")
        result = f"FAIL {type(error).__name__}: {str(error)[:300]}"
    if result.startswith("SKIP") and dist.is_initialized():
        dist.destroy_process_group()
    ranks.end(number, result)
    if result.startswith("FAIL"):
        ranks.leave()


def main():
    """Run the suite and compare it with the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mpiexec", default=beside("mpiexec"), help="the launcher")
    parser.add_argument("--output", type=absolute, required=True, help="a folder; results that are there are kept")
    parser.add_argument("--backend", default="mpistrat", help="the backend that tests of gloo run on")
    parser.add_argument("--match", default=".", help="tests whose names have this regular expression")
    parser.add_argument("--write", action="store_true", help="write the list instead of comparing with it")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        run_tests(arguments.output, arguments.backend)
        return
    command = [*arguments.mpiexec.split(), "-n", str(arguments.ranks), sys.executable, "-m", __spec__.name]
    command += ["--job", "--output", str(arguments.output), "--backend", arguments.backend]
    results = drive(arguments.output, [name for name in names() if re.search(arguments.match, name)], command)
    key = f"{arguments.backend} on {arguments.ranks} ranks"
    sys.exit(bool(judge(results, EXPECTED, key, arguments.write, arguments.match == ".")))


if __name__ == "__main__":
    main()

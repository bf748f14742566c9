"""PyTorch's own tests of torch.distributed on this package's backend, next to a list of expected results.

    python -m tests.peers.torch_distributed --ranks 2 --output FOLDER [--backend gloo] [--match all_reduce] [--write]

The tests are those of torch.testing._internal.distributed.distributed_test, which need `pip install expecttest`. Those of "gloo"
run on the backend "mpistrat", or on gloo itself with `--backend gloo`. One job runs the tests until one fails, hangs or ends a
rank; the next job starts after that one. Ranks agree through files, not through the backend under test.

Two changes of the suite: its lists of backends whose profiler events are compared are emptied, for Python cannot emit
asynchronous events, and on four ranks or more no test is skipped because of few ranks.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import faulthandler
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import traceback
import unittest
from pathlib import Path

EXPECTED = Path(__file__).with_suffix(".json")
LIMIT = 60.0  # seconds of a test


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


class Ranks:
    """What the ranks of a job tell each other through files."""

    def __init__(self, folder, rank, size):
        self.folder, self.rank, self.size = Path(folder), rank, size

    def put(self, name, text):
        """Publish a text of this rank."""
        path = self.folder / f"{name}.{self.rank}"
        path.with_name(f"{path.name}~").write_text(text)
        path.with_name(f"{path.name}~").rename(path)

    def all(self, name, seconds):
        """Return the texts of all ranks, None where they do not come in time."""
        paths, end = [self.folder / f"{name}.{rank}" for rank in range(self.size)], time.monotonic() + seconds
        while time.monotonic() < end:
            if all(path.exists() for path in paths):
                return [path.read_text() for path in paths]
            time.sleep(0.01)
        return None


def run_tests(folder, backend):
    """Run the tests of FOLDER/todo.json, on every rank of a job."""
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    ranks, scratch = Ranks(folder, rank, size), Path(folder) / "scratch"
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(size), TEMP_DIR=str(scratch), MASTER_ADDR="localhost")
    suite, exits = prepared(backend, size)
    with open(Path(folder) / f"log.{rank}", "a") as log:
        for test in json.loads((Path(folder) / "todo.json").read_text()):
            if not run_test(suite, test, ranks, scratch, exits, log):
                log.flush()
                os._exit(3)


def prepared(backend, size):
    """Return the suite as a class, and the names of its exit codes."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.testing._internal import common_distributed

    if backend != "gloo":
        from tests.harness.torch_groups import register

        register()
        helper, get_backend = distributed_c10d._new_process_group_helper, distributed_c10d.get_backend

        def make(group_size, group_rank, ranks, name, *args, **kwargs):
            name = backend if str(name) == "gloo" else name
            return helper(group_size, group_rank, ranks, dist.Backend(str(name)), *args, **kwargs)

        def shown(group=None):
            found = get_backend(group)
            return "gloo" if found == backend else found

        distributed_c10d._new_process_group_helper = make
        distributed_c10d.get_backend = dist.get_backend = shown
    if size >= 4:
        common_distributed.skip_if_small_worldsize = lambda function: function
    for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        common_distributed.DistTestCases.backend_feature[feature].add("gloo")
    from torch.testing._internal.common_utils import TestCase
    from torch.testing._internal.distributed import distributed_test

    if backend != "gloo":
        distributed_test.PROFILING_SUPPORTED_BACKENDS.clear()
        distributed_test.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.clear()
    suite = type(
        "Suite", (distributed_test.DistributedTest._DistTestBase, TestCase), {"world_size": property(lambda self: size)}
    )
    return suite, {skip.exit_code: name for name, skip in common_distributed.TEST_SKIPS.items()}


def run_test(suite, test, ranks, scratch, exits, log):
    """Run one test on all ranks. Return whether the next one may run in the same job."""
    import torch.distributed as dist
    from torch.testing._internal.distributed import distributed_test

    def hang():
        ranks.put(test, "HANG")
        faulthandler.dump_traceback(log)
        log.flush()
        os._exit(3)

    timer, result = threading.Timer(LIMIT, hang), "PASS"
    timer.daemon = True
    timer.start()
    try:
        if ranks.rank == 0:
            shutil.rmtree(scratch, ignore_errors=True)
            for folder in ("barrier", "test_dir", "init_dir"):
                (scratch / folder).mkdir(parents=True)
        ranks.put(f"{test}.start", "")
        ranks.all(f"{test}.start", LIMIT)
        case = suite(test)
        case.rank, case.file_name, case.skip_return_code_checks = ranks.rank, str(scratch / "store"), []
        method = getattr(suite, test)
        if getattr(method, "__unittest_skip__", False):
            raise unittest.SkipTest(method.__unittest_skip_why__)
        limit = datetime.timedelta(seconds=distributed_test.CUSTOM_PG_TIMEOUT.get(test, 30))
        dist.init_process_group(
            "gloo", init_method=f"file://{case.file_name}", world_size=ranks.size, rank=ranks.rank, timeout=limit
        )
        distributed_test.Barrier.barrier_id = 0
        distributed_test.Barrier.sync(timeout=LIMIT)
        case.setUp()
        getattr(case, test)()
        case.tearDown()
        ranks.put(f"{test}.ran", "")
        ranks.all(f"{test}.ran", LIMIT)
        dist.destroy_process_group()
    except unittest.SkipTest as error:
        result = f"SKIP {error}"
    except SystemExit as error:
        result = f"SKIP {exits[error.code]}" if error.code in exits else f"FAIL exit {error.code}"
    except BaseException as error:
        log.write(f"=== {test}\n{traceback.format_exc()}\n")
        result = f"FAIL {type(error).__name__}: {str(error)[:300]}"
    timer.cancel()
    if result.startswith("SKIP") and dist.is_initialized():
        dist.destroy_process_group()
    ranks.put(test, result)
    found = ranks.all(test, 5.0 if result != "PASS" else LIMIT)
    return found is not None and not any(text.startswith(("FAIL", "HANG")) for text in found)


# the driver


def drive(arguments):
    """Start jobs until every test has a result. Return the results by test."""
    folder = Path(arguments.output)
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "results.json"
    results = json.loads(kept.read_text()) if kept.exists() else {}
    todo = [name for name in names() if re.search(arguments.match, name) and name not in results]
    while todo:
        for path in folder.glob("test_*"):
            path.unlink()
        (folder / "todo.json").write_text(json.dumps(todo))
        command = [*arguments.mpiexec.split(), "-n", str(arguments.ranks), sys.executable, "-m", __spec__.name]
        command += ["--job", "--output", str(folder), "--backend", arguments.backend]
        with open(folder / "out", "a") as out:
            status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
        found = collect(folder, todo, arguments.ranks) or {todo[0]: f"FAIL the job ended with {status} before the test"}
        results.update(found)
        todo = [name for name in todo if name not in found]
        kept.write_text(json.dumps(results, indent=0))
    return results


def collect(folder, todo, ranks):
    """Return the results of the tests that a job has run."""
    found = {}
    for test in todo:
        paths = [folder / f"{test}.{rank}" for rank in range(ranks)]
        texts = [path.read_text() if path.exists() else None for path in paths]
        if not any(texts):
            break
        bad = [
            f"rank {rank}: {text}"
            for rank, text in enumerate(texts)
            if text is None or text.startswith(("FAIL", "HANG"))
        ]
        skips = [text for text in texts if text is not None and text.startswith("SKIP")]
        found[test] = f"FAIL {'; '.join(bad)}" if bad else skips[0] if skips else "PASS"
    return found


def main():
    """Run the suite and compare it with the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mpiexec", default=str(Path(sys.executable).with_name("mpiexec")), help="the launcher")
    parser.add_argument("--output", required=True, help="a folder; results that are there are kept")
    parser.add_argument("--backend", default="mpistrat", help="the backend that tests of gloo run on")
    parser.add_argument("--match", default=".", help="tests whose names have this regular expression")
    parser.add_argument("--write", action="store_true", help="write the list instead of comparing with it")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        run_tests(arguments.output, arguments.backend)
        return
    results = drive(arguments)
    kinds = {name: text.split()[0] for name, text in sorted(results.items())}
    print(dict(collections.Counter(kinds.values())))
    key = f"{arguments.backend} on {arguments.ranks} ranks"
    lists = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    if arguments.write:
        groups = {kind: [name for name, found in kinds.items() if found == kind] for kind in ("PASS", "FAIL", "SKIP")}
        EXPECTED.write_text(json.dumps({**lists, key: groups}, indent=1) + "\n")
        return
    expected = {name: kind for kind, tests in lists.get(key, {}).items() for name in tests}
    wrong = [name for name, kind in kinds.items() if expected.get(name) != kind]
    for name in wrong:
        print(f"{name}: expected {expected.get(name)}, got {results[name]}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

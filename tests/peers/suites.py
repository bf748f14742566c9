"""Tests that others wrote for torch.distributed, on gloo and on this package's backend, next to a list of expected results.

    python -m tests.peers.suites SUITE --tests FOLDER --ranks 2 --output FOLDER [--write]

With `--write` all tests of the suite run on gloo, started by torchrun. Those that pass there with a process group, or a number of
them drawn by `random.Random(0)`, run on this package's, started by `python -m mpistrat.torch.run`, and the list gets their
results. Without it the tests of the list run on this package's alone, and the results are compared.

A test runs on all ranks of a job, and its groups are destroyed after it. Changes of the suites are those of `prepare_…` below.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import types
import unittest
from pathlib import Path

import pytest

from .jobs import KINDS, Ranks, absolute, drive, judge, let_gloo_be, pytest_words

EXPECTED = Path(__file__).with_suffix(".json")
OURS = {"mpi", "mpistrat"}
GROUPS = {"gloo", *OURS}
SEED = 1234  # the one of test/run_test.py of PyTorch


# the suites


class Nothing:
    """The parts of a suite that needs none of its own."""

    @staticmethod
    def copied(tests, folder):
        """Return the folder of tests that run: this one, or a changed copy in FOLDER."""
        return tests

    @staticmethod
    def prepare(ranks):
        """Change the suite before its tests are imported."""

    @staticmethod
    def after():
        """Remove what a test has left in this process."""

    @staticmethod
    def wants(item):
        """Return whether a test can be one of the suite."""
        return True


class Accelerate(Nothing):
    """Accelerate's scripts for several processes, whose functions are the tests. They come with its wheel.

    It takes "mpi" by itself.
    """

    @staticmethod
    def prepare(ranks):
        os.environ["ACCELERATE_USE_CPU"] = "yes"

    @staticmethod
    def after():
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    @pytest.fixture(autouse=True)
    def accelerator(self):
        from accelerate import Accelerator

        return Accelerator()

    @pytest.fixture
    def state(self):
        from accelerate import PartialState

        return PartialState()


class Lightning(Nothing):
    """Lightning's tests of its strategies. Those that start processes take the ranks of the job in their place."""

    @staticmethod
    def prepare(ranks):
        import lightning.fabric.strategies
        import lightning.fabric.utilities.testing as testing
        import lightning.pytorch.strategies

        reasons = testing._runif_reasons
        testing._runif_reasons = lambda **conditions: reasons(**{**conditions, "standalone": False})
        for module in (lightning.fabric.strategies, lightning.pytorch.strategies):
            _with(module.DDPStrategy, start_method="popen")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self):
        """Destroy groups before the suite looks for threads that a test has left. Gloo's are no threads of Python."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


def _with(cls, **values):
    """Let a class be made with arguments of these values."""
    make = cls.__init__

    @functools.wraps(make)
    def made(self, *args, **kwargs):
        make(self, *args, **{**kwargs, **values})

    cls.__init__ = made


class Torch(Nothing):
    """PyTorch's test files. Test cases that start processes take the ranks of the job in their place, and CPUs that of GPUs."""

    @staticmethod
    def copied(tests, folder):
        copy = folder / "tests"
        if not copy.exists():
            shutil.copytree(tests, copy)
            for path in copy.rglob("*.py"):
                text = re.sub(r"""f?(["'])cuda(:[^"']*)?\1""", r"\1cpu\1", path.read_text())
                path.write_text(re.sub(r"""(["'])(cpu:gloo,cuda:)?nccl\1""", r"\1gloo\1", text))
        return copy

    @staticmethod
    def use_cpus(size):
        """Let what PyTorch's tests ask of GPUs be true of as many CPUs."""
        import torch
        from torch.testing._internal import common_cuda, common_distributed, common_fsdp

        def skip(count, **options):
            return unittest.skipIf(count > size, f"needs {count} ranks")

        common_cuda.TEST_CUDA, common_cuda.TEST_MULTIGPU, common_distributed.skip_if_lt_x_gpu = True, size > 1, skip
        common_distributed.requires_nccl = lambda: lambda test: test
        common_fsdp.test_compiled_fsdp = lambda **options: lambda test: test  # newer versions do not have it
        torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
        torch.cuda.device_count, torch.accelerator.device_count = lambda: size, lambda: size
        torch.cuda.current_device = lambda: torch.device("cpu")
        for name in ("set_device", "_sleep", "synchronize"):
            setattr(torch.cuda, name, lambda *args: None)  # one for each: torch.compile looks for it by its identity
        torch.cuda.manual_seed = torch.manual_seed
        _with(common_fsdp.FSDP, device_id=torch.device("cpu"))
        _with(torch.nn.parallel.DistributedDataParallel, device_ids=None, output_device=None)

    @staticmethod
    def prepare(ranks):
        from torch.testing._internal import common_distributed, common_fsdp, common_utils
        from torch.testing._internal.distributed._tensor import common_dtensor

        Torch.use_cpus(ranks.size)
        common_dtensor.NUM_DEVICES = common_fsdp.DEVICE_COUNT = ranks.size
        one = common_distributed.MultiProcessTestCase
        store = ranks.folder / "store"

        def check(count):
            if int(count) != ranks.size:
                raise unittest.SkipTest(f"needs {count} ranks")

        def spawn(self):
            check(self.world_size)
            self.rank, self.file_name = ranks.rank, f"{store}.{os.environ['MASTER_PORT']}"

        def start(cls):
            kind = inspect.getattr_static(cls, "device_type")
            kind = kind.fget(cls) if isinstance(kind, property) else cls.device_type
            cls.world_size = cls._get_world_size(kind() if callable(kind) else kind)
            check(cls.world_size)
            cls.rank, cls.task_queues = ranks.rank, []
            cls._init_pg(ranks.rank, ranks.size, f"{store}.{os.environ['MASTER_PORT']}")

        def on_ranks(work):
            """Let a test do WORK, and raise SkipTest where it ends a process in order to be skipped."""

            def run(self, function):
                def here(self):
                    self.rank = ranks.rank
                    common_utils.set_rng_seed(SEED)
                    try:
                        work(self, function)
                    except SystemExit as error:
                        names = {skip.exit_code: name for name, skip in common_distributed.TEST_SKIPS.items()}
                        raise unittest.SkipTest(names[error.code]) if error.code in names else error from None

                return types.MethodType(functools.wraps(function)(here), self)

            return run

        def in_process(self, function):
            """Do what a process of a test case does, which for FSDP makes the group first."""
            type(self)._run(ranks.rank, self._testMethodName, self.file_name, None, fake_pg=False)

        one._spawn_processes = one._start_processes = one._fork_processes = spawn
        one.run_test = lambda self, name, pipe: getattr(type(self), name)(self)
        one.join_or_run = on_ranks(in_process)
        several = getattr(common_distributed, "MultiProcContinuousTest", None)
        if several is not None:
            common_distributed.MultiProcContinousTest, several.world_size = several, ranks.size  # the name in 2.6
            several._worker_run_main_wait = on_ranks(lambda self, function: function())
            several._ensure_processes_spawned = classmethod(start)

    @staticmethod
    def after():
        import torch.distributed as dist

        dist.set_debug_level(dist.DebugLevel.OFF)

    @staticmethod
    def wants(item):
        """Return whether a test can make a group of ranks: threads are no ranks."""
        from torch.testing._internal.common_distributed import MultiThreadedTestCase

        return not issubclass(getattr(item, "cls", None) or object, MultiThreadedTestCase)


class Transformers(Nothing):
    """Transformers' tests of parallel models, which it makes from small configurations. Ranks take the place of processes.

    Its other tests of several ranks, `trainer/distributed`, need several GPUs. Those of `tensor_parallel` make no group.
    """

    @staticmethod
    def pytest_configure(config):
        """Let the suite's package, whose name is that of this one, be a part of this one."""
        import tests

        tests.__path__.insert(0, str(config.rootpath))

    @staticmethod
    def prepare(ranks):
        import torch
        import torch.distributed as dist

        os.environ["HF_HUB_OFFLINE"] = "1"
        init = dist.init_process_group

        def spawn(function, args=(), nprocs=1, **options):
            """Run what processes run on this rank, with one port. Rank 0 writes a file of results for all."""
            if nprocs != ranks.size:
                raise unittest.SkipTest(f"needs {nprocs} ranks")
            port = os.environ["MASTER_PORT"]

            def join(*words, **more):
                os.environ["MASTER_PORT"] = port
                return init(*words, **more)

            dist.init_process_group = join
            try:
                function(ranks.rank, *args)
            finally:
                dist.init_process_group = init
            results = Path(str(args[-1]))
            if results.suffix == ".json":
                ranks.put(f"results.{port}", results.read_text() if ranks.rank == 0 else "")
                results.write_text(ranks.all(f"results.{port}")[0])

        torch.multiprocessing.spawn = spawn

    @staticmethod
    def after():
        import torch

        torch.use_deterministic_algorithms(False)


@dataclasses.dataclass(frozen=True)
class Suite:
    """Files of tests.

    Attributes:
        parts: an object with `prepare`, `after` and fixtures.
        files: patterns of files in the folder of tests.
        functions: pytest's patterns of functions that are tests.
        source: a regular expression that the source of a test, or its name, must have.
        drawn: how many of the tests that pass on gloo are run; None: all.
        options: more options of pytest, with {tests} for the folder.
    """

    parts: Nothing
    files: tuple[str, ...]
    functions: str = "test_*"
    source: str = ""
    drawn: int | None = None
    options: tuple[str, ...] = ()


# Those for which Transformers enables its tests of tensor, expert and data parallel models
MODELS = "cohere2_moe deepseek_v4 glm4_moe glm4_moe_lite glm_moe_dsa llama mistral mixtral olmoe qwen2 qwen2_moe qwen3 qwen3_moe"

SUITES = {
    "accelerate": Suite(
        Accelerate(),
        ("test_script.py", "test_sync.py", "test_ops.py", "test_distributed_data_loop.py", "test_ddp_comm_hook.py"),
        functions="test_* *_check check_seedable_* main",
        drawn=20,
    ),
    "lightning": Suite(
        Lightning(),
        ("tests_fabric/**/test_*.py", "tests_pytorch/**/test_*.py"),
        source=r"(?s)^(?!.*(connector|deepspeed|xla|cuda_gpus|spike|registry)).*(ddp|DDP|devices=2)",
        drawn=20,
    ),
    "torch": Suite(
        Torch(),
        (
            "_composable/**/test_*.py", "*tensor/test_*.py", "*tensor/debug/test_comm_mode*.py", "tensor/parallel/test_*.py",
            "checkpoint/**/test_*.py", "fsdp/test_*.py", "pipelining/test_*.py",
        ),
        # Files in two folders have the same names; those of pipelining import their neighbours.
        options=("--import-mode=importlib", "-o", "pythonpath={tests}/pipelining"),
    ),
    "transformers": Suite(
        Transformers(),
        tuple(f"models/{name}/test_modeling_*.py" for name in MODELS.split()),
        source=r"::test_(tp|ep|fsdp2)_",
        drawn=20,
        options=("-o", "pythonpath={tests}/../utils"),
    ),
}  # fmt: skip


# a rank of a job


class OnRanks:
    """A plugin of pytest that runs the tests of a job's todo.json on all ranks.

    Args:
        suite: the suite.
        ranks: the ranks of the job.
        used: the set of the names of backends that groups were made of.
        backend: the backend under test.
    """

    def __init__(self, suite: Suite, ranks: Ranks, used: set[str], backend: str) -> None:
        self.suite, self.ranks, self.used, self.backend = suite, ranks, used, backend
        names = json.loads((ranks.folder / "todo.json").read_text())
        self.numbers = {name: number for number, name in enumerate(names)}
        self.result = "PASS"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        """Keep the tests of the job, and fail those that are not there."""
        items[:] = [item for item in items if item.nodeid in self.numbers]
        for name in self.numbers.keys() - {item.nodeid for item in items}:
            self.ranks.put(f"{self.numbers[name]}.start")
            self.ranks.put(self.numbers[name], "FAIL not collected")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        """Run a test on all ranks, from the same random state whatever ran before."""
        import torch
        import torch.distributed as dist

        number, self.result = self.numbers[item.nodeid], "PASS"
        self.used.clear()
        torch.manual_seed(0)
        ports = self.ranks.begin(number, str(free_port()))
        if ports is None:
            self.ranks.leave()
        # Groups of gloo, and those of programs that give all four variables, find each other here.
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=ports[0], TORCHELASTIC_USE_AGENT_STORE="False")
        if self.backend != "gloo":
            del os.environ["MASTER_ADDR"]
        done = yield
        try:
            if dist.is_initialized():
                dist.destroy_process_group()
            self.suite.parts.after()
        except Exception as error:
            self.result = f"FAIL after the test: {error!r}"
        if self.result != "SKIP" and not self.used & GROUPS:
            self.result = f"LOCAL {self.result}"
        self.ranks.end(number, self.result)
        return done

    def pytest_runtest_logreport(self, report):
        """Note a result."""
        if report.failed:
            text = str(getattr(getattr(report.longrepr, "reprcrash", None), "message", report.longrepr))
            self.result = f"FAIL {' '.join(text.split())[:600]}"
            self.ranks.log.write(f"=== {report.nodeid}\n{report.longreprtext}\n")
            self.ranks.log.flush()
        elif report.skipped and self.result == "PASS":
            self.result = "SKIP"


class Collected:
    """A plugin of pytest that writes the names of a suite's tests to a file."""

    def __init__(self, suite: Suite, path: Path) -> None:
        self.suite, self.path = suite, path

    def pytest_collection_finish(self, session):
        """Write them."""
        self.path.write_text(json.dumps([item.nodeid for item in session.items if self.wants(item)]))

    def wants(self, item):
        """Return whether a test is of the suite."""
        if not self.suite.parts.wants(item):
            return False
        try:
            source = inspect.getsource(getattr(item, "function", None))
        except (OSError, TypeError):
            source = ""
        return re.search(self.suite.source, item.nodeid + source) is not None


def free_port():
    """Return a port that was free a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run_pytest(suite, tests, plugin, files, *words):
    """Run pytest in this process."""
    options = [*pytest_words(tests), "-rs", "-o", f"python_functions={suite.functions}", "--confcutdir", str(tests)]
    options += [option.format(tests=tests) for option in suite.options]
    return pytest.main([*options, *words, *map(str, files)], plugins=[plugin, suite.parts])


def run_job(suite, tests, folder, backend):
    """Run the tests of FOLDER/todo.json, on every rank of a job."""
    ranks = Ranks(folder, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    used = let_gloo_be(backend)
    if backend != "gloo":  # the first group starts a watchdog of this process: no test's thread
        import torch.distributed as dist

        dist.init_process_group(backend)
        dist.destroy_process_group()
    suite.parts.prepare(ranks)
    plugin = OnRanks(suite, ranks, used, backend)
    files = dict.fromkeys(tests / name.partition("::")[0] for name in plugin.numbers)
    run_pytest(
        suite, tests, plugin, [file for file in files if file.exists()], "--basetemp", f"{folder}/tmp.{ranks.rank}"
    )


# the driver


def main():
    """Run a suite and compare it with the list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--tests", type=absolute, required=True, help="the folder of its tests")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--output", type=absolute, required=True, help="a folder; results that are there are kept")
    parser.add_argument("--match", default=".", help="tests whose names have this regular expression")
    parser.add_argument("--write", action="store_true", help="write the list instead of comparing with it")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    suite, tests, output = SUITES[arguments.suite], arguments.tests, arguments.output
    output.mkdir(parents=True, exist_ok=True)
    if not arguments.job and not arguments.collect:
        tests = suite.parts.copied(tests, output)
    # Processes that a test case forks have one seed, so a name of a test means the same element of a set.
    os.environ["PYTHONHASHSEED"] = "0"
    words = ["-m", __spec__.name, arguments.suite, "--tests", str(tests)]

    def results_on(backend, names):
        start = "torch.distributed.run" if backend == "gloo" else "mpistrat.torch.run"
        command = [sys.executable, "-m", start, "--standalone", "--nproc-per-node", str(arguments.ranks)]
        return drive(output / backend, names, [*command, *words, "--job", backend, "--output", str(output / backend)])

    if arguments.job:
        run_job(suite, tests, output, arguments.job)
        return
    if arguments.collect:
        suite.parts.prepare(Ranks(output, 0, arguments.ranks))
        files = dict.fromkeys(file for pattern in suite.files for file in sorted(tests.glob(pattern)))
        run_pytest(
            suite,
            tests,
            Collected(suite, output / "tests.json"),
            files,
            "--collect-only",
            "--continue-on-collection-errors",
        )
        return
    key = f"{arguments.suite} on {arguments.ranks} ranks"
    if arguments.write:
        subprocess.run(
            [sys.executable, *words, "--collect", "--output", str(output)], stdout=subprocess.DEVNULL, check=False
        )
        names = [name for name in json.loads((output / "tests.json").read_text()) if re.search(arguments.match, name)]
        passed = sorted(name for name, text in results_on("gloo", names).items() if text == "PASS")
        print(f"{key}: {len(names)} tests, of which {len(passed)} pass on gloo with a group of the ranks")
        if suite.drawn is not None:
            passed = sorted(random.Random(0).sample(passed, min(suite.drawn, len(passed))))
    else:
        kinds = json.loads(EXPECTED.read_text())[key] if EXPECTED.exists() else {}
        passed = [name for kind in KINDS for name in kinds.get(kind, ())]
        passed = [name for name in passed if re.search(arguments.match, name)]
    results = results_on("mpistrat", passed)
    sys.exit(bool(judge(results, EXPECTED, key, arguments.write, arguments.match == ".")))


if __name__ == "__main__":
    main()

"""The pytest plugin that runs tests on MPI ranks: `@pytest.mark.ranks(1, 2, 3)` on a test, one `pytest` command for all.

The process that the user starts never starts MPI. It starts one `mpiexec` for each batch of tests of a layout and shows
their results as its own. docs/developing.md describes its markers and fixtures.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.launch import in_place, launcher_reports, tiers
from tests.launch.durations import Stopwatch
from tests.launch.launcher import MpiEnv, Result, launch, mpi_env, remove_dead_shared_memory
from tests.launch.launcher_batch import Batch, Beside, Layout

BATCH_TESTS = 450  # a new mpiexec after so many tests: a leak of MPI objects stays small
ON_RANKS = json.loads(os.environ.get("MPISTRAT_TEST_MPIS", "null"))  # in a rank: the names and vendors of all MPIs
ON_LAYOUT = os.environ.get("MPISTRAT_TEST_LAYOUT", "")  # in a rank: that of its batch
SINGLE_TIMEOUT = 180  # seconds for a test outside the ranks

# Else each of hundreds of processes compiles the package, the tests and pytest's assertions in them by itself.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("ranks", "tests on MPI ranks")
    group.addoption(
        "--mpi-env", action="append", default=[], metavar="NAME=PYTHON",
        help="test under the MPI of this Python, too (default: the one that runs pytest)",
    )  # fmt: skip
    group.addoption("--mpi-only", action="append", default=[], metavar="NAME", help="leave the other MPIs out")
    tiers.add_options(group)
    parser.addini("ranks_timeout", "seconds that a test on ranks may take", default="60")


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "ranks(*n, mpis=None, timeout=None): run on n MPI ranks, once for each n and MPI",
        "hosts(n, ranks_per_host=2, mpis=None, timeout=None): run over n isolated hosts",
        "gpu: needs a CUDA device that CuPy finds",
        "big(gib=6): needs so much free memory in /dev/shm",
    ):
        config.addinivalue_line("markers", line)
    config.stash[ENVS] = _Envs(config)
    config.stash[BATCHES] = {}
    if ON_RANKS is None and in_place.wanted(config):
        config.stash[JOB] = in_place.InPlace(config)
        config.pluginmanager.register(config.stash[JOB])
    elif ON_RANKS is None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # `timeout` and CI: end as by Ctrl-C, with the ranks
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job; tests use Ctrl-C
            signal.signal(signal.SIGINT, signal.default_int_handler)
        config.pluginmanager.register(Stopwatch(config))
    _derandomise_hypothesis(config.option.tier)


class _Envs:
    """The MPIs of this run, found when the first test asks."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.why_none = ""

    @functools.cached_property
    def all(self) -> dict[str, MpiEnv]:
        option = self._config.option
        named = dict(word.partition("=")[::2] for word in option.mpi_env)
        try:
            found = [mpi_env(python, name) for name, python in named.items()] or [mpi_env(sys.executable)]
        except LookupError as error:
            if named:
                raise pytest.UsageError(f"--mpi-env: {error}") from None
            self.why_none, found = str(error), []
        wanted = {env.name: env for env in found if not option.mpi_only or env.name in option.mpi_only}
        if found and not wanted:
            raise pytest.UsageError(f"--mpi-only {option.mpi_only}: there is only {[env.name for env in found]}")
        return wanted

    @property
    def vendors(self) -> dict[str, str]:
        if job := self._config.stash.get(JOB, None):
            return {_short(job.vendor): job.vendor}
        return ON_RANKS if ON_RANKS is not None else {name: env.vendor for name, env in self.all.items()}


ENVS = pytest.StashKey[_Envs]()
BATCHES = pytest.StashKey[dict[str, Batch]]()
LEFT_OUT = pytest.StashKey[str]()
BESIDE = pytest.StashKey[set[str]]()  # node ids of tests that a second process runs
JOB = pytest.StashKey[in_place.InPlace]()  # there where this process is a rank of a job that the user started


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = [mark for mark in metafunc.definition.iter_markers() if mark.name in ("ranks", "hosts")]
    envs = metafunc.config.stash[ENVS]
    if marks:
        vendors = envs.vendors or {"no-mpi": ""}
        layouts = [
            layout
            for name, vendor in vendors.items()
            for mark in marks
            for layout in _layouts(name, vendor, mark)
            if ON_LAYOUT in ("", str(layout))
        ]
        metafunc.fixturenames.append("_layout")
        metafunc.parametrize("_layout", layouts, ids=str)
    elif "mpi" in metafunc.fixturenames:
        found = [] if ON_RANKS is not None or JOB in metafunc.config.stash else list(envs.all.values())
        metafunc.parametrize("mpi", found or [None], ids=[env.name for env in found] or ["no-mpi"], indirect=True)


def _layouts(name: str, vendor: str, mark: pytest.Mark) -> list[Layout]:
    """The layouts that one marker asks for under one MPI."""
    only = mark.kwargs.get("mpis")
    if vendor and only and not {name, _short(vendor)} & set(only):
        return []
    if mark.name == "hosts":
        return [Layout(name, mark.args[0] * mark.kwargs.get("ranks_per_host", 2), mark.args[0])]
    return [Layout(name, n) for n in mark.args]


def _short(vendor: str) -> str:
    return vendor.lower().replace(" ", "")


def _layout(item: pytest.Item) -> Layout | None:
    return item.callspec.params.get("_layout") if hasattr(item, "callspec") else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests without ranks first, file by file; then the layouts one after the other, in batches of whole files."""
    if config.option.tier != "all":
        for item in items:
            tiers.cap_examples(item)
    if ON_RANKS is not None or JOB in config.stash:
        _limit_in_place(config, items)
        return
    choice = tiers.choose(config, items)
    if choice.dropped:
        config.hook.pytest_deselected(items=choice.dropped)
    config.stash[LEFT_OUT] = choice.words
    beside = tiers.share(choice.kept) if config.option.beside and config.option.capture != "no" else set()
    groups: dict[Layout | str | None, list[pytest.Item]] = {None: []}
    for item in choice.kept:
        if item.nodeid not in beside:
            groups.setdefault(_layout(item), []).append(item)
    groups["beside"] = [item for item in choice.kept if item.nodeid in beside]
    for item in groups[None] + groups["beside"]:
        if item.get_closest_marker("timeout") is None and config.pluginmanager.hasplugin("timeout"):
            item.add_marker(pytest.mark.timeout(SINGLE_TIMEOUT))
    items[:] = [item for group in groups.values() for item in group]
    for layout, group in groups.items():
        if isinstance(layout, Layout):
            _make_batches(config, layout, group)
    config.stash[BESIDE] = beside


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the second process once it is known what runs: --last-failed has left out the others by now."""
    config = session.config
    mine = [item for item in session.items if item.nodeid in config.stash.get(BESIDE, ())]
    if mine and not config.option.collectonly:
        batch = Beside(mine, {item.nodeid: _limit_alone(item) for item in mine})
        config.stash[BATCHES].update((item.nodeid, batch) for item in mine)
        batch.begin()


def _limit_alone(item: pytest.Item) -> float:
    """When the second process is taken to hang: later than pytest-timeout in it."""
    mark = item.get_closest_marker("timeout")
    return 60 + float([*mark.args, *mark.kwargs.values(), SINGLE_TIMEOUT][0] if mark else SINGLE_TIMEOUT)


def _limit_in_place(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a job of the user's nobody watches the ranks: a test that hangs ends its process, with all stacks, and so the job."""
    if JOB in config.stash and config.pluginmanager.hasplugin("timeout"):
        for item in items:
            item.add_marker(pytest.mark.timeout(_limit(item), method="thread"))


def _make_batches(config: pytest.Config, layout: Layout, items: list[pytest.Item]) -> None:
    start = 0
    for end in range(1, len(items) + 1):
        last = end == len(items)
        if last or (end - start >= BATCH_TESTS and items[end].path != items[end - 1].path):
            batch = Batch(layout, items[start:end], {item.nodeid: _limit(item) for item in items[start:end]})
            config.stash[BATCHES].update((item.nodeid, batch) for item in items[start:end])
            start = end


def _limit(item: pytest.Item) -> float:
    limits = [
        mark.kwargs["timeout"]
        for name in ("ranks", "hosts")
        for mark in item.iter_markers(name)
        if "timeout" in mark.kwargs
    ]
    return float(max(limits, default=item.config.getini("ranks_timeout")))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    layout, beside = _layout(item), item.nodeid in item.config.stash.get(BESIDE, ())
    if not beside and (layout is None or ON_RANKS is not None or JOB in item.config.stash):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports_beside(item) if layout is None else _reports(item, layout):
        report.elsewhere = True
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _reports_beside(item: pytest.Item) -> list[pytest.TestReport]:
    return launcher_reports.merged(item, item.config.stash[BATCHES][item.nodeid].outcome(item.nodeid))


def _reports(item: pytest.Item, layout: Layout) -> list[pytest.TestReport]:
    envs = item.config.stash[ENVS]
    if layout.mpi not in envs.all:
        return launcher_reports.skipped(item, envs.why_none)
    hosts = None
    if layout.hosts:
        from tests.launch.hosts import Hosts, why_no_hosts

        if reason := why_no_hosts():
            return launcher_reports.skipped(item, reason)
        try:
            hosts = Hosts.shared(item.config, layout.hosts)
        except RuntimeError as error:
            return launcher_reports.failed(item, f"the hosts did not start: {error}")
    outcome = item.config.stash[BATCHES][item.nodeid].outcome(item.nodeid, envs.all[layout.mpi], hosts, envs.vendors)
    return launcher_reports.merged(item, outcome)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session):
    """The last line of a run in a tier says what was left out, below pytest's own."""
    result = yield
    if words := session.config.stash.get(LEFT_OUT, ""):
        terminal = session.config.pluginmanager.getplugin("terminalreporter")
        terminal.write_line(f"{words}: make test-all runs everything")
    return result


def pytest_unconfigure(config: pytest.Config) -> None:
    for batch in config.stash.get(BATCHES, {}).values():
        batch.close()
    if ON_RANKS is None and JOB not in config.stash:
        remove_dead_shared_memory()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := _why_no_gpu()):
        pytest.skip(reason)
    if big := item.get_closest_marker("big"):
        need, free = big.kwargs.get("gib", 6), shutil.disk_usage("/dev/shm").free / 2**30
        if free < need:
            pytest.skip(f"/dev/shm has {free:.1f} GiB free, this test needs {need}")


@functools.cache
def _why_no_gpu() -> str:
    try:
        import cupy

        return "" if cupy.cuda.runtime.getDeviceCount() else "CuPy finds no CUDA device"
    except Exception as error:  # CuPy absent, or a driver that does not answer: either way there is no GPU to test on
        return f"no GPU: {str(error).splitlines()[0] if str(error) else type(error).__name__}"


@pytest.fixture
def mpi(request: pytest.FixtureRequest) -> MpiEnv:
    """An MPI to start programs with; the test runs once for each MPI of the run."""
    if request.param is None:
        pytest.skip(request.config.stash[ENVS].why_none)
    return request.param


@pytest.fixture
def mpi_run(mpi: MpiEnv):
    """`mpi_run(program, ranks, timeout=30, env=..., hosts=...)` is `launcher.launch` for a job that must end by itself.

    The test fails, and shows every rank's stacks, where the job does not end or leaves a process behind.
    """

    def run(program: Any, ranks: int, timeout: float = 30.0, **options: Any) -> Result:
        result = launch(program, ranks, mpi, timeout, **options)
        if result.timed_out:
            pytest.fail(f"the job did not end within {timeout:g} s\n{result}", pytrace=False)
        if result.leftover:
            pytest.fail(f"the job left processes behind: {result.leftover}\n{result}", pytrace=False)
        return result

    return run


@pytest.fixture(scope="session")
def hosts(pytestconfig: pytest.Config) -> Iterator[Any]:
    """Two isolated hosts, for `mpi_run(..., hosts=hosts)`."""
    from tests.launch.hosts import Hosts, why_no_hosts

    if reason := why_no_hosts():
        pytest.skip(reason)
    yield Hosts.shared(pytestconfig, 2)


@pytest.fixture(scope="session")
def slurm(pytestconfig: pytest.Config) -> Iterator[Any]:
    """A real SLURM over the two isolated hosts."""
    from tests.launch.slurm import Slurm, why_no_slurm

    if reason := why_no_slurm():
        pytest.skip(reason)
    yield Slurm.shared(pytestconfig)


@pytest.fixture
def slurm_mpi(slurm: Any, mpi: MpiEnv) -> MpiEnv:
    """An MPI whose ranks this SLURM's `srun` starts; the test runs once for each MPI of the run."""
    from tests.launch.slurm import mpi_type

    if mpi_type(mpi) == "pmix" and slurm.why_no_pmix:
        pytest.skip(slurm.why_no_pmix)
    return mpi


def _derandomise_hypothesis(tier: str) -> None:
    """Every rank must see the same examples; ranks share no database."""
    try:
        import hypothesis
    except ImportError:
        return
    repeatable = {"derandomize": True, "deadline": None, "database": None}
    hypothesis.settings.register_profile("ranks", **repeatable)
    hypothesis.settings.register_profile("quick", max_examples=tiers.QUICK_EXAMPLES, **repeatable)
    hypothesis.settings.load_profile("ranks" if tier == "all" else "quick")

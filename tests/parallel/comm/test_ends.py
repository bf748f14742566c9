"""How jobs end: by themselves, by a mistake of one rank, by a rank that leaves or never comes.

Each test starts a job of its own. It must end by itself, leave no process behind, and say what happened.
"""

import dataclasses
import os
import re
import shutil
import subprocess
import time

import pytest

from tests.launch.launcher import launch

START = """
import sys, threading, time
import numpy as np
from mpistrat.cluster.topology import Topology
from mpistrat.comm.process_group import ProcessGroup
from mpistrat.base.environment import Environment

topology = Topology.create()
group = ProcessGroup.create(topology, Environment(shared_memory={shared}, abort_after=2.0, warn_after=1.0))
last = topology.rank == topology.size - 1

def all_reduce(shape=(4, 3)):
    with group.collective("all_reduce", "w", np.float32, shape):
        if group.inter is not None:
            group.inter.Allreduce(np.ones(100), np.ones(100))

group.barrier()
all_reduce()
"""


@pytest.fixture
def shared_job(mpi_run):
    """`shared_job(program, ranks)` runs a program after START."""
    return lambda program, ranks=2, **options: mpi_run(START.format(shared=True) + program, ranks, **options)


@pytest.fixture(params=[True, False], ids=["shared", "private"])
def job(request, mpi_run):
    """`job(program, ranks)` runs a program after START, once with shared memory and once without."""

    def run(program, ranks=2, timeout=30.0, **options):
        result = mpi_run(START.format(shared=request.param) + program, ranks, timeout, **options)
        result.shared = request.param
        return result

    return run


# All ranks end normally: silence and status 0.


SILENT = {
    "skewed": "time.sleep(topology.rank * 1.5)",
    "finalized": "from mpi4py import MPI; time.sleep(topology.rank * 0.3); MPI.Finalize(); time.sleep(0.4)",
    "closed": "group.close(); topology.close()",
    "view": "view = group.node.allocate([9000] * group.node.size, 'test').segments[0][5:9]; group.close()",
    "child": """
import atexit, os
if os.fork() == 0:
    atexit._run_exitfuncs()  # a child's end is not the rank's
    os._exit(0)
os.wait()
time.sleep(topology.rank * 0.3)
all_reduce()
sys.exit(0)
""",
}


@pytest.mark.parametrize("how", ["skewed", "finalized"])
def test_normal_end_is_silent(job, how):
    result = job(SILENT[how])
    assert result.returncode == 0, result
    assert not result.stdout and not result.stderr.strip(), result


@pytest.mark.parametrize("how", ["closed", "view", "child"])
def test_normal_end_is_silent_with_shared_memory(shared_job, how):
    result = shared_job(SILENT[how])
    assert result.returncode == 0, result
    assert not result.stdout and not result.stderr.strip(), result


@pytest.mark.parametrize("act", ["sys.exit(3)", "raise SystemExit(3)", "quit(3)"])
def test_status_of_a_rank_that_nobody_waits_for(job, act):
    result = job(f"all_reduce()\nif last: {act}")
    assert result.returncode == 3, result
    assert "Error" not in "".join(result.err), result


# A rank leaves while others wait for it.


@pytest.mark.parametrize("act", ["sys.exit(3)", "raise SystemExit(3)", "quit(3)"])
def test_rank_that_leaves_early(job, act):
    result = job(f"if last: {act}\nall_reduce()", ranks=3)
    assert result.returncode == 3, result
    assert result.seconds < 15
    assert "PeerExitError" in result.stderr, result
    assert ("rank 2 left the program" if result.shared else "rank 2 has left the program") in result.stderr, result


def test_rank_that_leaves_after_it_dropped_its_group(job):
    result = job("import gc\nif last: del group; gc.collect()\nelse: all_reduce(); all_reduce()")
    assert result.returncode == 1 and "PeerExitError" in result.err[0], result


# A rank fails.


def test_exception_of_one_rank(job):
    result = job("if last: raise ValueError('mine')\nall_reduce()")
    assert result.returncode == 1, result
    assert "rank 1 of 2: the job ends on this exception\nTraceback" in result.err[1], result
    assert "ValueError: mine" in result.err[1], result


def test_exception_in_a_thread(shared_job):
    result = shared_job("if last: threading.Thread(target=lambda: 1 / 0, name='loader').start()\ntime.sleep(20)")
    assert result.returncode == 1, result
    assert "rank 1 of 2: the job ends on this exception in loader\nTraceback" in result.err[1], result
    assert "ZeroDivisionError" in result.err[1], result


def test_exit_of_a_thread_is_no_failure(shared_job):
    result = shared_job("t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join(); all_reduce()")
    assert result.returncode == 0, result


def test_exceptions_of_a_forked_child_are_its_own(shared_job):
    program = """
import os
child = os.fork()
if child == 0:
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    try:
        raise ValueError("mine")
    except ValueError:
        sys.excepthook(*sys.exc_info())  # what the interpreter does; its end would end MPI, too
    os._exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
all_reduce()
"""
    result = shared_job(program)
    assert result.returncode == 0, result
    assert "ZeroDivisionError" in result.stderr and "ValueError: mine" in result.stderr, result
    assert "the job ends" not in result.stderr, result


STATUS_OF_THEIR_OWN = {
    "text": "class Failed(Exception): status = 'FAILED'\nerror = Failed('refused')",
    "512": "class Failed(Exception): status = 512\nerror = Failed('refused')",
    "42": "class Failed(Exception): status = 42\nerror = Failed('refused')",
    "404": "import urllib.error; error = urllib.error.HTTPError('http://data', 404, 'refused', {}, None)",
    "raises": "class Failed(Exception):\n    def __getattr__(self, name): raise OSError(name)\nerror = Failed('refused')",
}


@pytest.mark.parametrize("program", STATUS_OF_THEIR_OWN.values(), ids=STATUS_OF_THEIR_OWN)
def test_status_of_an_exception_of_the_program_is_not_the_jobs(shared_job, program):
    result = shared_job(f"{program}\nif last: raise error\nall_reduce()")
    assert result.returncode == 1, result
    assert "rank 1 of 2: the job ends on this exception\nTraceback" in result.err[1], result
    assert "refused" in result.err[1], result


HARD_TO_PRINT = {
    "a name that is not UTF-8": ("error = OSError(os.fsdecode(b'donn\\xe9es'))", "OSError: donn\\udce9es"),
    "str raises": (
        "class Odd(Exception):\n    def __str__(self): raise ValueError('no text')\nerror = Odd()",
        "Odd: <exception str() failed>",
    ),
    "repr raises": (
        "class Odd(Exception):\n    def __repr__(self): raise ValueError('no text')\nerror = Odd('mine')",
        "Odd: mine",
    ),
    "notes raise": (
        "class Odd(Exception):\n    @property\n    def __notes__(self): raise ValueError('no notes')\nerror = Odd('mine')",
        "Odd: mine",
    ),
    "a group without exceptions": (
        "class Odd(ExceptionGroup):\n    exceptions = 3\nerror = Odd('mine', [ValueError('x')])",
        "Odd: mine",
    ),
    "str exits": (
        "class Odd(Exception):\n    def __str__(self): raise SystemExit(0)\nerror = Odd()",
        "Odd: <exception str() failed>",
    ),
    "class exits": (
        "class Odd(Exception):\n    @property\n    def __class__(self): raise SystemExit(0)\nerror = Odd('mine')",
        "Odd: ",
    ),
    "metaclass exits": (
        (
            "class Meta(type):\n    def __getattribute__(cls, name): raise SystemExit(0)\n"
            "class Odd(Exception, metaclass=Meta): pass\nerror = Odd('mine')"
        ),
        "Odd: mine",
    ),
    "lines cannot be read": (
        "import linecache\nerror = ValueError('mine')\nif last: linecache.getline = linecache.checkcache = None",
        "ValueError: mine",
    ),
    "no room to recurse": ("error = ValueError('mine')\nif last: sys.setrecursionlimit(20)", "ValueError: mine"),
}


@pytest.mark.parametrize(("program", "text"), HARD_TO_PRINT.values(), ids=HARD_TO_PRINT)
def test_an_exception_that_is_hard_to_print_ends_the_job(shared_job, program, text):
    result = shared_job(f"import os\n{program}\nif last: raise error\nall_reduce()")
    assert result.returncode == 1, result
    assert "the job ends on this exception" in result.err[1] and text in result.err[1], result
    assert "the job ends because of rank 1" in result.err[0], result


ELSEWHERE = {
    "a thread without a name": """
class Nameless(threading.Thread):
    @property
    def name(self): raise ValueError("no name")
    _name = None
def fail(): raise error
if last: Nameless(target=fail).start()
time.sleep(20)
""",
    "a thread": "def fail(): raise error\nif last: threading.Thread(target=fail).start()\ntime.sleep(20)",
    "a hook of the program": """
from mpistrat.comm.monitor import abort
def hook(*_): raise error
sys.excepthook = hook
abort.install(0, 2)
if last: raise KeyError('first')
all_reduce()
""",
}


@pytest.mark.parametrize("act", ELSEWHERE.values(), ids=ELSEWHERE)
def test_an_exception_without_a_text_ends_the_job_from_anywhere(shared_job, act):
    program, text = HARD_TO_PRINT["str raises"]
    result = shared_job(f"{program}\n{act}")
    assert result.returncode == 1, result
    assert "the job ends on this exception" in result.err[1] and text in result.err[1], result
    assert ("KeyError: 'first'" in result.err[1]) == ("hook" in act), result


HOOKS_SET_LATER = {
    "prints": "sys.excepthook = lambda *args: print('mine', file=sys.stderr)",
    "exits": "sys.excepthook = lambda *args: sys.exit(0)",
    "raises": "def hook(*args): raise KeyError('of the hook')\nsys.excepthook = hook",
    "Python's": "sys.excepthook = sys.__excepthook__",
    "none": "del sys.excepthook",
    "collects": """
import io
before = sys.excepthook
def hook(*args):  # as torch.distributed's, which then prints each line with the rank
    before_it, sys.stderr = sys.stderr, io.StringIO()
    try:
        before(*args)
    finally:
        text, sys.stderr = sys.stderr.getvalue(), before_it
    sys.stderr.write(text)
sys.excepthook = hook
""",
}


@pytest.mark.parametrize("hook", HOOKS_SET_LATER.values(), ids=HOOKS_SET_LATER)
def test_the_job_ends_whatever_hook_the_program_has_set_since(shared_job, hook):
    other_waits = "from mpi4py import MPI; MPI.COMM_WORLD.recv(source=1)"  # in no collective of a strategy
    result = shared_job(f"{hook}\nif last: raise ValueError('mine')\n{other_waits}")
    assert result.returncode == 1, result
    whole = r"rank 1 of 2: the job ends on this exception\n(Traceback .*\n)?ValueError: mine"
    assert re.search(whole, result.err[1], re.DOTALL), result


def test_a_thread_that_exits_ends_the_thread_only(mpi_run):
    exits = "thread = threading.Thread(target=lambda: sys.exit(5)); thread.start(); thread.join(); print('fine')"
    assert mpi_run(f"import sys, threading\nimport mpistrat\n{exits}", 2).returncode == 0


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "private"])
def test_a_name_that_is_not_utf8_of_a_collective(mpi_run, shared):
    program = (
        START.format(shared=shared)
        + """
import os
name = os.fsdecode(b"donn\\xe9es")
for detail in ((), name):
    with group.collective("save", name, detail=detail):
        if group.inter is not None: group.inter.Barrier()
if group.num_nodes == 1:
    assert group.exchange("look", name) == [name] * 2
with group.collective("save", name, detail="other" if last else "another"):
    pass
"""
    )
    result = mpi_run(program, 2)
    assert result.returncode == 1, result
    assert "CollectiveMismatchError: the ranks entered different collectives" in result.stderr, result
    assert "donn\\udce9es" in result.stderr, result


IGNORED = """
import ctypes

class Odd:
    def __del__(self): raise ValueError("of a finalizer")

odd = Odd()
del odd
ctypes.CFUNCTYPE(None)(lambda: 1 / 0)()
ctypes.pythonapi.PyErr_WriteUnraisable(ctypes.py_object(Odd))  # without an exception
print_error = ctypes.pythonapi.PyRun_SimpleString  # what Cython does for functions that are noexcept: PyErr_Print
print_error(b"raise ValueError('of the program')")

def call(): print_error(b"def f(): raise ValueError('of a function')\\nf()")

call()
thread = threading.Thread(target=call)
thread.start()
thread.join()
all_reduce()
print("went on")
"""


@pytest.mark.parametrize("runner", [[], ["-m", "mpi4py"]], ids=["program", "runner"])
def test_exceptions_that_python_ignores_do_not_end_the_job(mpi_run, tmp_path, runner):
    (tmp_path / "program.py").write_text(START.format(shared=True) + IGNORED)
    result = mpi_run([*runner, str(tmp_path / "program.py")], 2)
    assert result.returncode == 0 and result.stdout.count("went on") == 2, result
    assert "the job ends" not in result.stderr, result
    for text, count in (("of a finalizer", 2), ("ZeroDivisionError", 2), ("of the program", 2), ("of a function", 4)):
        assert result.stderr.count(f"ValueError: {text}" if text[0] == "o" else text) == count, result


def test_an_uncaught_exception_ends_the_job_after_one_that_python_ignores(mpi_run):
    program = "import ctypes, sys\nbefore = sys.excepthook\nsys.excepthook = lambda *error: before(*error)\n"
    program += START.format(shared=True)
    program += (
        "ctypes.pythonapi.PyRun_SimpleString(b'raise ValueError(1)')\nif last: raise KeyError('mine')\nall_reduce()"
    )
    result = mpi_run(program, 2)
    assert result.returncode == 1 and "rank 1 of 2: the job ends on this exception" in result.err[1], result
    assert "KeyError: 'mine'" in result.err[1], result


def test_keyboard_interrupt_of_one_rank(shared_job):
    result = shared_job("if last: import _thread; _thread.interrupt_main(); time.sleep(20)\nall_reduce()")
    assert result.returncode not in (0, None), result
    assert "rank 1 of 2: the job ends on this exception" in result.err[1], result
    assert "KeyboardInterrupt" in result.err[1], result


def test_hook_that_the_program_installed_is_called(mpi_run):
    program = "import sys\nsys.excepthook = lambda *error: print('my hook', file=sys.stderr)\n" + START.format(
        shared=True
    )
    result = mpi_run(program + "if last: raise ValueError('mine')\ntime.sleep(20)", 2)
    assert result.returncode == 1, result
    assert "my hook\nrank 1 of 2: the job ends on this exception\nValueError: mine" in result.err[1]


def test_under_the_runner_of_mpi4py(mpi_run, tmp_path):
    (tmp_path / "program.py").write_text(START.format(shared=True) + "if last: raise ValueError('mine')\nall_reduce()")
    result = mpi_run(["-m", "mpi4py", str(tmp_path / "program.py")], 2)
    assert result.returncode == 1, result
    assert "ValueError: mine" in result.err[1], result


# A rank does something else, or nothing.


def test_other_shape(job):
    result = job("all_reduce((4, 2) if last else (4, 3))", ranks=3)
    assert result.returncode == 1, result
    assert "CollectiveMismatchError: the ranks entered different collectives" in result.stderr, result
    assert "all_reduce 'w' float32 (4, 3)" in result.stderr and "all_reduce 'w' float32 (4, 2)" in result.stderr, result


def test_skipped_collective(job):
    result = job("if last:\n    time.sleep(40)  # away\nall_reduce()", ranks=3)
    assert result.returncode == 1, result
    assert "CollectiveTimeoutError: all_reduce 'w' float32 (4, 3)" in result.stderr, result
    line = START.count("\n") + 2
    assert f"rank 2 not in a collective, after #2, at program.py:{line}" in result.stderr, result
    assert "takes longer than 1 s" in result.stderr, result


CAUGHT = """
import sys, time
import numpy as np
from mpi4py import MPI
from mpistrat.cluster.topology import Topology
from mpistrat.comm.process_group import ProcessGroup
from mpistrat.errors import CollectiveMismatchError
from mpistrat.base.environment import Environment
from tests.harness.variable_harness import pretend_nodes

topology = Topology.create(pretend_nodes(MPI, {nodes}))
group = ProcessGroup.create(topology, Environment(abort_after=60.0))

def all_reduce(shape=(3,)):
    with group.collective("all_reduce", "w", np.float32, shape):
        if group.inter is not None:
            group.inter.Allreduce(np.ones(100), np.ones(100))

for _ in range(3):
    all_reduce()
try:
    all_reduce((4,) if topology.rank == 1 else (3,))  # the ranks of the first node see it, those of the other one wait
except CollectiveMismatchError:
    pass
"""
HOW_ON = {
    "and call on": ("all_reduce(); time.sleep(40)", "an error ended #4 on rank 0, which continued"),
    "and work": ("time.sleep(40)", "an error ended #4 on rank 0, which continued"),
    "and call a last time": ("all_reduce()", "an error ended #4 on rank 0, which continued"),
    "and end": ("", "left the program"),
}


@pytest.mark.parametrize("nodes", [[0, 0, 1], [0, 0, 1, 1]], ids=["3 ranks", "4 ranks"])
@pytest.mark.parametrize("how", HOW_ON)
def test_other_nodes_wait_where_one_caught_the_error(mpi_run, nodes, how):
    """They are told by name, and not by the time limit."""
    program, words = HOW_ON[how]
    result = mpi_run(CAUGHT.format(nodes=nodes) + program, len(nodes), 40.0)
    assert result.returncode not in (0, None), result
    assert words in result.stderr and "all_reduce 'w' float32 (3,)" in result.stderr, result
    if "error" in words:
        assert "#4 ended there" in result.stderr, result
        assert "rank 1: all_reduce 'w' float32 (4,)" in result.stderr, result


def test_much_to_do_is_no_warning(shared_job):
    """All ranks are in the same collective: nobody is missing."""
    result = shared_job("with group.collective('slow'): time.sleep(1.6)")
    assert result.returncode == 0, result
    assert "takes longer" not in result.stderr, result


def test_ctrl_c(mpi, tmp_path):
    """SIGINT to mpiexec, as a terminal sends it, ends all ranks soon."""
    import signal

    from tests.launch.launcher import Job

    (tmp_path / "program.py").write_text(
        START.format(shared=True) + "open(sys.argv[1] + str(topology.rank), 'w')\nif last: time.sleep(60)\nall_reduce()"
    )
    job = Job([mpi.python, str(tmp_path / "program.py"), str(tmp_path / "ready")], 2, mpi, tmp_path)
    try:
        until = time.monotonic() + 20
        while len(list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(job._process.pid, signal.SIGINT)
        assert job.wait(10) not in (0, None), job.outputs()
        assert not job.leftover()
    finally:
        job.end()


# The machine has too little.


def _may_unshare():
    unshare = shutil.which("unshare")
    return unshare and subprocess.run([unshare, "-m", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not _may_unshare(), reason="needs the right to make a mount namespace (unshare -m)")
@pytest.mark.parametrize("grow", ["by one block", "by small blocks"])
def test_small_dev_shm(mpi, grow):
    """In a /dev/shm of 64 MiB too much memory is an error with a remedy, never a SIGBUS."""
    words = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh")
    small = dataclasses.replace(mpi, mpiexec=(*words, *mpi.mpiexec, *mpi.flags))
    if grow == "by one block":
        program = "group.node.allocate([50 << 20] * 2, 'the variables')"
    else:
        program = """
blocks = []
for k in range(20):
    block = group.node.allocate([3 << 20] * 2, "the variables")
    blocks.append(block)
    group.node.agree_populated(block.populate(group.node.rank, 0, 3 << 20), "the variables")
    block.segments[group.node.rank][:] = 1
"""
    result = launch(START.format(shared=True) + program, 2, small, 40.0)
    assert result.returncode == 1 and not result.timed_out, result
    assert "SharedMemoryError: the shared memory of the node of rank 0 is too small for the variables" in result.stderr
    assert "--shm-size" in result.stderr


@pytest.mark.skipif(not _may_unshare(), reason="needs the right to make a mount namespace (unshare -m)")
def test_full_dev_shm_when_pages_are_asked_for(mpi):
    """What others took after the look at the free space is found by populate."""
    words = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh")
    small = dataclasses.replace(mpi, mpiexec=(*words, *mpi.mpiexec, *mpi.flags))
    program = """
block = group.node.allocate([15 << 20] * 2, "the variables")
if not last:
    import os
    fd = os.open("/dev/shm/other", os.O_CREAT | os.O_WRONLY)
    os.posix_fallocate(fd, 0, os.statvfs("/dev/shm").f_bavail * 4096 - (20 << 20))
group.barrier()
group.node.agree_populated(block.populate(group.node.rank, 0, 15 << 20), "the variables")
"""
    result = launch(START.format(shared=True) + program, 2, small, 40.0)
    assert result.returncode == 1 and not result.timed_out, result
    assert "SharedMemoryError" in result.stderr and "too small for the variables" in result.stderr, result

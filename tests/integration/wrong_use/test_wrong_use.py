"""What wrong use gets: a clear error on every rank, within seconds, no hang, no process left, exit status not 0.

Every program runs as a user's would, under a real launcher; `mpi_run` fails a test whose job does not end or leaves
a process behind.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest

from tests.launch.launcher import Job, MpiEnv

SETUP = """
import os, sys, threading, time
import numpy as np
import mpistrat as ms

strategy = ms.MultiWorkerMirroredStrategy()
rank = strategy.rank

def variable(shape=(3,), dtype="f4", name="w"):
    with strategy.scope():
        return ms.Variable(np.zeros(shape, dtype), name=name)
"""


@dataclasses.dataclass
class Wrong:
    """A program that is wrong on rank 1, and what must stand in the errors of every rank."""

    program: str
    says: tuple[str, ...]
    leaves: bool = False  # all ranks but 0 end as programs do, and say nothing
    traceback: bool = False  # somebody shows where it happened
    seconds: float = 5.0  # from the fault to the end of the job
    env: dict[str, str] = dataclasses.field(default_factory=dict)


DISAGREE = {
    "variable of another shape": Wrong("variable((3,) if rank else (4,))", ("Mismatch", r"\(3,\)", r"\(4,\)", "'w'")),
    "variable of another dtype": Wrong("variable(dtype='f8' if rank else 'f4')", ("Mismatch", "float64", "float32")),
    "variable of another name": Wrong("variable(name='a' if rank else 'b')", ("Mismatch", "'a'", "'b'", "rank 1")),
    "variables in another order": Wrong(
        "for name in ('ab' if rank else 'ba'): variable(name=name)", ("Mismatch", "'a'", "'b'")
    ),
    "one variable more": Wrong(
        "variable()\nif rank: variable(name='more')\nstrategy.reduce('SUM', 1.0, axis=None)", ("Mismatch", "'more'")
    ),
    "reduce of another shape": Wrong(
        "strategy.reduce('SUM', np.ones(3 + rank), axis=None)", ("Mismatch", r"\(3,\)", r"\(4,\)", "reduce")
    ),
    "reduce of another dtype": Wrong(
        "strategy.reduce('SUM', np.ones(3, 'f8' if rank else 'f4'), axis=None)", ("Mismatch", "float64", "float32")
    ),
    "reduce of another operation": Wrong(
        "strategy.reduce('SUM' if rank else 'MEAN', np.ones(3), axis=None)", ("Mismatch", "SUM", "MEAN")
    ),
    "large reduce of another shape": Wrong(
        "strategy.reduce('SUM', np.ones(1_000_000 + rank, 'f4'), axis=None)", ("Mismatch", "1000000", "1000001")
    ),
    "gather of other ranks": Wrong(
        "strategy.gather(np.ones((2, 3) if rank else (2,)), axis=0)", (r"\(2, 3\)", r"\(2,\)")
    ),
    "another collective": Wrong(
        "strategy.gather(np.ones(3), axis=0) if rank else strategy.reduce('SUM', np.ones(3), axis=None)",
        ("Mismatch", "gather", "reduce"),
    ),
    "assign of other values": Wrong("v = variable()\nv.assign(np.full(3, rank, 'f4'))", ("Mismatch", "'w'", "assign")),
    "gradient missing on one rank": Wrong(
        "v = variable()\no = ms.optimizers.SGD(0.1)\nu = variable(name='u')\n"
        "strategy.run(lambda: o.apply_gradients([(v.grad, v), (None if rank else u.grad, u)]))",
        ("Mismatch", "apply_gradients"),
    ),
}

LEFT = {
    "collective skipped": Wrong(
        "strategy.reduce('SUM', 1.0, axis=None)\nif rank: time.sleep(60)\nstrategy.reduce('SUM', 1.0, axis=None)",
        ("rank 1", "reduce"),
        seconds=2.0 + 5.0,
        env={"MPISTRAT_ABORT_AFTER": "2"},
    ),
    "early end": Wrong("if not rank: strategy.reduce('SUM', 1.0, axis=None)", ("rank [1-3]", "reduce"), leaves=True),
    "sys.exit": Wrong(
        "if rank: sys.exit(3)\nstrategy.reduce('SUM', 1.0, axis=None)", ("rank [1-3]", "reduce"), leaves=True
    ),
    "exception": Wrong(
        "if rank: raise KeyError('lost key')\nstrategy.reduce('SUM', 1.0, axis=None)",
        ("rank [1-3]", "KeyError: 'lost key'"),
        traceback=True,
    ),
    "exception in a thread": Wrong(
        "def work(): raise KeyError('lost key')\nif rank: threading.Thread(target=work).start()\n"
        "time.sleep(2 * rank)\nstrategy.reduce('SUM', 1.0, axis=None)\ntime.sleep(30)",
        ("rank [1-3]", "KeyError: 'lost key'"),
        traceback=True,
        seconds=6.0,
    ),
    "exception before the variables": Wrong(
        "if rank: raise KeyError('lost key')\nvariable((1000, 1000))", ("rank [1-3]", "KeyError"), traceback=True
    ),
    "exception in a step": Wrong(
        "v = variable()\no = ms.optimizers.SGD(0.1)\ndef step():\n"
        "    if rank: raise KeyError('lost key')\n    o.apply_gradients([(v.grad, v)])\nstrategy.run(step)",
        ("rank [1-3]", "KeyError"),
        traceback=True,
    ),
}

SAME = {
    "scope inside another's": Wrong(
        "other = ms.MultiWorkerMirroredStrategy()\nwith strategy.scope():\n    with other.scope(): pass",
        ("ContextError", "scope"),
    ),
    "strategy that does not fit": Wrong("ms.OneDeviceStrategy()", ("LayoutError", "MirroredStrategy")),
    "unknown device": Wrong("ms.MirroredStrategy(devices=['tpu:0'])", ("DeviceError", "tpu:0")),
    "absent device": Wrong("ms.MirroredStrategy(devices=['gpu:7'])", ("DeviceError", "gpu:7")),
    "variable after close": Wrong("v = variable()\nstrategy.close()\nprint(v + 1)", ("ClosedError", "'w'")),
    "strategy after close": Wrong("strategy.close()\nstrategy.reduce('SUM', 1.0, axis=None)", ("ClosedError",)),
    "variable of another strategy": Wrong(
        "v = variable()\nother = ms.MultiWorkerMirroredStrategy()\no = ms.optimizers.SGD(0.1)\n"
        "with other.scope():\n    other.run(lambda: o.apply_gradients([(np.zeros(3, 'f4'), v)]))",
        ("ValueError|ContextError", r"(variable '?|: )w\b"),
    ),
    "TF_CONFIG that is not JSON": Wrong(
        "ms.cluster_resolver.TFConfigClusterResolver().cluster_spec()",
        ("ClusterError", "TF_CONFIG", "JSON"),
        env={"TF_CONFIG": "{'cluster'"},
    ),
    "TF_CONFIG with an unknown role": Wrong(
        "ms.MultiWorkerMirroredStrategy(ms.cluster_resolver.TFConfigClusterResolver())",
        ("ClusterError", "boss"),
        env={"TF_CONFIG": '{"cluster": {"boss": ["a:1", "b:1"]}, "task": {"type": "boss", "index": 0}}'},
    ),
    "TF_CONFIG with two chiefs": Wrong(
        "ms.MultiWorkerMirroredStrategy(ms.cluster_resolver.TFConfigClusterResolver())",
        ("ClusterError", "chief"),
        env={"TF_CONFIG": '{"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "chief", "index": 0}}'},
    ),
    "missing shard": Wrong(
        "ms.data.HDF5Dataset(['/nowhere/train-0.h5']).batch(2)", ("ShardError", "/nowhere/train-0.h5")
    ),
    "truncated shard": Wrong(
        "import tempfile, pathlib\nfolder = pathlib.Path(tempfile.mkdtemp())\n"
        "ms.data.write_shards(folder, {'x': np.zeros((1000, 8))}, num_shards=2)\n"
        "bad = sorted(folder.glob('*.h5'))[1]\nos.truncate(bad, bad.stat().st_size // 2)\n"
        "for batch in strategy.distribute_dataset(ms.data.HDF5Dataset(str(folder)).batch(500)): pass",
        ("ShardError", r"\.h5"),
    ),
    "mismatching shard": Wrong(
        "import tempfile, pathlib, h5py\nfolder = pathlib.Path(tempfile.mkdtemp())\n"
        "for i, kind in enumerate(('f4', 'f8')):\n"
        "    with h5py.File(folder / f'part-{i}.h5', 'w') as file: file['x'] = np.zeros((4, 2), kind)\n"
        "for batch in strategy.distribute_dataset(ms.data.HDF5Dataset(str(folder / '*.h5')).batch(4)): pass",
        ("ShardError", r"part-1\.h5", "float64"),
    ),
}


def told(texts: list[str], on_node: int = 1) -> list[str]:
    """What each rank was told: what it printed itself, what another one printed with its number, and what the first rank of its
    node printed for all `on_node` of them."""
    found = [text if rank % on_node == 0 else texts[rank - rank % on_node] + text for rank, text in enumerate(texts)]
    for text in texts:
        for words in re.findall(r"\(the same on ranks? ([-\d, ]+)\)", text):
            for low, _, high in (part.partition("-") for part in words.split(", ")):
                for rank in range(int(low), int(high or low) + 1):
                    found[rank] += text
    return found


def _check(result, wrong: Wrong, on_node: int = 1) -> None:
    assert result.returncode != 0, str(result)
    for rank, text in enumerate(told(result.err, on_node)[: 1 if wrong.leaves else None]):
        for words in wrong.says:
            assert re.search(words, text), f"rank {rank} does not say {words!r}\n{result}"
    assert not wrong.traceback or "Traceback" in result.stderr, str(result)


ATTEMPTS = """
import traceback
for case, (program, env) in cases.items():
    strategy = ms.MultiWorkerMirroredStrategy()
    os.environ.update(env)
    try:
        exec(program, globals())
        print(f"==== {case}: no error", file=sys.stderr, flush=True)
    except Exception:
        print(f"==== {case}:\\n{traceback.format_exc()}", file=sys.stderr, flush=True)
    for key in env:
        del os.environ[key]
"""


@pytest.fixture(scope="module")
def attempts() -> dict[str, list[str]]:
    """For each MPI what every rank wrote, filled by the first test that asks."""
    return {}


@pytest.mark.parametrize("name", [*DISAGREE, *SAME])
def test_every_rank_gets_the_error(mpi: MpiEnv, mpi_run, attempts: dict[str, list[str]], name: str) -> None:
    """All cases in one program: an error that every rank gets leaves the ranks in step."""
    if mpi.name not in attempts:
        cases = {key: (wrong.program, wrong.env) for key, wrong in {**DISAGREE, **SAME}.items()}
        result = mpi_run(SETUP + f"cases = {cases!r}\n" + ATTEMPTS, 2, timeout=60)
        attempts[mpi.name] = result.err
        assert result.returncode == 0, str(result)
    for rank, text in enumerate(attempts[mpi.name]):
        (found,) = [part for part in text.split("==== ") if part.startswith(f"{name}:")]
        for words in {**DISAGREE, **SAME}[name].says:
            assert re.search(words, found), f"rank {rank} does not say {words!r}: {found}"


@pytest.mark.parametrize(
    "name", ["variable of another shape", "large reduce of another shape", "unknown device", *LEFT]
)
def test_the_job_ends(mpi_run, name: str) -> None:
    wrong = {**DISAGREE, **LEFT, **SAME}[name]
    result = mpi_run(SETUP + wrong.program, 2, timeout=40, env=wrong.env)
    _check(result, wrong)
    assert result.seconds < wrong.seconds + 10, str(result)  # starting Python and MPI on a busy machine included


@pytest.mark.parametrize(
    "name",
    ["variable of another name", "reduce of another dtype", "another collective", "sys.exit", "collective skipped"],
)
def test_the_job_ends_without_shared_memory(mpi_run, name: str) -> None:
    wrong = {**DISAGREE, **LEFT}[name]
    env = {"MPISTRAT_ABORT_AFTER": "3", **wrong.env, "MPISTRAT_SHARED_MEMORY": "0"}
    result = mpi_run(SETUP + wrong.program, 2, timeout=40, env=env)
    _check(result, wrong)


def test_small_shared_memory(mpi: MpiEnv, mpi_run) -> None:
    """64 MB of /dev/shm, as in a container, and 128 MB of variables."""
    if os.geteuid() != 0:
        pytest.skip("a small /dev/shm of its own needs root")
    program = SETUP + "variable((32, 1024, 1024))"
    small = 'mount -t tmpfs -o size=64m small /dev/shm && exec "$0" "$@"'
    with tempfile.TemporaryDirectory() as folder:
        wrapper = Path(folder) / "mpiexec"
        wrapper.write_text(f"#!/bin/sh\nexec unshare -m sh -c '{small}' {' '.join(mpi.mpiexec)} \"$@\"\n")
        wrapper.chmod(0o755)
        job_folder = Path(folder) / "job"
        job_folder.mkdir()
        (job_folder / "program.py").write_text(program)
        env = dataclasses.replace(mpi, mpiexec=(str(wrapper),))
        job = Job([mpi.python, str(job_folder / "program.py")], 2, env, job_folder)
        try:
            code = job.wait(40)
        finally:
            job.end(stacks=job.poll() is None)
        out, err, launcher = job.outputs()
    assert code not in (None, 0), (out, err, launcher)
    for text in told(err):
        assert re.search(r"SharedMemoryError", text), (err, launcher)
        assert re.search(r"shm-size", text), err


def test_interrupt_ends_all_ranks(mpi: MpiEnv) -> None:
    """Ctrl-C at the launcher while the ranks work and wait."""
    program = SETUP + "print('ready', flush=True)\nwhile True: strategy.reduce('SUM', 1.0, axis=None); time.sleep(0.01)"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "program.py").write_text(program)
        job = Job([mpi.python, str(folder / "program.py")], 2, mpi, folder)
        try:
            until = time.monotonic() + 30
            while "ready" not in job.read("1.out") and time.monotonic() < until:
                time.sleep(0.05)
            os.kill(job.processes()[0], signal.SIGINT)
            code = job.wait(10)
            left = [] if code is None else job.leftover()
        finally:
            job.end(stacks=job.poll() is None)
        text = str(job.outputs())
    assert code not in (None, 0), text
    assert left == [], text


def test_mirrored_over_two_hosts(mpi_run, hosts) -> None:
    program = "import mpistrat as ms\nms.MirroredStrategy()"
    result = mpi_run(program, 4, timeout=60, hosts=hosts)
    assert result.returncode != 0
    for text in told(result.err):
        assert re.search("LayoutError", text), str(result)
        assert re.search("MultiWorkerMirroredStrategy", text), str(result)


@pytest.mark.parametrize(
    "name",
    [
        "variable of another shape",
        "reduce of another dtype",
        "another collective",
        "collective skipped",
        "sys.exit",
        "exception",
    ],
)
def test_wrong_use_over_two_hosts(mpi_run, hosts, name: str) -> None:
    wrong = {**DISAGREE, **LEFT}[name]
    env = {"MPISTRAT_ABORT_AFTER": "3", **wrong.env}
    result = mpi_run(SETUP + wrong.program, 4, timeout=60, hosts=hosts, env=env)
    _check(result, wrong, on_node=2)


# Who of the four ranks, of which two share a host, fails; the others wait inside MPI or sleep.
@pytest.mark.parametrize("who", [(0,), (3,), (1, 3), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("others", ["strategy.reduce('SUM', 1.0, axis=None)", "time.sleep(60)"], ids=["wait", "sleep"])
def test_exceptions_over_two_hosts(mpi_run, hosts, who: tuple[int, ...], others: str) -> None:
    """The launcher ends, too, wherever the rank that fails is."""
    program = SETUP + f"if rank in {who}: raise KeyError('lost key')\n{others}"
    result = mpi_run(program, 4, timeout=40, hosts=hosts)
    assert result.returncode == 1, str(result)
    assert any(re.search(rf"rank {rank} of 4: .*\n(.*\n)*KeyError: 'lost key'", result.err[rank]) for rank in who), str(
        result
    )
    assert result.seconds < 5 + 10, str(result)


def test_exception_on_a_host_without_the_launcher(mpi_run, hosts) -> None:
    """All ranks on one host, mpiexec on another, as on a cluster's login node."""
    program = SETUP + "if rank: raise KeyError('lost key')\ntime.sleep(60)"
    result = mpi_run(program, 2, timeout=40, hosts=_First(hosts))
    assert result.returncode == 1, str(result)
    assert "KeyError: 'lost key'" in result.err[1], str(result)


class _First:
    """The first of some hosts, as the only one."""

    def __init__(self, hosts) -> None:
        self.hosts = hosts

    def mpiexec(self, mpi: MpiEnv, ranks: int) -> list[str]:
        names = self.hosts.names
        words = self.hosts.mpiexec(mpi, len(names) * ranks)
        where = words.index(",".join(f"{name}:{ranks}" for name in names))
        return [*words[:where], f"{names[0]}:{ranks}", *words[where + 1 : -1], str(ranks)]

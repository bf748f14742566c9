"""ms.jax.initialize: jitted programs over all ranks, the ranks that take part, wrong use.

A process starts jax.distributed once. So each test starts programs of its own.
"""

import subprocess

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed: make test-frameworks")

from mpistrat.errors import DeviceError  # noqa: E402

BEGIN = """
import os, sys, time
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from mpi4py import MPI
import mpistrat as ms

world = MPI.COMM_WORLD

def over_ranks(own):
    mesh = jax.make_mesh((jax.process_count(),), ("ranks",))
    return jax.make_array_from_process_local_data(NamedSharding(mesh, P("ranks")), own)

def total(own):
    return float(jax.jit(jnp.sum)(over_ranks(np.asarray(own, np.float32))))
"""
LIMIT = 100  # seconds for a program; other jobs may share the cores


@pytest.fixture
def run(mpi_run):
    """Run a program on some ranks; return its result when it has ended well."""

    def run(program, ranks, **options):
        ended = mpi_run(BEGIN + program, ranks, timeout=LIMIT, **options)
        assert ended.returncode == 0, str(ended)
        assert all("done" in out for out in ended.out), str(ended)
        return ended

    return run


@pytest.mark.timeout(2 * LIMIT)
@pytest.mark.parametrize("ranks", [2, 4], ids="np{}".format)
def test_programs_over_all_ranks(run, ranks):
    """Expected numbers are NumPy's on the whole arrays."""
    run(
        """
ms.jax.initialize()
rank, ranks = world.rank, world.size
assert (jax.process_index(), jax.process_count(), jax.device_count()) == (rank, ranks, ranks)
assert jax.local_device_count() == 1
whole = np.arange(ranks * 6, dtype=np.float32).reshape(2 * ranks, 3)
own = whole[2 * rank : 2 * rank + 2]
x = over_ranks(own)
mesh = x.sharding.mesh
assert x.shape == whole.shape and (np.asarray(x.addressable_data(0)) == own).all()
assert float(jax.jit(jnp.sum)(x)) == whole.sum()

def mapped(function, out):
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("ranks"), out_specs=out))

assert float(mapped(lambda a: jax.lax.psum(a.sum(), "ranks"), P())(x)) == whole.sum()
assert float(mapped(lambda a: jax.lax.pmax(a.max(), "ranks"), P())(x)) == whole.max()
ring = mapped(lambda a: jax.lax.ppermute(a, "ranks", [(i, (i + 1) % ranks) for i in range(ranks)]), P("ranks"))(x)
left = (rank - 1) % ranks
assert (np.asarray(ring.addressable_data(0)) == whole[2 * left : 2 * left + 2]).all()
gathered = jax.device_put(x, NamedSharding(mesh, P()))
assert (np.asarray(gathered) == whole).all()

# a gradient of replicated parameters by rows on all ranks
w = np.float32([1, -1, 2])
grad = jax.jit(jax.grad(lambda w, x: jnp.mean((x @ w) ** 2)))(jax.device_put(w, NamedSharding(mesh, P())), x)
np.testing.assert_allclose(np.asarray(grad), 2 * whole.T @ (whole @ w) / len(whole), rtol=1e-6)
print("done")
""",
        ranks,
    )


@pytest.mark.timeout(3 * LIMIT)
def test_rows_of_a_dataset_and_checkpoints(run, tmp_path):
    """Each batch has the rows of one process. What 2 ranks saved, 4 restore; the sharded array as a whole."""
    program = f"""
ms.jax.initialize()
folder = {str(tmp_path / "run")!r}
dataset = ms.data.from_arrays(np.arange(64, dtype=np.float32)).shuffle(seed=3).batch(8, drop_remainder=True)
expected = [batch.sum() for batch in dataset]
with ms.MultiWorkerMirroredStrategy() as strategy:
    with strategy.scope():
        sums = ms.Variable(np.zeros(8, np.float32), name="sums")
        parts = ms.Variable(np.zeros((8, 3), np.float32), name="parts")
    checkpoints = ms.train.Checkpoints(strategy, folder)
    if world.size == 2:
        found = [float(jax.jit(jnp.sum)(over_ranks(rows))) for rows in strategy.distribute_dataset(dataset)]
        assert found == expected and len(found) == 8, (found, expected)
        x = over_ranks(np.arange(12 * world.rank, 12 * world.rank + 12, dtype=np.float32).reshape(4, 3))
        sums.assign(np.float32(found))
        parts.assign(np.asarray(jax.device_put(x, NamedSharding(x.sharding.mesh, P()))))
        checkpoints.save(1)
        checkpoints.wait()
    else:
        assert checkpoints.restore_latest() == {{"step": 1}}
        assert sums.numpy().tolist() == expected
        x = over_ranks(parts.numpy()[2 * world.rank : 2 * world.rank + 2])
        assert x.shape == (8, 3) and float(jax.jit(jnp.sum)(x)) == 24 * 23 / 2
print("done")
"""
    run(program, 2)
    run(program, 4)


@pytest.mark.timeout(2 * LIMIT)
def test_some_of_the_ranks(run):
    """Two halves on one node start at once, each on a port of its own; the second one counts its ranks backwards."""
    run(
        """
half = world.rank % 2
part = world.Split(half, -world.rank if half else world.rank)
ms.jax.initialize(part)
assert (jax.process_index(), jax.process_count()) == (part.rank, 2)
assert total([world.rank, 1]) == (6 if half else 4)
try:
    ms.jax.initialize(MPI.COMM_NULL)
except ms.errors.LayoutError as error:
    assert "ms.jax.initialize: comm: expected an intracommunicator of mpi4py, got COMM_NULL" in str(error)
    print("done")
""",
        4,
    )


@pytest.mark.timeout(2 * LIMIT)
def test_some_of_the_ranks_by_color(run):
    run(
        """
if world.rank == 1:
    with pytest.raises(ms.errors.LayoutError, match="MPISTRAT_COLORS: .* which has none for rank 1"):
        ms.jax.initialize()
else:
    ms.jax.initialize()
    assert (jax.process_index(), jax.process_count(), total([world.rank])) == (world.rank // 2, 2, 2)
print("done")
""",
        3,
        env={"MPISTRAT_COLORS": "train=0,2"},
    )


PROXY = "http://127.0.0.1:9"  # no program answers at this port


@pytest.mark.timeout(2 * LIMIT)
def test_what_the_program_had_set_stays(run):
    """A proxy is not used, and stays. So does a handler of SIGTERM. A second call is an error, and so is ms.jax.distribute."""
    ended = run(
        f"""
import signal
got = []
signal.signal(signal.SIGTERM, lambda *_: got.append("SIGTERM"))
ms.jax.initialize()
assert os.environ["http_proxy"] == os.environ["GRPC_PROXY"] == {PROXY!r}
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.1)
assert got == ["SIGTERM"]
assert total([1.0]) == 2
text = f"rank {{world.rank}}: ms.jax.initialize: expected one call in a process, got a second one"
with pytest.raises(ms.errors.ContextError, match=text):
    ms.jax.initialize()
with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
    with pytest.raises(ms.errors.DeviceError) as caught:
        ms.jax.distribute({{"w": np.zeros(3, np.float32)}})
assert "got jax.distributed with 2 processes. Keep the parameters in arrays of JAX over all ranks" in str(caught.value)
print("done")
""",
        2,
        env={"http_proxy": PROXY, "GRPC_PROXY": PROXY},
    )
    assert "proxy" not in "".join(ended.err)


@pytest.mark.timeout(2 * LIMIT)
def test_a_rank_that_has_computed_before(run):
    """An error on every rank, which names the rank: the others do not wait."""
    run(
        """
if world.rank == 1:
    jnp.ones(1)
text = "rank 1: ms.jax.initialize: expected a call before JAX computes, got one after its devices were set up"
with pytest.raises(ms.errors.ContextError, match=text):
    ms.jax.initialize()
print("done")
""",
        3,
    )


@pytest.mark.timeout(2 * LIMIT)
def test_after_jax_has_started_it(run):
    """On one rank: an error on every rank."""
    run(
        """
import socket
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
if world.rank == 0:
    jax.distributed.initialize(f"127.0.0.1:{port}", 1, 0, local_device_ids=[])
with pytest.raises(ms.errors.ContextError, match="rank 0: .* or one after jax.distributed.initialize"):
    ms.jax.initialize()
print("done")
""",
        2,
    )


@pytest.mark.timeout(2 * LIMIT)
def test_a_rank_that_does_not_come(mpi_run):
    """Its ranks end by os._exit, which is an error for the mpiexec of Open MPI."""
    ended = mpi_run(
        BEGIN
        + """
if world.rank != 1:
    with pytest.raises(ms.errors.CollectiveTimeoutError) as caught:
        ms.jax.initialize()
    text = str(caught.value)
    if world.rank == 0:
        assert text.startswith("ms.jax.initialize: rank 0 of 3 waited 2 s for rank 1. All ranks of a communicator make this call")
print("done", flush=True)
time.sleep(10)
os._exit(0)
""",
        3,
        timeout=LIMIT,
        env={"MPISTRAT_ABORT_AFTER": "2"},
    )
    assert all("done" in out for out in ended.out), str(ended)


@pytest.mark.timeout(2 * LIMIT)
def test_a_rank_that_makes_a_strategy_instead(run):
    run(
        """
with pytest.raises(ms.errors.CollectiveMismatchError, match="rank 0: ms.jax.initialize; rank 1: MultiWorkerMirrored"):
    ms.MultiWorkerMirroredStrategy() if world.rank else ms.jax.initialize()
print("done")
""",
        2,
    )


@pytest.mark.timeout(2 * LIMIT)
def test_a_rank_that_raises_ends_the_job(mpi_run):
    """While the other one waits for it in a collective of JAX."""
    program = """
ms.jax.initialize()
total([1.0])
if world.rank == 1:
    time.sleep(1)
    raise ValueError("my mistake")
total([2.0])
print("not reached")
"""
    ended = mpi_run(BEGIN + program, 2, timeout=LIMIT)
    assert ended.returncode != 0 and "not reached" not in "".join(ended.out), str(ended)
    assert "rank 1 of 2: the job ends on this exception" in ended.err[1] and "my mistake" in ended.err[1], str(ended)


@pytest.mark.timeout(2 * LIMIT)
def test_without_a_launcher(mpi, tmp_path):
    (tmp_path / "train.py").write_text("import mpistrat as ms\nms.jax.initialize()\n")
    done = subprocess.run([mpi.python, str(tmp_path / "train.py")], capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode != 0
    expected = "ClusterError: ms.jax.initialize: expected ranks that a launcher of MPI started, got a process that was"
    assert expected in done.stderr and "mpiexec -n 2 python train.py" in done.stderr, done


@pytest.mark.timeout(2 * LIMIT)
def test_one_rank(run):
    run("ms.jax.initialize()\nassert (jax.process_count(), total([3.0])) == (1, 3)\nprint('done')", 1)


# GPUs, of which there are none here: the choice alone


@pytest.mark.parametrize(
    ("gpus", "listed", "local_rank", "local_size", "expected"),
    [
        (0, None, 1, 2, []),
        (8, None, 1, 2, [1]),
        (2, "4,7", 1, 2, [1]),
        (1, "3", 1, 2, []),
        (8, None, 0, 1, []),
        (1, None, 0, 1, []),
    ],
)
def test_the_gpus_of_a_rank(monkeypatch, gpus, listed, local_rank, local_size, expected):
    from mpistrat.jax.initialize import _local_devices

    monkeypatch.delenv("JAX_LOCAL_DEVICE_IDS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert _local_devices(gpus, local_rank, local_size, 5) == expected


def test_a_node_with_too_few_gpus(monkeypatch):
    from mpistrat.jax.initialize import _local_devices

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("JAX_LOCAL_DEVICE_IDS", raising=False)
    with pytest.raises(DeviceError, match="rank 7: .* expected a GPU for each of the node's 4 ranks, got 2"):
        _local_devices(2, 3, 4, 7)
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0")  # of JAX: the user's choice
    assert _local_devices(2, 3, 4, 7) is None


def test_gpus_that_jax_would_show(monkeypatch):
    from mpistrat.jax import initialize  # the function
    from mpistrat.jax.initialize import _visible_gpus

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    module = _visible_gpus.__globals__["importlib"].util
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert callable(initialize) and _visible_gpus() == 0
    monkeypatch.setattr(module, "find_spec", lambda name: name == "jax_cuda12_plugin" or None)
    before = jax.config.jax_platforms
    try:
        for platforms, count in ((None, 3), ("cpu", 0), ("cuda,cpu", 3)):
            jax.config.update("jax_platforms", platforms)
            assert _visible_gpus() == count
    finally:
        jax.config.update("jax_platforms", before)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert _visible_gpus() == 0

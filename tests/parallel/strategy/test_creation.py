"""Making and ending strategies on real ranks: what does not fit is refused by all of them, and nothing hangs."""

import gc
import json
import os
import weakref
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.base import log
from mpistrat.errors import ClusterError, CollectiveMismatchError, DeviceError, LayoutError, MissingDependencyError
from tests.harness.strategies import made

WORKERS = [f"host{i}:1" for i in range(8)]


def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def pretend_nodes(node_of):
    """A communicator of the world whose shared-memory split gives these nodes."""
    from mpi4py import MPI

    class Pretended(MPI.Intracomm):
        def Split_type(self, split_type, key=0, info=MPI.INFO_NULL):
            return MPI.Intracomm(self.Split(node_of[self.rank], key))

    return Pretended(MPI.COMM_WORLD)


@pytest.mark.ranks(2, 4)
def test_strategies_of_one_node_refuse_two():
    nodes = pretend_nodes([rank % 2 for rank in range(4)])
    for make in (ms.MirroredStrategy, ms.CentralStorageStrategy):
        with pytest.raises(LayoutError, match="ranks on 2 nodes. What fits: MultiWorkerMirroredStrategy"):
            make(comm=nodes)
    with ms.MultiWorkerMirroredStrategy(comm=nodes) as strategy:
        assert strategy.reduce("SUM", 1, axis=None) == strategy.size


@pytest.mark.ranks(2, 3)
def test_a_part_of_the_world():
    comm = world().Split(world().rank == 0)
    with ms.MirroredStrategy(comm=comm) as strategy:
        assert strategy.size == comm.size
        assert strategy.reduce("SUM", 1, axis=None) == comm.size
    with ms.OneDeviceStrategy(comm=world().Split(world().rank)) as strategy:
        assert strategy.run(lambda: ms.get_replica_context().num_replicas_in_sync) == 1


@pytest.mark.ranks(2)
def test_strategies_one_after_another_and_at_once():
    with made("mirrored") as one, made("multi_worker_mirrored") as two:
        for strategy in (one, two, one):
            with strategy.scope():
                v = ms.Variable(1.0, name="v", aggregation=ms.VariableAggregation.SUM)
            strategy.run(lambda v=v: v.assign_add(1.0))
            assert float(v) == 3.0
        with pytest.raises(ValueError, match="another strategy"):
            one.run(lambda: two.extended.variables[0].assign(1.0))
        one.close()
        assert two.reduce("SUM", 1, axis=None) == 2
    for _ in range(20):
        with made("mirrored", "2") as strategy:
            assert strategy.reduce("SUM", strategy.run(lambda: 1), axis=None) == 4


@pytest.mark.ranks(2)
def test_a_device_that_one_rank_lacks():
    with pytest.raises(DeviceError, match="rank 1.*tpu:0"):
        ms.MirroredStrategy(["tpu:0" if world().rank else "cpu:0"])
    with pytest.raises(DeviceError, match="rank 0"):
        ms.MultiWorkerMirroredStrategy(devices=[] if world().rank == 0 else None)


@pytest.mark.ranks(1, 2)
def test_devices_that_are_not_there():
    for make in (
        lambda: ms.CentralStorageStrategy(parameter_device="gpu:77"),
        lambda: ms.CentralStorageStrategy(["gpu:77"]),
        lambda: ms.MirroredStrategy(num_gpus=78),
    ):
        with pytest.raises(DeviceError, match="gpu:77|no GPU"):
            make()
    with ms.MirroredStrategy(num_gpus=0) as strategy:
        assert strategy.extended.worker_devices == ("cpu:0",)
    with pytest.raises(ValueError, match="devices or num_gpus"):
        ms.MirroredStrategy(["cpu:0"], num_gpus=1)


@pytest.mark.ranks(2)
def test_settings_must_agree():
    with pytest.raises(CollectiveMismatchError, match=r"cpu:0.*cpu:1"):
        ms.CentralStorageStrategy(parameter_device=f"cpu:{world().rank}")
    with pytest.raises(TypeError, match="expected CommunicationOptions"):
        ms.MultiWorkerMirroredStrategy(communication_options="ring")


@pytest.mark.ranks(2)
def test_a_problem_of_one_rank_is_raised_by_all():
    with pytest.raises(ValueError, match="CrossDeviceOps object"):
        ms.MirroredStrategy(cross_device_ops="nonsense" if world().rank else None)
    with pytest.raises((CollectiveMismatchError, ValueError)):
        ms.MultiWorkerMirroredStrategy(communication_options=ms.CommunicationOptions(bytes_per_pack=8 * world().rank))


@pytest.mark.ranks(2)
def test_ranks_that_make_different_strategies():
    with pytest.raises(CollectiveMismatchError, match="MirroredStrategy"):
        ms.MirroredStrategy() if world().rank else ms.CentralStorageStrategy()


@pytest.mark.ranks(2)
def test_nccl_by_name_without_a_gpu():
    from mpistrat.comm.gpu import nccl_available

    if not nccl_available():
        pytest.skip("NCCL is here")
    with pytest.raises((MissingDependencyError, ClusterError, ImportError), match="NCCL|CuPy|nccl"):
        ms.MultiWorkerMirroredStrategy(communication_options=ms.CommunicationOptions(implementation="nccl"))


class TestClusters:
    @pytest.mark.ranks(1, 2)
    def test_tf_config(self):
        size, rank = world().size, world().rank
        config = {"cluster": {"worker": WORKERS[:size]}, "task": {"type": "worker", "index": rank}}
        with (
            mock.patch.dict(os.environ, TF_CONFIG=json.dumps(config)),
            ms.tf.CollectiveAllReduceStrategy() as strategy,
        ):
            assert isinstance(strategy.cluster_resolver, ms.cluster_resolver.TFConfigClusterResolver)
            assert strategy.cluster_resolver.task_id == rank

    @pytest.mark.ranks(2)
    def test_without_tf_config(self):
        with ms.MultiWorkerMirroredStrategy() as strategy:
            assert strategy.cluster_resolver.cluster_spec().num_tasks("worker") == 2

    @pytest.mark.ranks(1, 2)
    @pytest.mark.parametrize("has_task", [False, True])
    def test_tf_config_without_a_cluster_is_logged(self, has_task, caplog):
        """With it TensorFlow trains in each process alone."""
        size, rank = world().size, world().rank
        config = {"task": {"type": "worker", "index": rank}} if has_task else {}
        log.once.cache_clear()
        with mock.patch.dict(os.environ, TF_CONFIG=json.dumps(config)), ms.MultiWorkerMirroredStrategy() as strategy:
            assert strategy.size == size
        logged = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "TF_CONFIG" in r.getMessage()]
        expected = "TF_CONFIG has no cluster: the 2 ranks of MPI train together"
        assert (expected in "".join(logged)) == (size == 2 and rank == 0), logged

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize(
        ("config", "got"),
        [
            ({}, "none"),
            ({"task": {"type": "worker", "index": 0}}, "none"),
            ({"cluster": {"worker": WORKERS[:2]}}, "only worker"),
        ],
    )
    def test_servers_need_ps_tasks_in_tf_config(self, config, got):
        with mock.patch.dict(os.environ, TF_CONFIG=json.dumps(config)):
            with pytest.raises(
                ms.errors.ClusterError, match=rf'TF_CONFIG: "cluster": expected ps tasks, got {got}. Add them'
            ):
                ms.ParameterServerStrategy()
            with ms.ParameterServerStrategy(num_ps=1) as strategy:
                assert strategy.num_ps == 1

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize(
        ("text", "error"),
        [
            ("{no JSON", "TF_CONFIG"),
            ({"cluster": {"boss": WORKERS[:2]}}, "boss"),
            ({"cluster": {"chief": WORKERS[:2]}}, "at most one chief"),
            ({"cluster": {"worker": WORKERS[:3]}}, r"ranks \(2\), got 3"),
            ({"cluster": {"worker": WORKERS[:2], "ps": WORKERS[2:3]}}, "no ps task"),
            ({"cluster": {"chief": WORKERS[:1], "worker": WORKERS[1:3]}}, r"ranks \(2\), got 3"),
        ],
    )
    def test_tf_config_that_is_wrong(self, text, error):
        text = (
            text
            if isinstance(text, str)
            else json.dumps(text | {"task": {"type": next(iter(text["cluster"])), "index": 0}})
        )
        with mock.patch.dict(os.environ, TF_CONFIG=text), pytest.raises(ClusterError, match=error):
            ms.MultiWorkerMirroredStrategy()

    @pytest.mark.ranks(2)
    def test_tf_config_that_is_wrong_on_one_rank(self):
        text = "{" if world().rank else json.dumps({"cluster": {}})
        with mock.patch.dict(os.environ, TF_CONFIG=text), pytest.raises(ClusterError, match="TF_CONFIG"):
            ms.MultiWorkerMirroredStrategy()

    @pytest.mark.ranks(2, 3)
    def test_ranks_are_numbered_as_the_cluster_does(self):
        """MPI's last rank is the chief, the others are workers in the opposite order."""
        size, rank = world().size, world().rank
        chief = "chief" if size == 2 else "master"  # TensorFlow 1's word
        cluster = ms.ClusterSpec({"worker": WORKERS[1:size], chief: WORKERS[:1]})
        job, index = (chief, 0) if rank == size - 1 else ("worker", size - 2 - rank)
        place = 0 if job == chief else 1 + index
        resolver = ms.cluster_resolver.SimpleClusterResolver(cluster, task_type=job, task_id=index)
        with ms.MultiWorkerMirroredStrategy(resolver, devices=["cpu:0", "cpu:1"][: 1 + rank % 2]) as strategy:
            assert strategy.cluster_resolver is resolver
            assert (strategy.rank, strategy.size, strategy.comm.rank) == (place, size, place)
            assert strategy.extended.should_checkpoint == (job == chief)
            own = strategy.run(lambda: ms.get_replica_context().replica_id_in_sync_group)
            counts = strategy.comm.allgather(1 + rank % 2)  # in the cluster's order
            first = sum(counts[:place])
            assert strategy.local_results(own) == tuple(range(first, first + counts[place]))
            names = strategy.gather(strategy.run(lambda: np.array([rank])), axis=0)
            assert names.tolist() == [at for at in reversed(range(size)) for _ in range(1 + at % 2)]
            with strategy.scope():
                v = ms.Variable(float(rank), name="v")
            assert v.numpy() == size - 1  # the chief's

    @pytest.mark.ranks(3)
    @pytest.mark.parametrize(
        ("task", "error"),
        [
            (lambda rank: ("worker", min(rank, 1)), "each task once, got worker 1 for ranks 1 and 2"),
            (lambda rank: ("worker", rank) if rank else (None, None), "a task for every rank, got none for rank 0"),
            (
                lambda rank: ("worker", rank) if rank else ("worker", None),
                "rank 0.*neither, got 'worker' and None|neith",
            ),
            (lambda rank: ("worker", rank) if rank < 2 else ("evaluator", 0), "evaluator 0|as many chief and worker"),
        ],
    )
    def test_tasks_that_do_not_fit_are_named_on_every_rank(self, task, error):
        for strategy in (ms.MultiWorkerMirroredStrategy, ms.ParameterServerStrategy):
            job, index = task(world().rank)
            cluster = {"worker": WORKERS[:2], "ps": WORKERS[2:3]} if "Server" in strategy.__name__ else {}
            cluster = ms.ClusterSpec(cluster or {"worker": WORKERS[:3]})
            if cluster.num_tasks("worker") == 2 and (job, index) == ("worker", 2):
                job, index = "ps", 0
            resolver = ms.cluster_resolver.SimpleClusterResolver(cluster, task_type=job, task_id=index)
            with pytest.raises(ClusterError, match=error):
                strategy(resolver)

    @pytest.mark.ranks(2, 3)
    def test_clusters_that_differ_are_named_on_every_rank(self):
        size, rank = world().size, world().rank
        last = [*WORKERS[: size - 1], "elsewhere:1"] if rank == size - 1 else WORKERS[:size]
        resolver = ms.cluster_resolver.SimpleClusterResolver(
            ms.ClusterSpec({"worker": last}), task_type="worker", task_id=rank
        )
        with pytest.raises(
            ClusterError, match=f"one cluster on all ranks, got another on rank {size - 1} than on rank 0"
        ):
            ms.MultiWorkerMirroredStrategy(resolver)
        config = {"cluster": {"worker": WORKERS[:size]}, "task": {"type": "worker", "index": rank}}
        with (
            mock.patch.dict(os.environ, {"TF_CONFIG": json.dumps(config)} if rank else {}),
            pytest.raises(ClusterError, match="another on rank"),
        ):
            ms.MultiWorkerMirroredStrategy()

    @pytest.mark.ranks(2)
    def test_resolvers_without_tasks_and_jobs_of_mpi(self):
        without = ms.cluster_resolver.SimpleClusterResolver(ms.ClusterSpec({"worker": WORKERS[:2]}))
        with ms.MultiWorkerMirroredStrategy(without) as strategy:
            assert strategy.rank == world().rank
        with ms.MultiWorkerMirroredStrategy(
            ms.cluster_resolver.MPIClusterResolver(jobs={"worker": [1, 0]})
        ) as strategy:
            assert strategy.rank == 1 - world().rank


@pytest.mark.ranks(2, 3)
def test_central_storage_keeps_everything_with_the_leader():
    with made("central_storage") as strategy:
        with strategy.scope():
            w = ms.Variable(np.zeros(1000), name="w")
        optimizer = ms.optimizers.Adam(0.1)
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(1000), w)]))
        arena = strategy.extended.placement.arenas.arenas[0]
        assert arena.owned([(0, 1000)]) == ([(0, 1000)] if strategy.rank == 0 else [])
        assert arena.writes(1000) == ((0, 1000) if strategy.rank == 0 else (0, 0))
        assert np.allclose(w.numpy(), -0.1)
        assert strategy.extended.parameter_devices == ("cpu:0",)


@pytest.mark.ranks(2)
def test_every_rank_hears_of_a_file_that_cannot_be_written():
    with made("mirrored") as strategy:
        with strategy.scope():
            ms.Variable(1.0)
        with pytest.raises(OSError, match="no_such_folder"):
            strategy.save("/no_such_folder/x.h5")
        with pytest.raises(OSError, match="no such file"):
            strategy.restore("/no_such_folder/x.h5")
        with pytest.raises(CollectiveMismatchError, match="other"):
            strategy.save(f"/no_such_folder/{'other' if strategy.rank else 'one'}.h5")


@pytest.mark.ranks(2)
def test_what_the_program_adds_to_a_file(mpi_tmp_path):
    """The same comes back on every rank; what differs, and what is no JSON on one rank, is refused by all."""
    path = mpi_tmp_path / "x.h5"
    with made("multi_worker_mirrored") as strategy:
        with strategy.scope():
            ms.Variable(np.arange(4.0), name="v")
        strategy.save(path, extra={"epoch": 2, "losses": [0.5] * 1000})
        assert strategy.restore(path) == {"epoch": 2, "losses": [0.5] * 1000}
        with pytest.raises(CollectiveMismatchError, match=r'rank 0: \{"epoch": 0\}; rank 1: \{"epoch": 1\}'):
            strategy.save(path, extra={"epoch": strategy.rank})
        with pytest.raises(CollectiveMismatchError, match="extra: .* rank 1: none"):
            strategy.save(path, extra=None if strategy.rank else {})
        with pytest.raises(TypeError, match=r"extra\['epoch'\]: expected numbers"):
            strategy.save(path, extra={"epoch": np.ones(2) if strategy.rank else 1})
        assert strategy.restore(path)["epoch"] == 2


@pytest.mark.ranks(2)
def test_every_rank_hears_of_a_damaged_file(mpi_tmp_path):
    import h5py

    path = mpi_tmp_path / "x.h5"
    with made("multi_worker_mirrored") as strategy:
        with strategy.scope():
            v = ms.Variable(np.arange(4.0), name="v")
        strategy.save(path)
        if strategy.rank == 0:
            with h5py.File(path) as file:
                place = file["variables/v"].id.get_offset()
            data = bytearray(path.read_bytes())
            data[place + 9] ^= 4
            path.write_bytes(data)
        with pytest.raises(OSError, match=r"x.h5: variables/v is not as it was saved"):
            strategy.restore(path)
        assert v.numpy().tolist() == [0.0, 1.0, 2.0, 3.0]


RESUMED = """
import numpy as np
import mpistrat as ms
from mpistrat.base import log


def counters(how):
    return [ms.Variable(np.int64(0), name=f"{name}_{how}") for name in ("epoch", "step")]


def train(how):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            w = ms.Variable(np.zeros(3), name="w")
            optimizer = ms.optimizers.SGD(0.5)
            if how == "scope":
                epoch, step = counters(how)
        if how != "scope":
            epoch, step = counters(how)
        if AGAIN:
            notes = strategy.restore(f"{how}.h5")
            if how == "extra":
                epoch.assign(notes["epoch"])
                step.assign(notes["step"])
        print(how, "begins at", int(epoch.numpy()), int(step.numpy()))
        while epoch.numpy() < 3:
            while step.numpy() < 4:
                strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), w)]))
                step.assign_add(1)
                if epoch.numpy() == 1 and step.numpy() == 2 and not AGAIN:
                    strategy.save(f"{how}.h5", extra={"epoch": epoch.numpy(), "step": step.numpy()} if how == "extra" else None)
                    return
            epoch.assign_add(1)
            step.assign(0)
        print(how, "ends with", w.numpy().tolist())


for how in ("scope", "extra", "outside"):
    train(how)
"""


def test_counters_go_on_where_they_were_saved(mpi_run, tmp_path):
    """As in TensorFlow's tutorial of custom loops: epoch and step in the scope, or as `extra`; or not, and then it is said."""
    first = mpi_run(f"AGAIN = False\n{RESUMED}", 2, cwd=tmp_path, timeout=60)
    assert first.returncode == 0, first.stderr
    told = [line for line in first.stderr.splitlines() if "neither saved nor restored" in line]
    assert len(told) == 2 and "'epoch_extra', 'step_extra'" in told[0] and "'epoch_outside', 'step_outside'" in told[1]
    again = mpi_run(f"AGAIN = True\n{RESUMED}", 2, cwd=tmp_path, timeout=60)
    assert again.returncode == 0, again.stderr
    # 12 steps over all, each of 0.5 times the sum of two ranks' gradients; from the beginning, 6 + 12.
    assert again.out[0].splitlines() == [
        "scope begins at 1 2", f"scope ends with {[-12.0] * 3}",
        "extra begins at 1 2", f"extra ends with {[-12.0] * 3}",
        "outside begins at 0 0", f"outside ends with {[-18.0] * 3}",
    ]  # fmt: skip


@pytest.mark.ranks(2)
def test_show_config(capsys):
    with made("multi_worker_mirrored", "uneven") as strategy:
        text = ms.show_config(strategy)
    assert "rank 1" in text
    assert "devices cpu:0, cpu:1" in text
    assert "3 replicas on 2 ranks" in text
    assert capsys.readouterr().out == (text + "\n" if strategy.rank == 0 else "")


@pytest.mark.ranks(2)
def test_a_mistake_among_local_replicas_leaves_the_ranks_usable():
    with made("mirrored", "2") as strategy:

        def step():
            if ms.get_replica_context().replica_id_in_sync_group % 2:
                ms.get_replica_context().all_reduce("SUM", 1.0)

        with pytest.raises(RuntimeError, match="has returned"):
            strategy.run(step)
        assert strategy.reduce("SUM", strategy.run(lambda: 1), axis=None) == 4


@pytest.mark.ranks(2)
def test_a_user_s_own_algorithm():
    class Counting(ms.CrossDeviceOps):
        calls = 0

        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            self.calls += 1
            table = self.group.all_gather_int([int(sum(per_replica_value.values))])
            return np.asarray(table.sum())

        def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
            return [self.reduce_implementation(reduce_op, v, d, options) for v, d in value_destination_pairs]

    ops = Counting()
    with ms.MirroredStrategy(["cpu:0", "cpu:1"], cross_device_ops=ops) as strategy:
        assert strategy.reduce("SUM", strategy.run(lambda: 5), axis=None) == 20
        assert strategy.reduce("SUM", strategy.run(lambda: (1, 2)), axis=None) == (4, 8)
        assert strategy.run(lambda: ms.get_replica_context().all_reduce("SUM", 1)).values == (4, 4)
    assert ops.calls == 4


@pytest.mark.ranks(1, 2)
def test_shared_memory_may_be_refused():
    with mock.patch.dict(os.environ, MPISTRAT_SHARED_MEMORY="0"), made("central_storage", "2") as strategy:
        with strategy.scope():
            v = ms.Variable(np.zeros(3), name="v", aggregation=ms.VariableAggregation.MEAN)
        strategy.run(lambda: v.assign(np.full(3, float(ms.get_replica_context().replica_id_in_sync_group))))
        assert v.numpy().tolist() == [(strategy.num_replicas_in_sync - 1) / 2] * 3


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("size", [3, 1 << 18])  # by way of the ranks' staging room, and of memory of its own
def test_close_frees_the_shared_memory_of_reductions(size):
    before = removed_maps()
    with made("mirrored") as strategy:
        strategy.reduce("SUM", np.ones(size), axis=None)
        blocks = strategy.extended.process_group.node._blocks
        segments = [weakref.ref(segment) for block in blocks for segment in block.segments]
        del blocks
    assert segments
    gc.collect()
    assert not any(segment() is not None for segment in segments)
    assert not removed_maps() - before


def removed_maps():
    """Return the maps of this process whose files have no name any more; other tests may have left some."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "/dev/shm/mpistrat" in line and "(deleted)" in line}

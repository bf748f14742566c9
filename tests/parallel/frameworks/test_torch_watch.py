"""A program of torch.distributed is watched as one of a strategy: the page of a run, times, a trace, `mpistrat top`, `stacks`."""

import gzip
import json
import os
import re
import signal
import subprocess
import time

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import mpistrat as ms  # noqa: E402
from tests.harness.torch_groups import default_group  # noqa: E402
from tests.launch.launcher import job_environment  # noqa: E402

LATE, STEPS = 0.02, 10


def trained(steps, late=1):
    """Train by DDP, one rank being late in each step; yield after each step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        if dist.get_rank() == late:
            time.sleep(LATE)
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        yield


@pytest.mark.ranks(2, 4)
def test_the_page_names_the_rank_that_made_others_wait(mpi_tmp_path):
    with default_group():
        size = dist.get_world_size()
        with ms.monitor(mpi_tmp_path, config={"rate": 0.1}, progress=False, tensorboard=False) as run:
            for epoch in range(2):
                for _ in trained(STEPS):
                    run.step(rows=3)
                run.epoch({"loss": 1.0 / (epoch + 1)})
        dist.barrier()
        page = (mpi_tmp_path / "run.html").read_text()
        found = [json.loads(line) for line in (mpi_tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found] == [STEPS, 2 * STEPS]
    seconds = [epoch["seconds"] for epoch in run.record.epochs]
    for line, each in zip(found, seconds, strict=True):
        assert line["samples_per_second"] == pytest.approx(3 * STEPS * size / each)
    assert (
        '<th scope="row">rate</th><td>0.1</td>' in page
        and "torch.distributed" in page
        and "ended: 2 epochs, 20 steps" in page
    )
    table = page.partition("Stragglers</caption>")[2].partition("</table>")[0]
    rows = re.findall(r"rank (\d+) on .*?>(\d+) of \d+</td>.*?>([\d.e+-]+) s<", table)
    found = {int(rank): (int(last), float(cost)) for rank, last, cost in rows}
    assert found[1][1] > 0.8 * LATE * STEPS * (size - 1), "of the last epoch at least"
    assert found[1][0] >= STEPS - 1


@pytest.mark.ranks(2, 4)
def test_times_and_a_trace(mpi_tmp_path):
    with default_group() as group:
        begun = time.perf_counter()  # the recorders remember what other tests of this process did
        for _ in trained(STEPS):
            pass
        times = ms.timeline.times(group, time.perf_counter() - begun)
        ms.timeline.save(mpi_tmp_path / "trace.json.gz")
        dist.barrier()
        names = {
            one["name"]
            for one in json.loads(gzip.decompress((mpi_tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
        }
    assert [one.rank for one in times] == list(range(len(times)))
    assert all(one.steps >= STEPS - 1 for one in times)
    assert times[1].last >= STEPS - 2 and times[1].compute > 0.2
    assert {"dist.all_reduce", "step", "process_name"} <= names


@pytest.mark.ranks(2)
def test_of_optimizers_that_take_turns_one_counts_and_of_two_models_both():
    with default_group():
        first, second, third = (torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1) for _ in range(3))

        def counted(*optimizers):
            before = ms.timeline.times()[0].steps
            for _ in range(10):
                for optimizer in optimizers:
                    optimizer.step()
            return ms.timeline.times()[0].steps - before

        assert 9 <= counted(first, second) <= 11
        assert 8 <= counted(third) <= 10
        assert 8 <= counted(first) <= 10


@pytest.mark.ranks(2)
def test_it_comes_between_operations_that_run_in_a_thread():
    """Ranks differ in what they wait for first, and the sums and the times are right."""
    with default_group() as group:
        values = [torch.full((1000,), float(dist.get_rank() + 1)) for _ in range(20)]
        works = []
        for number, value in enumerate(values):
            works.append(dist.all_reduce(value, async_op=True))
            if number % 5 == 0:
                assert len(ms.timeline.times()) == 2
                assert group.members.all_gather_object(dist.get_rank()) == [0, 1]
            if number % 2 == dist.get_rank():
                works[-1].wait()
        for work, value in zip(works, values, strict=True):
            work.wait()
            assert value.eq(3).all()


@pytest.mark.ranks(2)
def test_a_monitor_on_one_rank_alone_is_an_error_on_both(tmp_path):
    with (
        default_group(),
        pytest.raises(
            ms.errors.CollectiveMismatchError, match="rank 0: dist.all_reduce .*rank 1: GroupRanks.all_gather_object"
        ),
    ):
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(2))
        else:
            ms.monitor(tmp_path, progress=False).__enter__()


@pytest.mark.ranks(2)
def test_a_group_of_another_backend_is_an_error(tmp_path):
    with default_group(backend="gloo"):
        for call in (ms.timeline.times, ms.monitor(tmp_path, progress=False).__enter__):
            with pytest.raises(
                ms.errors.ContextError, match="expected a strategy, or a group of MPI, got .*gloo.*init_process_group"
            ):
                call()


@pytest.mark.ranks(2)
def test_a_strategy_counts_where_a_scope_has_one():
    with default_group(), ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        strategy.run(lambda: None)
        assert strategy.extended.process_group is not None and len(ms.timeline.times()) == 2
        assert [one.steps >= 1 for one in ms.timeline.times()] == [True, True]


@pytest.mark.ranks(2)
def test_a_destroyed_group_is_an_error():
    with default_group() as group:
        members = group.members
    del group
    with pytest.raises((RuntimeError, ms.errors.ClosedError), match="destroyed"):
        members.barrier()


PLAIN = """
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def slow_part(rank):
    time.sleep(0.03 if rank == 1 else 0.001)


def main():
    model = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(100_000):
        optimizer.zero_grad()
        slow_part(dist.get_rank())
        model(torch.ones(3, 4)).square().mean().backward()
        optimizer.step()
        if number == 5 and dist.get_rank() == 0:
            print("runs", flush=True)


dist.init_process_group("mpi")
main()
"""


def test_top_and_stacks_see_a_program_without_a_word_of_this_package(mpi, tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    environment = job_environment("none", tmp_path, {"PATH": "/usr/bin:/bin"})
    words = [*mpi.command(2), mpi.python, str(tmp_path / "plain.py")]
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def look(*command):
        done = subprocess.run([mpi.python, "-m", "mpistrat", *command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    try:
        assert "runs" in process.stdout.readline()
        time.sleep(1.5)
        rows = look("top", str(process.pid), "--json", "--seconds", "1")
        answers = look("stacks", str(process.pid), "--json")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
        process.stdout.close()
    assert [row["rank"].split(" (")[0] for row in rows] == ["rank 0 of 2", "rank 1 of 2"]
    assert all(3 < row["steps_per_second"] < 40 for row in rows), rows
    assert rows[0]["waiting"] > rows[1]["waiting"] and rows[1]["compute"] > rows[0]["compute"], rows
    assert "in main" in answers[0]["threads"]["MainThread"]
    assert any("plain.py" in answer["position"] for answer in answers), answers

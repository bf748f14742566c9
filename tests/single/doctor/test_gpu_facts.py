"""GPUs in the doctor: parts of GPUs, cgroups, AMD's GPUs, and whether frameworks see those of CuPy."""

import os

import pytest

from mpistrat.doctor import libraries
from mpistrat.doctor.libraries import amd_gpus, check_gpus, gpus_of_machine, reachable_gpus
from mpistrat.doctor.probe import Outcome
from tests.single.doctor.test_compare import bad, rows

PROCESSOR = "cpu_cores_count 16\nsimd_count 0\nlocation_id 0\ndomain 0\n"
GPU = "cpu_cores_count 0\nsimd_count 440\nlocation_id {}\ndomain {}\n"


def test_parts_of_one_gpu():
    """MIG: each part has a UUID of its own, and NCCL refuses two of one bus id."""
    parts = [{"gpus": [f"MIG-{n}"], "buses": ["0000:07:00.0"]} for n in range(2)]
    (found,) = bad(rows(*parts, node_gpus=1))
    assert (found.name, found.status) == ("GPUs", "warning")
    assert "ranks 0, 1 on h0 have parts (MIG) of the GPU 0000:07:00.0 of node 0: NCCL refuses them" in found.what
    other = [parts[0], {**parts[1], "node": 1}]  # a place on each node's bus
    assert bad(rows(*other, node_gpus=1)) == []


@pytest.mark.parametrize(
    ("reachable", "warns"),
    [((1, 1), "ranks 0, 1 reach 1 of 2"), ((2, 2), ""), ((None, None), ""), ((2, 1), "ranks 1 reach 1 of 2")],
)
def test_a_cgroup_keeps_ranks_from_the_gpus_of_others(reachable, warns):
    own = [{"gpus": [f"GPU-{n}"], "reachable_gpus": count} for n, count in enumerate(reachable)]
    found = bad(rows(*own, node_gpus=2))
    assert [one.name for one in found] == ["NVLink"] * bool(warns)
    assert not warns or (warns in found[0].what and "--gpu-bind=none" in found[0].remedy)


def test_a_rank_alone_on_its_node_takes_what_it_was_given():
    assert bad(rows({"gpus": ["GPU-0"], "reachable_gpus": 1}, node_gpus=2)) == []


def test_files_of_gpus_that_open(tmp_path):
    assert reachable_gpus(tmp_path) is None
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert reachable_gpus(tmp_path) == 2
    (tmp_path / "nvidia1").unlink()
    os.symlink("nowhere", tmp_path / "nvidia1")  # cannot be opened
    assert reachable_gpus(tmp_path) == 1


def test_gpus_of_amd_by_the_drivers_folders(tmp_path, monkeypatch):
    """Bus and device number are in location_id: 0xc100 is bus c1, device 0."""
    assert amd_gpus(tmp_path) == []
    for number, text in enumerate((PROCESSOR, GPU.format(0xC100, 0), GPU.format(0xD909, 1), "no text of ours")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "properties").write_text(text)
    assert amd_gpus(tmp_path) == ["0000:c1:00.0", "0001:d9:01.1"]
    monkeypatch.setattr(libraries, "_NVIDIA", tmp_path / "none")
    monkeypatch.setattr(libraries, "_AMD", tmp_path)
    assert len(gpus_of_machine()) == 2
    (found,) = check_gpus(outcome([], no_gpu="no driver"), ())
    assert found.what.startswith("this machine has 2 AMD GPUs, ") and found.status == "warning"


def outcome(gpus, no_gpu="", **more):
    records = [
        {"h5py": ["3", "2", False], "gpus": [[uuid, "H100"] for uuid in gpus], "no_gpu": no_gpu},
        *({key: value} for key, value in more.items()),
    ]
    return Outcome(tuple(records), "", 0, "")


@pytest.mark.parametrize(
    ("torch", "status", "says"),
    [
        (["GPU-a", "GPU-b"], "OK", "PyTorch and CuPy see the same"),
        (["?", "?"], "OK", "PyTorch and CuPy see the same"),
        ([], "warning", "PyTorch sees none, CuPy 2"),
        (["GPU-b", "GPU-a"], "problem", "PyTorch sees GPU-b, GPU-a, CuPy GPU-a, GPU-b"),
        (["?"], "problem", "PyTorch sees ?, CuPy GPU-a, GPU-b"),
    ],
)
def test_frameworks_see_the_gpus_of_cupy(torch, status, says):
    found = {one.name: one for one in check_gpus(outcome(["GPU-a", "GPU-b"], torch=torch, jax=["?", "?"]), ())}
    assert (found["GPUs of PyTorch"].status, found["GPUs of JAX"].status) == (status, "OK")
    assert found["GPUs of PyTorch"].what.startswith(says)


def test_frameworks_are_not_asked_where_there_is_no_gpu():
    assert [one.name for one in check_gpus(outcome([], torch=[]), ())] == ["GPU"]

"""The cores of a process under masks, hyperthreads, quotas of control groups, and SLURM."""

import os
from pathlib import Path

import pytest

from mpistrat.base import cores
from mpistrat.base.cores import allotted, count_cores, cpu_quota, threads_per_core, usable_cores

V2 = "0::/kubepods/pod1/box\n"
V1 = "12:cpuset:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of files: 8 CPUs, two a core (0 and 4 are one), no control group; all CPUs are in the mask."""
    for cpu in range(8):
        write(tmp_path / "cpu" / f"cpu{cpu}" / "topology" / "thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}\n")
    (tmp_path / "cgroup").mkdir()
    monkeypatch.setattr(cores, "_CPUS", tmp_path / "cpu")
    monkeypatch.setattr(cores, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cores, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(cores, "available_cores", lambda: list(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_hardware_threads_of_a_core_count_once(machine, monkeypatch):
    assert count_cores(range(8)) == 4
    assert count_cores([0, 4]) == 1
    assert threads_per_core() == 2
    assert usable_cores() == 4
    monkeypatch.setattr(cores, "available_cores", lambda: [1, 5, 2])
    assert usable_cores() == 2


@pytest.mark.parametrize(("text", "number"), [("0", 1), ("0-1", 2), ("0,64", 2)])
def test_threads_per_core(machine, text, number):
    write(machine / "cpu" / "cpu0" / "topology" / "thread_siblings_list", text)
    assert threads_per_core() == number


def test_cpus_that_the_system_does_not_describe_are_cores(machine):
    assert count_cores([100, 101]) == 2


@pytest.mark.parametrize(
    ("own", "file", "text", "quota"),
    [
        (V2, "cgroup/kubepods/pod1/box/cpu.max", "200000 100000", 2.0),
        (V2, "cgroup/kubepods/cpu.max", "150000 100000", 1.5),  # of a group that ours lies in
        (V2, "cgroup/cpu.max", "50000 100000", 0.5),  # in a container: the tree begins at its own group
        (V2, "cgroup/kubepods/pod1/box/cpu.max", "max 100000", None),
        (V2, "cgroup/elsewhere/cpu.max", "100000 100000", None),
        (V2, "cgroup/cpu.max", "", None),
        ("", "cgroup/cpu.max", "100000 100000", None),
    ],
)
def test_quotas_of_version_2(machine, own, file, text, quota):
    write(machine / "cgroup" / "cgroup.controllers", "cpu memory")
    if own:
        write(machine / "own", own)
    write(machine / file, text)
    found = cpu_quota()
    assert (found and found.cores) == quota
    assert usable_cores() == (4 if quota is None else max(1, int(quota)))


@pytest.mark.parametrize("folder", ["docker/abc", "docker", ""])
@pytest.mark.parametrize(("text", "quota"), [("300000", 3.0), ("-1", None)])
def test_quotas_of_version_1(machine, folder, text, quota):
    write(machine / "own", V1)
    tree = machine / "cgroup" / "cpu,cpuacct"
    write(tree / folder / "cpu.cfs_quota_us", text)
    write(tree / folder / "cpu.cfs_period_us", "100000")
    found = cpu_quota()
    assert (found and found.cores) == quota


def test_the_tightest_quota_holds_and_tells_its_group(machine):
    write(machine / "cgroup" / "cgroup.controllers", "cpu")
    write(machine / "own", V2)
    write(machine / "cgroup/kubepods/cpu.max", "200000 100000")
    write(machine / "cgroup/kubepods/pod1/box/cpu.max", "400000 100000")
    found = cpu_quota()
    assert found.cores == 2
    assert found.group == (machine / "cgroup" / "kubepods").stat().st_ino


def test_slurm_s_numbers_count_where_nothing_binds(machine, monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    assert usable_cores() == 3
    monkeypatch.setattr(cores, "available_cores", lambda: [0, 1, 2, 3, 5])  # the task is bound
    assert usable_cores() == 4
    assert allotted("SLURM_CPUS_PER_TASK") is None


@pytest.mark.parametrize("text", ["", "0", "many", "-2", "²"])
def test_what_is_no_number_is_none_of_slurm_s(machine, monkeypatch, text):
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", text)
    assert allotted("SLURM_CPUS_PER_TASK") is None

"""The doctor's all-reduce and windows where they are slow, or do not give what they should on some ranks."""

from __future__ import annotations

import pytest

from tests.harness.doctor_runs import documented

pytestmark = pytest.mark.ranks(2, 3)


@pytest.fixture
def group():
    from mpistrat.base.environment import Environment
    from mpistrat.cluster.topology import Topology
    from mpistrat.comm.process_group import ProcessGroup

    topology = Topology.create(devices=["cpu:0"])
    group = ProcessGroup.create(topology, Environment(abort_after=20.0))
    yield group
    group.close()
    topology.close()


def statuses(findings) -> dict[str, str]:
    assert {finding.name for finding in findings} <= documented("On the ranks of a job")
    assert all(finding.remedy for finding in findings if finding.status != "OK")
    return {finding.name: finding.status for finding in findings}


def test_all_is_well(group):
    from mpistrat.doctor.transfers import check_all_reduce, check_windows

    assert check_all_reduce(group).status == "OK"
    assert statuses(list(check_windows(group))) == {"shared memory": "OK", "one-sided calls": "OK"}


def test_a_slow_all_reduce(group, monkeypatch):
    from mpistrat.doctor import transfers

    monkeypatch.setattr(transfers, "_SLOW", 0.0)
    finding = transfers.check_all_reduce(group)
    assert statuses([finding]) == {"all-reduce": "warning"}
    assert finding.what.startswith(f"4 MiB over {group.topology.size} ranks")


def test_a_wrong_sum_on_the_last_rank(group, monkeypatch):
    from mpistrat.cross_device.auto import AutoAllReduce
    from mpistrat.doctor.transfers import check_all_reduce

    last, reduce = group.topology.size - 1, AutoAllReduce.reduce

    def wrong(*words):
        total = reduce(*words).copy()
        total[-1] += group.topology.rank == last
        return total

    monkeypatch.setattr(AutoAllReduce, "reduce", wrong)
    finding = check_all_reduce(group)
    assert statuses([finding]) == {"all-reduce": "problem"}
    assert finding.what.startswith(f"the sum is wrong on ranks {last}; 4 MiB")


@pytest.mark.parametrize("name", ["shared memory", "one-sided calls"])
@pytest.mark.parametrize("method", ["get", "get_word"])
def test_a_wrong_window_on_the_last_rank(group, monkeypatch, name, method):
    from mpistrat.comm.window import RemoteWindow, SharedWindow
    from mpistrat.doctor.transfers import check_windows

    last, kind = group.topology.size - 1, SharedWindow if name == "shared memory" else RemoteWindow
    right = getattr(kind, method)

    def wrong(self, rank, offset, *out):
        found = right(self, rank, offset, *out)
        if group.topology.rank != last:
            return found
        if out:
            out[0][-1] ^= 1
        return None if out else found + 1

    monkeypatch.setattr(kind, method, wrong)
    findings = list(check_windows(group))
    assert statuses(findings) == {"shared memory": "OK", "one-sided calls": "OK"} | {name: "problem"}
    assert next(one for one in findings if one.name == name).what.endswith(f"on ranks {last}")

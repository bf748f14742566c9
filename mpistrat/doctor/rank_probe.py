"""A watched program on every rank: it meets the others, compares, and tries transfers; rank 0's says what was found."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from ..cluster.launcher_variables import lone_rank
from ..cluster.launchers import imported_library
from ..cluster.pmi import pmi2_remedy
from ..cluster.topology import Topology
from ..comm.agree import gather_text
from ..comm.process_group import ProcessGroup
from ..environment import Environment
from .clocks import check_clocks
from .compare import compare
from .facts import facts
from .finding import Finding, problem, warning
from .launching import TOO_LONG
from .shared_folder import readable_by_others, segments_of_this_process
from .temporary_folder import check_temporary_folder
from .transfers import check_all_reduce, check_windows
from .watched import say, step

__all__ = ["main"]


def main(limit: float, needs: Sequence[str]) -> None:
    """Start MPI and look at all ranks. Collective.

    Args:
        limit: seconds after which a collective is given up.
        needs: what the user cannot do without.
    """
    step("import mpi4py.MPI")
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    library = imported_library()
    say(vendor=MPI.get_vendor()[0], pmi2_remedy=pmi2_remedy(library) if library is not None else "")
    step("MPI_Init_thread")
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    lone = lone_rank(MPI.COMM_WORLD.size)
    if lone is not None:
        _report(problem("launch", f"expected {lone.expected}; got {lone.got}", lone.remedy))
    else:
        _look(limit, needs)
    step("MPI_Finalize")
    MPI.Finalize()


def _look(limit: float, needs: Sequence[str]) -> None:
    step("meeting the other ranks")
    topology = Topology.create(devices=["cpu:0"])
    comm, leads = topology.comm, topology.rank == 0
    rows = [json.loads(text) for text in gather_text(comm, json.dumps(facts(topology, needs)))]
    if leads:
        say(ranks=rows)
        for finding in compare(rows):
            _report(finding)
        library = imported_library()
        if library is not None and os.environ.get("SLURM_MPI_TYPE") == "pmi2" and (remedy := pmi2_remedy(library)):
            _report(warning("srun", f"it went well this time, but {TOO_LONG.format(library=library)}", remedy))
    step("comparing clocks")
    clocks = check_clocks(topology)
    step("looking at the temporary folder")
    found = [clocks, check_temporary_folder(topology)]
    if leads:
        for finding in found:
            _report(finding)
    if all(row["settings"] == rows[0]["settings"] and "role_error" not in row for row in rows):
        _try(topology, limit)  # with different settings the ranks refuse to meet, as they should
    topology.close()


def _try(topology: Topology, limit: float) -> None:
    leads = topology.rank == 0
    step("making the ranks' shared memory")
    environment = replace(Environment.read(), abort_after=limit, warn_after=limit)
    group = ProcessGroup.create(topology, environment)
    step("all-reduce")
    finding: Finding | None = check_all_reduce(group)
    if leads:
        _report(finding)
    step("windows")
    for finding in check_windows(group):
        if leads:
            _report(finding)
    finding = _segments(topology.comm)
    if leads:
        _report(finding)
    group.close()


def _segments(comm: Any) -> Finding | None:
    """Return whether others may read what any rank has mapped of /dev/shm. Collective."""
    mine = readable_by_others(segments_of_this_process())
    told = [text for text in gather_text(comm, "" if mine is None else json.dumps(asdict(mine))) if text]
    return Finding(**json.loads(told[0])) if told else None


def _report(finding: Finding | None) -> None:
    if finding is not None:
        say(finding=asdict(finding))


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])

"""The doctor on all ranks of a job: each process watches a child that communicates with the others.

The child has the launcher's variables and file descriptors, so it is the rank. If it crashes or hangs, also in MPI_Init, this
process, which never starts MPI, can report it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Collection

from ..cluster.launcher_variables import launched_rank, launched_size, launcher_remedy
from .finding import Finding, Summary, problem, warning
from .launching import TOO_LONG
from .probe import Outcome, Probe, last_line

__all__ = ["check_ranks"]

_GRACE = 1.0  # seconds, plus half of those that passed, in which rank 0 may report the same as other ranks


def check_ranks(needs: Collection[str], limit: float) -> Summary:
    """Return the findings on all ranks; except on the launcher's first process, this one's. Collective.

    A launcher may end a job when one process fails. So only processes with a finding of their own fail, and others wait
    longer than the first. All of it takes at most `limit` seconds.
    """
    start = time.monotonic()
    first = launched_rank() in (None, 0)
    timeout = limit if first else 1.5 * limit + 10
    child = Probe("mpistrat.doctor.rank_probe", [str(0.7 * limit), *needs])
    ended = False

    def end(*_: object) -> None:
        nonlocal ended
        ended = True
        child.kill()

    before = signal.signal(signal.SIGTERM, end)  # a launcher sends it when another rank has failed
    try:
        outcome = child.finish(timeout)
    finally:
        signal.signal(signal.SIGTERM, before)
    failed = None if outcome.ended_well else _failure(outcome, timeout, ended)
    if not first:
        if failed is not None and not ended:
            _print_later(failed, _GRACE + 0.5 * (time.monotonic() - start))
        return Summary([] if failed is None else [failed])
    findings = [Finding(**record["finding"]) for record in outcome.records if "finding" in record]
    if failed is not None:
        findings.append(failed)
    elif launched_size() is None:
        what = "one process, which no launcher started: there is nothing to compare"
        findings.append(
            warning("launch", what, "srun mpistrat doctor --ranks, or mpiexec -n 4 mpistrat doctor --ranks")
        )
    return Summary(findings, outcome.get("ranks") or ())


def _failure(outcome: Outcome, limit: float, ended: bool) -> Finding:
    where = f"rank {launched_rank() or 0} on {socket.gethostname()}"
    last = last_line(outcome.stderr)
    pmi2 = (
        outcome.get("pmi2_remedy") if outcome.step == "MPI_Init_thread" and "SLURM_STEP_NUM_TASKS" in os.environ else ""
    )
    cause = f"{TOO_LONG.format(library=outcome.get('vendor'))}. {pmi2[0].upper()}{pmi2[1:]}" if pmi2 else ""
    if ended:
        what = f"the launcher ended the job while {where} was at: {outcome.step}"
        return problem("launch", what, "Another rank failed: see what it wrote above")
    if outcome.returncode is None:
        what = f"{where} was still at this after {limit:g} s: {outcome.step}" + (f". It wrote: {last}" if last else "")
        remedy = "A rank is missing, or the network does not work between the nodes; --time-limit gives it longer"
        if cause:
            remedy = f"Under srun --mpi=pmi2 {cause}. Otherwise: {remedy[0].lower()}{remedy[1:]}"
        return problem(_check_of(outcome.step), what, remedy)
    remedy = "See what the ranks wrote above; run mpistrat doctor on that node"
    if outcome.step == "MPI_Init_thread" and launched_size() is not None:
        remedy = f"Under srun --mpi=pmi2 {cause}" if cause else launcher_remedy()
    return problem(_check_of(outcome.step), f"{where}: {outcome.step} {outcome.end()}", remedy)


def _check_of(step: str) -> str:
    return {
        "MPI_Init_thread": "MPI start",
        "all-reduce": "all-reduce",
        "windows": "one-sided calls",
        "sum by NCCL": "NCCL",
        "sum of GPUs' memory by MPI": "CUDA-aware MPI",
    }.get(step, "launch")


def _print_later(failed: Finding, delay: float) -> None:
    """Print in one line what happened to this process, unless rank 0 ends the job first, with the same text."""
    time.sleep(delay)
    print(f"mpistrat doctor: {failed.what}", file=sys.stderr, flush=True)

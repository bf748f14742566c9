"""The doctor on a login node: one process, which starts no MPI and imports nothing that may crash.

It starts two ranks with the launcher that fits, and reports the findings of `mpistrat doctor --ranks` on them.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Mapping

from ..base.errors import ClusterError
from ..cluster.launchers import Launcher, MPILibrary, choose_launcher, find_launchers, loaded_library
from .finding import Finding, ok, problem, worst
from .folders import check_shared_folder
from .launching import check_launchers, is_root
from .libraries import check_gpus, check_hdf5, check_loops
from .mpi import alone, check_library, check_start
from .probe import Probe, command, last_line
from .process import check_cores, check_interpreter, check_limits, check_torch

__all__ = [
    "NEEDS",
    "check_login",
    "check_pair",
]


_NAME = "two ranks"
_MEETING = 10.0  # seconds after the time limit of the ranks' own check within which it should have ended
# Findings that one process cannot have. The ranks' other findings repeat its own, or depend on the number of ranks.
_SHOWN = ("launch", "MPI start", "ranks", "all-reduce", "shared memory", "one-sided calls")


def check_pair(library: MPILibrary, launcher: Launcher, env: Mapping[str, str], limit: float) -> Finding:
    """Return the findings of two ranks, in at most `limit` seconds."""
    own = ["--oversubscribe", *["--allow-run-as-root"] * is_root()] if library.family == "openmpi" else []
    doctor = command("mpistrat", "doctor", "--ranks", "--json", "--time-limit", f"{limit:g}")
    words = [*launcher.command, *own, "-n", "2"]
    start = f"{' '.join(words)} mpistrat doctor --ranks"
    remedy = f"In a job, not on a login node, it may work. See what it prints: {start}"
    try:
        done = subprocess.run(
            [*words, *doctor], env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=limit + _MEETING,
        )  # fmt: skip
        findings = [Finding(**one) for one in json.loads(done.stdout[done.stdout.find("{") :])["findings"]]
    except subprocess.TimeoutExpired:
        return problem(_NAME, f"{start} did not return in {limit + _MEETING:g} s", remedy)
    except (ValueError, KeyError, TypeError):
        said = last_line(done.stderr) or last_line(done.stdout)
        return problem(_NAME, f"{start} ended with exit status {done.returncode}: {said}", remedy)
    else:
        bad = [one for one in findings if one.status != "OK" and one.name in _SHOWN]
        if bad:
            what = "; ".join(f"{one.name}: {one.what}" for one in bad)
            return Finding(_NAME, worst(bad), what, ". ".join(one.remedy for one in bad))
        seen = [one.what for one in findings if one.name in ("ranks", "all-reduce")]
        return ok(_NAME, f"{' '.join(words)}: {'; '.join(seen)}")


NEEDS = ("gpu", "nccl", "cuda-aware-mpi", "parallel-hdf5")


def check_login(needs: Collection[str], limit: float, *, clean: bool = False) -> list[Finding]:
    """Return the findings on this machine.

    Args:
        needs: from `NEEDS`: a missing one is a problem.
        limit: seconds for each probe.
        clean: remove files of this user's killed jobs from /dev/shm.
    """
    environment = alone()
    probes = {name: Probe(f"mpistrat.doctor.{name}", env=environment) for name in ("mpi", "libraries")}
    library: MPILibrary | None = None
    findings = list(check_interpreter())
    here = [*check_cores(), *check_shared_folder(clean=clean), *check_limits()]
    try:
        library = loaded_library()
        findings += check_library(library)
    except ClusterError as error:
        findings.append(problem("MPI library", str(error), "Load your site's MPI module, or: pip install mpich"))
    found = [] if library is None else find_launchers(library)
    launchers = [] if library is None else list(check_launchers(library, found))
    outcome = probes["mpi"].finish(limit)
    if library is not None:
        findings += check_start(outcome, library, "cuda-aware-mpi" in needs)
    findings += launchers
    fitting = None if library is None else choose_launcher(library, found)
    ready = all(
        one.status != "problem" for one in findings + here if one.name in ("MPI start", "shared memory", "/dev/shm")
    )
    if library is not None and fitting is not None and ready:
        findings.append(check_pair(library, fitting, environment, limit))
    outcome = probes["libraries"].finish(limit)
    findings += [
        *check_loops(outcome),
        *check_hdf5(outcome, library, needs),
        *check_gpus(outcome, needs),
        *check_torch(),
    ]
    return findings + here

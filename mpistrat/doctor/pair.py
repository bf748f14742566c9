"""Two ranks, started once by the launcher that fits: what `mpistrat doctor --ranks` finds on them, in the visit of a machine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping

from ..cluster.launchers import Launcher, MPILibrary
from .finding import Finding, ok, problem, worst
from .launching import is_root
from .probe import command, last_line

__all__ = ["check_pair"]

_NAME = "two ranks"
_MEETING = 10.0  # seconds beyond the time limit of the ranks' own visit, in which it should have ended
# What one process cannot see. Whatever else the two find, the visit of the machine says, or depends on how many ranks there are.
_SHOWN = ("launch", "MPI start", "ranks", "all-reduce", "shared memory", "one-sided calls")


def check_pair(library: MPILibrary, launcher: Launcher, env: Mapping[str, str], limit: float) -> Finding:
    """Return what two ranks find in at most `limit` seconds."""
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

"""The start of MPI on all ranks: their layout and agreement, transports, network cards, file systems."""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from ...base.agree import gather_text
from ...bench.result import machine
from ..compare import compare
from ..folders import check_temporary_folder
from ..probe import report
from ..rank_probe import facts
from ..transfers import check_clocks
from .trial import Trial

__all__ = ["cards", "file_system", "prepare", "run"]

# Variables that make libraries print the transports they choose, on rank 0.
_VERBOSE = {
    "UCX_LOG_LEVEL": "info", "MPIR_CVAR_DEBUG_SUMMARY": "1", "MPICH_OFI_VERBOSE": "1", "OMPI_MCA_pml_base_verbose": "10",
    "OMPI_MCA_mtl_base_verbose": "10", "OMPI_MCA_btl_base_verbose": "10",
}  # fmt: skip
_LIBRARIES = re.compile(
    r"^lib(mpi|mpi_cray|pmi|pmi2|pmix|pals|fabric|uc[pst]|ucm|uct_\w+|ibverbs|cxi|psm\d|efa|mlx5|hcoll|sharp\w*)\b.*\.so"
)
_DEVICES = re.compile(r"^/dev/(infiniband|cxi|hfi|efa|xpmem|knem|nvidia|dri|kfd)")
_CARDS = ("infiniband", "cxi", "net")
_NAMED = 1500  # characters of the version text


def prepare(rank: int) -> None:
    """Make rank 0's libraries print the transports they choose. Before MPI starts."""
    if rank == 0:
        for name, value in _VERBOSE.items():
            os.environ.setdefault(name, value)


def run(trial: Trial) -> None:
    """Report the facts of all nodes, and the doctor's findings about the ranks. Collective."""
    from mpi4py import MPI

    topology, comm = trial.topology, trial.comm
    trial.part("facts of all ranks")
    rows = [json.loads(text) for text in gather_text(comm, json.dumps(facts(topology, ())))]
    mine = (
        json.dumps({"cards": cards(), "libraries": _libraries(), "devices": _devices()})
        if topology.local_rank == 0
        else ""
    )
    details = [text for text in gather_text(comm, mine) if text]
    about = machine(comm)
    trial.fact(
        mpi=MPI.Get_library_version().strip("\0 \n")[:_NAMED], vendor=rows[0]["mpi"], thread_level=rows[0]["thread_level"],
        machine=about, ranks_per_node=list(topology.ranks_per_node) if topology.num_nodes <= 64 else [], ranks=topology.size,
    )  # fmt: skip
    trial.fact(file_systems={name: file_system(path) for name, path in _folders(trial.folder)})
    if topology.rank == 0:
        for node, text in enumerate(details):
            first = next(row for row in rows if row["node"] == node)
            known = {key: first[key] for key in ("host", "node_cores", "threads", "node_gpus")}
            report(node={**known, "ranks": topology.ranks_per_node[node], **json.loads(text)})
        for finding in compare(rows):
            report(finding=asdict(finding))
    for check in (check_clocks, check_temporary_folder):
        trial.part(check.__name__.replace("check_", "").replace("_", " "))
        finding = check(topology)
        if topology.rank == 0:
            report(finding=asdict(finding))


def cards() -> list[str]:
    """Return the network cards of this node, with type and rate as the system shows them."""
    found = []
    for kind in _CARDS:
        with contextlib.suppress(OSError):
            for card in sorted(Path("/sys/class", kind).iterdir()):
                if card.name != "lo":
                    found.append(" ".join(filter(None, [card.name, *_details(card, kind)])))
    return found


def _details(card: Path, kind: str) -> Iterator[str]:
    """Yield words about a card."""
    if kind == "infiniband":
        for name in ("link_layer", "rate", "state"):
            yield _text(card / "ports" / "1" / name)
    elif kind == "net":
        speed = _text(card / "speed")
        yield f"{speed} Mb/s" if speed.isdigit() else ""
        yield _text(card / "operstate")
    else:
        yield kind


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _libraries() -> list[str]:
    """Return the names of libraries of MPI and networks that this process has mapped."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        names = {os.path.basename(line.split(maxsplit=5)[-1].strip()) for line in maps}
        return sorted(name for name in names if _LIBRARIES.match(name))
    return []


def _devices() -> list[str]:
    """Return the devices of networks and GPUs that this process has open, which proves their use."""
    found = set()
    for path in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(path))
    return sorted(target for target in found if _DEVICES.match(target))


def _folders(folder: Path) -> Iterator[tuple[str, Path]]:
    yield "the folder of the check", folder
    yield "temporary files", Path(tempfile.gettempdir())
    yield "/dev/shm", Path("/dev/shm")


def file_system(path: Path) -> str:
    """Return the type of the file system of a path, such as lustre, gpfs, nfs4 or tmpfs; "" if it is unknown.

    Example:
        >>> file_system(Path("/proc"))
        'proc'
    """
    resolved, best, kind = os.path.realpath(path), "", ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            words = line.split()
            place = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), words[4])
            inside = resolved == place or resolved.startswith(place.rstrip("/") + "/")
            if inside and len(place) >= len(best):
                best, kind = place, words[words.index("-") + 1]
    return kind

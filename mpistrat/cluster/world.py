"""The world: the ranks that a job has, by default COMM_WORLD, and after ranks were lost those that are left.

Where only some ranks of a program use this package, MPISTRAT_COLORS names them, with the same value on all ranks:
`train=2-3` makes ranks 2 and 3 of COMM_WORLD a world, `left=0-3,8:right=4-7` makes two. The other ranks take no part, and need
not know of it: only the members of a color make its communicator.

Where MPI survives the death of ranks (User-Level Failure Mitigation, ULFM: MPI 5 drafts; Open MPI 5 under `mpirun --with-ft
ulfm`) a call that needs a dead rank raises, and a communicator can be revoked: every call on it raises on every rank, and those
that wait in one are freed. So the ranks that live leave all communicators, and agree on a new world.

A rank could still wait for one that lives, and has left already, in a communicator that nobody revokes. So communicators
that are made of the world's are noted as they are made.

Source: https://docs.open-mpi.org/en/v5.0.x/features/ulfm.html.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..base.agree import fingerprint
from ..base.environment import Environment
from ..base.errors import LayoutError, RanksLostError, explain
from .start import running

__all__ = [
    "UNSAFE", "agree", "communicator_of", "highest", "is_loss", "loses_ranks", "ranks_of_colors", "revoke", "shrink", "survives",
    "track", "unsafe_collectives", "untrack", "world",
]  # fmt: skip

UNSAFE = ("han", "hcoll", "portals4")  # of Open MPI's collective components: they miss failures, or crash on them
_COLORS = "MPISTRAT_COLORS"
_TAGS = 1 << 14  # of MPI_Comm_create_group; every MPI has at least 32767
_METHODS = ("Dup", "Clone", "Split", "Split_type", "Create", "Create_group")
_world: Any = None
_made: list[Any] = []  # communicators
_survives = False
_lost = False  # whether an error has said that ranks of this world were lost


def world(mpi: Any) -> Any:
    """Return the communicator of the ranks that the job has. Collective over these the first time, with MPISTRAT_COLORS.

    Raises:
        LayoutError: this rank has no color, or MPISTRAT_COLORS is malformed.
    """
    if _world is not None:
        return _world
    text = Environment.read().colors
    return _of_color(mpi, text) if text else mpi.COMM_WORLD


@functools.cache
def _of_color(mpi: Any, text: str) -> Any:
    """Return the communicator of the ranks that have this rank's color. Collective over these."""
    whole = mpi.COMM_WORLD
    colors = ranks_of_colors(text, whole.size)
    color, members = next((each for each in colors.items() if whole.rank in each[1]), ("", ()))
    if not members:
        expected, got = "a color for each rank that trains", f"{text}, which has none for rank {whole.rank}"
        remedy = "Only ranks with a color make strategies and process groups: give it one, or leave the call out on this rank"
        raise LayoutError(explain("environment", _COLORS, expected=expected, got=got, remedy=remedy, rank=whole.rank))
    return communicator_of(whole, members, color)


def communicator_of(whole: Any, ranks: Sequence[int], name: str) -> Any:
    """Return the communicator of some ranks of another one. Collective over these ranks alone.

    Args:
        whole: the other communicator.
        ranks: by their numbers there, the same on all of them.
        name: the same on all of them, and another one for each communicator that a rank makes at the same time.
    """
    everyone = whole.Get_group()
    group = everyone.Incl(list(ranks))
    comm = whole.Create_group(group, fingerprint(name) % _TAGS)
    group.Free()
    everyone.Free()
    return comm


def ranks_of_colors(text: str, size: int) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each color, from the text of MPISTRAT_COLORS and the number of ranks.

    Raises:
        LayoutError: the text is malformed, a rank does not exist or has two colors.

    Example:
        >>> ranks_of_colors("left=0-2,6:right=3-5", 8)
        {'left': (0, 1, 2, 6), 'right': (3, 4, 5)}
    """
    found: dict[str, tuple[int, ...]] = {}
    taken = set[int]()
    for part in text.split(":"):
        match = re.fullmatch(r"(\w+)=(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)", part)
        ranks = set[int]()
        for span in match[2].split(",") if match else ():
            low, _, high = span.partition("-")
            ranks.update(range(int(low), min(int(high or low), size) + 1))
        if match is None or match[1] in found or not ranks or max(ranks) >= size or taken & ranks:
            expected = f"COLOR=RANKS, such as train=2-3, parted by ':', and each of {size} ranks at most once"
            raise LayoutError(explain("environment", _COLORS, expected=expected, got=repr(text)))
        found[match[1]] = tuple(sorted(ranks))
        taken |= ranks
    return found


def survives() -> bool:
    """Return whether the program goes on when ranks are lost."""
    return _survives


@functools.cache
def loses_ranks() -> bool:
    """Return whether MPI, which runs, goes on when a rank dies."""
    mpi = running()
    if mpi is None or "Open MPI" not in mpi.Get_library_version():
        return False
    try:
        return bool(ctypes.c_bool.in_dll(ctypes.CDLL(mpi.__file__), "ompi_ftmpi_enabled").value)
    except (OSError, ValueError):  # built without it
        return False


def unsafe_collectives() -> list[str]:
    """Return the components of Open MPI's collectives that must be left out where ranks may die, and are not."""
    setting = os.environ.get("OMPI_MCA_coll", "")  # noqa: SIM112
    left_out = setting[1:].split(",") if setting.startswith("^") else ()
    return [name for name in UNSAFE if name not in left_out]


def is_loss(error: BaseException | None) -> bool:
    """Return whether an error says that ranks were lost, or comes of one that does.

    Where the program survives that, every error of MPI counts: it is not always the same one (seen with 5.0.11).
    """
    global _lost
    mpi, seen = running(), set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, RanksLostError) or (
            mpi is not None
            and isinstance(error, mpi.Exception)
            and (_survives or (loses_ranks() and error.Get_error_class() in _kinds()))
        ):
            _lost = True
            return True
        error = error.__cause__ or error.__context__
    return False


def met_loss() -> bool:
    """Return whether a call of this rank has met a loss of ranks since the world was made."""
    return _lost


def _kinds() -> tuple[int, ...]:
    from mpi4py import MPI

    return MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED


def track(comm: Any) -> Any:
    """Take a communicator for the world, and return it; communicators that are made of it are noted from now on."""
    global _world, _lost, _survives
    _made.clear()
    _world, _lost, _survives = _tracked_class()(comm), False, True
    _world.Set_errhandler(_errors_return())
    return _world


def untrack() -> None:
    """Let communicators be what they were, and the world that of the ranks that live."""
    global _survives
    _survives = False


@functools.cache
def _tracked_class() -> type[Any]:
    from mpi4py import MPI

    def noted(name: str) -> Any:
        plain = getattr(MPI.Intracomm, name)

        @functools.wraps(plain)
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            comm = plain(self, *args, **kwargs)
            if comm == MPI.COMM_NULL:
                return comm
            comm = cls(comm)
            _made[:] = [*filter(None, _made), comm]  # freed ones are false
            return comm

        return method

    def free(self: Any) -> None:
        """Free it, unless ranks were lost: others may wait in it, and it has to be revoked."""
        if not _lost and not is_loss(sys.exc_info()[1]) and any(comm is self for comm in _made):
            MPI.Intracomm.Free(self)

    methods = {name: noted(name) for name in _METHODS} | {"Free": free}
    cls: type[Any] = type("Intracomm", (MPI.Intracomm,), {**methods, "__module__": __name__})
    return cls


def _errors_return() -> Any:
    from mpi4py import MPI

    return MPI.ERRORS_RETURN


def revoke() -> None:
    """Make every call of any rank on the world's communicators raise. Local; again it does nothing."""
    for comm in [*filter(None, _made), _world]:
        with contextlib.suppress(Exception):
            comm.Revoke()


def agree(done: bool) -> bool:
    """Return whether all ranks of the world are done, and none is lost. Collective; the same on every rank that lives.

    Each rank calls it between any other use of the world's communicators and `shrink`.
    """
    from mpi4py import MPI

    try:
        return bool(_world.Agree(int(done)))
    except MPI.Exception:
        return False


def highest(value: int) -> int:
    """Return the largest of the ranks' numbers. Collective over the world."""
    from mpi4py import MPI

    out = np.empty(1, np.int64)
    _world.Allreduce(np.array([value], np.int64), out, MPI.MAX)
    return int(out[0])


def shrink() -> tuple[Any, tuple[int, ...]]:
    """Return the ranks that live as the new world, and the numbers that those that were lost had in COMM_WORLD. Collective."""
    from mpi4py import MPI

    comm = _world
    while True:
        comm = comm.Shrink()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            comm.Agree(1)  # on whether all are here still
            break
        except MPI.Exception:
            continue
    old, new = MPI.COMM_WORLD.Get_group(), comm.Get_group()
    numbers = MPI.Group.Translate_ranks(old, range(old.size), new)
    old.Free()
    new.Free()
    return track(comm), tuple(rank for rank, number in enumerate(numbers) if number == MPI.UNDEFINED)

"""The world: the ranks of a job, by default COMM_WORLD, and after a loss of ranks the remaining ones.

If only some ranks of a program use this package, MPISTRAT_COLORS names them, with the same value on all ranks: `train=2-3` makes
ranks 2 and 3 of COMM_WORLD a world, `left=0-3,8:right=4-7` makes two. The other ranks are not involved, because only the members
of a color create its communicator.

If MPI survives the death of ranks (User-Level Failure Mitigation, ULFM: MPI 5 drafts; Open MPI 5 under `mpirun --with-ft ulfm`),
a call that needs a dead rank raises, and a communicator can be revoked: then every call on it raises on every rank, also pending
ones. So the living ranks leave all communicators, and agree on a new world. A rank could still wait for a living one in a
communicator that is not revoked, so all communicators derived from the world's are recorded.

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
    "UNSAFE", "agree", "communicator_of", "failed_ranks", "highest", "is_loss", "leave_out_lost", "loses_ranks",
    "ranks_of_colors", "reports_death", "revoke", "shrink", "spans_world", "survives", "track", "unsafe_collectives",
    "untrack", "use", "world",
]  # fmt: skip

UNSAFE = ("han", "hcoll", "portals4")  # Open MPI's collective components that miss failures, or crash on them
_COLORS = "MPISTRAT_COLORS"
_TAGS = 1 << 14  # of MPI_Comm_create_group; every MPI has at least 32767
_METHODS = ("Dup", "Clone", "Split", "Split_type", "Create", "Create_group")
_world: Any = None
_made: list[Any] = []  # communicators
_old: list[Any] = []  # those of larger worlds, which `leave_out_lost` keeps in use; they are never freed
_survives = False
_lost = False  # True after an error that ranks of this world were lost


def world(mpi: Any) -> Any:
    """Return the communicator of the job's ranks. Collective over these the first time, with MPISTRAT_COLORS.

    Raises:
        LayoutError: this rank has no color, or MPISTRAT_COLORS is malformed.
    """
    if _world is not None:
        return _world
    text = Environment.read().colors
    return _of_color(mpi, text) if text else mpi.COMM_WORLD


def use(comm: Any) -> Any:
    """Set the communicator of the job's ranks, None for the original one, and return the former."""
    global _world
    before, _world = _world, comm
    return before


@functools.cache
def _of_color(mpi: Any, text: str) -> Any:
    """Return the communicator of the ranks with this rank's color. Collective over these."""
    whole = mpi.COMM_WORLD
    colors = ranks_of_colors(text, whole.size)
    color, members = next((each for each in colors.items() if whole.rank in each[1]), ("", ()))
    if not members:
        expected, got = "a color for each rank that trains", f"{text}, which has none for rank {whole.rank}"
        remedy = "Only ranks with a color make strategies and process groups: give it one, or leave the call out on this rank"
        raise LayoutError(explain("environment", _COLORS, expected=expected, got=got, remedy=remedy, rank=whole.rank))
    return communicator_of(whole, members, color)


def communicator_of(whole: Any, ranks: Sequence[int], name: str) -> Any:
    """Return a communicator of some ranks of another one. Collective over these ranks alone.

    Args:
        whole: the other communicator.
        ranks: by their numbers there, the same on all of them.
        name: the same on all of them, and unique among the communicators that a rank creates at the same time.
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
            expected = f"COLOR=RANKS, such as train=2-3, separated by ':', and each of {size} ranks at most once"
            raise LayoutError(explain("environment", _COLORS, expected=expected, got=repr(text)))
        found[match[1]] = tuple(sorted(ranks))
        taken |= ranks
    return found


def spans_world(comm: Any) -> bool:
    """Return True if a communicator has all ranks of a world that survives losses."""
    return _survives and comm.size == _world.size


def survives() -> bool:
    """Return True if the program continues when ranks are lost."""
    return _survives


@functools.cache
def loses_ranks() -> bool:
    """Return True if the running MPI continues when a rank dies."""
    mpi = running()
    if mpi is None or "Open MPI" not in mpi.Get_library_version():
        return False
    try:
        return bool(ctypes.c_bool.in_dll(ctypes.CDLL(mpi.__file__), "ompi_ftmpi_enabled").value)
    except (OSError, ValueError):  # built without ULFM
        return False


def unsafe_collectives() -> list[str]:
    """Return the unsafe components of Open MPI's collectives that are not excluded."""
    setting = os.environ.get("OMPI_MCA_coll", "")  # noqa: SIM112
    left_out = setting[1:].split(",") if setting.startswith("^") else ()
    return [name for name in UNSAFE if name not in left_out]


def is_loss(error: BaseException | None, note: bool = True) -> bool:
    """Return True if an error, or one of its causes, reports lost ranks.

    If the program survives losses, every error of MPI counts, because the class varies (seen with 5.0.11).

    Args:
        error: the error.
        note: whether it is of a call of the program: see `met_loss`.
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
            _lost = _lost or note
            return True
        error = error.__cause__ or error.__context__
    return False


def met_loss() -> bool:
    """Return True if a call of this rank has noticed a loss of ranks since the world was created."""
    return _lost


def reports_death(error: BaseException) -> bool:
    """Return True if an error of MPI is of a class that reports a dead rank."""
    from mpi4py import MPI

    return isinstance(error, MPI.Exception) and error.Get_error_class() in _kinds()[:2]


def failed_ranks(comm: Any, among: Any) -> set[int]:
    """Return the dead ranks of a communicator, by their numbers in another one; ranks that it lacks are left out. Local.

    From now on receives from any rank of `comm` continue with the living ones.
    """
    from mpi4py import MPI

    comm.Ack_failed()
    dead, own = comm.Get_failed(), among.Get_group()
    numbers = MPI.Group.Translate_ranks(dead, range(dead.size), own)
    dead.Free()
    own.Free()
    return {number for number in numbers if number != MPI.UNDEFINED}


def _kinds() -> tuple[int, ...]:
    from mpi4py import MPI

    return MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED


def track(comm: Any) -> Any:
    """Set and return the world's communicator; communicators derived from it are recorded from now on."""
    global _world, _lost, _survives
    _made.clear()
    _old.clear()
    _world, _lost, _survives = _tracked_class()(comm), False, True
    _world.Set_errhandler(_errors_return())
    return _world


def untrack() -> None:
    """Stop recording communicators. The world stays that of the living ranks."""
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
        """Free it, unless ranks were lost: others may wait in it, so it must be revoked."""
        if not _lost and not is_loss(sys.exc_info()[1]) and any(comm is self for comm in _made):
            MPI.Intracomm.Free(self)

    methods = {name: noted(name) for name in _METHODS} | {"Free": free}
    cls: type[Any] = type("Intracomm", (MPI.Intracomm,), {**methods, "__module__": __name__})
    return cls


def _errors_return() -> Any:
    from mpi4py import MPI

    return MPI.ERRORS_RETURN


def revoke() -> None:
    """Make every call of any rank on the world's communicators raise. Local; repeated calls do nothing."""
    for comm in [*_old, *filter(None, _made), _world]:
        with contextlib.suppress(Exception):
            comm.Revoke()


def agree(done: bool) -> bool:
    """Return True if all ranks of the world are done, and none is lost. Collective; equal on every living rank.

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


def leave_out_lost() -> Any:
    """Return the living ranks as the new world, while communicators of the old one stay in use. Collective."""
    old = [*_old, *filter(None, _made), _world]
    comm, _ = shrink()
    _old[:] = old
    return comm


def shrink() -> tuple[Any, tuple[int, ...]]:
    """Return the living ranks as the new world, and the lost ranks' numbers in COMM_WORLD. Collective."""
    from mpi4py import MPI

    comm = _world
    while True:
        comm = comm.Shrink()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            comm.Agree(1)  # raises if a rank was lost meanwhile
            break
        except MPI.Exception:
            continue
    old, new = MPI.COMM_WORLD.Get_group(), comm.Get_group()
    numbers = MPI.Group.Translate_ranks(old, range(old.size), new)
    old.Free()
    new.Free()
    return track(comm), tuple(rank for rank, number in enumerate(numbers) if number == MPI.UNDEFINED)

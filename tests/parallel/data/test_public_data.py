"""The programs for ten kinds of public data in docs/input.md: two ranks are interrupted, three go on, with the rows of one."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.public_data import KINDS

PAGE = (Path(__file__).parents[3] / "docs/input.md").read_text().partition("### Public data")[2].partition("\n### ")[0]
PROGRAM = PAGE.partition("```python\n")[2].partition("```")[0]
LINES = dict(re.findall(r"^\| ([^|]+) \| `(.+)` \|$", PAGE, re.MULTILINE))


class Stop(Exception):
    """The end of a run that is interrupted."""


def test_each_program_has_ten_lines_at_most():
    assert list(LINES) == list(KINDS)
    assert len(PROGRAM.splitlines()) <= 10
    assert PROGRAM.count("rows = ...") == 1


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", KINDS)
def test_a_run_goes_on_with_equal_rows(name, mpi_tmp_path, monkeypatch):
    from mpi4py import MPI

    world, kind = MPI.COMM_WORLD, KINDS[name]
    reason = ""
    if world.rank == 0:
        try:
            kind.write(mpi_tmp_path)
        except pytest.skip.Exception as skipped:
            reason = str(skipped)
    reason = world.bcast(reason)
    if reason:
        pytest.skip(reason)
    monkeypatch.chdir(mpi_tmp_path)

    def run(comm, stop=None):
        """The numbers in this rank's batches."""
        seen = []

        def use(batch):
            seen.append(kind.numbers(batch))
            if len(seen) == stop:
                raise Stop

        names = {"ms": ms, "np": np, "use": use, "comm": comm}
        code = PROGRAM.replace("rows = ...", f"rows = {LINES[name]}").replace("...", "use(batch)")
        code = code.replace("MultiWorkerMirroredStrategy()", "MultiWorkerMirroredStrategy(comm=comm)")
        try:
            exec(code, names)
        except Stop:
            pass
        finally:
            names["strategy"].close()
        return [list(itertools.chain(*parts)) for parts in zip(*comm.allgather(seen), strict=True)]

    part = world.Split(int(world.rank == 2), world.rank)
    steps = run(part, stop=3)[:2] if world.rank < 2 else []  # the position after two steps was saved
    part.Free()
    steps = world.bcast(steps) + run(world)
    each = -(-kind.rows // 4)
    for epoch in range(2):
        order = ms.data.permute(np.arange(kind.rows), kind.rows, seed=1, epoch=epoch).tolist()
        found = steps[epoch * each : (epoch + 1) * each]
        assert sorted(itertools.chain(*found)) == list(range(kind.rows))
        assert [sorted(step) for step in found] == [sorted(order[at : at + 4]) for at in range(0, kind.rows, 4)]
    assert len(steps) == 2 * each

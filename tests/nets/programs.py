"""How tests run programs of the patterns."""

from __future__ import annotations

from tests.launch.launcher import MpiEnv
from tests.nets.nightly import Share, run

SEED = 36


def check(mpi: MpiEnv, framework: str, ranks: int, first: int, last: int) -> None:
    """Run programs `first` to `last` - 1; none may be wrong, and none may end its job without a clear error."""
    found = list(run(Share(framework, mpi, ranks, last, first), SEED))
    bad = [record for record in found if record["result"] in ("wrong", "died")]
    assert not bad, "\n".join(f"{record['number']}: {record['detail']}\n{record.get('config')}" for record in bad)
    assert [record["number"] for record in found] == list(range(first, last))

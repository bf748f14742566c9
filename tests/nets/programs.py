"""How tests run programs of the patterns."""

from __future__ import annotations

from typing import Any

from nets.nightly import records

SEED = 36


def check(mpi_run: Any, framework: str, ranks: int, first: int, last: int, env: dict[str, str] | None = None) -> None:
    """Run programs `first` to `last` - 1; none may be wrong."""
    words = ["-m", "nets.patterns", framework, "--seed", str(SEED), "--first", str(first), "--count", str(last)]
    result = mpi_run(words, ranks, timeout=60 + 8 * (last - first), env=env)
    found = [record for record in records(result.out[0]) if "result" in record]
    wrong = [
        f"{record['number']}: {record['detail']}\n{record['config']}" for record in found if record["result"] == "wrong"
    ]
    assert not wrong, "\n".join(wrong)
    assert [record["number"] for record in found] == list(range(first, last)), result
    assert result.returncode == 0

"""Tables on ranks: each row once, units divided among the ranks, and files that differ."""

import itertools

import numpy as np
import pytest

from mpistrat.data import from_tables
from mpistrat.errors import CollectiveMismatchError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("scope", [None, "rank", "node", "job"])
def test_each_row_once(strategy, scope, mpi_tmp_path):
    if strategy.rank == 0:
        table = pyarrow.table({"x": np.arange(50), "y": np.arange(50) / 2})
        parquet.write_table(table, mpi_tmp_path / "a.parquet", row_group_size=7)
    strategy.comm.Barrier()
    rows = from_tables(mpi_tmp_path)
    rows = rows if scope is None else rows.cache(scope)
    data = strategy.distribute_dataset(rows.shuffle(seed=1).batch(12))
    for _ in range(2):
        parts = strategy.comm.allgather([(batch["x"].tolist(), batch["y"].tolist()) for batch in data])
        found = [pair for part in parts for xs, ys in part for pair in zip(xs, ys, strict=True)]
        assert sorted(found) == [(x, x / 2) for x in range(50)]
        sizes = [sum(len(xs) for xs, _ in step) for step in itertools.zip_longest(*parts)]
        assert sizes == [12, 12, 12, 12, 2]


@pytest.mark.ranks(2)
def test_files_that_differ_between_ranks(strategy, mpi_tmp_path):
    path = mpi_tmp_path / str(strategy.rank) / "a.parquet"
    path.parent.mkdir()
    parquet.write_table(pyarrow.table({"x": [1, 2, 3 + strategy.rank]}), path)
    with pytest.raises(CollectiveMismatchError, match="the ranks have different datasets"):
        strategy.distribute_dataset(from_tables(path).batch(2))

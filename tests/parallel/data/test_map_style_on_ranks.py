"""Datasets of samples on ranks: each reads its own rows, and errors name the rank."""

import itertools
import traceback

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data import from_map_style
from mpistrat.errors import CollectiveMismatchError
from tests.harness import samples


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("workers", [{}, {"workers": 2, "processes": True}], ids=["none", "processes"])
def test_each_rank_reads_its_own_rows(strategy, workers):
    rows = samples.Rows(20)
    data = strategy.distribute_dataset(from_map_style(rows, **workers).shuffle(seed=2).batch(6))
    found = [strategy.comm.allgather(batch["tokens"][:, 0].tolist()) for batch in data]
    order = ms.data.permute(np.arange(20), 20, seed=2, epoch=0).tolist()
    assert [list(itertools.chain(*parts)) for parts in found] == [order[low : low + 6] for low in (0, 6, 12, 18)]
    if not workers:
        read = [row for several in rows.asked for row in several]
        mine = list(itertools.chain(*(parts[strategy.rank] for parts in found)))
        assert set(read) <= set(mine)


@pytest.mark.ranks(2, 3)
def test_ranks_whose_objects_differ(strategy):
    with pytest.raises(CollectiveMismatchError, match="from_map_style.Squares.: 7 rows"):
        strategy.distribute_dataset(from_map_style(samples.Squares(6 + (strategy.rank == 1))).batch(2))
    files = [f"{name}.png" for name in "abcd"]
    with pytest.raises(CollectiveMismatchError, match="the ranks have different datasets"):
        strategy.distribute_dataset(from_map_style(files[:: -1 if strategy.rank == 1 else 1]).batch(2))


@pytest.mark.ranks(1, 2)
def test_an_error_names_the_row_and_the_rank(strategy):
    rows = from_map_style(samples.OddRowsFail(6)).batch(6)
    with pytest.raises(KeyError) as caught:  # on every rank, at its own first odd row
        next(iter(strategy.distribute_dataset(rows)))
    text = "".join(traceback.format_exception(caught.value))
    where = f"rank {strategy.rank}: " if strategy.size > 1 else ""
    assert f"\n{where}from_map_style(OddRowsFail): raised at row {(1, 3)[strategy.rank]} of epoch 0" in text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("scope", ["rank", "node", "job"])
def test_caches(strategy, scope):
    data = strategy.distribute_dataset(from_map_style(samples.Squares(9)).cache(scope).shuffle(seed=1).batch(4))
    for _ in range(2):
        parts = strategy.comm.allgather([row for batch in data for row in batch.tolist()])
        assert sorted(itertools.chain(*parts)) == [row**2 for row in range(9)]

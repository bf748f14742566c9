"""Datasets of PyTorch next to lists: the same rows in the same order, on ranks that read their own."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data import from_arrays, from_map_style

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.ranks(1, 2)


class Images(torch.utils.data.Dataset):
    """As torchvision's datasets: a tensor and a number."""

    def __init__(self, count: int) -> None:
        self.images = torch.arange(count * 4, dtype=torch.float32).reshape(count, 2, 2)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return self.images[row], row


def listed(batches) -> list:
    return [(image.tolist(), label.tolist()) for image, label in batches]


@pytest.fixture
def strategy():
    made = ms.MultiWorkerMirroredStrategy()
    yield made
    made.close()


CHAINS = {
    "rows": lambda rows: rows.batch(4),
    "shuffled": lambda rows: rows.shuffle(seed=4).batch(4, drop_remainder=True),
    "a shard of it twice": lambda rows: rows.shard(2, 1).repeat(2).shuffle(seed=1).batch(3),
    "cached": lambda rows: rows.cache().shuffle(seed=2).batch(5),
    "mapped": lambda rows: rows.map(lambda image, label: (image * 2, label + 1)).batch(4),
}


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("workers", [0, 2])
def test_rows_are_those_of_arrays(strategy, chain, workers):
    images = Images(19)
    arrays = from_arrays((images.images.numpy(), np.arange(19)))
    subset = torch.utils.data.Subset(Images(40), range(19))  # which has __getitems__
    expected = CHAINS[chain](arrays)
    for found in (CHAINS[chain](from_map_style(each, workers=workers)) for each in (images, subset)):
        assert listed(found.node.elements(0)) == listed(expected.node.elements(0))
        parts = strategy.comm.allgather(listed(strategy.distribute_dataset(found)))
        rows = [label for step in itertools.zip_longest(*parts) for _, labels in step for label in labels]
        assert rows == [label for _, labels in listed(expected.node.elements(0)) for label in labels]


def test_processes_get_tensors_and_send_arrays(strategy):
    images = Images(6)
    rows = strategy.distribute_dataset(from_map_style(images, workers=2, processes=True).batch(6))
    parts = strategy.comm.allgather(listed(rows))
    assert [label for ((_, labels),) in parts for label in labels] == list(range(6))
    assert [image for ((each, _),) in parts for image in each] == images.images.tolist()


def test_an_epoch_has_the_rows_of_a_data_loader(strategy):
    images = Images(10)
    loader = torch.utils.data.DataLoader(images, batch_size=4)
    for (image, label), (theirs, labels) in zip(from_map_style(images).batch(4), loader, strict=True):
        np.testing.assert_array_equal(image, theirs.numpy(), strict=True)
        np.testing.assert_array_equal(label, labels.numpy(), strict=True)
    with pytest.raises(TypeError, match="a DataLoader, which has no __getitem__. Pass its `dataset`"):
        from_map_style(loader)

"""Checkpoints that are damaged or foreign: refused with the reason, or harmless."""

import re

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat import VariableSynchronization
from tests.harness.checkpoints import model, train
from tests.harness.strategies import without_mpi

ON_READ = VariableSynchronization.ON_READ


class Saved:
    """A file, and a strategy that restores it and copies of it that were changed."""

    def __init__(self, strategy, folder):
        self.strategy, self.path, self.copy = strategy, folder / "x.h5", folder / "copy.h5"
        self.variables, self.optimizer = model(strategy), ms.optimizers.Adam(0.1)
        train(strategy, self.variables, self.optimizer, 3)
        strategy.save(self.path, extra={"epoch": 7})
        self.bytes, self.state = self.path.read_bytes(), self.now()

    def now(self):
        slots = self.optimizer.slots(self.variables["w"])
        arrays = [self.variables[name].numpy() for name in sorted(self.variables)] + [
            slots[name] for name in sorted(slots)
        ]
        return [array.tobytes() for array in arrays], self.optimizer.iterations

    def change(self, data):
        """What comes of restoring other bytes: the text of an error, or None. Then nothing, or all that was saved, is there."""
        self.copy.write_bytes(data)
        self.variables["w"].assign(np.full((5, 3), 9.0))
        before = self.now()
        try:
            assert self.strategy.restore(self.copy) == {"epoch": 7}
        except (OSError, ValueError) as error:
            assert self.now() == before
            return str(error)
        assert self.now() == self.state
        return None


def flipped(data, place, bit):
    return data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


def test_damage_is_an_error_or_changes_nothing(tmp_path):
    """Single bits, and runs of bytes, at places all over the file; every array's own by name."""
    random = np.random.default_rng(20261122)
    with without_mpi() as strategy:
        saved = Saved(strategy, tmp_path)
        with h5py.File(saved.path) as file:
            arrays = {}
            file.visititems(lambda key, item: arrays.update({key: item}) if isinstance(item, h5py.Dataset) else None)
            ranges = {key: (item.id.get_offset(), item.nbytes) for key, item in arrays.items()}
        assert len(ranges) == 7
        for key, (start, size) in ranges.items():
            for place in {
                start,
                start + size // 2,
                start + size - 1,
                *random.integers(start, start + size, 4).tolist(),
            }:
                assert key in (saved.change(flipped(saved.bytes, place, int(random.integers(8)))) or "")
        told = []
        for place in random.integers(0, len(saved.bytes), 400).tolist():
            told.append(saved.change(flipped(saved.bytes, place, int(random.integers(8)))))
        for place in random.integers(0, len(saved.bytes) - 16, 100).tolist():
            told.append(saved.change(saved.bytes[:place] + random.bytes(16) + saved.bytes[place + 16 :]))
        for place in random.integers(0, len(saved.bytes), 20).tolist():
            assert saved.change(saved.bytes[:place]) is not None
        assert all(text is None or "copy.h5" in text for text in told)
        assert any(told) and None in told


def without_digests(file):
    del file["digests"], file.attrs["digest"]


def external(file):
    without_digests(file)
    del file["variables/dense%2Fw"]
    file.create_dataset("variables/dense%2Fw", (5, 3), "f8", external=[("/etc/passwd", 0, 120)])


def virtual(file):
    without_digests(file)
    del file["variables/dense%2Fw"]
    layout = h5py.VirtualLayout((5, 3), "f8")
    layout[...] = h5py.VirtualSource("other.h5", "x", (5, 3))
    file.create_virtual_dataset("variables/dense%2Fw", layout)


def linked(file):
    without_digests(file)
    del file["variables/dense%2Fw"]
    file["variables/dense%2Fw"] = h5py.ExternalLink("other.h5", "x")


def linked_slots(file):
    del file["optimizers/0/slots/dense%2Fw"]
    file["optimizers/0/slots/dense%2Fw"] = h5py.ExternalLink("other.h5", "/")


def never_written(file):
    without_digests(file)
    del file["variables/dense%2Fw"]
    file.create_dataset("variables/dense%2Fw", (5, 3), "f8")


def huge(file):
    without_digests(file)
    del file["optimizers/0/slots/dense%2Fw/velocity"]
    file.create_dataset("optimizers/0/slots/dense%2Fw/velocity", (1 << 40,), "f8", chunks=(1024,))[5] = 1


def text(file):
    without_digests(file)
    del file["optimizers/0/slots/dense%2Fw/velocity"]
    file.create_dataset("optimizers/0/slots/dense%2Fw/velocity", data=["a"] * 3)


def iterations(number):
    def change(file):
        without_digests(file)
        del file["optimizers/0"].attrs["iterations"]
        file["optimizers/0"].attrs["iterations"] = np.uint64(number) if number > 0 else number

    return change


def more(file):
    without_digests(file)
    file.create_dataset("optimizers/0/slots/dense%2Fw/third", data=np.zeros((5, 4)))


def renamed(file):
    file.move("optimizers/0/slots/dense%2Fw/velocity", "optimizers/0/slots/dense%2Fw/other")


def other_optimizer(file):
    file["optimizers/0"].attrs["name"] = "Adam"


def no_table(file):
    del file["digests"]


def other_extra(file):
    without_digests(file)
    del file["extra"]
    file["extra"] = np.zeros(4)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (external, "variables/dense%2Fw: external storage in /etc/passwd"),
        (virtual, "variables/dense%2Fw: a virtual dataset"),
        (linked, "variables/dense%2Fw: an external link .* to other.h5"),
        (linked_slots, "optimizers/0/slots/dense%2Fw: an external link"),
        (never_written, "variables/dense%2Fw: a dataset that was never written"),
        (huge, r"optimizers/0/slots/dense%2Fw/velocity is float64 \(1099511627776,\) in it, not float64 \(5, 3\)"),
        (text, "optimizers/0/slots/dense%2Fw/velocity is object"),
        (more, "optimizers/0/slots/dense%2Fw/third is float64"),
        (iterations(-5), "optimizers: iterations is -5"),
        (iterations((1 << 63) + 5), "optimizers: iterations is 9223372036854775813"),
        (renamed, "optimizers/0/slots/dense%2Fw/other is there, but was not saved"),
        (other_optimizer, "optimizers/0 is not as it was saved"),
        (no_table, "digests is not there"),
        (other_extra, "extra: float64"),
    ],
)
def test_what_a_foreign_file_may_not_have(tmp_path, change, told):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.ones((5, 3))
    with without_mpi() as strategy:
        saved = Saved(strategy, tmp_path)
        with h5py.File(saved.path, "r+") as file:
            change(file)
        assert re.search(told, saved.change(saved.path.read_bytes()))


def test_only_what_is_wanted_is_read(tmp_path):
    """Also where something huge that was never written, or what lies elsewhere, is in the file."""
    with without_mpi() as strategy:
        saved = Saved(strategy, tmp_path)
        with h5py.File(saved.path, "r+") as file:
            file.create_dataset("variables/other", (1 << 40,), "f8")
            file["elsewhere"] = h5py.ExternalLink("/etc/passwd", "x")
            group = file
            for _ in range(2000):
                group = group.create_group("deep")
            without_digests(file)
        assert saved.change(saved.path.read_bytes()) is None


def test_files_without_digests_are_restored_with_a_warning(tmp_path, caplog):
    with without_mpi() as strategy:
        saved = Saved(strategy, tmp_path)
        with h5py.File(saved.path, "r+") as file:
            without_digests(file)
        assert saved.change(saved.path.read_bytes()) is None
        assert "copy.h5 was saved without digests" in caplog.text

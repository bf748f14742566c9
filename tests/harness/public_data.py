"""Small files of ten kinds of public data, each by that project's own published writer, or the nearest one.

Row `i` of each is made of `i`, so that its content can be computed from the number in it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import runpy
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

__all__ = ["ROWS", "KINDS", "Kind"]

ROWS = 22
_X = (np.arange(ROWS)[:, None] * 10 + np.arange(1, 4)).astype(np.float32)
_LENGTHS = [2 + number % 4 for number in range(ROWS)]  # of episodes


@dataclass(frozen=True)
class Kind:
    """One kind.

    Attributes:
        write: writes the files into a folder; skips the test where the writer is not installed.
        numbers: returns the numbers of a batch's rows, after a comparison of their content.
        rows: the number of rows.
    """

    write: Callable[[Path], None]
    numbers: Callable[[Any], list[int]]
    rows: int = ROWS


@contextlib.contextmanager
def _modules(**members: dict[str, Any]) -> Iterator[None]:
    """Put stand-ins for modules into place."""
    made = {name.replace("__", "."): types.ModuleType(name) for name in members}
    for module, content in zip(made.values(), members.values(), strict=True):
        module.__dict__.update(content)
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in before.items():
            del sys.modules[name]
            if module is not None:
                sys.modules[name] = module


def _robomimic(folder: Path) -> None:
    """By its script convert_d4rl.py, with stand-ins for the environments whose data it converts."""
    spec = importlib.util.find_spec("robomimic")
    if spec is None or spec.origin is None:
        pytest.skip("robomimic, which writes these files, is not installed")
    ends = np.zeros(sum(_LENGTHS) + 1, bool)
    ends[np.cumsum(_LENGTHS) - 1] = True
    number = np.append(np.repeat(np.arange(ROWS), _LENGTHS), ROWS)
    actions = np.stack([number, np.arange(len(number))], axis=1).astype(np.float64)
    data = {
        "observations": _observations(number),
        "actions": actions,
        "rewards": number,
        "terminals": ends,
        "timeouts": ends,
    }

    class Environment:
        def __init__(self, name: str) -> None:
            self.env = self

        def get_dataset(self) -> dict[str, Any]:
            return data

        def close(self) -> None:
            pass

        def serialize(self) -> dict[str, Any]:
            return {}

    stand_ins = {
        "gym": {"make": Environment}, "d4rl": {"set_dataset_path": lambda path: None},
        "robomimic__envs__env_gym": {"EnvGym": Environment},
        "robomimic__utils__log_utils": {"custom_tqdm": lambda rows: rows},
    }  # fmt: skip
    script = Path(spec.origin).parent / "scripts/conversion/convert_d4rl.py"
    words = [str(script), "--env", "walker", "--folder", str(folder)]
    with _modules(**stand_ins), mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(None):
        runpy.run_path(str(script), run_name="__main__")
    (folder / "d4rl/converted/walker.hdf5").rename(folder / "walker.hdf5")


def _observations(number: np.ndarray) -> np.ndarray:
    return number[:, None] * 10 + np.arange(1.0, 4.0)


def _numbers_of_episodes(batch: Any) -> list[int]:
    observations, actions = batch
    if not len(actions):
        return []
    found = [int(one) for one in actions[:, 0, 0]]
    for row, number in enumerate(found):
        steps = _LENGTHS[number]
        np.testing.assert_array_equal(observations[row, :steps], _observations(np.full(steps, number)))
        start = sum(_LENGTHS[:number])
        np.testing.assert_array_equal(actions[row, :steps, 1], np.arange(start, start + steps))
        assert not observations[row, steps:].any()
    return found


def _cosmoflow(folder: Path) -> None:
    """As MLPerf's prepare.py, which is in no package: x as bytes of int16, y as floats; by the package tfrecord."""
    writers = pytest.importorskip("tfrecord", reason="tfrecord, which writes these files, is not installed")
    (folder / "cosmo").mkdir()
    for shard in range(2):
        writer = writers.TFRecordWriter(str(folder / f"cosmo/univ_{shard}.tfrecord"))
        for number in range(shard * ROWS // 2, (shard + 1) * ROWS // 2):
            x = np.full((4, 4, 4, 2), number, "<i2")
            writer.write({"x": (x.tobytes(), "byte"), "y": ([number, 0.5, 0.25, 0.125], "float")})
        writer.close()


def _numbers_of_volumes(batch: Any) -> list[int]:
    np.testing.assert_array_equal(batch["y"][:, 1:], np.tile([[0.5, 0.25, 0.125]], (len(batch["y"]), 1)))
    assert batch["x"].shape[1:] == (4, 4, 4, 2)
    assert (batch["x"] == batch["y"][:, 0, None, None, None, None]).all()
    return [int(number) for number in batch["y"][:, 0]]


def _era5(folder: Path) -> None:
    """As the Climate Data Store packs them, by xarray."""
    xarray = pytest.importorskip("xarray", reason="xarray, which writes these files, is not installed")
    pytest.importorskip("netCDF4")
    hours = np.datetime64("2020-01-01", "ns") + np.arange(ROWS + 8) * np.timedelta64(1, "h")
    values = np.broadcast_to(np.arange(ROWS + 8.0)[:, None, None] * 0.5 + 280, (ROWS + 8, 2, 3))
    data = xarray.Dataset({"t2m": (("time", "latitude", "longitude"), values)}, {"time": hours})
    packed = {"t2m": {"dtype": "i2", "scale_factor": 0.5, "add_offset": 280.0, "_FillValue": -32767}}
    for part, rows in enumerate((slice(0, 12), slice(12, None))):
        data.isel(time=rows).to_netcdf(folder / f"era5-{part}.nc", encoding=packed, unlimited_dims=["time"])


def _numbers_of_windows(batch: Any) -> list[int]:
    past, future = batch
    found = [int(value) for value in (past[:, 0, 0, 0] - 280) * 2]
    expected = 280 + 0.5 * (np.array(found)[:, None] + np.arange(9))
    np.testing.assert_array_equal(past, np.broadcast_to(expected[:, :6, None, None], past.shape))
    np.testing.assert_array_equal(future, np.broadcast_to(expected[:, 6:, None, None], future.shape))
    return found


def _sparse() -> np.ndarray:
    rows = np.zeros((ROWS, 30), np.float32)
    rows[np.arange(ROWS), np.arange(ROWS)] = 1 + np.arange(ROWS)
    rows[:, 29] = np.arange(ROWS) % 3
    return rows


def _anndata(folder: Path) -> None:
    anndata = pytest.importorskip("anndata", reason="anndata, which writes these files, is not installed")
    scipy, pandas = pytest.importorskip("scipy.sparse"), pytest.importorskip("pandas")
    names = [f"cell-{number}" for number in range(ROWS)]
    obs = pandas.DataFrame({"label": np.arange(ROWS)}, index=names)
    anndata.AnnData(X=scipy.csr_matrix(_sparse()), obs=obs).write_h5ad(folder / "cells.h5ad")


def _numbers_of_cells(batch: Any) -> list[int]:
    x, labels = batch
    np.testing.assert_array_equal(x, _sparse()[labels])
    return list(labels.tolist())


def _tenx(folder: Path) -> None:
    """By CellBender, since 10x Genomics publishes no package; in its format 3."""
    reason = "cellbender, which writes these files, is not installed"
    writer = pytest.importorskip("cellbender.remove_background.data.io", reason=reason)
    scipy = pytest.importorskip("scipy.sparse")
    genes, barcodes = np.array([f"gene-{number}" for number in range(30)]), np.array([f"b-{n}" for n in range(ROWS)])
    counts = scipy.csc_matrix(_sparse().astype(np.int32))
    writer.write_matrix_to_cellranger_h5(3, str(folder / "counts.h5"), genes, barcodes, counts)


def _numbers_of_barcodes(batch: Any) -> list[int]:
    found = [int(np.flatnonzero(row[:ROWS])[0]) for row in batch]
    np.testing.assert_array_equal(batch, _sparse()[found])
    return found


def _webdataset(folder: Path) -> None:
    writers = pytest.importorskip("webdataset", reason="webdataset, which writes these files, is not installed")
    for shard in range(2):
        with writers.TarWriter(str(folder / f"photos-{shard}.tar")) as sink:
            for number in range(shard * ROWS // 2, (shard + 1) * ROWS // 2):
                sink.write({"__key__": f"{number:04}", "x.npy": _X[number], "cls": number})


def _huggingface(folder: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets, which writes these files, is not installed")
    datasets.Dataset.from_dict({"x": _X.tolist(), "number": list(range(ROWS))}).save_to_disk(folder / "hub")


def _parquet(folder: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas, which writes these files, is not installed")
    pytest.importorskip("pyarrow", reason="pyarrow, which writes these files, is not installed")
    for part, rows in enumerate((slice(0, 12), slice(12, None))):
        table = pandas.DataFrame({"number": np.arange(ROWS)[rows], "x": list(_X[rows])})
        table.to_parquet(folder / f"part-{part}.parquet", row_group_size=5)


def _tfrecord(folder: Path) -> None:
    """By TensorFlow."""
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("tensorflow, which writes these files, is not installed")
    pytest.importorskip("google_crc32c")
    import tensorflow as tf

    train = tf.train
    with tf.io.TFRecordWriter(str(folder / "train.tfrecord")) as writer:
        for number in range(ROWS):
            features = {
                "number": train.Feature(int64_list=train.Int64List(value=[number])),
                "x": train.Feature(float_list=train.FloatList(value=_X[number])),
            }
            writer.write(train.Example(features=train.Features(feature=features)).SerializeToString())


def _zarr(folder: Path) -> None:
    zarr = pytest.importorskip("zarr", reason="zarr, which writes these files, is not installed")
    group = zarr.open_group(folder / "store.zarr", mode="w")
    group.create_array("x", data=_X, chunks=(5, 3))
    group.create_array("number", data=np.arange(ROWS), chunks=(8,))


def _numbers_of_pairs(batch: Any) -> list[int]:
    x, number = (batch["x"], batch["number"]) if isinstance(batch, dict) else batch
    if len(number):
        np.testing.assert_array_equal(x, _X[number])
    return list(number.tolist())


KINDS = {
    "robomimic": Kind(_robomimic, _numbers_of_episodes),
    "CosmoFlow": Kind(_cosmoflow, _numbers_of_volumes),
    "ERA5": Kind(_era5, _numbers_of_windows),
    "anndata": Kind(_anndata, _numbers_of_cells),
    "10x Genomics": Kind(_tenx, _numbers_of_barcodes),
    "WebDataset": Kind(_webdataset, _numbers_of_pairs),
    "Hugging Face": Kind(_huggingface, _numbers_of_pairs),
    "Parquet": Kind(_parquet, _numbers_of_pairs),
    "TFRecord": Kind(_tfrecord, _numbers_of_pairs),
    "Zarr": Kind(_zarr, _numbers_of_pairs),
}

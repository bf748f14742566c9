"""restore of a part of a file, of renamed variables, and of weights that other programs wrote."""

import json
import logging
import struct
import sys

import h5py
import numpy as np
import pytest

import mpistrat as ms
from tests.harness.strategies import without_mpi


def body(strategy, names=("body/a", "body/b"), head=3):
    with strategy.scope():
        made = [ms.Variable(np.zeros((2, 2)), name=names[0]), ms.Variable(np.zeros(4, np.float32), name=names[1])]
        made.append(ms.Variable(np.zeros(head), name="head"))
        return made, ms.optimizers.SGD(0.1, momentum=0.9)


def steps(strategy, variables, optimizer, count):
    def step():
        for variable in variables:
            variable.grad[...] = 1.0
        optimizer.apply_gradients([(variable.grad, variable) for variable in variables])

    for _ in range(count):
        strategy.run(step)


@pytest.fixture
def saved(tmp_path):
    with without_mpi() as strategy:
        variables, optimizer = body(strategy)
        steps(strategy, variables, optimizer, 2)
        strategy.save(tmp_path / "x.h5", {"epoch": 2})
        strategy.export(tmp_path / "x.safetensors")
        return tmp_path, [variable.numpy() for variable in variables], optimizer.slots(variables[0])["momentum"]


def test_another_head_on_a_trained_body(saved, caplog):
    folder, arrays, slot = saved
    with without_mpi() as strategy:
        (a, b, head), optimizer = body(strategy, head=5)
        with pytest.raises(ValueError, match=r"variable 'head' is float64 \(3,\) in it, here float64 \(5,\)"):
            strategy.restore(folder / "x.h5")
        assert not a.numpy().any()
        with caplog.at_level(logging.WARNING):
            assert strategy.restore(folder / "x.h5", strict=False) == {"epoch": 2}
        assert "stay as they are: variable 'head' is float64 (3,) in it" in caplog.text
        assert np.array_equal(a.numpy(), arrays[0])
        assert np.array_equal(b.numpy(), arrays[1])
        assert not head.numpy().any()
        assert np.array_equal(optimizer.slots(a)["momentum"], slot)
        assert optimizer.iterations == 2
        steps(strategy, [a, b, head], optimizer, 1)
        assert np.allclose(head.numpy(), -0.1)  # its slots began anew
        assert np.allclose(a.numpy(), arrays[0] + 0.9 * slot - 0.1)


def test_renamed_variables(saved, caplog):
    folder, arrays, slot = saved
    with without_mpi() as strategy:
        (a, b, head), optimizer = body(strategy, ("encoder/one", "encoder/two"))
        names = {"encoder/one": "body/a", "encoder/two": "body/b"}
        assert strategy.restore(folder / "x.h5", map=names) == {"epoch": 2}
        for variable, array in zip((a, b, head), arrays, strict=True):
            assert np.array_equal(variable.numpy(), array)
        assert np.array_equal(optimizer.slots(a)["momentum"], slot)
        with pytest.raises(ValueError, match="'encoder/three', which no variable has"):
            strategy.restore(folder / "x.h5", map={"encoder/three": "body/a"})
        with pytest.raises(ValueError, match="'body/a' for several variables"):
            strategy.restore(folder / "x.h5", map={"encoder/one": "body/a", "encoder/two": "body/a"})
        with caplog.at_level(logging.WARNING):
            strategy.restore(folder / "x.h5", map={"encoder/one": "body/a"}, strict=False)
        assert "variable 'encoder/two' is not in it. unused in the file: 'body/b'" in caplog.text


def test_no_optimizer_here_or_there(saved, caplog, tmp_path):
    folder, arrays, _ = saved
    with without_mpi() as strategy:
        with strategy.scope():
            a = ms.Variable(np.zeros((2, 2)), name="body/a")
        with caplog.at_level(logging.WARNING):
            strategy.restore(folder / "x.h5", strict=False)
        assert np.array_equal(a.numpy(), arrays[0])
        assert "unused in the file: 'body/b', 'head', optimizer 'sgd'" in caplog.text
        strategy.save(tmp_path / "bare.h5")
    with without_mpi() as strategy:
        variables, optimizer = body(strategy)
        steps(strategy, variables, optimizer, 1)
        with pytest.raises(ValueError, match="optimizer 'sgd' is not in it"):
            strategy.restore(tmp_path / "bare.h5")
        strategy.restore(tmp_path / "bare.h5", strict=False)
        assert np.array_equal(variables[0].numpy(), arrays[0])
        assert optimizer.iterations == 1


def test_safetensors_come_and_go(saved):
    library = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    folder, arrays, _ = saved
    theirs = library.load_file(folder / "x.safetensors")
    for name, array in zip(("body/a", "body/b", "head"), arrays, strict=True):
        assert np.array_equal(theirs[name], array)
        assert theirs[name].dtype == array.dtype
    library.save_file({"w.a": arrays[0] + 1, "w.b": arrays[1], "other": arrays[2]}, folder / "theirs.safetensors")
    with without_mpi() as strategy:
        (a, b, head), optimizer = body(strategy)
        steps(strategy, (a, b, head), optimizer, 1)
        assert strategy.restore(folder / "x.safetensors") == {}
        assert np.array_equal(a.numpy(), arrays[0])
        assert optimizer.iterations == 1
        strategy.restore(folder / "theirs.safetensors", map={"body/a": "w.a", "body/b": "w.b"}, strict=False)
        assert np.array_equal(a.numpy(), arrays[0] + 1)
        with pytest.raises(ValueError, match="variable 'head' is not in it"):
            strategy.restore(folder / "theirs.safetensors", map={"body/a": "w.a", "body/b": "w.b"})
        (folder / "no.safetensors").write_bytes(b"12345678" * 9)
        with pytest.raises(OSError, match="no file of safetensors"):
            strategy.restore(folder / "no.safetensors")
        with pytest.raises(OSError, match="no such file"):
            strategy.restore(folder / "none.safetensors")
        with pytest.raises(ValueError, match="export: path: expected a name that ends"):
            strategy.export(folder / "x.h5")
        a.assign(np.zeros((2, 2)))
        (folder / "x.safetensors").rename(folder / "X.SAFETENSORS")
        assert strategy.restore(folder / "X.SAFETENSORS") == {}
        assert np.array_equal(a.numpy(), arrays[0])


def test_arrays_are_contiguous_and_begin_at_pages(saved):
    folder, arrays, _ = saved
    with h5py.File(folder / "x.h5") as file:
        assert file.attrs["version"] == 2
        offsets = {}
        file.visititems(
            lambda key, item: offsets.update({key: item.id.get_offset()}) if hasattr(item, "shape") else None
        )
        data = {key: at for key, at in offsets.items() if key.startswith(("variables", "optimizers"))}
        assert len(data) == 6
        assert all(at % 4096 == 0 for at in data.values())
        a = np.memmap(folder / "x.h5", np.float64, "r", data["variables/body%2Fa"], (2, 2))
        assert np.array_equal(a, arrays[0])


def test_names_of_many_small_arrays_take_no_pages_of_their_own(tmp_path):
    """Each took two pages, and longer with each array: 3,000 variables were not saved in 100 s."""
    with without_mpi() as strategy:
        with strategy.scope():
            for number in range(200):
                ms.Variable(np.full(3, number), name=f"v{number}")
        strategy.save(tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5") as file:
        pages = {file[f"variables/v{number}"].id.get_offset() for number in range(200)}
        assert len(pages) == 200 and not any(offset % 4096 for offset in pages)
        assert all(file[f"variables/v{number}"][2] == number for number in range(200))
    assert (tmp_path / "x.h5").stat().st_size < 1.5 * 200 * 4096


def safetensors(path, **tensors):
    """A file by the format's description, as its library writes no type that NumPy lacks."""
    head, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        head[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


ONE = np.arange(6, dtype=np.float32)
BITS = (ONE.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize("dtype", ["BF16", "F8_E4M3", "F8_E5M2"])
def test_a_tensor_of_a_type_that_numpy_lacks_hinders_no_other(tmp_path, monkeypatch, dtype):
    """Without ml_dtypes: all of such a file was refused."""
    pytest.importorskip("safetensors")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    raw = BITS.tobytes() if dtype == "BF16" else bytes(6)
    safetensors(tmp_path / "x.safetensors", w=("F32", [6], ONE.tobytes()), other=(dtype, [6], raw))
    with without_mpi() as strategy:
        with strategy.scope():
            w = ms.Variable(np.zeros(6, np.float32), name="w")
        strategy.restore(tmp_path / "x.safetensors")
        assert np.array_equal(w.numpy(), ONE)


@pytest.mark.parametrize(
    ("dtype", "name"), [("BF16", "bfloat16"), ("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2"), ("I8", "int8")]
)
def test_a_tensor_of_another_type_is_named_with_it(tmp_path, dtype, name):
    pytest.importorskip("safetensors")
    raw = BITS.tobytes() if dtype == "BF16" else bytes(6)
    safetensors(tmp_path / "x.safetensors", w=(dtype, [6], raw))
    with without_mpi() as strategy:
        with strategy.scope():
            w = ms.Variable(np.ones(6, np.float32), name="w")
        with pytest.raises(ValueError, match=rf"variable 'w' is {name} \(6,\) in it, here float32 \(6,\)"):
            strategy.restore(tmp_path / "x.safetensors")
        strategy.restore(tmp_path / "x.safetensors", strict=False)
        assert np.array_equal(w.numpy(), np.ones(6))


def test_bfloat16_is_read_as_bfloat16(tmp_path):
    pytest.importorskip("safetensors")
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    safetensors(tmp_path / "x.safetensors", w=("BF16", [2, 3], BITS.tobytes()))
    with without_mpi() as strategy:
        with strategy.scope():
            w = ms.Variable(np.zeros((2, 3), bfloat16), name="w")
        strategy.restore(tmp_path / "x.safetensors")
        assert np.array_equal(w.numpy().astype(np.float32), ONE.reshape(2, 3))

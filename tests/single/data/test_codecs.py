"""HDF5's filters undone by us: what h5py wrote comes back, by every decoder, and what is damaged is refused."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.data.files import codecs
from mpistrat.data.files.codecs import DecodeError, Pipeline, decoder_of, deflate_decoders, fletcher32

DECODERS = deflate_decoders()


def as_bytes(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


def decoded(pipeline: Pipeline, raw: bytes, size: int, mask: int = 0) -> bytes:
    out = np.full(size, 0xA5, np.uint8)
    pipeline.decode(as_bytes(raw), mask, out)
    return out.tobytes()


def deflate(name: str) -> Pipeline:
    return Pipeline(((codecs.DEFLATE, 4),), decoder_of(codecs.DEFLATE, name), name)


def words(data: bytes) -> int:
    """fletcher32 as HDF5 defines it: sums of 16-bit words, big end first, a last odd byte being a high one."""
    first = second = 0
    for low in range(0, len(data), 2):
        first += int.from_bytes(data[low : low + 2].ljust(2, b"\0"), "big")
        second += first
    return tuple_of(first) | tuple_of(second) << 16


def tuple_of(total: int) -> int:
    return total % 65535 or (65535 if total else 0)


@settings(deadline=None, max_examples=100)
@given(data=st.binary(max_size=3000))
def test_fletcher32_is_the_sum_of_words(data: bytes) -> None:
    assert fletcher32(as_bytes(data)) == words(data)


@pytest.mark.parametrize(
    "data", [b"", b"\0" * 600, b"\xff" * 600, b"\xff\xff", b"\xff", b"\0\1" * 65535, b"\xfe" * 131071]
)
def test_fletcher32_at_its_edges(data: bytes) -> None:
    assert fletcher32(as_bytes(data)) == words(data)


@pytest.mark.parametrize("size", [1, 2, 3, 511, 512, 513, 1023, 4099, 100_003])
def test_fletcher32_is_what_hdf5_stores(size: int, tmp_path: Path) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    with h5py.File(tmp_path / "f.h5", "w") as file:
        dataset = file.create_dataset("x", data=data, chunks=(size,), fletcher32=True)
        _, raw = dataset.id.read_direct_chunk((0,))
        pipeline = Pipeline.of(dataset)
    assert isinstance(pipeline, Pipeline)
    assert int.from_bytes(raw[-4:], "little") == fletcher32(data)
    assert decoded(pipeline, raw, size) == data.tobytes()
    swapped = raw[:-4] + bytes([raw[-3], raw[-4], raw[-1], raw[-2]])  # as old libraries wrote on big-endian machines
    assert decoded(pipeline, swapped, size) == data.tobytes()
    with pytest.raises(DecodeError, match="checksum"):
        decoded(pipeline, bytes([raw[0] ^ 1]) + raw[1:], size)


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from(["u1", "<i2", ">i2", "<f4", ">f8", "S3", "<c16", "S11"]),
    count=st.integers(1, 70),
    options=st.fixed_dictionaries(
        {"shuffle": st.booleans(), "fletcher32": st.booleans(), "compression": st.sampled_from([None, "gzip", "lzf"])}
    ),
    name=st.sampled_from(DECODERS),
    data=st.data(),
)
def test_what_h5py_writes_comes_back(dtype: str, count: int, options: dict, name: str, data: st.DataObject) -> None:
    nbytes = np.dtype(dtype).itemsize * count
    array = np.frombuffer(data.draw(st.binary(min_size=nbytes, max_size=nbytes)), dtype)
    with h5py.File("memory", "w", driver="core", backing_store=False) as file:
        dataset = file.create_dataset("x", data=array, chunks=(count,), **options)
        mask, raw = dataset.id.read_direct_chunk((0,))
        pipeline = Pipeline.of(dataset)
    if options["compression"] == "lzf" and not codecs.lzf_decoders():
        assert pipeline == "lzf, without compiled loops or imagecodecs"
        return
    assert isinstance(pipeline, Pipeline)
    if options["compression"] == "gzip":
        pipeline = Pipeline(pipeline.filters, decoder_of(codecs.DEFLATE, name), name)
    assert decoded(pipeline, raw, nbytes, mask) == array.tobytes()


@pytest.mark.parametrize("name", DECODERS)
def test_any_order_of_filters_is_undone(name: str) -> None:
    chunk = np.random.default_rng(0).integers(0, 4, 1002, dtype=np.uint8).tobytes()

    def shuffle(data: bytes) -> bytes:
        count = len(data) // 4
        return b"".join(data[i : 4 * count : 4] for i in range(4)) + data[4 * count :]

    encode = {
        codecs.DEFLATE: zlib.compress,
        codecs.SHUFFLE: shuffle,
        codecs.FLETCHER32: lambda data: data + struct.pack("<I", words(data)),
    }
    for order in ((3, 2, 1), (1, 2, 3), (2, 3, 1, 3), (3, 3, 1), (1,), (2,), (3,), ()):
        raw = chunk
        for code in order:
            raw = encode[code](raw)
        pipeline = Pipeline(tuple((code, 4) for code in order), decoder_of(codecs.DEFLATE, name), name)
        assert decoded(pipeline, raw, len(chunk)) == chunk
        for left_out in range(len(order)):  # a filter that a chunk went without
            raw = chunk
            for place, code in enumerate(order):
                raw = raw if place == left_out else encode[code](raw)
            assert decoded(pipeline, raw, len(chunk), 1 << left_out) == chunk


def lzf(name: str) -> Pipeline:
    return Pipeline(((codecs.LZF, 4),), decoder_of(codecs.LZF, name), name)


@pytest.mark.parametrize("name", codecs.lzf_decoders())
def test_lzf_is_undone_and_what_is_damaged_refused(name: str) -> None:
    pieces = [
        (b"\x02abc", b"abc"),  # a run of 3
        (b"\x20\x02", b"abc"),  # 3 bytes from 3 in front
        (b"\xe0\x03\x00", b"c" * 12),  # 9 + 3 bytes from 1 in front
        (b"\x1f" + bytes(range(32)), bytes(range(32))),
        (b"\xe0\xff\x1f", bytes(range(32)) * 8 + bytes(range(8))),  # 264 bytes from 32 in front
    ]
    raw, text = (b"".join(parts) for parts in zip(*pieces, strict=True))
    assert decoded(lzf(name), raw, len(text)) == text
    for damaged, size in (
        (raw, len(text) - 1),
        (raw, len(text) + 1),
        (raw[:-1], len(text)),
        (b"\x20\x00", 3),
        (b"\x05ab", 6),
    ):
        with pytest.raises(DecodeError):
            decoded(lzf(name), damaged, size)


@pytest.mark.parametrize("name", DECODERS)
def test_damaged_deflate_is_refused(name: str) -> None:
    chunk = np.random.default_rng(0).integers(0, 16, 5000, dtype=np.uint8).tobytes()
    good = zlib.compress(chunk)
    assert decoded(deflate(name), good, 5000) == chunk
    assert decoded(deflate(name), good + b"rest", 5000) == chunk  # as HDF5 does
    wrong_sum = good[:-1] + bytes([good[-1] ^ 1])
    for raw in (b"", good[:-1], good[:-5], good[:100], wrong_sum, b"\0" * 100):
        with pytest.raises(DecodeError):
            decoded(deflate(name), raw, 5000)
    for size in (4999, 5001, 1, 10_000):
        with pytest.raises(DecodeError):
            decoded(deflate(name), good, size)
    for bit in range(0, 8 * len(good), 501):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert decoded(deflate(name), bytes(flipped), 5000) == chunk  # a bit that says nothing
        except DecodeError:
            pass


@pytest.mark.parametrize("name", DECODERS)
def test_a_chunk_that_promises_too_much_is_refused_in_little_memory(name: str) -> None:
    bomb = zlib.compress(bytes(1 << 26))
    with pytest.raises(DecodeError):
        decoded(deflate(name), bomb, 1000)


def test_lengths_that_do_not_fit_are_refused() -> None:
    for filters, raw in ((((3, 0),), b"abc"), (((2, 4),), b"abc"), ((), b"abc"), (((3, 0),), b"")):
        with pytest.raises(DecodeError):
            decoded(Pipeline(filters, None, ""), raw, 100)


def test_filters_that_only_hdf5_has_are_named(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "f.h5", "w") as file:
        scaled = file.create_dataset("x", data=np.arange(10), chunks=(5,), scaleoffset=0)
        found = Pipeline.of(scaled)
    assert isinstance(found, str)
    assert "filter 6" in found

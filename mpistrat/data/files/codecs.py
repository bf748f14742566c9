"""HDF5's filters undone outside HDF5, which would hold its lock: raw chunk to bytes.

Deflate is undone by the quickest decoder that is installed. Measured on data that compresses 1.7 times, chunks of
24 KB to 1.5 MB, MB/s of decoded bytes, one thread: imagecodecs and deflate (both libdeflate) 400-540, isal 540-600,
zlib-ng 270-380, zlib 200-230; on chunks of 200 KB of float32 after shuffle, and of sparse pixels: imagecodecs 1480 and
790, isal 920 and 570, zlib 670 and 240. imagecodecs comes first: it alone decodes into a buffer that is there already,
and has lzf, too. All of them release the GIL.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...base import loops

if TYPE_CHECKING:
    import h5py

__all__ = ["DecodeError", "Decoder", "Pipeline", "decoder_of", "deflate_decoders", "fletcher32", "lzf_decoders"]

Bytes = NDArray[np.uint8]
Decoder = Callable[[Bytes, Bytes], int]  # (encoded bytes, buffer) -> how many bytes of the buffer were filled

# HDF5's numbers of the filters (H5Zpublic.h, and h5py's for lzf).
DEFLATE, SHUFFLE, FLETCHER32, LZF = 1, 2, 3, 32000

COMPILED = "mpistrat"  # among the names of packages
_CHECKSUM = 4  # bytes that fletcher32 appends
_WORDS = 256  # 16-bit words summed in one go: 255 * 65535 * 256 / 2 stays below 2**32


class DecodeError(ValueError):
    """A chunk's bytes are not what its filters would have written."""


# Decoders. Each raises what it likes, or fills less than the whole buffer; Pipeline makes one error of it.


def _imagecodecs(function: str) -> Decoder:
    decode = getattr(importlib.import_module("imagecodecs"), function)

    def into(encoded: Bytes, out: Bytes) -> int:
        return len(decode(encoded, out=out))

    return into


def _libdeflate() -> Decoder:
    decode = importlib.import_module("deflate").zlib_decompress

    def into(encoded: Bytes, out: Bytes) -> int:
        return _copy(decode(encoded, out.size), out)

    return into


def _zlib(module: str) -> Decoder:
    """A module with zlib's interface. Its output is limited: a damaged chunk may promise a thousand times its size."""
    decompressobj = importlib.import_module(module).decompressobj

    def into(encoded: Bytes, out: Bytes) -> int:
        stream = decompressobj()
        decoded = stream.decompress(encoded, out.size + 1)
        if not stream.eof:
            raise DecodeError("the compressed data ends early, or is longer than a chunk")
        return _copy(decoded, out)

    return into


def _compiled(decode: Callable[[Bytes, Bytes], int]) -> Decoder:
    """One of the compiled loops, which decodes into the buffer itself, too."""

    def into(encoded: Bytes, out: Bytes) -> int:
        filled = decode(out, encoded)
        if filled < 0:
            raise DecodeError("the compressed data is damaged, ends early, or is longer than a chunk")
        return filled

    return into


def _copy(decoded: bytes, out: Bytes) -> int:
    if len(decoded) <= out.size:
        out[: len(decoded)] = np.frombuffer(decoded, np.uint8)
    return len(decoded)


_DEFLATE: dict[str, Callable[[], Decoder]] = {
    "imagecodecs": lambda: _imagecodecs("deflate_decode"),
    "isal": lambda: _zlib("isal.isal_zlib"),
    "deflate": _libdeflate,
    "zlib_ng": lambda: _zlib("zlib_ng.zlib_ng"),
    "zlib": lambda: _zlib("zlib"),
}
_LZF: dict[str, Callable[[], Decoder]] = {
    COMPILED: lambda: _compiled(loops.lzf),
    "imagecodecs": lambda: _imagecodecs("lzf_decode"),
}


def _installed(table: dict[str, Callable[[], Decoder]]) -> list[str]:
    return [name for name in table if (loops.used()[0] if name == COMPILED else importlib.util.find_spec(name))]


@functools.cache
def deflate_decoders() -> Sequence[str]:
    """The installed packages that undo deflate, the preferred one first."""
    return tuple(_installed(_DEFLATE))


@functools.cache
def lzf_decoders() -> Sequence[str]:
    """What undoes lzf here, the preferred one first."""
    return tuple(_installed(_LZF))


@functools.cache
def decoder_of(code: int, package: str) -> Decoder:
    """Return the decoder of that name for the filter of that number."""
    return (_DEFLATE if code == DEFLATE else _LZF)[package]()


# Filters without a library.


def unshuffle(encoded: Bytes, out: Bytes, size: int) -> None:
    """Undo the shuffle filter: first all elements' first bytes, then their second; what is over stays as it is."""
    if loops.unshuffle(out, encoded, size):
        return
    count = out.size // size
    elements = out[: count * size].reshape(count, size)
    for byte in range(size):
        elements[:, byte] = encoded[byte * count : (byte + 1) * count]
    out[count * size :] = encoded[count * size :]


def fletcher32(data: Bytes) -> int:
    """Return HDF5's checksum of some bytes.

    Two sums of 16-bit words, big end first, modulo 65535, where a sum that is not zero counts as 65535, not as 0.
    The words are summed as they lie in memory: modulo 65535, swapping a word's bytes multiplies it by 256, so the
    sums' bytes are swapped once in the end.
    """
    words = data[: data.size // 2 * 2].view("<u2")
    parts = [words[: words.size // _WORDS * _WORDS].reshape(-1, _WORDS), words[words.size // _WORDS * _WORDS :][None]]
    first = second = 0
    for part in parts:
        length = part.shape[1]
        if not part.size:
            continue
        # A row adds its own second sum, and its length times the first sum of all rows before it.
        sums = part.sum(1, dtype=np.uint32).astype(np.uint64)
        weighted = part.astype(np.uint32) @ np.arange(length, 0, -1, dtype=np.uint32)
        before = first + np.cumsum(sums) - sums
        second += int(weighted.sum(dtype=np.uint64)) + length * int((before % np.uint64(65535)).sum())
        first += int(sums.sum())
    if data.size % 2:
        first += int(data[-1])  # the high byte of a last word
        second += first
    return _folded(second) << 16 | _folded(first)


def _folded(total: int) -> int:
    rest = total % 65535
    folded = rest or (65535 if total else 0)
    return (folded & 0xFF) << 8 | folded >> 8


def _check_fletcher32(encoded: Bytes) -> Bytes:
    if encoded.size < _CHECKSUM:
        raise DecodeError(f"{encoded.size} bytes, too few for a checksum")
    data = encoded[:-_CHECKSUM]
    stored = int.from_bytes(encoded[-_CHECKSUM:].tobytes(), "little")
    computed = fletcher32(data)
    # HDF5, too, takes the checksum of old libraries on big-endian machines: the bytes of both sums swapped.
    swapped = (computed & 0x00FF00FF) << 8 | (computed & 0xFF00FF00) >> 8
    if stored not in (computed, swapped):
        raise DecodeError(f"the checksum of its bytes is {computed:08x}, but {stored:08x} is stored")
    return data


@dataclass(frozen=True)
class Pipeline:
    """The filters of one dataset in the order in which they were applied to each chunk.

    Args:
        filters: numbers and first parameters of the filters.
        decoder: undoes deflate or lzf; None where neither is among them.
        name: the decoder's package, for people.
    """

    filters: tuple[tuple[int, int], ...]
    decoder: Decoder | None
    name: str

    @staticmethod
    def of(dataset: h5py.Dataset) -> Pipeline | str:
        """Return the filters of a chunked dataset, or why one of them can only be undone by HDF5."""
        plist = dataset.id.get_create_plist()
        filters = []
        for index in range(plist.get_nfilters()):
            code, _, values, name = plist.get_filter(index)
            if code not in (DEFLATE, SHUFFLE, FLETCHER32, LZF):
                return f"filter {code} ({name.decode(errors='replace')})"
            filters.append((int(code), int(values[0]) if values else 0))
        return Pipeline.undoing(filters)

    @staticmethod
    def undoing(filters: Sequence[tuple[int, int]]) -> Pipeline | str:
        """Return what undoes filters, given by numbers and first parameters, or why none of the packages here does."""
        codes = [code for code, _ in filters]
        compressed = [code for code in codes if code in (DEFLATE, LZF)]
        if len(compressed) > 1:
            return "two compressions"
        if not compressed:
            return Pipeline(tuple(filters), None, "")
        names = deflate_decoders() if compressed[0] == DEFLATE else lzf_decoders()
        if not names:
            return "lzf, without compiled loops or imagecodecs"
        return Pipeline(tuple(filters), decoder_of(compressed[0], names[0]), names[0])

    def decode(self, raw: Bytes, mask: int, out: Bytes) -> None:
        """Undo the filters of one chunk.

        Args:
            raw: the chunk's bytes in the file.
            mask: bit i is set where filter i was left out for this chunk.
            out: receives the chunk, exactly.

        Raises:
            DecodeError: when the bytes cannot be the chunk.
        """
        applied = [pair for index, pair in enumerate(self.filters) if not mask >> index & 1]
        data = raw
        for place in range(len(applied) - 1, -1, -1):
            code, parameter = applied[place]
            if code == FLETCHER32:
                data = _check_fletcher32(data)
            elif code == SHUFFLE:
                if parameter > 1:
                    target = out if place == 0 and data.size == out.size else np.empty_like(data)
                    unshuffle(data, target, parameter)
                    data = target
            else:
                # The chunk, to which the filters before this one may have appended checksums.
                checksums = sum(code == FLETCHER32 for code, _ in applied[:place])
                target = np.empty(out.size + _CHECKSUM * checksums, np.uint8) if place else out
                self._decompress(data, target)
                data = target
        _expect(data.size, out.size)
        if data is not out:
            out[...] = data

    def _decompress(self, data: Bytes, target: Bytes) -> None:
        assert self.decoder is not None
        try:
            filled = self.decoder(data, target)
        except MemoryError:
            raise
        except Exception as error:  # each package has errors of its own
            raise DecodeError(f"{self.name} cannot decompress it: {error}") from error
        _expect(filled, target.size)


def _expect(found: int, expected: int) -> None:
    if found != expected:
        raise DecodeError(f"{found} bytes where {expected} belong")

"""Decoders of HDF5's filters, outside HDF5 and its lock: from raw chunks to bytes.

Deflate uses the fastest installed decoder. Measured in MB/s of decoded bytes, one thread:

    data                               imagecodecs  deflate  isal     zlib-ng  zlib
    compressed 1.7x, 24 KB to 1.5 MB   400-540      400-540  540-600  270-380  200-230
    200 KB of float32 after shuffle    1480                  920               670
    200 KB of sparse pixels            790                   570               240

imagecodecs comes first: only it decodes into an existing buffer, and it also has lzf. All of them release the GIL.
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
Decoder = Callable[[Bytes, Bytes], int]  # (encoded bytes, buffer) -> number of bytes written

# HDF5's numbers of the filters (H5Zpublic.h, and h5py's for lzf).
DEFLATE, SHUFFLE, FLETCHER32, LZF = 1, 2, 3, 32000

COMPILED = "mpistrat"  # in place of a package name
_CHECKSUM = 4  # bytes that fletcher32 appends
_WORDS = 256  # 16-bit words summed in one go: 255 * 65535 * 256 / 2 stays below 2**32


class DecodeError(ValueError):
    """The error of a chunk whose bytes its filters cannot have written."""


# Decoders. Each raises its own errors, or fills less than the buffer; Pipeline converts both to DecodeError.


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
    """Return the decoder of a module with zlib's interface. Its output is limited: a damaged chunk may claim a huge size."""
    decompressobj = importlib.import_module(module).decompressobj

    def into(encoded: Bytes, out: Bytes) -> int:
        stream = decompressobj()
        decoded = stream.decompress(encoded, out.size + 1)
        if not stream.eof:
            raise DecodeError("the compressed data ends early, or is longer than a chunk")
        return _copy(decoded, out)

    return into


def _compiled(decode: Callable[[Bytes, Bytes], int]) -> Decoder:

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
    """Return the installed packages that decode deflate, the preferred one first."""
    return tuple(_installed(_DEFLATE))


@functools.cache
def lzf_decoders() -> Sequence[str]:
    """Return the installed decoders of lzf, the preferred one first."""
    return tuple(_installed(_LZF))


@functools.cache
def decoder_of(code: int, package: str) -> Decoder:
    """Return the decoder of this name for the filter with this number."""
    return (_DEFLATE if code == DEFLATE else _LZF)[package]()


# Filters without a library.


def unshuffle(encoded: Bytes, out: Bytes, size: int) -> None:
    """Undo the shuffle filter, which stores all elements' first bytes, then the second ones; a remainder is unchanged."""
    if loops.unshuffle(out, encoded, size):
        return
    count = out.size // size
    elements = out[: count * size].reshape(count, size)
    for byte in range(size):
        elements[:, byte] = encoded[byte * count : (byte + 1) * count]
    out[count * size :] = encoded[count * size :]


def fletcher32(data: Bytes) -> int:
    """Return HDF5's checksum of some bytes.

    Two sums of big-endian 16-bit words, modulo 65535, where a non-zero sum is 65535 instead of 0. The words are summed in
    memory order: modulo 65535, swapping a word's bytes multiplies it by 256, so the sums' bytes are swapped once at the
    end.
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
    # HDF5 also accepts the checksum of old libraries on big-endian machines, with the bytes of both sums swapped.
    swapped = (computed & 0x00FF00FF) << 8 | (computed & 0xFF00FF00) >> 8
    if stored not in (computed, swapped):
        raise DecodeError(f"the checksum of its bytes is {computed:08x}, but {stored:08x} is stored")
    return data


@dataclass(frozen=True)
class Pipeline:
    """The filters of one dataset, in the order of their application to each chunk.

    Args:
        filters: numbers and first parameters of the filters.
        decoder: the decoder of deflate or lzf; None without either.
        name: the decoder's package, for texts.
    """

    filters: tuple[tuple[int, int], ...]
    decoder: Decoder | None
    name: str

    @staticmethod
    def of(dataset: h5py.Dataset) -> Pipeline | str:
        """Return the filters of a chunked dataset, or the reason why only HDF5 can undo them."""
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
        """Return the pipeline for filters, given as numbers and first parameters, or the reason why no package here has it."""
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
            mask: bit i is set if filter i was skipped for this chunk.
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
        except Exception as error:  # each package has its own errors
            raise DecodeError(f"{self.name} cannot decompress it: {error}") from error
        _expect(filled, target.size)


def _expect(found: int, expected: int) -> None:
    if found != expected:
        raise DecodeError(f"{found} bytes where {expected} belong")

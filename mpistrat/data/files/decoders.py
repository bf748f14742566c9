"""Bytes of a file decoded by the extension of its name, as WebDataset's basic handlers and "rgb8" decode them."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ...base.errors import MissingDependencyError, explain
from ..shards.converters.image_folder import channel_dtype

__all__ = ["Decoder", "check_used", "checked_decoders", "decoder_of", "keys_of"]

Decoder = Callable[[bytes], Any]


def _text(data: bytes) -> str:
    return data.decode()


def _number(data: bytes) -> np.int64:
    return np.int64(int(data))


def _array(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


def _arrays(data: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)


def _image(data: bytes) -> Any:
    """Return the pixels of an image, uint8 [height, width, 3]."""
    try:
        from PIL import Image
    except ImportError as error:
        expected, remedy = "Pillow, which reads images", "pip install 'mpistrat[images]'"
        text = explain("from_tar", "", expected=expected, got="no module PIL", remedy=remedy)
        raise MissingDependencyError(text) from error
    with Image.open(io.BytesIO(data)) as image:
        dtype = channel_dtype(image)
        if dtype != np.uint8:
            raise ValueError(
                f"expected 8 bits a channel, got {dtype}. Pass decode= with a function for this extension."
            )
        return np.asarray(image.convert("RGB"))


_DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), _number),
    **dict.fromkeys(("json", "jsn"), json.loads),
    "npy": _array,
    "npz": _arrays,
    **dict.fromkeys(("jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "pbm", "pnm"), _image),
}


class _Unzipped:
    """A decoder of compressed bytes."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def __call__(self, data: bytes) -> Any:
        return self._decoder(gzip.decompress(data))


def check_used(function: str, decoders: Iterable[str], used: Iterable[str], fields: Sequence[str]) -> None:
    """Raise ValueError if there are decoders of fields that are not read.

    Args:
        function: the name for errors.
        decoders: the names that have a decoder.
        used: the names under which decoders of the fields are looked for.
        fields: the fields.
    """
    unused = sorted(set(decoders) - set(used))
    if fields and unused:
        expected = f"names of the fields {', '.join(fields)}"
        raise ValueError(explain(function, "decode", expected=expected, got=repr(unused[0])))


def decoder_of(field: str, chosen: Mapping[str, Decoder]) -> Decoder:
    """Return the decoder of a field.

    Args:
        field: the extensions of a name, such as "seg.png"; after ".gz", the others decide.
        chosen: the user's decoders, by all extensions of a field or by the last one.

    Example:
        >>> decoder_of("caption.txt", {})(b"a cat"), decoder_of("bin", {})(b"a cat")
        ('a cat', b'a cat')
        >>> decoder_of("caption.txt", {"txt": bytes})(b"a cat")
        b'a cat'
    """
    rest, _, last = field.rpartition(".")
    for name in (field, last):
        if name in chosen:
            return chosen[name]
    return _Unzipped(decoder_of(rest, chosen)) if last == "gz" else _DECODERS.get(last, bytes)


def keys_of(field: str) -> set[str]:
    """Return the names under which `decoder_of` looks for a decoder of a field."""
    rest, _, last = field.rpartition(".")
    return {field, last} | (keys_of(rest) if last == "gz" else set())


def checked_decoders(function: str, decode: Mapping[str, Decoder]) -> Mapping[str, Decoder]:
    """Return the decoders that the user gave a function by name; raise TypeError unless each can be called."""
    given: Mapping[str, object] = decode
    for name, decoder in given.items():
        if not callable(decoder):
            expected = "a function of the bytes"
            raise TypeError(explain(function, f"decode[{name!r}]", expected=expected, got=repr(decoder)))
    return decode

"""Messages of tf.train.Example as arrays, by Google's protobuf."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...base.lazy import load_optional

__all__ = ["features_of", "required"]

_PACKAGE = "tensorflow"
_LISTS = {
    "bytes_list": ("BytesList", "BYTES"), "float_list": ("FloatList", "FLOAT"), "int64_list": ("Int64List", "INT64"),
}  # fmt: skip
_DTYPES = {"float_list": np.float32, "int64_list": np.int64}


def required(module: str) -> Any:
    """Return a module of the extra `tfrecord`.

    Raises:
        MissingDependencyError: it is not installed.
    """
    expected, remedy = "protobuf and google-crc32c, which read these files", 'pip install "mpistrat[tfrecord]"'
    return load_optional(module, "from_tfrecord", expected, remedy)


@functools.cache
def _example() -> Any:
    """Return the class of tf.train.Example, in a pool of its own: TensorFlow registers it in the default one."""
    descriptors = required("google.protobuf.descriptor_pb2")
    file = descriptors.FileDescriptorProto(name="mpistrat/example.proto", package=_PACKAGE, syntax="proto3")
    kinds = descriptors.FieldDescriptorProto

    def message(parent: Any, name: str) -> Any:
        return parent.add(name=name)

    def field(parent: Any, name: str, number: int, kind: str, label: str = "OPTIONAL", type_name: str = "") -> Any:
        form = {"type": getattr(kinds, f"TYPE_{kind}"), "label": getattr(kinds, f"LABEL_{label}")}
        full_name = f".{_PACKAGE}.{type_name}" if type_name else None
        return parent.field.add(name=name, number=number, type_name=full_name, **form)

    for name, kind in _LISTS.values():
        field(message(file.message_type, name), "value", 1, kind, "REPEATED")
    feature = message(file.message_type, "Feature")
    feature.oneof_decl.add(name="kind")
    for number, (name, (type_name, _)) in enumerate(_LISTS.items(), 1):
        field(feature, name, number, "MESSAGE", type_name=type_name).oneof_index = 0
    features = message(file.message_type, "Features")
    entry = message(features.nested_type, "FeatureEntry")
    entry.options.map_entry = True
    field(entry, "key", 1, "STRING")
    field(entry, "value", 2, "MESSAGE", type_name="Feature")
    field(features, "feature", 1, "MESSAGE", "REPEATED", "Features.FeatureEntry")
    field(message(file.message_type, "Example"), "features", 1, "MESSAGE", type_name="Features")
    pool = required("google.protobuf.descriptor_pool").DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    found = pool.FindMessageTypeByName(f"{_PACKAGE}.Example")
    return required("google.protobuf.message_factory").GetMessageClass(found)


def features_of(record: bytes) -> dict[str, Any]:
    """Return the features of a record: an array of numbers, or a list of `bytes`, for each that has values.

    Raises:
        ValueError: the record is no tf.train.Example.
    """
    try:
        example = _example().FromString(record)
    except required("google.protobuf.message").DecodeError as error:
        raise ValueError(f"expected a tf.train.Example, got {error}") from error
    found: dict[str, Any] = {}
    for name, feature in example.features.feature.items():
        kind = feature.WhichOneof("kind")
        if kind is not None and len(values := getattr(feature, kind).value):
            found[name] = np.array(values, _DTYPES[kind]) if kind in _DTYPES else list(values)
    return found

"""Avro by hand: any record, and the bytes that no writer of ours makes."""

import dataclasses
import struct
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from fairlane.records import (
    type_by_name,
)
from fairlane.schema_files import committed_schemas, default_codec

CODEC = default_codec()


IDS = {name: committed_schemas().writer(name)[0] for name in type_by_name}


INT64 = st.integers(-(2**63), 2**63 - 1)


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Any value that a field of this type may hold on the wire."""
    if get_origin(annotation) in {UnionType, Union}:
        (inner,) = [argument for argument in get_args(annotation) if argument is not type(None)]
        return st.none() | values(inner)
    if get_origin(annotation) is tuple:
        return st.lists(values(get_args(annotation)[0]), max_size=4).map(tuple)
    if get_origin(annotation) is dict:
        return st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        hints = get_type_hints(annotation)
        return st.builds(
            annotation, **{entry.name: values(hints[entry.name]) for entry in dataclasses.fields(annotation)}
        )
    return {
        str: st.text(max_size=20),
        int: INT64,
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        bytes: st.binary(max_size=20),
    }[annotation]


ANY_RECORD = st.one_of([values(record_type) for record_type in type_by_name.values()])


def frame(name: str, body: bytes) -> bytes:
    return struct.pack(">bI", 0, IDS[name]) + body


def long(value: int) -> bytes:
    """Avro's zigzag varint."""
    rest, out = (value << 1) ^ (value >> 63), bytearray()
    rest &= 2**64 - 1
    while rest > 0x7F:
        out.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*out, rest])


def string(text: str) -> bytes:
    return long(len(text.encode())) + text.encode()

"""How large the records on the wire may be: bytes of each record, items of each list and entries of each map.

The codec holds them against the counts in the bytes, before it builds anything from them. What a deployment allows of a
request is narrower and is judged once it is decoded.
"""

from collections.abc import Mapping

from fairlane.records import MOST_INPUT_ITEMS

MAX_RECORD_BYTES = 8 * 1024 * 1024
"""Largest record that anything here writes: ``max.message.bytes`` of the topics of work, replies and dead letters."""

MAX_VALUE_BYTES = MAX_RECORD_BYTES - 64 * 1024
"""Largest value that is written: it leaves room for the key, the headers and the batch around the record."""

MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""Largest value of a request: ``max.message.bytes`` of the topics tenants write to. Its work item has as much again for
what is added."""

MAX_REQUEST_HEADERS = 64
MAX_REQUEST_HEADER_BYTES = 32 * 1024
"""Of all headers of a request, names and values. Only its trace goes on with it, but all are held while it waits."""

MAX_KEY_BYTES = 1_024
"""What is kept of a dead letter's key."""

MAX_STOP_STRINGS = 8
MAX_METADATA_BYTES = 8_192

_RECORD_BYTES: Mapping[str, int] = {"InferenceRequest": MAX_REQUEST_BYTES, "CancelRequest": MAX_REQUEST_BYTES}

_ITEMS: Mapping[tuple[str, str], int] = {
    ("RequestInput", "messages"): MOST_INPUT_ITEMS,
    ("RequestInput", "texts"): MOST_INPUT_ITEMS,
    ("RequestInput", "documents"): MOST_INPUT_ITEMS,
    ("Parameters", "stop"): MAX_STOP_STRINGS,
    # Every entry but one has a key of a byte or more.
    ("InferenceRequest", "metadata"): MAX_METADATA_BYTES,
}

MAX_OTHER_ITEMS = 262_144
"""Of the lists and maps that only services write: tokens with their probabilities, vectors, loads of tenants."""


def max_record_bytes(record_name: str) -> int:
    """Most bytes of a record of this name."""
    return _RECORD_BYTES.get(record_name, MAX_RECORD_BYTES)


def max_items(record_name: str, field_name: str) -> int:
    """Most items or entries of a list or map in this field of a record, top-level or nested."""
    return _ITEMS.get((record_name, field_name), MAX_OTHER_ITEMS)

"""Bounds of records on the wire: bytes per record, items per list, entries per map.

The codec checks them against the counts in the bytes before it builds anything. A deployment's own limits on requests
are narrower and are checked after decoding.
"""

from collections.abc import Mapping

from fairlane.records import MOST_INPUT_ITEMS

MAX_RECORD_BYTES = 8 * 1024 * 1024
"""Largest record written: ``max.message.bytes`` of the work, reply and dead-letter topics."""

MAX_VALUE_BYTES = MAX_RECORD_BYTES - 64 * 1024
"""Largest value written; leaves room for the key, the headers and the batch around the record."""

MAX_REQUEST_BYTES = 4 * 1024 * 1024
"""Largest value of a request: ``max.message.bytes`` of the topics that tenants write to. A work item has as much again
for what is added to the request."""

MAX_REQUEST_VALUE_BYTES = MAX_REQUEST_BYTES - 8 * 1024
"""Largest value of a request published here; leaves room for the key, the headers and the batch around the record."""

MAX_REQUEST_HEADERS = 64
MAX_REQUEST_HEADER_BYTES = 32 * 1024
"""Names and values of all headers of a request. Only the trace context is passed on, but all are held while it waits.
"""

MAX_KEY_BYTES = 1_024
"""Longest key kept with a dead letter."""

MAX_REQUESTED_BY_CHARS = 260
"""Of ``requested_by``: the longest subject of a token, and its prefix."""

MAX_STOP_STRINGS = 8
MAX_METADATA_BYTES = 8_192

MAX_FEEDBACK_BYTES = 256 * 1024
"""Largest record of feedback; more than its texts can take."""
MAX_CORRECTION_CHARS = 32_768
MAX_COMMENT_CHARS = 4_096
MAX_TAGS = 16

_RECORD_BYTES: Mapping[str, int] = {
    "InferenceRequest": MAX_REQUEST_BYTES,
    "CancelRequest": MAX_REQUEST_BYTES,
    "Feedback": MAX_FEEDBACK_BYTES,
}

_ITEMS: Mapping[tuple[str, str], int] = {
    ("RequestInput", "messages"): MOST_INPUT_ITEMS,
    ("RequestInput", "texts"): MOST_INPUT_ITEMS,
    ("RequestInput", "documents"): MOST_INPUT_ITEMS,
    ("Parameters", "stop"): MAX_STOP_STRINGS,
    # The byte limit bounds the count: all entries but one have a key of at least one byte.
    ("InferenceRequest", "metadata"): MAX_METADATA_BYTES,
    ("Feedback", "tags"): MAX_TAGS,
}

MAX_OTHER_ITEMS = 262_144
"""For lists and maps that only services write: tokens with log probabilities, vectors, loads of tenants."""


def max_record_bytes(record_name: str) -> int:
    """Maximum size of a record of this name, in bytes."""
    return _RECORD_BYTES.get(record_name, MAX_RECORD_BYTES)


def max_items(record_name: str, field_name: str) -> int:
    """Maximum number of items or entries of a list or map in this field of a record, top-level or nested."""
    return _ITEMS.get((record_name, field_name), MAX_OTHER_ITEMS)

"""Dead letters as services write them; ``fairlane_server.dead_letters`` reads them."""

from dataclasses import dataclass

from fairlane import headers
from fairlane.codec import DecodeError
from fairlane.names import is_model_name, is_name
from fairlane.record_bounds import MAX_KEY_BYTES, MAX_VALUE_BYTES
from fairlane.records import SourceCoordinate

_MOST_MESSAGE_CHARS = 500


def position_name(place: SourceCoordinate) -> str:
    """Notation of a log position: ``dead-letter.work-0@12``."""
    return f"{place.topic}-{place.partition}@{place.offset}"


class DeadLetterError(Exception):
    """Why a record became a dead letter. The message never quotes a record, so a header may carry it."""


@dataclass(frozen=True, slots=True)
class LetterWriter:
    """Writer of a dead letter: INSTANCE_ID of the process, and the consumer group in which it read the record."""

    instance_id: str
    group: str | None = None


LetterContent = tuple[bytes | None, bytes, tuple[tuple[str, bytes], ...]]
"""Key, value and headers of a dead letter."""


def letter_content(key: bytes | None, value: bytes, letter_headers: tuple[tuple[str, bytes], ...]) -> LetterContent:
    """Key, value and headers, cut to what a dead-letter topic accepts. A header holds the original length of a cut
    value."""
    kept = value[: MAX_VALUE_BYTES - MAX_KEY_BYTES]
    if len(kept) < len(value):
        letter_headers = (*letter_headers, (headers.ORIGINAL_BYTES, b"%d" % len(value)))
    return None if key is None else key[:MAX_KEY_BYTES], kept, letter_headers


def dead_letter_headers(
    coordinate: SourceCoordinate,
    timestamp_ms: int | None,
    error: Exception,
    by: LetterWriter,
    *,
    tenant: str | None = None,
    model: str | None = None,
) -> tuple[tuple[str, bytes], ...]:
    """Headers with origin, reason and writer of a dead letter, under the names that other tools use (``kafka_dlt-*``).

    ``coordinate`` and ``timestamp_ms`` are those of the record that was read. Of exceptions other than our own only the
    class is named: their text may quote the record. An invalid name of a tenant or model is left out.
    """
    kind = type(error)
    found = {
        headers.DLT_ORIGINAL_TOPIC: coordinate.topic,
        headers.DLT_ORIGINAL_PARTITION: str(coordinate.partition),
        headers.DLT_ORIGINAL_OFFSET: str(coordinate.offset),
        headers.DLT_ORIGINAL_TIMESTAMP: None if timestamp_ms is None else str(timestamp_ms),
        headers.DLT_ORIGINAL_CONSUMER_GROUP: by.group,
        headers.DLT_EXCEPTION_CLASS: f"{kind.__module__}.{kind.__qualname__}",
        headers.DLT_EXCEPTION_MESSAGE: _message_of(error),
        headers.INSTANCE_ID: by.instance_id,
        headers.TENANT: tenant if tenant is not None and is_name(tenant) else None,
        headers.MODEL: model if model is not None and is_model_name(model) else None,
    }
    return tuple((name, value.encode()) for name, value in found.items() if value is not None)


def _message_of(error: Exception) -> str:
    if isinstance(error, DeadLetterError | DecodeError):
        return str(error)[:_MOST_MESSAGE_CHARS]
    return type(error).__name__

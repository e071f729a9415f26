"""The headers of a dead letter."""

from fairlane import headers
from fairlane.records import SourceCoordinate


def dead_letter_headers(
    coordinate: SourceCoordinate, timestamp_ms: int, error: Exception
) -> tuple[tuple[str, bytes], ...]:
    """Where a dead letter came from and why, in the header names other tools know. The message must hold no prompt."""
    kind = type(error)
    return (
        (headers.DLT_ORIGINAL_TOPIC, coordinate.topic.encode()),
        (headers.DLT_ORIGINAL_PARTITION, b"%d" % coordinate.partition),
        (headers.DLT_ORIGINAL_OFFSET, b"%d" % coordinate.offset),
        (headers.DLT_ORIGINAL_TIMESTAMP, b"%d" % timestamp_ms),
        (headers.DLT_EXCEPTION_CLASS, f"{kind.__module__}.{kind.__qualname__}".encode()),
        (headers.DLT_EXCEPTION_MESSAGE, str(error).encode()),
    )

"""Bounds of one client."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """The bounds of one client.

    Attributes:
        max_in_flight: most requests submitted and not answered.
        max_buffered_bytes: most bytes handed to the producer and not acknowledged.
        max_request_bytes: largest encoded request.
        submit_timeout_ms: how long a submit waits for room.
        start_timeout_ms: how long the first submit waits for a broker.
        close_timeout_ms: how long closing waits for requests to be acknowledged.
    """

    max_in_flight: int
    max_buffered_bytes: int
    max_request_bytes: int
    submit_timeout_ms: int
    start_timeout_ms: int
    close_timeout_ms: int

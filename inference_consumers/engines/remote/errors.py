"""Errors of a try at an endpoint, by whose fault it is. None quotes an answer of the server: it may repeat a prompt."""

import msgspec

from inference_consumers.engines.protocol import NOT_FINITE, Failure

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of decoding JSON: it is none, or not of the expected type, not UTF-8, or nested too deeply."""


class EndpointFailedError(Exception):
    """The endpoint gave no answer, or one that is none; counts against it."""


class EndpointUnreachableError(EndpointFailedError):
    """There was no connection, so the endpoint has nothing of the item."""


class EndpointBusyError(Exception):
    """The endpoint asks to be left alone for ``rest_s``."""

    def __init__(self, message: str, rest_s: float) -> None:
        super().__init__(message)
        self.rest_s = rest_s


class ItemRefusedError(Exception):
    """The endpoint refuses the item, or its model fails on it, as every other one would."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class EndpointKeyError(Exception):
    """The key or the certificates of an endpoint cannot be read."""


# No JSON, and yet what Python's servers write for numbers that are not finite.
_NOT_FINITE_NAMES = (b"NaN", b"Infinity")


def unreadable_numbers(body: bytes, why: str) -> EndpointFailedError | ItemRefusedError:
    """The error for a body of numbers that cannot be decoded; ``why`` if it has no number that is not finite."""
    if any(name in body for name in _NOT_FINITE_NAMES):
        return ItemRefusedError(NOT_FINITE)
    return EndpointFailedError(why)

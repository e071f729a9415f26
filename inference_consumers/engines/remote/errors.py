"""Errors of a try at an endpoint, by whose fault it is. None quotes an answer of the server: it may repeat a prompt."""

import msgspec

from inference_consumers.engines.protocol import Failure

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
    """The endpoint refuses the item, as every other one would."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class EndpointKeyError(Exception):
    """The key or the certificates of an endpoint cannot be read."""

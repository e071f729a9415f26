"""What routes need of the way to Kafka and back, so that they are tested without either."""

from collections.abc import AsyncIterator
from typing import Protocol

from fairlane.client.reassembly import TextDelta
from fairlane.records import InferenceReply, InferenceRequest


class Waiting(Protocol):
    """A request that was accepted: its publish was acknowledged."""

    @property
    def request_id(self) -> str: ...

    async def reply(self, timeout_s: float) -> InferenceReply:
        """The final reply. May be called again. Raises TimeoutError: it goes on, and its result can be asked for."""
        ...

    def deltas(self, timeout_s: float) -> AsyncIterator[TextDelta]:
        """Its text as it is made, of a request with ``parameters.stream``; ends when the final reply is here.

        Raises TimeoutError like ``reply``; called again, it goes on where it was. What was given is all of the reply's
        text, whatever chunks were lost.
        """
        ...

    async def cancel(self) -> None:
        """Its caller is gone or does not want it any more. Its reply still comes, once."""
        ...

    def forget(self) -> None:
        """Nobody waits here any more; the request goes on. Must be called in the end, and may be called again."""
        ...


class Submitter(Protocol):
    """The way into the log."""

    async def submit(self, tenant: str, request: InferenceRequest) -> Waiting:
        """Publish to the tenant's request topic and return when that is acknowledged.

        The request's ``request_id`` must come from ``new_request_id``, since the reply's way back depends on it.

        Raises:
            GatewayError: 429 or 503 when it would be refused anyway or too much is under way here, 503 when Kafka does
                not take it; with ``retry_after_ms``. Nothing was accepted then.
        """
        ...

    async def cancel(self, tenant: str, request_id: str) -> None:
        """Cancel a request by its id, whichever instance took it. Raises GatewayError: 503."""
        ...

    def new_request_id(self) -> str:
        """An id whose reply comes back to this instance."""
        ...

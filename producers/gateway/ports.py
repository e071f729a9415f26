"""Ports of the routes to the Kafka pipeline, so that routes can be tested without Kafka."""

from collections.abc import AsyncIterator
from typing import Protocol

from fairlane.client.reassembly import TextDelta
from fairlane.records import InferenceReply, InferenceRequest


class PendingReply(Protocol):
    """An accepted request: its publish was acknowledged."""

    @property
    def request_id(self) -> str: ...

    async def reply(self, timeout_s: float) -> InferenceReply:
        """The final reply; may be called again. Raises TimeoutError: the request goes on and can be looked up."""
        ...

    def deltas(self, timeout_s: float) -> AsyncIterator[TextDelta]:
        """Text deltas of a request with ``parameters.stream``; ends when the final reply has arrived.

        Raises TimeoutError like ``reply``; called again, it goes on where it was. Together the deltas are the reply's
        whole text, whatever chunks were lost.
        """
        ...

    async def cancel(self) -> None:
        """Cancel the request. Its one final reply still comes."""
        ...

    def forget(self) -> None:
        """Stop waiting; the request goes on. Must be called in the end, and may be called again."""
        ...


class Submitter(Protocol):
    """Publishes requests to Kafka."""

    async def submit(self, tenant: str, request: InferenceRequest) -> PendingReply:
        """Publish to the tenant's request topic and return when the publish is acknowledged.

        The request's ``request_id`` must come from ``new_request_id``: it routes the reply.

        Raises:
            GatewayError: the request is invalid or would be rejected anyway, too much is in flight here (429, 503), or
                Kafka does not take it (503). Nothing was accepted, unless the code is ``UNCERTAIN``.
        """
        ...

    async def cancel(self, tenant: str, request_id: str) -> None:
        """Cancel a request by its id, whichever instance accepted it. Raises GatewayError: 400, 503."""
        ...

    def new_request_id(self) -> str:
        """A new request id whose reply is routed to this instance."""
        ...

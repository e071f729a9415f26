"""Dependencies of the OpenAI routes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fairlane.records import InferenceReply, ModelVersion
from producers.gateway.idempotency import Published
from producers.gateway.sending import SendingDeps
from producers.openai_api.response_bodies import RequestEcho


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAIDeps(SendingDeps):
    """Dependencies of ``router``.

    Attributes:
        models_of: models that a tenant may use, in any order.
        keep_alive_s: longest silence of a stream before a keep-alive. The status of a stream is held back as long, so
            that a request that fails by then gets an error status.
    """

    models_of: Callable[[str], Sequence[ModelVersion]]
    keep_alive_s: float = 10.0

    def echo(
        self, published: Published, reply: InferenceReply | None = None, *, with_usage: bool = False
    ) -> RequestEcho:
        """Request fields that the response repeats. The time is the reply's, the same in a repeated response."""
        submitted_at_ms = None if reply is None else reply.timings.submitted_at_ms
        at_ms = self.clock_ms() if submitted_at_ms is None else submitted_at_ms
        return RequestEcho(published.request_id, published.model, at_ms // 1_000, with_usage)

"""Errors of the client SDK, in one tree. No message contains a payload.

::

    FairlaneError
    ├── Unsuccessful          the final reply is not ``ok``; ``.reply``
    │   ├── Rejected          ``.code``, ``.retry_after_ms``, ``.field``, ``.message``
    │   ├── Expired
    │   ├── Cancelled
    │   └── Failed            ``.code``, ``.message``
    ├── Timeout               no reply yet; the request is still in flight (also a TimeoutError)
    ├── PublishFailed         the request was not published; ``.topic``, ``.reason``, ``.uncertain``
    ├── AnsweredElsewhere     the reply goes to a topic that this client does not read
    ├── Backpressure          too many requests or bytes are in flight
    ├── Unavailable           no broker answers, a topic is missing, or a thread of the client died
    └── ClientClosed

An invalid request raises ValueError, which names the field, before anything is sent.
"""

from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply


class FairlaneError(Exception):
    """Base error of the client SDK."""


class Unsuccessful(FairlaneError):  # noqa: N818 - named like the outcomes
    """The final reply is not ``ok``.

    Attributes:
        reply: the final reply.
    """

    def __init__(self, reply: InferenceReply) -> None:
        super().__init__(reply)
        self.reply = reply

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.reply.request_id

    @property
    def code(self) -> str | None:
        """The reason, a value of :class:`fairlane.outcomes.Code`."""
        return self.reply.code

    @property
    def message(self) -> str | None:
        """The reason as a sentence."""
        return self.reply.message

    def __str__(self) -> str:
        reply = self.reply
        parts = [reply.outcome if reply.code is None else f"{reply.outcome} ({reply.code})"]
        if reply.field is not None:
            parts.append(f"field {reply.field}")
        if reply.message is not None:
            parts.append(reply.message)
        if reply.retry_after_ms is not None:
            parts.append(f"retry after {reply.retry_after_ms} ms")
        return f"request {reply.request_id}: {', '.join(parts)}"

    def __repr__(self) -> str:
        # The default would show the arguments, and with them the text of the reply.
        return f"{type(self).__name__}({self})"


class Rejected(Unsuccessful):
    """The request was refused before it was run."""

    @property
    def retry_after_ms(self) -> int | None:
        """Delay before a retry; None when a retry of the same request is useless."""
        return self.reply.retry_after_ms

    @property
    def field(self) -> str | None:
        """The invalid field of the request; None when no field is invalid."""
        return self.reply.field


class Expired(Unsuccessful):
    """The request's ``timeout_ms`` passed before it was run."""


class Cancelled(Unsuccessful):
    """The request was cancelled."""


class Failed(Unsuccessful):
    """The request was accepted and failed."""


class Timeout(FairlaneError, TimeoutError):  # noqa: N818 - the built-in TimeoutError is a base
    """The wait timed out. The request goes on; the caller may wait again."""


class PublishFailed(FairlaneError):  # noqa: N818 - reads as what happened
    """A request, a cancellation or feedback was not published.

    Attributes:
        request_id: of the request.
        topic: the target topic.
        reason: the error of the broker or the producer.
        uncertain: the broker did not answer, so the record may be in the log nonetheless. Publish the request again
            under the same id: it is run once.
        what: "request", "cancellation of request" (then the request itself is in flight), or "feedback on request".
    """

    def __init__(
        self, request_id: str, topic: str, reason: str, *, uncertain: bool = False, what: str = "request"
    ) -> None:
        super().__init__(request_id, topic, reason)
        self.request_id = request_id
        self.topic = topic
        self.reason = reason
        self.uncertain = uncertain
        self.what = what

    def __str__(self) -> str:
        doubt = "; it may have been published nonetheless" if self.uncertain else ""
        return f"{self.what} {self.request_id}: not published to {self.topic}: {self.reason}{doubt}"


class AnsweredElsewhere(FairlaneError):  # noqa: N818 - reads as what happened
    """The reply goes to the topic in ``reply_to``; read it there with ``replies()``.

    Attributes:
        request_id: of the request.
        reply_to: the topic.
    """

    def __init__(self, request_id: str, reply_to: str) -> None:
        super().__init__(request_id, reply_to)
        self.request_id = request_id
        self.reply_to = reply_to

    def __str__(self) -> str:
        return f"request {self.request_id}: answered on {self.reply_to}, which this client does not read"


class Backpressure(FairlaneError):  # noqa: N818 - the field's own word
    """The limits on requests and bytes in flight left no room within the submit timeout, or the producer's queue is
    full."""


class Unavailable(FairlaneError):  # noqa: N818 - reads as what happened
    """The client cannot work: no broker answers, a topic does not exist, settings are invalid, or its thread died."""


class ClientClosed(FairlaneError):  # noqa: N818 - reads as what happened
    """The client is closed: it accepts no more requests, and open handles get no reply."""


_BY_OUTCOME: dict[str, type[Unsuccessful]] = {
    Outcome.REJECTED: Rejected,
    Outcome.EXPIRED: Expired,
    Outcome.CANCELLED: Cancelled,
    Outcome.FAILED: Failed,
}


def unsuccessful_error(reply: InferenceReply) -> Unsuccessful | None:
    """The error for a reply; None when it is ``ok``. An outcome unknown to this version becomes Failed."""
    if reply.outcome == Outcome.OK:
        return None
    return _BY_OUTCOME.get(reply.outcome, Failed)(reply)

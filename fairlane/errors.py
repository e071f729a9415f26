"""Every error the client SDK raises on purpose, as one small tree. No message ever holds a payload.

::

    FairlaneError
    ├── Unsuccessful          a final reply came and it is not ``ok``; ``.reply`` holds it
    │   ├── Rejected          ``.code``, ``.retry_after_ms``, ``.field``, ``.message``
    │   ├── Expired
    │   ├── Cancelled
    │   └── Failed            ``.code``, ``.message``
    ├── Timeout               no reply yet; the request is still under way (also a TimeoutError)
    ├── PublishFailed         the request did not get into the log; ``.topic``, ``.reason``, ``.uncertain``
    ├── AnsweredElsewhere     the reply goes to a topic that this client does not read
    ├── Backpressure          too much is under way and none of it ended in time
    ├── Unavailable           Kafka, or a topic the client needs, or a thread of the client is not there
    └── ClientClosed

A request that is wrong before anything is sent raises ValueError, naming the field.
"""

from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply


class FairlaneError(Exception):
    """The root of the tree."""


class Unsuccessful(FairlaneError):  # noqa: N818 - named like the outcomes it stands for
    """The final reply is not ``ok``.

    Attributes:
        reply: the reply as it came.
    """

    def __init__(self, reply: InferenceReply) -> None:
        super().__init__(reply)
        self.reply = reply

    @property
    def request_id(self) -> str:
        """The request this is the end of."""
        return self.reply.request_id

    @property
    def code(self) -> str | None:
        """Why, as one word of :class:`fairlane.outcomes.Code`."""
        return self.reply.code

    @property
    def message(self) -> str | None:
        """Why, as a sentence."""
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
        # The default shows the arguments, and with them whatever text the reply holds.
        return f"{type(self).__name__}({self})"


class Rejected(Unsuccessful):
    """The request was refused before it cost anything."""

    @property
    def retry_after_ms(self) -> int | None:
        """When to try again; None when trying again as it is makes no sense."""
        return self.reply.retry_after_ms

    @property
    def field(self) -> str | None:
        """The field of the request that is wrong, if one is."""
        return self.reply.field


class Expired(Unsuccessful):
    """The request's ``timeout_ms`` passed before it was run."""


class Cancelled(Unsuccessful):
    """The request was cancelled."""


class Failed(Unsuccessful):
    """The request was accepted and could not be run."""


class Timeout(FairlaneError, TimeoutError):  # noqa: N818 - the built-in TimeoutError is a base
    """Nothing came within the time the caller would wait. The request itself goes on: wait again at will."""


class PublishFailed(FairlaneError):  # noqa: N818 - reads as what happened
    """A request, or its cancellation, did not get into the log.

    Attributes:
        request_id: of the request.
        topic: where it was to go.
        reason: what the broker or the producer said.
        uncertain: True when no answer came, so that it may be in the log nonetheless. Publish it again under the same
            request id: it is run once.
        what: what was to be published: the request, or the cancellation of a request, which is under way then.
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
    """The reply goes to the topic that ``reply_to`` named; read it there with ``replies()``.

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
    """As much is under way as the client may hold, and none of it ended within the time submit would wait."""


class Unavailable(FairlaneError):  # noqa: N818 - reads as what happened
    """The client cannot work: no broker answers, a topic it needs does not exist, or its own thread died."""


class ClientClosed(FairlaneError):  # noqa: N818 - reads as what happened
    """The client was closed: nothing more is submitted, and what was open gets no answer from it."""


_BY_OUTCOME: dict[str, type[Unsuccessful]] = {
    Outcome.REJECTED: Rejected,
    Outcome.EXPIRED: Expired,
    Outcome.CANCELLED: Cancelled,
    Outcome.FAILED: Failed,
}


def error_of(reply: InferenceReply) -> Unsuccessful | None:
    """The error a reply stands for; None when it is ``ok``. An outcome unknown to this version counts as failed."""
    if reply.outcome == Outcome.OK:
        return None
    return _BY_OUTCOME.get(reply.outcome, Failed)(reply)

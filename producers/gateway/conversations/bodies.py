"""Bodies of the routes of conversations and erasures."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from fairlane.records import Message
from fairlane_server.conversations.conversations import ConversationSummary
from fairlane_server.conversations.turns import StoredTurn
from fairlane_server.erasure.erasures import MOST_NAMES, Erasure, ErasureKind
from fairlane_server.erasure.expiry import Expiry
from producers.gateway.native.response_bodies import Page, ResponseBody
from producers.gateway.openapi import CREATED_S, EXAMPLE_ID
from producers.openai_api.request_models import ClosedBody

_AT_MS = 1_000 * CREATED_S
_DAY_MS = 86_400_000
CONVERSATION_ID = "orders-17"
ERASURE_ID = "erasure-0a1b2c3d4e5f60718293a4b5"


class ConversationAnswer(ResponseBody):
    """A conversation, without what was said."""

    id: str
    turns: int
    tokens: int = Field(description="Of its texts, estimated")
    first_at_ms: int
    last_at_ms: int

    @classmethod
    def of(cls, summary: ConversationSummary) -> "ConversationAnswer":
        """The answer of a stored conversation."""
        times = {"first_at_ms": summary.first_at_ms, "last_at_ms": summary.last_at_ms}
        return cls(id=summary.conversation_id, turns=summary.turns, tokens=summary.tokens, **times)


class ConversationPage(Page[ConversationAnswer]):
    """Conversations by id."""


class TurnAnswer(ResponseBody):
    """What one request added to its conversation, and the answer."""

    request_id: str
    messages: tuple[Message, ...]
    answer: str
    tokens: int = Field(description="Of messages and answer, estimated")
    replied_at_ms: int

    @classmethod
    def of(cls, turn: StoredTurn) -> "TurnAnswer":
        """The answer of a stored turn."""
        return cls.model_validate(turn)


class TurnsPage(Page[TurnAnswer]):
    """Turns in their order; fewer than asked for where they are long."""


_Name = Annotated[str, Field(min_length=1, max_length=128)]


class NewErasure(ClosedBody):
    """Body of ``POST /v1/erasures``: one of the two."""

    conversation_id: _Name | None = Field(None, description="Everything of this conversation, recorded or under way")
    request_ids: Annotated[list[_Name], Field(min_length=1, max_length=MOST_NAMES)] | None = Field(
        None, description="These requests: their results, turns and cached replies"
    )

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if (self.conversation_id is None) == (self.request_ids is None):
            raise ValueError("one of conversation_id and request_ids must be given")
        return self


class ErasedCounts(ResponseBody):
    """What was deleted at once."""

    turns: int
    results: int


class ExpiryAnswer(ResponseBody):
    """A place, and the latest time, in milliseconds since the epoch, by which it holds nothing of it."""

    store: str
    what: str
    gone_by_ms: int

    @classmethod
    def of(cls, expiry: Expiry) -> "ExpiryAnswer":
        """The answer of an expiry."""
        return cls.model_validate(expiry)


class ErasureAnswer(ResponseBody):
    """An erasure: what is gone, what expires, and what is kept. It names neither conversation nor requests."""

    id: str
    kind: ErasureKind
    subject_sha256: str = Field(description="Of the names, sorted and joined by line feeds")
    status: str = Field(description="`erasing`, then `done`: all that is left expires")
    requested_by: str
    requested_at_ms: int = Field(description="Nothing that was submitted before is stored any more")
    done_at_ms: int | None = None
    erased: ErasedCounts
    expires: tuple[ExpiryAnswer, ...] = Field((), description="Copies that expire, the first to go first")
    gone_by_ms: int | None = Field(None, description="When the last copy is gone")
    kept: tuple[ExpiryAnswer, ...] = Field((), description="Records about it without text, and until when")

    @classmethod
    def of(cls, erasure: Erasure, expires: tuple[Expiry, ...], kept: tuple[Expiry, ...]) -> "ErasureAnswer":
        """The answer of a recorded erasure."""
        return cls(
            id=erasure.erasure_id,
            kind=erasure.kind,
            subject_sha256=erasure.subject,
            status="done" if erasure.is_done else "erasing",
            requested_by=erasure.requested_by,
            requested_at_ms=erasure.requested_at_ms,
            done_at_ms=erasure.done_at_ms,
            erased=ErasedCounts(turns=erasure.turns, results=erasure.results),
            expires=tuple(map(ExpiryAnswer.of, expires)),
            gone_by_ms=max((one.gone_by_ms for one in expires), default=None),
            kept=tuple(map(ExpiryAnswer.of, kept)),
        )


class ErasurePage(Page[ErasureAnswer]):
    """Erasures, newest first, without their expiries."""


_CONVERSATION = ConversationAnswer(
    id=CONVERSATION_ID, turns=3, tokens=240, first_at_ms=_AT_MS, last_at_ms=_AT_MS + 60_000
)
CONVERSATIONS = ConversationPage(data=(_CONVERSATION,), has_more=False)
_TURN = TurnAnswer(
    request_id=EXAMPLE_ID,
    messages=(Message("user", "Where is my parcel?"),),
    answer="It arrives on Friday.",
    tokens=12,
    replied_at_ms=_AT_MS,
)
TURNS = TurnsPage(data=(_TURN,), has_more=False)
EXPORT = _TURN.as_json().decode() + "\n"
_ERASURE = Erasure(
    ERASURE_ID, ErasureKind.CONVERSATION, "0a" * 32, True, 3, 3, (), "key:0a1b2c3d4e5f6071", _AT_MS, _AT_MS + 40
)
_EXPIRES = (Expiry("topic:replies.acme", "Final replies to one tenant", _AT_MS + 14 * _DAY_MS),)
ERASURE = ErasureAnswer.of(_ERASURE, _EXPIRES, (Expiry("postgres:usage", "ids, no text", _AT_MS + 90 * _DAY_MS),))
ERASURES = ErasurePage(data=(ErasureAnswer.of(_ERASURE, (), ()),), has_more=False)

"""Conversations in Postgres: a tenant's own (list, read), and the newest turns for an event loop.

>>> from fairlane_server.conversations.conversations import Conversations
>>> from fairlane.settings import Settings
>>> with Conversations(Settings().postgres_dsn.get_secret_value(), tenant="acme") as conversations:
...     for turn in conversations.turns("orders-17"):
...         print(turn.messages[-1].content, "->", turn.answer)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import psycopg

from fairlane.closing import Closing
from fairlane.names import is_name
from fairlane.records import Message
from fairlane_server.conversations.turns import MOST_TURNS, StoredTurn, StoredTurns
from fairlane_server.postgres.connection import ReconnectingConnection, reason
from fairlane_server.postgres.pool import DeadlinePool, Question, Rows, rows_for
from fairlane_server.store_error import StoreError
from fairlane_server.text import clean_text, without_nul

# The tenant is named although row-level security applies: the index begins with it. One turn more than wanted shows
# whether there are more.
_NEWEST_IF = """
SELECT request_id, messages, answer, tokens, replied_at_ms, place, found FROM (
    SELECT *, row_number() OVER newest_first AS place, count(*) OVER () AS found,
        sum(tokens) OVER newest_first - tokens AS newer_tokens
    FROM (
        SELECT request_id, messages, answer, tokens, replied_at_ms, submitted_at_ms, source_offset
        FROM conversation_turns
        WHERE tenant = %s AND conversation_id = %s ORDER BY submitted_at_ms DESC, source_offset DESC LIMIT %s
    ) AS newest
    WINDOW newest_first AS (ORDER BY submitted_at_ms DESC, source_offset DESC ROWS UNBOUNDED PRECEDING)
) AS counted
WHERE newer_tokens < %s {} ORDER BY place DESC
"""
_IS_THERE = """
SELECT true FROM conversation_turns WHERE tenant = %s AND conversation_id = %s AND request_id = %s
"""
_NEWEST = _NEWEST_IF.format("").encode()
# EXISTS depends on no row: Postgres evaluates it first, by primary key, and reads nothing else if it is false.
NEWEST_WITH = _NEWEST_IF.format(f"AND EXISTS ({_IS_THERE})").encode()


class PgTurnStore:
    """A TurnStore over Postgres. Each transaction reads for one tenant, enforced by row-level security."""

    def __init__(self, pool: DeadlinePool) -> None:
        self._pool = pool

    async def turns(
        self, tenant: str, conversation_id: str, after: str | None, max_tokens: int, timeout_s: float
    ) -> StoredTurns:
        if not is_name(tenant):
            raise StoreError("this is no tenant's name")
        name = stored_name(conversation_id)
        asks: list[Question] = [(_NEWEST, (tenant, name, MOST_TURNS + 1, max(1, max_tokens)))]
        if after is not None:
            # Before the rows are read: a turn recorded in between then shows up in the rows. In the other order it
            # would be found here and missing there.
            asks.insert(0, (_IS_THERE.encode(), (tenant, name, stored_name(after))))
        *there, rows = await rows_for(self._pool, tenant, asks, timeout_s)
        is_there = after is None or bool(there[0]) or any(row[0] == stored_name(after) for row in rows)
        return _turns_of(rows, has_after=is_there)

    async def turns_with(
        self, tenant: str, conversation_id: str, after: str, max_tokens: int, timeout_s: float
    ) -> StoredTurns | None:
        if not is_name(tenant):
            raise StoreError("this is no tenant's name")
        name = stored_name(conversation_id)
        wanted = (tenant, name, MOST_TURNS + 1, max(1, max_tokens), tenant, name, stored_name(after))
        (rows,) = await rows_for(self._pool, tenant, [(NEWEST_WITH, wanted)], timeout_s)
        # Without rows the turn is not recorded: a conversation that contains it has a newest turn.
        return _turns_of(rows, has_after=True) if rows else None


def _turns_of(rows: Rows, *, has_after: bool) -> StoredTurns:
    """Build turns from rows that end with their place, 1 for the newest turn, and the number of all turns found."""
    kept = [row for row in rows if row[5] <= MOST_TURNS]
    return StoredTurns(tuple(map(turn_of, kept)), not kept or len(kept) == kept[0][6], has_after)


def turn_of(row: Sequence[Any]) -> StoredTurn:
    """Build a turn from a row that begins with request_id, messages, answer, tokens and replied_at_ms."""
    request_id, messages, answer, tokens, replied_at_ms = row[:5]
    return StoredTurn(
        request_id, tuple(Message(said["role"], said["content"]) for said in messages), answer, tokens, replied_at_ms
    )


def stored_name(name: str) -> str:
    return without_nul(clean_text(name))


APPLICATION_NAME = "fairlane-conversations"
CALL_TIMEOUT_S = 30.0

_LIST = """
SELECT conversation_id, count(*), sum(tokens)::bigint, min(replied_at_ms), max(replied_at_ms) FROM conversation_turns
WHERE tenant = %s GROUP BY conversation_id ORDER BY max(replied_at_ms) DESC, conversation_id LIMIT %s
"""
_TURNS = """
SELECT * FROM (
    SELECT request_id, messages, answer, tokens, replied_at_ms, submitted_at_ms, source_offset FROM conversation_turns
    WHERE tenant = %s AND conversation_id = %s ORDER BY submitted_at_ms DESC, source_offset DESC LIMIT %s
) AS newest ORDER BY submitted_at_ms, source_offset
"""
# Each step finds the next name in the index: a page costs as much as its own conversations, however many there are.
_NAMES = """
WITH RECURSIVE names AS (
    (SELECT conversation_id, 1 AS place FROM conversation_turns
        WHERE tenant = %(tenant)s AND conversation_id > %(behind)s ORDER BY conversation_id LIMIT 1)
    UNION ALL
    SELECT (
        SELECT turn.conversation_id FROM conversation_turns AS turn
        WHERE turn.tenant = %(tenant)s AND turn.conversation_id > names.conversation_id
        ORDER BY turn.conversation_id LIMIT 1
    ), place + 1 FROM names WHERE place < %(most)s AND conversation_id IS NOT NULL
)
SELECT turn.conversation_id, count(*), sum(turn.tokens)::bigint, min(turn.replied_at_ms), max(turn.replied_at_ms)
FROM names JOIN conversation_turns AS turn ON turn.tenant = %(tenant)s AND turn.conversation_id = names.conversation_id
GROUP BY 1 ORDER BY 1
"""
# At least one turn, and no more text than the bound, however long they are.
_TURNS_BEHIND = """
SELECT request_id, messages, answer, tokens, replied_at_ms, submitted_at_ms, source_offset, found FROM (
    SELECT *, count(*) OVER () AS found, row_number() OVER in_order AS place,
        sum(length(answer) + length(messages::text)) OVER in_order AS characters
    FROM (
        SELECT request_id, messages, answer, tokens, replied_at_ms, submitted_at_ms, source_offset
        FROM conversation_turns WHERE tenant = %(tenant)s AND conversation_id = %(name)s
            AND (submitted_at_ms, source_offset, request_id) > (%(at_ms)s, %(offset)s, %(request_id)s)
        ORDER BY submitted_at_ms, source_offset, request_id LIMIT %(most)s
    ) AS page
    WINDOW in_order AS (ORDER BY submitted_at_ms, source_offset, request_id ROWS UNBOUNDED PRECEDING)
) AS counted WHERE place = 1 OR characters <= %(characters)s ORDER BY place
"""
MOST_PAGE_CHARACTERS = 2_000_000
"""Of the texts of a page of turns, unless its only one has more."""


class ConversationNotFoundError(StoreError):
    """The tenant has no conversation of this name. Conversations of other tenants do not count."""


@dataclass(frozen=True, slots=True)
class ConversationSummary:
    """Summary of a stored conversation; times in milliseconds since the epoch, tokens estimated."""

    tenant: str
    conversation_id: str
    turns: int
    tokens: int
    first_at_ms: int
    last_at_ms: int


class TurnPlace(NamedTuple):
    """The place of a turn in the order of its conversation."""

    submitted_at_ms: int
    source_offset: int
    request_id: str


@dataclass(frozen=True, slots=True)
class TurnPage:
    """Turns in their order; ``behind`` is the place of the last one if there are more."""

    turns: tuple[StoredTurn, ...]
    behind: TurnPlace | None


class Conversations(Closing):
    """The conversations of one tenant. Those of other tenants are not found, as if they did not exist."""

    def __init__(self, dsn: str, tenant: str) -> None:
        """Raises ValueError for an invalid tenant name."""
        if not is_name(tenant):
            raise ValueError(f"no tenant can have the name {tenant!r}")
        self._tenant = tenant
        self._kept = ReconnectingConnection(dsn, APPLICATION_NAME, CALL_TIMEOUT_S)

    def close(self) -> None:
        self._kept.close()

    def list(self, most: int = 1_000) -> Sequence[ConversationSummary]:
        """The ``most`` conversations continued last, latest first. Raises StoreError."""
        with self._transaction() as connection:
            rows = connection.execute(_LIST, (self._tenant, most)).fetchall()
        return [ConversationSummary(self._tenant, *row) for row in rows]

    def turns(self, conversation_id: str, most: int = 1_000) -> Sequence[StoredTurn]:
        """The newest turns of a conversation, oldest first. Raises ConversationNotFoundError, StoreError."""
        with self._transaction() as connection:
            parameters = (self._tenant, stored_name(conversation_id), most)
            rows = connection.execute(_TURNS, parameters).fetchall()
        if not rows:
            raise ConversationNotFoundError(f"there is no conversation {conversation_id!r}")
        return [turn_of(row) for row in rows]

    def page(self, behind: str, most: int) -> Sequence[ConversationSummary]:
        """Conversations by name, behind that name. Raises StoreError."""
        values = {"tenant": self._tenant, "behind": stored_name(behind), "most": most}
        with self._transaction() as connection:
            rows = connection.execute(_NAMES, values).fetchall()
        return [ConversationSummary(self._tenant, *row) for row in rows]

    def turns_behind(self, conversation_id: str, behind: TurnPlace | None, most: int) -> TurnPage:
        """Turns in their order, behind that place. Raises StoreError, and ConversationNotFoundError when there is none
        from the beginning on."""
        at_ms, offset, request_id = behind or (-1, -1, "")
        values = {"tenant": self._tenant, "name": stored_name(conversation_id), "characters": MOST_PAGE_CHARACTERS}
        values |= {"at_ms": at_ms, "offset": offset, "request_id": request_id, "most": most + 1}
        with self._transaction() as connection:
            rows = connection.execute(_TURNS_BEHIND, values).fetchall()
        if not rows and behind is None:
            raise ConversationNotFoundError(f"there is no conversation {conversation_id!r}")
        shown = rows[:most]
        has_more = bool(shown) and len(shown) < shown[0][7]
        place = TurnPlace(shown[-1][5], shown[-1][6], shown[-1][0]) if has_more else None
        return TurnPage(tuple(map(turn_of, shown)), place)

    @contextmanager
    def _transaction(self) -> Iterator[psycopg.Connection]:
        try:
            with self._kept.transaction(self._tenant) as connection:
                yield connection
        except psycopg.Error as error:
            raise StoreError(reason(error)) from None

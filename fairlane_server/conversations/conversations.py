"""A tenant's conversations: list, read and delete them.

>>> from fairlane_server.conversations.conversations import Conversations
>>> from fairlane.settings import Settings
>>> with Conversations(Settings().postgres_dsn.get_secret_value(), tenant="acme") as conversations:
...     for turn in conversations.turns("orders-17"):
...         print(turn.messages[-1].content, "->", turn.answer)
...     conversations.delete("orders-17")
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import psycopg

from fairlane.names import is_name
from fairlane_server.conversations.pg_turn_store import stored_name, turn_of
from fairlane_server.conversations.turns import StoredTurn
from fairlane_server.postgres.connection import ReconnectingConnection, reason
from fairlane_server.store_error import StoreError

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
_DELETE = "DELETE FROM conversation_turns WHERE tenant = %s AND conversation_id = %s"


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


class Conversations:
    """The conversations of one tenant. Those of other tenants are not found, as if they did not exist."""

    def __init__(self, dsn: str, tenant: str) -> None:
        """Raises ValueError for an invalid tenant name."""
        if not is_name(tenant):
            raise ValueError(f"no tenant can have the name {tenant!r}")
        self._tenant = tenant
        self._kept = ReconnectingConnection(dsn, APPLICATION_NAME, CALL_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

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

    def delete(self, conversation_id: str) -> int:
        """Delete the turns of a conversation. Returns how many there were.

        Later replies under the same name begin a new conversation. The replies themselves stay in the results and,
        until its retention ends, in the log. Raises ConversationNotFoundError, StoreError.
        """
        with self._transaction() as connection:
            gone = connection.execute(_DELETE, (self._tenant, stored_name(conversation_id))).rowcount
        if not gone:
            raise ConversationNotFoundError(f"there is no conversation {conversation_id!r}")
        return gone

    @contextmanager
    def _transaction(self) -> Iterator[psycopg.Connection]:
        try:
            with self._kept.transaction(self._tenant) as connection:
                yield connection
        except psycopg.Error as error:
            raise StoreError(reason(error)) from None

"""What is known of keys and users, one at a time: behind a protocol, and from Postgres."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from fairlane_server.api_keys.roles import Role, Scope
from fairlane_server.postgres.pool import PromptPool, rows_for
from fairlane_server.store_error import StoreError

_FIND_KEY = """
SELECT tenant, role, scopes, secret_sha256, subject, expires_at_ms, is_revoked, is_user_disabled
FROM find_api_key(%s, %s)
"""
_FIND_USER = "SELECT role, is_disabled FROM find_user(%s, %s)"


class StoreUnavailableError(Exception):
    """Nothing can be said of a key or a user now. The message holds no secret."""


@dataclass(frozen=True, slots=True)
class StoredKey:
    """What is kept of a key.

    Attributes:
        key_id: its id.
        tenant: whose it is.
        role: what it may do.
        scopes: what it is narrowed to; empty is all.
        secret_sha256: of its secret.
        user: whom it was made for, if anybody.
        expires_at_ms: since the epoch; None is never.
        is_revoked: whether it was.
        is_user_disabled: whether that user is.
    """

    key_id: str
    tenant: str
    role: Role
    scopes: frozenset[Scope] = frozenset()
    secret_sha256: bytes = field(default=b"", repr=False)
    user: str | None = None
    expires_at_ms: int | None = None
    is_revoked: bool = False
    is_user_disabled: bool = False


@dataclass(frozen=True, slots=True)
class UserStanding:
    """What was said of the subject of a token; nothing was of most.

    Attributes:
        role: instead of what the token names, if any.
        is_disabled: whether it is refused.
    """

    role: Role | None = None
    is_disabled: bool = False


class IdentityStore(Protocol):
    """Answers within the time or raises StoreUnavailableError."""

    async def key(self, key_id: str, shown_sha256: bytes, timeout_s: float) -> StoredKey | None:
        """The key with this id, whether or not the hash of the secret that was shown is its own; None if there is none.

        The hash lets the store note, to the minute, when a key was used by whoever has it.
        """
        ...

    async def user(self, tenant: str, subject: str, timeout_s: float) -> UserStanding:
        """What was said of this user."""
        ...


class PgIdentityStore:
    """An IdentityStore on the functions that the services' role may call; it may read no table of them."""

    def __init__(self, pool: PromptPool) -> None:
        self._pool = pool

    async def key(self, key_id: str, shown_sha256: bytes, timeout_s: float) -> StoredKey | None:
        """See :class:`IdentityStore`."""
        row = await self._row(_FIND_KEY, (key_id, shown_sha256), timeout_s)
        if row is None:
            return None
        tenant, role, scopes, secret_sha256, user, expires_at_ms, is_revoked, is_user_disabled = row
        return StoredKey(
            key_id,
            tenant,
            Role(role),
            frozenset(map(Scope, scopes)),
            bytes(secret_sha256),
            user,
            expires_at_ms,
            is_revoked,
            is_user_disabled,
        )

    async def user(self, tenant: str, subject: str, timeout_s: float) -> UserStanding:
        """See :class:`IdentityStore`."""
        row = await self._row(_FIND_USER, (tenant, subject), timeout_s)
        return UserStanding() if row is None else UserStanding(Role(row[0]), row[1])

    async def _row(self, statement: str, parameters: tuple[str | bytes, ...], timeout_s: float) -> Any:
        try:
            # For no tenant: which one it is comes with the answer.
            (rows,) = await rows_for(self._pool, "", [(statement.encode(), parameters)], timeout_s)
        except (StoreError, TimeoutError) as error:
            raise StoreUnavailableError(str(error)) from None
        return rows[0] if rows else None

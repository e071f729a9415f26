"""Store of API keys and users: protocol and Postgres implementation."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from fairlane_server.api_keys.api_key import Role, Scope
from fairlane_server.postgres.pool import DeadlinePool, rows_for
from fairlane_server.store_error import StoreError

_FIND_KEY = """
SELECT tenant, role, scopes, secret_sha256, subject, expires_at_ms, is_revoked, is_user_disabled
FROM find_api_key(%s, %s)
"""
_FIND_USER = "SELECT role, is_disabled FROM find_user(%s, %s)"


class StoreUnavailableError(Exception):
    """The identity store is unavailable. The message holds no secret."""


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A stored API key. ``scopes`` restrict the role; empty means all. ``user`` is the user it was made for, if any."""

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
class UserSettings:
    """Stored settings of a token's subject; most subjects have none. ``role`` overrides the token's."""

    role: Role | None = None
    is_disabled: bool = False


class IdentityStore(Protocol):
    """Answers within ``timeout_s`` or raises StoreUnavailableError."""

    async def key(self, key_id: str, shown_sha256: bytes, timeout_s: float) -> StoredKey | None:
        """The key with this id, whether or not ``shown_sha256`` is the hash of its secret; None if there is none.

        If the hash matches, the store records the time of use, to the minute.
        """
        ...

    async def user(self, tenant: str, subject: str, timeout_s: float) -> UserSettings:
        """The stored settings of this user."""
        ...


class PgIdentityStore:
    """An IdentityStore on database functions: the services' role may call them, but not read the tables."""

    def __init__(self, pool: DeadlinePool) -> None:
        self._pool = pool

    async def key(self, key_id: str, shown_sha256: bytes, timeout_s: float) -> StoredKey | None:
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

    async def user(self, tenant: str, subject: str, timeout_s: float) -> UserSettings:
        row = await self._row(_FIND_USER, (tenant, subject), timeout_s)
        return UserSettings() if row is None else UserSettings(Role(row[0]), row[1])

    async def _row(self, statement: str, parameters: tuple[str | bytes, ...], timeout_s: float) -> Any:
        try:
            # For no tenant: the answer says which one it is.
            (rows,) = await rows_for(self._pool, "", [(statement.encode(), parameters)], timeout_s)
        except (StoreError, TimeoutError) as error:
            raise StoreUnavailableError(str(error)) from None
        return rows[0] if rows else None

"""Create, list, rotate and revoke API keys and manage their users, as the owner of the tables.

>>> from fairlane_server.api_keys.key_store import ApiKeys
>>> from fairlane.settings import Settings
>>> with ApiKeys(Settings().postgres_owner_dsn.get_secret_value()) as keys:
...     issued = keys.create("acme", "nightly report", expires_in_ms=90 * 86_400_000)
...     print(issued.text)  # the only time
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from getpass import getuser
from platform import node
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from fairlane.closing import Closing
from fairlane.logs import get_logger
from fairlane.names import is_name
from fairlane_server.api_keys.api_key import Role, Scope, new_key
from fairlane_server.postgres.connection import ALL_TENANTS, ReconnectingConnection, describe, reason
from fairlane_server.store_error import ReportableError

APPLICATION_NAME = "fairlane-keys"
CALL_TIMEOUT_S = 30.0
MOST_NAME_CHARACTERS = 100
MOST_SUBJECT_CHARACTERS = 255

log = get_logger(__name__)

_COLUMNS = """
key_id, tenant, name, role, scopes, subject, rotated_from, floor(extract(epoch FROM created_at) * 1000)::bigint,
floor(extract(epoch FROM expires_at) * 1000)::bigint, floor(extract(epoch FROM revoked_at) * 1000)::bigint,
floor(extract(epoch FROM last_used_at) * 1000)::bigint
"""
_CREATE = f"""
INSERT INTO api_keys (key_id, tenant, name, role, scopes, secret_sha256, subject, rotated_from, expires_at)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, now() + %s * interval '1 millisecond') RETURNING {_COLUMNS}
"""  # noqa: S608 - constants of this module
_LIST = f"""
SELECT {_COLUMNS} FROM api_keys
WHERE (%s::text IS NULL OR tenant = %s) AND (%s OR (revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())))
ORDER BY tenant, created_at, key_id LIMIT %s
"""  # noqa: S608 - constants of this module
_REVOKE = f"""
UPDATE api_keys SET revoked_at = coalesce(revoked_at, now()) WHERE key_id = %s RETURNING {_COLUMNS}
"""  # noqa: S608 - constants of this module
_LOCK = f"""
SELECT {_COLUMNS}, revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now()) FROM api_keys
WHERE key_id = %s FOR UPDATE
"""  # noqa: S608 - constants of this module
_END = """
UPDATE api_keys SET revoked_at = CASE WHEN %s = 0 THEN now() END,
    expires_at = least(expires_at, now() + %s * interval '1 millisecond')
WHERE key_id = %s
"""
_SET_USER = """
INSERT INTO users (tenant, subject, role, disabled) VALUES (%s, %s, %s, %s)
ON CONFLICT (tenant, subject)
DO UPDATE SET role = EXCLUDED.role, disabled = EXCLUDED.disabled, updated_at = now()
RETURNING tenant, subject, role, disabled
"""
_USERS = """
SELECT tenant, subject, role, disabled FROM users WHERE %s::text IS NULL OR tenant = %s
ORDER BY tenant, subject LIMIT %s
"""
_NOTE = """
INSERT INTO identity_events (tenant, event, key_id, subject, operator, details) VALUES (%s, %s, %s, %s, %s, %s)
"""


class ApiKeysError(ReportableError):
    """The operation failed."""


class KeyNotFoundError(ApiKeysError):
    """No key has this id."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A stored key; times in milliseconds since the epoch."""

    key_id: str
    tenant: str
    name: str
    role: Role
    scopes: tuple[Scope, ...]
    user: str | None
    rotated_from: str | None
    created_at_ms: int
    expires_at_ms: int | None
    revoked_at_ms: int | None
    last_used_at_ms: int | None


@dataclass(frozen=True, slots=True)
class IssuedKey:
    """A new key with its text, which is shown only once."""

    key: ApiKey
    text: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class User:
    """A stored user. A disabled user is refused with any key or token."""

    tenant: str
    subject: str
    role: Role
    disabled: bool


class ApiKeys(Closing):
    """Keys of all tenants. ``dsn`` names the owner of the tables: no service may write them."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._kept = ReconnectingConnection(dsn, APPLICATION_NAME, CALL_TIMEOUT_S)

    def close(self) -> None:
        self._kept.close()

    def create(
        self,
        tenant: str,
        name: str,
        role: Role = Role.TENANT,
        scopes: Sequence[Scope] = (),
        *,
        user: str | None = None,
        expires_in_ms: int | None = None,
    ) -> IssuedKey:
        """Create a key. Raises ApiKeysError, also for a user that the tenant does not have."""
        _check(tenant, name)
        with self._transaction() as connection:
            issued = _insert(connection, tenant, name, role, scopes, user, None, expires_in_ms)
            event = _key_event(connection, "api_key_created", issued.key)
        self._tell(event)
        return issued

    def list(self, tenant: str | None = None, *, ended: bool = False, most: int = 10_000) -> Sequence[ApiKey]:
        """The keys of one tenant or of all; with ``ended`` also revoked and expired ones. Raises ApiKeysError."""
        with self._transaction() as connection:
            rows = connection.execute(_LIST, (tenant, tenant, ended, most)).fetchall()
        return [_key(row) for row in rows]

    def revoke(self, key_id: str) -> ApiKey:
        """Revoke a key at once; every gateway refuses it within about a second. Idempotent.

        Raises KeyNotFoundError, ApiKeysError.
        """
        with self._transaction() as connection:
            row = connection.execute(_REVOKE.encode(), (key_id,)).fetchone()
            if row is None:
                raise KeyNotFoundError("there is no key with this id")
            key = _key(row)
            event = _key_event(connection, "api_key_revoked", key)
        self._tell(event)
        return key

    def rotate(self, key_id: str, overlap_ms: int, expires_in_ms: int | None = None) -> IssuedKey:
        """Create a key with the same permissions, and end the old one after ``overlap_ms``.

        Without ``expires_in_ms`` the new key gets the original lifetime of the old one. Raises KeyNotFoundError,
        ApiKeysError, also for a key that has ended.
        """
        with self._transaction() as connection:
            row = connection.execute(_LOCK.encode(), (key_id,)).fetchone()
            if row is None:
                raise KeyNotFoundError("there is no key with this id")
            old = _key(row[:-1])
            if not row[-1]:
                raise ApiKeysError("this key has ended: create another")
            if expires_in_ms is None and old.expires_at_ms is not None:
                expires_in_ms = old.expires_at_ms - old.created_at_ms
            issued = _insert(
                connection, old.tenant, old.name, old.role, old.scopes, old.user, old.key_id, expires_in_ms
            )
            connection.execute(_END, (overlap_ms, overlap_ms, key_id))
            event = _key_event(connection, "api_key_rotated", issued.key, overlap_ms=overlap_ms)
        self._tell(event)
        return issued

    def set_user(self, tenant: str, subject: str, role: Role, *, disabled: bool = False) -> User:
        """Create a user or replace the role and state of one. Raises ApiKeysError."""
        _check(tenant)
        if not 1 <= len(subject) <= MOST_SUBJECT_CHARACTERS or not subject.isprintable():
            raise ApiKeysError(f"a subject has 1 to {MOST_SUBJECT_CHARACTERS} characters that print")
        with self._transaction() as connection:
            user = _user(connection.execute(_SET_USER, (tenant, subject, role, disabled)).fetchone() or ())
            event = _Event("user_set", tenant, None, subject, {"role": role, "disabled": disabled})
            event.note(connection)
        self._tell(event)
        return user

    def users(self, tenant: str | None = None, most: int = 10_000) -> Sequence[User]:
        """The users of one tenant or of all. Raises ApiKeysError."""
        with self._transaction() as connection:
            rows = connection.execute(_USERS, (tenant, tenant, most)).fetchall()
        return [_user(row) for row in rows]

    def _tell(self, event: "_Event") -> None:
        """Log on this machine what the audit table holds."""
        named = {"key_id": event.key_id, "subject": event.subject}
        log.info(
            event.name,
            tenant=event.tenant,
            operator=event.operator,
            database=describe(self._dsn),
            **{name: value for name, value in named.items() if value is not None},
            **event.details,
        )

    @contextmanager
    def _transaction(self) -> Iterator[psycopg.Connection]:
        """A bounded transaction for all tenants; psycopg's errors become ApiKeysError."""
        try:
            with self._kept.transaction(ALL_TENANTS) as connection:
                yield connection
        except psycopg.errors.InsufficientPrivilege:
            raise ApiKeysError("this role may not read or write keys: POSTGRES_OWNER_DSN names one that may") from None
        except psycopg.errors.UndefinedTable:
            raise ApiKeysError("a table for keys is missing: run `fairlane db upgrade`") from None
        except psycopg.errors.ForeignKeyViolation:
            raise ApiKeysError("the tenant has no such user: `fairlane users set` makes one") from None
        except psycopg.Error as error:
            raise ApiKeysError(reason(error)) from None
        except ValueError as error:
            raise ApiKeysError(str(error)) from None


def _operator() -> str:
    user = f"uid {os.getuid()}"
    # A container may have no user with this uid.
    with suppress(KeyError, OSError, ImportError):
        user = getuser()
    return f"{user}@{node()}"


@dataclass(frozen=True, slots=True)
class _Event:
    """An administrative action, for the audit."""

    name: str
    tenant: str
    key_id: str | None
    subject: str | None
    details: dict[str, object]
    operator: str = field(default_factory=_operator)

    def note(self, connection: psycopg.Connection) -> None:
        """Record it in the transaction of the action: both are committed, or neither."""
        values = (self.tenant, self.name, self.key_id, self.subject, self.operator, Jsonb(self.details))
        connection.execute(_NOTE, values)


def _key_event(connection: psycopg.Connection, name: str, key: ApiKey, **more: object) -> _Event:
    details = {
        "key_name": key.name,
        "role": key.role,
        "scopes": list(key.scopes),
        "expires_at_ms": key.expires_at_ms,
        "rotated_from": key.rotated_from,
    }
    event = _Event(name, key.tenant, key.key_id, key.user, details | more)
    event.note(connection)
    return event


def _check(tenant: str, name: str | None = None) -> None:
    if not is_name(tenant):
        raise ApiKeysError("no tenant can have this name")
    if name is not None and (not 1 <= len(name) <= MOST_NAME_CHARACTERS or not name.isprintable()):
        raise ApiKeysError(f"a name has 1 to {MOST_NAME_CHARACTERS} characters that print")


def _insert(
    connection: psycopg.Connection,
    tenant: str,
    name: str,
    role: Role,
    scopes: Sequence[Scope],
    user: str | None,
    rotated_from: str | None,
    expires_in_ms: int | None,
) -> IssuedKey:
    made = new_key()
    values = (tenant, name, role, sorted(set(scopes)), made.secret_sha256, user, rotated_from, expires_in_ms)
    row = connection.execute(_CREATE.encode(), (made.key_id, *values)).fetchone()
    return IssuedKey(_key(row or ()), made.text)


def _key(row: Sequence[Any]) -> ApiKey:
    key_id, tenant, name, role, scopes, user, rotated_from, *times_ms = row
    return ApiKey(key_id, tenant, name, Role(role), tuple(map(Scope, scopes)), user, rotated_from, *times_ms)


def _user(row: Sequence[Any]) -> User:
    tenant, subject, role, disabled = row
    return User(tenant, subject, Role(role), disabled)

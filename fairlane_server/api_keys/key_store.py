"""Create, list, rotate and revoke API keys and manage their users, as the owner of the tables.

>>> from fairlane_server.api_keys.key_store import ApiKeys
>>> from fairlane.settings import Settings
>>> with ApiKeys(Settings().postgres_owner_dsn.get_secret_value()) as keys:
...     issued = keys.create("acme", "nightly report", expires_in_ms=90 * 86_400_000)
...     print(issued.text)  # the only time
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg

from fairlane.closing import Closing
from fairlane.logs import get_logger
from fairlane.names import is_name
from fairlane_server.administration.events import AdminEvent, AdminEventKind
from fairlane_server.api_keys.api_key import DEPLOYMENT, Role, Scope, new_key
from fairlane_server.api_keys.permissions import (
    OF_DEPLOYMENT,
    Permission,
    refused_grants,
    refused_role,
    refused_scopes,
    role_permissions,
    scope_permissions,
)
from fairlane_server.command_author import command_author
from fairlane_server.postgres.connection import ALL_TENANTS, ReconnectingConnection, describe, reason
from fairlane_server.store_error import ReportableError

APPLICATION_NAME = "fairlane-keys"
CALL_TIMEOUT_S = 30.0
MOST_NAME_CHARACTERS = 100
MOST_SUBJECT_CHARACTERS = 255
BARRED_TENANTS = "barred_tenants"
"""The table of tenants whose keys, tokens and sessions are refused."""

log = get_logger(__name__)

_COLUMNS = """
key_id, tenant, name, role, scopes, grants, subject, rotated_from, floor(extract(epoch FROM created_at) * 1000)::bigint,
floor(extract(epoch FROM expires_at) * 1000)::bigint, floor(extract(epoch FROM revoked_at) * 1000)::bigint,
floor(extract(epoch FROM last_used_at) * 1000)::bigint
"""
_CREATE = f"""
INSERT INTO api_keys (key_id, tenant, name, role, scopes, grants, secret_sha256, subject, rotated_from, expires_at)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, now() + %s * interval '1 millisecond') RETURNING {_COLUMNS}
"""  # noqa: S608 - constants of this module
_LIST = f"""
SELECT {_COLUMNS} FROM api_keys
WHERE (%s::text IS NULL OR tenant = %s) AND (%s OR (revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())))
    AND (%s::text IS NULL OR (tenant, created_at, key_id) > (
        SELECT tenant, created_at, key_id FROM api_keys WHERE key_id = %s
    ))
ORDER BY tenant, created_at, key_id LIMIT %s
"""  # noqa: S608 - constants of this module
_REVOKE = f"""
UPDATE api_keys SET revoked_at = coalesce(revoked_at, now()) WHERE key_id = %s RETURNING {_COLUMNS}
"""  # noqa: S608 - constants of this module
_REVOKE_ALL = f"""
UPDATE api_keys SET revoked_at = now() WHERE tenant = %s AND revoked_at IS NULL RETURNING {_COLUMNS}
"""  # noqa: S608 - constants of this module
_BAR = "INSERT INTO barred_tenants (tenant) VALUES (%s) ON CONFLICT (tenant) DO NOTHING RETURNING tenant"
_READMIT = "DELETE FROM barred_tenants WHERE tenant = %s RETURNING tenant"
_IS_BARRED = "SELECT FROM barred_tenants WHERE tenant = %s"
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
INSERT INTO users (tenant, subject, role, disabled, grants) VALUES (%s, %s, %s, %s, %s)
ON CONFLICT (tenant, subject)
DO UPDATE SET role = EXCLUDED.role, disabled = EXCLUDED.disabled, grants = EXCLUDED.grants, updated_at = now()
RETURNING tenant, subject, role, disabled, grants
"""
_USERS = """
SELECT tenant, subject, role, disabled, grants FROM users
WHERE (%s::text IS NULL OR tenant = %s) AND (%s::text IS NULL OR (tenant, subject) > (%s, %s))
ORDER BY tenant, subject LIMIT %s
"""
_USER = "SELECT tenant, subject, role, disabled, grants FROM users WHERE tenant = %s AND subject = %s FOR UPDATE"


class ApiKeysError(ReportableError):
    """The operation failed."""


class KeyNotFoundError(ApiKeysError):
    """No key has this id."""


class KeyEndedError(ApiKeysError):
    """The key was revoked or has expired."""


class InvalidKeyError(ApiKeysError):
    """A value is wrong. ``field`` is the parameter."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class BeyondOwnRightsError(ApiKeysError):
    """The author would give more than it has."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A stored key; times in milliseconds since the epoch."""

    key_id: str
    tenant: str
    name: str
    role: Role
    scopes: tuple[Scope, ...]
    grants: tuple[Permission, ...]
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
    grants: tuple[Permission, ...] = ()


@dataclass(frozen=True, slots=True)
class Author:
    """Who changes keys and users.

    Attributes:
        name: as the audit has it.
        permissions: of the deployment, which it may give to others. A tenant's permissions it may give in any case.
    """

    name: str = field(default_factory=command_author)
    permissions: frozenset[Permission] = OF_DEPLOYMENT

    def check_may_give(
        self, tenant: str, role: Role, scopes: Collection[Scope], grants: Collection[Permission]
    ) -> None:
        """Raises BeyondOwnRightsError."""
        given = role_permissions(tenant, role, grants) & scope_permissions(scopes) & OF_DEPLOYMENT
        if beyond := sorted(given - self.permissions):
            raise BeyondOwnRightsError(f"you have not the permission {beyond[0]}, so you cannot give it")


class ApiKeys(Closing):
    """Keys of all tenants and of the deployment. ``dsn`` names the owner of the tables, or the role of the admin API.
    For one thread at a time."""

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
        grants: Sequence[Permission] = (),
        user: str | None = None,
        expires_in_ms: int | None = None,
        author: Author | None = None,
    ) -> IssuedKey:
        """Create a key. ``tenant`` is DEPLOYMENT for one that belongs to none. Raises InvalidKeyError,
        BeyondOwnRightsError, ApiKeysError, also for a user that the tenant does not have."""
        author = author or Author()
        _check(tenant, role, grants, name)
        if (why := refused_scopes(tenant, scopes)) is not None:
            raise InvalidKeyError(why, "scopes")
        author.check_may_give(tenant, role, scopes, grants)
        with self._transaction() as connection:
            if connection.execute(_IS_BARRED, (tenant,)).fetchone() is not None:
                raise InvalidKeyError("the tenant is barred, so its keys are refused", "tenant")
            issued = _insert(connection, tenant, name, role, scopes, grants, user, None, expires_in_ms)
            event = _key_event(connection, AdminEventKind.KEY_CREATED, issued.key, author)
        self._tell(event)
        return issued

    def list(
        self, tenant: str | None = None, *, ended: bool = False, most: int = 10_000, after: str | None = None
    ) -> Sequence[ApiKey]:
        """The keys of one tenant or of all; with ``ended`` also revoked and expired ones; those behind the key with the
        id ``after``. Raises ApiKeysError."""
        with self._transaction() as connection:
            rows = connection.execute(_LIST, (tenant, tenant, ended, after, after, most)).fetchall()
        return [_key(row) for row in rows]

    def revoke(self, key_id: str, *, author: Author | None = None) -> ApiKey:
        """Revoke a key at once; every gateway refuses it within about a second. Idempotent.

        Raises KeyNotFoundError, ApiKeysError.
        """
        with self._transaction() as connection:
            row = connection.execute(_REVOKE.encode(), (key_id,)).fetchone()
            if row is None:
                raise KeyNotFoundError("there is no key with this id")
            key = _key(row)
            event = _key_event(connection, AdminEventKind.KEY_REVOKED, key, author or Author())
        self._tell(event)
        return key

    def bar_tenant(self, tenant: str, *, author: Author | None = None) -> Sequence[ApiKey]:
        """Refuse all identities of a tenant: revoke its keys, and accept no token and no session until
        ``readmit_tenant``. Idempotent. Returns the keys. Raises InvalidKeyError, ApiKeysError."""
        author = author or Author()
        _check_tenant(tenant)
        with self._transaction() as connection:
            events = []
            if connection.execute(_BAR, (tenant,)).fetchone() is not None:
                events.append(_noted(connection, AdminEvent(AdminEventKind.TENANT_BARRED, tenant, author.name)))
            keys = [_key(row) for row in connection.execute(_REVOKE_ALL.encode(), (tenant,)).fetchall()]
            events += [_key_event(connection, AdminEventKind.KEY_REVOKED, key, author) for key in keys]
        for event in events:
            self._tell(event)
        return keys

    def readmit_tenant(self, tenant: str, *, author: Author | None = None) -> bool:
        """Accept tokens and sessions of a barred tenant again; its keys stay revoked. Returns whether it was barred.
        Raises ApiKeysError."""
        author = author or Author()
        with self._transaction() as connection:
            if connection.execute(_READMIT, (tenant,)).fetchone() is None:
                return False
            event = _noted(connection, AdminEvent(AdminEventKind.TENANT_READMITTED, tenant, author.name))
        self._tell(event)
        return True

    def tenant_remains(self, tenant: str) -> Sequence[str]:
        """The tables with rows of a tenant of this name, except what is published, the audit, and keys that have
        ended. Raises ApiKeysError."""
        with self._transaction() as connection:
            row = connection.execute("SELECT tenant_remains(%s)", (tenant,)).fetchone()
        return tuple((row or ((),))[0])

    def rotate(
        self, key_id: str, overlap_ms: int, expires_in_ms: int | None = None, *, author: Author | None = None
    ) -> IssuedKey:
        """Create a key with the same permissions, and end the old one after ``overlap_ms``.

        Without ``expires_in_ms`` the new key gets the original lifetime of the old one. Raises KeyNotFoundError,
        KeyEndedError, BeyondOwnRightsError, ApiKeysError.
        """
        author = author or Author()
        with self._transaction() as connection:
            row = connection.execute(_LOCK.encode(), (key_id,)).fetchone()
            if row is None:
                raise KeyNotFoundError("there is no key with this id")
            old = _key(row[:-1])
            if not row[-1]:
                raise KeyEndedError("this key has ended: create another")
            author.check_may_give(old.tenant, old.role, old.scopes, old.grants)
            if expires_in_ms is None and old.expires_at_ms is not None:
                expires_in_ms = old.expires_at_ms - old.created_at_ms
            given = (old.role, old.scopes, old.grants, old.user, old.key_id, expires_in_ms)
            issued = _insert(connection, old.tenant, old.name, *given)
            connection.execute(_END, (overlap_ms, overlap_ms, key_id))
            event = _key_event(connection, AdminEventKind.KEY_ROTATED, issued.key, author, overlap_ms=overlap_ms)
        self._tell(event)
        return issued

    def set_user(
        self,
        tenant: str,
        subject: str,
        role: Role,
        *,
        disabled: bool = False,
        grants: Sequence[Permission] = (),
        author: Author | None = None,
    ) -> User:
        """Create a user or replace the role, state and grants of one. Raises InvalidKeyError, BeyondOwnRightsError,
        ApiKeysError."""
        author = author or Author()
        _check(tenant, role, grants)
        if not 1 <= len(subject) <= MOST_SUBJECT_CHARACTERS or not subject.isprintable():
            raise InvalidKeyError(f"a subject has 1 to {MOST_SUBJECT_CHARACTERS} characters that print", "subject")
        if not disabled:
            author.check_may_give(tenant, role, (), grants)
        with self._transaction() as connection:
            known = connection.execute(_USER, (tenant, subject)).fetchone()
            values = (tenant, subject, role, disabled, sorted({*grants}))
            user = _user(connection.execute(_SET_USER, values).fetchone() or ())
            details = _user_details(user) | {"before": None if known is None else _user_details(_user(known))}
            event = AdminEvent(AdminEventKind.USER_SET, tenant, author.name, subject=subject, details=details)
            event.note(connection)
        self._tell(event)
        return user

    def users(
        self, tenant: str | None = None, most: int = 10_000, after: tuple[str, str] | None = None
    ) -> Sequence[User]:
        """The users of one tenant or of all, behind ``after``, a tenant and a subject. Raises ApiKeysError."""
        behind = after or (None, None)
        with self._transaction() as connection:
            rows = connection.execute(_USERS, (tenant, tenant, behind[0], *behind, most)).fetchall()
        return [_user(row) for row in rows]

    def _tell(self, event: AdminEvent) -> None:
        """Log on this machine what the audit table holds."""
        named = {"key_id": event.key_id, "subject": event.subject}
        log.info(
            event.name,
            tenant=event.tenant,
            operator=event.author,
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
            raise InvalidKeyError("the tenant has no such user: `fairlane users set` makes one", "user") from None
        except psycopg.Error as error:
            raise ApiKeysError(reason(error)) from None
        except ValueError as error:
            raise ApiKeysError(str(error)) from None


def _user_details(user: User) -> dict[str, object]:
    return {"role": user.role, "disabled": user.disabled, "grants": list(user.grants)}


def _key_event(
    connection: psycopg.Connection, name: AdminEventKind, key: ApiKey, author: Author, **more: object
) -> AdminEvent:
    details = {
        "key_name": key.name,
        "role": key.role,
        "scopes": list(key.scopes),
        "grants": list(key.grants),
        "expires_at_ms": key.expires_at_ms,
        "rotated_from": key.rotated_from,
    }
    event = AdminEvent(name, key.tenant, author.name, key.key_id, key.user, details | more)
    event.note(connection)
    return event


def _noted(connection: psycopg.Connection, event: AdminEvent) -> AdminEvent:
    event.note(connection)
    return event


def _check_tenant(tenant: str) -> None:
    if not is_name(tenant):
        raise InvalidKeyError("no tenant can have this name", "tenant")


def _check(tenant: str, role: Role, grants: Collection[Permission], name: str | None = None) -> None:
    if tenant != DEPLOYMENT:
        _check_tenant(tenant)
    if (why := refused_role(tenant, role)) is not None:
        raise InvalidKeyError(why, "role")
    if (why := refused_grants(tenant, grants)) is not None:
        raise InvalidKeyError(why, "grants")
    if name is not None and (not 1 <= len(name) <= MOST_NAME_CHARACTERS or not name.isprintable()):
        raise InvalidKeyError(f"a name has 1 to {MOST_NAME_CHARACTERS} characters that print", "name")


def _insert(
    connection: psycopg.Connection,
    tenant: str,
    name: str,
    role: Role,
    scopes: Sequence[Scope],
    grants: Sequence[Permission],
    user: str | None,
    rotated_from: str | None,
    expires_in_ms: int | None,
) -> IssuedKey:
    made = new_key()
    rights = (role, sorted(set(scopes)), sorted(set(grants)))
    values = (made.key_id, tenant, name, *rights, made.secret_sha256, user, rotated_from, expires_in_ms)
    row = connection.execute(_CREATE.encode(), values).fetchone()
    return IssuedKey(_key(row or ()), made.text)


def _key(row: Sequence[Any]) -> ApiKey:
    key_id, tenant, name, role, scopes, grants, *rest = row
    return ApiKey(key_id, tenant, name, Role(role), tuple(map(Scope, scopes)), tuple(map(Permission, grants)), *rest)


def _user(row: Sequence[Any]) -> User:
    tenant, subject, role, disabled, grants = row
    return User(tenant, subject, Role(role), disabled, tuple(map(Permission, grants)))

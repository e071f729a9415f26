"""Keys and users where they are kept: one behaviour of every store, what roles may do to them, and the commands."""

import asyncio
import json
import subprocess
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import psycopg
import pytest
import structlog
from psycopg.conninfo import conninfo_to_dict

from fairlane import logs
from fairlane.clock import monotonic_ms, now_ms
from fairlane_server.api_keys.api_key import Role, Scope, new_key, parse_key
from fairlane_server.api_keys.key_store import ApiKeys, ApiKeysError, Author, InvalidKeyError, KeyNotFoundError
from fairlane_server.circuit_breaker import BreakerPolicy, CircuitBreaker
from fairlane_server.cli import main
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from fairlane_server.postgres.pool import DeadlinePool
from fairlane_server.postgres.rights import PostgresRole
from fairlane_server.store_error import StoreError
from producers.gateway.identity.api_keys import (
    IdentityStore,
    KeyVerifier,
    StoredKey,
    UserSettings,
)
from producers.gateway.identity.identity import AuthRefusal, RefusedError
from tests.kit.identity_kit import MemoryIdentityStore
from tests.kit.pgvector_kit import PATIENT_S, paused
from tests.kit.stack import PostgresServer, migrated_database

T = TypeVar("T")
HOUR_MS = 3_600_000


@dataclass(frozen=True)
class Made:
    """A key of a test: its id and its text."""

    key_id: str
    text: str


class Keeper(Protocol):
    """Somewhere that keys are made, and asked for."""

    def create(
        self, tenant: str, role: Role = ..., scopes: tuple[Scope, ...] = ..., user: str | None = ...
    ) -> Made: ...

    def revoke(self, key_id: str) -> None: ...

    def set_user(self, tenant: str, subject: str, role: Role, *, disabled: bool = ...) -> None: ...

    def ask(self, use: Callable[[IdentityStore], Awaitable[T]]) -> T: ...


class InMemory:
    def __init__(self) -> None:
        self._store = MemoryIdentityStore()

    def create(
        self, tenant: str, role: Role = Role.TENANT, scopes: tuple[Scope, ...] = (), user: str | None = None
    ) -> Made:
        made = self._store.create(tenant, role, scopes, user)
        return Made(made.key_id, made.text)

    def revoke(self, key_id: str) -> None:
        self._store.revoke(key_id)

    def set_user(self, tenant: str, subject: str, role: Role, *, disabled: bool = False) -> None:
        self._store.set_user(tenant, subject, role, disabled=disabled)

    def ask(self, use: Callable[[IdentityStore], Awaitable[T]]) -> T:
        async def run() -> T:
            return await use(self._store)

        return asyncio.run(run())


class InPostgres:
    def __init__(self, server: PostgresServer) -> None:
        self._server = server
        self.keys = ApiKeys(server.owner_dsn)

    def create(
        self, tenant: str, role: Role = Role.TENANT, scopes: tuple[Scope, ...] = (), user: str | None = None
    ) -> Made:
        issued = self.keys.create(tenant, "test", role, scopes, user=user)
        return Made(issued.key.key_id, issued.text)

    def revoke(self, key_id: str) -> None:
        self.keys.revoke(key_id)

    def set_user(self, tenant: str, subject: str, role: Role, *, disabled: bool = False) -> None:
        self.keys.set_user(tenant, subject, role, disabled=disabled)

    def ask(self, use: Callable[[IdentityStore], Awaitable[T]]) -> T:
        async def run() -> T:
            pool = DeadlinePool(self._server.gateway_dsn, "test-keys", 2)
            await pool.open()
            try:
                return await use(IdentityStore(pool))
            finally:
                await pool.close()

        return asyncio.run(run())


@pytest.fixture(scope="module")
def migrated(postgres: PostgresServer) -> Iterator[PostgresServer]:
    """A database with the tables."""
    with migrated_database(postgres, f"keys{uuid.uuid4().hex[:12]}") as made:
        yield made


@pytest.fixture
def tables(migrated: PostgresServer) -> PostgresServer:
    """The same, with nothing in them."""
    with connect(migrated.owner_dsn, "test") as connection:
        connection.execute("TRUNCATE api_keys, users, admin_events, barred_tenants")
    return migrated


@pytest.fixture
def kept(tables: PostgresServer) -> Iterator[InPostgres]:
    keeper = InPostgres(tables)
    yield keeper
    keeper.keys.close()


@pytest.fixture(params=["memory", "postgres"])
def keeper(request: pytest.FixtureRequest) -> Keeper:
    """Every implementation."""
    if request.param == "memory":
        return InMemory()
    found: InPostgres = request.getfixturevalue("kept")
    return found


def found_by(keeper: Keeper, text: str) -> StoredKey | None:
    shown = parse_key(text)
    assert shown is not None
    return keeper.ask(lambda store: store.key(shown.key_id, shown.secret_sha256, PATIENT_S))


def standing(keeper: Keeper, tenant: str, subject: str) -> UserSettings:
    return keeper.ask(lambda store: store.user(tenant, subject, PATIENT_S))


def test_a_key_is_found_by_its_id_with_all_that_it_may(keeper: Keeper) -> None:
    keeper.set_user("acme", "u-17", Role.TENANT)
    made = keeper.create("acme", Role.VIEWER, (Scope.RESULTS, Scope.FILES), "u-17")
    found = found_by(keeper, made.text)
    shown = parse_key(made.text)
    assert found is not None
    assert shown is not None
    assert found == StoredKey(
        made.key_id,
        "acme",
        Role.VIEWER,
        frozenset({Scope.RESULTS, Scope.FILES}),
        shown.secret_sha256,
        user="u-17",
    )
    assert found_by(keeper, new_key().text) is None


def test_a_wrong_secret_finds_nothing(keeper: Keeper) -> None:
    made = keeper.create("acme")
    assert found_by(keeper, made.text[:20] + new_key().text[20:]) is None


def test_what_ends_a_key_is_told(keeper: Keeper) -> None:
    keeper.set_user("acme", "u-17", Role.TENANT)
    keeper.set_user("globex", "u-17", Role.TENANT, disabled=True)
    revoked, disabled = keeper.create("acme"), keeper.create("acme", user="u-17")
    keeper.revoke(revoked.key_id)
    found, other = found_by(keeper, revoked.text), found_by(keeper, disabled.text)
    assert found is not None
    assert other is not None
    assert (found.is_revoked, other.is_revoked, other.is_user_disabled) == (True, False, False)
    keeper.set_user("acme", "u-17", Role.TENANT, disabled=True)
    other = found_by(keeper, disabled.text)
    assert other is not None
    assert other.is_user_disabled


def test_a_user_is_one_of_one_tenant(keeper: Keeper) -> None:
    keeper.set_user("acme", "u-17", Role.VIEWER, disabled=True)
    assert standing(keeper, "acme", "u-17") == UserSettings(Role.VIEWER, is_disabled=True)
    assert standing(keeper, "globex", "u-17") == UserSettings()
    assert standing(keeper, "acme", "u-1") == UserSettings()
    keeper.set_user("acme", "u-17", Role.TENANT)
    assert standing(keeper, "acme", "u-17") == UserSettings(Role.TENANT)


# --- Postgres


def test_a_barred_tenant_is_refused_whatever_its_callers_show(kept: InPostgres) -> None:
    kept.set_user("acme", "u-17", Role.TENANT)
    first, other = kept.create("acme"), kept.create("globex")
    assert [key.key_id for key in kept.keys.bar_tenant("acme")] == [first.key_id]
    assert kept.keys.bar_tenant("acme") == [], "may be repeated"
    refused = found_by(kept, first.text)
    assert refused is not None
    assert refused.is_revoked
    assert standing(kept, "acme", "u-17") == UserSettings(Role.TENANT, is_disabled=True)
    # One of whom nothing is stored: its issuer vouches for it.
    assert standing(kept, "acme", "u-1").is_disabled
    assert standing(kept, "globex", "u-1") == UserSettings()
    accepted = found_by(kept, other.text)
    assert accepted is not None
    assert not accepted.is_revoked
    with pytest.raises(InvalidKeyError, match="barred"):
        kept.create("acme")
    assert kept.keys.readmit_tenant("acme")
    assert not kept.keys.readmit_tenant("acme")
    assert standing(kept, "acme", "u-17") == UserSettings(Role.TENANT)
    assert standing(kept, "acme", "u-1") == UserSettings()
    revoked, new = found_by(kept, first.text), found_by(kept, kept.create("acme").text)
    assert revoked is not None
    assert new is not None
    assert (revoked.is_revoked, new.is_revoked) == (True, False)


def test_a_key_of_a_barred_tenant_is_refused_also_if_it_was_never_revoked(
    kept: InPostgres, tables: PostgresServer
) -> None:
    made = kept.create("acme")
    with connect(tables.owner_dsn, "test") as connection:
        act_for(connection, ALL_TENANTS)
        connection.execute("INSERT INTO barred_tenants (tenant) VALUES ('acme')")
    found = found_by(kept, made.text)
    assert found is not None
    assert found.is_revoked


def test_who_barred_a_tenant_is_in_the_audit(kept: InPostgres, tables: PostgresServer) -> None:
    kept.create("acme")
    kept.keys.bar_tenant("acme", author=Author("key:1"))
    kept.keys.readmit_tenant("acme", author=Author("key:2"))
    events = rows(tables, "SELECT event, author FROM admin_events ORDER BY event_id OFFSET 1")
    assert events == [("tenant_barred", "key:1"), ("api_key_revoked", "key:1"), ("tenant_readmitted", "key:2")]


def test_what_is_left_under_a_name_is_named_by_table(kept: InPostgres) -> None:
    assert kept.keys.tenant_remains("acme") == ()
    made = kept.create("acme")
    assert kept.keys.tenant_remains("acme") == ("api_keys",)
    kept.revoke(made.key_id)
    assert kept.keys.tenant_remains("acme") == (), "a key that has ended opens nothing"
    kept.set_user("acme", "u-17", Role.TENANT)
    kept.keys.bar_tenant("acme")
    assert kept.keys.tenant_remains("acme") == ("barred_tenants", "users")
    assert kept.keys.tenant_remains("acme2") == ()


def rows(server: PostgresServer, statement: str) -> Sequence[tuple[Any, ...]]:
    """As the owner sees them, for all tenants."""
    with connect(server.owner_dsn, "test") as connection:
        act_for(connection, ALL_TENANTS)
        return connection.execute(statement.encode()).fetchall()


def test_no_secret_is_kept(kept: InPostgres, tables: PostgresServer) -> None:
    made = kept.create("acme")
    stored = str(rows(tables, "SELECT api_keys::text FROM api_keys"))
    assert made.key_id in stored
    assert made.text[20:] not in stored


FORBIDDEN = (
    "SELECT secret_sha256 FROM api_keys",
    "SELECT count(*) FROM api_keys",
    "SELECT * FROM users",
    "UPDATE api_keys SET role = 'admin'",
    "UPDATE api_keys SET revoked_at = NULL",
    "DELETE FROM api_keys",
    "INSERT INTO users VALUES ('acme', 'me', 'admin')",
    "SELECT count(*) FROM admin_events",
    "DELETE FROM admin_events",
    "INSERT INTO admin_events (tenant, event, author, details) VALUES ('acme', 'user_set', 'me', '{}')",
    "INSERT INTO api_keys VALUES ('0123456789abcdef', 'acme', 'mine', 'admin', '{}', sha256('x'))",
    "ALTER FUNCTION find_api_key(text, bytea) RESET ALL",
    "CREATE OR REPLACE FUNCTION find_user(text, text) RETURNS text LANGUAGE sql AS 'SELECT 1'",
)


def test_the_gateways_role_may_ask_for_one_key_and_nothing_else(kept: InPostgres, tables: PostgresServer) -> None:
    kept.create("acme")
    with connect(tables.gateway_dsn, "test") as connection:
        for statement in FORBIDDEN:
            for acting_for in (ALL_TENANTS, "acme", None):
                if acting_for is not None:
                    act_for(connection, acting_for)
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(statement.encode())
                connection.rollback()


def test_the_function_gives_one_row_and_leaves_nobody_with_more_rights(
    kept: InPostgres, tables: PostgresServer
) -> None:
    first, _ = kept.create("acme"), kept.create("globex")
    shown = parse_key(first.text)
    assert shown is not None
    with connect(tables.gateway_dsn, "test") as connection:
        act_for(connection, "globex")
        for wanted, count in ((first.key_id, 1), ("%", 0), ("' OR true; --", 0), ("", 0)):
            query = "SELECT tenant FROM find_api_key(%s, %s)"
            assert len(connection.execute(query, (wanted, shown.secret_sha256)).fetchall()) == count, wanted
        row = connection.execute("SELECT current_setting('fairlane.tenant')").fetchone()
        assert row == ("globex",), "what it acts for ends with it"


@pytest.mark.parametrize("role", [PostgresRole.GATEWAY, PostgresRole.ADMIN])
def test_no_service_gets_a_hash_that_it_does_not_have(
    kept: InPostgres, tables: PostgresServer, role: PostgresRole
) -> None:
    made = kept.create("acme")
    with connect(tables.dsn(role), "test") as connection:
        act_for(connection, ALL_TENANTS)
        for shown in (b"", bytes(32), None):
            query = "SELECT secret_sha256 FROM find_api_key(%s, %s)"
            assert connection.execute(query, (made.key_id, shown)).fetchall() == []


def test_even_the_owner_sees_keys_of_the_tenant_alone_that_it_acts_for(
    kept: InPostgres, tables: PostgresServer
) -> None:
    kept.create("acme")
    kept.create("globex")
    with connect(tables.owner_dsn, "test") as connection:
        for acting_for, seen in (("acme", ["acme"]), ("initech", []), (ALL_TENANTS, ["acme", "globex"])):
            with connection.transaction():
                act_for(connection, acting_for)
                found = connection.execute("SELECT tenant FROM api_keys ORDER BY tenant").fetchall()
                assert [tenant for (tenant,) in found] == seen
        assert connection.execute("SELECT tenant FROM api_keys").fetchall() == []


def test_when_a_key_was_used_is_written_once_a_minute_and_only_for_who_has_it(
    kept: InPostgres, tables: PostgresServer
) -> None:
    made, revoked = kept.create("acme"), kept.create("acme")
    kept.revoke(revoked.key_id)
    found_by(kept, made.text[:20] + new_key().text[20:])
    found_by(kept, revoked.text)
    assert rows(tables, "SELECT count(last_used_at) FROM api_keys") == [(0,)]
    found_by(kept, made.text)
    first = rows(tables, "SELECT last_used_at FROM api_keys WHERE last_used_at IS NOT NULL")
    assert len(first) == 1
    found_by(kept, made.text)
    assert rows(tables, "SELECT last_used_at FROM api_keys WHERE last_used_at IS NOT NULL") == first
    with connect(tables.owner_dsn, "test") as owner:
        act_for(owner, ALL_TENANTS)
        owner.execute("UPDATE api_keys SET last_used_at = now() - interval '61 seconds'")
    found_by(kept, made.text)
    assert rows(
        tables, "SELECT last_used_at > now() - interval '59 seconds' FROM api_keys WHERE revoked_at IS NULL"
    ) == [(True,)]


def test_who_writes_a_key_keeps_nobody_waiting(kept: InPostgres, tables: PostgresServer) -> None:
    made = kept.create("acme")
    with connect(tables.owner_dsn, "test") as owner, owner.transaction():
        act_for(owner, ALL_TENANTS)
        owner.execute("UPDATE api_keys SET name = 'held'")
        assert found_by(kept, made.text) is not None


def test_a_key_expires_by_the_time_that_was_given(kept: InPostgres) -> None:
    before_ms = now_ms()
    issued = kept.keys.create("acme", "short", expires_in_ms=HOUR_MS)
    assert issued.key.expires_at_ms is not None
    assert abs(issued.key.expires_at_ms - issued.key.created_at_ms - HOUR_MS) <= 1
    assert issued.key.expires_at_ms > before_ms
    found = found_by(kept, issued.text)
    assert found is not None
    assert found.expires_at_ms == issued.key.expires_at_ms


def test_keys_are_listed_by_tenant_and_those_that_ended_when_asked(kept: InPostgres) -> None:
    one, two, three = kept.create("acme"), kept.create("acme"), kept.create("globex")
    kept.revoke(two.key_id)
    assert [key.key_id for key in kept.keys.list()] == [one.key_id, three.key_id]
    assert [key.key_id for key in kept.keys.list("acme")] == [one.key_id]
    assert [key.key_id for key in kept.keys.list("acme", ended=True)] == [one.key_id, two.key_id]
    first_ms = kept.keys.revoke(two.key_id).revoked_at_ms
    assert kept.keys.revoke(two.key_id).revoked_at_ms == first_ms, "it was then"
    with pytest.raises(KeyNotFoundError):
        kept.keys.revoke("0" * 16)


def test_a_key_is_rotated_into_one_that_may_do_the_same(kept: InPostgres) -> None:
    kept.set_user("acme", "u-17", Role.TENANT)
    old = kept.keys.create("acme", "nightly", Role.VIEWER, [Scope.RESULTS], user="u-17", expires_in_ms=HOUR_MS)
    new = kept.keys.rotate(old.key.key_id, overlap_ms=60_000)
    assert new.text != old.text
    assert (new.key.tenant, new.key.name, new.key.role, new.key.scopes, new.key.user) == (
        *("acme", "nightly", Role.VIEWER, (Scope.RESULTS,)),
        "u-17",
    )
    assert new.key.rotated_from == old.key.key_id
    assert new.key.expires_at_ms is not None
    assert abs(new.key.expires_at_ms - new.key.created_at_ms - HOUR_MS) <= 1
    ended = next(key for key in kept.keys.list(ended=True) if key.key_id == old.key.key_id)
    assert ended.revoked_at_ms is None
    assert ended.expires_at_ms is not None
    assert abs(ended.expires_at_ms - new.key.created_at_ms - 60_000) <= 1
    last = kept.keys.rotate(new.key.key_id, overlap_ms=0)
    found = found_by(kept, new.text)
    assert found is not None
    assert found.is_revoked
    with pytest.raises(ApiKeysError, match="has ended"):
        kept.keys.rotate(new.key.key_id, overlap_ms=0)
    with pytest.raises(KeyNotFoundError):
        kept.keys.rotate("0" * 16, overlap_ms=0)
    assert last.key.rotated_from == new.key.key_id


def test_what_is_done_to_keys_and_users_is_recorded_with_who_did_it(kept: InPostgres, tables: PostgresServer) -> None:
    kept.set_user("acme", "u-17", Role.VIEWER, disabled=True)
    old = kept.keys.create("acme", "nightly", Role.VIEWER, [Scope.RESULTS], user="u-17")
    new = kept.keys.rotate(old.key.key_id, overlap_ms=60_000)
    kept.keys.revoke(new.key.key_id)
    other = kept.create("globex")
    with pytest.raises(ApiKeysError):
        kept.keys.create("acme", "n", user="nobody")
    found = rows(tables, "SELECT event, tenant, key_id, subject FROM admin_events ORDER BY event_id")
    assert found == [
        ("user_set", "acme", None, "u-17"),
        ("api_key_created", "acme", old.key.key_id, "u-17"),
        ("api_key_rotated", "acme", new.key.key_id, "u-17"),
        ("api_key_revoked", "acme", new.key.key_id, "u-17"),
        ("api_key_created", "globex", other.key_id, None),
    ]
    ((details,),) = rows(tables, "SELECT details FROM admin_events WHERE event = 'api_key_rotated'")
    assert (details["key_name"], details["role"], details["scopes"]) == ("nightly", "viewer", ["results"])
    assert (details["rotated_from"], details["overlap_ms"]) == (old.key.key_id, 60_000)
    ((role, author),) = rows(tables, "SELECT DISTINCT database_role, author FROM admin_events")
    assert role == conninfo_to_dict(tables.owner_dsn)["user"]
    assert all(author.partition("@"))
    whole = str(rows(tables, "SELECT admin_events::text FROM admin_events"))
    for made in (old.text, new.text, other.text):
        shown = parse_key(made)
        assert shown is not None
        assert made[20:] not in whole
        assert shown.secret_sha256.hex() not in whole


def test_nothing_is_done_that_cannot_be_recorded(kept: InPostgres, tables: PostgresServer) -> None:
    made = kept.create("acme")
    kept.set_user("acme", "u-17", Role.VIEWER)
    with connect(tables.owner_dsn, "test") as owner:
        owner.execute("ALTER TABLE admin_events RENAME TO elsewhere")
    try:
        for change in (
            lambda: kept.create("acme"),
            lambda: kept.revoke(made.key_id),
            lambda: kept.keys.rotate(made.key_id, overlap_ms=0),
            lambda: kept.set_user("acme", "u-17", Role.TENANT),
        ):
            with pytest.raises(ApiKeysError):
                change()
    finally:
        with connect(tables.owner_dsn, "test") as owner:
            owner.execute("ALTER TABLE elsewhere RENAME TO admin_events")
    assert rows(tables, "SELECT key_id, revoked_at FROM api_keys") == [(made.key_id, None)]
    assert rows(tables, "SELECT role FROM users") == [("viewer",)]


def test_what_is_wrong_is_said_without_a_secret(
    kept: InPostgres, tables: PostgresServer, database: PostgresServer
) -> None:
    for tenant, name, user, said in (
        ("Acme", "n", None, "tenant"),
        ("acme", "", None, "name"),
        ("acme", "n\n", None, "name"),
        ("acme", "n" * 101, None, "name"),
        ("acme", "n", "nobody", "no such user"),
    ):
        with pytest.raises(ApiKeysError, match=said):
            kept.keys.create(tenant, name, user=user)
    with ApiKeys(tables.operator_dsn) as as_service, pytest.raises(ApiKeysError, match="POSTGRES_OWNER_DSN"):
        as_service.create("acme", "n")
    with ApiKeys("postgresql://owner:hush@127.0.0.1:1/none") as nowhere, pytest.raises(ApiKeysError) as caught:
        nowhere.list()
    assert "hush" not in str(caught.value)


def test_a_gateway_goes_on_with_the_keys_it_knows_while_postgres_hangs(
    kept: InPostgres, tables: PostgresServer
) -> None:
    known, unknown = kept.create("acme"), kept.create("acme")

    async def run() -> None:
        pool = DeadlinePool(tables.gateway_dsn, "test-keys", 2)
        await pool.open()
        later_ms = 0

        def clock() -> int:
            return monotonic_ms() + later_ms

        breaker = CircuitBreaker(BreakerPolicy(failures=1))
        verifier = KeyVerifier(IdentityStore(pool), 300_000, now_ms, clock, breaker, 10.0)
        try:
            assert (await verifier.verify(known.text)).tenant == "acme"
            with paused(tables):
                later_ms += 2_000
                for _ in range(20):
                    assert (await verifier.verify(known.text)).subject == known.key_id
                with pytest.raises(RefusedError) as caught:
                    await verifier.verify(unknown.text)
                assert caught.value.why is AuthRefusal.UNAVAILABLE
        finally:
            await verifier.close()
            await pool.close()

    asyncio.run(run())


def test_a_store_that_is_not_there_says_so(unique: str) -> None:
    async def run() -> None:
        pool = DeadlinePool("postgresql://fairlane@127.0.0.1:1/fairlane", "test-keys", 1)
        await pool.open()
        try:
            with pytest.raises(StoreError):
                await IdentityStore(pool).key("0" * 16, bytes(32), 0.1)
        finally:
            await pool.close()

    asyncio.run(run())


# --- the commands


class Commands:
    """``fairlane`` within the test, with what it logs."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.logged: list[Any] = []

    def run(self, *arguments: str) -> str:
        """What it prints."""
        code, out, err = self.outcome(*arguments)
        assert code == 0, err
        return out.strip()

    def outcome(self, *arguments: str) -> tuple[object, str, str]:
        """Exit status, stdout and stderr."""
        with structlog.testing.capture_logs() as lines, pytest.raises(SystemExit) as caught:
            main(arguments)
        self.logged += lines
        return caught.value.code, *self._capsys.readouterr()


@pytest.fixture
def commands(tables: PostgresServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Commands:
    monkeypatch.setenv("POSTGRES_OWNER_DSN", tables.owner_dsn)
    # It is for a whole process.
    monkeypatch.setattr(logs, "configure", lambda *_: None)
    return Commands(capsys)


def test_the_life_of_a_key_by_command(kept: InPostgres, commands: Commands) -> None:
    create = ("keys", "create", "--tenant", "acme", "--name", "ci")
    text = commands.run(*create, "--scope", "results", "--expires", "1d")
    found = found_by(kept, text)
    assert found is not None
    assert (found.tenant, found.scopes) == ("acme", frozenset({Scope.RESULTS}))
    answer = json.loads(commands.run("keys", "rotate", found.key_id, "--overlap", "1h", "--json"))
    assert answer["key"]["rotated_from"] == found.key_id
    listed = json.loads(commands.run("keys", "list", "--json"))["keys"]
    assert [key["key_id"] for key in listed] == [found.key_id, answer["key"]["key_id"]]
    revoked = commands.run("keys", "revoke", found.key_id)
    assert revoked.startswith(f"revoked {found.key_id} of tenant acme")
    table = commands.run("keys", "list", "--all", "--tenant", "acme")
    assert "revoked" in table
    assert "valid" in table
    told = [(line["event"], line["key_id"], line["tenant"]) for line in commands.logged]
    assert told == [
        ("api_key_created", found.key_id, "acme"),
        ("api_key_rotated", answer["key"]["key_id"], "acme"),
        ("api_key_revoked", found.key_id, "acme"),
    ]
    for shown in (text, answer["api_key"]):
        assert shown[20:] not in f"{table} {listed} {revoked} {commands.logged}"


def test_users_by_command(commands: Commands) -> None:
    said = commands.run("users", "set", "u-17", "--tenant", "acme", "--role", "viewer", "--disabled")
    assert said == "user u-17 of tenant acme: disabled"
    assert json.loads(commands.run("users", "list", "--tenant", "globex", "--json")) == {"users": []}
    (user,) = json.loads(commands.run("users", "list", "--json"))["users"]
    assert user == {"tenant": "acme", "subject": "u-17", "role": "viewer", "disabled": True, "grants": []}
    assert commands.logged[0]["event"] == "user_set"


def test_mistakes_on_the_command_line_are_one_line(
    commands: Commands, tables: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = commands.outcome("keys", "revoke", "0" * 16)
    assert (code, out, err) == (1, "", "error: there is no key with this id\n")
    monkeypatch.setenv("POSTGRES_OWNER_DSN", tables.operator_dsn)
    code, out, err = commands.outcome("keys", "list")
    assert (code, out) == (1, "")
    assert "POSTGRES_OWNER_DSN" in err
    assert err.count("\n") == 1


def test_a_new_key_stands_alone_on_stdout_and_the_audit_on_stderr(tables: PostgresServer) -> None:
    done = subprocess.run(
        (sys.executable, "-m", "fairlane_server.cli", "keys", "create", "--tenant", "acme", "--name", "ci"),
        env={"POSTGRES_OWNER_DSN": tables.owner_dsn},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    shown = parse_key(done.stdout.strip())
    assert shown is not None
    (line,) = [json.loads(one) for one in done.stderr.splitlines() if one.startswith("{")]
    assert (line["event"], line["key_id"], line["tenant"]) == ("api_key_created", shown.key_id, "acme")
    assert done.stdout.strip()[20:] not in done.stderr

"""The table of rights in Postgres: how it is read, and what is done to make a database agree with it."""

import pytest

from fairlane_server.postgres.rights import RIGHTS, PostgresRole, Rights, privileges, statements

SELECT = privileges("SELECT")


def test_what_grant_takes_is_read_as_single_privileges() -> None:
    assert privileges("SELECT, UPDATE (name, size_bytes), DELETE") == {
        ("SELECT", ""),
        ("UPDATE", "name"),
        ("UPDATE", "size_bytes"),
        ("DELETE", ""),
    }


def test_a_right_on_passages_is_one_on_every_partition() -> None:
    rights = Rights({"passages": "SELECT", "files": "DELETE"}, ("f(text, bigint)",), ("numbers",))
    assert rights.by_object(["passages_1", "passages_2"]) == {
        "TABLE passages": SELECT,
        "TABLE passages_1": SELECT,
        "TABLE passages_2": SELECT,
        "TABLE files": privileges("DELETE"),
        "FUNCTION f(text,bigint)": privileges("EXECUTE"),
        "SEQUENCE numbers": privileges("USAGE"),
    }
    assert Rights({"files": "DELETE"}).by_object(["passages_1"]) == {"TABLE files": privileges("DELETE")}


@pytest.mark.parametrize(
    ("held", "wanted", "expected"),
    [
        ({}, {}, []),
        ({"TABLE a": SELECT}, {"TABLE a": SELECT}, []),
        ({}, {"TABLE a": SELECT}, ["GRANT SELECT ON TABLE a TO r"]),
        ({"TABLE a": SELECT}, {}, ["REVOKE ALL ON TABLE a FROM r CASCADE"]),
        (
            {"TABLE a": privileges("SELECT, DELETE"), "TABLE b": SELECT},
            {"TABLE a": privileges("UPDATE (n, m), INSERT"), "TABLE b": SELECT},
            ["REVOKE ALL ON TABLE a FROM r CASCADE", 'GRANT INSERT, UPDATE ("m"), UPDATE ("n") ON TABLE a TO r'],
        ),
        # With the right to hand it on.
        (
            {"TABLE a": frozenset({("SELECT*", "")})},
            {"TABLE a": SELECT},
            ["REVOKE ALL ON TABLE a FROM r CASCADE", "GRANT SELECT ON TABLE a TO r"],
        ),
    ],
)
def test_only_what_differs_is_changed(
    held: dict[str, frozenset[tuple[str, str]]], wanted: dict[str, frozenset[tuple[str, str]]], expected: list[str]
) -> None:
    assert statements("r", held, wanted) == expected


def test_every_role_has_rights_and_a_name() -> None:
    assert RIGHTS.keys() == {*PostgresRole}
    assert PostgresRole.GATEWAY.name_in() == "fairlane_gateway"
    assert PostgresRole.GATEWAY.name_in("staging") == "staging_gateway"


@pytest.mark.parametrize("role", PostgresRole)
def test_only_the_admin_api_reads_keys_and_users_and_nobody_truncates(role: PostgresRole) -> None:
    rights = RIGHTS[role]
    identities = {"api_keys", "users", "admin_events"}
    adding = {"admin_events"} if role is PostgresRole.OPERATOR else set()
    assert identities & rights.tables.keys() == (identities if role is PostgresRole.ADMIN else adding)
    assert rights.all_tenants <= rights.tables.keys()
    verbs = {verb for given in rights.tables.values() for verb, _ in privileges(given)}
    assert verbs <= {"SELECT", "INSERT", "UPDATE", "DELETE"}


def test_the_admin_api_reads_no_hash_of_a_key_and_changes_no_event() -> None:
    tables = RIGHTS[PostgresRole.ADMIN].tables
    keys, events = privileges(tables["api_keys"]), privileges(tables["admin_events"])
    assert not {("SELECT", "secret_sha256"), ("SELECT", ""), ("UPDATE", "secret_sha256"), ("UPDATE", "")} & keys
    assert {verb for verb, _ in events} == {"SELECT", "INSERT"}


def test_who_adds_to_the_audit_cannot_say_who_or_when_it_is_and_operators_read_nothing_of_it() -> None:
    for role in (PostgresRole.ADMIN, PostgresRole.OPERATOR):
        events = privileges(RIGHTS[role].tables["admin_events"])
        added = {column for verb, column in events if verb == "INSERT"}
        assert not {"", "database_role", "occurred_at", "event_id"} & added
    # To name the event that another one ends.
    assert {column for verb, column in events if verb == "SELECT"} == {"event_id"}


def test_who_answers_for_one_tenant_never_sees_all_of_them() -> None:
    assert not RIGHTS[PostgresRole.DISPATCHER].all_tenants
    assert not RIGHTS[PostgresRole.GATEWAY].all_tenants

"""Makes the rights in a database those of ``rights.py``: roles, grants and policies as they are, and what to change."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairlane_server.postgres.migrations import DatabaseError
from fairlane_server.postgres.rights import RIGHTS, PostgresRole, Privileges, statements

if TYPE_CHECKING:
    import psycopg

# Why a role could do more than its rights say. What it made in the schema public, the owner's functions might use.
_ABOVE = """
SELECT one.rolname::text, CASE
    WHEN one.rolsuper THEN 'is a superuser'
    WHEN one.rolbypassrls THEN 'bypasses row-level security'
    WHEN pg_has_role(one.oid, current_user, 'MEMBER') THEN 'is a member of the owner of the tables'
    WHEN pg_has_role(one.oid, 'pg_read_all_data', 'MEMBER') OR pg_has_role(one.oid, 'pg_write_all_data', 'MEMBER')
        THEN 'may read or write all tables'
    WHEN has_schema_privilege(one.oid, 'public', 'CREATE') THEN 'may create in the schema public'
    WHEN EXISTS (
        SELECT FROM pg_roles AS other
        WHERE other.rolname = ANY(%(names)s) AND other.oid <> one.oid AND pg_has_role(one.oid, other.oid, 'MEMBER')
    ) THEN 'is a member of the role of another service'
END
FROM pg_roles AS one WHERE one.rolname = ANY(%(names)s)
"""
_HELD = """
SELECT pg_get_userbyid(held.grantee), object, held.privilege_type || CASE WHEN held.is_grantable THEN '*' ELSE '' END,
    field
FROM (
    SELECT CASE relkind WHEN 'S' THEN 'SEQUENCE ' ELSE 'TABLE ' END || oid::regclass AS object, relacl AS acl,
        relowner AS owner, '' AS field
    FROM pg_class WHERE relnamespace = 'public'::regnamespace
    UNION ALL
    SELECT 'TABLE ' || attrelid::regclass, attacl, relowner, attname
    FROM pg_attribute JOIN pg_class AS c ON c.oid = attrelid WHERE relnamespace = 'public'::regnamespace
    UNION ALL
    SELECT 'FUNCTION ' || oid::regprocedure, proacl, proowner, ''
    FROM pg_proc WHERE pronamespace = 'public'::regnamespace
) AS ours, aclexplode(acl) AS held
WHERE pg_get_userbyid(owner) = current_user AND pg_get_userbyid(held.grantee) = ANY(%s)
"""
# Held until the end of the transaction: no partition is dropped meanwhile. One that is made takes the parent's rights.
_HOLD_PARTITIONS = "LOCK TABLE passages IN ACCESS SHARE MODE"
_PARTITIONS = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'passages'::regclass"
_POLICIES = """
SELECT current_user::text, c.oid::regclass::text,
    ARRAY(SELECT CASE role WHEN 0 THEN '' ELSE pg_get_userbyid(role)::text END FROM unnest(polroles) AS role)
FROM pg_policy JOIN pg_class AS c ON c.oid = polrelid
WHERE polname = 'trusted_service' AND relnamespace = 'public'::regnamespace
    AND pg_get_userbyid(relowner) = current_user
"""


@dataclass(frozen=True, slots=True)
class AppliedRights:
    """The roles that exist and have their rights now, those that do not exist, and how many statements it took."""

    roles: tuple[str, ...]
    missing: tuple[str, ...]
    changes: int


def apply_rights(connection: "psycopg.Connection", prefix: str) -> AppliedRights:
    """Grant every role that exists what RIGHTS has for it, and revoke the rest, as the owner of the tables.

    In the caller's transaction, which must be the only one that does this. Raises DatabaseError for a role that could
    do more than its rights say.
    """
    names = {role.name_in(prefix): role for role in PostgresRole}
    known: dict[str, str | None] = dict(connection.execute(_ABOVE, {"names": list(names)}).fetchall())
    if above := [f"{name} {why}" for name, why in known.items() if why is not None]:
        raise DatabaseError(f"{', '.join(above)}: a role must not be able to do more than its rights say")
    roles = {name: role for name, role in names.items() if name in known}
    connection.execute(_HOLD_PARTITIONS)
    changes = _changes(connection, roles)
    for statement in changes:
        connection.execute(statement.encode())
    if left := _changes(connection, roles):
        raise DatabaseError(f"the owner of the tables cannot do this, because others granted it: {left[0]}")
    return AppliedRights(tuple(roles), tuple(name for name in names if name not in roles), len(changes))


def _changes(connection: "psycopg.Connection", roles: Mapping[str, PostgresRole]) -> list[str]:
    """What is to be run, for these roles by name."""
    held: dict[str, dict[str, set[tuple[str, str]]]] = defaultdict(lambda: defaultdict(set))
    for name, target, verb, column in connection.execute(_HELD, (list(roles),)):
        held[name][target].add((verb, column))
    partitions = [name for (name,) in connection.execute(_PARTITIONS)]
    changes: list[str] = []
    for name, role in roles.items():
        holds: dict[str, Privileges] = {target: frozenset(rights) for target, rights in held[name].items()}
        changes += statements(_quoted(name), holds, RIGHTS[role].by_object(partitions))
    for owner, table, trusted in connection.execute(_POLICIES):
        # Roles that are none of the services' keep what they have, as with grants; everybody ("") does not.
        others = {name for name in trusted if name and name not in roles}
        wanted = others | {owner} | {name for name, role in roles.items() if table in RIGHTS[role].all_tenants}
        if set(trusted) != wanted:
            changes.append(f"ALTER POLICY trusted_service ON {table} TO {', '.join(map(_quoted, sorted(wanted)))}")
    return changes


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'

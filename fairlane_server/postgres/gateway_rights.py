"""What the gateway's role may do in Postgres.

It answers callers of all tenants, and acts for one at a time: row-level security shows it the rows of the tenant that
its transaction names, and unlike the services' role it is in no policy that shows all of them. It changes nothing but
files, batches and jobs, and it cannot list keys, users or tenants.
"""

from typing import Any

RIGHTS = {
    "results": "SELECT",
    "usage": "SELECT",
    "audit_logs": "SELECT",
    "files": "SELECT, INSERT, DELETE, UPDATE (purpose, filename, size_bytes, expires_at_ms)",
    "batches": "SELECT, INSERT",
    "backfill_jobs": "SELECT, INSERT, UPDATE (wanted, max_cost_tokens, reason, status, ended_at_ms, cancelling_at_ms, "
    "finalizing_at_ms)",
}
FUNCTIONS = ("find_api_key(text, bytea)", "find_user(text, text)")


def grant(connection: Any, role: str) -> bool:
    """Give the role these rights on the tables of the newest revision, and no others. False: there is no such role.

    Args:
        connection: SQLAlchemy's, of the owner of the tables; its transaction is the caller's.
        role: of the gateway.
    """
    found = connection.exec_driver_sql("SELECT 1 FROM pg_roles WHERE rolname = %s", (role,)).scalar()
    if not found:
        return False
    name = connection.dialect.identifier_preparer.quote(role)
    connection.exec_driver_sql(f"REVOKE ALL ON ALL TABLES IN SCHEMA public FROM {name}")
    for table, rights in RIGHTS.items():
        connection.exec_driver_sql(f"GRANT {rights} ON {table} TO {name}")
    for function in FUNCTIONS:
        connection.exec_driver_sql(f"GRANT EXECUTE ON FUNCTION {function} TO {name}")
    return True

"""Statements that revisions share. They are never changed: databases of every revision came to be by them."""

from alembic import op
from sqlalchemy import text


def execute(*statements: str) -> None:
    """Run plain SQL; a colon in it is no parameter."""
    for statement in statements:
        op.execute(text(statement.replace(":", r"\:")))


def quoted(service_role: str | None) -> str | None:
    """The name of the services' role as it stands in statements."""
    return None if service_role is None else op.get_bind().dialect.identifier_preparer.quote(service_role)


def trusted(role: str | None) -> str:
    """Who may act for all tenants: the owner of the tables and, if there is one, the services' role."""
    return "CURRENT_USER" if role is None else f"CURRENT_USER, {role}"


def part_tenants(table: str, role: str | None = None) -> None:
    """A row of this table belongs to one tenant; without a role, the owner alone may act for all of them."""
    execute(
        f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
        # In a query of its own: asked once per statement, not once per row.
        f"CREATE POLICY own_rows ON {table} USING (tenant = (SELECT current_setting('fairlane.tenant', true)))",
        f"CREATE POLICY trusted_service ON {table} TO {trusted(role)} "
        "USING ((SELECT current_setting('fairlane.tenant', true)) = '*')",
    )

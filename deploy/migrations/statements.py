"""Statements that revisions share. They are never changed: databases of every revision came to be by them."""

from alembic import op
from sqlalchemy import text


def execute(*statements: str) -> None:
    """Run plain SQL; a colon in it is no parameter."""
    for statement in statements:
        op.execute(text(statement.replace(":", r"\:")))


def part_tenants(table: str) -> None:
    """A row of this table belongs to one tenant. The owner may act for all of them; so may the roles of services that
    ``fairlane_server/postgres/rights.py`` names for this table, when it is applied."""
    execute(
        f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY",
        # In a query of its own: asked once per statement, not once per row.
        f"CREATE POLICY own_rows ON {table} USING (tenant = (SELECT current_setting('fairlane.tenant', true)))",
        f"CREATE POLICY trusted_service ON {table} TO CURRENT_USER "
        "USING ((SELECT current_setting('fairlane.tenant', true)) = '*')",
    )

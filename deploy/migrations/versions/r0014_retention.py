"""Results, usage and audit are removed when they are old: indexes by age, and the right to do it."""

from alembic import op

from deploy.migrations.versions.r0008_jobs import execute

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None

COLUMNS = {"results": "replied_at_ms", "usage": "occurred_at_ms", "audit_logs": "occurred_at_ms"}


def upgrade(service_role: str | None) -> None:
    """Add the indexes, as conversation_turns has one; a large table is written to by nobody meanwhile."""
    for table, column in COLUMNS.items():
        execute(f"CREATE INDEX {table}_by_age ON {table} ({column})")
        if service_role is not None:
            role = op.get_bind().dialect.identifier_preparer.quote(service_role)
            execute(f"GRANT DELETE ON {table} TO {role}")

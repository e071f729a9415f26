"""Latency targets of tenants."""

from deploy.migrations.statements import execute

revision = "0015"
down_revision = "0014"

# With a default, so that a recorder of the revision before can go on writing while services are replaced.
STATEMENTS = ("ALTER TABLE tenants ADD COLUMN latency_targets jsonb NOT NULL DEFAULT '[]'",)


def upgrade() -> None:
    """Add the column."""
    execute(*STATEMENTS)

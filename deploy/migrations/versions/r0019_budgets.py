"""Budgets of tenants, and the budget that a reply is about."""

from deploy.migrations.statements import execute

revision = "0019"
down_revision = "0018"

# With a default, so that a recorder of the revision before can go on writing while services are replaced.
STATEMENTS = (
    "ALTER TABLE tenants ADD COLUMN budgets jsonb NOT NULL DEFAULT '[]'",
    "ALTER TABLE results ADD COLUMN budget jsonb",
    "COMMENT ON COLUMN results.budget IS 'the soft budget that was reached, or the hard one it was refused for'",
)


def upgrade() -> None:
    """Add the columns."""
    execute(*STATEMENTS)

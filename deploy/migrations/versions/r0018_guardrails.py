"""Guardrails: the policies of tenants, and the verdicts in replies."""

from deploy.migrations.statements import execute

revision = "0018"
down_revision = "0017"

# With a default, so that a recorder of the revision before can go on writing while services are replaced.
STATEMENTS = (
    "ALTER TABLE tenants ADD COLUMN guardrails jsonb",
    "ALTER TABLE results ADD COLUMN guardrails jsonb NOT NULL DEFAULT '[]'",
)


def upgrade() -> None:
    """Add the columns."""
    execute(*STATEMENTS)

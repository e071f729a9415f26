"""Groups and forbidden degradations of tenants; dedicated pools and smaller models of models."""

from deploy.migrations.statements import execute

revision = "0002"
down_revision = "0001"

# With defaults, so that a recorder of the revision before can go on writing while services are replaced.
STATEMENTS = (
    "ALTER TABLE tenants ADD COLUMN groups jsonb NOT NULL DEFAULT '[]'",
    "ALTER TABLE tenants ADD COLUMN forbidden_degradations jsonb NOT NULL DEFAULT '[]'",
    "ALTER TABLE models ADD COLUMN dedicated_pools jsonb NOT NULL DEFAULT '[]'",
    "ALTER TABLE models ADD COLUMN smaller_model text",
)


def upgrade() -> None:
    """Add the columns."""
    execute(*STATEMENTS)

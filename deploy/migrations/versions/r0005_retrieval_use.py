"""How the passages of a reply were found."""

from deploy.migrations.statements import execute

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add the column; a recorder of the revision before goes on writing."""
    execute("ALTER TABLE results ADD COLUMN retrieval_use jsonb")

"""When files end."""

from deploy.migrations.statements import execute

revision = "0010"
down_revision = "0009"

EXPIRY = """
ALTER TABLE files ADD COLUMN expires_at_ms bigint;
CREATE INDEX files_expiring ON files (expires_at_ms);
COMMENT ON COLUMN files.expires_at_ms IS
    'from then on nobody finds it; null until a job that reads or writes it has ended and the sweep saw it';
"""


def upgrade() -> None:
    """Add the column; the sweep gives the files that are there as long as new ones."""
    execute(EXPIRY)

"""Which topic a stored offset is for: one that is deleted and created again has another id."""

from deploy.migrations.statements import execute

revision = "0013"
down_revision = "0012"

COLUMN = """
ALTER TABLE source_offsets ADD COLUMN topic_id text;
COMMENT ON COLUMN source_offsets.topic_id IS 'as Kafka writes it; null where it is not known';
"""


def upgrade() -> None:
    """Add the column; the recorder fills it when it next takes up a partition."""
    execute(COLUMN)

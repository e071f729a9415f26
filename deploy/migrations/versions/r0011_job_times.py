"""When a job was cancelled, and when its parts began to be joined."""

from deploy.migrations.statements import execute

revision = "0011"
down_revision = "0010"

TIMES = """
ALTER TABLE backfill_jobs ADD COLUMN cancelling_at_ms bigint, ADD COLUMN finalizing_at_ms bigint;
COMMENT ON COLUMN backfill_jobs.started_at_ms IS 'when it was first run, its rows being counted';
COMMENT ON COLUMN backfill_jobs.deadline_at_ms IS 'when its completion window ends; null: so long after created_at_ms';
"""


def upgrade() -> None:
    """Add the columns; of jobs that have ended these times are not known."""
    execute(TIMES)

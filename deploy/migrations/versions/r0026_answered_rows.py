"""Rows of a job that have a result, those of chunks that are not finished included."""

from deploy.migrations.statements import execute

revision = "0026"
down_revision = "0025"

# With a default: a runner of the revision before may go on while services are replaced.
STATEMENTS = (
    "ALTER TABLE backfill_jobs ADD COLUMN answered_rows bigint NOT NULL DEFAULT 0",
    "COMMENT ON COLUMN backfill_jobs.answered_rows IS 'rows with a result, in unfinished chunks too'",
)


def upgrade() -> None:
    """Add the column."""
    execute(*STATEMENTS)

"""Indexes for the history of requests: by model, and of those that did not end well."""

from deploy.migrations.statements import execute

revision = "0009"
down_revision = "0008"

# Nearly all end well: those are found by time alone, and the others cost nothing while there are none.
STATEMENTS = (
    "CREATE INDEX results_by_model ON results (tenant, model, replied_at_ms DESC, request_id)",
    "CREATE INDEX results_not_ok ON results (tenant, outcome, replied_at_ms DESC, request_id) WHERE outcome <> 'ok'",
)


def upgrade() -> None:
    """Add the indexes."""
    execute(*STATEMENTS)

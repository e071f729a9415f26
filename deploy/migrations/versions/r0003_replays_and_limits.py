"""Replays and attempts of results; bounds per request of tenants; data type, quantization and devices of models."""

from deploy.migrations.statements import execute

revision = "0003"
down_revision = "0002"

# With defaults, so that a recorder of the revision before can go on writing while services are replaced.
STATEMENTS = (
    "ALTER TABLE results ADD COLUMN replay_of text",
    "ALTER TABLE results ADD COLUMN attempts bigint NOT NULL DEFAULT 1",
    "ALTER TABLE tenants ADD COLUMN max_prompt_tokens bigint",
    "ALTER TABLE tenants ADD COLUMN max_completion_tokens bigint",
    "ALTER TABLE models ADD COLUMN dtype text",
    "ALTER TABLE models ADD COLUMN quantization text",
    "ALTER TABLE models ADD COLUMN tensor_parallel_size bigint NOT NULL DEFAULT 1",
)


def upgrade() -> None:
    """Add the columns."""
    execute(*STATEMENTS)

"""Conversations: what was said, turn by turn. Caches: what tenants want of them, and what came from one."""

from deploy.migrations.statements import execute, part_tenants

revision = "0006"
down_revision = "0005"

# With defaults, so that a recorder of the revision before can go on writing while services are replaced.
COLUMNS = (
    "ALTER TABLE tenants ADD COLUMN cache text NOT NULL DEFAULT 'none'",
    "ALTER TABLE usage ADD COLUMN cached boolean NOT NULL DEFAULT false",
    "ALTER TABLE results ADD COLUMN cache_use jsonb",
    "ALTER TABLE results ADD COLUMN history_use jsonb",
)

TABLE = """
-- By its id a request is one turn, wherever it stood in the log: one that was read again, or sent again while nobody
-- knew that it had been, does not say it twice.
CREATE TABLE conversation_turns (
    tenant text NOT NULL,
    conversation_id text NOT NULL,
    request_id text NOT NULL,
    source_topic text NOT NULL,
    source_partition bigint NOT NULL,
    source_offset bigint NOT NULL,
    submitted_at_ms bigint NOT NULL,
    replied_at_ms bigint NOT NULL,
    messages jsonb NOT NULL,
    answer text NOT NULL,
    tokens bigint NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant, conversation_id, request_id)
);
CREATE INDEX conversation_turns_newest
    ON conversation_turns (tenant, conversation_id, submitted_at_ms DESC, source_offset DESC);
CREATE INDEX conversation_turns_by_age ON conversation_turns (replied_at_ms);
COMMENT ON COLUMN conversation_turns.submitted_at_ms IS
    'of the request, by the broker''s clock: the order of turns; replied_at_ms is by the clock of whoever answered';
COMMENT ON COLUMN conversation_turns.messages IS 'what the request added: a list of {role, content}';
COMMENT ON COLUMN conversation_turns.tokens IS
    'of messages and answer together, estimated: whoever has little room needs not read what will not fit';
"""


def upgrade() -> None:
    """Add the columns and the table; nothing in it is ever changed, and what is old is removed."""
    execute(*COLUMNS, TABLE)
    part_tenants("conversation_turns")

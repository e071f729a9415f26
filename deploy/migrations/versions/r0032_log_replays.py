"""Replays of the log: their plans, states and progress, and the requests that each has copied."""

from deploy.migrations.statements import execute, part_tenants

revision = "0032"
down_revision = "0031"

TABLES = """
CREATE TABLE log_replays (
    replay text PRIMARY KEY,
    name text UNIQUE,
    model text NOT NULL,
    candidate text NOT NULL,
    against text NOT NULL,
    tenants text[] NOT NULL,
    from_ms bigint NOT NULL,
    until_ms bigint NOT NULL,
    sample double precision NOT NULL CHECK (sample > 0 AND sample <= 1),
    most_requests bigint,
    most_outstanding bigint NOT NULL,
    ranges jsonb,
    state text NOT NULL DEFAULT 'planned'
        CHECK (state IN ('planned', 'running', 'paused', 'finished', 'cancelled', 'failed')),
    trouble text,
    created_by text NOT NULL,
    reason text NOT NULL,
    created_at_ms bigint NOT NULL,
    started_at_ms bigint,
    ended_at_ms bigint,
    progress jsonb,
    recorded_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX log_replays_newest ON log_replays (created_at_ms DESC, replay DESC);
CREATE INDEX log_replays_open ON log_replays (created_at_ms) WHERE state IN ('planned', 'running');
COMMENT ON COLUMN log_replays.against IS 'the version whose work is replayed, and which runs it again';
COMMENT ON COLUMN log_replays.ranges IS 'offsets of the priority topics; null before it is begun';
COMMENT ON COLUMN log_replays.trouble IS 'why it makes no progress now, or why it failed';
COMMENT ON COLUMN log_replays.progress IS
    'a copy, for people: what counts is committed with the copies, as offsets of the group of the replay';

CREATE TABLE log_replay_requests (
    replay text NOT NULL REFERENCES log_replays ON DELETE CASCADE,
    tenant text NOT NULL,
    request_id text NOT NULL,
    work_topic text NOT NULL,
    work_partition bigint NOT NULL,
    work_offset bigint NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (replay, tenant, request_id)
);
CREATE INDEX log_replay_requests_by_tenant ON log_replay_requests (tenant);
COMMENT ON TABLE log_replay_requests IS
    'which dispatch of a request is copied: one, although the log may hold several; written before its copies';
"""


def upgrade() -> None:
    """Add the tables; the rights on them are applied after the revisions."""
    execute(TABLES)
    part_tenants("log_replay_requests")

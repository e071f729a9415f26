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
    report jsonb,
    recorded_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX log_replays_newest ON log_replays (created_at_ms DESC, replay DESC);
CREATE INDEX log_replays_open ON log_replays (created_at_ms) WHERE state IN ('planned', 'running');
COMMENT ON COLUMN log_replays.against IS 'the version whose work is replayed, and which runs it again';
COMMENT ON COLUMN log_replays.ranges IS 'offsets of the priority topics; null before it is begun';
COMMENT ON COLUMN log_replays.trouble IS 'why it makes no progress now, or why it failed';
COMMENT ON COLUMN log_replays.progress IS
    'a copy, for people: what counts is committed with the copies, as offsets of the group of the replay';
COMMENT ON COLUMN log_replays.report IS 'the verdict, with figures and no text; null before it is finished';

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

# Of tenants that allow evaluation now, for callers that may not read labels otherwise: those of the requests of one
# replay. A request with several corrections has none.
LABELS = """
CREATE FUNCTION log_replay_labels(wanted_replay text, most integer)
RETURNS TABLE (tenant text, request_id text, label text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = public, pg_temp AS $body$
DECLARE
    acting_for text := current_setting('fairlane.tenant', true);
BEGIN
    PERFORM set_config('fairlane.tenant', '*', true);
    RETURN QUERY
        SELECT c.tenant, c.request_id, coalesce(i.label, f.correction)
        FROM log_replay_requests AS c
        JOIN tenants AS t ON t.tenant = c.tenant AND t.evaluation = 'allowed'
        LEFT JOIN label_items AS i ON i.tenant = c.tenant AND i.request_id = c.request_id
            AND i.state = 'agreed' AND i.task = 'classify'
        LEFT JOIN LATERAL (
            SELECT min(given.correction) AS correction FROM feedback AS given
            WHERE given.tenant = c.tenant AND given.request_id = c.request_id AND given.correction IS NOT NULL
            HAVING count(DISTINCT given.correction) = 1
        ) AS f ON true
        WHERE c.replay = wanted_replay AND coalesce(i.label, f.correction) IS NOT NULL LIMIT most;
    PERFORM set_config('fairlane.tenant', coalesce(acting_for, ''), true);
END $body$;
REVOKE ALL ON FUNCTION log_replay_labels(text, integer) FROM PUBLIC;
"""


def upgrade() -> None:
    """Add the tables and a function; the rights on them are applied after the revisions."""
    execute(TABLES)
    part_tenants("log_replay_requests")
    execute(LABELS)

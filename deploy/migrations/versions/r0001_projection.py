"""The projection of the log: results, usage, audit, tenants, models, and how far each partition is projected."""

from deploy.migrations.statements import execute

revision = "0001"
down_revision = None

TABLES = """
-- One row per reply record's request: a request id that was refused and sent again stands at another place in the log
-- and has a row of its own. The id comes first in the key, so that it can be looked up with and without its tenant.
CREATE TABLE results (
    request_id text NOT NULL,
    tenant text NOT NULL,
    source_topic text NOT NULL,
    source_partition bigint NOT NULL,
    source_offset bigint NOT NULL,
    reply_topic text NOT NULL,
    reply_partition bigint NOT NULL,
    reply_offset bigint NOT NULL,
    replied_at_ms bigint NOT NULL,
    outcome text NOT NULL,
    code text,
    field text,
    message text,
    retry_after_ms bigint,
    model text,
    model_version text,
    task text,
    engine text,
    output jsonb,
    finish_reason text,
    prompt_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    submitted_at_ms bigint,
    admitted_at_ms bigint,
    dispatched_at_ms bigint,
    received_at_ms bigint,
    engine_started_at_ms bigint,
    engine_finished_at_ms bigint,
    batch_size bigint NOT NULL,
    degradations jsonb NOT NULL,
    passages jsonb NOT NULL,
    replies_seen integer NOT NULL,
    replays_seen integer NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (request_id, tenant, source_topic, source_partition, source_offset)
);
CREATE INDEX results_by_time ON results (tenant, replied_at_ms DESC, request_id);
COMMENT ON COLUMN results.replies_seen IS
    'final replies committed for this request; anything but 1 breaks the promise (0: only copies were seen so far)';
COMMENT ON COLUMN results.replays_seen IS 'copies of the reply that were sent again for a repeated request id';
COMMENT ON COLUMN results.replied_at_ms IS 'timestamp of the reply record in the log';

CREATE TABLE usage (
    work_topic text NOT NULL,
    work_partition bigint NOT NULL,
    work_offset bigint NOT NULL,
    log_topic text NOT NULL,
    log_partition bigint NOT NULL,
    log_offset bigint NOT NULL,
    request_id text NOT NULL,
    tenant text NOT NULL,
    pool text NOT NULL,
    model text NOT NULL,
    model_version text NOT NULL,
    priority_class text NOT NULL,
    outcome text NOT NULL,
    code text,
    prompt_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    cost_tokens bigint NOT NULL,
    engine_ms bigint NOT NULL,
    occurred_at_ms bigint NOT NULL,
    events_seen integer NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (work_topic, work_partition, work_offset)
);
CREATE INDEX usage_by_request ON usage (request_id, tenant);
CREATE INDEX usage_by_time ON usage (tenant, occurred_at_ms DESC, request_id);
COMMENT ON COLUMN usage.events_seen IS 'usage events committed for this work; anything but 1 breaks the promise';

CREATE TABLE audit_logs (
    log_topic text NOT NULL,
    log_partition bigint NOT NULL,
    log_offset bigint NOT NULL,
    request_id text NOT NULL,
    tenant text NOT NULL,
    decision text NOT NULL,
    actor text NOT NULL,
    occurred_at_ms bigint NOT NULL,
    source_topic text NOT NULL,
    source_partition bigint NOT NULL,
    source_offset bigint NOT NULL,
    code text,
    message text,
    inputs jsonb NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (log_topic, log_partition, log_offset)
);
CREATE INDEX audit_logs_by_request ON audit_logs (request_id, tenant);
CREATE INDEX audit_logs_by_time ON audit_logs (tenant, occurred_at_ms DESC, request_id);

CREATE TABLE tenants (
    tenant text PRIMARY KEY,
    weight double precision NOT NULL,
    classes jsonb NOT NULL,
    models jsonb NOT NULL,
    services jsonb NOT NULL,
    pool text,
    max_queue_requests bigint NOT NULL,
    max_queue_bytes bigint NOT NULL,
    requests_per_s double precision,
    burst_requests bigint,
    tokens_per_minute bigint,
    tokens_per_day bigint,
    recorded_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE models (
    model text PRIMARY KEY,
    version text NOT NULL,
    pool text NOT NULL,
    engine text NOT NULL,
    tasks jsonb NOT NULL,
    path text NOT NULL,
    max_context_tokens bigint NOT NULL,
    max_output_tokens bigint NOT NULL,
    max_batch_size bigint NOT NULL,
    max_batch_tokens bigint NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE source_offsets (
    topic text NOT NULL,
    partition bigint NOT NULL,
    next_offset bigint NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (topic, partition)
);
COMMENT ON TABLE source_offsets IS
    'where the recorder goes on; compare-and-set in the transaction of the rows lets one recorder through';
"""

TENANT_TABLES = ("results", "usage", "audit_logs", "tenants")


def upgrade() -> None:
    """Create everything."""
    execute(TABLES)
    for table in TENANT_TABLES:
        # FORCE: not even the owner reads past the policy by accident. A transaction that names no tenant sees nothing.
        execute(
            f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY",
            f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY",
            f"CREATE POLICY own_rows ON {table} USING (tenant = current_setting('fairlane.tenant', true))",
            f"CREATE POLICY trusted_service ON {table} TO CURRENT_USER "
            "USING (current_setting('fairlane.tenant', true) = '*')",
        )

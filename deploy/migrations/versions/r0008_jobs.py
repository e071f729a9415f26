"""Offline jobs, how far each has come, and the files that batches are made from."""

from deploy.migrations.statements import execute, part_tenants

revision = "0008"
down_revision = "0007"

TABLES = """
CREATE TABLE backfill_jobs (
    job_id text PRIMARY KEY,
    tenant text NOT NULL,
    spec jsonb NOT NULL,
    input_bytes bigint NOT NULL,
    input_version text NOT NULL,
    total_rows bigint,
    partitions bigint NOT NULL,
    status text NOT NULL DEFAULT 'queued',
    wanted text NOT NULL DEFAULT 'run',
    reason text,
    max_cost_tokens bigint,
    estimated_row_cost double precision NOT NULL DEFAULT 0,
    ok_rows bigint NOT NULL DEFAULT 0,
    failed_rows bigint NOT NULL DEFAULT 0,
    expired_rows bigint NOT NULL DEFAULT 0,
    cancelled_rows bigint NOT NULL DEFAULT 0,
    prompt_tokens bigint NOT NULL DEFAULT 0,
    completion_tokens bigint NOT NULL DEFAULT 0,
    cost_tokens bigint NOT NULL DEFAULT 0,
    planned_rows bigint NOT NULL DEFAULT 0,
    next_chunk bigint NOT NULL DEFAULT 0,
    next_group bigint NOT NULL DEFAULT 0,
    next_offset bigint NOT NULL DEFAULT 0,
    created_at_ms bigint NOT NULL,
    started_at_ms bigint,
    deadline_at_ms bigint,
    ended_at_ms bigint,
    runner text,
    token bigint NOT NULL DEFAULT 0,
    lease_until timestamptz,
    recorded_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX backfill_jobs_newest ON backfill_jobs (tenant, created_at_ms DESC, job_id DESC);
COMMENT ON COLUMN backfill_jobs.token IS
    'counts the runners that took the job: what one with an older token writes is refused';
COMMENT ON COLUMN backfill_jobs.lease_until IS 'until then nobody else may take it; by the clock of Postgres';
COMMENT ON COLUMN backfill_jobs.total_rows IS 'null until they are counted';
COMMENT ON COLUMN backfill_jobs.partitions IS 'of the topic of the replies: the request ids of the rows depend on it';

CREATE TABLE backfill_chunks (
    job_id text NOT NULL REFERENCES backfill_jobs,
    chunk bigint NOT NULL,
    tenant text NOT NULL,
    first_row bigint NOT NULL,
    rows bigint NOT NULL,
    begin_group bigint NOT NULL,
    begin_offset bigint NOT NULL,
    end_group bigint NOT NULL,
    end_offset bigint NOT NULL,
    reply_offset bigint NOT NULL,
    part text,
    done_number bigint,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (job_id, chunk)
);
CREATE INDEX backfill_chunks_open ON backfill_chunks (job_id, chunk) WHERE part IS NULL;
CREATE UNIQUE INDEX backfill_chunks_done ON backfill_chunks (job_id, done_number) WHERE part IS NOT NULL;
CREATE TABLE files (
    file_id text PRIMARY KEY,
    tenant text NOT NULL,
    purpose text NOT NULL,
    filename text NOT NULL,
    size_bytes bigint,
    created_at_ms bigint NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX files_newest ON files (tenant, created_at_ms DESC, file_id DESC);
COMMENT ON COLUMN files.size_bytes IS 'null while a job has yet to write it';

CREATE TABLE batches (
    batch_id text PRIMARY KEY,
    tenant text NOT NULL,
    job_id text NOT NULL REFERENCES backfill_jobs,
    input_file_id text NOT NULL,
    output_file_id text NOT NULL,
    error_file_id text NOT NULL,
    metadata jsonb,
    created_at_ms bigint NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX batches_newest ON batches (tenant, created_at_ms DESC, batch_id DESC);
COMMENT ON COLUMN backfill_chunks.part IS 'where its answers stand; null while it is open';
COMMENT ON COLUMN backfill_chunks.done_number IS 'the order in which chunks were done, from 0';
"""


def upgrade() -> None:
    """Create the tables; a row belongs to one tenant, as everywhere."""
    execute(TABLES)
    for table in ("backfill_jobs", "backfill_chunks", "files", "batches"):
        part_tenants(table)

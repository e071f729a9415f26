"""Drift: the states of its statistics, what was found, and requests that show it. An erasure reaches these."""

from deploy.migrations.statements import execute, part_tenants

revision = "0033"
down_revision = "0032"

TABLES = """
CREATE TABLE drift_looks (
    one boolean PRIMARY KEY DEFAULT true CHECK (one),
    looked_to_ms bigint NOT NULL,
    looks bigint NOT NULL DEFAULT 0
);
COMMENT ON TABLE drift_looks IS 'one row: up to which reply results were read, and how often';

CREATE TABLE drift_streams (
    tenant text NOT NULL,
    model text NOT NULL,
    task text NOT NULL,
    version text NOT NULL,
    block_requests integer NOT NULL,
    block jsonb NOT NULL,
    not_before_ms bigint NOT NULL,
    monitors jsonb NOT NULL,
    statistics jsonb NOT NULL,
    watched integer NOT NULL,
    has_payload boolean NOT NULL,
    seen_at_ms bigint NOT NULL,
    PRIMARY KEY (tenant, model, task, version)
);
COMMENT ON COLUMN drift_streams.version IS 'whose answers these are; empty: the requests to all versions';
COMMENT ON COLUMN drift_streams.not_before_ms IS 'what was answered before belongs to a block that is closed';
COMMENT ON COLUMN drift_streams.statistics IS 'by statistic, its phase, blocks and evidence, for people';
COMMENT ON COLUMN drift_streams.has_payload IS 'something in it was computed from texts, labels or vectors';

CREATE TABLE drift_findings (
    tenant text NOT NULL,
    finding_id text NOT NULL,
    model text NOT NULL,
    task text NOT NULL,
    version text NOT NULL,
    statistic text NOT NULL,
    needs_consent boolean NOT NULL,
    effect double precision NOT NULL,
    log_evidence double precision NOT NULL,
    log_needed double precision NOT NULL,
    since_ms bigint NOT NULL,
    until_ms bigint NOT NULL,
    blocks integer NOT NULL,
    before jsonb NOT NULL,
    now jsonb NOT NULL,
    found_at_ms bigint NOT NULL,
    PRIMARY KEY (tenant, finding_id)
);
CREATE INDEX drift_findings_by_time ON drift_findings (found_at_ms DESC, finding_id);
COMMENT ON COLUMN drift_findings.since_ms IS 'the estimated time of the change';

CREATE TABLE drift_samples (
    tenant text NOT NULL,
    finding_id text NOT NULL,
    request_id text NOT NULL,
    strangeness double precision NOT NULL,
    answered_at_ms bigint NOT NULL,
    found_at_ms bigint NOT NULL,
    PRIMARY KEY (tenant, finding_id, request_id),
    FOREIGN KEY (tenant, finding_id) REFERENCES drift_findings ON DELETE CASCADE
);
CREATE INDEX drift_samples_by_time ON drift_samples (found_at_ms);
"""

# What an erasure covers has a tombstone, whether the request was named, or belonged to a conversation, or was left out
# by the recorder. Nothing with one is stored afterwards.
ERASURE = """
CREATE FUNCTION drop_erased_drift_samples() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $body$
BEGIN
    DELETE FROM drift_samples USING added
    WHERE added.kind = 'request' AND drift_samples.tenant = added.tenant
        AND sha256(convert_to(drift_samples.request_id, 'UTF8')) = added.digest;
    RETURN NULL;
END $body$;
REVOKE ALL ON FUNCTION drop_erased_drift_samples() FROM PUBLIC;
CREATE TRIGGER drift_samples_erased AFTER INSERT ON erased REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION drop_erased_drift_samples();
"""


def upgrade() -> None:
    """Add the tables and the trigger."""
    execute(TABLES)
    for table in ("drift_streams", "drift_findings", "drift_samples"):
        part_tenants(table)
    execute(ERASURE)

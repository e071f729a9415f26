"""Evaluation sets, runs on them with their scores, their schedules, and calibrations of judges."""

from deploy.migrations.statements import execute, part_tenants

revision = "0034"
down_revision = "0033"

SETS = """
CREATE TABLE evaluation_sets (
    tenant text NOT NULL,
    name text NOT NULL,
    version bigint NOT NULL,
    digest text NOT NULL,
    examples bigint NOT NULL,
    size_bytes bigint NOT NULL,
    created_at_ms bigint NOT NULL,
    created_by text NOT NULL,
    removed_at_ms bigint,
    PRIMARY KEY (tenant, name, version)
);
CREATE UNIQUE INDEX evaluation_sets_by_digest ON evaluation_sets (tenant, name, digest) WHERE removed_at_ms IS NULL;
COMMENT ON COLUMN evaluation_sets.examples IS 'of what was uploaded; an erasure leaves fewer';
COMMENT ON COLUMN evaluation_sets.removed_at_ms IS 'the number of a version is not used again';

CREATE TABLE evaluation_examples (
    tenant text NOT NULL,
    name text NOT NULL,
    version bigint NOT NULL,
    place bigint NOT NULL,
    request_id text,
    content text NOT NULL,
    PRIMARY KEY (tenant, name, version, place),
    FOREIGN KEY (tenant, name, version) REFERENCES evaluation_sets
);
CREATE INDEX evaluation_examples_of_requests ON evaluation_examples (tenant, request_id) WHERE request_id IS NOT NULL;
COMMENT ON COLUMN evaluation_examples.request_id IS 'the request that the example was made of: its erasure reaches it';
COMMENT ON COLUMN evaluation_examples.content IS 'a line of the set, as JSON of ASCII characters';
"""

RUNS = """
CREATE TABLE evaluation_runs (
    tenant text NOT NULL,
    run_id text NOT NULL,
    set_name text NOT NULL,
    set_version bigint NOT NULL,
    set_digest text NOT NULL,
    examples bigint NOT NULL,
    reference text NOT NULL,
    model text NOT NULL,
    scorer text NOT NULL,
    parameters jsonb NOT NULL,
    judge jsonb,
    is_scheduled boolean NOT NULL,
    state text NOT NULL DEFAULT 'running' CHECK (state IN ('running', 'finished', 'cancelled')),
    started_at_ms bigint NOT NULL,
    started_by text NOT NULL,
    runner text,
    lease_until_ms bigint,
    finished_at_ms bigint,
    result jsonb,
    baseline_run text,
    fall jsonb,
    model_requests bigint,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant, run_id)
);
CREATE UNIQUE INDEX evaluation_runs_scheduled ON evaluation_runs (tenant, model)
    WHERE state = 'running' AND is_scheduled;
CREATE INDEX evaluation_runs_by_model ON evaluation_runs (model, started_at_ms DESC);
CREATE INDEX evaluation_runs_by_tenant ON evaluation_runs (tenant, started_at_ms DESC);
CREATE INDEX evaluation_runs_latest ON evaluation_runs (tenant, reference, finished_at_ms DESC)
    WHERE is_scheduled AND state = 'finished';
COMMENT ON COLUMN evaluation_runs.reference IS 'the model as requests name it';
COMMENT ON COLUMN evaluation_runs.runner IS 'who asks until lease_until_ms, and nobody else';
COMMENT ON COLUMN evaluation_runs.result IS 'mean and interval, versions, failures and tokens';
COMMENT ON COLUMN evaluation_runs.model_requests IS
    'of all tenants to the model, as counted at the end of a scheduled run';
COMMENT ON COLUMN evaluation_runs.fall IS 'the comparison with baseline_run, and whether it is a fall';

CREATE TABLE evaluation_scores (
    tenant text NOT NULL,
    run_id text NOT NULL,
    place bigint NOT NULL,
    score double precision CHECK (score BETWEEN 0 AND 1),
    reason text NOT NULL,
    failure text,
    model_version text,
    request_id text NOT NULL,
    judged jsonb,
    prompt_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    costs jsonb NOT NULL DEFAULT '{}',
    is_degraded boolean NOT NULL DEFAULT false,
    PRIMARY KEY (tenant, run_id, place),
    FOREIGN KEY (tenant, run_id) REFERENCES evaluation_runs ON DELETE CASCADE
);
COMMENT ON TABLE evaluation_scores IS 'scores without texts, by the place of the example in its set';
COMMENT ON COLUMN evaluation_scores.costs IS 'of all requests of the example, by currency, in billionths of its unit';
COMMENT ON COLUMN evaluation_scores.request_id IS 'the request that asked the example';
"""

SCHEDULES = """
CREATE TABLE evaluation_schedules (
    tenant text NOT NULL,
    model text NOT NULL,
    set_name text NOT NULL,
    scorer text NOT NULL,
    parameters jsonb NOT NULL,
    judge jsonb,
    every_hours double precision CHECK (every_hours > 0),
    every_requests bigint CHECK (every_requests > 0),
    baseline_run text,
    created_at_ms bigint NOT NULL,
    created_by text NOT NULL,
    PRIMARY KEY (tenant, model),
    CHECK (every_hours IS NOT NULL OR every_requests IS NOT NULL)
);

CREATE TABLE judge_calibrations (
    tenant text NOT NULL,
    calibration_id text NOT NULL,
    judge text NOT NULL,
    judge_version text NOT NULL,
    rubric_digest text NOT NULL,
    rubric text NOT NULL,
    set_name text NOT NULL,
    set_version bigint NOT NULL,
    set_digest text NOT NULL,
    result jsonb NOT NULL,
    is_sufficient boolean NOT NULL,
    created_at_ms bigint NOT NULL,
    created_by text NOT NULL,
    PRIMARY KEY (tenant, calibration_id)
);
CREATE INDEX judge_calibrations_latest ON judge_calibrations (tenant, judge, rubric_digest, created_at_ms DESC);
"""

# Apart, so that a later revision of `erase_some` only has to call it. Behind the ids of its requests come those that
# runs made of the examples: what they answered repeats what is to be erased.
ERASED_EXAMPLES = """
CREATE FUNCTION erase_examples(owner text, ids text[]) RETURNS text[]
LANGUAGE plpgsql SET search_path = public, pg_temp AS $body$
DECLARE
    asked text[];
BEGIN
    WITH gone AS (
        DELETE FROM evaluation_examples WHERE tenant = owner AND request_id = ANY(ids) RETURNING name, version, place
    )
    SELECT coalesce(array_agg(DISTINCT score.request_id), '{}') INTO asked
    FROM gone JOIN evaluation_runs AS run ON run.tenant = owner AND run.set_name = gone.name
        AND run.set_version = gone.version
    JOIN evaluation_scores AS score ON score.tenant = owner AND score.run_id = run.run_id AND score.place = gone.place;
    RETURN asked;
END $body$;
REVOKE EXECUTE ON FUNCTION erase_examples(text, text[]) FROM PUBLIC;
"""

KEYS = (
    """
    ALTER TABLE api_keys DROP CONSTRAINT api_keys_scopes_check, ADD CONSTRAINT api_keys_scopes_check CHECK (
        scopes <@ CASE tenant
            WHEN '_deployment' THEN ARRAY['loads', 'models', 'tenants', 'dead_letters', 'identities', 'audit',
                'evaluations', 'labels']
            ELSE ARRAY['inference', 'results', 'files', 'batches'] END
    )
    """,
    """
    ALTER TABLE users DROP CONSTRAINT users_of_deployment, ADD CONSTRAINT users_of_deployment CHECK (
        CASE tenant WHEN '_deployment'
            THEN role <> 'tenant' AND grants <@ ARRAY['dead_letters:payload', 'labels:judge']
        ELSE grants = '{}' END
    )
    """,
    """
    ALTER TABLE api_keys DROP CONSTRAINT api_keys_of_deployment, ADD CONSTRAINT api_keys_of_deployment CHECK (
        CASE tenant WHEN '_deployment'
            THEN role <> 'tenant' AND grants <@ ARRAY['dead_letters:payload', 'labels:judge']
        ELSE grants = '{}' END
    )
    """,
)

TABLES = (
    *("evaluation_sets", "evaluation_examples", "evaluation_runs", "evaluation_scores"),
    *("evaluation_schedules", "judge_calibrations"),
)


def upgrade() -> None:
    """Add the tables and a function that 0036 calls, and allow the scopes and the grant."""
    execute(SETS, RUNS, SCHEDULES)
    for table in TABLES:
        part_tenants(table)
    execute(ERASED_EXAMPLES, *KEYS)

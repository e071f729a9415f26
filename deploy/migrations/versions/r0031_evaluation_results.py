"""Results of copies that run for evaluation, and the pairs that they form with their originals; erasures and retention
reach them. The shadow in every change of a route."""

from deploy.migrations.statements import execute, part_tenants

revision = "0031"
down_revision = "0030"

RESULTS = """
CREATE TABLE evaluation_results (
    run text NOT NULL,
    tenant text NOT NULL,
    request_id text NOT NULL,
    arm text NOT NULL,
    kind text NOT NULL,
    conversation_id text,
    source_topic text NOT NULL,
    source_partition bigint NOT NULL,
    source_offset bigint NOT NULL,
    ended text NOT NULL,
    outcome text NOT NULL,
    code text,
    message text,
    model text,
    model_version text,
    task text,
    output jsonb,
    finish_reason text,
    prompt_tokens bigint NOT NULL,
    completion_tokens bigint NOT NULL,
    cached_tokens bigint NOT NULL,
    engine_ms bigint,
    batch_size bigint NOT NULL,
    cost_nanos bigint,
    currency text,
    copied_at_ms bigint,
    finished_at_ms bigint NOT NULL,
    log_topic text NOT NULL,
    log_partition bigint NOT NULL,
    log_offset bigint NOT NULL,
    replies_seen integer NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (run, tenant, request_id, arm)
);
CREATE INDEX evaluation_results_of_request ON evaluation_results (tenant, request_id);
CREATE INDEX evaluation_results_of_conversation ON evaluation_results (tenant, conversation_id)
    WHERE conversation_id IS NOT NULL;
CREATE INDEX evaluation_results_by_age ON evaluation_results ((finished_at_ms + 0));
COMMENT ON TABLE evaluation_results IS 'one row per copy of a request; tenant and request_id are those of the original';
COMMENT ON COLUMN evaluation_results.ended IS 'completed, failed or dropped';
COMMENT ON COLUMN evaluation_results.source_offset IS 'of the original, as in results';
COMMENT ON COLUMN evaluation_results.engine_ms IS 'of the run of its batch; null if none ran';
COMMENT ON COLUMN evaluation_results.replies_seen IS 'more than 1: a copy has ended twice, which must not happen';
"""

ROUTES = """
ALTER TABLE model_routes ADD COLUMN shadow jsonb;
CREATE INDEX audit_logs_of_shadows ON audit_logs ((inputs ->> 'shadow_run'), (inputs ->> 'shadow'))
WHERE inputs ? 'shadow_run';
"""

# Of all tenants that allow evaluation now, in the order of the primary key, for callers that may not read outputs
# otherwise. The original of a copy may be missing: not recorded yet, or removed by its retention.
PAIRS = """
CREATE FUNCTION evaluation_pairs(
    wanted_run text, behind_tenant text, behind_request_id text, behind_arm text, most integer
) RETURNS TABLE (
    tenant text, request_id text, arm text, task text, ended text,
    outcome text, output jsonb, code text, model_version text,
    prompt_tokens bigint, completion_tokens bigint, engine_ms bigint,
    original_outcome text, original_output jsonb, original_code text, original_model_version text,
    original_prompt_tokens bigint, original_completion_tokens bigint, original_engine_ms bigint
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = public, pg_temp AS $body$
DECLARE
    acting_for text := current_setting('fairlane.tenant', true);
BEGIN
    PERFORM set_config('fairlane.tenant', '*', true);
    RETURN QUERY
        SELECT e.tenant, e.request_id, e.arm, coalesce(e.task, ''), e.ended,
            e.outcome, e.output, e.code, e.model_version, e.prompt_tokens, e.completion_tokens, e.engine_ms,
            r.outcome, r.output, r.code, r.model_version, r.prompt_tokens, r.completion_tokens,
            r.engine_finished_at_ms - r.engine_started_at_ms
        FROM evaluation_results AS e
        JOIN tenants AS t ON t.tenant = e.tenant AND t.evaluation = 'allowed'
        LEFT JOIN results AS r ON r.request_id = e.request_id AND r.tenant = e.tenant
            AND r.source_topic = e.source_topic AND r.source_partition = e.source_partition
            AND r.source_offset = e.source_offset AND r.replies_seen > 0
        WHERE e.run = wanted_run
            AND (e.tenant, e.request_id, e.arm) > (behind_tenant, behind_request_id, behind_arm)
        ORDER BY e.tenant, e.request_id, e.arm LIMIT least(most, 1000);
    PERFORM set_config('fairlane.tenant', coalesce(acting_for, ''), true);
END $body$;
REVOKE ALL ON FUNCTION evaluation_pairs(text, text, text, text, integer) FROM PUBLIC;
"""


def upgrade() -> None:
    """Add the table, the column and the function. What an erasure and the retention do with the table is in 0036."""
    execute(RESULTS, ROUTES)
    part_tenants("evaluation_results")
    execute(PAIRS)

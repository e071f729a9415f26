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

# As in revision 0029, with copies of requests.
STEP = """
CREATE OR REPLACE FUNCTION erase_some(wanted_id text, most integer) RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $body$
DECLARE
    owner text := acting_tenant();
    it erasures;
    ids text[];
    removed bigint := 0;
    removed_turns bigint := 0;
BEGIN
    SELECT * INTO it FROM erasures WHERE erasure_id = wanted_id AND tenant = owner FOR UPDATE;
    IF it.erasure_id IS NULL OR it.state = 'done' THEN
        RETURN '{}';
    END IF;
    IF it.kind = 'conversation' THEN
        WITH old AS (
            DELETE FROM conversation_turns WHERE ctid = ANY (ARRAY(
                SELECT ctid FROM conversation_turns WHERE tenant = owner AND conversation_id = ANY(it.names) LIMIT most
                FOR UPDATE
            )) RETURNING request_id
        )
        SELECT coalesce(array_agg(DISTINCT request_id), '{}'), count(*) INTO ids, removed_turns FROM old;
        INSERT INTO erased (tenant, kind, digest, before_ms, kept_until_ms)
        SELECT owner, 'request', sha256(convert_to(id, 'UTF8')), mark.before_ms, mark.kept_until_ms
        FROM unnest(ids) AS gone (id), (
            SELECT max(before_ms) AS before_ms, max(kept_until_ms) AS kept_until_ms FROM erased
            WHERE tenant = owner AND kind = 'conversation'
                AND digest IN (SELECT sha256(convert_to(name, 'UTF8')) FROM unnest(it.names) AS given (name))
        ) AS mark
        WHERE mark.before_ms IS NOT NULL
        ORDER BY 3
        ON CONFLICT (tenant, kind, digest) DO UPDATE SET before_ms = greatest(erased.before_ms, excluded.before_ms),
            kept_until_ms = greatest(erased.kept_until_ms, excluded.kept_until_ms);
    ELSE
        ids := it.names[1:most];
        it.names := it.names[most + 1:];
        -- A replay has an id of its own, and names the first one.
        ids := ids || ARRAY(
            SELECT DISTINCT request_id FROM results WHERE tenant = owner AND replay_of = ANY(ids)
        );
        DELETE FROM conversation_turns WHERE tenant = owner AND request_id = ANY(ids);
        GET DIAGNOSTICS removed_turns = ROW_COUNT;
    END IF;
    DELETE FROM results WHERE tenant = owner AND request_id = ANY(ids);
    GET DIAGNOSTICS removed = ROW_COUNT;
    DELETE FROM feedback WHERE tenant = owner AND request_id = ANY(ids);
    -- With their labels. Behind the results: an item is made of a result that is locked until it is committed.
    DELETE FROM label_items WHERE tenant = owner AND request_id = ANY(ids);
    DELETE FROM evaluation_results WHERE tenant = owner AND request_id = ANY(ids);
    IF cardinality(ids) = 0 THEN
        UPDATE erasures SET state = 'done', names = '{}', uncached = '{}', stepped_at = now(),
            done_at_ms = floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint
        WHERE erasure_id = wanted_id;
    ELSE
        UPDATE erasures SET names = it.names, uncached = ids, turns = turns + removed_turns,
            results = results + removed, stepped_at = now()
        WHERE erasure_id = wanted_id;
    END IF;
    RETURN ids;
END $body$;
"""

# As in revision 0029, with the new table.
RETENTION = """
CREATE OR REPLACE FUNCTION remove_old_rows(wanted_table text, wanted_before_ms bigint, most integer)
RETURNS TABLE (removed bigint, oldest_ms bigint)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER ROWS 1 SET search_path = public, pg_temp AS $body$
DECLARE
    acting_for text := current_setting('fairlane.tenant', true);
    age text;
    least_ms bigint;
    before_ms bigint;
BEGIN
    SELECT known.age, known.least_ms INTO age, least_ms FROM (VALUES
        ('results', 'replied_at_ms + 0', 3600000),
        ('usage', 'occurred_at_ms + 0', 86400000),
        ('usage_daily', '(day - date ''1970-01-01'') * 86400000::bigint', 86400000),
        ('usage_daily_callers', '(day - date ''1970-01-01'') * 86400000::bigint', 86400000),
        ('usage_hourly', 'hour * 3600000', 86400000),
        ('audit_logs', 'occurred_at_ms + 0', 86400000),
        ('conversation_turns', 'replied_at_ms', 0),
        ('erasures', 'requested_at_ms + 0', 86400000),
        ('erased', 'kept_until_ms + 0', 0),
        ('feedback', 'given_at_ms + 0', 3600000),
        ('label_items', 'queued_at_ms + 0', 3600000),
        ('evaluation_results', 'finished_at_ms + 0', 3600000)
    ) AS known (name, age, least_ms) WHERE known.name = wanted_table;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no old rows are removed from %', wanted_table USING ERRCODE = 'invalid_parameter_value';
    END IF;
    before_ms := least(wanted_before_ms, floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint - least_ms);
    PERFORM set_config('fairlane.tenant', '*', true);
    -- Locked rows are left for the next run: updates lock rows in another order, so waiting could deadlock.
    EXECUTE format(
        'DELETE FROM %1$I WHERE ctid = ANY (ARRAY('
        'SELECT ctid FROM %1$I WHERE %2$s < $1 ORDER BY %2$s LIMIT $2 FOR UPDATE SKIP LOCKED))',
        wanted_table, age
    ) USING before_ms, most;
    GET DIAGNOSTICS removed = ROW_COUNT;
    EXECUTE format('SELECT %2$s FROM %1$I WHERE %2$s < $1 ORDER BY %2$s LIMIT 1', wanted_table, age)
        INTO oldest_ms USING before_ms;
    PERFORM set_config('fairlane.tenant', coalesce(acting_for, ''), true);
    RETURN NEXT;
END $body$;
"""


def upgrade() -> None:
    """Add the table, the column and the function, and change two functions, which keep their rights."""
    execute(RESULTS, ROUTES)
    part_tenants("evaluation_results")
    execute(PAIRS, STEP, RETENTION)

"""Feedback of tenants, and the queue of outputs to be labelled; erasures and retention reach both."""

from deploy.migrations.statements import execute, part_tenants

revision = "0029"
down_revision = "0028"

FEEDBACK = """
CREATE TABLE feedback (
    tenant text NOT NULL,
    request_id text NOT NULL,
    given_by text NOT NULL,
    thumb text,
    rating double precision CHECK (rating BETWEEN 0 AND 1),
    correction text,
    tags jsonb NOT NULL,
    comment text,
    given_at_ms bigint NOT NULL,
    log_topic text NOT NULL,
    log_partition bigint NOT NULL,
    log_offset bigint NOT NULL,
    model text,
    model_version text,
    arm text,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant, request_id, given_by)
);
CREATE INDEX feedback_unanswered ON feedback (tenant, request_id) WHERE model IS NULL;
CREATE INDEX feedback_by_model ON feedback (model, given_at_ms) WHERE rating IS NOT NULL;
CREATE INDEX feedback_by_age ON feedback ((given_at_ms + 0));
COMMENT ON TABLE feedback IS 'the latest of each giver about each request';
COMMENT ON COLUMN feedback.rating IS 'the score, or 1 for a thumb up and 0 for one down';
COMMENT ON COLUMN feedback.model IS
    'what answered, from results; null as long as the tenant has no answered request of this id';
"""

LABELS = """
ALTER TABLE tenants ADD COLUMN evaluation text NOT NULL DEFAULT 'denied';

CREATE TABLE label_items (
    tenant text NOT NULL,
    request_id text NOT NULL,
    origin text NOT NULL,
    model text NOT NULL,
    model_version text NOT NULL,
    arm text,
    task text NOT NULL,
    input jsonb NOT NULL,
    output jsonb NOT NULL,
    guardrails jsonb NOT NULL DEFAULT '[]',
    correction text,
    answered_at_ms bigint NOT NULL,
    queued_at_ms bigint NOT NULL,
    state text NOT NULL DEFAULT 'open' CHECK (state IN ('open', 'agreed', 'disputed', 'dismissed')),
    label text,
    gold_label text,
    closed_at_ms bigint,
    lease_holder text,
    lease_until_ms bigint,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant, request_id)
);
CREATE INDEX label_items_open ON label_items (tenant, queued_at_ms, request_id) WHERE state = 'open';
CREATE INDEX label_items_gold ON label_items (tenant, request_id) WHERE gold_label IS NOT NULL;
CREATE INDEX label_items_by_age ON label_items ((queued_at_ms + 0));
COMMENT ON TABLE label_items IS 'outputs that people judge, of tenants that allow evaluation alone';
COMMENT ON COLUMN label_items.origin IS 'why it is here: feedback, guardrail, drift';
COMMENT ON COLUMN label_items.correction IS 'what the output should have been, by the feedback';
COMMENT ON COLUMN label_items.gold_label IS 'the known answer: reviewers are measured by it, and it is never closed';

CREATE TABLE labels (
    tenant text NOT NULL,
    request_id text NOT NULL,
    reviewer text NOT NULL,
    label text,
    correction text,
    given_at_ms bigint NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant, request_id, reviewer),
    FOREIGN KEY (tenant, request_id) REFERENCES label_items ON DELETE CASCADE
);
CREATE INDEX labels_by_reviewer ON labels (tenant, reviewer);
COMMENT ON COLUMN labels.label IS 'null: skipped';
"""

# As in revision 0027, with feedback and labels.
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

# As in revision 0021, with the new tables.
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
        ('label_items', 'queued_at_ms + 0', 3600000)
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
    """Add the tables and the column, and change two functions, which keep their rights."""
    execute(FEEDBACK, LABELS)
    for table in ("feedback", "label_items", "labels"):
        part_tenants(table)
    execute(STEP, RETENTION)

"""Label items and feedback know their conversation, so that erasures reach what other turns say of it; indices for what
the recorder and reviewers look for."""

from deploy.migrations.statements import execute

revision = "0036"
down_revision = "0034"

ERASURE_LOCK = 4_170_120_020

# The conversations of rows of before, as far as their turns are still recorded.
CONVERSATIONS = """
ALTER TABLE label_items ADD COLUMN conversation_id text;
ALTER TABLE feedback ADD COLUMN conversation_id text;
SELECT set_config('fairlane.tenant', '*', true);
UPDATE label_items AS item SET conversation_id = turn.conversation_id FROM conversation_turns AS turn
    WHERE turn.tenant = item.tenant AND turn.request_id = item.request_id;
UPDATE feedback SET conversation_id = turn.conversation_id FROM conversation_turns AS turn
    WHERE turn.tenant = feedback.tenant AND turn.request_id = feedback.request_id AND feedback.model IS NOT NULL;
SELECT set_config('fairlane.tenant', '', true);
CREATE INDEX label_items_of_conversations ON label_items (tenant, conversation_id) WHERE conversation_id IS NOT NULL;
CREATE INDEX feedback_of_conversations ON feedback (tenant, conversation_id) WHERE conversation_id IS NOT NULL;
-- It is read from feedback, which may be taken back.
ALTER TABLE label_items DROP COLUMN correction;
COMMENT ON COLUMN label_items.conversation_id IS 'whose earlier turns its input may hold';
COMMENT ON COLUMN feedback.conversation_id IS 'of the request, if it was a turn that was recorded';
COMMENT ON COLUMN erased.digest IS
    'SHA-256 of the name of a conversation, of the id of a request, or, kind history, of the name of a conversation of '
    'which a turn was erased: nothing is labelled that may repeat that turn';
"""

# Apart, so that a later revision of `erase_some` only has to call them.
OF_LABELS = """
CREATE FUNCTION conversations_of(owner text, ids text[]) RETURNS text[]
LANGUAGE sql STABLE SET search_path = public, pg_temp AS $body$
    SELECT coalesce(array_agg(DISTINCT known.conversation_id), '{}') FROM (
        SELECT conversation_id FROM conversation_turns WHERE tenant = owner AND request_id = ANY(ids)
        UNION ALL SELECT conversation_id FROM label_items WHERE tenant = owner AND request_id = ANY(ids)
        UNION ALL SELECT conversation_id FROM feedback WHERE tenant = owner AND request_id = ANY(ids)
    ) AS known WHERE known.conversation_id IS NOT NULL
$body$;
REVOKE ALL ON FUNCTION conversations_of(text, text[]) FROM PUBLIC;

CREATE FUNCTION labelled_of(owner text, conversations text[], most integer) RETURNS text[]
LANGUAGE sql STABLE SET search_path = public, pg_temp AS $body$
    SELECT coalesce(array_agg(DISTINCT known.request_id), '{}') FROM (
        (SELECT request_id FROM label_items WHERE tenant = owner AND conversation_id = ANY(conversations) LIMIT most)
        UNION ALL
        (SELECT request_id FROM feedback WHERE tenant = owner AND conversation_id = ANY(conversations) LIMIT most)
    ) AS known
$body$;
REVOKE ALL ON FUNCTION labelled_of(text, text[], integer) FROM PUBLIC;
COMMENT ON FUNCTION labelled_of(text, text[], integer) IS
    'requests of conversations that an item or feedback names: their turns may have expired, or were never answered';

CREATE FUNCTION erase_labels(owner text, ids text[], conversations text[]) RETURNS void
LANGUAGE plpgsql SET search_path = public, pg_temp AS $body$
BEGIN
    -- With their labels. Behind the results: an item is made of a result that is locked until it is committed.
    DELETE FROM label_items WHERE tenant = owner AND request_id = ANY(ids);
    DELETE FROM label_items WHERE tenant = owner AND conversation_id = ANY(conversations) AND input ? 'history';
    DELETE FROM feedback WHERE tenant = owner AND request_id = ANY(ids);
END $body$;
REVOKE ALL ON FUNCTION erase_labels(text, text[], text[]) FROM PUBLIC;
"""

# As in revision 0024, with the marks of conversations: under the lock, so that each item is stored before, and found by
# the erasure, or sees the mark.
REQUEST = f"""
CREATE OR REPLACE FUNCTION request_erasure(
    new_id text, new_kind text, new_names text[], new_requested_by text, kept_ms bigint,
    most_names bigint, most_unfinished bigint
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $body$
DECLARE
    owner text := acting_tenant();
    new_digests bytea[];
    now_ms bigint;
    until_ms bigint;
BEGIN
    IF cardinality(new_names) NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION 'an erasure names 1 to 1000' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    -- One of a tenant at a time: it is counted exactly, and only one of them waits for the recorder.
    PERFORM pg_advisory_xact_lock(hashtextextended('fairlane.erasures.' || owner, 0));
    IF (SELECT count(*) FROM erasures WHERE tenant = owner AND state = 'erasing') >= most_unfinished THEN
        RAISE EXCEPTION 'a tenant has at most % erasures under way', most_unfinished
            USING ERRCODE = 'program_limit_exceeded', CONSTRAINT = 'erasures_under_way';
    END IF;
    IF (SELECT coalesce(sum(named), 0) FROM erasures WHERE tenant = owner) + cardinality(new_names) > most_names THEN
        RAISE EXCEPTION 'the erasures of a tenant that are kept name at most %', most_names
            USING ERRCODE = 'program_limit_exceeded', CONSTRAINT = 'erased_names';
    END IF;
    SELECT array_agg(DISTINCT sha256(convert_to(name, 'UTF8'))) INTO new_digests FROM unnest(new_names) AS given (name);
    now_ms := floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint;
    INSERT INTO erasures (erasure_id, tenant, kind, subject, names, named, requested_by, requested_at_ms)
    VALUES (new_id, owner, new_kind, encode(sha256(convert_to(array_to_string(new_names, chr(10)), 'UTF8')), 'hex'),
        new_names, cardinality(new_names), new_requested_by, now_ms);
    PERFORM pg_advisory_xact_lock({ERASURE_LOCK});
    until_ms := now_ms;
    IF new_kind = 'conversation' THEN
        -- The broker's clock ordered the turns, and may be ahead.
        SELECT greatest(now_ms, max(latest.submitted_at_ms) + 1) INTO until_ms
        FROM unnest(new_names) AS given (name) CROSS JOIN LATERAL (
            SELECT submitted_at_ms FROM conversation_turns WHERE tenant = owner AND conversation_id = given.name
            ORDER BY submitted_at_ms DESC LIMIT 1
        ) AS latest;
    END IF;
    INSERT INTO erased (tenant, kind, digest, before_ms, kept_until_ms)
    SELECT owner, CASE new_kind WHEN 'requests' THEN 'request' ELSE new_kind END, one, until_ms, now_ms + kept_ms
    FROM unnest(new_digests) AS given (one)
    UNION ALL
    SELECT owner, 'history', sha256(convert_to(name, 'UTF8')), until_ms, now_ms + kept_ms
    FROM unnest(CASE new_kind WHEN 'requests' THEN conversations_of(owner, new_names || ARRAY(
        SELECT request_id FROM results WHERE tenant = owner AND replay_of = ANY(new_names)
    )) END) AS given (name)
    ON CONFLICT (tenant, kind, digest) DO UPDATE SET before_ms = greatest(erased.before_ms, excluded.before_ms),
        kept_until_ms = greatest(erased.kept_until_ms, excluded.kept_until_ms);
    RETURN now_ms;
END $body$;
"""  # noqa: S608 - our own number

# As in revision 0029, with what labels and feedback know of conversations, results of copies, and the examples of
# evaluation sets.
STEP = """
CREATE OR REPLACE FUNCTION erase_some(wanted_id text, most integer) RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $body$
DECLARE
    owner text := acting_tenant();
    it erasures;
    ids text[];
    talks text[];
    removed bigint := 0;
    removed_turns bigint := 0;
BEGIN
    SELECT * INTO it FROM erasures WHERE erasure_id = wanted_id AND tenant = owner FOR UPDATE;
    IF it.erasure_id IS NULL OR it.state = 'done' THEN
        RETURN '{}';
    END IF;
    IF it.kind = 'conversation' THEN
        talks := it.names;
        WITH old AS (
            DELETE FROM conversation_turns WHERE ctid = ANY (ARRAY(
                SELECT ctid FROM conversation_turns WHERE tenant = owner AND conversation_id = ANY(it.names) LIMIT most
                FOR UPDATE
            )) RETURNING request_id
        )
        SELECT coalesce(array_agg(DISTINCT request_id), '{}'), count(*) INTO ids, removed_turns FROM old;
        ids := ids || ARRAY(SELECT unnest(labelled_of(owner, talks, most)) EXCEPT SELECT unnest(ids));
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
        talks := conversations_of(owner, ids);
        DELETE FROM conversation_turns WHERE tenant = owner AND request_id = ANY(ids);
        GET DIAGNOSTICS removed_turns = ROW_COUNT;
    END IF;
    -- Items whose history repeats a turn of these conversations go, and so do the examples that were made of them.
    ids := ids || erase_examples(owner, ids || ARRAY(
        SELECT request_id FROM label_items
        WHERE tenant = owner AND conversation_id = ANY(talks) AND input ? 'history'
    ));
    DELETE FROM results WHERE tenant = owner AND request_id = ANY(ids);
    GET DIAGNOSTICS removed = ROW_COUNT;
    PERFORM erase_labels(owner, ids, talks);
    DELETE FROM evaluation_results WHERE tenant = owner AND request_id = ANY(ids);
    IF it.kind = 'conversation' THEN
        -- Also of requests that made no turn.
        DELETE FROM evaluation_results WHERE tenant = owner AND conversation_id = ANY(talks);
    END IF;
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

# What the recorder looks for twice a minute. The hits are as in `label_collector.py`.
CANDIDATES = """
CREATE INDEX results_of_guardrail_hits ON results (tenant, recorded_at)
    WHERE model_version IS NOT NULL
        AND guardrails @? '$[*].verdict ? (@ == "logged" || @ == "redacted" || @ == "blocked")';
CREATE INDEX feedback_by_time ON feedback (tenant, given_at_ms);
"""

# For satisfaction by model, for feedback without a result, and for the items that reviewers get and that are exported:
# gold items, whose answer is known, are neither open nor agreed on.
LOOKED_FOR = """
CREATE INDEX feedback_without_result ON feedback (recorded_at) WHERE model IS NULL;
CREATE INDEX feedback_of_all_models ON feedback (given_at_ms) WHERE rating IS NOT NULL;
CREATE INDEX label_items_leased ON label_items (tenant, lease_holder) WHERE lease_holder IS NOT NULL;
CREATE INDEX label_items_agreed ON label_items (tenant, closed_at_ms, request_id)
    WHERE state = 'agreed' AND gold_label IS NULL;
DROP INDEX label_items_open;
CREATE INDEX label_items_open ON label_items (tenant, queued_at_ms, request_id)
    WHERE state = 'open' AND gold_label IS NULL;
"""

# As in revision 0029, with results of copies. Behind a policy, a comparison of an expression is no condition of an
# index: it would be a filter of all rows when none is old. So the oldest are taken by the order of the index alone, and
# compared then.
RETENTION = """
CREATE OR REPLACE FUNCTION remove_old_rows(wanted_table text, wanted_before_ms bigint, most integer)
RETURNS TABLE (removed bigint, oldest_ms bigint)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER ROWS 1 SET search_path = public, pg_temp AS $body$
DECLARE
    acting_for text := current_setting('fairlane.tenant', true);
    age text;
    least_ms bigint;
    before_ms bigint;
    oldest text;
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
    oldest := format(
        'SELECT age FROM (SELECT %2$s AS age FROM %1$I ORDER BY %2$s LIMIT 1) AS oldest WHERE age < $1',
        wanted_table, age
    );
    removed := 0;
    EXECUTE oldest INTO oldest_ms USING before_ms;
    IF oldest_ms IS NOT NULL THEN
        -- Locked rows are left for the next run: updates lock rows in another order, so waiting could deadlock.
        EXECUTE format(
            'DELETE FROM %1$I WHERE ctid = ANY (ARRAY('
            'SELECT ctid FROM %1$I WHERE ctid = ANY (ARRAY('
            'SELECT place FROM (SELECT ctid AS place, %2$s AS age FROM %1$I ORDER BY %2$s LIMIT $2) AS oldest '
            'WHERE age < $1)) FOR UPDATE SKIP LOCKED))',
            wanted_table, age
        ) USING before_ms, most;
        GET DIAGNOSTICS removed = ROW_COUNT;
        EXECUTE oldest INTO oldest_ms USING before_ms;
    END IF;
    PERFORM set_config('fairlane.tenant', coalesce(acting_for, ''), true);
    RETURN NEXT;
END $body$;
"""


def upgrade() -> None:
    """Add the columns and the indices, and change three functions, which keep their rights."""
    execute(CONVERSATIONS, OF_LABELS, REQUEST, STEP, CANDIDATES, LOOKED_FOR, RETENTION)

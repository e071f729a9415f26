"""Erasures of one tenant are bounded, stop the recorder for no longer than their tombstones take, and reach replays."""

from deploy.migrations.statements import execute

revision = "0024"
down_revision = "0023"

ERASURE_LOCK = 4_170_120_020

# An erasure by ids of requests must not read all turns and results of its tenant.
INDICES = """
CREATE INDEX conversation_turns_by_request ON conversation_turns (tenant, request_id);
CREATE INDEX results_by_replayed ON results (tenant, replay_of) WHERE replay_of IS NOT NULL;
"""

# Counted by the names that it was asked for: a listed erasure has no names any more when it is done.
COUNT = """
ALTER TABLE erasures ADD COLUMN named integer NOT NULL DEFAULT 0;
CREATE INDEX erasures_named ON erasures (tenant, named);
COMMENT ON COLUMN erasures.named IS 'how many conversations or requests it was asked for; 0: before they were counted';
"""

# Only the tombstones are written under the lock: the recorder writes some as well, and it has the lock then.
REQUEST = f"""
DROP FUNCTION request_erasure(text, text, text[], text, bigint);
CREATE FUNCTION request_erasure(
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
    ON CONFLICT (tenant, kind, digest) DO UPDATE SET before_ms = greatest(erased.before_ms, excluded.before_ms),
        kept_until_ms = greatest(erased.kept_until_ms, excluded.kept_until_ms);
    RETURN now_ms;
END $body$;
REVOKE ALL ON FUNCTION request_erasure(text, text, text[], text, bigint, bigint, bigint) FROM PUBLIC;
"""  # noqa: S608 - our own number

# As in revision 0021, with the replays of requests.
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


def upgrade() -> None:
    """Replace the functions; the rights on the new one are applied after the revisions."""
    execute(INDICES, COUNT, REQUEST, STEP)

"""Tombstones of the requests that were erased with their conversation, and a way to ask for one: what is known of such
a request must not look as if its reply were to come. Only names that a tenant gave count in its bound."""

from deploy.migrations.statements import execute

revision = "0027"
down_revision = "0026"

ERASURE_LOCK = 4_170_120_020

TABLE = """
ALTER TABLE erased ADD COLUMN is_named boolean NOT NULL DEFAULT true;
COMMENT ON TABLE erased IS
    'tombstones: the recorder stores nothing of these that was submitted before, and gateways say that it was erased';
COMMENT ON COLUMN erased.is_named IS 'whether an erasure named it; else it is a request of an erased conversation';
"""

# As in revision 0024, without those that no erasure named.
REQUEST = f"""
CREATE OR REPLACE FUNCTION request_erasure(
    new_id text, new_kind text, new_names text[], new_requested_by text, kept_ms bigint,
    most_names bigint, most_unfinished bigint
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $body$
DECLARE
    owner text := acting_tenant();
    new_digests bytea[];
    digest_kind text := CASE new_kind WHEN 'requests' THEN 'request' ELSE new_kind END;
    now_ms bigint;
    latest_ms bigint;
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
    SELECT array_agg(DISTINCT sha256(convert_to(name, 'UTF8'))) INTO new_digests FROM unnest(new_names) AS given (name);
    IF (SELECT count(*) FROM erased WHERE tenant = owner AND is_named) + cardinality(new_digests) - (
        SELECT count(*) FROM erased
        WHERE tenant = owner AND is_named AND kind = digest_kind AND digest = ANY(new_digests)
    ) > most_names THEN
        RAISE EXCEPTION 'a tenant has at most % names erased at a time', most_names
            USING ERRCODE = 'program_limit_exceeded', CONSTRAINT = 'erased_names';
    END IF;
    now_ms := floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint;
    INSERT INTO erasures (erasure_id, tenant, kind, subject, names, requested_by, requested_at_ms)
    VALUES (new_id, owner, new_kind, encode(sha256(convert_to(array_to_string(new_names, chr(10)), 'UTF8')), 'hex'),
        new_names, new_requested_by, now_ms);
    INSERT INTO erased (tenant, kind, digest, before_ms, kept_until_ms)
    SELECT owner, digest_kind, one, now_ms, now_ms + kept_ms FROM unnest(new_digests) AS given (one)
    ON CONFLICT (tenant, kind, digest) DO UPDATE SET before_ms = greatest(erased.before_ms, excluded.before_ms),
        kept_until_ms = greatest(erased.kept_until_ms, excluded.kept_until_ms), is_named = true;
    PERFORM pg_advisory_xact_lock({ERASURE_LOCK});
    IF new_kind = 'conversation' THEN
        -- The broker's clock ordered the turns, and may be ahead. Those of recorders that were waited for are here.
        SELECT max(latest.submitted_at_ms) INTO latest_ms FROM unnest(new_names) AS given (name) CROSS JOIN LATERAL (
            SELECT submitted_at_ms FROM conversation_turns WHERE tenant = owner AND conversation_id = given.name
            ORDER BY submitted_at_ms DESC LIMIT 1
        ) AS latest;
        IF latest_ms >= now_ms THEN
            UPDATE erased SET before_ms = greatest(before_ms, latest_ms + 1)
            WHERE tenant = owner AND kind = digest_kind AND digest = ANY(new_digests);
        END IF;
    END IF;
    RETURN now_ms;
END $body$;
"""  # noqa: S608 - our own number

# As in revision 0024, with the tombstones.
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
        INSERT INTO erased (tenant, kind, digest, before_ms, kept_until_ms, is_named)
        SELECT owner, 'request', sha256(convert_to(id, 'UTF8')), mark.before_ms, mark.kept_until_ms, false
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

ASK = """
CREATE FUNCTION request_is_erased(wanted_request text) RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = public, pg_temp AS $body$
DECLARE
    owner text := acting_tenant();
BEGIN
    RETURN EXISTS (SELECT FROM erased
        WHERE tenant = owner AND kind = 'request' AND digest = sha256(convert_to(wanted_request, 'UTF8')));
END $body$;
REVOKE ALL ON FUNCTION request_is_erased(text) FROM PUBLIC;
"""


def upgrade() -> None:
    """Change two functions, add another; the rights on it are applied after the revisions."""
    execute(TABLE, REQUEST, STEP, ASK)

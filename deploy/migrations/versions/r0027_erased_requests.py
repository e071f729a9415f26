"""Tombstones of the requests that were erased with their conversation, and a way to ask for one: what is known of such
a request must not look as if its reply were to come."""

from deploy.migrations.statements import execute

revision = "0027"
down_revision = "0026"

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
COMMENT ON TABLE erased IS
    'tombstones: the recorder stores nothing of these that was submitted before, and gateways say that it was erased';
"""


def upgrade() -> None:
    """Change one function, add another; the rights on it are applied after the revisions."""
    execute(STEP, ASK)

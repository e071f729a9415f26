"""Documents that tenants upload, on their way into passages; erasures, and what the recorder must not store again."""

from deploy.migrations.statements import execute, part_tenants

revision = "0021"
down_revision = "0020"

# The id follows from collection and name: a document keeps it when it is stored again, and the names of collection
# and document cannot be read in a log or in a URL.
DOCUMENT_ID = """
CREATE FUNCTION document_id_of(collection bigint, name text) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE SET search_path = pg_catalog, pg_temp AS $body$
    SELECT 'doc-' || left(encode(sha256(convert_to(collection || ':' || name, 'UTF8')), 'hex'), 32)
$body$;
"""
TABLES = """
ALTER TABLE documents
    ADD COLUMN document_id text GENERATED ALWAYS AS (document_id_of(collection_id, source)) STORED,
    ADD COLUMN size_bytes bigint NOT NULL DEFAULT 0;
CREATE INDEX documents_by_id ON documents (collection_id, document_id);
COMMENT ON COLUMN documents.size_bytes IS 'of the file that it was made from; 0: not known';

CREATE TABLE embedders (
    singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    name text NOT NULL,
    dimensions integer NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE embedders IS 'the one of this deployment, as the process that ingests documents loaded it';

CREATE TABLE document_uploads (
    upload_id text PRIMARY KEY,
    tenant text NOT NULL,
    collection_id bigint,
    source text NOT NULL,
    document_id text GENERATED ALWAYS AS (document_id_of(collection_id, source)) STORED,
    format text NOT NULL,
    size_bytes bigint NOT NULL,
    state text NOT NULL DEFAULT 'receiving'
        CHECK (state IN ('receiving', 'pending', 'running', 'failed', 'done', 'gone')),
    reason text,
    has_content boolean NOT NULL DEFAULT true,
    attempts integer NOT NULL DEFAULT 0,
    token bigint NOT NULL DEFAULT 0,
    lease_until timestamptz,
    created_at_ms bigint NOT NULL,
    ended_at_ms bigint,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    -- A deleted collection leaves the row, so that its content is found and deleted.
    FOREIGN KEY (collection_id, tenant) REFERENCES collections (collection_id, tenant)
        ON DELETE SET NULL (collection_id)
);
CREATE UNIQUE INDEX document_uploads_live ON document_uploads (collection_id, source)
    WHERE state IN ('pending', 'running', 'failed');
CREATE INDEX document_uploads_by_id ON document_uploads (collection_id, document_id)
    WHERE state IN ('pending', 'running', 'failed');
CREATE INDEX document_uploads_waiting ON document_uploads (tenant, created_at_ms, upload_id)
    WHERE state IN ('pending', 'running');
CREATE INDEX document_uploads_by_tenant ON document_uploads (tenant);
COMMENT ON COLUMN document_uploads.has_content IS 'whether its bytes may be stored: they are named by upload_id';
COMMENT ON COLUMN document_uploads.token IS
    'counts those who took it: what one with an older token writes is refused';
COMMENT ON COLUMN document_uploads.lease_until IS
    'until then nobody else may take it; of one that is being received, until when its gateway may be at it';

CREATE TABLE erasures (
    erasure_id text PRIMARY KEY,
    tenant text NOT NULL,
    kind text NOT NULL CHECK (kind IN ('conversation', 'requests')),
    subject text NOT NULL,
    names text[] NOT NULL,
    uncached text[] NOT NULL DEFAULT '{}',
    state text NOT NULL DEFAULT 'erasing' CHECK (state IN ('erasing', 'done')),
    turns bigint NOT NULL DEFAULT 0,
    results bigint NOT NULL DEFAULT 0,
    requested_by text NOT NULL,
    requested_at_ms bigint NOT NULL,
    done_at_ms bigint,
    stepped_at timestamptz NOT NULL DEFAULT now(),
    recorded_at timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX erasures_newest ON erasures (tenant, requested_at_ms DESC, erasure_id DESC);
CREATE INDEX erasures_open ON erasures (stepped_at) WHERE state = 'erasing';
CREATE INDEX erasures_by_age ON erasures ((requested_at_ms + 0));
COMMENT ON TABLE erasures IS 'the audit of what was erased: who asked, when, how much; no name and no text';
COMMENT ON COLUMN erasures.subject IS 'SHA-256 of the names';
COMMENT ON COLUMN erasures.names IS 'what is still to be erased; empty when it is done';
COMMENT ON COLUMN erasures.uncached IS 'requests whose rows are gone, and whose cached replies may be there';

CREATE TABLE erased (
    tenant text NOT NULL,
    kind text NOT NULL,
    digest bytea NOT NULL,
    before_ms bigint NOT NULL,
    kept_until_ms bigint NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant, kind, digest)
);
CREATE INDEX erased_by_age ON erased ((kept_until_ms + 0));
COMMENT ON TABLE erased IS 'tombstones: the recorder stores nothing of these that was submitted before';
COMMENT ON COLUMN erased.digest IS 'SHA-256 of the name of a conversation, or of the id of a request';
"""

# It locks in the order in which the ingest process does: the collection first.
REMOVE_DOCUMENT = """
CREATE FUNCTION remove_document(wanted_name text, wanted_id text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $body$
DECLARE
    owner text := acting_tenant();
    id bigint;
    gone record;
    was_there boolean := false;
BEGIN
    SELECT collection_id INTO id FROM collections WHERE tenant = owner AND name = wanted_name FOR NO KEY UPDATE;
    IF id IS NULL THEN
        RETURN false;
    END IF;
    UPDATE document_uploads SET state = 'gone', source = '', reason = NULL, lease_until = NULL
    WHERE collection_id = id AND tenant = owner AND document_id = wanted_id
        AND state IN ('pending', 'running', 'failed');
    was_there := FOUND;
    FOR gone IN
        DELETE FROM documents WHERE collection_id = id AND tenant = owner AND document_id = wanted_id
        RETURNING source, passages
    LOOP
        was_there := true;
        EXECUTE 'DELETE FROM passages_' || id || ' WHERE collection_id = $1 AND source = $2' USING id, gone.source;
        UPDATE collections SET version = nextval('collection_versions'), documents = documents - 1,
            passages = passages - gone.passages, updated_at = now() WHERE collection_id = id;
    END LOOP;
    RETURN was_there;
END $body$;
"""

ERASURE_LOCK = 4_170_120_020
"""The recorder holds it shared from before it looks for tombstones until its rows are committed, an erasure holds it
alone while it writes its own: so no row of before slips in behind an erasure."""

ERASE = f"""
CREATE FUNCTION request_erasure(
    new_id text, new_kind text, new_names text[], new_requested_by text, kept_ms bigint
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $body$
DECLARE
    owner text := acting_tenant();
    now_ms bigint;
    until_ms bigint;
BEGIN
    IF cardinality(new_names) NOT BETWEEN 1 AND 1000 THEN
        RAISE EXCEPTION 'an erasure names 1 to 1000' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM pg_advisory_xact_lock({ERASURE_LOCK});
    now_ms := floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint;
    until_ms := now_ms;
    IF new_kind = 'conversation' THEN
        -- The broker's clock ordered the turns, and may be ahead.
        SELECT greatest(now_ms, coalesce(max(submitted_at_ms) + 1, 0)) INTO until_ms
        FROM conversation_turns WHERE tenant = owner AND conversation_id = ANY(new_names);
    END IF;
    INSERT INTO erasures (erasure_id, tenant, kind, subject, names, requested_by, requested_at_ms)
    VALUES (new_id, owner, new_kind, encode(sha256(convert_to(array_to_string(new_names, chr(10)), 'UTF8')), 'hex'),
        new_names, new_requested_by, now_ms);
    INSERT INTO erased (tenant, kind, digest, before_ms, kept_until_ms)
    SELECT DISTINCT owner, CASE new_kind WHEN 'requests' THEN 'request' ELSE new_kind END,
        sha256(convert_to(name, 'UTF8')), until_ms, now_ms + kept_ms
    FROM unnest(new_names) AS given (name)
    ON CONFLICT (tenant, kind, digest) DO UPDATE SET before_ms = greatest(erased.before_ms, excluded.before_ms),
        kept_until_ms = greatest(erased.kept_until_ms, excluded.kept_until_ms);
    RETURN now_ms;
END $body$;

-- A step removes rows and stores the ids of the requests whose cached replies are removed next. The next step begins
-- when those are removed. So the process that continues after a kill begins with the cached replies of the last step.
CREATE FUNCTION erase_some(wanted_id text, most integer) RETURNS text[]
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
        RETURN '{{}}';
    END IF;
    IF it.kind = 'conversation' THEN
        WITH old AS (
            DELETE FROM conversation_turns WHERE ctid = ANY (ARRAY(
                SELECT ctid FROM conversation_turns WHERE tenant = owner AND conversation_id = ANY(it.names) LIMIT most
                FOR UPDATE
            )) RETURNING request_id
        )
        SELECT coalesce(array_agg(DISTINCT request_id), '{{}}'), count(*) INTO ids, removed_turns FROM old;
    ELSE
        ids := it.names[1:most];
        it.names := it.names[most + 1:];
        DELETE FROM conversation_turns WHERE tenant = owner AND request_id = ANY(ids);
        GET DIAGNOSTICS removed_turns = ROW_COUNT;
    END IF;
    DELETE FROM results WHERE tenant = owner AND request_id = ANY(ids);
    GET DIAGNOSTICS removed = ROW_COUNT;
    IF cardinality(ids) = 0 THEN
        UPDATE erasures SET state = 'done', names = '{{}}', uncached = '{{}}', stepped_at = now(),
            done_at_ms = floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint
        WHERE erasure_id = wanted_id;
    ELSE
        UPDATE erasures SET names = it.names, uncached = ids, turns = turns + removed_turns,
            results = results + removed, stepped_at = now()
        WHERE erasure_id = wanted_id;
    END IF;
    RETURN ids;
END $body$;

CREATE FUNCTION unfinished_erasures(idle_s integer, most integer) RETURNS TABLE (tenant text, erasure_id text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER ROWS 10 SET search_path = public, pg_temp AS $body$
DECLARE
    acting_for text := current_setting('fairlane.tenant', true);
BEGIN
    PERFORM set_config('fairlane.tenant', '*', true);
    RETURN QUERY SELECT one.tenant, one.erasure_id FROM erasures AS one
        WHERE one.state = 'erasing' AND one.stepped_at < now() - make_interval(secs => idle_s)
        ORDER BY one.stepped_at LIMIT most;
    PERFORM set_config('fairlane.tenant', coalesce(acting_for, ''), true);
END $body$;
"""  # noqa: S608 - our own number

# As in revision 0017, with the new tables.
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
        ('erased', 'kept_until_ms + 0', 0)
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

FUNCTIONS = (
    "document_id_of(bigint, text)",
    "remove_document(text, text)",
    "request_erasure(text, text, text[], text, bigint)",
    "erase_some(text, integer)",
    "unfinished_erasures(integer, integer)",
)


def upgrade() -> None:
    """Create the tables and functions; documents are written anew, with their ids."""
    execute(DOCUMENT_ID, TABLES)
    for table in ("document_uploads", "erasures", "erased"):
        part_tenants(table)
    execute(REMOVE_DOCUMENT, ERASE, RETENTION)
    for function in FUNCTIONS:
        execute(f"REVOKE ALL ON FUNCTION {function} FROM PUBLIC")

"""Collections of documents: a partition of passages for each, made and dropped by functions, searched by meaning and by
words."""

from deploy.migrations.statements import execute, part_tenants

revision = "0004"
down_revision = "0003"

TABLES = """
CREATE SEQUENCE collection_versions;
CREATE SEQUENCE passage_numbers;

CREATE TABLE collections (
    collection_id bigint PRIMARY KEY GENERATED ALWAYS AS IDENTITY,
    tenant text NOT NULL,
    name text NOT NULL,
    embedder text NOT NULL,
    dimensions integer NOT NULL CHECK (dimensions BETWEEN 1 AND 4000),
    version bigint NOT NULL DEFAULT nextval('collection_versions'),
    documents bigint NOT NULL DEFAULT 0,
    passages bigint NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (tenant, name),
    -- So that what refers to a collection names its tenant as well.
    UNIQUE (collection_id, tenant)
);
COMMENT ON COLUMN collections.version IS 'from a sequence: no other state of any collection ever has the same';

CREATE TABLE documents (
    collection_id bigint NOT NULL,
    tenant text NOT NULL,
    source text NOT NULL,
    content_hash text NOT NULL,
    title text NOT NULL,
    passages bigint NOT NULL,
    stored_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (collection_id, source),
    -- Keys are checked without policies: by its number alone, a row could be put into another tenant's collection.
    FOREIGN KEY (collection_id, tenant) REFERENCES collections (collection_id, tenant) ON DELETE CASCADE
);

-- One partition per collection, so that its size alone decides what a search costs, its index holds nobody else's
-- passages, and deleting it is a DROP. The dimensions differ, so a partition checks those of its own vectors.
CREATE TABLE passages (
    collection_id bigint NOT NULL,
    number bigint NOT NULL DEFAULT nextval('passage_numbers'),
    tenant text NOT NULL,
    source text NOT NULL,
    ordinal integer NOT NULL,
    heading text NOT NULL,
    text text NOT NULL,
    tokens integer NOT NULL,
    embedding halfvec NOT NULL,
    PRIMARY KEY (collection_id, number),
    UNIQUE (collection_id, source, ordinal)
) PARTITION BY LIST (collection_id);
-- Long text moves out of the row before the vector does: a scan reads vectors only.
ALTER TABLE passages ALTER COLUMN embedding SET STORAGE MAIN;
"""

# The words of a collection's passages are in a table without policies that nobody but its owner may read, because
# Postgres uses no full-text index below a policy: its operator is not leakproof. The functions below ask for the
# collection first, and the policies of `collections` are forced on them too.
FUNCTIONS = r"""
CREATE FUNCTION acting_tenant() RETURNS text LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    found text := current_setting('fairlane.tenant', true);
BEGIN
    IF found IS NULL OR found !~ '^[a-z0-9][a-z0-9-]{0,38}$' THEN
        RAISE insufficient_privilege USING MESSAGE = 'this needs a transaction that acts for one tenant';
    END IF;
    RETURN found;
END $body$;

CREATE FUNCTION store_terms() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = public, pg_temp AS $body$
BEGIN
    EXECUTE 'INSERT INTO passage_terms_' || TG_ARGV[0]::bigint || ' SELECT number, '
        'setweight(to_tsvector(''english'', left(heading, 10000)), ''A'') '
        '|| to_tsvector(''english'', left(text, 100000)) FROM added';
    RETURN NULL;
END $body$;

CREATE FUNCTION remove_terms() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = public, pg_temp AS $body$
BEGIN
    EXECUTE 'DELETE FROM passage_terms_' || TG_ARGV[0]::bigint || ' WHERE number IN (SELECT number FROM removed)';
    RETURN NULL;
END $body$;

CREATE FUNCTION create_collection(new_name text, new_embedder text, new_dimensions integer) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $body$
DECLARE
    owner text := acting_tenant();
    id bigint;
    part text;
    terms text;
BEGIN
    INSERT INTO collections (tenant, name, embedder, dimensions)
    VALUES (owner, new_name, new_embedder, new_dimensions) RETURNING collection_id INTO id;
    part := 'passages_' || id;
    terms := 'passage_terms_' || id;
    EXECUTE 'CREATE TABLE ' || part || ' (LIKE passages INCLUDING DEFAULTS INCLUDING STORAGE INCLUDING INDEXES, '
        'CHECK (collection_id = ' || id || '), CHECK (tenant = ' || quote_literal(owner) || '), '
        'CHECK (vector_dims(embedding) = ' || new_dimensions || '))';
    EXECUTE 'CREATE TABLE ' || terms || ' (number bigint PRIMARY KEY, terms tsvector NOT NULL)';
    -- Without a list of pending entries, which every search would have to read through.
    EXECUTE 'CREATE INDEX ON ' || terms || ' USING gin (terms) WITH (fastupdate = off)';
    EXECUTE 'ALTER TABLE ' || terms || ' ENABLE ROW LEVEL SECURITY';
    EXECUTE 'CREATE TRIGGER store_terms AFTER INSERT ON ' || part || ' REFERENCING NEW TABLE AS added '
        'FOR EACH STATEMENT EXECUTE FUNCTION store_terms(' || id || ')';
    EXECUTE 'CREATE TRIGGER remove_terms AFTER DELETE ON ' || part || ' REFERENCING OLD TABLE AS removed '
        'FOR EACH STATEMENT EXECUTE FUNCTION remove_terms(' || id || ')';
    EXECUTE 'ALTER TABLE ' || part || ' ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY';
    EXECUTE 'CREATE POLICY own_rows ON ' || part
        || ' USING (tenant = (SELECT current_setting(''fairlane.tenant'', true)))';
    EXECUTE 'CREATE POLICY trusted_service ON ' || part || ' TO CURRENT_USER '
        'USING ((SELECT current_setting(''fairlane.tenant'', true)) = ''*'')';
    -- Attached, not created as a partition: that would wait for whoever reads the parent, and hold up who comes next.
    EXECUTE 'ALTER TABLE passages ATTACH PARTITION ' || part || ' FOR VALUES IN (' || id || ')';
    RETURN id;
END $body$;

CREATE FUNCTION delete_collection(old_name text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $body$
DECLARE
    id bigint;
BEGIN
    DELETE FROM collections WHERE tenant = acting_tenant() AND name = old_name RETURNING collection_id INTO id;
    IF id IS NULL THEN
        RETURN false;
    END IF;
    EXECUTE 'DROP TABLE passages_' || id || ', passage_terms_' || id;
    RETURN true;
END $body$;

CREATE FUNCTION index_collection(wanted_name text, at_least bigint) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp
-- One worker: no shared memory, of which containers have little, and the other cores stay with the queries.
SET max_parallel_maintenance_workers = 0 SET maintenance_work_mem = '256MB' AS $body$
DECLARE
    it collections;
BEGIN
    SELECT * INTO it FROM collections WHERE tenant = acting_tenant() AND name = wanted_name FOR NO KEY UPDATE;
    IF it.collection_id IS NULL OR it.passages < at_least
            OR to_regclass('public.passages_' || it.collection_id || '_nearest') IS NOT NULL THEN
        RETURN false;
    END IF;
    EXECUTE 'CREATE INDEX passages_' || it.collection_id || '_nearest ON passages_' || it.collection_id
        || ' USING hnsw ((embedding::halfvec(' || it.dimensions || ')) halfvec_ip_ops) '
        'WITH (m = 16, ef_construction = 64)';
    -- Without it the policy looks as if it left few rows, of which all would be read rather than the index.
    EXECUTE 'ANALYZE passages_' || it.collection_id || ' (tenant)';
    RETURN true;
END $body$;

-- The passages that hold words of the query, best first. Postgres ranks without regard to how rare a word is, and
-- reads the words of every match for it. So the rarity of what they share decides (the weight of Robertson and Sparck
-- Jones, JASIS 1976), and the rank of Postgres what that leaves equal. A word that is in a thousand passages says so
-- little that its reading is not worth the time, unless there is no other.
CREATE FUNCTION match_passages(wanted_collection bigint, query text, wanted integer)
RETURNS TABLE (number bigint, score double precision)
LANGUAGE plpgsql STABLE SECURITY DEFINER ROWS 20 SET search_path = public, pg_temp
SET enable_seqscan = off AS $body$
DECLARE
    total bigint;
    words tsquery[];
BEGIN
    -- Its tenant by name: the policies are silent where the owner is a superuser.
    SELECT passages INTO total FROM collections
    WHERE collection_id = wanted_collection AND tenant = current_setting('fairlane.tenant', true);
    SELECT array_agg((quote || replace(replace(lexeme, '\', '\\'), quote, quote || quote) || quote)::tsquery) INTO words
    FROM (VALUES ('''')) AS q (quote), LATERAL (
        SELECT lexeme FROM unnest(to_tsvector('english', query)) ORDER BY length(lexeme) DESC LIMIT 24
    ) AS longest;
    IF total IS NULL OR words IS NULL THEN
        RETURN;
    END IF;
    RETURN QUERY EXECUTE '
        WITH hits AS MATERIALIZED (
            SELECT numbers, cardinality(numbers) AS holding FROM unnest($1) AS word, LATERAL (
                SELECT array_agg(held.number) AS numbers FROM (
                    SELECT t.number FROM passage_terms_' || wanted_collection || ' AS t WHERE t.terms @@ word LIMIT 1000
                ) AS held
            ) AS hit WHERE numbers IS NOT NULL
        ), weights AS (
            SELECT numbers, ln(1 + $2 / holding::float8) AS weight FROM hits WHERE holding < 1000
            UNION ALL SELECT numbers, 0 FROM hits WHERE NOT EXISTS (SELECT FROM hits WHERE holding < 1000)
        ), best AS (
            SELECT unnest(numbers) AS number, sum(weight) AS weight FROM weights
            GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 4 * $3
        )
        SELECT best.number, weight + ts_rank(t.terms, $4, 1) AS score
        FROM best JOIN passage_terms_' || wanted_collection || ' AS t ON t.number = best.number
        ORDER BY score DESC, best.number LIMIT $3'
    USING words, total, wanted, array_to_string(words, ' | ')::tsquery;
END $body$;
"""

ENTRIES = (
    "create_collection(text, text, integer)",
    "delete_collection(text)",
    "index_collection(text, bigint)",
    "match_passages(bigint, text, integer)",
)
INTERNAL = ("acting_tenant()", "store_terms()", "remove_terms()")


def upgrade() -> None:
    """Create everything; partitions come and go by function."""
    execute(TABLES)
    for table in ("collections", "documents", "passages"):
        part_tenants(table)
    execute(FUNCTIONS)
    for function in (*ENTRIES, *INTERNAL):
        execute(f"REVOKE ALL ON FUNCTION {function} FROM PUBLIC")

"""Rights come from `fairlane_server/postgres/rights.py`, which is applied after the revisions: what earlier revisions
granted is taken back, and the partition of a new collection gets the rights of `passages`."""

from deploy.migrations.statements import execute

revision = "0016"
down_revision = "0015"

# The rights of a partition are those of its parent, at the time when it is made and whenever rights are applied: so the
# function names no role.
FUNCTION = """
CREATE OR REPLACE FUNCTION create_collection(new_name text, new_embedder text, new_dimensions integer) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = public, pg_temp AS $body$
DECLARE
    owner text := acting_tenant();
    id bigint;
    part text;
    terms text;
    right_of_parent text;
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
    FOR right_of_parent IN
        SELECT format('%s ON %I TO %s', held.privilege_type, part, held.grantee::regrole)
        FROM pg_class AS parent, aclexplode(parent.relacl) AS held
        WHERE parent.oid = 'public.passages'::regclass AND held.grantee NOT IN (0, parent.relowner)
        UNION ALL
        SELECT format('%s (%I) ON %I TO %s', held.privilege_type, field.attname, part, held.grantee::regrole)
        FROM pg_attribute AS field, aclexplode(field.attacl) AS held
        WHERE field.attrelid = 'public.passages'::regclass AND NOT field.attisdropped AND held.grantee <> 0
    LOOP
        EXECUTE 'GRANT ' || right_of_parent;
    END LOOP;
    -- Attached, not created as a partition: that would wait for whoever reads the parent, and hold up who comes next.
    EXECUTE 'ALTER TABLE passages ATTACH PARTITION ' || part || ' FOR VALUES IN (' || id || ')';
    RETURN id;
END $body$;
"""

# Also from roles that are no service's now. PUBLIC has none of these rights.
TAKE_BACK = """
DO $body$
DECLARE
    given record;
BEGIN
    FOR given IN
        WITH ours AS (
            SELECT CASE relkind WHEN 'S' THEN 'SEQUENCE ' ELSE 'TABLE ' END || oid::regclass AS object, relacl AS acl,
                relowner AS owner
            FROM pg_class WHERE relnamespace = 'public'::regnamespace
            UNION ALL
            SELECT 'TABLE ' || attrelid::regclass, attacl, relowner
            FROM pg_attribute JOIN pg_class AS c ON c.oid = attrelid WHERE relnamespace = 'public'::regnamespace
            UNION ALL
            SELECT 'FUNCTION ' || oid::regprocedure, proacl, proowner
            FROM pg_proc WHERE pronamespace = 'public'::regnamespace
        )
        SELECT DISTINCT object, held.grantee::regrole AS role FROM ours, aclexplode(acl) AS held
        WHERE held.grantee NOT IN (0, owner) AND pg_get_userbyid(owner) = current_user
    LOOP
        EXECUTE 'REVOKE ALL ON ' || given.object || ' FROM ' || given.role || ' CASCADE';
    END LOOP;
    FOR given IN
        SELECT polrelid::regclass AS object FROM pg_policy JOIN pg_class AS c ON c.oid = polrelid
        WHERE polname = 'trusted_service' AND relnamespace = 'public'::regnamespace
            AND pg_get_userbyid(relowner) = current_user
    LOOP
        EXECUTE 'ALTER POLICY trusted_service ON ' || given.object || ' TO CURRENT_USER';
    END LOOP;
END $body$;
"""


def upgrade() -> None:
    """Replace the function, and take back every right but the owner's, also that to act for all tenants."""
    execute(FUNCTION, TAKE_BACK)

"""Tenants whose identities are all refused, and what is left of a tenant under a name that is to be given again."""

from deploy.migrations.statements import execute, part_tenants

revision = "0023"
down_revision = "0022"

TABLE = """
CREATE TABLE barred_tenants (
    tenant text PRIMARY KEY,
    barred_at timestamptz NOT NULL DEFAULT now()
);
COMMENT ON TABLE barred_tenants IS 'their keys, tokens and sessions are refused; a removed tenant is one of them';
"""

# As in revision 0022 and in revision 0020, with the barred tenants.
FUNCTIONS = """
CREATE OR REPLACE FUNCTION find_api_key(wanted_id text, shown_sha256 bytea)
RETURNS TABLE (
    tenant text, role text, scopes text[], secret_sha256 bytea, subject text,
    expires_at_ms bigint, is_revoked boolean, is_user_disabled boolean, grants text[]
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER ROWS 1 SET search_path = public, pg_temp AS $body$
DECLARE
    acting_for text := current_setting('fairlane.tenant', true);
BEGIN
    PERFORM set_config('fairlane.tenant', '*', true);
    -- A row that another instance is updating is skipped: its time is as good.
    UPDATE api_keys AS used SET last_used_at = now() WHERE used.key_id = (
        SELECT k.key_id FROM api_keys AS k
        WHERE k.key_id = wanted_id AND k.secret_sha256 = shown_sha256
            AND k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > now())
            AND (k.last_used_at IS NULL OR k.last_used_at < now() - interval '1 minute')
        FOR UPDATE SKIP LOCKED
    );
    RETURN QUERY
        SELECT k.tenant, k.role, k.scopes, k.secret_sha256, k.subject,
            floor(extract(epoch FROM k.expires_at) * 1000)::bigint,
            k.revoked_at IS NOT NULL OR EXISTS (SELECT FROM barred_tenants AS b WHERE b.tenant = k.tenant),
            coalesce(u.disabled, false), k.grants
        FROM api_keys AS k LEFT JOIN users AS u ON u.tenant = k.tenant AND u.subject = k.subject
        WHERE k.key_id = wanted_id AND k.secret_sha256 = shown_sha256;
    PERFORM set_config('fairlane.tenant', coalesce(acting_for, ''), true);
END $body$;

CREATE OR REPLACE FUNCTION find_user(wanted_tenant text, wanted_subject text)
RETURNS TABLE (role text, is_disabled boolean, grants text[])
LANGUAGE plpgsql VOLATILE SECURITY DEFINER ROWS 1 SET search_path = public, pg_temp AS $body$
DECLARE
    acting_for text := current_setting('fairlane.tenant', true);
    is_barred boolean;
BEGIN
    PERFORM set_config('fairlane.tenant', '*', true);
    is_barred := EXISTS (SELECT FROM barred_tenants AS b WHERE b.tenant = wanted_tenant);
    RETURN QUERY
        SELECT u.role, u.disabled OR is_barred, u.grants FROM users AS u
        WHERE u.tenant = wanted_tenant AND u.subject = wanted_subject;
    -- Most users have no row: an issuer vouches for them.
    IF is_barred AND NOT FOUND THEN
        RETURN QUERY SELECT 'viewer'::text, true, '{}'::text[];
    END IF;
    PERFORM set_config('fairlane.tenant', coalesce(acting_for, ''), true);
END $body$;

-- Names of tables alone: nothing of the rows. A table of tenants that comes later counts by itself, once its policies
-- are there; so it needs an index that begins with the tenant. Those of passages, documents and parts of jobs have
-- none, and no row without one in a table that is asked.
CREATE FUNCTION tenant_remains(wanted text) RETURNS text[]
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = public, pg_temp AS $body$
DECLARE
    acting_for text := current_setting('fairlane.tenant', true);
    found text[] := '{}';
    relation text;
    is_there boolean;
BEGIN
    PERFORM set_config('fairlane.tenant', '*', true);
    FOR relation IN
        SELECT c.relname::text FROM pg_policy AS p JOIN pg_class AS c ON c.oid = p.polrelid
        WHERE p.polname = 'own_rows' AND c.relnamespace = 'public'::regnamespace AND NOT c.relispartition
            AND c.relname NOT IN ('passages', 'documents', 'backfill_chunks')
            -- What is published; who administered it; keys, of which those count that are valid.
            AND c.relname NOT IN ('tenants', 'admin_events', 'api_keys')
        ORDER BY c.relname
    LOOP
        EXECUTE format('SELECT EXISTS (SELECT FROM %I WHERE tenant = $1)', relation) INTO is_there USING wanted;
        IF is_there THEN
            found := found || relation;
        END IF;
    END LOOP;
    IF EXISTS (
        SELECT FROM api_keys AS k
        WHERE k.tenant = wanted AND k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > now())
    ) THEN
        found := found || 'api_keys'::text;
    END IF;
    PERFORM set_config('fairlane.tenant', coalesce(acting_for, ''), true);
    RETURN found;
END $body$;
REVOKE ALL ON FUNCTION tenant_remains(text) FROM PUBLIC;
"""


def upgrade() -> None:
    """Create the table and the function, replace two functions."""
    execute(TABLE)
    part_tenants("barred_tenants")
    execute(FUNCTIONS)

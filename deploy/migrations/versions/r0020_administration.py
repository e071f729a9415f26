"""Identities of the deployment, grants, and one audit of everything that is administered; tenants name what manages
them."""

from deploy.migrations.statements import execute

revision = "0020"
down_revision = "0019"

# With defaults, so that services of the revision before can go on while they are replaced.
IDENTITIES = """
ALTER TABLE users ADD COLUMN grants text[] NOT NULL DEFAULT '{}';
ALTER TABLE api_keys ADD COLUMN grants text[] NOT NULL DEFAULT '{}';
ALTER TABLE users ADD CONSTRAINT users_of_deployment CHECK (
    CASE tenant WHEN '_deployment' THEN role <> 'tenant' AND grants <@ ARRAY['dead_letters:payload']
    ELSE grants = '{}' END
);
ALTER TABLE api_keys ADD CONSTRAINT api_keys_of_deployment CHECK (
    CASE tenant WHEN '_deployment' THEN role <> 'tenant' AND grants <@ ARRAY['dead_letters:payload']
    ELSE grants = '{}' END
);
ALTER TABLE api_keys DROP CONSTRAINT api_keys_scopes_check, ADD CONSTRAINT api_keys_scopes_check CHECK (
    scopes <@ CASE tenant WHEN '_deployment' THEN ARRAY['loads', 'tenants', 'dead_letters', 'identities', 'audit']
    ELSE ARRAY['inference', 'results', 'files', 'batches'] END
);
COMMENT ON COLUMN users.tenant IS 'or _deployment: the user belongs to no tenant';
COMMENT ON COLUMN api_keys.tenant IS 'or _deployment: the key belongs to no tenant';
COMMENT ON COLUMN api_keys.grants IS 'permissions besides those of the role';
"""

# Replaced as a whole: the columns of a result cannot be changed. The order of the old columns stays.
FUNCTIONS = """
DROP FUNCTION find_api_key(text, bytea);
DROP FUNCTION find_user(text, text);
CREATE FUNCTION find_api_key(wanted_id text, shown_sha256 bytea)
RETURNS TABLE (
    tenant text, role text, scopes text[], secret_sha256 bytea, subject text,
    expires_at_ms bigint, is_revoked boolean, is_user_disabled boolean, grants text[]
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER ROWS 1 SET search_path = public, pg_temp AS $body$
DECLARE
    acting_for text := current_setting('fairlane.tenant', true);
BEGIN
    PERFORM set_config('fairlane.tenant', '*', true);
    -- Only for a caller with the right secret. A row that another instance is updating is skipped: its time is as good.
    UPDATE api_keys AS used SET last_used_at = now() WHERE used.key_id = (
        SELECT k.key_id FROM api_keys AS k
        WHERE k.key_id = wanted_id AND k.secret_sha256 = shown_sha256
            AND k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > now())
            AND (k.last_used_at IS NULL OR k.last_used_at < now() - interval '1 minute')
        FOR UPDATE SKIP LOCKED
    );
    RETURN QUERY
        SELECT k.tenant, k.role, k.scopes, k.secret_sha256, k.subject,
            floor(extract(epoch FROM k.expires_at) * 1000)::bigint, k.revoked_at IS NOT NULL,
            coalesce(u.disabled, false), k.grants
        FROM api_keys AS k LEFT JOIN users AS u ON u.tenant = k.tenant AND u.subject = k.subject
        WHERE k.key_id = wanted_id;
    PERFORM set_config('fairlane.tenant', coalesce(acting_for, ''), true);
END $body$;
CREATE FUNCTION find_user(wanted_tenant text, wanted_subject text)
RETURNS TABLE (role text, is_disabled boolean, grants text[])
LANGUAGE plpgsql VOLATILE SECURITY DEFINER ROWS 1 SET search_path = public, pg_temp AS $body$
DECLARE
    acting_for text := current_setting('fairlane.tenant', true);
BEGIN
    PERFORM set_config('fairlane.tenant', '*', true);
    RETURN QUERY
        SELECT u.role, u.disabled, u.grants FROM users AS u
        WHERE u.tenant = wanted_tenant AND u.subject = wanted_subject;
    PERFORM set_config('fairlane.tenant', coalesce(acting_for, ''), true);
END $body$;
REVOKE ALL ON FUNCTION find_api_key(text, bytea) FROM PUBLIC;
REVOKE ALL ON FUNCTION find_user(text, text) FROM PUBLIC;
"""

AUDIT = """
ALTER TABLE identity_events RENAME TO admin_events;
ALTER TABLE admin_events RENAME COLUMN operator TO author;
ALTER TABLE admin_events DROP CONSTRAINT identity_events_event_check,
    ADD CONSTRAINT admin_events_event_check CHECK (event ~ '^[a-z_]{1,60}$'),
    ADD COLUMN outcome text NOT NULL DEFAULT 'done' CHECK (outcome IN ('started', 'done', 'failed')),
    ADD COLUMN of_event bigint;
ALTER INDEX identity_events_by_time RENAME TO admin_events_by_time;
COMMENT ON COLUMN admin_events.tenant IS 'whom it concerns; _deployment: not one tenant';
COMMENT ON COLUMN admin_events.author IS 'user and machine of a command, as it says itself, or the caller of the API';
COMMENT ON COLUMN admin_events.outcome IS
    'started: recorded before a change outside of Postgres, whose end is a row of its own';
COMMENT ON COLUMN admin_events.of_event IS 'event_id of the row with outcome started that this one ends';
"""
TENANTS = "ALTER TABLE tenants ADD COLUMN managed_by text NOT NULL DEFAULT 'file'"


def upgrade() -> None:
    """Change everything; the rights on the new functions are applied after the revisions."""
    execute(IDENTITIES, FUNCTIONS, AUDIT, TENANTS)

"""A key is found by its id and the hash of its secret: no caller of the function gets a hash that it does not have."""

from deploy.migrations.statements import execute

revision = "0022"
down_revision = "0021"

# The column stays, so that services of the revision before can go on while they are replaced.
FUNCTION = """
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
            floor(extract(epoch FROM k.expires_at) * 1000)::bigint, k.revoked_at IS NOT NULL,
            coalesce(u.disabled, false), k.grants
        FROM api_keys AS k LEFT JOIN users AS u ON u.tenant = k.tenant AND u.subject = k.subject
        WHERE k.key_id = wanted_id AND k.secret_sha256 = shown_sha256;
    PERFORM set_config('fairlane.tenant', coalesce(acting_for, ''), true);
END $body$;
"""


def upgrade() -> None:
    """Replace the function; its rights stay."""
    execute(FUNCTION)

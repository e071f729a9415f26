"""Who may use the gateway: users and API keys. No service reads them: the gateway asks for one row by function."""

from deploy.migrations.statements import execute, part_tenants

revision = "0007"
down_revision = "0006"

TABLES = """
CREATE TABLE users (
    tenant text NOT NULL,
    subject text NOT NULL CHECK (length(subject) BETWEEN 1 AND 255),
    role text NOT NULL CHECK (role IN ('admin', 'operator', 'tenant', 'viewer')),
    disabled boolean NOT NULL DEFAULT false,
    created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant, subject)
);
COMMENT ON COLUMN users.subject IS '`sub` of the tokens that this user shows';
COMMENT ON COLUMN users.role IS 'instead of the role that the tokens name';

CREATE TABLE api_keys (
    key_id text PRIMARY KEY CHECK (key_id ~ '^[0-9a-f]{16}$'),
    tenant text NOT NULL,
    name text NOT NULL CHECK (length(name) BETWEEN 1 AND 100),
    role text NOT NULL CHECK (role IN ('admin', 'operator', 'tenant', 'viewer')),
    scopes text[] NOT NULL CHECK (scopes <@ ARRAY['inference', 'results', 'files', 'batches']),
    secret_sha256 bytea NOT NULL CHECK (octet_length(secret_sha256) = 32),
    subject text,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz,
    revoked_at timestamptz,
    last_used_at timestamptz,
    rotated_from text,
    UNIQUE (key_id, tenant),
    -- Keys are checked without policies: by its id alone, a row could name one of another tenant.
    FOREIGN KEY (rotated_from, tenant) REFERENCES api_keys (key_id, tenant),
    FOREIGN KEY (tenant, subject) REFERENCES users (tenant, subject)
);
CREATE INDEX api_keys_by_tenant ON api_keys (tenant, created_at);
COMMENT ON COLUMN api_keys.secret_sha256 IS 'of 256 random bits, so that no guess is worth a slow hash';
COMMENT ON COLUMN api_keys.subject IS 'the user it was made for, if anybody';
COMMENT ON COLUMN api_keys.last_used_at IS 'to the minute';
"""

# Whoever shows a key is not known yet, so there is no tenant to act for: the functions act for all, and give one row to
# whoever names it. There is no way to list keys or users with the rights of a service.
# What the caller acts for is put back by hand: a function with a SET clause for it could be made by a superuser alone.
# After an error there is nothing to put back, since the transaction is over.
FUNCTIONS = """
CREATE FUNCTION find_api_key(wanted_id text, shown_sha256 bytea)
RETURNS TABLE (
    tenant text, role text, scopes text[], secret_sha256 bytea, subject text,
    expires_at_ms bigint, is_revoked boolean, is_user_disabled boolean
)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER ROWS 1 SET search_path = public, pg_temp AS $body$
DECLARE
    acting_for text := current_setting('fairlane.tenant', true);
BEGIN
    PERFORM set_config('fairlane.tenant', '*', true);
    -- Of whoever has the secret alone, and where another instance writes it just now, that one's time will do.
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
            coalesce(u.disabled, false)
        FROM api_keys AS k LEFT JOIN users AS u ON u.tenant = k.tenant AND u.subject = k.subject
        WHERE k.key_id = wanted_id;
    PERFORM set_config('fairlane.tenant', coalesce(acting_for, ''), true);
END $body$;

CREATE FUNCTION find_user(wanted_tenant text, wanted_subject text)
RETURNS TABLE (role text, is_disabled boolean)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER ROWS 1 SET search_path = public, pg_temp AS $body$
DECLARE
    acting_for text := current_setting('fairlane.tenant', true);
BEGIN
    PERFORM set_config('fairlane.tenant', '*', true);
    RETURN QUERY
        SELECT u.role, u.disabled FROM users AS u WHERE u.tenant = wanted_tenant AND u.subject = wanted_subject;
    PERFORM set_config('fairlane.tenant', coalesce(acting_for, ''), true);
END $body$;
"""
ENTRIES = ("find_api_key(text, bytea)", "find_user(text, text)")


def upgrade() -> None:
    """Create everything; keys and users are made by the owner alone (`fairlane keys`)."""
    execute(TABLES)
    for table in ("users", "api_keys"):
        part_tenants(table)
    execute(FUNCTIONS)
    for function in ENTRIES:
        execute(f"REVOKE ALL ON FUNCTION {function} FROM PUBLIC")

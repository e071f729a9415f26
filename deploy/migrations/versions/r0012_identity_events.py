"""What was done to keys and users, and by whom: written in the transaction that does it."""

from deploy.migrations.statements import execute, part_tenants

revision = "0012"
down_revision = "0011"

TABLE = """
CREATE TABLE identity_events (
    event_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    occurred_at timestamptz NOT NULL DEFAULT now(),
    tenant text NOT NULL,
    event text NOT NULL CHECK (event IN ('api_key_created', 'api_key_rotated', 'api_key_revoked', 'user_set')),
    key_id text,
    subject text,
    database_role text NOT NULL DEFAULT session_user,
    operator text NOT NULL,
    details jsonb NOT NULL
);
CREATE INDEX identity_events_by_time ON identity_events (tenant, occurred_at DESC);
COMMENT ON COLUMN identity_events.database_role IS 'who did it, as Postgres knows';
COMMENT ON COLUMN identity_events.operator IS 'user and machine of the command, as it says itself';
COMMENT ON COLUMN identity_events.details IS 'what was said of the key or the user; never a secret or its hash';
"""


def upgrade() -> None:
    """Create the table, which is the owner's alone, as are keys and users."""
    execute(TABLE)
    part_tenants("identity_events")

"""Rollouts: the state of one in every change of a route, indices for the evidence about its arms, and the scope of keys
that may change models."""

from deploy.migrations.statements import execute

revision = "0030"
down_revision = "0029"

# Both indices have rows of rollouts alone. They are as wide as the evidence needs: a step may have millions.
STATEMENTS = (
    "ALTER TABLE model_routes ADD COLUMN rollout jsonb",
    """
    CREATE INDEX results_of_rollouts ON results (model, coalesce(admitted_at_ms, submitted_at_ms)) INCLUDE (
        arm, model_version, outcome, code, cost_nanos, currency, source_topic, submitted_at_ms, admitted_at_ms,
        dispatched_at_ms, received_at_ms, engine_finished_at_ms, replied_at_ms, replies_seen
    ) WHERE arm IN ('rollout-candidate', 'rollout-control') AND cache_use IS NULL
    """,
    """
    CREATE INDEX audit_logs_of_rollouts ON audit_logs (occurred_at_ms)
    WHERE inputs ->> 'arm' IN ('rollout-candidate', 'rollout-control')
    """,
    """
    ALTER TABLE api_keys DROP CONSTRAINT api_keys_scopes_check, ADD CONSTRAINT api_keys_scopes_check CHECK (
        scopes <@ CASE tenant
            WHEN '_deployment' THEN ARRAY['loads', 'models', 'tenants', 'dead_letters', 'identities', 'audit']
            ELSE ARRAY['inference', 'results', 'files', 'batches'] END
    )
    """,
)


def upgrade() -> None:
    """Add the column and the indices, and allow the scope."""
    execute(*STATEMENTS)

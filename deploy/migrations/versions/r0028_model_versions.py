"""Versions of models, every change of their routes, and the arm of a result."""

from deploy.migrations.statements import execute

revision = "0028"
down_revision = "0027"

# A recorder of the revision before goes on writing its table of models, which a later revision drops.
STATEMENTS = (
    """
    CREATE TABLE model_versions (
        reference text PRIMARY KEY,
        model text NOT NULL,
        version text NOT NULL,
        pool text NOT NULL,
        engine text NOT NULL,
        tasks jsonb NOT NULL,
        path text NOT NULL,
        max_context_tokens bigint NOT NULL,
        max_output_tokens bigint NOT NULL,
        max_batch_size bigint NOT NULL,
        max_batch_tokens bigint NOT NULL,
        dedicated_pools jsonb NOT NULL,
        smaller_model text,
        dtype text,
        quantization text,
        tensor_parallel_size bigint NOT NULL,
        artifact_digest text,
        source text,
        metrics jsonb NOT NULL DEFAULT '[]',
        signature text,
        requirements jsonb NOT NULL DEFAULT '[]',
        registered_at_ms bigint NOT NULL DEFAULT 0,
        registered_by text,
        managed_by text NOT NULL DEFAULT 'file',
        recorded_at timestamptz NOT NULL DEFAULT now()
    )
    """,
    "COMMENT ON COLUMN model_versions.reference IS 'the key of the record: the model, a slash and the version'",
    """
    INSERT INTO model_versions (reference, model, version, pool, engine, tasks, path, max_context_tokens,
        max_output_tokens, max_batch_size, max_batch_tokens, dedicated_pools, smaller_model, dtype, quantization,
        tensor_parallel_size, recorded_at)
    SELECT model, model, version, pool, engine, tasks, path, max_context_tokens, max_output_tokens, max_batch_size,
        max_batch_tokens, dedicated_pools, smaller_model, dtype, quantization, tensor_parallel_size, recorded_at
    FROM models
    """,
    """
    CREATE TABLE model_routes (
        model text NOT NULL,
        revision bigint NOT NULL,
        aliases jsonb NOT NULL,
        previous jsonb NOT NULL,
        rules jsonb NOT NULL,
        stopped jsonb NOT NULL,
        changed_at_ms bigint NOT NULL,
        changed_by text NOT NULL,
        reason text NOT NULL,
        managed_by text NOT NULL,
        log_topic text NOT NULL,
        log_partition bigint NOT NULL,
        log_offset bigint NOT NULL,
        recorded_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (log_topic, log_partition, log_offset)
    )
    """,
    "COMMENT ON TABLE model_routes IS 'every change of a route; the revision 0 takes it back'",
    "CREATE INDEX model_routes_by_model ON model_routes (model, log_offset DESC)",
    "ALTER TABLE results ADD COLUMN arm text",
)


def upgrade() -> None:
    """Add the two tables and the column."""
    execute(*STATEMENTS)

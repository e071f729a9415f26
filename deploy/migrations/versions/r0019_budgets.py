"""Budgets of tenants, the budget that a reply is about, and costs by the hour, against which an hour is compared."""

from deploy.migrations.statements import execute, part_tenants

revision = "0019"
down_revision = "0018"

# With a default, so that a recorder of the revision before can go on writing while services are replaced.
COLUMNS = (
    "ALTER TABLE tenants ADD COLUMN budgets jsonb NOT NULL DEFAULT '[]'",
    "ALTER TABLE results ADD COLUMN budget jsonb",
    "ALTER TABLE backfill_jobs ADD COLUMN reserved_nanos bigint, ADD COLUMN reserved_currency text",
    "ALTER TABLE backfill_jobs ADD COLUMN reserved_for text",
    "COMMENT ON COLUMN backfill_jobs.reserved_nanos IS 'estimated cost of the whole job; null: no budgets'",
    "COMMENT ON COLUMN backfill_jobs.reserved_for IS 'the caller whose budgets it counts in too'",
    "COMMENT ON COLUMN results.budget IS 'the soft budget that was reached, or the hard one it was refused for'",
)

# Fill factor: the row of this hour is updated by every batch of the recorder, and should stay on its page.
TABLE = """
CREATE TABLE usage_hourly (
    tenant text NOT NULL,
    hour bigint NOT NULL,
    currency text NOT NULL,
    requests numeric NOT NULL,
    cost_nanos numeric NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (tenant, hour, currency)
) WITH (fillfactor = 70);
CREATE INDEX usage_hourly_by_age ON usage_hourly ((hour * 3600000));
COMMENT ON TABLE usage_hourly IS 'costs of usage by hour since the epoch, counted by triggers of usage';
"""

SUMS = """
    SELECT tenant, least(greatest(occurred_at_ms / 3600000, 0), 70389527) AS hour, currency,
        count(*) AS requests, sum(cost_nanos) AS cost_nanos
    FROM {rows} WHERE cost_nanos IS NOT NULL AND currency IS NOT NULL GROUP BY 1, 2, 3 ORDER BY 1, 2, 3
"""

# As the daily sums: in the transaction of the rows, those that were inserted, with the rights of the tables' owner.
FUNCTIONS = f"""
CREATE FUNCTION count_usage_hourly() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = public, pg_temp AS $body$
BEGIN
    INSERT INTO usage_hourly AS known (tenant, hour, currency, requests, cost_nanos) {SUMS.format(rows="added")}
    ON CONFLICT (tenant, hour, currency) DO UPDATE SET requests = known.requests + excluded.requests,
        cost_nanos = known.cost_nanos + excluded.cost_nanos, recorded_at = now();
    RETURN NULL;
END $body$;

CREATE FUNCTION uncount_usage_hourly() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = public, pg_temp AS $body$
DECLARE
    acting_for text := current_setting('fairlane.tenant', true);
BEGIN
    PERFORM set_config('fairlane.tenant', '*', true);
    UPDATE usage_hourly AS known SET requests = known.requests - gone.requests,
        cost_nanos = known.cost_nanos - gone.cost_nanos, recorded_at = now()
    FROM ({SUMS.format(rows="usage")}) AS gone
    WHERE (known.tenant, known.hour, known.currency) = (gone.tenant, gone.hour, gone.currency);
    DELETE FROM usage_hourly WHERE requests <= 0;
    PERFORM set_config('fairlane.tenant', coalesce(acting_for, ''), true);
    RETURN NULL;
END $body$;

CREATE TRIGGER usage_counted_hourly AFTER INSERT ON usage REFERENCING NEW TABLE AS added
FOR EACH STATEMENT EXECUTE FUNCTION count_usage_hourly();
CREATE TRIGGER usage_uncounted_hourly BEFORE TRUNCATE ON usage
FOR EACH STATEMENT EXECUTE FUNCTION uncount_usage_hourly();
"""  # noqa: S608 - our own names

# As in revision 0017, with the new table.
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
        ('conversation_turns', 'replied_at_ms', 0)
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


def upgrade() -> None:
    """Add the columns and the sums, of the rows that are there too; nobody writes to usage meanwhile."""
    execute(*COLUMNS, TABLE)
    part_tenants("usage_hourly")
    execute(
        "SELECT set_config('fairlane.tenant', '*', true)",
        f"INSERT INTO usage_hourly (tenant, hour, currency, requests, cost_nanos) {SUMS.format(rows='usage')}",
        "SELECT set_config('fairlane.tenant', '', true)",
        FUNCTIONS,
        RETENTION,
    )
    for function in ("count_usage_hourly()", "uncount_usage_hourly()"):
        execute(f"REVOKE ALL ON FUNCTION {function} FROM PUBLIC")

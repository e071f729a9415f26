"""Costs of requests, and their sums by day: what a month cost is known without reading its records."""

from deploy.migrations.statements import execute, part_tenants

revision = "0017"
down_revision = "0016"

# With defaults, so that a recorder of the revision before can go on writing while services are replaced.
COLUMNS = """
ALTER TABLE usage
    ADD COLUMN images bigint NOT NULL DEFAULT 0,
    ADD COLUMN batch_size bigint NOT NULL DEFAULT 1,
    ADD COLUMN cost_nanos bigint,
    ADD COLUMN currency text,
    ADD COLUMN requested_by text;
ALTER TABLE results ADD COLUMN cost_nanos bigint, ADD COLUMN currency text;
COMMENT ON COLUMN usage.cost_nanos IS 'billionths of one unit of the currency; null: no price was known';
COMMENT ON COLUMN usage.requested_by IS
    'caller of the gateway: key: and the id of its key, or user: and the subject of its token';
"""

# Sums may grow without bound, and no sum may ever refuse a row: numeric.
SUMS = """
    requests numeric NOT NULL,
    cached_answers numeric NOT NULL,
    prompt_tokens numeric NOT NULL,
    completion_tokens numeric NOT NULL,
    cached_tokens numeric NOT NULL,
    images numeric NOT NULL,
    engine_ms numeric NOT NULL,
    cost_nanos numeric NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
"""
# Fill factor: a row of today is updated by every batch of the recorder, and should stay on its page.
TABLES = f"""
CREATE TABLE usage_daily (
    tenant text NOT NULL,
    day date NOT NULL,
    model text NOT NULL,
    model_version text NOT NULL,
    pool text NOT NULL,
    priority_class text NOT NULL,
    currency text NOT NULL,
{SUMS}
    PRIMARY KEY (tenant, day, model, model_version, pool, priority_class, currency)
) WITH (fillfactor = 70);
CREATE TABLE usage_daily_callers (
    tenant text NOT NULL,
    day date NOT NULL,
    requested_by text NOT NULL,
    currency text NOT NULL,
{SUMS}
    PRIMARY KEY (tenant, day, requested_by, currency)
) WITH (fillfactor = 70);
CREATE INDEX usage_daily_by_age ON usage_daily (((day - date '1970-01-01') * 86400000::bigint));
CREATE INDEX usage_daily_callers_by_age ON usage_daily_callers (((day - date '1970-01-01') * 86400000::bigint));
COMMENT ON TABLE usage_daily IS
    'sums of usage by day in UTC, counted by triggers of usage; they stay when retention removes its rows';
COMMENT ON TABLE usage_daily_callers IS 'the same by caller; empty: it did not come by the gateway';
COMMENT ON COLUMN usage_daily.currency IS 'empty: the cost of these requests is not known';
"""

DAY = "date '1970-01-01' + least(greatest(occurred_at_ms / 86400000, 0), 2932896)::integer"
"""Until the year 9999: what a broken clock wrote must not refuse a row."""

DAILY = {
    "usage_daily": ("tenant", "day", "model", "model_version", "pool", "priority_class", "currency"),
    "usage_daily_callers": ("tenant", "day", "requested_by", "currency"),
}
"""The keys of the tables."""

_EXPRESSIONS = {
    "day": DAY,
    "currency": "coalesce(currency, '')",
    "requested_by": "coalesce(requested_by, '')",
}
_SUMS = {
    "requests": "count(*)",
    "cached_answers": "count(*) FILTER (WHERE cached)",
    **{name: f"sum({name})" for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "images", "engine_ms")},
    "cost_nanos": "coalesce(sum(cost_nanos), 0)",
}


def summed(table: str, rows: str) -> str:
    """A query for the rows of this table that sum up the rows of usage in ``rows``, in the order of its key: all
    writers lock in it."""
    keys = DAILY[table]
    columns = [f"{_EXPRESSIONS.get(key, key)} AS {key}" for key in keys]
    columns += [f"{expression} AS {name}" for name, expression in _SUMS.items()]
    numbers = ", ".join(str(number + 1) for number in range(len(keys)))
    return f"SELECT {', '.join(columns)} FROM {rows} GROUP BY {numbers} ORDER BY {numbers}"  # noqa: S608 - our own names


def _added(table: str, rows: str) -> str:
    """Add the sums of rows to those that are there."""
    keys, names = ", ".join(DAILY[table]), ", ".join(_SUMS)
    totals = ", ".join(f"{name} = known.{name} + excluded.{name}" for name in _SUMS)
    return (
        f"INSERT INTO {table} AS known ({keys}, {names}) {summed(table, rows)} "
        f"ON CONFLICT ({keys}) DO UPDATE SET {totals}, recorded_at = now();"
    )


def _subtracted(table: str, rows: str) -> str:
    """Subtract the sums of rows; what is then about nothing goes."""
    keys = " AND ".join(f"known.{key} = gone.{key}" for key in DAILY[table])
    totals = ", ".join(f"{name} = known.{name} - gone.{name}" for name in _SUMS)
    return (
        f"UPDATE {table} AS known SET {totals}, recorded_at = now() "  # noqa: S608 - our own names
        f"FROM ({summed(table, rows)}) AS gone WHERE {keys}; DELETE FROM {table} WHERE requests <= 0;"
    )


# In the transaction of the rows, so that sums and rows never differ. Only rows that were inserted are in `added`: those
# that were there already, and were counted, are not. The functions run with the rights of the tables' owner: nobody
# else can write a sum. A rebuild of the projection begins with TRUNCATE: what is read again then must not count twice.
FUNCTIONS = f"""
CREATE FUNCTION count_usage() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = public, pg_temp AS $body$
BEGIN
    {_added("usage_daily", "added")}
    {_added("usage_daily_callers", "added")}
    RETURN NULL;
END $body$;

CREATE FUNCTION uncount_usage() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
SET search_path = public, pg_temp AS $body$
DECLARE
    acting_for text := current_setting('fairlane.tenant', true);
BEGIN
    PERFORM set_config('fairlane.tenant', '*', true);
    {_subtracted("usage_daily", "usage")}
    {_subtracted("usage_daily_callers", "usage")}
    PERFORM set_config('fairlane.tenant', coalesce(acting_for, ''), true);
    RETURN NULL;
END $body$;

CREATE TRIGGER usage_counted AFTER INSERT ON usage REFERENCING NEW TABLE AS added
FOR EACH STATEMENT EXECUTE FUNCTION count_usage();
CREATE TRIGGER usage_uncounted BEFORE TRUNCATE ON usage
FOR EACH STATEMENT EXECUTE FUNCTION uncount_usage();
"""

# As in revision 0014, with the new tables.
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
        ('audit_logs', 'occurred_at_ms + 0', 86400000),
        ('conversation_turns', 'replied_at_ms', 0)
    ) AS known (name, age, least_ms) WHERE known.name = wanted_table;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'no old rows are removed from %', wanted_table USING ERRCODE = 'invalid_parameter_value';
    END IF;
    before_ms := least(wanted_before_ms, floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint - least_ms);
    PERFORM set_config('fairlane.tenant', '*', true);
    -- What is locked just now is removed the next time: whoever updates rows locks them in another order.
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
    execute(COLUMNS, TABLES)
    for table in DAILY:
        part_tenants(table)
    execute("SELECT set_config('fairlane.tenant', '*', true)")
    for table, keys in DAILY.items():
        columns = ", ".join((*keys, *_SUMS))
        execute(f"INSERT INTO {table} ({columns}) {summed(table, 'usage')}")
    execute("SELECT set_config('fairlane.tenant', '', true)", FUNCTIONS, RETENTION)
    for function in ("count_usage()", "uncount_usage()"):
        execute(f"REVOKE ALL ON FUNCTION {function} FROM PUBLIC")

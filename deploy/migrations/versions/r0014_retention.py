"""Results, usage and audit are removed when they are old: indexes by age, and a function that does it."""

from deploy.migrations.statements import execute

revision = "0014"
down_revision = "0013"

COLUMNS = {"results": "replied_at_ms", "usage": "occurred_at_ms", "audit_logs": "occurred_at_ms"}

# No service may delete these rows itself: through this the recorder removes what is older than the least time
# that each is kept, however it asks. What the caller acts for is put back by hand, as in revision 0007.
FUNCTION = """
CREATE FUNCTION remove_old_rows(wanted_table text, wanted_before_ms bigint, most integer)
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
ENTRY = "remove_old_rows(text, bigint, integer)"


def upgrade() -> None:
    """Add the indexes, as conversation_turns has one, and the function; nobody writes to a table meanwhile.

    The indexes are by an expression: one by the column alone would be taken for a page of the newest rows of a tenant,
    which it finds by reading everybody's.
    """
    for table, column in COLUMNS.items():
        execute(f"CREATE INDEX {table}_by_age ON {table} (({column} + 0))")
    execute(FUNCTION)
    execute(f"REVOKE ALL ON FUNCTION {ENTRY} FROM PUBLIC")

"""What the recorder and reviewers look for again and again is found through an index, among many rows that are not."""

import re
from typing import Any

import psycopg
import pytest

from fairlane.clock import now_ms
from fairlane.names import PRIORITY_PREFIX
from fairlane_server.labelling import queue
from fairlane_server.postgres import feedback_scores
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from stream_processors.recorder import label_collector
from stream_processors.recorder.retention import Rule
from stream_processors.recorder.tables import FEEDBACK, LABEL_ITEMS, RESULTS
from tests.kit.label_kit import LabelBench
from tests.kit.stack import PostgresServer

pytestmark = [pytest.mark.broker, pytest.mark.full]

DAY_MS = 86_400_000
# Of twenty tenants, each five hundred rows of ten days.
ROWS = """
INSERT INTO feedback (tenant, request_id, given_by, rating, tags, given_at_ms, log_topic, log_partition, log_offset,
    model, model_version)
SELECT 't-' || t, 'r-' || n, 'user', 0, '[]', %(now_ms)s - n * 1728000, 'l', 0, n, 'm-' || mod(n, 20), '1'
FROM generate_series(1, 20) AS t, generate_series(1, 500) AS n;
INSERT INTO results (request_id, tenant, outcome, model, model_version, guardrails, passages, degradations,
    prompt_tokens, completion_tokens, cached_tokens, batch_size, source_topic, source_partition, source_offset,
    reply_topic, reply_partition, reply_offset, replies_seen, replays_seen, replied_at_ms, recorded_at)
SELECT 'r-' || n, 't-' || t, 'ok', 'm', '1',
    CASE mod(n, 5) WHEN 0 THEN '[{"verdict": "redacted"}]'::jsonb ELSE '[]' END,
    '[]', '[]', 1, 1, 0, 1, 'q', t, n, 'l', t, n, 1, 0, %(now_ms)s - n * 1728000, now() - n * interval '1728 s'
FROM generate_series(1, 20) AS t, generate_series(1, 500) AS n;
INSERT INTO label_items (tenant, request_id, origin, model, model_version, task, input, output, answered_at_ms,
    queued_at_ms, state, lease_holder, lease_until_ms)
SELECT 't-' || t, 'r-' || n, 'feedback', 'm', '1', 'generate', '{}', '{}', 1, %(now_ms)s - n * 1728000,
    CASE mod(n, 5) WHEN 0 THEN 'open' ELSE 'agreed' END, CASE mod(n, 100) WHEN 0 THEN 'anna' END, %(now_ms)s + 1000000
FROM generate_series(1, 20) AS t, generate_series(1, 500) AS n
"""


@pytest.fixture
def server(migrated: PostgresServer) -> PostgresServer:
    bench = LabelBench(migrated)
    bench.allow(*(f"t-{number}" for number in range(1, 21)))
    bench.close()
    with connect(migrated.owner_dsn, "tests", autocommit=True) as owner:
        with owner.transaction():
            act_for(owner, ALL_TENANTS)
            psycopg.ClientCursor(owner).execute(ROWS.encode(), {"now_ms": now_ms()})
        owner.execute("VACUUM (ANALYZE) tenants, feedback, results, label_items")
    return migrated


def plan(dsn: str, query: str, asked: Any, tenant: str = ALL_TENANTS) -> str:
    """The plan of a query, as the role whose connection this is."""
    with connect(dsn, "tests") as connection, connection.transaction():
        act_for(connection, tenant)
        return "\n".join(line for (line,) in connection.execute(f"EXPLAIN {query}".encode(), asked))


def test_candidates_are_found_by_tenant_and_time(server: PostgresServer) -> None:
    asked = {
        "allowed": "allowed",
        "full": [],
        "given_since_ms": now_ms() - DAY_MS,
        "recorded_since_ms": now_ms() - DAY_MS,
        "low": 0.5,
        "flagged": "flagged",
        "drift": "drift",
        "share": 65_536,
        "priority": PRIORITY_PREFIX,
        "passed_tenants": [],
        "passed": [],
        "most": 200,
    }
    shown = plan(server.recorder_dsn, label_collector._CANDIDATES, asked)
    assert re.search(r"feedback_by_time .*\n *Index Cond: .*given_at_ms > ", shown), shown
    assert re.search(r"results_of_guardrail_hits .*\n *Index Cond: .*recorded_at > ", shown), shown


def test_tenants_that_withdrew_are_found_from_one_to_the_next(server: PostgresServer) -> None:
    shown = plan(server.recorder_dsn, label_collector._WITHDRAWN.format(table="label_items"), ("allowed",))
    assert "Seq Scan on label_items" not in shown, shown
    assert re.search(r"Index Cond: .*tenant > holder", shown), shown


def test_ratings_of_all_models_are_found_by_their_time(server: PostgresServer) -> None:
    asked = {"since_ms": now_ms() - DAY_MS, "model": None, "arms": None, "most": 200}
    shown = plan(server.recorder_dsn, feedback_scores._SUMS.decode(), asked)
    assert "feedback_of_all_models" in shown, shown
    assert "Index Cond: (given_at_ms >= " in shown, shown


def test_the_item_of_a_reviewer_is_found_by_its_lease(server: PostgresServer) -> None:
    asked = {"tenant": "t-1", "reviewer": "anna", "now_ms": now_ms()}
    shown = plan(server.operator_dsn, queue._OWN, asked, tenant="t-1")
    assert "label_items_leased" in shown, shown


@pytest.mark.parametrize(
    ("table", "column"), [(RESULTS, "replied_at_ms"), (FEEDBACK, "given_at_ms"), (LABEL_ITEMS, "queued_at_ms")]
)
def test_a_table_without_old_rows_is_not_read(server: PostgresServer, table: Any, column: str) -> None:
    before_ms = Rule(table, column, 30 * 86_400).before_ms(now_ms())
    query = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT * FROM remove_old_rows('{table.name}', {before_ms}, 1000)"  # noqa: S608 - our own names
    with connect(server.recorder_dsn, "tests") as connection:
        # Its first call reads the catalogue.
        for _ in range(2):
            ((shown,),) = connection.execute(query.encode()).fetchall()
    assert shown[0]["Plan"]["Shared Hit Blocks"] + shown[0]["Plan"]["Shared Read Blocks"] < 50

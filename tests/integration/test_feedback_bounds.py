"""Feedback that nothing answered keeps no other out and goes after a day; the latest counts in whichever order it is
stored."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import permutations

import pytest

from fairlane.clock import now_ms
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from stream_processors.recorder import feedback_watch
from stream_processors.recorder.feedback_watch import FeedbackWatch
from tests.kit.label_kit import LabelBench, request_id
from tests.kit.stack import PostgresServer
from tests.kit.waiting import PATIENCE_S, eventually

pytestmark = [pytest.mark.broker, pytest.mark.full]

ROWS = "SELECT tenant, request_id, model FROM feedback ORDER BY 1, 2"
WAITING = """
SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
WHERE NOT granted AND datname = current_database()
"""
# As two recorders leave it that stored the two at the same moment.
MISSED = "UPDATE feedback SET model = NULL, model_version = NULL WHERE tenant = 'acme'"


@pytest.fixture
def bench(migrated: PostgresServer) -> Iterator[LabelBench]:
    made = LabelBench(migrated)
    yield made
    made.close()


def look(bench: LabelBench) -> None:
    watch = FeedbackWatch(bench.server.recorder_dsn, lambda _: None)
    watch.look()
    watch.close()


def test_feedback_on_invented_requests_keeps_that_of_others_out_of_nothing(
    bench: LabelBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback_watch, "_MOST_AT_ONCE", 5)
    bench.answered(1)
    bench.rated(1)
    bench.as_owner(MISSED)
    bench.rated(*range(100, 120), tenant="globex")
    look(bench)
    assert bench.tables.rows(ROWS)[0] == ("acme", request_id(1), "words")


def test_feedback_on_a_request_without_a_result_goes_after_a_day(
    bench: LabelBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feedback_watch, "_MOST_AT_ONCE", 2)
    bench.answered(1)
    bench.rated(1, *range(100, 106))
    bench.as_owner("UPDATE feedback SET recorded_at = recorded_at - interval '25 hours'")
    bench.rated(200)
    look(bench)
    assert [row[1:] for row in bench.tables.rows(ROWS)] == [(request_id(1), "words"), (request_id(200), None)]


@pytest.mark.parametrize("order", sorted(permutations(range(3))))
def test_the_latest_of_a_giver_counts_in_whichever_order_records_are_stored(
    bench: LabelBench, order: tuple[int, ...]
) -> None:
    at_ms = now_ms()
    said = [("up", at_ms), ("down", at_ms + 1), ("up", at_ms + 2)]
    for number in order:
        thumb, given_at_ms = said[number]
        bench.rated(1, thumb=thumb, given_at_ms=given_at_ms)
    assert bench.tables.rows("SELECT thumb, given_at_ms FROM feedback") == [("up", at_ms + 2)]


@pytest.mark.parametrize("what", ["feedback", "results"])
def test_recorders_lock_feedback_in_one_order(bench: LabelBench, what: str) -> None:
    bench.rated(1, 2, 3)
    lock = b"SELECT FROM feedback WHERE request_id = ANY(%s) FOR UPDATE NOWAIT"
    with connect(bench.server.owner_dsn, "tests") as other, ThreadPoolExecutor(1) as pool:
        with other.transaction():
            act_for(other, ALL_TENANTS)
            other.execute(lock, ([request_id(1)],))
            write = partial(bench.rated, thumb="up") if what == "feedback" else bench.answered
            written = pool.submit(write, 3, 2, 1)
            eventually(lambda: bench.tables.rows(WAITING) == [(1,)], what="the wait for the first row")
            # Whoever waits for the first row has none of the others.
            other.execute(lock, ([request_id(2), request_id(3)],))
        written.result(PATIENCE_S)

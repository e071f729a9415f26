"""Feedback about requests that never were: it keeps no other out, and goes after a day."""

from collections.abc import Iterator

import pytest

from stream_processors.recorder import feedback_watch
from stream_processors.recorder.feedback_watch import FeedbackWatch
from tests.kit.label_kit import LabelBench, request_id
from tests.kit.stack import PostgresServer

pytestmark = [pytest.mark.broker, pytest.mark.full]

ROWS = "SELECT tenant, request_id, model FROM feedback ORDER BY 1, 2"
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

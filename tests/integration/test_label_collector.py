"""The thread that fills the labelling queue, on a real Postgres: consent, bounds, and what a look that fails leaves."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fairlane.guardrail_records import GuardrailVerdict
from fairlane.records import HistoryUse, Output, Passage, PassageReference, SourceCoordinate
from stream_processors.recorder import label_collector
from stream_processors.recorder.label_collector import LabelCollector
from stream_processors.recorder.label_sources import WorkItemLogError
from tests.kit.label_kit import QUESTION, LabelBench
from tests.kit.stack import PostgresServer
from tests.kit.waiting import PATIENCE_S

pytestmark = [pytest.mark.broker, pytest.mark.full]

HIT = (GuardrailVerdict("output", "pii", "redacted", ("email",)),)


@pytest.fixture
def bench(migrated: PostgresServer) -> Iterator[LabelBench]:
    made = LabelBench(migrated)
    made.allow("acme")
    yield made
    made.close()


@pytest.fixture
def no_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look sees what was recorded since the last one that left nothing, and no earlier row."""
    monkeypatch.setattr(label_collector, "_OVERLAP_MS", 0)


def test_items_go_with_the_consent_also_while_no_candidate_can_be_found(
    bench: LabelBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.allow("globex", "initech")
    for number, tenant in enumerate(("acme", "globex", "initech"), start=1):
        bench.answered(number, 10 + number, tenant=tenant)
        bench.rated(number, 10 + number, tenant=tenant)
    bench.collector.look()
    assert bench.queued() == [1, 11, 2, 12, 3, 13]
    bench.allow("globex", evaluation="denied")
    monkeypatch.setattr(label_collector, "_CANDIDATES", "SELECT 1 / 0")
    monkeypatch.setattr(label_collector, "_MOST_REMOVED_AT_ONCE", 1)
    bench.collector.look()
    assert bench.queued() == [1, 11, 3, 13]
    bench.as_owner("DELETE FROM tenants WHERE tenant = 'acme'")
    bench.collector.look()
    assert bench.queued() == [3, 13], "nor are those of a tenant kept that was removed"


def test_nothing_is_queued_of_a_tenant_that_withdraws_while_its_work_is_read(bench: LabelBench) -> None:
    bench.answered(1, 2)
    bench.rated(1, 2)
    bench.works.on_read = lambda: bench.allow("acme", evaluation="denied")
    bench.collector.look()
    assert bench.works.reads > 0
    assert bench.queued() == []


def test_reads_that_fail_keep_no_other_item_out_and_are_tried_again(bench: LabelBench) -> None:
    bench.answered(*range(1, 11))
    bench.rated(*range(1, 11))
    bench.works.failing = {number: WorkItemLogError("the broker is away") for number in range(1, 5)}
    bench.collector.look()
    assert bench.queued() == [5, 6, 7, 8, 9, 10]
    bench.works.failing.clear()
    bench.collector.look()
    assert bench.queued() == list(range(1, 11))
    assert bench.works.closed == 2, "nothing is read between two looks"


def test_a_look_ends_when_too_many_reads_fail(bench: LabelBench) -> None:
    bench.answered(*range(1, 11))
    bench.rated(*range(1, 11))
    bench.works.failing = {number: WorkItemLogError("the broker is away") for number in range(1, 11)}
    bench.collector.look()
    assert (bench.works.reads, bench.queued()) == (5, [])


@pytest.mark.usefixtures("no_overlap")
def test_a_hit_of_a_tenant_that_was_full_is_queued_when_it_has_room(bench: LabelBench) -> None:
    bench.answered(1)
    bench.rated(1)
    collector = bench.collect_with(labels_max_open=1)
    collector.look()
    bench.answered(2, guardrails=HIT)
    for _ in range(2):
        collector.look()
    assert bench.queued() == [1]
    bench.as_owner("UPDATE label_items SET state = 'dismissed'")
    collector.look()
    assert bench.queued() == [1, 2]


@pytest.mark.usefixtures("no_overlap")
def test_a_hit_that_the_bound_dropped_is_queued_later(bench: LabelBench) -> None:
    bench.answered(1, 2, guardrails=HIT)
    collector = bench.collect_with(labels_max_open=1)
    collector.look()
    assert len(bench.queued()) == 1
    bench.as_owner("UPDATE label_items SET state = 'dismissed'")
    collector.look()
    assert bench.queued() == [1, 2]


def test_a_hit_that_is_recorded_long_after_its_reply_is_queued(bench: LabelBench) -> None:
    bench.collector.look()
    bench.answered(1, guardrails=HIT)
    bench.as_owner("UPDATE results SET replied_at_ms = replied_at_ms - 7200000")
    bench.collector.look()
    assert bench.queued() == [1]


@pytest.mark.usefixtures("no_overlap")
def test_a_look_that_left_nothing_is_not_repeated(bench: LabelBench) -> None:
    bench.answered(1, guardrails=HIT)
    bench.collector.look()
    bench.as_owner("DELETE FROM label_items")
    bench.collector.look()
    assert bench.queued() == [], "the second look begins where the first one ended"


def test_answers_from_a_cache_keep_nothing_else_out(bench: LabelBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(label_collector, "_MOST_AT_ONCE", 4)
    bench.answered(*range(100, 120), topic="requests")
    bench.rated(*range(100, 120))
    bench.answered(1, 2, 3)
    bench.rated(1, 2, 3)
    bench.collector.look()
    assert bench.queued() == [1, 2, 3]
    assert bench.works.reads == 3, "there is no work of a cached answer"


def test_recorders_that_look_at_once_queue_no_more_than_the_bound(bench: LabelBench) -> None:
    bench.answered(*range(1, 21))
    bench.rated(*range(1, 21))
    both_found = threading.Barrier(2)
    waited = threading.local()

    def read_together() -> None:
        if not getattr(waited, "once", False):
            waited.once = True
            both_found.wait(PATIENCE_S)

    bench.works.on_read = read_together
    collectors = [bench.collect_with(labels_max_open=5) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(LabelCollector.look, collectors))
    assert len(bench.queued()) == 5


@pytest.mark.parametrize(
    ("reply", "item", "is_queued"),
    [
        ({}, {}, True),
        ({"degradations": ("fewer_passages",)}, {}, False),
        ({"degradations": ("no_history", "capped_max_tokens")}, {}, False),
        ({"degradations": ("capped_max_tokens",)}, {"degradations": ("capped_max_tokens",)}, True),
        # The dispatcher left something out, and the consumer nothing more.
        (
            {"degradations": ("fewer_passages",), "passages": (PassageReference("p-1", 1.0),)},
            {"degradations": ("fewer_passages",), "passages": (Passage("p-1", "text", 1.0),)},
            True,
        ),
        (
            {"degradations": ("fewer_passages",), "passages": (PassageReference("p-1", 1.0),)},
            {"degradations": ("fewer_passages",), "passages": tuple(Passage(f"p-{n}", "text", 1.0) for n in range(2))},
            False,
        ),
        (
            {"degradations": ("shorter_context",), "history_use": HistoryUse(2)},
            {"degradations": ("shorter_context",), "history": (QUESTION,) * 4},
            False,
        ),
        ({"history_use": HistoryUse(4)}, {"history": (QUESTION,) * 4}, True),
    ],
)
def test_an_answer_of_which_the_model_got_less_than_its_work_is_not_queued(
    bench: LabelBench, reply: dict[str, Any], item: dict[str, Any], *, is_queued: bool
) -> None:
    bench.works.fields[1] = item
    bench.answered(1, **reply)
    bench.rated(1)
    for _ in range(2):
        bench.collector.look()
    assert bench.queued() == ([1] if is_queued else [])
    assert bench.works.reads == 1, "it is asked for once"


def test_the_answer_of_an_id_that_was_sent_again_is_that_of_its_work(bench: LabelBench) -> None:
    again = SourceCoordinate("requests.acme", 0, 77)
    bench.answered(1, output=Output(text="the second"), source=again)
    bench.answered(1, outcome="failed", output=None, code="engine_error")
    bench.works.fields[1] = {"source": again}
    bench.rated(1)
    bench.collector.look()
    assert bench.tables.rows("SELECT output ->> 'text' FROM label_items") == [("the second",)]
    bench.as_owner("DELETE FROM label_items")
    bench.works.fields[1] = {"source": SourceCoordinate("requests.acme", 0, 78)}
    bench.collect_with().look()
    assert bench.queued() == [], "work whose answer is not recorded"


@pytest.mark.usefixtures("no_overlap")
def test_a_hit_is_looked_for_until_its_usage_is_recorded(bench: LabelBench) -> None:
    bench.answered(1, guardrails=HIT)
    usage = bench.tables.rows("DELETE FROM usage RETURNING work_topic")
    bench.collector.look()
    assert (usage, bench.queued()) == ([("priority.acme.normal",)], [])
    bench.collector.look()
    bench.answered(1, guardrails=HIT)
    bench.collector.look()
    assert bench.queued() == [1]

"""Gold items, labels and exports of the labelling queue, in a real Postgres."""

from collections.abc import Iterator

import pytest

from fairlane.clock import now_ms
from fairlane_server.labelling.decisions import ItemOutcome, ItemState
from fairlane_server.labelling.exports import evaluation_line
from fairlane_server.labelling.queue import LabelError, LabelQueue
from tests.kit.label_kit import LabelBench, request_id
from tests.kit.stack import PostgresServer

pytestmark = [pytest.mark.broker, pytest.mark.full]

HELD = "SELECT count(*) FROM pg_locks WHERE relation = 'label_items'::regclass"
"""Locks of transactions that have read an item."""


@pytest.fixture
def bench(migrated: PostgresServer) -> Iterator[LabelBench]:
    """Three items of acme."""
    made = LabelBench(migrated)
    made.allow("acme")
    made.answered(1, 2, 3)
    made.rated(1, 2, 3)
    made.collector.look()
    yield made
    made.close()


@pytest.fixture
def queue(bench: LabelBench) -> Iterator[LabelQueue]:
    with LabelQueue(bench.server.operator_dsn, "acme") as opened:
        yield opened


def judged(bench: LabelBench, queue: LabelQueue, reviewer: str, number: int, label: str | None) -> ItemOutcome:
    """What a reviewer is answered who got this item, and says this of it; None: skips it."""
    lease = "UPDATE label_items SET lease_holder = %s, lease_until_ms = %s WHERE request_id = %s"
    bench.as_owner(lease, reviewer, now_ms() + 60_000, request_id(number))
    return (
        queue.skip(reviewer, request_id(number)) if label is None else queue.submit(reviewer, request_id(number), label)
    )


@pytest.mark.parametrize("said", [("bad", "bad"), ("good", "bad"), (None, None, None)])
def test_nothing_that_a_reviewer_is_answered_shows_a_gold_item(
    bench: LabelBench, queue: LabelQueue, said: tuple[str | None, ...]
) -> None:
    for number, label in enumerate(said):
        judged(bench, queue, f"before-{number}", 1, label)
    queue.set_gold(request_id(1), "good")
    opened = ItemOutcome(ItemState.OPEN)
    for number, label in enumerate((*said, *said)):
        for _ in range(2):
            assert judged(bench, queue, f"after-{number}", 1, label) == opened, "also when it is said again"
    assert queue.counts() == {"gold": 1, "open": 2}


def test_an_agreed_item_that_is_made_gold_is_not_exported(bench: LabelBench, queue: LabelQueue) -> None:
    for reviewer in ("anna", "ben"):
        judged(bench, queue, reviewer, 1, "bad")
    assert [item.label for item in queue.agreed()] == ["bad"]
    queue.set_gold(request_id(1), "good")
    judged(bench, queue, "cleo", 1, "bad")
    assert list(queue.agreed()) == []
    queue.set_gold(request_id(1), None)
    (item,) = queue.agreed()
    assert [one.reviewer for one in item.labels] == ["anna", "ben", "cleo"]


def test_a_gold_item_that_is_none_any_more_is_what_its_labels_say(bench: LabelBench, queue: LabelQueue) -> None:
    queue.set_gold(request_id(1), "bad")
    for reviewer in ("anna", "ben"):
        judged(bench, queue, reviewer, 1, "good")
    queue.set_gold(request_id(1), None)
    assert queue.counts() == {"agreed": 1, "open": 2}
    assert [(item.request_id, item.label) for item in queue.agreed()] == [(request_id(1), "good")]
    queue.set_gold(request_id(2), "bad")
    queue.set_gold(request_id(2), None)
    assert queue.counts() == {"agreed": 1, "open": 2}


def test_gold_items_take_no_place_in_the_queue(bench: LabelBench, queue: LabelQueue) -> None:
    for number in (1, 2, 3):
        queue.set_gold(request_id(number), "bad")
    bench.answered(4, 5)
    bench.rated(4, 5)
    bench.collect_with(labels_max_open=2).look()
    assert bench.queued() == [1, 2, 3, 4, 5]


def test_a_label_that_the_output_cannot_have_is_refused(queue: LabelQueue) -> None:
    with pytest.raises(LabelError, match="label: must be good or bad"):
        queue.submit("anna", request_id(1), "Good")
    with pytest.raises(LabelError, match="label: must be good or bad"):
        queue.set_gold(request_id(1), "7")


def test_an_export_is_read_in_pages_each_with_the_consent_and_none_stays_open(
    bench: LabelBench, queue: LabelQueue
) -> None:
    for number in (1, 2, 3):
        for reviewer in ("anna", "ben"):
            judged(bench, queue, reviewer, number, "good")
    assert [item.request_id for item in queue.agreed(at_once=2)] == [request_id(number) for number in (1, 2, 3)]
    items = queue.agreed(at_once=1)
    first = next(items)
    assert bench.tables.rows(HELD) == [(0,)], "a reader may take its time"
    behind = queue.agreed(after=(first.closed_at_ms, first.request_id))
    assert [item.request_id for item in behind] == [request_id(2), request_id(3)]
    assert next(items).request_id == request_id(2)
    bench.allow("acme", evaluation="denied")
    with pytest.raises(LabelError, match="does not allow"):
        next(items)


def test_a_correction_that_was_taken_back_is_neither_shown_nor_exported(bench: LabelBench, queue: LabelQueue) -> None:
    bench.rated(1, correction="Sydney", given_by="user:1")
    bench.rated(1, correction="Canberra", given_by="user:2", given_at_ms=now_ms() - 60_000)
    task = queue.lease("anna")
    while task is not None and task.request_id != request_id(1):
        queue.skip("anna", task.request_id)
        task = queue.lease("anna")
    assert task is not None
    assert task.correction == "Sydney"
    for reviewer in ("anna", "ben"):
        judged(bench, queue, reviewer, 1, "bad")
    assert [item.correction for item in queue.agreed()] == ["Sydney"]
    bench.rated(1, thumb="up", given_by="user:1")
    assert [item.correction for item in queue.agreed()] == ["Canberra"], "what another user said"
    bench.rated(1, thumb="up", given_by="user:2")
    (item,) = queue.agreed()
    line = evaluation_line(item, "acme")
    assert line is not None
    assert line["expected"] is None

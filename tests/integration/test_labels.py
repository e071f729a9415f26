"""The labelling queue in a real Postgres: what gets in, who gets it, what is agreed on, and what takes it out again."""

import json
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fairlane.clock import now_ms
from fairlane.guardrail_records import GuardrailVerdict
from fairlane_server.cli import main
from fairlane_server.erasure.erasures import ErasureKind, Erasures
from fairlane_server.labelling.decisions import ItemOutcome, ItemState
from fairlane_server.labelling.queue import LabelError, LabelQueue
from tests.kit.label_kit import QUESTION, LabelBench, request_id
from tests.kit.stack import PostgresServer

pytestmark = pytest.mark.broker

DAY_MS = 86_400_000
ITEMS = "SELECT tenant, request_id, origin FROM label_items ORDER BY 1, 2"


@pytest.fixture
def rig(migrated: PostgresServer) -> Iterator[LabelBench]:
    made = LabelBench(migrated)
    yield made
    made.close()


@pytest.fixture
def queue(rig: LabelBench) -> Iterator[LabelQueue]:
    """The queue of acme with three items."""
    rig.allow("acme")
    rig.answered(1, 2, 3)
    rig.rated(1, 2, 3, correction="Canberra")
    rig.collector.look()
    with LabelQueue(rig.server.operator_dsn, "acme") as opened:
        yield opened


def test_bad_feedback_and_guardrail_hits_are_queued_once_with_what_was_asked(rig: LabelBench) -> None:
    rig.allow("acme")
    rig.answered(1, 2, 3, 4)
    rig.rated(1)
    rig.rated(2, thumb="up")
    rig.rated(3, thumb=None, tags=("flagged",), comment="odd")
    rig.answered(5, guardrails=(GuardrailVerdict("output", "pii", "redacted", ("email",)),))
    rig.answered(6, guardrails=(GuardrailVerdict("output", "pii", "passed"),))
    for _ in range(2):
        rig.collector.look()
    assert rig.tables.rows(ITEMS) == [
        ("acme", request_id(1), "feedback"),
        ("acme", request_id(3), "feedback"),
        ("acme", request_id(5), "guardrail"),
    ]
    columns = "input, output, model, model_version, arm, task, state"
    assert rig.tables.rows(f"SELECT {columns} FROM label_items ORDER BY request_id LIMIT 1") == [  # noqa: S608 - our own names
        (
            {"messages": [{"role": "user", "content": QUESTION.content}]},
            {"text": "answer 1"},
            *("words", "2", "new", "generate", "open"),
        )
    ]


def test_only_what_a_tenant_allows_is_queued_and_it_goes_when_it_does_not_any_more(rig: LabelBench) -> None:
    rig.allow("acme", "initech")
    rig.allow("globex", evaluation="denied")
    for number, tenant in enumerate(("acme", "globex", "initech", "nobody"), start=1):
        rig.answered(number, tenant=tenant)
        rig.rated(number, tenant=tenant)
    rig.collector.look()
    assert rig.queued() == [1, 3]
    rig.allow("acme", evaluation="denied")
    with LabelQueue(rig.server.operator_dsn, "acme") as queue, pytest.raises(LabelError, match="does not allow"):
        queue.lease("anna")
    rig.collector.look()
    assert rig.queued() == [3]


def test_the_queue_is_bounded_and_sampled_by_the_id(rig: LabelBench) -> None:
    rig.allow("acme", "globex")
    for tenant, numbers in (("acme", range(1, 21)), ("globex", range(21, 23))):
        rig.answered(*numbers, tenant=tenant)
        rig.rated(*numbers, tenant=tenant)
    rig.collect_with(labels_max_open=0).look()
    assert rig.queued() == []
    rig.collect_with(labels_sample_rate=0.5, labels_max_open=100).look()
    sampled = rig.queued()
    assert 0 < len(sampled) < 22
    rig.collect_with(labels_sample_rate=0.5, labels_max_open=100).look()
    assert rig.queued() == sampled, "the same at every look"
    rig.collect_with(labels_max_open=12).look()
    counts = dict(rig.tables.rows("SELECT tenant, count(*) FROM label_items GROUP BY tenant"))
    assert counts == {"acme": 12, "globex": 2}


def test_what_is_not_in_the_log_any_more_is_passed_over_and_asked_for_once(rig: LabelBench) -> None:
    rig.allow("acme")
    rig.answered(1, 2, 3)
    rig.rated(1, 2, 3)
    rig.works.gone.add(1)
    rig.works.replaced.add(3)
    for _ in range(3):
        rig.collector.look()
    assert rig.queued() == [2]
    assert rig.works.reads == 3


def test_an_erasure_takes_items_and_labels_and_nothing_erased_gets_in(rig: LabelBench, queue: LabelQueue) -> None:
    task = queue.lease("anna")
    assert task is not None
    queue.submit("anna", task.request_id, "bad", "Canberra")
    with Erasures(rig.server.gateway_dsn, "acme", kept_ms=DAY_MS) as erasures:
        erasure_id = erasures.request(ErasureKind.REQUESTS, [task.request_id], "key:1")
        # Requested, and not carried out.
        with psycopg.connect(rig.server.owner_dsn) as owner:
            owner.execute("SELECT set_config('fairlane.tenant', '*', true)")
            owner.execute("DELETE FROM label_items WHERE request_id = %s", (task.request_id,))
        rig.collector.look()
        assert len(rig.queued()) == 2
        while erasures.step(erasure_id):
            pass
    rig.collector.look()
    assert len(rig.queued()) == 2
    assert rig.tables.rows("SELECT count(*) FROM labels") == [(0,)]
    other = queue.lease("ben")
    assert other is not None
    queue.submit("ben", other.request_id, "good")
    with Erasures(rig.server.gateway_dsn, "acme", kept_ms=DAY_MS) as erasures:
        erasure_id = erasures.request(ErasureKind.REQUESTS, [other.request_id], "key:1")
        while erasures.step(erasure_id):
            pass
    assert len(rig.queued()) == 1
    assert rig.tables.rows("SELECT count(*) FROM labels") == [(0,)]


def test_reviewers_who_ask_at_once_never_get_the_same_item(rig: LabelBench, queue: LabelQueue) -> None:
    rig.answered(*range(10, 30))
    rig.rated(*range(10, 30))
    rig.collector.look()

    def leased(name: str) -> str:
        with LabelQueue(rig.server.operator_dsn, "acme") as mine:
            task = mine.lease(name)
            again = mine.lease(name)
        assert task is not None
        assert again is not None
        assert again.request_id == task.request_id, "until it is judged"
        return task.request_id

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(leased, [f"reviewer-{number}" for number in range(16)]))
    assert len(set(got)) == 16


def test_two_labels_that_agree_close_an_item_and_a_third_decides(queue: LabelQueue) -> None:
    first = queue.lease("anna")
    assert first is not None
    with pytest.raises(LabelError, match="the lease has ended, or is another reviewer's"):
        queue.submit("ben", first.request_id, "good")
    opened = ItemOutcome(ItemState.OPEN)
    assert queue.submit("anna", first.request_id, "good") == opened
    assert queue.submit("anna", first.request_id, "good") == opened, "the same again changes nothing"
    with pytest.raises(LabelError, match="has judged it"):
        queue.submit("anna", first.request_id, "bad")
    second = queue.lease("ben")
    assert second is not None
    assert second.request_id == first.request_id, "what lacks one label comes first"
    assert queue.submit("ben", first.request_id, "bad", "Canberra") == opened
    third = queue.lease("cleo")
    assert third is not None
    assert third.request_id == first.request_id
    assert queue.submit("cleo", first.request_id, "bad") == ItemOutcome(ItemState.AGREED, "bad")
    assert queue.counts() == {"agreed": 1, "open": 2}
    (agreed,) = queue.agreed()
    assert (agreed.label, agreed.correction) == ("bad", "Canberra")
    assert [(one.reviewer, one.label, one.correction) for one in agreed.labels] == [
        ("anna", "good", None),
        ("ben", "bad", "Canberra"),
        ("cleo", "bad", None),
    ]
    anna, ben, cleo = queue.reviewers()
    assert [(one.settled, one.agreed) for one in (anna, ben, cleo)] == [(1, 0), (1, 1), (1, 1)]
    skipped = queue.lease("anna")
    assert skipped is not None
    assert queue.skip("anna", skipped.request_id) == opened


def test_a_gold_item_measures_and_is_not_closed(rig: LabelBench, queue: LabelQueue) -> None:
    queue.set_gold(request_id(3), "bad")
    seen = []
    for _ in range(3):
        task = queue.lease("anna")
        if task is not None:
            seen.append(task.request_id)
            queue.submit("anna", task.request_id, "bad")
    assert sorted(seen) == [request_id(1), request_id(2)], "gold items settle nothing and never come alone"
    with psycopg.connect(rig.server.owner_dsn) as owner:
        owner.execute("SELECT set_config('fairlane.tenant', '*', true)")
        lease = "UPDATE label_items SET lease_holder = 'anna', lease_until_ms = %s WHERE request_id = %s"
        owner.execute(lease, (now_ms() + 60_000, request_id(3)))
    assert queue.submit("anna", request_id(3), "good") == ItemOutcome(ItemState.OPEN)
    (anna,) = queue.reviewers()
    assert (anna.gold, anna.gold_right) == (1, 0)
    with pytest.raises(LabelError, match="no item of this request"):
        queue.set_gold(request_id(9), "bad")


def test_another_tenant_sees_and_judges_nothing(rig: LabelBench, queue: LabelQueue) -> None:
    rig.allow("globex")
    task = queue.lease("anna")
    assert task is not None
    with LabelQueue(rig.server.operator_dsn, "globex") as others:
        assert others.lease("anna") is None
        with pytest.raises(LabelError, match="no item of this request"):
            others.submit("anna", task.request_id, "good")
        assert list(others.agreed()) == []


@pytest.mark.parametrize(("label", "reviewer"), [("", "anna"), ("x" * 257, "anna"), ("good", ""), ("good", "a\nb")])
def test_an_invalid_argument_is_named(queue: LabelQueue, label: str, reviewer: str) -> None:
    with pytest.raises(LabelError, match=r"(label|reviewer): must"):
        queue.submit(reviewer, request_id(1), label)


@pytest.mark.usefixtures("queue")
def test_the_commands_lease_judge_and_export(
    rig: LabelBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POSTGRES_DSN", rig.server.operator_dsn)

    def run(*arguments: str, code: int = 0) -> Any:
        with pytest.raises(SystemExit) as ended:
            main(("labels", *arguments, "--tenant", "acme", "--json"))
        shown = capsys.readouterr()
        assert ended.value.code == code, shown.err
        return shown.err if code else json.loads(shown.out)

    for reviewer in ("anna", "ben"):
        item = run("next", "--reviewer", reviewer)["item"]
        said = run("submit", item["request_id"], "bad", "--reviewer", reviewer, "--correction", "Canberra")
    assert said["item"] == {"request_id": item["request_id"], "state": "agreed", "label": "bad"}
    evaluation, chat = tmp_path / "set.jsonl", tmp_path / "chat.jsonl"
    assert run("export", "--out", str(evaluation))["exported"]["lines"] == 1
    assert run("export", "--format", "chat", "--out", str(chat))["exported"]["lines"] == 1
    (line,) = map(json.loads, evaluation.read_text().splitlines())
    assert (line["expected"], line["provenance"]["model_version"]) == ("Canberra", "2")
    (example,) = map(json.loads, chat.read_text().splitlines())
    assert example == {
        "messages": [
            {"role": "user", "content": QUESTION.content},
            {"role": "assistant", "content": "Canberra"},
        ]
    }
    (beside,) = map(json.loads, Path(f"{chat}.provenance").read_text().splitlines())
    assert beside == line["provenance"]
    assert stat.S_IMODE(chat.stat().st_mode) == 0o600
    assert "exists" in run("export", "--out", str(chat), code=1)
    assert run("stats")["items"] == {"agreed": 1, "open": 2}

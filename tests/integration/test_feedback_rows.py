"""Feedback in a real Postgres: the model version is found in either order, the latest counts, erasures reach it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from prometheus_client import REGISTRY

from fairlane.clock import now_ms
from fairlane.names import LEDGER_FEEDBACK, replies_topic
from fairlane.records import ConversationTurn, Feedback, InferenceReply, Message, Output, SourceCoordinate
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from fairlane_server.erasure.erasures import ErasureKind, Erasures
from fairlane_server.postgres.connection import ALL_TENANTS, act_for, connect
from fairlane_server.postgres.feedback_scores import ScoreSums, feedback_scores
from stream_processors.recorder.feedback_watch import FeedbackWatch
from stream_processors.recorder.positions import Move, Partition, Stored
from stream_processors.recorder.projection import LogRecord, project
from stream_processors.recorder.retention import OldRows, rules_of
from stream_processors.recorder.store import RecorderStore, SupersededError
from tests.kit.recorder_kit import Tables
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = pytest.mark.broker

FEEDBACK = Partition(LEDGER_FEEDBACK, 0)
ROWS = "SELECT request_id, given_by, thumb, rating, tags, model, model_version, arm FROM feedback ORDER BY 1, 2"
DAY_MS = 86_400_000


@pytest.fixture
def store(migrated: PostgresServer) -> Iterator[RecorderStore]:
    made = RecorderStore(migrated.recorder_dsn)
    yield made
    made.close()


@pytest.fixture
def tables(migrated: PostgresServer) -> Tables:
    return Tables(migrated)


def request_id(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


def said(number: int, at_ms: int | None = None, tenant: str = "acme", **fields: object) -> Feedback:
    one = Feedback(request_id(number), tenant, given_by="user:1", given_at_ms=now_ms() if at_ms is None else at_ms)
    return replace(one, **({"thumb": "up"} | fields))  # type: ignore[arg-type]  # fields of the record


def answer(number: int, tenant: str = "acme", **fields: object) -> InferenceReply:
    source = SourceCoordinate(f"requests.{tenant}", 0, number)
    reply = InferenceReply(request_id(number), tenant, "ok", model="words", model_version="2", arm="new", source=source)
    return replace(reply, output=Output(text="an answer"), **fields)  # type: ignore[arg-type]  # fields of the record


def write(store: RecorderStore, *records: Feedback | InferenceReply, first_offset: int = 0) -> None:
    """As the recorder does, in one transaction."""
    log = [
        LogRecord(
            *(LEDGER_FEEDBACK if isinstance(one, Feedback) else replies_topic(one.tenant), 0, first_offset + number),
            *(now_ms(), None, default_codec().encode(one)),
        )
        for number, one in enumerate(records)
    ]
    store.write(project(log, default_codec()), {})


def test_what_answered_is_added_whichever_comes_first(store: RecorderStore, tables: Tables) -> None:
    write(store, said(1), answer(1))
    write(store, said(2))
    assert tables.rows(ROWS)[1] == (request_id(2), "user:1", "up", 1.0, [], None, None, None)
    write(store, answer(2))
    write(store, answer(3))
    write(store, said(3, thumb=None, score=0.25, tags=("flagged",)))
    assert tables.rows(ROWS) == [
        (request_id(1), "user:1", "up", 1.0, [], "words", "2", "new"),
        (request_id(2), "user:1", "up", 1.0, [], "words", "2", "new"),
        (request_id(3), "user:1", None, 0.25, ["flagged"], "words", "2", "new"),
    ]


def test_feedback_about_a_request_of_another_tenant_stays_without_what_answered(
    store: RecorderStore, tables: Tables, migrated: PostgresServer
) -> None:
    write(store, answer(1), said(1, tenant="globex", thumb="down"))
    assert tables.rows(ROWS) == [(request_id(1), "user:1", "down", 0.0, [], None, None, None)]
    assert feedback_scores(Settings(postgres_dsn=migrated.operator_dsn), 0) == []


def test_a_refusal_of_an_id_that_was_sent_again_does_not_count_as_its_answer(
    store: RecorderStore, tables: Tables
) -> None:
    refusal = replace(answer(1), outcome="failed", model_version="1", source=SourceCoordinate("requests.acme", 0, 9))
    write(store, refusal, answer(1), said(1), first_offset=5)
    assert tables.rows(ROWS)[0][5:] == ("words", "2", "new")


def test_the_latest_of_a_giver_counts_and_what_is_read_again_changes_nothing(
    store: RecorderStore, tables: Tables
) -> None:
    at_ms = now_ms()
    first, second = said(1, at_ms), said(1, at_ms + 1, thumb="down", comment="wrong")
    other = said(1, at_ms, given_by="user:2", thumb=None, correction="42")
    query = "SELECT given_by, rating, correction, comment, given_at_ms, log_offset, xmin::text FROM feedback ORDER BY 1"
    write(store, first, second, other, answer(1))
    rows = tables.rows(query)
    assert [row[:6] for row in rows] == [
        ("user:1", 0.0, None, "wrong", at_ms + 1, 1),
        ("user:2", None, "42", None, at_ms, 2),
    ]
    write(store, first, second, other)
    assert tables.rows(query) == rows, "what is read again is not written again"
    write(store, replace(second, given_at_ms=at_ms + 7), first_offset=3)
    assert [row[:4] for row in tables.rows(query)] == [row[:4] for row in rows], "the same again is the same"
    write(store, replace(first, given_at_ms=at_ms + 9), first_offset=4)
    assert tables.rows(query)[0][:2] == ("user:1", 1.0)
    assert tables.rows(ROWS)[0][5:] == ("words", "2", "new"), "the model version is kept"


def test_the_recorder_that_was_replaced_writes_no_feedback(store: RecorderStore, tables: Tables) -> None:
    store.start_at({FEEDBACK: Stored(0)})
    record = LogRecord(*FEEDBACK, 0, now_ms(), None, default_codec().encode(said(1)))
    store.write(project([record], default_codec()), {FEEDBACK: Move(0, 1)})
    with pytest.raises(SupersededError):
        store.write(project([record], default_codec()), {FEEDBACK: Move(0, 1)})
    assert len(tables.rows(ROWS)) == 1


def test_scores_are_summed_up_by_version_and_arm_and_each_request_counts_once(
    store: RecorderStore, migrated: PostgresServer
) -> None:
    old = answer(4, model_version="1", arm="old")
    write(store, answer(1), answer(2), answer(3), old, answer(5, "globex"))
    write(
        store,
        *(said(1), said(1, given_by="user:2", thumb="down")),
        *(said(2), said(3, thumb=None, score=0.25), said(4, thumb="down"), said(5, tenant="globex")),
        *(said(3, given_by="user:3", thumb=None, comment="no rating"), said(2, now_ms() - 2 * DAY_MS, given_by="x")),
    )
    settings = Settings(postgres_dsn=migrated.operator_dsn)
    since_ms = now_ms() - DAY_MS
    new, before = feedback_scores(settings, since_ms)
    assert new == ScoreSums("words", "2", "new", 4, 0.5 + 1 + 0.25 + 1, 0.25 + 1 + 0.0625 + 1)
    assert before == ScoreSums("words", "1", "old", 1, 0.0, 0.0)
    assert (new.mean, before.variance) == (0.6875, 0.0)
    assert new.variance == pytest.approx(((0.1875**2) + 2 * 0.3125**2 + 0.4375**2) / 3)
    assert feedback_scores(settings, since_ms, "words", ["old"]) == [before]
    assert feedback_scores(settings, since_ms, "other") == []
    assert [one.count for one in feedback_scores(settings, since_ms, tenant="globex")] == [1]


def test_the_watch_shows_ratings_and_finds_what_two_recorders_missed(
    store: RecorderStore, migrated: PostgresServer, tables: Tables
) -> None:
    # Neither sees the other's row before it is committed.
    with connect(migrated.owner_dsn, "tests") as other, other.transaction():
        act_for(other, ALL_TENANTS)
        other.execute(
            "INSERT INTO feedback (tenant, request_id, given_by, rating, tags, given_at_ms, log_topic, log_partition, "
            "log_offset) VALUES ('acme', %s, 'user:1', 0, '[]', %s, 'l', 0, 0)",
            (request_id(1), now_ms()),
        )
        write(store, answer(1), answer(2), said(2))
    assert [row[5] for row in tables.rows(ROWS)] == [None, "words"]
    failures: list[BaseException] = []
    watch = FeedbackWatch(migrated.recorder_dsn, failures.append)
    watch.start()
    labels = {"model": "words", "version": "2", "arm": "new"}
    eventually(lambda: REGISTRY.get_sample_value("fairlane_satisfaction_ratio", labels) == 0.5, what="the first look")
    watch.stop()
    assert [row[5] for row in tables.rows(ROWS)] == ["words", "words"]
    assert REGISTRY.get_sample_value("fairlane_rated_requests", labels) == 2
    assert failures == []


def test_an_erasure_deletes_feedback_and_none_comes_back(
    store: RecorderStore, migrated: PostgresServer, tables: Tables
) -> None:
    write(store, answer(1), said(1, comment="mine"), answer(2), said(2))
    with Erasures(migrated.gateway_dsn, "acme", kept_ms=DAY_MS) as erasures:
        erasure_id = erasures.request(ErasureKind.REQUESTS, [request_id(1)], "key:1")
        write(store, said(1, given_by="user:9"), first_offset=5)
        while erasures.step(erasure_id):
            pass
    write(store, answer(1), said(1), first_offset=0)
    assert [row[0] for row in tables.rows(ROWS)] == [request_id(2)]


def test_feedback_about_an_erased_conversation_goes_when_its_late_reply_is_left_out(
    store: RecorderStore, migrated: PostgresServer, tables: Tables
) -> None:
    write(store, said(1, comment="given while it was answered"), answer(2), said(2))
    with Erasures(migrated.gateway_dsn, "acme", kept_ms=DAY_MS) as erasures:
        erasure_id = erasures.request(ErasureKind.CONVERSATION, ["talk"], "key:1")
        while erasures.step(erasure_id):
            pass
    late = answer(1, turn=ConversationTurn("talk", (Message("user", "hello"),)))
    log = LogRecord(replies_topic("acme"), 0, 7, now_ms() - DAY_MS, None, default_codec().encode(late))
    store.write(project([log], default_codec()), {})
    assert [row[0] for row in tables.rows(ROWS)] == [request_id(2)]
    write(store, said(1), first_offset=9)
    assert [row[0] for row in tables.rows(ROWS)] == [request_id(2)]


def test_old_feedback_is_removed(store: RecorderStore, migrated: PostgresServer, tables: Tables) -> None:
    write(store, said(1, now_ms() - 3 * DAY_MS), said(2))
    (rule,) = (rule for rule in rules_of(Settings(feedback_ttl_s=86_400)) if rule.name == "feedback")
    rows = OldRows(migrated.recorder_dsn)
    assert rows.remove(rule, rule.before_ms(now_ms()), 10) == (1, None)
    rows.close()
    assert [row[0] for row in tables.rows(ROWS)] == [request_id(2)]

"""Rows of copies in a real Postgres: written once, shown by consent, erased and removed as results are."""

from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from fairlane.clock import now_ms
from fairlane.evaluation_records import EvaluationMark
from fairlane.names import CONTROL_TENANTS, EVALUATION_REPLIES, EVALUATION_TENANT, LEDGER_AUDIT, replies_topic
from fairlane.outcomes import EvaluationConsent
from fairlane.records import (
    AuditEvent,
    ConversationTurn,
    InferenceReply,
    Message,
    Output,
    SourceCoordinate,
    TenantSpec,
    Timings,
)
from fairlane.schema_files import default_codec
from fairlane.settings import Settings
from fairlane_server.erasure.erasures import ErasureKind, Erasures
from fairlane_server.evaluation.shadow_report import read_shadow_counts, read_shadow_report
from fairlane_server.postgres.evaluation_results import read_pairs
from fairlane_server.postgres.reading import reading
from stream_processors.recorder.label_collector import LabelCollector
from stream_processors.recorder.projection import LogRecord, project
from stream_processors.recorder.retention import OldRows, rules_of
from stream_processors.recorder.store import RecorderStore, Repetition
from tests.kit.shadow_kit import recorded
from tests.kit.stack import PostgresServer

RUN = "words-2-1"
DAY_MS = 86_400_000
_numbers = count()


@pytest.fixture
def store(migrated: PostgresServer) -> Iterator[RecorderStore]:
    with closing(RecorderStore(migrated.recorder_dsn)) as made:
        yield made


def on_log(topic: str, value: Any, *, key: str = "", at_ms: int | None = None, offset: int | None = None) -> LogRecord:
    number = next(_numbers) if offset is None else offset
    return LogRecord(topic, 0, number, at_ms or now_ms(), key.encode(), default_codec().encode(value))


def source(number: int) -> SourceCoordinate:
    return SourceCoordinate("requests.acme", 0, number)


def original(number: int, text: str = "yes", *, tenant: str = "acme", conversation: str | None = None) -> LogRecord:
    turn = None if conversation is None else ConversationTurn(conversation, (Message("user", "a secret"),))
    reply = InferenceReply(
        *(f"id-{number}", tenant, "ok"),
        task="generate",
        model_version="1",
        output=Output(text=text),
        source=source(number),
        timings=Timings(1, 1, 1, 1, 1_000, 1_030),
        turn=turn,
    )
    return on_log(replies_topic(tenant), reply)


def copied(
    number: int,
    text: str = "yes",
    *,
    tenant: str = "acme",
    arm: str = "candidate",
    conversation: str | None = None,
    **more: Any,
) -> LogRecord:
    reply = InferenceReply(
        *(f"copy-{number}", EVALUATION_TENANT, "ok"),
        task="generate",
        model_version="2",
        output=Output(text=text),
        source=source(number),
        timings=Timings(1, 1, 1, 1, 2_000, 2_060),
        evaluation=EvaluationMark("shadow", RUN, arm, tenant, f"id-{number}", conversation),
    )
    return on_log(EVALUATION_REPLIES, reply, **more)


def consent(tenant: str, evaluation: str = EvaluationConsent.ALLOWED) -> LogRecord:
    return on_log(CONTROL_TENANTS, TenantSpec(tenant, evaluation=evaluation), key=tenant)


def write(store: RecorderStore, *records: LogRecord) -> Sequence[Repetition]:
    return store.write(project(records, default_codec()), {})


def test_a_copy_is_stored_once_and_a_second_end_is_an_alarm(store: RecorderStore, migrated: PostgresServer) -> None:
    first = copied(1)
    assert not write(store, first)
    assert not write(store, first), "read again"
    repeated = write(store, copied(1, "no"))
    assert [(one.record, one.seen) for one in repeated] == [("evaluation result", 2)]
    (row,) = recorded(migrated.owner_dsn, RUN)
    assert (row["output"], row["ended"], row["engine_ms"], row["replies_seen"]) == ({"text": "yes"}, "completed", 60, 2)


def test_pairs_are_those_of_tenants_that_allow_it_in_the_order_of_requests(
    store: RecorderStore, migrated: PostgresServer
) -> None:
    records = [consent("acme"), consent("globex", EvaluationConsent.DENIED)]
    for number in range(1_200):
        records += [original(number), copied(number, "yes" if number % 4 else "no")]
    records += [copied(number, arm="champion") for number in range(3)]
    records += [copied(5_000), original(6_000, tenant="globex"), copied(6_000, tenant="globex")]
    write(store, *records)
    settings = Settings(postgres_dsn=migrated.operator_dsn)
    with reading(settings, "tests", 30.0) as connection:
        found = list(read_pairs(connection, RUN, 10_000))
        few = list(read_pairs(connection, RUN, 7))
    keys = [(one.pair.tenant, one.pair.request_id, one.arm) for one in found]
    assert keys == sorted(keys), "those of one request together, across pages"
    assert len(keys) == 1_200 + 3 + 1
    assert {tenant for tenant, _, _ in keys} == {"acme"}
    assert found[:7] == few
    assert [one.pair.request_id for one in found if one.pair.original is None] == ["id-5000"]
    (report,) = read_shadow_report(settings, RUN).tasks
    assert (report.pairs, report.without_original) == (1_203, 1)
    assert report.equal.mean == pytest.approx(1 - 300 / 1_203)
    assert report.engine_ms is not None
    assert report.engine_ms.ratio == pytest.approx(2.0)
    # The admin API reads the same, and neither gets an output in another way.
    assert read_shadow_report(Settings(postgres_dsn=migrated.admin_dsn), RUN).tasks == (report,)
    write(store, consent("acme", EvaluationConsent.DENIED))
    assert read_shadow_report(settings, RUN).tasks == ()


def test_what_a_shadow_sampled_is_counted_from_the_audit(store: RecorderStore, migrated: PostgresServer) -> None:
    def dispatched(result: str) -> LogRecord:
        inputs = {"shadow_run": RUN, "shadow": result}
        event = AuditEvent("id-1", "acme", "dispatched", "dispatcher-1", now_ms(), source(1), inputs=inputs)
        return on_log(LEDGER_AUDIT, event)

    write(store, *(dispatched(result) for result in ("copied", "load", "load")))
    counts = read_shadow_counts(Settings(postgres_dsn=migrated.operator_dsn), RUN)
    assert (counts.sampled, counts.ended) == ({"copied": 1, "load": 2}, {})


def test_erasures_reach_copies_that_are_stored_and_those_to_come(
    store: RecorderStore, migrated: PostgresServer
) -> None:
    write(store, original(1), copied(1), original(2, conversation="talk-1"), copied(2), original(3), copied(3))
    with Erasures(migrated.gateway_dsn, "acme", kept_ms=DAY_MS) as erasures:
        for kind, name in ((ErasureKind.REQUESTS, "id-1"), (ErasureKind.CONVERSATION, "talk-1")):
            erasure = erasures.request(kind, [name], "key:1")
            while erasures.step(erasure):
                pass
    assert {row["request_id"] for row in recorded(migrated.owner_dsn, RUN)} == {"id-3"}
    write(store, copied(1), copied(2), copied(4))
    assert {row["request_id"] for row in recorded(migrated.owner_dsn, RUN)} == {"id-3", "id-4"}


def test_a_copy_that_was_stored_before_its_original_goes_with_its_conversation(
    store: RecorderStore, migrated: PostgresServer
) -> None:
    write(store, copied(1))
    with Erasures(migrated.gateway_dsn, "acme", kept_ms=DAY_MS) as erasures:
        erasure = erasures.request(ErasureKind.CONVERSATION, ["talk-1"], "key:1")
        while erasures.step(erasure):
            pass
    write(store, original(1, conversation="talk-1"), copied(2))
    assert {row["request_id"] for row in recorded(migrated.owner_dsn, RUN)} == {"id-2"}


def test_copies_of_requests_without_an_answer_go_with_their_conversation(
    store: RecorderStore, migrated: PostgresServer
) -> None:
    """The original failed, so it made no turn, and the erasure knows it by no other row."""
    write(store, consent("acme"), copied(1, conversation="talk"), copied(2, conversation="other"))
    with Erasures(migrated.gateway_dsn, "acme", DAY_MS) as erasures:
        erasure_id = erasures.request(ErasureKind.CONVERSATION, ["talk"], "a test")
        while erasures.step(erasure_id):
            pass
    assert [row["request_id"] for row in recorded(migrated.owner_dsn, RUN)] == ["id-2"]
    write(store, copied(1, conversation="talk"))
    assert [row["request_id"] for row in recorded(migrated.owner_dsn, RUN)] == ["id-2"], "also when it ends afterwards"


def test_old_rows_of_copies_are_removed(store: RecorderStore, migrated: PostgresServer) -> None:
    write(store, copied(1, at_ms=now_ms() - 2 * DAY_MS), copied(2))
    rule = next(one for one in rules_of(Settings()) if one.name == "evaluation_results")
    with closing(OldRows(migrated.recorder_dsn)) as rows:
        removed, oldest_ms = rows.remove(rule, rule.before_ms(now_ms()), 100)
    assert (removed, oldest_ms) == (1, None)
    assert {row["request_id"] for row in recorded(migrated.owner_dsn, RUN)} == {"id-2"}


def test_rows_go_with_the_consent_of_their_tenant(store: RecorderStore, migrated: PostgresServer) -> None:
    write(store, consent("acme"), consent("globex", EvaluationConsent.DENIED), copied(1), copied(2, tenant="globex"))
    failures: list[BaseException] = []
    works: Any = SimpleNamespace(close=lambda: None)
    with closing(LabelCollector(Settings(postgres_dsn=migrated.recorder_dsn), works, failures.append)) as collector:
        collector.look()
    assert not failures
    assert {row["tenant"] for row in recorded(migrated.owner_dsn, RUN)} == {"acme"}

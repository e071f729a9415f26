"""Replays of the log in Postgres: decisions about requests, bindings, progress, results and reports; no broker."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import count

import psycopg
import pytest

from fairlane import names
from fairlane.clock import now_ms
from fairlane.evaluation_records import EvaluationMark
from fairlane.outcomes import Outcome
from fairlane.records import (
    Feedback,
    InferenceReply,
    InferenceRequest,
    LabelScore,
    Output,
    RequestInput,
    SourceCoordinate,
    TenantSpec,
    Timings,
    UsageEvent,
    WorkItem,
)
from fairlane.schema_files import default_codec
from fairlane_server.erasure.erasures import ErasureKind, Erasures
from fairlane_server.evaluation.copies import EvaluationArm, EvaluationKind, copy_of
from fairlane_server.log_replay.journal import ReplayedWork, ReplayJournal
from fairlane_server.log_replay.plan import LogReplayAction, LogReplayPlan, LogReplayState
from fairlane_server.log_replay.progress import ReplayCounts, ReplayRange
from fairlane_server.log_replay.report import FIRST_PLACE, ReportBuilder
from fairlane_server.log_replay.selection import CopyDecision
from fairlane_server.log_replay.store import (
    LogReplay,
    LogReplayNotFoundError,
    LogReplays,
    LogReplayStateError,
    ReplayProgress,
)
from fairlane_server.postgres.connection import ALL_TENANTS, ReconnectingConnection
from fairlane_server.postgres.leadership import Leadership
from stream_processors.recorder.projection import LogRecord, project
from stream_processors.recorder.store import RecorderStore
from tests.kit.stack import PostgresServer

pytestmark = [pytest.mark.full, pytest.mark.timeout(120)]

_numbers = count()
CODEC = default_codec()
PLAN = LogReplayPlan("digits", "2", "1", 1, 2, name="yesterday", reason="a test")


@pytest.fixture
def journal(migrated: PostgresServer) -> Iterator[ReplayJournal]:
    with ReplayJournal(migrated.admin_dsn) as made:
        record(migrated, *(tenant(name, consent) for name, consent in (("acme", "allowed"), ("globex", "denied"))))
        yield made


@pytest.fixture
def replays(migrated: PostgresServer) -> Iterator[LogReplays]:
    with LogReplays(migrated.operator_dsn) as made:
        yield made


@pytest.fixture
def made(replays: LogReplays) -> LogReplay:
    return replays.create(PLAN, "1", "a person", 1_000)


def tenant(name: str, consent: str) -> LogRecord:
    spec = TenantSpec(name, evaluation=consent)
    return LogRecord(names.CONTROL_TENANTS, 0, next(_numbers), now_ms(), name.encode(), CODEC.encode(spec))


def work(owner: str = "acme", **fields: object) -> ReplayedWork:
    """Admitted work, in the log."""
    number = next(_numbers)
    request = InferenceRequest(
        f"{number:08x}-0000-4000-8000-000000000000", "digits", "classify", RequestInput(image=b"x")
    )
    item = WorkItem(
        *(replace(request, **fields), owner, "classify", "1", "normal", 1),  # type: ignore[arg-type]  # fields of it
        *(1_000, 1_000, 1_000, 61_000, names.replies_topic(owner), "dispatcher-1"),
        SourceCoordinate(names.requests_topic(owner), 0, number),
    )
    return ReplayedWork(SourceCoordinate("priority.classify.normal", 0, number), item)


def usage(one: ReplayedWork, outcome: str = Outcome.OK) -> LogRecord:
    item = one.item
    event = UsageEvent(
        request_id=item.request.request_id,
        tenant=item.tenant,
        pool=item.pool,
        model="digits",
        model_version="1",
        priority_class="normal",
        outcome=outcome,
        code=None,
        prompt_tokens=0,
        completion_tokens=0,
        cached_tokens=0,
        cost_tokens=1,
        engine_ms=5,
        occurred_at_ms=now_ms(),
        work=one.place,
    )
    return LogRecord(names.LEDGER_USAGE, 0, next(_numbers), now_ms(), b"x", CODEC.encode(event))


def reply(item: WorkItem, outcome: str = Outcome.OK, label: str = "7") -> LogRecord:
    at_ms = now_ms()
    made = InferenceReply(
        *(item.request.request_id, item.tenant, outcome),
        model="digits",
        model_version=item.model_version,
        task="classify",
        output=Output(labels=(LabelScore(label, 0.9),)) if outcome == Outcome.OK else None,
        timings=Timings(at_ms, at_ms, at_ms, at_ms, at_ms, at_ms + 5),
        source=item.source,
        evaluation=item.evaluation,
    )
    return LogRecord(item.reply_topic, 0, next(_numbers), at_ms, b"x", CODEC.encode(made))


def record(database: PostgresServer, *records: LogRecord) -> None:
    """As the recorder does."""
    with closing(RecorderStore(database.recorder_dsn)) as store:
        store.write(project(records, CODEC), {})


def answer(database: PostgresServer, *works: ReplayedWork, outcome: str = Outcome.OK) -> None:
    record(database, *(usage(one, outcome) for one in works))
    record(database, *(reply(one.item, outcome) for one in works))


def copies(made: LogReplay, one: ReplayedWork) -> dict[str, WorkItem]:
    tenant, request = one.request
    versions = {EvaluationArm.CANDIDATE: "2", EvaluationArm.CHAMPION: "1"}
    return {
        arm: copy_of(
            *(one.item, EvaluationMark(EvaluationKind.REPLAY, made.replay, arm, tenant, request), version, now_ms()),
            60_000,
        )
        for arm, version in versions.items()
    }


def test_each_request_is_decided_by_what_is_known_of_it(
    migrated: PostgresServer, journal: ReplayJournal, made: LogReplay
) -> None:
    fine, failed, denied = work(), work(), work("globex")
    answer(migrated, fine, denied)
    answer(migrated, failed, outcome=Outcome.FAILED)
    expired, unknown = work(), work()
    answer(migrated, expired, outcome=Outcome.EXPIRED)
    # Handed back: another dispatch of it was answered.
    handed_back, again = work(), work()
    again = replace(again, item=replace(handed_back.item, handed_back=1))
    record(migrated, usage(handed_back, Outcome.REJECTED))
    answer(migrated, again)
    erased, in_conversation = work(), work(conversation_id="orders-17")
    answer(migrated, erased, in_conversation)
    with Erasures(migrated.gateway_dsn, "acme", 60_000) as erasures:
        erasures.request(ErasureKind.REQUESTS, [erased.request[1]], "a person")
        erasures.request(ErasureKind.CONVERSATION, ["orders-17"], "a person")

    works = [fine, failed, denied, expired, unknown, handed_back, again, erased, in_conversation]

    assert journal.decide(made, works) == [
        *(CopyDecision.COPIED, CopyDecision.COPIED, CopyDecision.DENIED),
        *(CopyDecision.UNANSWERED, CopyDecision.UNANSWERED, CopyDecision.UNANSWERED, CopyDecision.COPIED),
        *(CopyDecision.ERASED, CopyDecision.ERASED),
    ]
    assert journal.decide(made, []) == []


def test_a_request_is_bound_to_one_dispatch(
    migrated: PostgresServer, journal: ReplayJournal, made: LogReplay, replays: LogReplays
) -> None:
    first, other = work(), work()
    twice = replace(work(), item=first.item)
    answer(migrated, first, other, twice)

    assert journal.decide(made, [twice, first, other]) == [
        *(CopyDecision.COPIED, CopyDecision.REPEATED, CopyDecision.COPIED)
    ]
    # After a kill, in any order and in other batches.
    assert journal.decide(made, [first]) == [CopyDecision.REPEATED]
    assert journal.decide(made, [other, twice]) == [CopyDecision.COPIED, CopyDecision.COPIED]
    another = replays.create(replace(PLAN, name="another"), "1", "a person", 2_000)
    assert journal.decide(another, [first]) == [CopyDecision.COPIED]


def test_results_are_counted_and_what_is_missing(
    migrated: PostgresServer, journal: ReplayJournal, made: LogReplay
) -> None:
    works = [work() for _ in range(4)]
    answer(migrated, *works)
    journal.decide(made, works)
    assert journal.missing(made) == 8
    done, half, erased, _ = works
    both = copies(made, done)
    record(migrated, *map(reply, both.values()))
    record(migrated, reply(copies(made, half)[EvaluationArm.CANDIDATE], Outcome.FAILED))
    record(migrated, reply(copies(made, half)[EvaluationArm.CHAMPION], Outcome.EXPIRED))

    found = journal.results(made)

    assert found.answered == {"candidate": 2, "champion": 2}
    assert (found.failed, found.dropped, found.total) == ({"candidate": 1}, {"champion": 1}, 4)
    assert journal.missing(made) == 4
    with Erasures(migrated.gateway_dsn, "acme", 60_000) as erasures:
        erasures.request(ErasureKind.REQUESTS, [erased.request[1]], "a person")
    assert journal.missing(made) == 2
    record(migrated, tenant("acme", "denied"))
    assert journal.missing(made) == 0


def test_pairs_and_labels_make_a_report_while_the_tenant_allows_it(
    migrated: PostgresServer, journal: ReplayJournal, made: LogReplay
) -> None:
    works = [work() for _ in range(3)]
    answer(migrated, *works)
    journal.decide(made, works)
    for one in works:
        made_copies = copies(made, one)
        record(migrated, *(reply(copy, label="1" if arm == "candidate" else "7") for arm, copy in made_copies.items()))
    said = Feedback(works[0].request[1], "acme", thumb="down", correction="7", given_by="anna", given_at_ms=now_ms())
    record(migrated, LogRecord(names.LEDGER_FEEDBACK, 0, next(_numbers), now_ms(), b"acme", CODEC.encode(said)))

    assert journal.labels(made) == {works[0].request: "7"}
    builder = ReportBuilder(journal.labels(made))
    while pairs := journal.pairs(made, builder.place, 4):
        builder.add(pairs)
    (task,) = builder.report().tasks
    assert (task.pairs, task.equal) == (3, {"candidate": 0.0, "champion": 1.0})

    record(migrated, tenant("acme", "denied"))
    assert journal.pairs(made, FIRST_PLACE, 4) == []
    assert journal.labels(made) == {}


def test_a_replay_begins_goes_on_and_ends(journal: ReplayJournal, made: LogReplay, replays: LogReplays) -> None:
    assert [one.replay for one in journal.open()] == [made.replay]
    assert (made.state, made.ranges, made.name) == (LogReplayState.PLANNED, None, "yesterday")
    ranges = [ReplayRange("priority.classify.low", 0, 5, 9)]
    journal.begin(made, ranges, 5_000)
    journal.begin(made, [], 6_000)
    progress = ReplayProgress(ReplayCounts(read=3, copied=2), 3, 4, {"candidate": 2}, {}, {}, 1.5, 2.0, 7_000)
    journal.note(made, progress, "why")
    running = replays.get("yesterday")
    assert (running.state, running.ranges, running.started_at_ms) == (LogReplayState.RUNNING, tuple(ranges), 5_000)
    assert (running.progress, running.trouble) == (progress, "why")

    paused = replays.steer("yesterday", LogReplayAction.PAUSE, "a person", "", 8_000)
    assert (paused.state, journal.open()) == (LogReplayState.PAUSED, [])
    journal.end(made, LogReplayState.FINISHED, None, None, 9_000)
    assert replays.get(made.replay).state is LogReplayState.PAUSED, "a person was faster"
    replays.steer(made.replay, LogReplayAction.RESUME, "a person", "", 9_000)
    journal.begin(running, ranges, 9_500)
    journal.end(made, LogReplayState.FINISHED, None, ReportBuilder({}).report(), 10_000)
    ended = replays.get(made.replay)
    assert (ended.state, ended.started_at_ms, ended.ended_at_ms) == (LogReplayState.FINISHED, 5_000, 10_000)
    assert ended.report == {"verdict": "not enough", "reason": "no request was answered by both versions", "tasks": []}
    with pytest.raises(LogReplayStateError, match="finished"):
        replays.steer("yesterday", LogReplayAction.CANCEL, "a person", "", 11_000)
    with pytest.raises(LogReplayNotFoundError):
        replays.get("another")
    with pytest.raises(LogReplayStateError, match="another replay has the name yesterday"):
        replays.create(PLAN, "1", "a person", 12_000)


def test_replays_come_in_pages_and_are_forgotten_in_time(
    migrated: PostgresServer, journal: ReplayJournal, replays: LogReplays
) -> None:
    made = [replays.create(replace(PLAN, name=None), "1", "a person", number) for number in (1, 2, 3)]
    newest = replays.page(None, 2)
    assert [one.created_at_ms for one in newest] == [3, 2]
    assert [one.replay for one in replays.page((2, newest[1].replay), 2)] == [made[0].replay]

    one = work()
    answer(migrated, one)
    journal.decide(made[0], [one])
    replays.steer(made[0].replay, LogReplayAction.CANCEL, "a person", "", 1_000)
    assert not journal.forget(1_000, 1_000)
    assert len(replays.page(None, 9)) == 3
    assert not journal.forget(1_001, 1_000)
    assert journal.decide(made[0], [replace(work(), item=one.item)]) == [CopyDecision.UNANSWERED]
    assert not journal.forget(1_001, 1_001)
    assert [one.created_at_ms for one in replays.page(None, 9)] == [3, 2]


def test_one_process_leads_until_its_session_ends(migrated: PostgresServer) -> None:
    first, second = (Leadership(migrated.admin_dsn, "test", 7) for _ in range(2))
    assert first.holds()
    assert not second.holds()
    assert first.holds()
    first.release()
    assert second.holds()
    assert not first.holds()
    first.release()
    second.release()


def test_the_admin_api_reads_no_output_itself(migrated: PostgresServer) -> None:
    kept = ReconnectingConnection(migrated.admin_dsn, "test", 10.0)
    with pytest.raises(psycopg.errors.InsufficientPrivilege), kept.transaction(ALL_TENANTS) as connection:
        connection.execute(b"SELECT output FROM evaluation_results")
    kept.close()

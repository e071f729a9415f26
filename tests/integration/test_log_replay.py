"""Replays of the log on a real broker and a real Postgres: what is copied, once, and what is said about it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from structlog.testing import capture_logs

from fairlane import names
from fairlane.clock import now_ms
from fairlane.evaluation_records import EvaluationMark
from fairlane.names import priority_topic
from fairlane.outcomes import Outcome
from fairlane.records import ConversationTurn, Message, Output, TenantSpec, WorkItem
from fairlane_server import cli
from fairlane_server.administration.events import AdminAudit, EventFilter
from fairlane_server.administration.log_replays import LogReplayOffice
from fairlane_server.control.route_change import change_route
from fairlane_server.erasure.erasures import ErasureKind, Erasures
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.log_replay.copier import ReplayCopier
from fairlane_server.log_replay.journal import ReplayJournal
from fairlane_server.log_replay.plan import LogReplayAction, LogReplayState
from fairlane_server.log_replay.progress import ReplayCounts
from fairlane_server.log_replay.store import LogReplay, LogReplays, LogReplayStateError
from fairlane_server.log_replay.verdict import ReplayMeasure, ReplayVerdict
from fairlane_server.models.changes import Author, with_stopped
from fairlane_server.processes.watchdog import Watchdog
from tests.kit.deployment import default_model
from tests.kit.log_replay_kit import Answering, ReplayBench, requests_of
from tests.kit.pipeline import Pipeline
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually
from tests.kit.work_items import write_work

pytestmark = [pytest.mark.full, pytest.mark.broker, pytest.mark.timeout(180)]

ALLOWED = TenantSpec("a", evaluation="allowed")


@pytest.fixture
def bench(broker: str, tmp_path: Path, unique: str, migrated: PostgresServer) -> Iterator[ReplayBench]:
    old = default_model(unique, f"{unique}-pool")
    models = (old, replace(old, version="2"))
    with Pipeline(broker, tmp_path, unique, tenants=(ALLOWED, "b"), models=models) as pipeline:
        yield ReplayBench(pipeline, migrated)


def counts(bench: ReplayBench, made: LogReplay) -> ReplayCounts:
    return bench.replay(made).progress.counts


def has_copies(bench: ReplayBench, made: LogReplay, number: int) -> bool:
    return len(bench.copies(made)) == number


def test_every_answered_request_is_copied_once_for_each_arm_as_it_ran_then(bench: ReplayBench) -> None:
    items = bench.work(40)
    bench.answered(items)
    made = bench.plan()
    with bench.running():
        eventually(lambda: len(bench.copies(made)) == 80, what="the copies")
        bench.end_copies(bench.copies(made))
        ended = bench.wait_for(made, LogReplayState.FINISHED)

    assert bench.copied_requests(made) == dict.fromkeys(requests_of(items), 1)
    originals = {item.request.request_id: item for item in items}
    for copy in bench.copies(made):
        assert copy.evaluation is not None
        original = originals[copy.evaluation.request_id]
        assert copy.request.input == original.request.input
        assert (copy.passages, copy.history, copy.guardrails) == (original.passages, original.history, None)
        version = {"candidate": "2", "champion": "1"}[copy.evaluation.arm]
        assert (copy.model_version, copy.tenant, copy.reply_topic) == (
            version,
            names.EVALUATION_TENANT,
            names.EVALUATION_REPLIES,
        )
    found = ended.progress
    assert found.counts == ReplayCounts(read=40, sampled=40, copied=40)
    assert found.answered == {"candidate": 40, "champion": 40}
    assert found.done_offsets == found.all_offsets > 0
    assert ended.report is not None
    assert ended.report["verdict"] == ReplayVerdict.UNDECIDED, "40 pairs prove nothing"


@pytest.mark.parametrize(
    ("labels", "verdict"),
    [
        ({}, ReplayVerdict.SAME),
        ({"candidate": "1"}, ReplayVerdict.DIFFERENT),
        # The champion gives other answers than before as well.
        ({"candidate": "1", "champion": "1"}, ReplayVerdict.SAME),
    ],
)
def test_the_candidate_is_judged_above_the_noise_floor(
    bench: ReplayBench, labels: dict[str, str], verdict: ReplayVerdict
) -> None:
    bench.answered(bench.work(520))
    made = bench.plan(most_outstanding=400)
    with Answering(bench, made, labels), bench.running():
        ended = bench.wait_for(made, LogReplayState.FINISHED, 120.0)

    assert ended.report is not None
    assert ended.report["verdict"] == verdict, ended.report
    (task,) = ended.report["tasks"]
    assert (task["task"], task["pairs"]) == ("classify", 520)


def test_work_that_is_not_to_be_replayed_is_counted_by_its_reason(bench: ReplayBench) -> None:
    wanted, of_b, expired, old, erased = (bench.work(3, tenant) for tenant in ("a", "b", "a", "a", "a"))
    bench.answered([*wanted, *of_b])
    bench.answered(expired, outcome=Outcome.EXPIRED)
    # Their results are older than the retention.
    write_work(bench.pipeline, *old)
    bench.answered(erased)
    # Of another version, a copy of a shadow, of another model, and what cannot be read.
    bench.answered(bench.work(2, model_version="2"), version="2")
    (shadowed,) = bench.work(1)
    mark = EvaluationMark("shadow", "s", "candidate", shadowed.tenant, shadowed.request.request_id)
    write_work(bench.pipeline, replace(shadowed, evaluation=mark))
    (other,) = bench.work(1)
    write_work(bench.pipeline, replace(other, request=replace(other.request, model="another")))
    bench.pipeline.write(priority_topic(bench.pipeline.pool, "normal"), [(b"key", b"\x00\x00\x00\x00\x02no work item")])
    tenant = bench.pipeline.tenant("a")
    with Erasures(bench.database.gateway_dsn, tenant, 60_000) as erasures:
        erasures.request(ErasureKind.REQUESTS, [one.request.request_id for one in erased], "a test")

    made = bench.plan()
    with Answering(bench, made), bench.running():
        ended = bench.wait_for(made, LogReplayState.FINISHED)

    assert bench.copied_requests(made) == dict.fromkeys(requests_of(wanted), 1)
    assert ended.progress.counts == ReplayCounts(
        read=19, sampled=15, copied=3, denied=3, erased=3, unanswered=6, unreadable=1
    )


def test_a_request_that_was_given_an_erased_turn_is_not_copied(bench: ReplayBench) -> None:
    """It has the text of that turn in its history."""

    def of_conversation(items: list[WorkItem]) -> list[WorkItem]:
        return [replace(item, request=replace(item.request, conversation_id="talk")) for item in items]

    (first, alone) = of_conversation(bench.work(2))
    given = of_conversation(bench.work(2, history=(Message("user", "what is erased"),)))
    # It was submitted after the erasure was asked for, and before it took its turn.
    given[1] = replace(given[1], submitted_at_ms=given[1].submitted_at_ms + 5_000)
    (elsewhere,) = bench.work(1, history=(Message("user", "of another conversation"),))
    turn = ConversationTurn("talk", (Message("user", "what is erased"),))
    bench.record(bench.reply(first, output=Output(text="an answer"), turn=turn))
    bench.answered([first, alone, *given, elsewhere])
    with Erasures(bench.database.gateway_dsn, bench.pipeline.tenant("a"), 60_000) as erasures:
        erasures.request(ErasureKind.REQUESTS, [first.request.request_id], "a test")

    made = bench.plan()
    with Answering(bench, made), bench.running():
        ended = bench.wait_for(made, LogReplayState.FINISHED)

    assert bench.copied_requests(made) == dict.fromkeys(requests_of([alone, elsewhere]), 1)
    assert ended.progress.counts == ReplayCounts(read=5, sampled=5, copied=2, erased=3)


def test_a_request_that_was_dispatched_twice_is_copied_once_as_it_was_answered(bench: ReplayBench) -> None:
    """Handed back, it is in the log with the context that it was answered with, and with the one of before."""
    items = bench.work(6)
    first = write_work(bench.pipeline, *items)
    bench.record(*(bench.usage(item, place, Outcome.REJECTED) for item, place in zip(items, first, strict=True)))
    again = [replace(item, handed_back=1, degradations=("no_retrieval",)) for item in items]
    bench.answered(again)
    # The same id was sent twice, and answered twice.
    twice = bench.work(4)
    bench.answered(twice)
    bench.answered(twice)

    made = bench.plan()
    with Answering(bench, made), bench.running():
        ended = bench.wait_for(made, LogReplayState.FINISHED)

    assert bench.copied_requests(made) == dict.fromkeys(requests_of([*items, *twice]), 1)
    of_handed_back = {item.request.request_id for item in items}
    for copy in bench.copies(made):
        assert copy.evaluation is not None
        is_one = copy.evaluation.request_id in of_handed_back
        assert copy.degradations == (("no_retrieval",) if is_one else ())
    assert ended.progress.counts == ReplayCounts(read=20, sampled=20, copied=10, unanswered=6, repeated=4)


def test_no_more_copies_are_outstanding_than_may_be(bench: ReplayBench) -> None:
    items = bench.work(60)
    bench.answered(items)
    made = bench.plan(most_outstanding=8)
    with bench.running():
        eventually(lambda: len(bench.copies(made)) == 8, what="the first copies")
        with Answering(bench, made) as answering:
            ended = bench.wait_for(made, LogReplayState.FINISHED, 120.0)

    assert answering.most_outstanding <= 8
    assert bench.copied_requests(made) == dict.fromkeys(requests_of(items), 1)
    assert ended.progress.counts.copied == 60


def test_a_replay_is_paused_goes_on_and_is_cancelled(bench: ReplayBench) -> None:
    items = bench.work(30)
    bench.answered(items)
    made = bench.plan(most_outstanding=8, name="yesterday")

    def steer(action: LogReplayAction) -> LogReplay:
        with LogReplays(bench.database.operator_dsn) as replays:
            return replays.steer("yesterday", action, "a person", "a reason", now_ms())

    with bench.running():
        eventually(lambda: len(bench.copies(made)) == 8, what="the first copies")
        assert steer(LogReplayAction.PAUSE).state is LogReplayState.PAUSED
        # The copies of another replay show that the runner has looked since.
        for _ in range(2):
            beside = bench.plan(most_requests=1)
            eventually(partial(has_copies, bench, beside, 2), what="the copies of another replay")
            bench.end_copies(bench.copies(made))
        assert has_copies(bench, made, 8)
        assert steer(LogReplayAction.RESUME).state is LogReplayState.PLANNED
        eventually(lambda: len(bench.copies(made)) == 16, what="more copies")
        assert steer(LogReplayAction.CANCEL).state is LogReplayState.CANCELLED
    with pytest.raises(LogReplayStateError, match="cancelled"):
        steer(LogReplayAction.RESUME)

    assert set(bench.copied_requests(made).values()) == {1}
    with AdminAudit(bench.database.admin_dsn) as audit:
        events = audit.list(EventFilter(author="a person"), None, 10)
    assert [event.event for event in events] == ["log_replay_cancelled", "log_replay_resumed", "log_replay_paused"]
    assert {event.details["replay"] for event in events} == {made.replay}


def test_at_most_so_many_requests_are_copied(bench: ReplayBench) -> None:
    bench.answered(bench.work(30))
    made = bench.plan(most_requests=7)
    with Answering(bench, made), bench.running():
        ended = bench.wait_for(made, LogReplayState.FINISHED)

    assert ended.progress.counts.copied == 7
    assert len(bench.copies(made)) == 14


def test_what_the_log_does_not_hold_any_more_is_gone(bench: ReplayBench) -> None:
    items = bench.work(20)
    # All in one partition.
    places = write_work(bench.pipeline, *items, key="one")
    bench.record_answers(items, places)
    made = bench.plan(most_outstanding=8)
    with bench.running():
        eventually(lambda: len(bench.copies(made)) == 8, what="the first copies")
    # Four are copied; the next nine are removed meanwhile.
    topic, partition = places[0].topic, places[0].partition
    cut = TopicPartition(topic, partition, places[13].offset)
    for deleted in bench.pipeline.admin.delete_records([cut]).values():
        deleted.result(20.0)
    with Answering(bench, made), bench.running():
        ended = bench.wait_for(made, LogReplayState.FINISHED)

    assert ended.progress.counts == ReplayCounts(read=11, sampled=11, copied=11, gone=9)
    assert ended.progress.done_offsets == ended.progress.all_offsets


def test_times_name_ranges_of_the_log(bench: ReplayBench) -> None:
    before, within, behind = (bench.work(5) for _ in range(3))
    bench.answered(before)
    from_ms = _another_ms()
    bench.answered(within)
    until_ms = _another_ms()
    bench.answered(behind)
    made = bench.plan(from_ms=from_ms, until_ms=until_ms)
    with Answering(bench, made), bench.running():
        ended = bench.wait_for(made, LogReplayState.FINISHED)

    assert bench.copied_requests(made) == dict.fromkeys(requests_of(within), 1)
    assert ended.ranges is not None
    assert sum(map(len, ended.ranges)) == 5


def test_a_replay_of_nothing_ends_at_once(bench: ReplayBench) -> None:
    made = bench.plan()
    with bench.running():
        ended = bench.wait_for(made, LogReplayState.FINISHED)
    assert ended.ranges == ()
    assert ended.report is not None
    assert ended.report["verdict"] == ReplayVerdict.UNDECIDED


def test_results_that_an_erasure_removes_do_not_hold_up_the_end(
    bench: ReplayBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairlane_server.log_replay.pace.PATIENCE_S", 0.5)
    items = bench.work(5)
    bench.answered(items)
    made = bench.plan()
    with bench.running():
        eventually(lambda: len(bench.copies(made)) == 10, what="the copies")
        gone = items[0].request.request_id
        with Erasures(bench.database.gateway_dsn, bench.pipeline.tenant("a"), 60_000) as erasures:
            erasures.request(ErasureKind.REQUESTS, [gone], "a test")
        bench.end_copies([one for one in bench.copies(made) if one.evaluation and one.evaluation.request_id != gone])
        ended = bench.wait_for(made, LogReplayState.FINISHED)
    assert ended.trouble is None
    assert ended.progress.answered == {"candidate": 4, "champion": 4}


def test_a_tenant_that_withdraws_its_consent_is_in_no_report(bench: ReplayBench) -> None:
    bench.answered(bench.work(60))
    made = bench.plan()
    with Answering(bench, made), bench.running():
        bench.wait_for(made, LogReplayState.FINISHED)
    bench.execute("UPDATE log_replays SET report = NULL")
    assert report(bench, made)["tasks"][0]["pairs"] == 60

    bench.record_tenants(replace(bench.pipeline.tenants[bench.pipeline.tenant("a")], evaluation="denied"))

    assert report(bench, made)["tasks"] == ()


def test_a_replay_for_a_version_that_was_stopped_fails(bench: ReplayBench) -> None:
    bench.answered(bench.work(3))
    made = bench.plan()
    change_route(
        *(bench.pipeline.settings, bench.pipeline.codec, bench.model),
        lambda published: with_stopped(published, bench.model, "2", Author("a test", now_ms()), stopped=True),
    )
    with bench.running():
        ended = bench.wait_for(made, LogReplayState.FAILED)
    assert ended.trouble == f"version 2 of {bench.model} was stopped"
    assert bench.copies(made) == []


@pytest.fixture
def journal(bench: ReplayBench) -> Iterator[ReplayJournal]:
    made = ReplayJournal(bench.database.admin_dsn)
    yield made
    made.close()


def copier(bench: ReplayBench, made: LogReplay, journal: ReplayJournal) -> ReplayCopier:
    return ReplayCopier(bench.settings, bench.pipeline.codec, made, journal, Watchdog(60.0, pytest.fail))


def test_of_two_writers_of_a_replay_the_later_goes_on_and_the_earlier_commits_nothing(
    bench: ReplayBench, journal: ReplayJournal
) -> None:
    items = bench.work(50)
    bench.answered(items)
    made = bench.plan()
    topics = [priority_topic(bench.pipeline.pool, "normal")]
    with copier(bench, made, journal) as first, copier(bench, made, journal) as second:
        ranges = first.find(topics)
        first.start(ranges)
        while first.counts.copied < 10:
            first.step(10 - first.counts.copied, now_ms())
        second.start(ranges)
        assert second.counts == first.counts
        assert first.step(0, now_ms()) == 0, "it has read more, and has no room for it"
        with pytest.raises(ClusterError, match="not committed"):
            first.step(5, now_ms())
        while not second.is_read:
            second.step(7, now_ms())
        assert second.counts == ReplayCounts(read=50, sampled=50, copied=50)
    assert bench.copied_requests(made) == dict.fromkeys(requests_of(items), 1)


class _KilledError(Exception):
    """The process was killed here."""


@pytest.mark.parametrize("place", ["before the claims", "behind the claims", "behind the commit"])
def test_a_writer_that_is_killed_anywhere_loses_nothing_and_doubles_nothing(
    bench: ReplayBench, journal: ReplayJournal, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = bench.work(40)
    bench.answered(items)
    made = bench.plan()
    topics = [priority_topic(bench.pipeline.pool, "normal")]
    decide, commit = ReplayJournal.decide, ReplayCopier._commit
    steps = {"left": 0}

    def struck(here: str) -> None:
        if here == place:
            steps["left"] -= 1
            if steps["left"] == 0:
                raise _KilledError

    def decided(self: ReplayJournal, *arguments: Any) -> Any:
        struck("before the claims")
        found = decide(self, *arguments)
        struck("behind the claims")
        return found

    def committed(self: ReplayCopier, *arguments: Any) -> None:
        commit(self, *arguments)
        struck("behind the commit")

    monkeypatch.setattr(ReplayJournal, "decide", decided)
    monkeypatch.setattr(ReplayCopier, "_commit", committed)
    ranges = None
    for round_ in range(100):
        steps["left"] = 1 + round_ % 3
        with copier(bench, made, journal) as one:
            ranges = ranges or one.find(topics)
            one.start(ranges)
            try:
                while not one.is_read:
                    one.step(4, now_ms())
            except _KilledError:
                continue
            break
    assert round_ > 3, "it was killed"
    assert one.counts == ReplayCounts(read=40, sampled=40, copied=40)
    assert bench.copied_requests(made) == dict.fromkeys(requests_of(items), 1)


def test_of_two_runners_one_leads_and_the_other_takes_over(bench: ReplayBench) -> None:
    items = bench.work(30)
    bench.answered(items)
    made = bench.plan(most_outstanding=8)
    with bench.running() as first:
        eventually(lambda: len(bench.copies(made)) == 8, what="the first copies")
        with bench.running(), Answering(bench, made):
            eventually(lambda: len(bench.copies(made)) > 8, what="more copies")
            first.stop()
            ended = bench.wait_for(made, LogReplayState.FINISHED)
    assert ended.progress.counts == ReplayCounts(read=30, sampled=30, copied=30)
    assert bench.copied_requests(made) == dict.fromkeys(requests_of(items), 1)


def test_the_commands_plan_watch_and_report(
    bench: ReplayBench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.answered(bench.work(60))
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", bench.pipeline.settings.kafka_bootstrap_servers)
    monkeypatch.setenv("POSTGRES_DSN", bench.database.operator_dsn)

    def run(*arguments: str) -> tuple[int, Any, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main([*arguments, "--json"])
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, json.loads(captured.out) if captured.out else None, captured.err

    create = ("replay", "create", "--model", bench.model, "--candidate", "2", "--from", "1h", "--sample", "1")

    code, made, complaint = run(*create, "--name", "yesterday", "--tenant", bench.pipeline.tenant("a"))
    assert (code, made["state"], made["against"]) == (0, "planned", "1"), complaint
    assert run(*create, "--name", "yesterday")[2].count("another replay has the name yesterday") == 1
    assert "candidate: " in run("replay", "create", "--model", bench.model, "--candidate", "9", "--from", "1h")[2]
    replay = bench.named(made["replay"])
    # Its log is not what a command prints.
    with capture_logs(), Answering(bench, replay), bench.running():
        code, watched, _ = run("replay", "watch", "yesterday")
    assert (code, watched["state"]) == (0, "finished")
    assert watched["progress"]["counts"]["copied"] == 60
    code, judged, _ = run("replay", "report", "yesterday")
    assert (code, judged["is_final"], judged["verdict"]) == (0, True, "not enough")
    assert {one["measure"] for one in judged["tasks"][0]["findings"]} == set(ReplayMeasure)
    assert [one["name"] for one in run("replay", "list")[1]["replays"]] == ["yesterday"]
    assert "the replay is finished" in run("replay", "pause", "yesterday")[2]


def report(bench: ReplayBench, made: LogReplay) -> dict[str, Any]:
    """As the process of the admin API reads it."""
    with LogReplayOffice(bench.settings) as office:
        return office.report(made.replay)[1]


def _another_ms() -> int:
    """A time between what was written and what follows."""
    begins_ms = now_ms() + 5
    eventually(lambda: now_ms() > begins_ms + 5, what="another millisecond")
    return begins_ms

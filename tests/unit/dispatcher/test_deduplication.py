"""Repeated request ids whose firsts cannot be looked up, are not answered yet, or come in a flood."""

import asyncio
from typing import cast

import pytest

from fairlane.outcomes import Code, Decision, Outcome
from fairlane.records import InferenceReply, SourceCoordinate, TenantSpec, UsageEvent
from stream_processors.dispatcher.deduplication.duplicates import (
    Duplicate,
    DuplicateQueues,
    RecentResult,
    RecentResults,
)
from stream_processors.dispatcher.deduplication.stage import (
    HELD_FOR_MS,
    ReplyGoneError,
    ReplyUnknownError,
)
from stream_processors.dispatcher.feedback.work_records import WorkSeen
from stream_processors.dispatcher.queued_request import Candidate, ReceivedRecord
from stream_processors.dispatcher.scheduling.in_flight import Dispatched, SettledWork, WorkId
from tests.kit.deduplication_doubles import FIRST, Find, away, finds, later, repeated
from tests.kit.dispatcher_bench import NOW_MS, Bench, encoded, request


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.register([TenantSpec("acme"), TenantSpec("other")])
    made.assign("requests.other")
    return made


def ok(number: int = 1) -> InferenceReply:
    return InferenceReply(request(number).request_id, "acme", Outcome.OK)


async def nothing(_tenant: str, _request_id: str, _source: SourceCoordinate) -> InferenceReply | None:
    return None


def refused_by_a_consumer(number: int = 1) -> InferenceReply:
    return InferenceReply(request(number).request_id, "acme", Outcome.REJECTED, Code.OVERLOADED)


# What cannot be told


@pytest.mark.parametrize("find", [away, nothing])
def test_a_retry_is_never_dropped_because_the_first_reply_is_not_found(find: Find) -> None:
    """A consumer's refusal invited it: Postgres is away, or the recorder behind."""
    bench = repeated(1)
    finds(bench, find)
    assert not bench.run(encoded(1)), "nothing is decided yet"
    later(bench, HELD_FOR_MS)
    (reply,) = bench.decoded("replies.acme")
    assert (reply.outcome, reply.code, reply.replayed) == (Outcome.REJECTED, Code.OVERLOADED, False)
    assert reply.retry_after_ms >= 5_000
    assert reply.source == SourceCoordinate("requests.acme", 0, 0)
    (event,) = bench.audit()
    assert (event.decision, event.inputs["first"]) == (Decision.REFUSED, "requests.acme-0@77")
    assert not bench.decoded("priority.pool.normal"), "it is not run beside its first"
    assert bench.seen.firsts == {request(1).request_id: FIRST}, "the next try asks for the same first"


@pytest.mark.parametrize("find", [away, nothing])
def test_a_retry_is_run_when_the_refusal_is_found_after_all(find: Find) -> None:
    bench = repeated(1)
    finds(bench, find)
    bench.run(encoded(1))

    async def found(*_asked: object) -> InferenceReply:
        return refused_by_a_consumer()

    finds(bench, found)
    later(bench, 1_000)
    (work,) = bench.decoded("priority.pool.normal")
    assert work.source == SourceCoordinate("requests.acme", 0, 0)
    assert not bench.decoded("replies.acme")


def test_a_copy_is_sent_when_the_reply_is_found_after_all() -> None:
    bench = repeated(1)
    finds(bench, nothing)
    bench.run(encoded(1))

    async def found(*_asked: object) -> InferenceReply:
        return ok()

    finds(bench, found)
    later(bench, 1_000)
    (reply,) = bench.decoded("replies.acme")
    assert reply.replayed


def test_a_reply_that_is_lost_is_not_asked_for_again() -> None:
    bench = repeated(1)

    async def gone(*_asked: object) -> None:
        raise ReplyGoneError

    finds(bench, gone)
    bench.run(encoded(1))
    (event,) = bench.audit()
    assert (event.decision, event.inputs) == (Decision.DUPLICATE, {"replayed": "false"})


def test_an_archive_that_is_away_is_left_alone_for_a_while() -> None:
    bench = repeated(1, 2, 3)
    asked: list[str] = []

    async def find(_tenant: str, request_id: str, _source: SourceCoordinate) -> InferenceReply | None:
        asked.append(request_id)
        raise ReplyUnknownError("OperationalError")

    finds(bench, find)
    bench.run(encoded(1), encoded(2), encoded(3))
    assert len(asked) == 1
    later(bench, 100)
    assert len(asked) == 2
    later(bench, 50)
    assert len(asked) == 2, "the second time for longer"


def test_what_is_revoked_is_dropped() -> None:
    bench = repeated(1)
    finds(bench, nothing)
    bench.run(encoded(1))
    bench.ownership.revoke_all()
    asyncio.run(bench.dispatcher.on_revoked())
    later(bench, HELD_FOR_MS)
    assert not bench.transactions.settlements


# What the work feed told


def ended(bench: Bench, number: int, code: Code | None, source_topic: str) -> None:
    """Its work came to an end."""
    place = SourceCoordinate("priority.pool.normal", 0, 50)
    outcome = Outcome.OK if code is None else Outcome.REJECTED
    request_id = request(number).request_id
    usage = UsageEvent(
        request_id, "acme", "pool", "words", "1", "normal", outcome, code, 1, 1, 0, 3, 1, bench.now_ms, place
    )
    seen = Dispatched(SourceCoordinate(source_topic, 0, 77), "acme", "dispatcher-2", 3)
    bench.dispatcher.updates.learn([WorkSeen(WorkId("priority.pool.normal", 0, 50), seen), usage])


@pytest.mark.parametrize("find", [away, nothing])
def test_a_retry_of_what_a_consumer_refused_is_run_without_any_archive(find: Find) -> None:
    bench = repeated(1)
    finds(bench, find)
    ended(bench, 1, Code.OVERLOADED, "returned.pool")
    bench.run(encoded(1))
    (work,) = bench.decoded("priority.pool.normal")
    assert work.source == SourceCoordinate("requests.acme", 0, 0)
    assert bench.dispatcher.response_cache.recent_results.get(("acme", request(1).request_id)) is None


def test_what_was_handed_back_did_not_end() -> None:
    bench = repeated(1)
    finds(bench, away)
    ended(bench, 1, Code.OVERLOADED, "requests.acme")
    assert not bench.run(encoded(1))


@pytest.mark.parametrize("topic", ["requests.acme", "returned.pool"])
def test_what_was_handed_back_because_its_version_was_not_loaded_did_not_end(topic: str) -> None:
    """However often: it may come from a requeue topic already."""
    bench = repeated(1)
    finds(bench, away)
    ended(bench, 1, Code.UNKNOWN_MODEL, topic)
    assert not bench.run(encoded(1))


def test_a_repeat_of_what_was_answered_is_dropped_when_the_answer_cannot_be_looked_up() -> None:
    """Its reply was sent, and is not to be contradicted. As long as there is hope for a copy it waits."""
    bench = repeated(1)
    finds(bench, away)
    ended(bench, 1, None, "requests.acme")
    assert not bench.run(encoded(1))
    later(bench, HELD_FOR_MS)
    assert not bench.decoded("replies.acme")
    assert [event.decision for event in bench.audit()] == [Decision.DUPLICATE]


def test_so_many_ends_are_known() -> None:
    ends = RecentResults(2)
    place = WorkId("priority.pool.normal", 0, 1)
    for number in range(3):
        source = SourceCoordinate("requests.acme", 0, number)
        work = SourceCoordinate(*place)
        usage = UsageEvent(str(number), "acme", "pool", "words", "1", "normal", "ok", None, 1, 1, 0, 3, 1, 1, work)
        ends.note(SettledWork(source, None, usage))
    assert [ends.get(("acme", str(number))) for number in range(3)] == [
        None,
        RecentResult.ANSWERED,
        RecentResult.ANSWERED,
    ]


# Floods


def test_a_flood_of_repeats_costs_nobody_else_a_reply() -> None:
    """Of 1,200 the flooder has 1,000 looked up; the other tenant's one is answered in its first turn."""
    flood = range(1, 1_201)
    bench = repeated(*flood, max_undecided=10_000, max_span=10_000)
    bench.register([TenantSpec("acme"), TenantSpec("other")])
    bench.assign("requests.other")
    bench.seen.firsts[request(5_000).request_id] = SourceCoordinate("requests.other", 0, 99)
    asked: list[str] = []

    async def find(tenant: str, _request_id: str, _source: SourceCoordinate) -> InferenceReply | None:
        asked.append(tenant)
        return InferenceReply("", tenant, Outcome.OK)

    finds(bench, find)

    async def turn() -> None:
        for number in flood:
            await bench.write(number, encoded(number))
        await bench.write(0, encoded(5_000), topic="requests.other")
        intake = asyncio.create_task(bench.dispatcher.run())
        while bench.dispatcher.intake.buffer:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        intake.cancel()
        await asyncio.gather(intake, return_exceptions=True)
        await bench.decide()

    asyncio.run(turn())
    assert asked[:2] == ["acme", "other"]
    assert [reply.replayed for reply in bench.decoded("replies.other")] == [True]
    refused = [reply for reply in bench.decoded("replies.acme") if reply.code == Code.OVERLOADED]
    assert len(refused) == 200, "what finds no place is told to come again"


def test_backfill_of_a_tenant_with_many_repeats_pauses() -> None:
    bench = repeated(1, 2)
    bench.assign("backfill.acme")
    bench.dispatcher.deduplication.queues.most_per_tenant = 4
    bench.run(encoded(1), encoded(2))
    assert {partition.topic for partition in bench.dispatcher.paused_backfill()} == {"backfill.acme"}
    later(bench, HELD_FOR_MS)
    assert not bench.dispatcher.paused_backfill()


# The lines


def repeat(bench: Bench, tenant: str, *, due_ms: int = 0, size: int = 100) -> Duplicate:
    queued = bench.queued(request(1, metadata={"filler": "x" * size}), f"requests.{tenant}")
    return Duplicate(Candidate(queued, cast("ReceivedRecord", None)), FIRST, NOW_MS, due_ms=due_ms)


def tenant_of(repeat: Duplicate | None) -> str | None:
    return None if repeat is None else repeat.queued.tenant


def test_tenants_take_turns(bench: Bench) -> None:
    lines = DuplicateQueues()
    for tenant in ("acme", "acme", "acme", "other", "other"):
        assert not lines.put(repeat(bench, tenant))
    taken = [tenant_of(lines.take(NOW_MS)) for _ in range(6)]
    assert taken == ["acme", "other", "acme", "other", "acme", None]
    assert len(lines) == 0


def test_one_that_is_not_due_holds_up_nobody(bench: Bench) -> None:
    lines = DuplicateQueues()
    late, due = repeat(bench, "acme", due_ms=NOW_MS + 5), repeat(bench, "acme", due_ms=NOW_MS)
    lines.put(late)
    lines.put(due)
    assert lines.take(NOW_MS) is due
    assert lines.take(NOW_MS) is None
    assert lines.next_due_ms == NOW_MS + 5
    assert lines.take(NOW_MS + 5) is late


def test_when_all_is_full_the_line_that_holds_most_gives_way(bench: Bench) -> None:
    lines = DuplicateQueues(most=4)
    flood = [repeat(bench, "acme") for _ in range(4)]
    for one in flood:
        assert not lines.put(one)
    assert lines.put(repeat(bench, "other")) == [flood[-1]]
    lines = DuplicateQueues(most_bytes=10_000)
    large = [repeat(bench, "acme", size=4_000), repeat(bench, "acme", size=4_000)]
    for one in large:
        assert not lines.put(one)
    assert lines.put(repeat(bench, "other", size=3_000)) == [large[-1]]


def test_a_line_is_bounded_by_itself(bench: Bench) -> None:
    lines = DuplicateQueues(most_per_tenant=2)
    first, second, third = (repeat(bench, "acme") for _ in range(3))
    assert [lines.put(one) for one in (first, second, third)] == [[], [], [third]]
    assert lines.crowded() == {"acme"}

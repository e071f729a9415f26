"""Cancelled requests in the dispatcher's loop: wherever one waits, one answer, and the cancel is done last."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from fairlane import headers, metrics, names
from fairlane.outcomes import Code, Decision, Degradation, Outcome
from fairlane.ownership import PartitionId
from fairlane.records import Cancellation, CancelRequest, InferenceReply, Retrieval, SourceCoordinate, TenantSpec
from fairlane.schema_files import default_codec
from fairlane_server.kafka.transactions import Settlement
from stream_processors.dispatcher.deduplication.stage import HELD_FOR_MS
from stream_processors.dispatcher.queued_request import CancelCommand, Candidate, ReceivedRecord
from tests.kit.cached_replies import after, crowd, decisions, id_of
from tests.kit.deduplication_doubles import away, finds, later, repeated
from tests.kit.dispatcher_bench import NOW_MS, PARTITION, SECRET, Bench, encoded, handed_back, request
from tests.kit.intake_records import RETURNED

REQUESTS = "requests.acme"


def cancel(number: int = 1, tenant: str | None = None) -> bytes:
    return default_codec().encode(CancelRequest(id_of(number), tenant))


def settled_at(bench: Bench, offset: int, topic: str = REQUESTS) -> Settlement:
    """How the record there was settled, once."""
    (found,) = (one for one in bench.transactions.settlements if one.claim[:2] == (PartitionId(topic, 0), offset))
    return found


def is_settled(bench: Bench, offset: int, topic: str = REQUESTS) -> bool:
    return any(one.claim[:2] == (PartitionId(topic, 0), offset) for one in bench.transactions.settlements)


def told(bench: Bench) -> list[Cancellation]:
    """What the consumers are told, in settlements or beside them."""
    return bench.decoded_all(out for out in bench.transactions.written if out.topic == names.CONTROL_CANCELLATIONS)


def passed_on(bench: Bench) -> float:
    bench.dispatcher.output.counts.flush()
    value: float = metrics.CANCELS_PASSED_ON.labels(tenant="acme")._value.get()
    return value


def replies(bench: Bench) -> list[InferenceReply]:
    return bench.decoded("replies.acme")


# What waits


def test_a_request_that_waits_is_dropped_and_answered() -> None:
    bench = Bench()
    crowd(bench)
    after(bench, encoded(1))
    bench.now_ms += 35
    after(bench, cancel(1), offset=11)
    (reply,) = replies(bench)
    assert (reply.request_id, reply.tenant, reply.outcome, reply.code) == (id_of(1), "acme", Outcome.CANCELLED, None)
    assert reply.source == SourceCoordinate(REQUESTS, 0, 10)
    assert (reply.timings.admitted_at_ms, reply.timings.dispatched_at_ms) == (NOW_MS, None)
    *_, event = bench.audit()
    assert (event.decision, event.source, event.message) == (Decision.CANCELLED, reply.source, reply.message)
    assert {name: event.inputs[name] for name in ("waited_ms", "pool", "requested_at_ms", "cancel_at")} == {
        "waited_ms": "35",
        "pool": "pool",
        "requested_at_ms": str(NOW_MS),
        "cancel_at": "requests.acme-0@11",
    }
    assert not bench.dispatcher.scheduler.claims()
    assert not bench.seen.forgotten, "sent again, it is a copy of one that was answered"
    assert not told(bench)
    bench.dispatcher.output.counts.flush()
    assert metrics.DECISIONS.labels(tenant="acme", decision="cancelled", code="")._value.get() >= 1


def test_the_cancel_is_done_after_what_it_cancels() -> None:
    """A crash between must not leave a request that nobody cancels."""
    bench = Bench()
    crowd(bench)
    after(bench, encoded(1), cancel(1))
    assert settled_at(bench, 10).outputs
    assert not is_settled(bench, 11)
    bench.commit()
    assert settled_at(bench, 11).outputs == ()
    bench.commit()
    assert len(bench.transactions.settlements) == 3


def test_a_request_and_its_cancel_that_come_together_cost_nothing() -> None:
    """The first of the pool could run at once."""
    bench = Bench()
    bench.run(encoded(1), cancel(1), encoded(2))
    assert [work.request.request_id for work in bench.decoded("priority.pool.normal")] == [id_of(2)]
    assert [reply.outcome for reply in replies(bench)] == [Outcome.CANCELLED]
    assert bench.dispatcher.scheduler.in_flight.own_tenant_tokens("acme", "pool") == 13, "that of the other request"
    (event,) = (event for event in bench.audit() if event.decision == Decision.CANCELLED)
    assert "predicted_wait_ms" in event.inputs, "its admission is told with it"


def test_what_was_taken_from_a_request_is_told_with_its_cancel() -> None:
    bench = Bench()
    crowd(bench)
    after(bench, encoded(1, timeout_ms=400, retrieval=Retrieval("docs", 8)), cancel(1))
    assert [kind for kind, number in decisions(bench) if number == "1"] == ["cancelled", "degraded"]
    assert [reply.degradations for reply in replies(bench)] == [(Degradation.FEWER_PASSAGES,)]


def test_a_cancelled_request_leaves_its_place_to_others() -> None:
    bench = Bench(max_queue_size=2)
    crowd(bench)
    after(bench, encoded(1))
    after(bench, cancel(1), offset=11)
    after(bench, encoded(2), offset=12)
    assert [reply.outcome for reply in replies(bench)] == [Outcome.CANCELLED]
    assert {claim.offset for claim in bench.dispatcher.scheduler.claims()} == {12}
    assert bench.dispatcher.scheduler.size_bytes == len(b"key" + encoded(2))


def test_a_cancelled_request_costs_no_quota() -> None:
    bench = Bench()
    crowd(bench)
    bench.register([TenantSpec("acme", requests_per_s=0.001, burst_requests=1)])
    after(bench, encoded(1))
    after(bench, cancel(1), offset=11)
    after(bench, encoded(2), encoded(3), offset=12)
    assert [(reply.outcome, reply.code) for reply in replies(bench)] == [
        (Outcome.CANCELLED, None),
        (Outcome.REJECTED, Code.QUOTA_EXCEEDED),
    ]


def test_cancelled_backfill_owes_nothing() -> None:
    bench = Bench()
    crowd(bench)
    bench.assign("backfill.acme")
    bench.register([TenantSpec("acme", requests_per_s=0.001, burst_requests=1)])
    after(bench, encoded(1), encoded(2), topic="backfill.acme")
    assert bench.dispatcher.paused_backfill()
    after(bench, cancel(2), offset=12, topic="backfill.acme")
    assert not bench.dispatcher.paused_backfill()
    assert [(reply.outcome, reply.source.topic) for reply in bench.decoded("replies.acme")] == [
        (Outcome.CANCELLED, "backfill.acme")
    ]


def test_work_that_was_handed_back_is_cancelled_where_it_waits() -> None:
    """Its own record is settled, and the reply is that of the request."""
    bench = Bench()
    bench.assign(RETURNED)
    crowd(bench)
    after(bench, default_codec().encode(handed_back()), offset=5, topic=RETURNED)
    after(bench, cancel(1), offset=50)
    (reply,) = replies(bench)
    assert (reply.outcome, reply.source) == (Outcome.CANCELLED, SourceCoordinate(REQUESTS, 0, 41))
    assert settled_at(bench, 5, RETURNED).outputs
    bench.commit()
    assert settled_at(bench, 50).outputs == ()
    assert not bench.decoded("priority.pool.normal")


def test_without_an_index_every_copy_that_waits_is_answered() -> None:
    bench = Bench()
    crowd(bench)
    after(bench, encoded(1), encoded(1), cancel(1))
    assert [reply.source.offset for reply in bench.decoded("replies.acme")] == [10, 11]
    bench.commit()
    assert is_settled(bench, 12)


def test_a_second_cancel_finds_nothing_and_harms_nothing() -> None:
    bench = Bench()
    crowd(bench)
    after(bench, encoded(1), cancel(1), cancel(1))
    bench.commit()
    assert len(replies(bench)) == 1
    assert all(is_settled(bench, offset) for offset in (11, 12))
    assert len(told(bench)) == 1


def test_what_is_sent_after_its_cancel_is_wanted() -> None:
    """Cancels of what was refused, or answered long ago, are no word about what comes later."""
    bench = Bench()
    crowd(bench)
    after(bench, cancel(1), encoded(1))
    assert not replies(bench)
    assert {claim.offset for claim in bench.dispatcher.scheduler.claims()} == {11}
    bench.assign("backfill.acme")
    bench.now_ms += 10
    later_request = bench.queued(request(2), "backfill.acme", submitted_at_ms=NOW_MS + 5)
    bench.dispatcher.scheduler.push(later_request)
    after(bench, cancel(2), offset=20)
    assert not replies(bench)


def test_a_cancel_on_the_other_topic_of_the_tenant_counts() -> None:
    bench = Bench()
    crowd(bench)
    bench.assign("backfill.acme")
    after(bench, encoded(1), topic="backfill.acme")
    after(bench, cancel(1), offset=3)
    assert [reply.outcome for reply in replies(bench)] == [Outcome.CANCELLED]


# What does not wait here


def test_what_was_dispatched_is_told_to_the_consumers_and_nothing_else() -> None:
    bench = Bench()
    before = passed_on(bench)
    bench.run(encoded(1))
    after(bench, cancel(1))
    assert [out.topic for out in settled_at(bench, 10).outputs] == [names.CONTROL_CANCELLATIONS]
    assert told(bench) == [Cancellation(id_of(1), "acme", "dispatcher-1", NOW_MS)]
    assert [out.key for out in settled_at(bench, 10).outputs] == [id_of(1).encode()]
    assert not replies(bench)
    assert [event.decision for event in bench.audit()] == [Decision.DISPATCHED]
    assert passed_on(bench) == before + 1


def test_an_unknown_id_harms_nothing() -> None:
    bench = Bench()
    crowd(bench)
    after(bench, encoded(1), cancel(2))
    assert told(bench) == [Cancellation(id_of(2), "acme", "dispatcher-1", NOW_MS)]
    assert not replies(bench)
    assert len(bench.dispatcher.scheduler.claims()) == 1


@pytest.mark.parametrize("names_its_tenant", [None, "other"])
def test_nobody_cancels_for_another_tenant(names_its_tenant: str | None) -> None:
    bench = Bench()
    crowd(bench)
    bench.register([TenantSpec("acme"), TenantSpec("other")])
    bench.assign("requests.other")
    after(bench, encoded(1))
    after(bench, cancel(1, names_its_tenant), topic="requests.other")
    assert [(one.tenant, one.request_id) for one in told(bench)] == [("other", id_of(1))]
    assert not replies(bench)
    assert not bench.decoded("replies.other")
    assert {claim.partition.topic for claim in bench.dispatcher.scheduler.claims()} == {REQUESTS}


def test_a_cancel_that_names_another_tenant_is_refused_and_answers_nobody() -> None:
    bench = Bench()
    crowd(bench)
    bench.register([TenantSpec("acme"), TenantSpec("other")])
    bench.assign("requests.other")
    after(bench, encoded(1))
    after(bench, cancel(1, "acme"), topic="requests.other")
    assert [out.topic for out in settled_at(bench, 10, "requests.other").outputs] == [names.LEDGER_AUDIT]
    *_, event = bench.audit()
    assert (event.tenant, event.decision, event.code) == ("other", Decision.CANCEL_REFUSED, Code.FORBIDDEN)
    assert (event.source.topic, event.inputs) == ("requests.other", {"field": "tenant"})
    assert event.message == "cancel: this topic belongs to other, the record names another tenant"
    assert len(bench.dispatcher.scheduler.claims()) == 1
    assert not told(bench)
    assert not replies(bench)


def test_a_cancel_of_what_is_no_id_is_refused_and_told_to_nobody() -> None:
    """Whatever a tenant writes there, consumers would keep it."""
    bench = Bench()
    after(bench, default_codec().encode(CancelRequest("x" * 10_000)))
    (event,) = bench.audit()
    assert (event.decision, event.code, event.inputs) == (
        Decision.CANCEL_REFUSED,
        Code.INVALID,
        {"field": "request_id"},
    )
    assert event.request_id == "x" * 128
    assert [out.topic for out in bench.transactions.outputs] == [names.LEDGER_AUDIT]


def test_a_cancel_among_handed_back_work_is_a_dead_letter() -> None:
    bench = Bench()
    bench.assign(RETURNED)
    after(bench, cancel(1), topic=RETURNED)
    assert [out.topic for out in bench.transactions.outputs] == [names.DEAD_LETTER_REQUESTS, names.LEDGER_AUDIT]


# What is just being refused


def test_what_is_refused_at_the_same_time_is_refused_first() -> None:
    """It waits for its refusal to go out; the cancel comes after it."""
    bench = Bench()
    crowd(bench)
    after(bench, encoded(1, timeout_ms=1_000))
    bench.report(10.0, tokens=5)
    bench.now_ms += 500
    bench.dispatcher.updates.show()
    bench.dispatcher.sweep()
    after(bench, cancel(1), offset=11)
    (reply,) = replies(bench)
    assert (reply.outcome, reply.code) == (Outcome.REJECTED, Code.DEADLINE_UNMEETABLE)
    offsets = [settlement.claim.offset for settlement in bench.transactions.settlements]
    assert offsets.index(10) < offsets.index(11)


# Repeated ids


def test_a_repeat_whose_first_is_under_way_gets_no_answer_of_its_own() -> None:
    """The first's reply is still to come, from the consumer that is told."""
    bench = Bench()
    bench.run(encoded(1))
    bench.seen.firsts[id_of(1)] = SourceCoordinate(REQUESTS, 0, 0)
    after(bench, encoded(1), cancel(1))
    assert not replies(bench)
    assert told(bench) == [Cancellation(id_of(1), "acme", "dispatcher-1", NOW_MS)]
    assert decisions(bench)[-1] == ("duplicate", "1")
    assert not is_settled(bench, 11), "not before the repeat is"
    bench.commit()
    assert settled_at(bench, 11).outputs == ()


def test_a_repeat_of_what_was_refused_is_not_run_once_it_is_cancelled() -> None:
    bench = repeated(1)
    finds(bench, away)
    bench.run(encoded(1), cancel(1))
    assert len(told(bench)) == 1, "at once: the first may be running"
    assert not bench.transactions.settlements

    async def found(*_asked: object) -> InferenceReply:
        return InferenceReply(id_of(1), "acme", Outcome.REJECTED, Code.OVERLOADED)

    finds(bench, found)
    later(bench, 1_000)
    (reply,) = replies(bench)
    assert (reply.outcome, reply.source) == (Outcome.CANCELLED, SourceCoordinate(REQUESTS, 0, 0))
    assert reply.timings.admitted_at_ms is None
    assert not bench.decoded("priority.pool.normal")
    assert decisions(bench) == [("cancelled", "1")]
    bench.commit()
    assert is_settled(bench, 1)
    assert not bench.dispatcher.deduplication._cancelled
    assert not bench.dispatcher.cancellation._found_by


def test_a_cancelled_repeat_of_which_nothing_can_be_told_is_cancelled_in_the_end() -> None:
    bench = repeated(1)
    finds(bench, away)
    bench.run(encoded(1), cancel(1))
    later(bench, HELD_FOR_MS)
    assert [reply.outcome for reply in replies(bench)] == [Outcome.CANCELLED]
    bench.commit()
    assert is_settled(bench, 1)


def test_a_cancelled_repeat_gets_the_copy_that_is_there() -> None:
    bench = repeated(1)
    finds(bench, away)
    bench.run(encoded(1), cancel(1))

    async def found(*_asked: object) -> InferenceReply:
        return InferenceReply(id_of(1), "acme", Outcome.OK)

    finds(bench, found)
    later(bench, 1_000)
    assert [(reply.outcome, reply.replayed) for reply in replies(bench)] == [(Outcome.OK, True)]
    assert not bench.dispatcher.deduplication._cancelled


def test_a_repeat_that_is_being_looked_up_is_found() -> None:
    bench = repeated(1)

    async def cancelled_meanwhile(*_asked: object) -> InferenceReply:
        await bench.write(1, cancel(1))
        for _ in range(10):
            await asyncio.sleep(0)
        return InferenceReply(id_of(1), "acme", Outcome.REJECTED, Code.OVERLOADED)

    finds(bench, cancelled_meanwhile)
    bench.run(encoded(1))
    assert [reply.outcome for reply in replies(bench)] == [Outcome.CANCELLED]
    assert not bench.decoded("priority.pool.normal")


def test_a_repeat_that_is_to_be_tried_again_is_found() -> None:
    """It took nothing from a quota, so it gives nothing back."""
    bench = Bench()
    bench.register([TenantSpec("acme", requests_per_s=0.001, burst_requests=1), TenantSpec("other")])
    bench.assign("requests.other")
    again, kept, foreign = (
        bench.queued(request(1)),
        bench.queued(request(1)),
        bench.queued(request(1), "requests.other"),
    )
    mark = bench.take_in(cancel(1))
    assert isinstance(mark, CancelCommand)
    mark = replace(mark, claim=mark.claim._replace(offset=again.claim.offset + 1))
    arrival = ReceivedRecord(PARTITION, 0, NOW_MS, b"key", encoded(1))
    for queued in (again, kept, foreign):
        bench.dispatcher.inbox.put(Candidate(queued, arrival))
    asyncio.run(bench.dispatcher.cancellation.submit([(mark, arrival)]))
    assert [reply.source for reply in replies(bench)] == [again.source]
    assert [one.queued for one in bench.dispatcher.inbox] == [kept, foreign]
    asyncio.run(bench.dispatcher.output.send())
    after(bench, encoded(2), encoded(3), offset=20)
    assert [reply.code for reply in replies(bench)] == [None, Code.QUOTA_EXCEEDED, Code.QUOTA_EXCEEDED]


def test_a_cancelled_id_that_is_sent_again_gets_a_copy_of_its_reply() -> None:
    bench = Bench()
    crowd(bench)
    after(bench, encoded(1), cancel(1))
    (reply,) = replies(bench)
    bench.seen.firsts[id_of(1)] = SourceCoordinate(REQUESTS, 0, 10)
    bench.archive.reply = reply
    after(bench, encoded(1), offset=20)
    assert [(one.outcome, one.replayed) for one in replies(bench)] == [
        (Outcome.CANCELLED, False),
        (Outcome.CANCELLED, True),
    ]


# What goes wrong


def test_what_is_revoked_is_forgotten_with_its_cancels() -> None:
    bench = repeated(2)
    crowd(bench)
    finds(bench, away)
    after(bench, encoded(1), encoded(2), cancel(1), cancel(2))
    count = len(bench.transactions.settlements)
    bench.ownership.revoke_all()
    asyncio.run(bench.dispatcher.on_revoked())
    cancels = bench.dispatcher.cancellation
    assert not cancels._unfinished
    assert not cancels._found_by
    assert not bench.dispatcher.deduplication._cancelled
    later(bench, HELD_FOR_MS)
    assert len(bench.transactions.settlements) == count


def test_a_cancel_that_our_own_code_fails_on_is_buried_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench()
    crowd(bench)
    after(bench, encoded(1), encoded(2))

    def broken(_writer: Any, queued: Any, *_rest: Any) -> Any:
        raise RuntimeError(queued.request.input.prompt)

    monkeypatch.setattr(type(bench.dispatcher.output.writer), "cancelled", broken)
    after(bench, cancel(1), encoded(3), offset=20)
    (letter,) = [out for out in bench.transactions.outputs if out.topic == names.DEAD_LETTER_REQUESTS]
    assert letter.value == cancel(1)
    assert dict(letter.headers)[headers.DLT_ORIGINAL_OFFSET] == b"20"
    assert len(bench.dispatcher.scheduler.claims()) == 3, "what it named goes on waiting"
    assert SECRET not in "".join(capsys.readouterr())

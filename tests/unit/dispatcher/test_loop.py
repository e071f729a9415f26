"""The dispatcher's loop without a broker: what it hands to the transactions, and what it forgets."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from fairlane import headers, names
from fairlane.outcomes import Code, Decision, Outcome
from fairlane.records import AuditEvent, InferenceReply, InferenceRequest, SourceCoordinate, TenantSpec, WorkItem
from fairlane.schema_files import default_codec
from stream_processors.dispatcher.intake.validation import validate
from stream_processors.dispatcher.queued_request import QueuedRequest
from tests.kit.dispatcher_bench import NOW_MS, SECRET, Bench, encoded, request
from tests.kit.intake_records import RETURNED, work_item
from tests.kit.waiting import eventually_async


def test_good_requests_become_work_in_order() -> None:
    bench = Bench()
    settlements = bench.run(encoded(1), encoded(2, priority="high"))
    assert [settlement.claim.offset for settlement in settlements] == [0, 1]
    (item,) = bench.decoded("priority.pool.normal")
    assert item == WorkItem(
        request=request(1),
        tenant="acme",
        pool="pool",
        model_version="1",
        priority_class="normal",
        cost_tokens=5 + 2 * 4,
        submitted_at_ms=NOW_MS,
        admitted_at_ms=NOW_MS,
        dispatched_at_ms=NOW_MS,
        deadline_at_ms=NOW_MS + 60_000,
        reply_topic="replies.acme",
        dispatcher_id="dispatcher-1",
        source=SourceCoordinate("requests.acme", 0, 0),
        prompt_tokens=5,
        arm="champion",
    )
    (high,) = bench.decoded("priority.pool.high")
    assert high.deadline_at_ms == NOW_MS + 30_000


TRACE = (
    (headers.TRACE_PARENT, b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
    (headers.TRACE_STATE, b"vendor=1"),
)


@pytest.mark.parametrize(("fields", "topic"), [({}, "priority.pool."), ({"model": "nobody-has-this"}, "replies.acme")])
def test_only_the_trace_goes_on_to_the_work_or_to_the_refusal(fields: dict[str, Any], topic: str) -> None:
    bench = Bench()

    async def turn() -> None:
        await bench.write(0, encoded(**fields), [("cookie", b"x"), ("baggage", b"key=secret"), *TRACE])
        await bench.decide()

    asyncio.run(turn())
    output = bench.transactions.outputs[0]
    assert output.topic.startswith(topic)
    assert set(TRACE) <= set(output.headers)
    assert {name for name, _ in output.headers}.isdisjoint({"cookie", "baggage"})
    assert (headers.CE_ID in dict(output.headers)) == (topic == "replies.acme")


def test_our_own_failure_buries_one_record_and_shows_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = validate

    def broken(one: InferenceRequest, *rest: Any, **options: Any) -> Any:
        if one.request_id.endswith("1"):
            raise RuntimeError(f"cannot cope with {one.input.prompt}")
        return real(one, *rest, **options)

    monkeypatch.setattr("stream_processors.dispatcher.intake.classifier.validate", broken)
    bench = Bench()
    values = encoded(1), encoded(2)
    assert len(bench.run(*values)) == 2
    (letter,) = [out for out in bench.transactions.outputs if out.topic == names.DEAD_LETTER_REQUESTS]
    assert letter.value == values[0]
    found = dict(letter.headers)
    assert found[headers.DLT_EXCEPTION_MESSAGE] == b"intake_failed: RuntimeError"
    assert found[headers.DLT_ORIGINAL_CONSUMER_GROUP] == b"fairlane.dispatcher"
    assert (found[headers.TENANT], headers.MODEL in found) == (b"acme", False)
    assert found[headers.INSTANCE_ID].decode() == bench.dispatcher.output.writer.dispatcher_id
    assert len(bench.decoded("priority.pool.normal")) == 1
    shown = "".join(capsys.readouterr())
    assert "RuntimeError" in shown
    assert SECRET not in shown


def test_what_waited_too_long_is_answered_expired() -> None:
    bench = Bench()

    async def turn() -> None:
        await bench.write(0, encoded(timeout_ms=100))
        bench.now_ms += 101
        await bench.decide()

    asyncio.run(turn())
    (reply,) = bench.decoded("replies.acme")
    assert (reply.outcome, reply.source) == (Outcome.EXPIRED, SourceCoordinate("requests.acme", 0, 0))
    (event,) = bench.decoded(names.LEDGER_AUDIT)
    assert event.decision == Decision.EXPIRED


def test_what_expired_before_it_was_read_is_not_remembered_and_takes_nothing() -> None:
    """50 that came too late, of a tenant that may send one a second, and the one that did not."""
    bench = Bench()
    bench.register([TenantSpec("acme", requests_per_s=1.0)])

    async def turn() -> None:
        for offset in range(50):
            await bench.write(offset, encoded(offset, timeout_ms=1))
        bench.now_ms += 2
        await bench.write(50, encoded(50))
        await bench.decide()

    asyncio.run(turn())
    outcomes = [reply.outcome for reply in bench.decoded("replies.acme")]
    assert outcomes == [Outcome.EXPIRED] * 50
    (work,) = bench.decoded("priority.pool.normal")
    assert work.request.request_id == request(50).request_id
    assert bench.seen.forgotten == [request(number).request_id for number in range(50)]


def test_a_copy_that_expired_before_it_was_read_is_answered_once() -> None:
    """The first of the same id is answered; the copy came too late and must not get an answer of its own."""
    bench = Bench()
    bench.seen.firsts[request(1).request_id] = SourceCoordinate("requests.acme", 0, 0)

    async def turn() -> None:
        await bench.write(1, encoded(1, timeout_ms=1))
        bench.now_ms += 2
        await bench.decide()

    asyncio.run(turn())
    assert not bench.decoded("replies.acme")


@pytest.mark.parametrize(
    "value",
    [encoded(1), default_codec().encode(work_item(request=request(1)))],
    ids=["a request", "work that was handed back"],
)
def test_a_record_that_cannot_be_queued_is_buried_and_intake_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: bytes
) -> None:
    """Or it would be read again after every restart, and end it."""
    bench = Bench()
    topic = RETURNED if value != encoded(1) else "requests.acme"
    bench.assign(RETURNED, "backfill.acme")
    bench.register([TenantSpec("acme", requests_per_s=1.0)])
    real = bench.dispatcher.scheduler.push

    def push(queued: QueuedRequest) -> None:
        if queued.request_id == request(1).request_id:
            raise KeyError(queued.request.input.prompt)
        real(queued)

    monkeypatch.setattr(type(bench.dispatcher.scheduler), "push", lambda _, queued: push(queued))

    async def turn() -> None:
        await bench.write(0, value, topic=topic)
        await bench.write(1, encoded(2))
        await bench.decide()

    asyncio.run(turn())
    (letter,) = [out for out in bench.transactions.outputs if out.topic == names.DEAD_LETTER_REQUESTS]
    assert letter.value == value
    assert dict(letter.headers)[headers.DLT_EXCEPTION_MESSAGE] == b"intake_failed: KeyError"
    assert SECRET not in "".join(capsys.readouterr())
    settled = {settlement.claim.offset for settlement in bench.transactions.settlements}
    assert settled == {0, 1}, "each once"
    if topic == RETURNED:
        assert [work.request for work in bench.decoded("priority.pool.normal")] == [request(2)]
    else:
        other = bench.queued(request(3), "backfill.acme")
        assert asyncio.run(bench.charges.charge([other])) == [None], "it took nothing"


def test_a_revocation_purges_what_waits() -> None:
    bench = Bench()

    async def turn() -> None:
        await bench.write(0, encoded(1))
        bench.ownership.revoke_all()
        await bench.dispatcher.on_revoked()
        await bench.decide()
        assert not bench.transactions.settlements
        # The same record again, in the next assignment.
        bench.assign()
        await bench.write(0, encoded(1))
        await bench.decide()

    asyncio.run(turn())
    assert [settlement.claim.offset for settlement in bench.transactions.settlements] == [0]


def test_a_revocation_during_intake_purges_what_is_being_admitted() -> None:
    bench = Bench()
    bench.seen.meanwhile = bench.ownership.revoke_all
    assert not bench.run(encoded(1))


def test_a_late_request_of_a_partition_that_moved_on_keeps_its_id() -> None:
    """Its new owner may have accepted it under that id, at the same place."""
    bench = Bench()

    def move_on() -> None:
        bench.ownership.revoke_all()
        bench.now_ms += 10_000

    bench.seen.meanwhile = move_on
    assert not bench.run(encoded(1, timeout_ms=1_000))
    assert not bench.seen.forgotten


def test_a_record_of_a_partition_that_moved_on_is_not_taken() -> None:
    bench = Bench()
    bench.ownership.revoke_all()
    assert not bench.run(encoded(1))


def test_a_full_dispatcher_reads_no_more_until_a_commit_makes_room() -> None:
    bench = Bench(max_undecided=2)

    async def turn() -> None:
        await bench.write(0, encoded(1))
        second = asyncio.create_task(bench.write(1, encoded(2)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not second.done()
        await bench.decide()
        bench.transactions.pending_count = 2
        bench.dispatcher.intake.on_room()
        await asyncio.sleep(0)
        assert not second.done()
        bench.transactions.pending_count = 1
        bench.dispatcher.intake.on_room()
        await asyncio.wait_for(second, 1)

    asyncio.run(turn())


def test_a_full_dispatcher_lets_go_when_its_partitions_are_revoked() -> None:
    """Otherwise the agent would hang in the record of an assignment that is over."""
    bench = Bench(max_undecided=1)

    async def turn() -> None:
        held = asyncio.create_task(bench.write(0, encoded(1)))
        await asyncio.sleep(0)
        assert not held.done()
        bench.ownership.revoke_all()
        await bench.dispatcher.on_revoked()
        await asyncio.wait_for(held, 1)

    asyncio.run(turn())


def test_a_duplicate_of_one_that_is_under_way_is_audited_and_not_run() -> None:
    """The first's own reply is still to come."""
    bench = Bench()
    bench.run(encoded(1))
    bench.seen.firsts[request(1).request_id] = SourceCoordinate("requests.acme", 0, 0)

    async def again() -> None:
        await bench.write(1, encoded(1))
        await bench.decide()

    asyncio.run(again())
    assert len(bench.decoded("priority.pool.normal")) == 1
    assert not bench.decoded("replies.acme")
    (event,) = [event for event in bench.audit() if event.decision == Decision.DUPLICATE]
    assert isinstance(event, AuditEvent)
    assert event.inputs == {"replayed": "false"}


def test_a_duplicate_of_a_settled_request_gets_a_copy_that_says_so() -> None:
    bench = Bench()
    bench.seen.firsts[request(1).request_id] = SourceCoordinate("requests.acme", 0, 0)
    bench.archive.reply = InferenceReply(request(1).request_id, "acme", Outcome.OK)
    bench.run(encoded(1))
    (reply,) = bench.decoded("replies.acme")
    assert reply == replace(bench.archive.reply, replayed=True)


@pytest.mark.parametrize("code", [Code.OVERLOADED, Code.DEADLINE_UNMEETABLE, Code.QUOTA_EXCEEDED, Code.DRAINING])
def test_a_refusal_for_now_is_not_sent_again_but_tried_again(code: Code) -> None:
    """By a consumer, say, which knows nothing of the index. The id stands for the new place from then on."""
    bench = Bench()
    first = SourceCoordinate("requests.acme", 0, 7)
    bench.seen.firsts[request(1).request_id] = first
    bench.archive.reply = InferenceReply(request(1).request_id, "acme", Outcome.REJECTED, code)
    bench.run(encoded(1))
    assert bench.seen.firsts == {}
    (work,) = bench.decoded("priority.pool.normal")
    assert work.source == SourceCoordinate("requests.acme", 0, 0)
    assert not bench.decoded("replies.acme")
    assert Decision.DUPLICATE not in {event.decision for event in bench.audit()}


@pytest.mark.parametrize("code", [Code.INVALID, Code.FORBIDDEN, Code.UNKNOWN_MODEL])
def test_a_refusal_for_good_is_sent_again(code: Code) -> None:
    bench = Bench()
    bench.seen.firsts[request(1).request_id] = SourceCoordinate("requests.acme", 0, 7)
    bench.archive.reply = InferenceReply(request(1).request_id, "acme", Outcome.REJECTED, code)
    bench.run(encoded(1))
    assert bench.decoded("replies.acme") == [replace(bench.archive.reply, replayed=True)]


def test_a_refusal_for_now_that_the_index_cannot_forget_is_tried_again_once() -> None:
    bench = Bench()
    bench.seen.firsts[request(1).request_id] = SourceCoordinate("requests.acme", 0, 7)

    async def cannot(_entries: object) -> None: ...

    bench.seen.forget = cannot  # type: ignore[assignment,method-assign]  # as while Redis is away
    bench.archive.reply = InferenceReply(request(1).request_id, "acme", Outcome.REJECTED, Code.OVERLOADED)
    bench.run(encoded(1))
    assert len(bench.decoded("priority.pool.normal")) == 1


def test_of_two_that_try_a_refusal_again_one_is_run() -> None:
    """The other one finds the first in the index by then, without a reply yet."""
    bench = Bench()
    first = SourceCoordinate("requests.acme", 0, 7)
    index = bench.seen.firsts
    index[request(1).request_id] = first
    replies = {first: InferenceReply(request(1).request_id, "acme", Outcome.REJECTED, Code.OVERLOADED)}

    async def find(_tenant: str, _request_id: str, source: SourceCoordinate) -> InferenceReply | None:
        return replies.get(source)

    async def first_seen(entries: Any) -> list[SourceCoordinate | None]:
        found = [index.setdefault(request_id, source) for _, request_id, source in entries]
        return [None if one == entry[2] else one for one, entry in zip(found, entries, strict=True)]

    bench.archive.find = find  # type: ignore[assignment,method-assign]  # by the place
    bench.seen.first_seen = first_seen  # type: ignore[method-assign]  # as Redis does
    bench.run(encoded(1), encoded(1))
    bench.now_ms += 1_000
    asyncio.run(bench.decide())
    (work,) = bench.decoded("priority.pool.normal")
    assert work.source == index[request(1).request_id] == SourceCoordinate("requests.acme", 0, 0)
    (event,) = [event for event in bench.audit() if event.decision == Decision.DUPLICATE]
    assert event.source == SourceCoordinate("requests.acme", 0, 1)


def test_what_arrives_during_a_transaction_is_decided_after_it() -> None:
    bench = Bench()

    async def turns() -> tuple[int, int]:
        bench.transactions.has_waiting = True
        await bench.write(0, encoded(1))
        await bench.decide()
        during = len(bench.transactions.settlements)
        await bench.write(1, encoded(2))
        bench.transactions.has_waiting = False
        bench.dispatcher.on_committed([])
        await bench.decide()
        return during, len(bench.transactions.settlements)

    assert asyncio.run(turns()) == (0, 2)


def test_a_transaction_that_does_not_end_holds_up_decisions_for_a_moment_only() -> None:
    bench = Bench()

    async def turn() -> None:
        bench.transactions.has_waiting = True
        await bench.write(0, encoded(1))
        running = asyncio.create_task(bench.dispatcher.run())
        await eventually_async(lambda: bench.transactions.settlements)
        running.cancel()

    asyncio.run(turn())


def test_a_full_batch_is_decided_during_a_transaction() -> None:
    bench = Bench(max_undecided=1_000)

    async def turn() -> bool:
        bench.transactions.has_waiting = True
        for number in range(512):
            await bench.write(number, encoded(number))
        await bench.decide()
        return bool(bench.transactions.settlements)

    assert asyncio.run(turn())

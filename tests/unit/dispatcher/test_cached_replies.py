"""The dispatcher's loop without a broker: refusals, audit, deadlines, work that came back, backfill."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fairlane import headers, metrics, names
from fairlane.outcomes import Code, Decision, Degradation, Outcome
from fairlane.ownership import PartitionId
from fairlane.records import (
    InferenceReply,
    Message,
    Parameters,
    Passage,
    RequestInput,
    Retrieval,
    SourceCoordinate,
    TenantSpec,
    WorkItem,
)
from fairlane.schema_files import default_codec
from stream_processors.dispatcher.admission.quotas import Charge
from tests.kit.cached_replies import after, crowd, decisions, id_of
from tests.kit.dispatcher_bench import NOW_MS, SECRET, Bench, encoded, handed_back, request

# What is refused


def test_a_refused_id_is_forgotten_before_its_refusal_goes_out() -> None:
    bench = Bench(max_queue_size=2)
    crowd(bench)
    written: list[int] = []
    forget = bench.seen.forget

    async def watched(entries: Sequence[Any]) -> None:
        written.append(len(bench.decoded("replies.acme")))
        await forget(entries)

    bench.seen.forget = watched  # type: ignore[method-assign]
    after(bench, encoded(1), encoded(2), encoded(3))
    (reply,) = bench.decoded("replies.acme")[-1:]
    assert (reply.outcome, reply.code) == (Outcome.REJECTED, Code.OVERLOADED)
    assert reply.retry_after_ms >= 100
    assert set(written) == {0}
    assert bench.seen.forgotten == [reply.request_id for reply in bench.decoded("replies.acme")]


def test_an_accepted_id_is_remembered() -> None:
    bench = Bench()
    crowd(bench)
    after(bench, encoded(1))
    assert not bench.seen.forgotten


def test_an_expired_id_is_remembered() -> None:
    """Nobody is told to come again with it."""
    bench = Bench()
    crowd(bench)
    after(bench, encoded(1, timeout_ms=1_000))
    bench.now_ms += 1_001
    bench.dispatcher.sweep()
    after(bench, offset=20)
    (reply,) = bench.decoded("replies.acme")
    assert (reply.outcome, reply.retry_after_ms) == (Outcome.EXPIRED, None)
    assert not bench.seen.forgotten


def test_an_id_that_is_refused_after_it_waited_is_forgotten_as_well() -> None:
    """The pool slowed down: at 10 tokens a second neither can be done in what is left."""
    bench = Bench()
    crowd(bench)
    after(bench, encoded(1, timeout_ms=1_000), encoded(2, timeout_ms=1_000))
    bench.report(10.0, tokens=5)
    bench.now_ms += 500
    bench.dispatcher.updates.show()
    bench.dispatcher.sweep()
    assert not bench.decoded("replies.acme")
    after(bench, offset=20)
    replies = bench.decoded("replies.acme")
    assert {(reply.outcome, reply.code) for reply in replies} == {(Outcome.REJECTED, Code.DEADLINE_UNMEETABLE)}
    # At this rate it would never be done in time.
    assert all(reply.retry_after_ms is None for reply in replies)
    assert bench.seen.forgotten == [id_of(1), id_of(2)]


def test_refusals_while_dispatching_are_sent_too() -> None:
    bench = Bench()
    crowd(bench)
    after(bench, encoded(1, timeout_ms=1_000))
    bench.report(10.0, tokens=5)

    async def turn() -> None:
        bench.dispatcher.dispatch()
        await bench.decide()

    asyncio.run(turn())
    (reply,) = bench.decoded("replies.acme")
    assert reply.code == Code.DEADLINE_UNMEETABLE
    assert bench.seen.forgotten == [id_of(1)]


def test_a_refusal_for_a_quota_leaves_the_quota_as_it_was() -> None:
    """Giving back what was never taken would let the next one through."""
    bench = Bench()
    bench.register([TenantSpec("acme", requests_per_s=0.001, burst_requests=1)])
    after(bench, encoded(1), encoded(2))
    after(bench, encoded(3), offset=20)
    codes = [reply.code for reply in bench.decoded("replies.acme")]
    assert codes == [Code.QUOTA_EXCEEDED, Code.QUOTA_EXCEEDED]
    assert bench.seen.forgotten == [id_of(2), id_of(3)]


def test_a_request_that_is_shed_costs_no_quota() -> None:
    bench = Bench()
    crowd(bench)
    bench.register([TenantSpec("acme", requests_per_s=0.001, burst_requests=1)])
    after(bench, encoded(1, timeout_ms=1))
    after(bench, encoded(2), offset=20)
    assert [reply.code for reply in bench.decoded("replies.acme")] == [Code.DEADLINE_UNMEETABLE]
    assert ("accepted", "2") in decisions(bench)


def is_whole(bench: Bench, tokens: int) -> bool:
    """Whether acme's quota can be had to its last token."""
    ask = Charge("acme", bench.dispatcher.registry.tenants["acme"], tokens)
    return asyncio.run(bench.charges.quotas.take([ask])) == [None]


def test_what_waited_in_vain_costs_no_quota() -> None:
    """Refused because the pool slowed down, or expired because it stood still."""
    for rate, later_ms, outcome in ((10.0, 500, Outcome.REJECTED), (100.0, 1_001, Outcome.EXPIRED)):
        bench = Bench()
        crowd(bench)
        bench.register([TenantSpec("acme", tokens_per_day=26)])
        after(bench, encoded(1, timeout_ms=1_000), encoded(2, timeout_ms=1_000))
        assert not is_whole(bench, 1), "both wait, and took all of it"
        bench.report(rate, tokens=5)
        bench.now_ms += later_ms
        bench.dispatcher.updates.show()
        bench.dispatcher.sweep()
        after(bench, offset=20)
        assert [reply.outcome for reply in bench.decoded("replies.acme")] == [outcome] * 2
        assert is_whole(bench, 26)


def test_a_refused_request_is_given_back_before_its_refusal_goes_out() -> None:
    bench = Bench()
    crowd(bench)
    bench.register([TenantSpec("acme", tokens_per_day=26)])
    after(bench, encoded(1, timeout_ms=1_000))
    written: list[int] = []
    give_back = bench.charges.quotas.give_back

    async def watched(charges: Sequence[Charge]) -> None:
        written.append(len(bench.decoded("replies.acme")))
        await give_back(charges)

    bench.charges.quotas.give_back = watched  # type: ignore[method-assign]
    bench.report(10.0, tokens=5)
    bench.dispatcher.dispatch()
    after(bench, offset=20)
    assert written == [0]
    assert len(bench.decoded("replies.acme")) == 1


def test_what_comes_after_its_deadline_is_given_nothing_back() -> None:
    """It never took anything."""
    bench = Bench()
    bench.register([TenantSpec("acme", tokens_per_day=13)])
    after(bench, encoded(1))
    bench.now_ms += 1_001
    after(bench, encoded(2, timeout_ms=1_000), offset=20)
    assert [reply.outcome for reply in bench.decoded("replies.acme")] == [Outcome.EXPIRED]
    assert not is_whole(bench, 1)


def test_work_that_came_back_in_vain_is_given_nothing_back() -> None:
    """It was sent on once, which is what quotas count."""
    bench = Bench()
    crowd(bench)
    bench.register([TenantSpec("acme", requests_per_s=0.001, burst_requests=1)])
    after(bench, encoded(2))
    after(bench, default_codec().encode(returned(bench)), offset=7, topic="returned.pool")
    assert len(bench.dispatcher.scheduler) == 2
    bench.now_ms += 1_001
    bench.dispatcher.sweep()
    after(bench, offset=20)
    assert [reply.outcome for reply in bench.decoded("replies.acme")] == [Outcome.EXPIRED]
    assert not is_whole(bench, 1)


def test_a_refusal_that_was_not_sent_before_its_partition_moved_on_is_handed_over() -> None:
    bench = Bench()
    crowd(bench)
    bench.register([TenantSpec("acme", tokens_per_day=13)])
    after(bench, encoded(1, timeout_ms=1_000))
    bench.report(10.0, tokens=5)
    bench.dispatcher.dispatch()
    bench.ownership.revoke_all()
    asyncio.run(bench.dispatcher.on_revoked())
    after(bench, offset=20)
    assert not bench.decoded("replies.acme")
    assert not bench.seen.forgotten, "its new owner may have accepted it"
    assert is_whole(bench, 13)


def test_what_was_revoked_while_it_was_admitted_costs_no_quota() -> None:
    bench = Bench()
    bench.register([TenantSpec("acme", requests_per_s=0.001, burst_requests=1)])
    bench.seen.meanwhile = bench.ownership.revoke_all
    after(bench, encoded(1))
    bench.seen.meanwhile = None
    bench.assign()
    after(bench, encoded(1))
    assert decisions(bench) == [("dispatched", "1")]


# What is told about it


def test_a_dispatch_at_once_tells_of_the_admission_as_well() -> None:
    bench = Bench()
    bench.run(encoded(1), encoded(2))
    assert decisions(bench) == [("dispatched", "1"), ("dispatched", "2")]
    for event in bench.decoded(names.LEDGER_AUDIT):
        assert {"predicted_wait_ms", "rank_at_most", "waited_ms", "window_tokens"} <= event.inputs.keys()


def test_a_replay_is_told_as_one_in_its_work_its_refusals_and_its_audit() -> None:
    bench = Bench()
    crowd(bench)
    after(bench, encoded(1, replay_of=id_of(9), timeout_ms=1), encoded(2, replay_of=id_of(9), timeout_ms=1_000))
    bench.now_ms += 1_001
    bench.dispatcher.sweep()
    assert [reply.replay_of for reply in bench.decoded("replies.acme")] == [id_of(9)] * 2
    assert [event.inputs.get("replay_of") for event in bench.audit()] == [None, *[id_of(9)] * 3]


def test_work_carries_what_it_replays_and_its_tenants_bounds() -> None:
    bench = Bench()
    bench.register([TenantSpec("acme", max_prompt_tokens=900, max_completion_tokens=3)])
    bench.run(encoded(1, replay_of=id_of(9)), encoded(2, parameters=Parameters(2)))
    capped, short = bench.decoded("priority.pool.normal")
    assert capped.request == request(1, replay_of=id_of(9), parameters=Parameters(3))
    assert short.request == request(2, parameters=Parameters(2))
    assert {work.max_prompt_tokens for work in (capped, short)} == {900}


def test_an_admission_that_waits_is_audited_before_its_dispatch() -> None:
    bench = Bench()
    crowd(bench)
    after(bench, encoded(1))
    assert ("dispatched", "1") not in decisions(bench)
    assert decisions(bench)[-1] == ("accepted", "1")


def test_an_admission_is_a_note_that_settles_nothing() -> None:
    bench = Bench()
    crowd(bench)
    settled = len(bench.transactions.settlements)
    after(bench, encoded(1))
    assert len(bench.transactions.settlements) == settled
    assert decisions(bench)[-1] == ("accepted", "1")


def test_what_is_admitted_and_found_late_in_one_breath_is_audited_as_both() -> None:
    """Nothing that was taken from it may be in its reply and not in its story."""
    bench = Bench()
    bench.assign("backfill.acme")
    crowd(bench)

    def time_passes() -> None:
        bench.now_ms += 401

    bench.dispatcher.on_backfill = time_passes

    async def turn() -> None:
        await bench.write(10, encoded(1, timeout_ms=400, retrieval=Retrieval("docs", 8)))
        await bench.write(10, encoded(2), topic="backfill.acme")
        await bench.decide()

    asyncio.run(turn())
    (reply,) = bench.decoded("replies.acme")
    assert (reply.outcome, reply.degradations) == (Outcome.EXPIRED, (Degradation.FEWER_PASSAGES,))
    assert {decision for decision, number in decisions(bench) if number == "1"} == {"accepted", "degraded", "expired"}


def test_what_expired_before_it_is_tried_again_is_neither_run_nor_taken_from_its_quota() -> None:
    """The look-up of what became of the first took longer than it had."""
    bench = Bench()
    bench.register([TenantSpec("acme", requests_per_s=0.001, burst_requests=1)])
    bench.seen.firsts[id_of(1)] = SourceCoordinate("requests.acme", 0, 7)

    async def find(*_: object) -> InferenceReply:
        bench.now_ms += 1_001
        return InferenceReply(id_of(1), "acme", Outcome.REJECTED, Code.OVERLOADED)

    bench.archive.find = find  # type: ignore[assignment,method-assign]
    after(bench, encoded(1, timeout_ms=1_000))
    assert [reply.outcome for reply in bench.decoded("replies.acme")] == [Outcome.EXPIRED]
    assert decisions(bench) == [("expired", "1")]
    after(bench, encoded(2), offset=20)
    assert decisions(bench)[-1] == ("dispatched", "2")


_SECRETS: dict[str, dict[str, Any]] = {
    "model": {"model": SECRET},
    "task": {"task": SECRET},
    "priority": {"priority": SECRET},
    "group": {"group": SECRET},
    "reply_to": {"reply_to": SECRET},
    "tenant": {"tenant": SECRET},
    "conversation_id": {"conversation_id": SECRET * 9},
    "metadata": {"metadata": {SECRET: SECRET * 999}},
    "retrieval.collection": {"retrieval": Retrieval(SECRET * 9)},
    "retrieval.mode": {"retrieval": Retrieval("docs", mode=SECRET)},
    "parameters.stop": {"parameters": Parameters(stop=(SECRET * 99,))},
    "a role and a content that changed places": {"input": RequestInput(messages=(Message(SECRET, "user"),))},
    "a role of one word": {"input": RequestInput(messages=(Message("Prompt", "user"),))},
    "two inputs": {"input": RequestInput(prompt=SECRET, query=SECRET, texts=(SECRET,), documents=(SECRET,))},
    "an input of another task": {"input": RequestInput(image=SECRET.encode())},
    "too long an input": {"input": RequestInput(prompt=SECRET * 100_000)},
    "too many texts": {"input": RequestInput(messages=(Message("user", SECRET),) * 9_999)},
}


@pytest.mark.parametrize("fields", _SECRETS.values(), ids=_SECRETS.keys())
def test_no_refusal_quotes_text_of_the_request(fields: dict[str, Any]) -> None:
    """Whichever field it got into."""
    bench = Bench()
    bench.run(encoded(1, **fields))
    ((event,), (reply,)) = bench.audit(), bench.decoded("replies.acme")
    assert event.decision == Decision.REFUSED
    for text in (str(event), reply.message):
        assert not any(word in text for word in (SECRET, SECRET[:12], "Prompt"))


def test_nothing_that_is_audited_shows_a_prompt() -> None:
    bench = Bench(max_queue_size=2)
    crowd(bench)
    after(bench, *(encoded(number) for number in range(1, 6)))
    bench.now_ms += 100_000
    bench.dispatcher.sweep()
    after(bench, offset=20)
    assert {decision for decision, _ in decisions(bench)} == {"accepted", "dispatched", "refused", "expired"}
    assert all(SECRET not in str(event) for event in bench.audit())


def test_counts_are_shown_without_another_arrival() -> None:
    tenant = "counted-tenant"
    bench = Bench()
    bench.register([TenantSpec("acme"), TenantSpec(tenant)])
    bench.assign(f"requests.{tenant}")
    crowd(bench)
    after(bench, encoded(1), topic=f"requests.{tenant}")

    def shown() -> float:
        return float(metrics.DECISIONS.labels(tenant=tenant, decision=Decision.EXPIRED, code="")._value.get())

    bench.now_ms += 100_000
    bench.dispatcher.sweep()
    assert shown() == 1


# Deadlines


def test_a_sweep_answers_what_expired_whoevers_turn_it_is() -> None:
    bench = Bench()
    crowd(bench)
    after(bench, encoded(1), encoded(2, timeout_ms=2_000), encoded(3, priority="low", timeout_ms=2_000))
    bench.now_ms += 2_001
    bench.dispatcher.sweep()
    assert {reply.request_id for reply in bench.decoded("replies.acme")} == {id_of(2), id_of(3)}
    assert {reply.outcome for reply in bench.decoded("replies.acme")} == {Outcome.EXPIRED}
    assert len(bench.dispatcher.scheduler) == 1
    bench.dispatcher.sweep()
    assert len(bench.decoded("replies.acme")) == 2


def test_what_expired_is_never_dispatched() -> None:
    bench = Bench()
    crowd(bench)
    after(bench, encoded(1, timeout_ms=1_000))
    bench.now_ms += 1_001
    bench.dispatcher.scheduler.in_flight.release_all()
    bench.dispatcher.dispatch()
    assert not bench.decoded("priority.pool.normal")
    assert decisions(bench)[-1] == ("expired", "1")


# Work that a consumer handed back


def returned(bench: Bench, **fields: Any) -> WorkItem:
    """Work that this dispatcher dispatched a second ago, as its pool's consumer hands it back."""
    bench.assign("returned.pool")
    return handed_back(**fields)


def test_work_that_came_back_is_dispatched_once_more() -> None:
    bench = Bench()
    item = returned(bench)
    after(bench, default_codec().encode(item), offset=7, topic="returned.pool")
    (settlement,) = bench.transactions.settlements
    assert settlement.claim.partition == PartitionId("returned.pool", 0)
    (again,) = bench.decoded("priority.pool.normal")
    assert again == replace(item, dispatched_at_ms=NOW_MS, arm="champion")
    work = settlement.outputs[0]
    assert dict(work.headers)[headers.SOURCE_TOPIC] == b"returned.pool"
    assert dict(work.headers)[headers.SOURCE_OFFSET] == b"7"


def test_work_that_came_back_is_not_judged_again() -> None:
    """Neither its id, nor its quota, nor the queue, nor the wait counts once more."""
    bench = Bench(max_queue_size=2)
    bench.register([TenantSpec("acme", requests_per_s=0.001, burst_requests=1)])
    crowd(bench)
    item = returned(bench)
    bench.seen.firsts[item.request.request_id] = item.source
    after(
        bench,
        default_codec().encode(item),
        default_codec().encode(replace(item, request=request(2))),
        topic="returned.pool",
    )
    assert len(bench.dispatcher.scheduler) == 2
    assert not bench.decoded("replies.acme")
    assert [decision for decision, _ in decisions(bench)] == ["dispatched"]


def test_what_is_taken_from_work_that_came_back_is_audited() -> None:
    bench = Bench()
    passages = tuple(Passage(str(number), SECRET, 1.0) for number in range(4))
    item = returned(bench, passages=passages)
    after(bench, default_codec().encode(item), topic="returned.pool")
    (again,) = bench.decoded("priority.pool.normal")
    assert (again.passages, again.degradations) == (passages[:2], (Degradation.FEWER_PASSAGES,))
    assert decisions(bench) == [("degraded", "1"), ("dispatched", "1")]
    event = bench.audit()[0]
    assert (event.source, event.inputs) == (item.source, {"steps": "fewer_passages", "handed_back": "1"})


def test_work_that_came_back_too_late_is_expired() -> None:
    bench = Bench()
    after(bench, default_codec().encode(returned(bench, deadline_at_ms=NOW_MS - 1)), topic="returned.pool")
    (reply,) = bench.decoded("replies.acme")
    assert (reply.outcome, reply.source) == (Outcome.EXPIRED, SourceCoordinate("requests.acme", 0, 41))


def test_work_that_came_back_is_dropped_with_its_partition() -> None:
    bench = Bench()
    crowd(bench)
    after(bench, default_codec().encode(returned(bench)), topic="returned.pool")
    bench.ownership.revoke_all()
    asyncio.run(bench.dispatcher.on_revoked())
    assert len(bench.dispatcher.scheduler) == 0
    assert bench.dispatcher.scheduler.in_flight.tokens("pool") == 0


# Backfill


def test_backfill_partitions_pause_and_resume() -> None:
    bench = Bench(max_queue_size=10)
    bench.assign("backfill.acme")
    crowd(bench)
    after(bench, *(encoded(number) for number in range(1, 10)), topic="backfill.acme")
    assert bench.dispatcher.paused_backfill() == {PartitionId("backfill.acme", 0)}
    assert metrics.BACKFILL_PAUSED._value.get() == 1
    assert not bench.decoded("replies.acme")
    bench.report(1e9, tokens=100_000)
    bench.dispatcher.dispatch()
    assert len(bench.dispatcher.scheduler) == 0
    assert not bench.dispatcher.paused_backfill()
    assert metrics.BACKFILL_PAUSED._value.get() == 0


def test_others_are_told_where_something_waits() -> None:
    bench = Bench()
    told: list[tuple[str, str]] = []
    bench.dispatcher.on_backlog = lambda pool, priority_class: told.append((pool, priority_class))
    crowd(bench)
    assert not told
    after(bench, encoded(1, priority="low"))
    assert told == [("pool", "low")]

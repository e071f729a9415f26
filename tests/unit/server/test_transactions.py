"""The transaction loop's answers to errors that no broker produces on demand, behind a producer that follows a script.

What a real broker can be made to do (refuse a generation, a record or a topic, fence a producer) is tested on one, in
``tests/integration/test_transactions.py``.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import cast

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from prometheus_client import REGISTRY

from fairlane.offsets import CommitPoint
from fairlane.ownership import Claim, Membership
from fairlane_server.kafka.transactions import FatalTransactionError, OutputRecord, Settlement
from tests.kit.scripted_producer import BUFFER_FULL, ME, OTHER, WORK, Bench, ScriptedProducer
from tests.kit.waiting import eventually

REACH = 23_832

ABORTABLE = KafkaError(KafkaError.INVALID_TXN_STATE, txn_requires_abort=True)
RETRIABLE = KafkaError(KafkaError._TIMED_OUT, retriable=True)
FATAL = KafkaError(KafkaError.INVALID_PRODUCER_EPOCH, fatal=True)
FENCED = KafkaError(KafkaError._FENCED)
TOO_MUCH = KafkaError(KafkaError.UNKNOWN, txn_requires_abort=True)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    made.ownership.assign({WORK: CommitPoint(0), OTHER: CommitPoint(0)}, ME)
    yield made
    for loop in made.loops:
        loop.stop(5.0)


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_outputs_and_offsets_are_committed_together(bench: Bench) -> None:
    loop = bench.loop()
    zero, one, two = bench.settlements(0, 1, 2)
    loop.submit_many([two, zero])
    assert loop.pending_count == 2
    loop.start()
    assert loop.drain(60)
    assert loop.pending_count == 0
    (transaction,) = bench.producer.committed
    assert transaction.records == [("out", b"2"), ("out", b"0")]
    assert transaction.offsets == {("work", 0): CommitPoint(1, 0b10)}
    assert transaction.group_metadata == ME.group_metadata
    eventually(lambda: bench.told == [two, zero])
    loop.submit(one)
    assert loop.drain(60)
    assert bench.producer.committed[1].offsets == {("work", 0): CommitPoint(3)}


def test_an_abortable_error_aborts_and_tries_the_same_records_again(bench: Bench) -> None:
    bench.producer.then("commit", ABORTABLE, ABORTABLE)
    bench.producer.then("send", ABORTABLE)
    before = metric("fairlane_transactions_aborted_total", reason="INVALID_TXN_STATE")
    loop = bench.loop()
    loop.submit_many(bench.settlements(0, 1))
    loop.start()
    assert loop.drain(60)
    assert len(bench.producer.aborted) == 3
    assert bench.producer.values == [b"0", b"1"]
    assert metric("fairlane_transactions_aborted_total", reason="INVALID_TXN_STATE") == before + 3
    assert not bench.fatal


def test_what_moved_on_during_an_abort_is_dropped(bench: Bench) -> None:
    bench.producer.then("commit", ABORTABLE)
    bench.producer.then("abort", lambda: bench.ownership.revoke([WORK]))
    before = metric("fairlane_stale_settlements_total")
    loop = bench.loop()
    loop.submit_many([*bench.settlements(0, 1), *bench.settlements(5, partition=OTHER)])
    loop.start()
    assert loop.drain(60)
    assert bench.producer.values == [b"5"]
    assert bench.producer.committed[0].offsets == {("work", 1): CommitPoint(6)}
    assert metric("fairlane_stale_settlements_total") == before + 2


def test_nothing_of_a_revoked_partition_is_begun(bench: Bench) -> None:
    loop = bench.loop()
    loop.submit_many(bench.settlements(0, 1))
    bench.ownership.revoke_all()
    loop.start()
    assert loop.drain(60)
    assert bench.producer.begun == 0
    assert bench.told == []


@pytest.mark.parametrize("error", [FATAL, FENCED], ids=["fatal", "fenced"])
@pytest.mark.parametrize("call", ["begin", "produce", "send", "commit"])
def test_a_fatal_error_ends_everything_once(bench: Bench, call: str, error: KafkaError) -> None:
    bench.producer.then(call, error)
    loop = bench.loop(max_records=1)
    loop.submit_many(bench.settlements(0, 1, 2))
    loop.start()
    eventually(lambda: bench.fatal)
    assert not loop.drain(0.2), "what is left will never be committed"
    loop.submit(Settlement(Claim(WORK, 9, 1)))
    loop.stop(5)
    (told,) = bench.fatal
    assert isinstance(told, FatalTransactionError)
    assert bench.producer.committed == bench.producer.aborted == []


def test_an_abort_that_fails_is_fatal(bench: Bench) -> None:
    bench.producer.then("commit", ABORTABLE)
    bench.producer.then("abort", FATAL)
    loop = bench.loop()
    loop.submit_many(bench.settlements(0))
    loop.start()
    eventually(lambda: bench.fatal)
    assert "abort failed: INVALID_PRODUCER_EPOCH" in str(bench.fatal[0])


def test_an_unknown_outcome_is_never_tried_as_a_new_transaction(bench: Bench) -> None:
    """A commit that cannot be aborted any more may have happened: only a new producer finds out."""
    bench.producer.then("commit", KafkaError(KafkaError._STATE))
    bench.producer.then("abort", KafkaError(KafkaError._STATE))
    loop = bench.loop()
    loop.submit_many(bench.settlements(0))
    loop.start()
    eventually(lambda: bench.fatal)
    assert bench.producer.begun == 1


def test_an_error_of_our_own_is_fatal_and_not_silent(bench: Bench) -> None:
    def broken() -> None:
        raise TypeError("no bytes")

    bench.producer.then("produce", broken)
    loop = bench.loop()
    loop.submit_many(bench.settlements(0))
    loop.start()
    eventually(lambda: bench.fatal)
    assert isinstance(bench.fatal[0], TypeError)


def test_a_retriable_error_repeats_the_call_and_not_the_transaction(bench: Bench) -> None:
    bench.producer.then("send", RETRIABLE, RETRIABLE)
    bench.producer.then("commit", RETRIABLE)
    loop = bench.loop()
    loop.submit_many(bench.settlements(0))
    loop.start()
    assert loop.drain(60)
    assert bench.producer.begun == 1
    assert bench.producer.values == [b"0"]
    assert bench.producer.aborted == []


def test_a_call_that_never_returns_ends_the_process(bench: Bench) -> None:
    forever = threading.Event()

    def hang() -> None:
        forever.wait(20)

    bench.producer.then("send", hang)
    loop = bench.loop(hang_timeout_s=0.2)
    loop.submit_many(bench.settlements(0))
    loop.start()
    eventually(lambda: bench.fatal)
    assert "send_offsets_to_transaction did not return" in str(bench.fatal[0])
    assert not loop.drain(0.1)
    bench.producer.then("commit", FATAL)
    forever.set()
    loop.stop(5)
    assert len(bench.fatal) == 1


def test_a_transaction_that_is_too_large_is_halved(bench: Bench) -> None:
    bench.producer.then("commit", TOO_MUCH, TOO_MUCH)
    loop = bench.loop()
    loop.submit_many(bench.settlements(*range(16)))
    loop.start()
    assert loop.drain(60)
    assert [len(transaction.records) for transaction in bench.producer.aborted] == [16, 8]
    assert [len(transaction.records) for transaction in bench.producer.committed] == [4, 8, 4], "and grows again"
    assert bench.producer.values == [b"%d" % offset for offset in range(16)]


def test_transactions_are_bounded_in_records_and_bytes(bench: Bench) -> None:
    loop = bench.loop(max_records=3, max_bytes=10)
    outputs = [(OutputRecord("out", None, b"x" * size),) for size in (1, 1, 1, 6, 4, 1, 50, 5, 5)]
    settlements = bench.settlements(*range(9))
    loop.submit_many([Settlement(one.claim, output) for one, output in zip(settlements, outputs, strict=True)])
    loop.start()
    assert loop.drain(60)
    committed = [[len(value) for _topic, value in transaction.records] for transaction in bench.producer.committed]
    assert committed == [[1, 1, 1], [6, 4], [1], [50], [5, 5]]


def test_a_full_local_queue_is_waited_for(bench: Bench) -> None:
    bench.producer.then("produce", BUFFER_FULL, BUFFER_FULL)
    loop = bench.loop()
    loop.submit_many(bench.settlements(0, 1))
    loop.start()
    assert loop.drain(60)
    assert bench.producer.values == [b"0", b"1"]
    assert bench.producer.aborted == []


def test_a_record_that_is_refused_for_good_is_replaced_and_others_are_not(bench: Bench) -> None:
    bench.producer.refused["small"] = KafkaError.MSG_SIZE_TOO_LARGE
    replaced = []

    def fallback(settlement: Settlement, reason: str) -> Settlement:
        replaced.append((settlement.claim.offset, reason))
        return Settlement(settlement.claim, (OutputRecord("dead", None, settlement.outputs[0].value),))

    before = metric("fairlane_transactions_aborted_total", reason="MSG_SIZE_TOO_LARGE")
    loop = bench.loop(fallback=fallback)
    good, bad = bench.settlements(*range(20)), bench.settlements(20, topic="small")
    loop.submit_many([*good[:7], *bad, *good[7:]])
    loop.start()
    assert loop.drain(20)
    assert replaced == [(20, "MSG_SIZE_TOO_LARGE")]
    assert sorted(int(value) for value in bench.producer.values) == list(range(21))
    assert [topic for transaction in bench.producer.committed for topic, _value in transaction.records].count(
        "dead"
    ) == 1
    assert metric("fairlane_transactions_aborted_total", reason="MSG_SIZE_TOO_LARGE") > before
    assert bench.producer.committed[-1].offsets == {("work", 0): CommitPoint(21)}


def test_a_record_that_is_refused_at_once_names_its_topic_as_well(bench: Bench) -> None:
    bench.producer.then("produce", *[KafkaError(KafkaError._UNKNOWN_TOPIC)] * 3)
    replaced = []

    def fallback(settlement: Settlement, reason: str) -> Settlement:
        replaced.append(reason)
        return settlement

    loop = bench.loop(fallback=fallback, refusal_timeout_s=0.0)
    loop.submit_many(bench.settlements(0))
    loop.start()
    assert loop.drain(60)
    assert replaced == ["_UNKNOWN_TOPIC"]


@pytest.mark.parametrize("cause", ["an outage", "a refused generation"])
def test_what_may_pass_later_is_never_replaced(bench: Bench, cause: str) -> None:
    """Neither a time-out of deliveries nor the purge that an abort makes says that a record can never be written."""
    if cause == "an outage":
        bench.producer.refused["out"] = KafkaError._MSG_TIMED_OUT
    else:
        bench.producer.then("send", *[KafkaError(KafkaError.ILLEGAL_GENERATION, txn_requires_abort=True)] * 5)
    replaced = []

    def fallback(settlement: Settlement, reason: str) -> Settlement:
        replaced.append(reason)
        return settlement

    loop = bench.loop(fallback=fallback)
    loop.submit_many(bench.settlements(0))
    loop.start()
    eventually(lambda: len(bench.producer.aborted) >= 5)
    bench.producer.refused.clear()
    assert loop.drain(60)
    assert bench.producer.values == [b"0"]
    assert replaced == []


@pytest.mark.parametrize("has_fallback", [False, True], ids=["no fallback", "a fallback that is refused as well"])
def test_a_topic_that_takes_nothing_holds_up_nobody_else(bench: Bench, has_fallback: bool) -> None:
    bench.producer.refused["gone"] = KafkaError.UNKNOWN_TOPIC_OR_PART

    def fallback(settlement: Settlement, reason: str) -> Settlement:
        return settlement

    loop = bench.loop(fallback=fallback if has_fallback else None)
    bad = bench.settlements(0, topic="gone")
    loop.submit_many([*bad, *bench.settlements(1, 2, 3)])
    loop.start()
    eventually(lambda: len(bench.producer.values) == 3, 20)
    assert not loop.drain(0.1)
    assert loop.unsettled_count == 1
    bench.producer.refused.clear()
    assert loop.drain(60)
    assert bench.producer.committed[-1].offsets == {("work", 0): CommitPoint(4)}


def test_what_the_bitmap_cannot_reach_goes_to_the_back(bench: Bench) -> None:
    loop = bench.loop(max_records=4)
    settlements = bench.settlements(*range(REACH + 20))
    far, first = settlements[REACH + 5 :], settlements[: REACH + 5]
    loop.submit_many(far)
    loop.start()
    eventually(lambda: loop.pending_count == len(far))
    loop.submit_many([settlements[1]])
    eventually(lambda: bench.producer.values == [b"1"])
    assert loop.pending_count == len(far)
    loop.submit_many([settlements[0], *first[2:50]])
    assert loop.drain(20)
    assert sorted(int(value) for value in bench.producer.values) == [*range(50), *range(REACH + 5, REACH + 20)]
    assert bench.producer.aborted == []


def test_without_a_membership_nothing_is_begun(bench: Bench) -> None:
    bench.ownership.revoke_all()
    bench.ownership.assign({WORK: CommitPoint(0)}, Membership(-1, "", "nobody"))
    before = metric("fairlane_transactions_aborted_total", reason="no_membership")
    loop = bench.loop()
    loop.submit_many(bench.settlements(0))
    loop.start()
    eventually(lambda: metric("fairlane_transactions_aborted_total", reason="no_membership") >= before + 2)
    assert bench.producer.begun == 0
    bench.ownership.refresh(ME)
    assert loop.drain(60)
    assert bench.producer.values == [b"0"]


def test_a_settlement_handed_over_twice_is_written_once(bench: Bench) -> None:
    loop = bench.loop()
    settlements = bench.settlements(0, 1)
    loop.submit_many(settlements * 2)
    loop.start()
    assert loop.drain(60)
    loop.submit_many(settlements)
    assert loop.drain(60)
    assert bench.producer.values == [b"0", b"1"]


def test_positions_are_committed_when_they_moved(bench: Bench) -> None:
    loop = bench.started()
    loop.commit_positions()
    bench.ownership.advance(WORK, 12)
    loop.commit_positions()
    eventually(lambda: bench.producer.committed)
    assert bench.producer.committed[0].offsets == {("work", 0): CommitPoint(12)}
    assert bench.producer.committed[0].records == []
    loop.commit_positions()
    loop.submit_many(bench.settlements(0, partition=OTHER))
    assert loop.drain(60)
    assert len(bench.producer.committed) == 2, "a position that did not move costs nothing"


def test_between_transactions_waits_for_the_open_one_and_holds_off_the_next(bench: Bench) -> None:
    committing, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        committing.set()
        assert go_on.wait(10)

    bench.producer.then("commit", slow)
    loop = bench.started()
    loop.submit_many(bench.settlements(0))
    assert committing.wait(10)
    with loop.between_transactions(0.05) as ended:
        assert not ended
    assert loop.pending_count == 1, "the open transaction counts"
    go_on.set()
    with loop.between_transactions(10) as ended:
        assert ended
        assert bench.producer.values == [b"0"]
        loop.submit_many(bench.settlements(1))
        assert not loop.drain(0.1)
        assert bench.producer.begun == 1
    assert loop.drain(60)


def test_drain_says_when_the_time_ran_out(bench: Bench) -> None:
    loop = bench.loop()
    assert loop.drain(0)
    loop.submit_many(bench.settlements(0))
    assert not loop.drain(0.05)


def test_stop_leaves_what_is_pending_undone(bench: Bench) -> None:
    bench.producer.then("commit", *[ABORTABLE] * 50)
    loop = bench.started()
    loop.submit_many(bench.settlements(0))
    eventually(lambda: len(bench.producer.aborted) >= 2)
    loop.stop(5)
    begun = bench.producer.begun
    loop.submit_many(bench.settlements(1))
    assert not loop.drain(0.1)
    assert bench.producer.begun == begun
    assert bench.producer.committed == []
    assert not bench.fatal


def test_a_producer_that_cannot_register_raises_where_it_is_started(bench: Bench) -> None:
    bench.producer.then("init", RETRIABLE)
    with pytest.raises(KafkaException):
        bench.started()


def test_notes_are_written_before_what_is_submitted_after_them(bench: Bench) -> None:
    loop = bench.loop()
    loop.note([OutputRecord("ledger.audit", None, b"accepted")])
    loop.submit_many(bench.settlements(0))
    loop.start()
    assert loop.drain(60)
    assert bench.producer.values[0] == b"accepted"
    assert len(bench.producer.values) == 2


def test_notes_alone_are_written_without_offsets(bench: Bench) -> None:
    loop = bench.started()
    loop.note([OutputRecord("ledger.audit", None, b"accepted")])
    eventually(lambda: bench.producer.committed)
    assert bench.producer.committed[0].offsets == {}
    assert bench.producer.values == [b"accepted"]


def test_notes_of_an_aborted_transaction_are_written_with_the_next_and_once(bench: Bench) -> None:
    bench.producer.then("commit", KafkaError(KafkaError._INCONSISTENT, txn_requires_abort=True))
    loop = bench.loop()
    loop.note([OutputRecord("ledger.audit", None, b"first"), OutputRecord("ledger.audit", None, b"second")])
    loop.submit_many(bench.settlements(0))
    loop.start()
    assert loop.drain(60)
    assert bench.producer.values[:2] == [b"first", b"second"]
    assert len(bench.producer.values) == 3


def test_a_note_that_its_topic_refuses_is_dropped_and_blames_nobody_else(bench: Bench) -> None:
    bench.producer.refused["ledger.audit"] = KafkaError.TOPIC_AUTHORIZATION_FAILED
    replaced: list[Settlement] = []

    def fallback(settlement: Settlement, _reason: str) -> Settlement:
        replaced.append(settlement)
        return settlement

    loop = bench.loop(fallback=fallback)
    loop.note([OutputRecord("ledger.audit", None, b"accepted")])
    (settlement,) = bench.settlements(0)
    loop.submit(settlement)
    loop.start()
    assert loop.drain(60)
    assert not replaced
    assert bench.producer.values == [record.value for record in settlement.outputs]


def test_other_producers_take_over_between_two_transactions(bench: Bench) -> None:
    """Also after one that was aborted: its records are committed by the new producer."""
    other, waiting = ScriptedProducer(), deque[Sequence[Producer]]()
    loop = bench.started(renewed=lambda: waiting.popleft() if waiting else None)
    zero, one = bench.settlements(0, 1)
    loop.submit(zero)
    assert loop.drain(60)
    closed = [bench.producer.is_closed]

    def replaced() -> None:
        waiting.append((cast(Producer, other),))
        raise KafkaException(ABORTABLE)

    bench.producer.then("commit", replaced)
    loop.submit(one)
    assert loop.drain(60)
    assert (bench.producer.values, other.values) == ([b"0"], [b"1"])
    assert [*closed, bench.producer.is_closed] == [False, True]
    assert other.committed[0].offsets == {("work", 0): CommitPoint(2)}
    assert not bench.fatal


def test_other_producers_that_cannot_be_registered_end_the_loop(bench: Bench) -> None:
    """Those before may be fenced already."""
    other = ScriptedProducer()
    other.then("init", FATAL)
    loop = bench.started(renewed=lambda: (cast(Producer, other),))
    loop.submit_many(bench.settlements(0))
    eventually(lambda: bench.fatal)
    assert bench.producer.values == other.values == []

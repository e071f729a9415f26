"""The transaction loop between a real consumer group and a real log: crashes, aborts, zombies, refusals."""

import gc
from collections.abc import Iterator, Sequence
from time import monotonic

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import NewTopic
from prometheus_client import REGISTRY

from fairlane.committed import ResumePoint, TopicIds
from fairlane.kafka_config import MAX_MESSAGE_BYTES, read_committed_consumer
from fairlane.offsets import MAX_METADATA_CHARS, CommitPoint
from fairlane.ownership import Claim, Membership, Ownership
from fairlane_server.kafka.transactions import FatalTransactionError, OutputRecord, Settlement, TransactionLoop
from tests.kit.pool_reader import TRANSACTION_TIMEOUT_MS, Pool, Worker
from tests.kit.waiting import eventually

pytestmark = pytest.mark.broker


@pytest.fixture
def pool(broker: str, unique: str) -> Iterator[Pool]:
    made = Pool(broker, unique)
    yield made
    for worker in made.workers:
        worker.crash()
    # A producer lives until it is collected, and would miss its broker aloud.
    made.workers.clear()
    gc.collect()


def aborted(reason: str) -> float:
    return REGISTRY.get_sample_value("fairlane_transactions_aborted_total", {"reason": reason}) or 0.0


def test_a_successor_does_exactly_what_was_left(pool: Pool) -> None:
    pool.write(*map(str, range(60)))
    first = pool.worker(max_records=7)
    pool.until(lambda: len(first.claims) == 60, "60 records")
    done = [offset for offset in reversed(range(60)) if offset % 3 and offset != 1]
    first.settle(pool.partition, done)
    pool.crash(first)
    assert pool.resume() == ResumePoint(CommitPoint(0, sum(1 << offset for offset in done)), 0)

    second = pool.worker()
    left = sorted(set(range(60)) - set(done))
    pool.until(lambda: len(second.claims) >= len(left), "what was left")
    second.settle(pool.partition, left)
    assert second.offsets(pool.partition) == left
    assert pool.outputs() == pool.expected(range(60))
    pool.crash(second)
    assert pool.resume().committed == CommitPoint(60)

    third = pool.worker()
    pool.write("60")
    pool.until(lambda: third.claims, "the newest record")
    assert third.offsets(pool.partition) == [60]


def test_what_an_upstream_aborts_is_never_delivered(pool: Pool) -> None:
    upstream = pool.producer("upstream")
    upstream.init_transactions(20)
    for values, kept in ((("a", "b"), True), (("x", "y", "z"), False), (("c", "d"), True), (("w",), False)):
        upstream.begin_transaction()
        for value in values:
            upstream.produce(pool.work, value=value.encode(), partition=0)
        upstream.flush(10)
        if kept:
            upstream.commit_transaction(10)
        else:
            upstream.abort_transaction(10)
    # a b | commit | x y z | abort | c d | commit | w | abort
    worker = pool.worker()
    pool.until(lambda: len(worker.claims) == 4, "four records")
    assert worker.values == [b"a", b"b", b"c", b"d"]
    assert worker.offsets(pool.partition) == [0, 1, 7, 8]
    worker.settle(pool.partition, [8, 1])
    assert pool.resume().committed == CommitPoint(0, 1 << 1 | 1 << 8)
    worker.settle(pool.partition, [0])
    assert pool.resume().committed == CommitPoint(7, 0b10), "the gap before the first undone record is done"
    worker.settle(pool.partition, [7])

    def position_is_committed() -> bool:
        worker.loop.commit_positions()
        return pool.resume().committed == CommitPoint(12)

    pool.until(position_is_committed, "the position behind the last marker")
    assert pool.outputs() == pool.expected([0, 1, 7, 8])


def test_a_zombie_commits_nothing(pool: Pool) -> None:
    """It was away while the group moved on, and still believes in its partition and its generation."""
    pool.write(*map(str, range(10)))
    zombie = pool.worker("zombie")
    pool.until(lambda: len(zombie.claims) == 10, "ten records")
    zombie.settle(pool.partition, [3])
    believed = zombie.ownership.membership
    assert believed is not None
    assert believed.may_commit

    other = pool.worker("other")
    pool.until(lambda: zombie.ownership.membership != believed, "a new generation")
    asleep = Ownership()
    asleep.assign({pool.partition: CommitPoint(0, 1 << 3)}, believed)
    claims = [claim for offset in range(10) if (claim := asleep.deliver(pool.partition, offset)) is not None]
    assert len(claims) == 9
    fatal: list[Exception] = []
    loop = TransactionLoop(pool.producers("asleep"), asleep, on_fatal=fatal.append)
    loop.start()
    names = ("ILLEGAL_GENERATION", "STALE_MEMBER_EPOCH", "UNKNOWN_MEMBER_ID", "FENCED_MEMBER_EPOCH")
    before = sum(map(aborted, names))
    loop.submit_many([Settlement(claim, (OutputRecord(pool.out, None, b"from the grave"),)) for claim in claims])
    eventually(lambda: sum(map(aborted, names)) >= before + 2, what="two refusals")
    assert pool.resume().committed == CommitPoint(0, 1 << 3)
    asleep.revoke_all()
    assert loop.drain(10), "what moved on is dropped"
    loop.stop()
    assert not fatal

    left = [offset for offset in range(10) if offset != 3]

    def owner() -> Worker | None:
        """Who holds all that is left."""
        for worker in (zombie, other):
            claims = [claim for claim in worker.claims.values() if worker.ownership.is_current(claim)]
            if sorted(claim.offset for claim in claims) == left:
                return worker
        return None

    pool.until(owner, "one owner of what is left")
    living = owner()
    assert living is not None
    living.settle(pool.partition, left)
    assert pool.outputs() == pool.expected(range(10))


def test_a_commit_without_a_generation_is_never_sent(pool: Pool) -> None:
    """The broker would let it pass: this is what keeps a member that lost its coordinator from committing."""
    pool.write("0")
    consumer = Consumer(read_committed_consumer(pool.settings, pool.group))
    unassigned = consumer.consumer_group_metadata()
    ownership = Ownership()
    ownership.assign({pool.partition: None}, Membership(-1, "", unassigned))
    claim = ownership.deliver(pool.partition, 0)
    assert claim is not None
    fatal: list[Exception] = []
    loop = TransactionLoop(pool.producers("nobody"), ownership, on_fatal=fatal.append)
    loop.start()
    before = aborted("no_membership")
    loop.submit(Settlement(claim, (OutputRecord(pool.out, None, b"unfenced"),)))
    eventually(lambda: aborted("no_membership") >= before + 2)
    loop.stop()
    consumer.close()
    assert pool.resume().committed is None
    assert pool.outputs() == []


def test_the_fullest_bitmap_is_accepted_and_read_back(pool: Pool) -> None:
    worker = pool.worker()
    pool.until(worker.ownership.partitions, "an assignment")
    reach = 23_832
    for offset in range(reach + 1):
        claim = worker.ownership.deliver(pool.partition, offset)
        assert claim is not None
        worker.claims[pool.partition, offset] = claim
    worker.settle_silently(pool.partition, range(1, reach))
    topic_id = TopicIds(pool.settings)([pool.work], 5.0)[pool.work]
    point = CommitPoint(0, (1 << reach) - 2, topic_id)
    assert MAX_METADATA_CHARS - 4 < len(point.metadata) <= MAX_METADATA_CHARS
    # Nobody would resume there: the log holds nothing of it.
    consumer = Consumer(read_committed_consumer(pool.settings, pool.group))
    (found,) = consumer.committed([TopicPartition(*pool.partition)], timeout=10)
    consumer.close()
    assert CommitPoint.parse(found.offset, found.metadata) == point


def test_a_truncated_log_raises_the_alarm_and_goes_on(pool: Pool) -> None:
    pool.write(*map(str, range(40)))
    first = pool.worker()
    pool.until(lambda: len(first.claims) == 40, "forty records")
    first.settle(pool.partition, [*range(10), 35])
    pool.crash(first)
    pool.admin.delete_records([TopicPartition(pool.work, 0, 30)])[TopicPartition(pool.work, 0, 30)].result(10)
    labels = {"topic": pool.work}
    assert not REGISTRY.get_sample_value("fairlane_log_truncated_total", labels)
    second = pool.worker()
    left = [30, 31, 32, 33, 34, 36, 37, 38, 39]
    pool.until(lambda: len(second.claims) >= len(left), "what is left of the log")
    assert second.offsets(pool.partition) == left
    assert REGISTRY.get_sample_value("fairlane_log_truncated_total", labels) == 1
    second.settle(pool.partition, left)
    assert pool.outputs() == pool.expected([*range(10), *range(30, 40)])
    assert pool.resume().committed == CommitPoint(40)


@pytest.mark.parametrize("refusal", ["a topic that is missing", "a topic that takes no record of this size"])
def test_a_record_that_is_refused_is_replaced_and_the_others_are_committed(pool: Pool, refusal: str) -> None:
    """The transaction is aborted while the broker still knows it: one that expired would fence the producer."""
    replaced = []

    def fallback(settlement: Settlement, reason: str) -> Settlement:
        replaced.append((settlement.claim.offset, reason))
        return Settlement(settlement.claim, (OutputRecord(pool.out, None, b"instead"),))

    pool.write(*map(str, range(20)))
    worker = pool.worker(fallback=fallback)
    pool.until(lambda: len(worker.claims) == 20, "twenty records")
    settlements = [worker.settlement(pool.partition, offset) for offset in range(20)]
    if refusal == "a topic that is missing":
        poison, reasons = OutputRecord(f"{pool.name}-gone", None, b"x"), {"_UNKNOWN_TOPIC", "UNKNOWN_TOPIC_OR_PART"}
    else:
        poison, reasons = OutputRecord(pool.small, None, b"x" * 4_000), {"MSG_SIZE_TOO_LARGE"}
    settlements[13] = Settlement(settlements[13].claim, (poison,))
    worker.loop.submit_many(settlements)
    assert worker.loop.drain(60)
    assert len(replaced) == 1
    assert replaced[0][0] == 13
    assert replaced[0][1] in reasons
    assert worker.fatal == []
    assert pool.outputs() == sorted(["instead", *pool.expected(set(range(20)) - {13})])
    assert pool.outputs(pool.small) == []
    assert pool.resume().committed == CommitPoint(20)


def test_a_record_larger_than_any_is_refused_before_it_is_sent(pool: Pool) -> None:
    def fallback(settlement: Settlement, reason: str) -> Settlement:
        return Settlement(settlement.claim)

    pool.write("0", "1")
    worker = pool.worker(fallback=fallback)
    pool.until(lambda: len(worker.claims) == 2, "two records")
    huge = OutputRecord(pool.out, None, bytes(MAX_MESSAGE_BYTES + 1))
    worker.loop.submit(Settlement(worker.claims[pool.partition, 0], (huge,)))
    worker.loop.submit(worker.settlement(pool.partition, 1))
    assert worker.loop.drain(60)
    assert pool.outputs() == pool.expected([1])
    assert pool.resume().committed == CommitPoint(2)


def test_a_producer_whose_slot_was_taken_ends_its_process(pool: Pool) -> None:
    pool.write(*map(str, range(5)))
    worker = pool.worker("slot")
    pool.until(lambda: len(worker.claims) == 5, "five records")
    worker.settle(pool.partition, [0])
    for successor in pool.producers("slot"):
        successor.init_transactions(20)
    worker.loop.submit_many([worker.settlement(pool.partition, offset) for offset in (1, 2)])
    eventually(lambda: worker.fatal, what="the end")
    assert not worker.loop.drain(1)
    (error,) = worker.fatal
    assert isinstance(error, FatalTransactionError)
    assert pool.outputs() == pool.expected([0])
    assert pool.resume().committed == CommitPoint(1)


def test_the_offsets_of_the_last_transaction_count_whichever_producer_sent_them(pool: Pool) -> None:
    pool.write(*map(str, range(60)))
    worker = pool.worker("slot")
    pool.until(lambda: len(worker.claims) == 60, "sixty records")
    for offset in range(60):
        # Back to front within each ten: what is done beyond the first undone offset is in the metadata.
        worker.settle(pool.partition, [offset // 10 * 10 + 9 - offset % 10])
        done = {tens * 10 + ones for tens in range(offset // 10) for ones in range(10)}
        done |= {offset // 10 * 10 + 9 - back for back in range(offset % 10 + 1)}
        point = pool.resume().committed
        assert point is not None
        assert (
            set(range(point.offset)) | {point.offset + bit for bit in range(60) if point.done_beyond >> bit & 1} == done
        )
    assert pool.outputs() == pool.expected(range(60))


def test_an_open_transaction_of_a_dead_predecessor_ends_when_its_slot_starts_again(pool: Pool) -> None:
    pool.write(*map(str, range(5)))
    worker = pool.worker("slot")
    pool.until(lambda: len(worker.claims) == 5, "five records")
    worker.settle(pool.partition, [4])
    membership = worker.ownership.membership
    assert membership is not None
    pool.crash(worker)
    dead = pool.producer("slot")
    dead.init_transactions(20)
    dead.begin_transaction()
    dead.produce(pool.out, value=b"never committed")
    # Any group's offsets make the point: they are pending until the transaction ends.
    with pytest.raises(KafkaException) as refused:
        dead.send_offsets_to_transaction([TopicPartition(*pool.partition, 3)], membership.group_metadata, 10)
    assert refused.value.args[0].code() == KafkaError.UNKNOWN_MEMBER_ID
    dead.flush(10)
    started = monotonic()
    second = pool.worker("slot")
    pool.until(lambda: len(second.claims) == 4, "what was left")
    second.settle(pool.partition, range(4))
    assert pool.outputs() == pool.expected(range(5))
    assert monotonic() - started < TRANSACTION_TIMEOUT_MS / 1_000, "nobody waited for the transaction to expire"


@pytest.mark.alone
def test_records_for_a_missing_topic_delay_no_others_and_are_written_when_it_is_there(pool: Pool) -> None:
    gone, bad, good = f"{pool.name}-gone", range(64), range(64, 264)
    pool.write(*map(str, range(264)))
    latencies_s: list[float] = []
    sent: dict[Claim, float] = {}

    def told(settled: Sequence[Settlement], /) -> None:
        latencies_s.extend(monotonic() - sent[one.claim] for one in settled if one.claim in sent)

    worker = pool.worker(on_committed=told, fallback=lambda settlement, _reason: settlement)
    pool.until(lambda: len(worker.claims) == 264, "the records")
    worker.settle(pool.partition, [good[0]])
    worker.loop.submit_many([worker.settlement(pool.partition, offset, gone) for offset in bad])
    for offset in good[1:]:
        settlement = worker.settlement(pool.partition, offset)
        sent[settlement.claim] = monotonic()
        worker.loop.submit(settlement)
        worker.poll()
    eventually(lambda: len(latencies_s) == len(sent), what="the commit of all others")
    # One after another for ten seconds: a machine that does something else for one of them delays no more than a tenth.
    nearly_all_s = sorted(latencies_s)[round(0.9 * len(latencies_s))]
    assert nearly_all_s < 1.5, "less than librdkafka takes to give up a topic"
    assert worker.loop.blocked_count == len(bad)
    pool.admin.create_topics([NewTopic(gone, 1, 1)])[gone].result(20)
    assert worker.loop.drain(60)
    assert pool.outputs(gone) == pool.expected(bad)
    assert pool.outputs() == pool.expected(good)
    assert pool.resume().committed == CommitPoint(264)
    assert worker.fatal == []

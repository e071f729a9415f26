"""What a topic refuses waits apart: it holds up nobody else, nothing of it is lost, and memory stays bounded."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from confluent_kafka import KafkaError

from fairlane.offsets import CommitPoint
from fairlane.ownership import Claim, PartitionId
from fairlane_server.kafka.transactions import OutputRecord, Settlement
from tests.kit.scripted_producer import ME, OTHER, WORK, Bench
from tests.kit.waiting import eventually

NEIGHBOUR = PartitionId("neighbour", 0)
MISSING = KafkaError.UNKNOWN_TOPIC_OR_PART
TOO_LARGE = KafkaError.MSG_SIZE_TOO_LARGE

LATENCY_BOUND_S = 0.5
"""Far above what a scripted transaction takes on a busy machine, and far below a stall."""


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    made.ownership.assign({WORK: CommitPoint(0), OTHER: CommitPoint(0), NEIGHBOUR: CommitPoint(0)}, ME)
    yield made
    for loop in made.loops:
        loop.stop(5.0)


def same(settlement: Settlement, _reason: str) -> Settlement:
    return settlement


def dead_letter(settlement: Settlement, _reason: str) -> Settlement:
    return Settlement(settlement.claim, (OutputRecord("dead", None, settlement.outputs[0].value),))


class Stream:
    """One settlement every few milliseconds to a topic that takes everything, and how long each took."""

    def __init__(self, bench: Bench) -> None:
        self.latencies_s: list[float] = []
        self._bench = bench
        self._sent: dict[Claim, float] = {}

    def told(self, settlements: Sequence[Settlement], /) -> None:
        self._bench.told.extend(settlements)
        now = time.monotonic()
        self.latencies_s += [now - self._sent[one.claim] for one in settlements if one.claim in self._sent]

    def nearly_longest_s(self) -> float:
        """That of the slowest but one in twenty: a machine that does something else for a moment delays no more."""
        return sorted(self.latencies_s)[round(0.95 * len(self.latencies_s)) - 1]

    def run(self, submit: Callable[[Settlement], None], until: Callable[[], object], least: int = 200) -> None:
        """Send until the condition is true and so many were sent."""
        pause = threading.Event()
        deadline = time.monotonic() + 20
        while len(self._sent) < least or not until():
            assert time.monotonic() < deadline
            (one,) = self._bench.settlements(len(self._sent), partition=NEIGHBOUR)
            self._sent[one.claim] = time.monotonic()
            submit(one)
            pause.wait(0.005)
        eventually(lambda: len(self.latencies_s) == len(self._sent))


@pytest.mark.parametrize("found_by", ["a look-up", "a delivery"])
@pytest.mark.parametrize("fallback", [None, same], ids=["no fallback", "the same again"])
def test_64_records_for_a_missing_topic_delay_no_good_one(
    bench: Bench, fallback: Callable[[Settlement, str], Settlement] | None, found_by: str
) -> None:
    (bench.producer.missing if found_by == "a look-up" else bench.producer.refused)["gone"] = MISSING
    stream = Stream(bench)
    loop = bench.loop(fallback=fallback)
    loop.on_committed = stream.told
    loop.submit_many(bench.settlements(*range(64), topic="gone"))
    loop.start()
    stream.run(loop.submit, lambda: True, 300)
    assert stream.nearly_longest_s() < LATENCY_BOUND_S
    assert loop.blocked_count == 64
    assert loop.pending_count == 0, "the others may go on reading"
    assert not bench.fatal


def test_200_refusals_to_one_missing_reply_topic_are_replaced_and_delay_no_good_one(bench: Bench) -> None:
    bench.producer.missing["replies.acme"] = MISSING
    stream = Stream(bench)
    loop = bench.loop(fallback=dead_letter, refusal_timeout_s=0.3)
    loop.on_committed = stream.told
    loop.submit_many(bench.settlements(*range(200), topic="replies.acme"))
    loop.start()
    stream.run(loop.submit, lambda: not loop.blocked_count)
    assert stream.nearly_longest_s() < LATENCY_BOUND_S
    assert loop.drain(60)
    dead = [value for one in bench.producer.committed for topic, value in one.records if topic == "dead"]
    assert dead == [b"%d" % offset for offset in range(200)], "each once, in order"
    late = time.monotonic()
    loop.submit_many(bench.settlements(*range(200, 220), topic="replies.acme"))
    assert loop.drain(60)
    assert time.monotonic() - late < 2, "a topic that is known to be missing is not waited for again"


def test_when_a_topic_appears_everything_parked_is_written_in_order(bench: Bench) -> None:
    bench.producer.missing["gone"] = MISSING
    loop = bench.loop()
    loop.submit_many(bench.settlements(*range(40), topic="gone"))
    loop.start()
    eventually(lambda: loop.blocked_count == 40)
    loop.submit_many(bench.settlements(*range(40, 60), topic="gone"))
    eventually(lambda: loop.blocked_count == 60)
    assert bench.producer.begun == 0, "what is missing costs no transaction"
    bench.producer.missing.clear()
    assert loop.drain(60)
    assert bench.producer.values == [b"%d" % offset for offset in range(60)]
    assert bench.producer.committed[-1].offsets == {("work", 0): CommitPoint(60)}
    assert len(bench.producer.committed) <= 12, "worked off in growing transactions"
    loop.submit_many(bench.settlements(60, topic="gone"))
    assert loop.drain(60)


@pytest.mark.parametrize("bad", [{13}, set(range(0, 40, 7)), set(range(40))], ids=["one", "some", "all"])
def test_a_topic_that_refuses_some_records_takes_the_others(bench: Bench, bad: set[int]) -> None:
    """The broker answers for all that goes to the partition at once, so who was at fault must be searched."""
    refused = {b"%d" % offset for offset in bad}

    def deliver() -> None:
        assert bench.producer._open is not None
        at_fault = any(value in refused and topic == "small" for topic, value in bench.producer._open.records)
        bench.producer.refused = {"small": TOO_LARGE} if at_fault else {}

    bench.producer.before_delivery = deliver
    loop = bench.loop()
    loop.submit_many([*bench.settlements(*range(40), topic="small"), *bench.settlements(*range(10), partition=OTHER)])
    loop.start()
    eventually(lambda: len(bench.producer.values) == 50 - len(bad) and loop.blocked_count == len(bad))
    written = [value for one in bench.producer.committed for topic, value in one.records if topic == "small"]
    assert written == [b"%d" % offset for offset in range(40) if offset not in bad]
    late = bench.settlements(100, topic="small")
    loop.submit_many(late)
    eventually(lambda: b"100" in bench.producer.values)


def test_what_is_parked_of_a_revoked_partition_is_dropped(bench: Bench) -> None:
    bench.producer.missing["gone"] = MISSING
    loop = bench.loop()
    loop.submit_many(
        [*bench.settlements(*range(5), topic="gone"), *bench.settlements(*range(3), topic="gone", partition=OTHER)]
    )
    loop.start()
    eventually(lambda: loop.blocked_count == 8)
    bench.ownership.revoke([WORK])
    eventually(lambda: loop.unsettled_count == 3)
    bench.producer.missing.clear()
    assert loop.drain(60)
    assert [one.offsets for one in bench.producer.committed][-1] == {("work", 1): CommitPoint(3)}
    assert sum(len(one.records) for one in bench.producer.committed) == 3


def test_a_partition_that_is_revoked_while_it_is_probed_commits_nothing(bench: Bench) -> None:
    bench.producer.refused["gone"] = MISSING
    loop = bench.loop()
    loop.submit_many(bench.settlements(0, 1, topic="gone"))
    bench.producer.then("abort", lambda: None, lambda: bench.ownership.revoke([WORK]))
    loop.start()
    assert loop.drain(60)
    assert bench.producer.committed == []


def test_stop_leaves_what_is_parked_undone(bench: Bench) -> None:
    bench.producer.missing["gone"] = MISSING
    loop = bench.started()
    loop.submit_many(bench.settlements(0, topic="gone"))
    eventually(lambda: loop.blocked_count == 1)
    assert not loop.drain(0.05)
    loop.stop(5)
    assert bench.producer.committed == []
    assert bench.ownership.resume_points()[WORK] == 0


def test_memory_is_bounded_by_whose_records_are_refused(bench: Bench) -> None:
    bench.producer.missing["gone"] = MISSING
    loop = bench.started(max_blocked=160)
    loop.submit_many(bench.settlements(*range(9), topic="gone"))
    eventually(lambda: loop.blocked_count == 9)
    assert loop.sources_held_up() == frozenset()
    loop.submit_many(bench.settlements(9, topic="gone"))
    loop.submit_many(bench.settlements(0, topic="gone", partition=NEIGHBOUR))
    eventually(lambda: loop.blocked_count == 11)
    assert loop.sources_held_up() == {"work"}, "the neighbour has hardly anything blocked"
    loop.submit_many(bench.settlements(*range(10, 170), topic="gone"))
    eventually(lambda: loop.blocked_count == 171)
    assert loop.sources_held_up() == {"work", "neighbour"}, "together they have too much"
    assert loop.pending_count == 171 - 160, "beyond the bound it counts as pending, for those who read on all the same"
    bench.producer.missing.clear()
    assert loop.drain(60)
    assert loop.sources_held_up() == frozenset()
    assert loop.pending_bytes == 0


def test_parked_bytes_are_bounded_as_well(bench: Bench) -> None:
    bench.producer.missing["gone"] = MISSING
    loop = bench.started(max_blocked_bytes=1_000)
    (one,) = bench.settlements(0)
    loop.submit(Settlement(one.claim, (OutputRecord("gone", None, bytes(1_500)),)))
    eventually(lambda: loop.blocked_count == 1)
    assert loop.pending_bytes == 500
    assert loop.sources_held_up() == {"work"}


def test_a_topic_that_was_not_let_into_the_transaction_is_found_among_the_new_ones(bench: Bench) -> None:
    """librdkafka names no topic when the broker denies writing to one; the offsets go first so that it can abort."""
    denied = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, txn_requires_abort=True)

    def deliver() -> None:
        assert bench.producer._open is not None
        if any(topic == "denied" for topic, _ in bench.producer._open.records):
            bench.producer.then("commit", denied)

    bench.producer.before_delivery = deliver
    loop = bench.loop(fallback=dead_letter, refusal_timeout_s=0.0)
    loop.submit_many(
        [*bench.settlements(0), *bench.settlements(1, topic="denied"), *bench.settlements(2, topic="replies.acme")]
    )
    loop.start()
    assert loop.drain(60)
    assert sorted(bench.producer.values) == [b"0", b"1", b"2"]
    topics = {value: topic for one in bench.producer.committed for topic, value in one.records}
    assert topics == {b"0": "out", b"1": "dead", b"2": "replies.acme"}
    assert all(one.offsets for one in bench.producer.aborted), "a transaction that holds nothing cannot be aborted"


def test_a_chain_of_replacements_ends(bench: Bench) -> None:
    bench.producer.missing = {"a": MISSING, "b": MISSING}

    def back_and_forth(settlement: Settlement, _reason: str) -> Settlement:
        topic = "b" if settlement.outputs[0].topic == "a" else "a"
        return Settlement(settlement.claim, (OutputRecord(topic, None, b"x"),))

    loop = bench.loop(fallback=back_and_forth, refusal_timeout_s=0.0)
    loop.submit_many(bench.settlements(0, topic="a"))
    loop.start()
    eventually(lambda: len(loop._blocked._replaced) == 1)
    loop.submit_many(bench.settlements(1))
    eventually(lambda: bench.producer.values == [b"1"])
    bench.producer.missing.clear()
    assert loop.drain(60)


def test_one_topic_whose_leader_is_away_holds_up_nobody_and_is_never_replaced(bench: Bench) -> None:
    bench.producer.refused["away"] = KafkaError._MSG_TIMED_OUT
    loop = bench.loop(fallback=dead_letter, refusal_timeout_s=0.0)
    loop.submit_many([*bench.settlements(0, topic="away"), *bench.settlements(1, 2)])
    loop.start()
    eventually(lambda: bench.producer.values == [b"1", b"2"])
    bench.producer.refused.clear()
    assert loop.drain(60)
    assert bench.producer.values == [b"1", b"2", b"0"]

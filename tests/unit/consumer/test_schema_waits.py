"""Work with a schema that the registry has not given yet."""

from typing import Any

import pytest
from confluent_kafka import Message

from fairlane.codec import Codec
from fairlane.names import DEAD_LETTER_WORK
from fairlane.outcomes import Priority
from fairlane.ownership import Claim, Membership, Ownership, PartitionId
from fairlane.records import WorkItem
from fairlane.schema_files import default_codec
from fairlane.skipping_consumer import SkippedRange
from inference_consumers.consumer import InferenceConsumer, Prefetch
from inference_consumers.schema_waits import SchemaWaits
from tests.kit.driver_bench import DriverBench
from tests.kit.late_schemas import LateSchemas, late
from tests.kit.micro_batch_kit import work
from tests.kit.waiting import eventually

PARTITION = PartitionId("priority.gpu.normal", 0)


class Member:
    """Delivers what a test gives it, and remembers which priorities are paused."""

    def __init__(self) -> None:
        self.arriving: list[tuple[Claim, Message]] = []
        self.full: set[str] = set()

    def poll(self, timeout_s: float) -> list[tuple[Claim, Message | SkippedRange]]:
        arrived, self.arriving = self.arriving, []
        return list(arrived)

    def pause_priorities(self, full: set[str]) -> None:
        self.full = set(full)


class Waiting:
    """A consumer and its registry, on a clock that is the test's."""

    def __init__(self, *, max_items: int = 100) -> None:
        self.source = LateSchemas(WorkItem)
        self.now_s = 100.0
        codec = Codec(self.source)
        self.ownership = Ownership(1_000)
        self.ownership.assign({PARTITION: None}, Membership(1, "member", object()))
        self.waits = SchemaWaits(codec, clock=lambda: self.now_s)
        self.bench = DriverBench(max_items=1)
        transactions: Any = self.bench.transactions
        self.consumer = InferenceConsumer(
            codec=codec,
            ownership=self.ownership,
            transactions=transactions,
            driver=self.bench.driver,
            prefetch=Prefetch(max_items, 1 << 30),
            clock=lambda: self.bench.now_ms,
            schema_waits=self.waits,
        )
        self.member = Member()
        self.offset = 0

    def deliver(self, *, is_late: bool) -> Claim:
        claim = self.ownership.deliver(PARTITION, self.offset)
        assert claim is not None
        value = default_codec().encode(work().item)
        message = Message(
            topic=PARTITION.topic, partition=0, offset=self.offset, key=b"k", value=late(value) if is_late else value
        )
        self.member.arriving.append((claim, message))
        self.offset += 1
        return claim

    def poll(self) -> None:
        self.consumer.poll_once(self.member)

    def look_up(self) -> None:
        """End the look-up under way; without one, let the time to the next pass first."""
        if self.waits._look_up is None:
            self.now_s += 20.0
            self.poll()
        assert self.waits._look_up is not None
        eventually(self.waits._look_up.done, what="the end of the look-up")
        self.poll()

    @property
    def offsets(self) -> list[int]:
        return sorted(one.claim.offset for one in self.bench.driver.waiting.take(lambda _: True))


def test_work_with_an_unknown_schema_waits_for_the_registry_and_other_work_does_not() -> None:
    waiting = Waiting()
    waiting.source.is_available = False
    waiting.deliver(is_late=True)
    waiting.deliver(is_late=False)
    waiting.poll()
    assert waiting.offsets == [1]
    waiting.look_up()
    waiting.look_up()
    assert len(waiting.waits) == 1, "it waits as long as the outage lasts"
    assert not waiting.bench.transactions.settlements
    waiting.source.is_available = True
    waiting.look_up()
    assert waiting.offsets == [0]
    assert not waiting.waits
    assert waiting.waits.size_bytes == 0


def test_a_schema_that_is_registered_nowhere_makes_a_dead_letter() -> None:
    waiting = Waiting()
    waiting.source.is_registered = False
    claim = waiting.deliver(is_late=True)
    waiting.poll()
    waiting.look_up()
    (settlement,) = waiting.bench.transactions.settlements
    assert settlement.claim == claim
    assert settlement.outputs[0].topic == DEAD_LETTER_WORK
    assert not waiting.waits


def test_failed_look_ups_are_repeated_with_backoff() -> None:
    waiting = Waiting()
    waiting.source.is_available = False
    waiting.deliver(is_late=True)
    waiting.poll()
    waiting.look_up()
    waiting.poll()
    assert waiting.source.look_ups == 1, "not before the delay is over"


def test_an_answer_counts_for_the_records_that_waited_when_it_was_asked_for() -> None:
    waiting = Waiting()
    waiting.source.is_registered = False
    waiting.deliver(is_late=True)
    waiting.poll()
    waiting.look_up()
    waiting.now_s += 0.5
    waiting.deliver(is_late=True)
    waiting.poll()
    assert len(waiting.waits) == 1
    assert waiting.source.look_ups == 1, "one look-up a second"
    waiting.source.is_registered = True
    waiting.look_up()
    assert waiting.offsets == [1]


def test_nothing_is_fetched_while_too_much_work_waits() -> None:
    waiting = Waiting(max_items=2)
    waiting.source.is_available = False
    waiting.deliver(is_late=True)
    waiting.poll()
    assert waiting.member.full == set()
    waiting.deliver(is_late=True)
    waiting.poll()
    assert waiting.member.full == {str(priority) for priority in Priority}


def test_work_of_a_revoked_partition_is_dropped() -> None:
    waiting = Waiting()
    waiting.source.is_available = False
    waiting.deliver(is_late=True)
    waiting.poll()
    waiting.ownership.revoke([PARTITION])
    waiting.consumer.on_revoked()
    assert not waiting.waits


def test_an_unexpected_error_of_a_look_up_reaches_the_polling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Waiting()

    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(waiting.source, "refresh", fail)
    waiting.deliver(is_late=True)
    waiting.poll()
    with pytest.raises(ZeroDivisionError):
        waiting.look_up()

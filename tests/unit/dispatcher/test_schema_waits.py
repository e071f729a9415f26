"""Records that wait for a schema: with their partition alone, in order, bounded, and for one look-up a second."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from fairlane import metrics, names
from fairlane.codec import Codec, DecodeProblem
from fairlane.outcomes import Decision
from fairlane.ownership import Claim, PartitionId
from fairlane.schema_files import committed_schemas
from fairlane.schema_registry import RegistryError
from stream_processors.dispatcher.intake.schema_waits import SchemaWaitQueue
from stream_processors.dispatcher.queued_request import ReceivedRecord
from tests.kit.dispatcher_bench import Bench, encoded
from tests.kit.waiting import eventually

ACME = PartitionId("requests.acme", 0)
OTHER = PartitionId("requests.other", 0)
NEW_ID, UNKNOWN_ID = 900, 901


@dataclass
class Registry:
    """A source that has to be asked for what is registered later than the committed schemas."""

    registered: dict[int, str] = field(default_factory=dict)
    loaded: dict[int, str] = field(default_factory=dict)
    is_away: bool = False
    look_ups: int = 0
    during_look_up: Callable[[], None] = lambda: None
    hold: threading.Event | None = None

    def writer(self, record_name: str) -> tuple[int, Mapping[str, Any]]:
        return committed_schemas().writer(record_name)

    def reader(self, schema_id: int) -> tuple[str, Mapping[str, Any]]:
        if schema_id in self.loaded:
            return self.loaded[schema_id], committed_schemas().writer(self.loaded[schema_id])[1]
        assert schema_id not in {NEW_ID, UNKNOWN_ID}, "asked for on the event loop"
        return committed_schemas().reader(schema_id)

    def is_loaded(self, schema_id: int) -> bool:
        return schema_id in self.loaded or schema_id < 100

    def refresh(self) -> None:
        self.look_ups += 1
        seen = dict(self.registered)
        self.during_look_up()
        if self.hold is not None:
            assert self.hold.wait(10.0)
        if self.is_away:
            raise RegistryError("away")
        self.loaded.update(seen)


def under(schema_id: int, number: int = 1) -> bytes:
    """A good request whose frame names this id."""
    return b"\x00" + schema_id.to_bytes(4, "big") + encoded(number)[5:]


class Waits:
    """A bench whose codec asks, and the task that looks up schemas."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.bench = Bench()
        self.bench.assign(OTHER.topic)
        self.bench.register([], [])
        self.codec = Codec(self.registry)
        self.bench.classifier.codec = self.codec
        self.schemas = self.bench.dispatcher.intake.schemas
        self.schemas.codec = self.codec
        self.schemas.every_s = 0.01
        self._offsets: dict[str, int] = {}
        self.commits = True
        """Whether something is committed now and then."""

    async def write(self, value: bytes, topic: str = ACME.topic) -> int:
        offset = self._offsets.get(topic, 0)
        self._offsets[topic] = offset + 1
        await self.bench.write(offset, value, topic=topic)
        return offset

    def ends(self, topic: str = ACME.topic) -> list[tuple[int, str]]:
        """Offsets of this topic that were decided, in that order, and the first topic that was written to."""
        return [
            (one.claim.offset, one.outputs[0].topic)
            for one in self.bench.transactions.settlements
            if one.claim.partition.topic == topic
        ]

    async def run(self, until: Callable[[], bool], timeout_s: float = 5.0) -> None:
        tasks = [
            asyncio.create_task(self.bench.dispatcher.run()),
            asyncio.create_task(self.bench.dispatcher.intake.run()),
        ]
        try:
            async with asyncio.timeout(timeout_s):
                while not until():
                    for task in tasks:
                        assert not task.done(), task
                    if self.commits:
                        self.bench.dispatcher.intake.on_room()
                    await asyncio.sleep(0.001)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def waits() -> Waits:
    return Waits()


REFUSED, DEAD = names.replies_topic("acme"), names.DEAD_LETTER_REQUESTS


def test_an_id_that_was_registered_is_found(waits: Waits) -> None:
    """No tenant is registered here, so what is read is refused at once."""

    async def scene() -> None:
        waits.registry.registered[NEW_ID] = "InferenceRequest"
        await waits.write(under(NEW_ID))
        await waits.run(lambda: len(waits.ends()) == 1)

    asyncio.run(scene())
    assert waits.ends() == [(0, REFUSED)]
    assert waits.registry.look_ups == 1
    assert waits.schemas.partitions() == ()


def test_an_id_that_is_not_there_is_a_dead_letter_with_the_reason(waits: Waits) -> None:
    async def scene() -> None:
        await waits.write(under(UNKNOWN_ID))
        await waits.run(lambda: len(waits.ends()) == 1)

    asyncio.run(scene())
    assert waits.ends() == [(0, DEAD)]
    (event,) = waits.bench.audit()
    assert (event.decision, event.code) == (Decision.DEAD_LETTERED, DecodeProblem.UNKNOWN_SCHEMA_ID)
    assert "schema id 901: it is registered under none of the subjects that count" in (event.message or "")


def test_what_stands_behind_it_keeps_its_order_and_nobody_else_waits(waits: Waits) -> None:
    async def scene() -> None:
        waits.registry.is_away = True
        waits.registry.registered[NEW_ID] = "InferenceRequest"
        await waits.write(encoded(1))
        await waits.write(under(NEW_ID, 2))
        await waits.write(encoded(3))
        await waits.write(under(UNKNOWN_ID, 4))
        await waits.write(encoded(5))
        for number in range(5):
            await waits.write(encoded(10 + number), OTHER.topic)
        await waits.run(lambda: waits.registry.look_ups >= 2)
        assert [offset for offset, _ in waits.ends()] == [0]
        assert len(waits.ends(OTHER.topic)) == 5
        assert waits.schemas.partitions() == (ACME,)
        assert metrics.SCHEMA_WAITING_RECORDS._value.get() == 4
        await waits.write(encoded(6))  # what was fetched before the pause
        waits.registry.is_away = False
        await waits.run(lambda: len(waits.ends()) == 6)

    asyncio.run(scene())
    assert waits.ends() == [(0, REFUSED), (1, REFUSED), (2, REFUSED), (3, DEAD), (4, REFUSED), (5, REFUSED)]
    assert metrics.SCHEMA_WAITING_RECORDS._value.get() == 0


def test_what_came_while_it_was_looked_up_needs_another_look_up(waits: Waits) -> None:
    """It may have been registered after the look-up had passed its subject: an honest id must not be lost."""
    registry = waits.registry
    began = threading.Event()

    async def scene() -> None:
        registry.hold = threading.Event()
        registry.during_look_up = began.set
        await waits.write(under(UNKNOWN_ID, 1))

        async def meanwhile() -> None:
            while not began.is_set():
                await asyncio.sleep(0.001)
            registry.registered[NEW_ID] = "InferenceRequest"
            await waits.write(under(NEW_ID, 2))
            while len(waits.schemas) < 2:
                await asyncio.sleep(0.001)
            assert registry.hold is not None
            registry.hold.set()

        task = asyncio.create_task(meanwhile())
        await waits.run(lambda: len(waits.ends()) == 2)
        await task

    asyncio.run(scene())
    assert waits.ends() == [(0, DEAD), (1, REFUSED)]
    assert registry.look_ups == 2


def test_a_flood_of_ids_costs_a_look_up_each_interval(waits: Waits) -> None:
    async def scene() -> None:
        waits.schemas.every_s = 60.0
        for number in range(90):
            await waits.write(under(1_000 + number, number + 1))
        await waits.run(lambda: len(waits.ends()) == 90)

    asyncio.run(scene())
    assert waits.registry.look_ups == 1


def test_what_waited_is_decided_in_parts_between_commits(waits: Waits) -> None:
    """A flood that is let go at once would stand before everybody else in the next transactions."""

    async def scene() -> None:
        for number in range(90):
            await waits.write(under(1_000 + number, number + 1))
        waits.commits = False
        await waits.run(lambda: len(waits.ends()) == 64)
        waits.commits = True
        await waits.run(lambda: len(waits.ends()) == 90)

    asyncio.run(scene())
    assert [offset for offset, _ in waits.ends()] == list(range(90))


def test_the_look_up_holds_up_no_event_loop(waits: Waits) -> None:
    async def scene() -> None:
        waits.registry.hold = threading.Event()
        await waits.write(under(UNKNOWN_ID))
        for number in range(20):
            await waits.write(encoded(10 + number), OTHER.topic)
        try:
            await waits.run(lambda: len(waits.ends(OTHER.topic)) == 20)
            assert waits.ends() == []
        finally:
            waits.registry.hold.set()

    asyncio.run(scene())
    eventually(lambda: all(thread.name != "schemas" for thread in threading.enumerate()), 5.0, "the end of the look-up")


def test_beyond_the_bound_the_largest_partition_is_let_go(waits: Waits) -> None:
    async def scene() -> None:
        waits.registry.is_away = True
        waits.schemas.max_records = 10
        await waits.write(under(UNKNOWN_ID, 1), OTHER.topic)
        for number in range(5):
            await waits.write(under(UNKNOWN_ID, 2 * number + 1))
            await waits.write(encoded(2 * number + 2))
        await waits.run(lambda: len(waits.ends()) == 10)

    asyncio.run(scene())
    assert [topic for _, topic in waits.ends()] == [DEAD, REFUSED] * 5
    assert waits.schemas.partitions() == (OTHER,)
    assert "does not answer, and too much waits" in (waits.bench.audit()[0].message or "")


def test_bytes_are_bounded_too(waits: Waits) -> None:
    schemas = SchemaWaitQueue(waits.codec, max_bytes=2_000)
    for offset in range(3):
        arrival = ReceivedRecord(ACME, offset, 0, None, under(UNKNOWN_ID)[:5] + bytes(400))
        schemas.add(Claim(ACME, offset, 1), arrival)
        assert bool(schemas.take_excess()) is (offset == 2)
    assert (len(schemas), schemas.partitions()) == (0, ())


def test_a_partition_is_read_on_until_enough_waits_of_it(waits: Waits) -> None:
    """One look-up answers for many."""
    schemas = SchemaWaitQueue(waits.codec)
    for offset in range(128):
        assert schemas.crowded() == set()
        schemas.add(Claim(ACME, offset, 1), ReceivedRecord(ACME, offset, 0, None, under(UNKNOWN_ID)))
    assert schemas.crowded() == {ACME}
    schemas.add(Claim(OTHER, 0, 1), ReceivedRecord(OTHER, 0, 0, None, under(UNKNOWN_ID)[:5] + bytes(2**20)))
    assert schemas.crowded() == {ACME, OTHER}


def test_what_moved_on_is_forgotten(waits: Waits) -> None:
    async def scene() -> None:
        waits.registry.is_away = True
        await waits.write(under(UNKNOWN_ID))
        await waits.write(under(UNKNOWN_ID), OTHER.topic)
        await waits.run(lambda: len(waits.schemas) == 2)
        waits.bench.ownership.revoke([ACME])
        await waits.bench.dispatcher.on_revoked()

    asyncio.run(scene())
    assert (len(waits.schemas), waits.schemas.partitions()) == (1, (OTHER,))


def test_a_defect_of_the_look_up_is_no_outage(waits: Waits) -> None:
    async def scene() -> None:
        def broken() -> None:
            raise ZeroDivisionError

        waits.registry.during_look_up = broken
        await waits.write(under(UNKNOWN_ID))
        task = asyncio.create_task(waits.bench.dispatcher.run())
        try:
            with pytest.raises(ZeroDivisionError):
                await asyncio.wait_for(waits.bench.dispatcher.intake.run(), 5.0)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scene())


def test_files_are_asked_for_nothing() -> None:
    codec = Codec(committed_schemas())
    assert codec.is_loaded(under(UNKNOWN_ID))
    codec.refresh()
    assert cast("Any", SchemaWaitQueue(codec)).take(10) == []

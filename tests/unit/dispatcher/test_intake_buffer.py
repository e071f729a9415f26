"""Turns among partitions, and which of them are read no more."""

from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from fairlane.ownership import Claim, PartitionId
from fairlane_server.kafka.transactions import TransactionLoop
from stream_processors.dispatcher.intake.buffer import IntakeBuffer
from stream_processors.dispatcher.queued_request import ReceivedRecord

KIB = 1024


def buffer(pending: int = 0, pending_bytes: int = 0, **bounds: Any) -> IntakeBuffer:
    transactions = SimpleNamespace(pending_count=pending, pending_bytes=pending_bytes)
    return IntakeBuffer(cast("TransactionLoop", transactions), **bounds)


def add(to: IntakeBuffer, tenant: str, offset: int, size: int = 100, epoch: int = 1) -> None:
    partition = PartitionId(f"requests.{tenant}", 0)
    to.add(Claim(partition, offset, epoch), ReceivedRecord(partition, offset, 0, None, bytes(size)))


def tenants(taken: list[tuple[Claim, ReceivedRecord]]) -> list[str]:
    return [claim.partition.topic.removeprefix("requests.") for claim, _ in taken]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40_000)), max_size=60), st.integers(1, 20))
def test_every_record_is_taken_once_and_in_the_order_of_its_partition(
    arrived: list[tuple[str, int]], most: int
) -> None:
    waiting = buffer()
    for offset, (tenant, size) in enumerate(arrived):
        add(waiting, tenant, offset, size)
    taken: list[tuple[Claim, ReceivedRecord]] = []
    while waiting:
        batch = waiting.take(most)
        assert 0 < len(batch) <= most
        taken += batch
    assert sorted(claim.offset for claim, _ in taken) == list(range(len(arrived)))
    for tenant in "abc":
        offsets = [claim.offset for claim, _ in taken if claim.partition.topic.endswith(tenant)]
        assert offsets == sorted(offsets)


@given(st.integers(1, 2_000_000), st.integers(20, 400))
def test_one_record_waits_for_one_turn_of_a_flood(size: int, flood: int) -> None:
    """Whatever the flood's records measure, the bytes that go before are those of a turn and one record."""
    waiting = buffer(max_records=10_000, max_bytes=2**40)
    for offset in range(flood):
        add(waiting, "flood", offset, size)
    add(waiting, "victim", 0, 500)
    before: list[ReceivedRecord] = []
    while "victim" not in tenants(batch := waiting.take(512)):
        before += [arrival for _, arrival in batch]
    before += [arrival for _, arrival in batch[: tenants(batch).index("victim")]]
    assert sum(len(arrival.value or b"") for arrival in before) <= 16 * KIB + size


def test_a_batch_is_bounded_in_bytes_and_holds_at_least_one_record() -> None:
    waiting = buffer(max_bytes=2**40)
    for offset in range(10):
        add(waiting, "a", offset, 3_000 * KIB)
    assert [len(waiting.take(512)) for _ in range(5)] == [2] * 5


def test_a_partition_may_fill_an_eighth_of_the_room_that_is_left() -> None:
    told: list[None] = []
    waiting = buffer(max_records=90, on_change=lambda: told.append(None))
    for offset in range(10):
        add(waiting, "a", offset)
    assert waiting.crowded() == set()
    add(waiting, "a", 10)
    assert waiting.crowded() == {PartitionId("requests.a", 0)}
    assert len(told) == 1


@given(st.integers(1, 30))
def test_however_many_flood_there_is_room_for_one_more(floods: int) -> None:
    """Each stops when it is crowded, and the next takes a part of what is left."""
    waiting = buffer(max_records=4_096)
    held = []
    for number in range(floods):
        partition = PartitionId(f"requests.f{number}", 0)
        offset = 0
        while partition not in waiting.crowded():
            add(waiting, f"f{number}", offset)
            offset += 1
        held.append(offset)
    assert held == sorted(held, reverse=True)
    add(waiting, "victim", 0)
    assert PartitionId("requests.victim", 0) not in waiting.crowded()
    assert waiting._has_room()


def test_a_crowded_partition_is_read_on_when_half_of_it_is_gone() -> None:
    told: list[None] = []
    waiting = buffer(max_records=170, on_change=lambda: told.append(None))
    for offset in range(20):
        add(waiting, "a", offset)
    waiting.take(9)
    assert waiting.crowded()
    waiting.take(3)
    assert not waiting.crowded()
    assert len(told) == 2


def test_keys_and_headers_take_room_as_values_do() -> None:
    waiting = buffer(max_bytes=24_000)
    partition = PartitionId("requests.a", 0)
    headers = (("name", bytes(56)),) * 4
    waiting.add(Claim(partition, 0, 1), ReceivedRecord(partition, 0, 0, bytes(1_000), b"", headers))
    assert waiting.crowded() == set()
    waiting.add(Claim(partition, 1, 1), ReceivedRecord(partition, 1, 0, b"k", None))
    assert waiting.crowded() == {partition}


def test_bytes_that_wait_for_their_commit_take_room() -> None:
    assert buffer(pending=9, max_records=10)._has_room()
    assert not buffer(pending=10, max_records=10)._has_room()
    full = buffer(pending_bytes=2_000 * KIB, max_bytes=3_000 * KIB)
    add(full, "a", 0, 1_023 * KIB)
    assert full._has_room()  # not counted again yet
    add(full, "a", 1, KIB)
    assert not full._has_room()


def test_what_moved_on_is_dropped_and_the_rest_keeps_its_order() -> None:
    waiting = buffer()
    for offset in range(6):
        add(waiting, "a", offset, epoch=offset % 2)
    waiting.discard(lambda claim: claim.epoch == 1)
    assert len(waiting) == 3
    assert [claim.offset for claim, _ in waiting.take(10)] == [1, 3, 5]

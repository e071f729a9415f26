"""What comes of a fetch: committed records in order, one record for each batch that cannot be read, and positions."""

from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.structs import ConsumerRecord, TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.record_batches import Written, batch, gzip_of_zeros
from fairlane.codec import DecodeProblem
from stream_processors.dispatcher.reading.fetched_partition import CommittedRecords, FetchedPartition
from tests.kit.broker_log import CONTROL, TRANSACTIONAL

TP = TopicPartition("requests.acme", 0)
PRODUCER = 7
MIB = 1024 * 1024


def read(
    fetched: bytes, offset: int = 0, aborted: list[tuple[int, int]] | None = None, log_end: int = 2**62
) -> tuple[list[Any], int]:
    """Offsets and problems, and where the next fetch begins."""
    records = CommittedRecords(TP, fetched, aborted or [], offset, log_end)
    found = [(one.offset, one.checksum and one.checksum.problem.problem) for one in records]
    return found, records.next_fetch_offset


def damaged(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def flipped(data: bytes, bit: int) -> bytes:
    """With another value of this bit, counted from the first byte."""
    changed = bytearray(data)
    changed[bit // 8] ^= 0x80 >> bit % 8
    return bytes(changed)


def marker(offset: int) -> bytes:
    return batch([b""], base_offset=offset, attributes=TRANSACTIONAL | CONTROL, producer_id=PRODUCER)


def of_transaction(offset: int, count: int) -> bytes:
    return batch([b"x"] * count, base_offset=offset, attributes=TRANSACTIONAL, producer_id=PRODUCER)


def test_a_batch_that_cannot_be_read_is_one_record_and_what_is_behind_it_is_read() -> None:
    fetched = batch([b"a"]) + damaged(batch([b"b"] * 3, base_offset=1)) + batch([b"c"], base_offset=4)
    assert read(fetched) == ([(0, None), (3, DecodeProblem.BAD_CRC), (4, None)], 5)


def test_the_bytes_of_what_cannot_be_read_are_kept_with_the_reason() -> None:
    data = damaged(batch([b"b"] * 3, base_offset=1))
    (record,) = CommittedRecords(TP, data, [], 1)
    assert str(record.checksum.problem).endswith("; offsets 1 to 3")
    assert (record.value, record.checksum.read_bytes) == (data, len(data))


@pytest.mark.parametrize(
    ("batch_of", "read_bytes"),
    [
        pytest.param(lambda: batch([b""], codec=1, compressed=gzip_of_zeros(15 * MIB)), 15 * MIB, id="no record in it"),
        pytest.param(lambda: batch([b""], codec=1, compressed=gzip_of_zeros(300 * MIB)), 16 * MIB, id="too much in it"),
        pytest.param(lambda: batch([bytes(10 * MIB)], codec=1), 10 * MIB, id="a value that is too large"),
        pytest.param(lambda: batch([Written(b"", None, [(b"", None)] * 300)]), 600, id="too many headers"),
    ],
)
def test_what_cannot_be_read_says_what_was_read_in_vain(batch_of: Callable[[], bytes], read_bytes: int) -> None:
    (record,) = CommittedRecords(TP, batch_of(), [], 0)
    assert read_bytes <= record.checksum.read_bytes <= read_bytes + 16


def test_behind_a_damaged_batch_at_the_end_two_fields_that_agree_say_where_to_go_on() -> None:
    assert read(damaged(batch([b"b"] * 3, base_offset=1)), 1) == ([(3, DecodeProblem.BAD_CRC)], 4)
    # Of what was compacted they do not: the next offset is tried, and brings the same batch.
    compacted = damaged(batch([b"b"], base_offset=1, last_offset_delta=5, deltas=(2,)))
    assert read(compacted, 1) == ([(1, DecodeProblem.BAD_CRC)], 2)
    assert read(compacted, 2) == ([(2, DecodeProblem.BAD_CRC)], 3)


@given(st.lists(st.sampled_from(["good", "damaged", "magic", "bomb", "empty", "control"]), min_size=1, max_size=12))
def test_whatever_a_fetch_holds_every_good_record_is_read_and_the_position_is_its_end(kinds: list[str]) -> None:
    fetched, offset, good = b"", 0, []
    for kind in kinds:
        data = batch([b"a", b"b"], base_offset=offset)
        if kind == "good":
            good += [offset, offset + 1]
        elif kind == "damaged":
            data = damaged(data)
        elif kind == "magic":
            data = batch([b"a", b"b"], base_offset=offset, magic=1)
        elif kind == "bomb":
            data = batch([b"a", b"b"], base_offset=offset, codec=1, compressed=b"no gzip at all")
        elif kind == "empty":
            data = batch([], base_offset=offset, last_offset_delta=1)
        else:
            data = marker(offset) + batch([], base_offset=offset + 1, last_offset_delta=0)
        fetched, offset = fetched + data, offset + 2
    found, position = read(fetched)
    assert [at for at, problem in found if problem is None] == good
    assert len([at for at, problem in found if problem is not None]) == sum(
        kind in {"damaged", "magic", "bomb"} for kind in kinds
    )
    assert [at for at, _ in found] == sorted({at for at, _ in found})
    # A batch of an unknown format says nothing that can be believed, the last one not even where it ends.
    assert position == offset or (kinds[-1] == "magic" and offset - 2 < position < offset)


@given(st.integers(0, 2), st.integers(8 * 8, 12 * 8 - 1), st.integers(1, 60), st.randoms(use_true_random=False))
def test_no_length_makes_the_position_leave_the_log(victim: int, bit: int, size: int, rng: Random) -> None:
    """Behind a wrong length, bytes of a batch stand where a header is looked for."""
    data = [batch([rng.randbytes(size)] * 10, base_offset=100 + 10 * number) for number in range(3)]
    data[victim] = flipped(data[victim], bit)
    found, position = read(b"".join(data), 100, log_end=130)
    assert 100 <= position <= 130
    assert all(at < position for at, _ in found)
    assert [at for at, problem in found if problem is None and at < 100 + 10 * victim] == [
        *range(100, 100 + 10 * victim)
    ]


@pytest.mark.parametrize("victim", [1, 2])
@pytest.mark.parametrize("bit", range(4, 64))
def test_a_base_offset_that_no_checksum_covers_costs_its_own_batch_alone(victim: int, bit: int) -> None:
    data = [batch([b"x"] * 10, base_offset=100 + 10 * number) for number in range(4)]
    wrong = flipped(data[victim], 63 - bit)
    found, position = read(b"".join(data[:victim]) + wrong + b"".join(data[victim + 1 :]), 100)
    assert position == 140
    mine = range(100 + 10 * victim, 110 + 10 * victim)
    assert [at for at, problem in found if problem is None] == [at for at in range(100, 140) if at not in mine]
    assert [one for one in found if one[1] is not None] == [(mine[-1], DecodeProblem.BAD_BATCH)]


def test_behind_a_damaged_marker_what_was_committed_is_fetched_again() -> None:
    """Its producer may have begun another transaction since."""
    aborted = [(PRODUCER, 0)]
    whole = of_transaction(0, 2) + damaged(marker(2)) + of_transaction(3, 2) + marker(5)
    assert read(whole, aborted=aborted) == ([(2, DecodeProblem.BAD_CRC)], 3)
    assert read(of_transaction(3, 2) + marker(5), 3) == ([(3, None), (4, None)], 6)


def test_a_batch_that_is_fetched_again_is_gone_on_with_where_it_was_left() -> None:
    data = batch([b"a"] * 1_000, codec=4)
    first = CommittedRecords(TP, data, [], 0)
    taken = [next(first).offset for _ in range(700)]
    assert first.place is not None
    assert first.place.records.number == 700
    for place in (None, first.place, first.place._replace(crc=1), first.place._replace(base_offset=9)):
        again = CommittedRecords(TP, data, [], 700, place=place)
        assert taken + [record.offset for record in again] == [*range(1_000)]
    # Sought back meanwhile.
    assert [record.offset for record in CommittedRecords(TP, data, [], 10, place=first.place)] == [*range(10, 1_000)]


def test_reading_begins_in_the_middle_of_a_batch() -> None:
    assert read(batch([b"a"] * 5, base_offset=10), 13) == ([(13, None), (14, None)], 15)


def test_aborted_transactions_and_markers_are_not_handed_on() -> None:
    fetched = of_transaction(0, 2) + batch([b"plain"], base_offset=2) + marker(3) + of_transaction(4, 2) + marker(6)
    assert read(fetched, aborted=[(PRODUCER, 0)]) == ([(2, None), (4, None), (5, None)], 7)
    assert read(fetched, aborted=[(PRODUCER, 0), (PRODUCER, 4)]) == ([(2, None)], 7)
    assert read(fetched)[0] == [(0, None), (1, None), (2, None), (4, None), (5, None)]


def test_an_aborted_batch_that_cannot_be_inflated_is_nobodys_dead_letter() -> None:
    bad = batch([b"x"], codec=1, compressed=b"no", attributes=TRANSACTIONAL, producer_id=PRODUCER)
    assert read(bad, aborted=[(PRODUCER, 0)]) == ([], 1)
    assert read(bad) == ([(0, DecodeProblem.BAD_COMPRESSION)], 1)


class Assigned:
    """The part of an assignment that says where a partition is read."""

    def __init__(self, position: int) -> None:
        self.active = True
        self.state = SimpleNamespace(paused=False, position=position, consumed_to=self._consumed_to)

    def state_value(self, _tp: TopicPartition) -> Any:
        return self.state

    def _consumed_to(self, position: int) -> None:
        self.state.position = position


def fetched_partition(data: bytes, offset: int = 0) -> tuple[FetchedPartition, Assigned]:
    assigned = Assigned(offset)
    return FetchedPartition(TP, assigned, CommittedRecords(TP, data, [], offset)), assigned


def offsets(records: list[ConsumerRecord]) -> list[int]:
    return [record.offset for record in records]


def test_turns_are_bounded_in_records_and_bytes_and_the_position_follows() -> None:
    entry, assigned = fetched_partition(batch([bytes(1_000)] * 10, codec=4))
    assert offsets(entry.take(3, 10**9)) == [0, 1, 2]
    assert assigned.state.position == 3
    assert offsets(entry.take(100, 3_000)) == [3, 4]
    assert offsets(entry.take(100, 1)) == [5]
    assert entry.size_bytes > 10_000
    assert offsets(entry.take(100, 10**9)) == [6, 7, 8, 9]
    assert (entry.has_more(), entry.size_bytes, assigned.state.position) == (False, 0, 10)


def test_what_is_released_is_fetched_again_from_where_it_was_left() -> None:
    data = batch([b"a"] * 10)
    entry, assigned = fetched_partition(data)
    entry.take(4, 10**9)
    entry.release()
    assert (entry.take(10, 10**9), entry.size_bytes) == ([], 0)
    again = FetchedPartition(TP, assigned, CommittedRecords(TP, data, [], assigned.state.position))
    assert offsets(again.take(100, 10**9)) == [4, 5, 6, 7, 8, 9]


def test_a_position_that_was_sought_elsewhere_makes_a_fetch_void() -> None:
    entry, assigned = fetched_partition(batch([b"a"] * 10))
    assigned.state.position = 5
    assert entry.take(10, 10**9) == []

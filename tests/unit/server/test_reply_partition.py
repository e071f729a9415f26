"""An id is made for the partition that its reply is to come to."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.names import is_request_id
from fairlane_server.kafka.reply_partition import new_request_id, partition_of


@given(
    st.integers(1, 64).flatmap(lambda count: st.tuples(st.just(count), st.sets(st.integers(0, count - 1), min_size=1)))
)
def test_an_id_lands_where_it_is_wanted(case: tuple[int, set[int]]) -> None:
    partitions, wanted = case
    request_id = new_request_id(wanted, partitions)
    assert is_request_id(request_id)
    assert partition_of(request_id, partitions) in wanted


def test_every_partition_can_be_reached_and_ids_differ() -> None:
    ids = [new_request_id(range(12), 12) for _ in range(600)]
    assert {partition_of(request_id, 12) for request_id in ids} == set(range(12))
    assert len(set(ids)) == len(ids)


def test_the_place_is_that_of_librdkafkas_consistent_partitioner() -> None:
    """CRC-32 of the key; the values were read off a broker."""
    assert [partition_of(key, 12) for key in ("a", "b", "00000000-0000-0000-0000-000000000000")] == [3, 5, 1]


@pytest.mark.parametrize(("wanted", "partitions"), [((), 12), ((12,), 12), ((-1,), 1)])
def test_partitions_that_are_not_there_cannot_be_wanted(wanted: tuple[int, ...], partitions: int) -> None:
    with pytest.raises(ValueError, match="none of the"):
        new_request_id(wanted, partitions)

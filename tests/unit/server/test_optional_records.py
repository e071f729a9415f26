"""A record that may be left out never holds up what it is committed with."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from confluent_kafka import KafkaError

from fairlane.offsets import CommitPoint
from fairlane_server.kafka.transactions import OutputRecord, Settlement
from tests.kit.scripted_producer import ME, WORK, Bench
from tests.kit.waiting import eventually


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    made.ownership.assign({WORK: CommitPoint(0)}, ME)
    yield made
    for loop in made.loops:
        loop.stop(5.0)


def is_told(bench: Bench, count: int) -> bool:
    return len(bench.told) == count


def with_copies(bench: Bench, *offsets: int) -> list[Settlement]:
    """Settlements, each with an optional record besides."""
    return [
        replace(one, outputs=(*one.outputs, OutputRecord("copies", None, b"copy", is_optional=True)))
        for one in bench.settlements(*offsets)
    ]


def test_it_is_committed_in_the_transaction_of_its_settlement(bench: Bench) -> None:
    bench.started().submit_many(with_copies(bench, 0))
    eventually(lambda: bench.told)
    (transaction,) = bench.producer.committed
    assert transaction.records == [("out", b"0"), ("copies", b"copy")]


@pytest.mark.parametrize("found_by", ["a look-up", "a delivery"])
def test_one_that_its_topic_refuses_is_left_out_and_the_rest_is_committed_at_once(bench: Bench, found_by: str) -> None:
    refusing = bench.producer.missing if found_by == "a look-up" else bench.producer.refused
    refusing["copies"] = KafkaError.UNKNOWN_TOPIC_OR_PART
    loop = bench.started()
    loop.submit_many(with_copies(bench, *range(8)))
    eventually(lambda: len(bench.told) == 8)
    begun = bench.producer.begun
    assert bench.producer.values == [b"%d" % offset for offset in range(8)]
    # Not tried again with every transaction.
    for offset in range(8, 12):
        loop.submit_many(with_copies(bench, offset))
        eventually(partial(is_told, bench, offset + 1))
    assert bench.producer.begun <= begun + 4
    assert len(bench.producer.aborted) <= 1
    assert loop.blocked_count == 0


def test_one_record_that_is_refused_closes_its_topic_for_no_other(bench: Bench) -> None:
    bench.producer.refused["copies"] = KafkaError.MSG_SIZE_TOO_LARGE
    loop = bench.started()
    loop.submit_many(with_copies(bench, 0))
    eventually(lambda: len(bench.told) == 1)
    bench.producer.refused.clear()
    loop.submit_many(with_copies(bench, 1))
    eventually(lambda: len(bench.told) == 2)
    assert bench.producer.values == [b"0", b"1", b"copy"]


def test_a_settlement_that_waits_for_its_own_topic_keeps_its_copy(bench: Bench) -> None:
    bench.producer.missing["out"] = KafkaError.UNKNOWN_TOPIC_OR_PART
    loop = bench.started()
    loop.submit_many(with_copies(bench, 0))
    eventually(lambda: loop.blocked_count == 1)
    bench.producer.missing.clear()
    eventually(lambda: bench.told)
    assert bench.producer.values == [b"0", b"copy"]

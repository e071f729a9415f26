"""From headers and records to what in-flight tracking is told."""

import pytest

from fairlane import headers
from fairlane.offsets import CommitPoint
from fairlane.outcomes import Outcome
from fairlane.records import SourceCoordinate, UsageEvent
from stream_processors.dispatcher.feedback.work_records import (
    PartitionRecreated,
    PartitionsKnown,
    PoolCommitted,
    WorkSeen,
    apply_to_in_flight,
    dispatched_from,
    is_priority_work,
)
from stream_processors.dispatcher.scheduling.in_flight import ANY_PARTITION, Dispatched, InFlight, WorkId

TOPIC = "priority.shared.high"
SOURCE = SourceCoordinate("requests.acme", 0, 41)
COMPLETE = [
    (headers.COST_TOKENS, b"120"),
    (headers.TENANT, b"acme"),
    (headers.DISPATCHER_ID, b"d1"),
    (headers.SOURCE_TOPIC, b"requests.acme"),
    (headers.SOURCE_PARTITION, b"0"),
    (headers.SOURCE_OFFSET, b"41"),
    (headers.TRACE_PARENT, b"00-1-2-01"),
]


def usage(topic: str, offset: int = 3) -> UsageEvent:
    where = SourceCoordinate(topic, 0, offset)
    return UsageEvent("r", "acme", "shared", "m", "1", "high", Outcome.OK, None, 1, 1, 0, 120, 1, 1, where)


def test_headers_say_what_was_dispatched() -> None:
    assert dispatched_from(COMPLETE) == Dispatched(SOURCE, "acme", "d1", 120)


def test_work_of_an_older_dispatcher_names_neither_tenant_nor_dispatcher() -> None:
    older = [entry for entry in COMPLETE if entry[0] not in {headers.TENANT, headers.DISPATCHER_ID}]
    assert dispatched_from(older) == Dispatched(SOURCE, "", "", 120)


@pytest.mark.parametrize("missing", [headers.COST_TOKENS, headers.SOURCE_TOPIC, headers.SOURCE_OFFSET])
def test_what_says_no_cost_or_source_is_refused(missing: str) -> None:
    with pytest.raises(ValueError, match=missing):
        dispatched_from([entry for entry in COMPLETE if entry[0] != missing])
    with pytest.raises(ValueError, match="missing"):
        dispatched_from(None)


@pytest.mark.parametrize("cost", [b"-1", b"many", b"", b"\xff"])
def test_a_cost_that_is_none_is_refused(cost: bytes) -> None:
    with pytest.raises(ValueError, match=r"tokens|invalid literal"):
        dispatched_from([(headers.COST_TOKENS, cost), *COMPLETE[1:]])


def test_only_work_of_priority_topics_is_followed() -> None:
    assert is_priority_work(usage(TOPIC))
    for topic in ("requests.acme", "priority.shared", "priority..high", "priority.a.b.high", ""):
        assert not is_priority_work(usage(topic))


def test_a_commit_point_contains_what_is_done_beyond_it() -> None:
    committed = PoolCommitted(TOPIC, 0, CommitPoint(100, 0b1010))
    assert [offset for offset in range(90, 120) if offset in committed] == [101, 103]
    assert "101" not in committed


def test_events_reach_in_flight() -> None:
    in_flight = InFlight("d1")
    apply_to_in_flight(in_flight, PartitionsKnown(TOPIC, 2))
    for offset in range(5):
        seen = Dispatched(SourceCoordinate("requests.acme", 0, offset), "acme", "d1", 10)
        assert apply_to_in_flight(in_flight, WorkSeen(WorkId(TOPIC, 0, offset), seen)) is None
    assert in_flight.choose_partition(TOPIC) == 1
    settled = apply_to_in_flight(in_flight, usage(TOPIC, 3))
    assert settled is not None
    assert settled.usage == usage(TOPIC, 3)
    apply_to_in_flight(in_flight, PoolCommitted(TOPIC, 0, CommitPoint(1, 0b1000)))
    assert in_flight.tokens("shared") == 20
    apply_to_in_flight(in_flight, PartitionRecreated(TOPIC, 0))
    assert in_flight.tokens("shared") == 0
    assert in_flight.choose_partition("priority.shared.low") == ANY_PARTITION

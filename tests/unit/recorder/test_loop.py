"""The recorder's loop against a log and a database in memory that fail in every way they can."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane import metrics
from fairlane.backoff import Backoff
from fairlane.codec import Codec
from fairlane.records import InferenceReply, SourceCoordinate
from fairlane.schema_files import default_codec
from fairlane_server.processes.service import Readiness
from stream_processors.recorder.positions import Move, Partition, Stored
from stream_processors.recorder.projection import LogRecord, Projection
from stream_processors.recorder.recorder import CONDITIONS, Recorder
from stream_processors.recorder.retention import Rule
from stream_processors.recorder.source import End, Event, LogConsumer, LogUnavailableError, OutOfRange
from stream_processors.recorder.store import (
    PostgresTimeoutError,
    PostgresUnavailableError,
    RecorderStore,
    Repetition,
    RowsRefusedError,
    SupersededError,
)
from stream_processors.recorder.tables import RESULTS
from tests.kit.late_schemas import LateSchemas, late

ONE, OTHER = Partition("replies.acme", 0), Partition("replies.globex", 0)
POISON, LATE = "poison", "late"


@dataclass(slots=True)
class Log(LogConsumer):
    """The records of some partitions, None for a transaction marker, and the member that reads them."""

    content: dict[Partition, list[str | None]]
    first: dict[Partition, int] = field(default_factory=dict)
    at: dict[Partition, int] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    unreachable: set[Partition] = field(default_factory=set)
    asked: list[int] = field(default_factory=list)
    before_read: Callable[[], None] = lambda: None
    on_assigned: Callable[[frozenset[Partition]], None] = lambda _: None
    on_revoked: Callable[[frozenset[Partition]], None] = lambda _: None

    def start(
        self,
        on_assigned: Callable[[frozenset[Partition]], None],
        on_revoked: Callable[[frozenset[Partition]], None],
    ) -> None:
        self.on_assigned, self.on_revoked = on_assigned, on_revoked
        on_assigned(frozenset(self.content))

    def close(self) -> None:
        self.at.clear()

    def fetch(self, offsets: Mapping[Partition, int]) -> None:
        assert not self.at.keys() & offsets.keys()
        self.at |= offsets

    def stop_fetching(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            self.at.pop(partition, None)

    def rebalance(self) -> None:
        """Everything is taken away and given back, which nothing fetched before survives."""
        self.on_revoked(frozenset(self.content))
        self.at.clear()
        self.on_assigned(frozenset(self.content))

    def read(self, max_records: int, max_bytes: int, timeout_s: float) -> list[Event]:
        self.before_read()
        self.asked.append(max_records)
        events: list[Event] = []
        room = max_records
        for partition, at in self.at.items():
            records = self.content[partition]
            if not self.first.get(partition, 0) <= at <= len(records):
                events.append(OutOfRange(partition))
                continue
            position = at
            while position < len(records) and room:
                if (request_id := records[position]) is not None:
                    events.append(_record(partition, position, request_id))
                    room -= 1
                position += 1
            self.at[partition] = position
            if at < position == len(records):
                events.append(End(partition, position))
        return events

    def bounds(self, partition: Partition) -> tuple[int, int]:
        if partition in self.unreachable:
            raise LogUnavailableError("no leader")
        return self.first.get(partition, 0), len(self.content[partition])

    def topic_ids(self, topics: Collection[str]) -> Mapping[str, str]:
        return {topic: self.ids[topic] for topic in topics if topic in self.ids}

    def known_end(self, partition: Partition) -> int | None:
        return len(self.content[partition])


@dataclass(slots=True)
class Database(RecorderStore):
    """Rows and offsets, and what the next calls do instead of working."""

    offsets: dict[Partition, int] = field(default_factory=dict)
    topic_ids: dict[Partition, str] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    most_in_time: int = 1_000
    """Rows that it can write before the time is over."""

    def next_offsets(self, partitions: Iterable[Partition]) -> dict[Partition, Stored]:
        self._fault("read")
        return {
            partition: Stored(self.offsets[partition], self.topic_ids.get(partition, ""))
            for partition in partitions
            if partition in self.offsets
        }

    def start_at(self, offsets: Mapping[Partition, Stored]) -> None:
        self._fault("read")
        for partition, start in offsets.items():
            if partition not in self.offsets:
                self.offsets[partition], self.topic_ids[partition] = start.next_offset, start.topic_id

    def move(self, moves: Mapping[Partition, Move], topic_ids: Mapping[Partition, str]) -> None:
        self._fault("read")
        for partition, move in moves.items():
            if self.offsets[partition] != move.expected:
                raise SupersededError
            self.offsets[partition] = move.next_offset
        self.topic_ids |= topic_ids

    def write(self, projection: Projection, moves: Mapping[Partition, Move]) -> list[Repetition]:
        fault = self._fault("read", "before")
        if fault == "overtaken":
            # Another recorder stores the same records first.
            self._commit(projection, moves)
        if any(self.offsets[partition] != move.expected for partition, move in moves.items()):
            raise SupersededError
        if any(POISON in str(row[0]) for layer in projection.layers.get("results", ()) for row in layer):
            raise RowsRefusedError("DataError (22000)")
        if projection.count(RESULTS) > self.most_in_time:
            raise PostgresTimeoutError("canceling statement due to statement timeout")
        self._commit(projection, moves)
        if fault == "after":
            raise PostgresUnavailableError("gone before it answered")
        return []

    def close(self) -> None:
        pass

    def _commit(self, projection: Projection, moves: Mapping[Partition, Move]) -> None:
        rows = [str(row[0]) for layer in projection.layers.get("results", ()) for row in layer]
        if not any(POISON in row for row in rows):
            self.rows += rows
            self.offsets |= {partition: move.next_offset for partition, move in moves.items()}

    def _fault(self, *raising: str) -> str | None:
        fault = self.faults.pop(0) if self.faults else None
        if fault in raising:
            raise PostgresUnavailableError("no connection")
        return fault


def _record(partition: Partition, offset: int, request_id: str) -> LogRecord:
    reply = InferenceReply(request_id, "acme", "ok", source=SourceCoordinate("requests.acme", 0, offset))
    value = default_codec().encode(reply)
    return LogRecord(*partition, offset, 0, None, late(value) if LATE in request_id else value)


class Run:
    """A recorder whose clock advances by a second a step, so that every delay is over at the next."""

    def __init__(self, log: Log, database: Database, batch_records: int = 4) -> None:
        self.log, self.database = log, database
        self.schemas = LateSchemas(InferenceReply)
        self.now = 0.0
        self.readiness = Readiness(*CONDITIONS)
        self.recorder = Recorder(
            log,
            database,
            Codec(self.schemas),
            self.readiness,
            batch_records=batch_records,
            retention=(Rule(RESULTS, "replied_at_ms", keep_s=1_000),),
            clock=lambda: self.now,
            wall_clock=lambda: int(self.now * 1_000),
            backoff=Backoff(longest_s=1.0),
        )

    def steps(self, count: int) -> None:
        """That many rounds, and then stop."""
        left = count

        def stopping() -> bool:
            nonlocal left
            left -= 1
            self.now += 2.0
            return left < 0

        self.recorder.run(stopping)


def names(prefix: str, count: int) -> list[str | None]:
    return [f"{prefix}{number}" for number in range(count)]


def test_every_record_is_stored_and_positions_pass_the_markers() -> None:
    log = Log({ONE: ["a0", None, "a2", None, None], OTHER: [None]})
    run = Run(log, Database())
    run.steps(4)
    assert run.database.rows == ["a0", "a2"]
    assert run.database.offsets == {ONE: 5, OTHER: 1}


@given(
    faults=st.lists(st.sampled_from(["none", "read", "before", "after", "overtaken"]), max_size=30),
    batch_records=st.integers(1, 7),
    rebalances=st.sets(st.integers(0, 30), max_size=6),
    poison=st.sets(st.integers(0, 19), max_size=4),
)
def test_nothing_is_lost_and_nothing_is_stored_twice_whatever_fails(
    faults: list[str], batch_records: int, rebalances: set[int], poison: set[int]
) -> None:
    content = [None if number % 5 == 3 else f"a{number}" for number in range(20)]
    for number in poison:
        content[number] = f"{POISON}{number}"
    log = Log({ONE: content, OTHER: names("b", 9)})
    run = Run(log, Database(faults=list(faults)), batch_records)
    reads = 0

    def disturb() -> None:
        nonlocal reads
        if reads in rebalances:
            log.rebalance()
        reads += 1

    log.before_read = disturb
    run.steps(120)
    expected = [name for name in (*content, *names("b", 9)) if name is not None and POISON not in name]
    assert sorted(run.database.rows) == sorted(expected)
    assert run.database.offsets == {ONE: 20, OTHER: 9}


def test_an_outage_is_said_and_survived() -> None:
    log = Log({ONE: names("a", 3)})
    run = Run(log, Database(faults=["none", "none", "none", "before", "read", "read"]))
    seen: list[str | None] = []
    log.before_read = lambda: seen.append(run.readiness.reasons()["postgres"])
    run.steps(8)
    assert "no connection" in seen
    assert seen[-1] is None
    assert run.database.rows == ["a0", "a1", "a2"]


def test_a_batch_that_takes_too_long_is_tried_again_with_fewer_records_and_it_grows_again() -> None:
    log = Log({ONE: names("a", 40), OTHER: names("b", 10)})
    run = Run(log, Database(most_in_time=3), batch_records=16)
    run.steps(120)
    assert sorted(run.database.rows) == sorted(name for name in (*names("a", 40), *names("b", 10)) if name)
    assert run.database.offsets == {ONE: 40, OTHER: 10}
    assert log.asked[:8] == [16, 8, 4, 2, 3, 4, 2, 3]
    run.database.most_in_time = 16
    log.content[ONE] += names("c", 200)
    run.steps(60)
    assert log.asked[-1] == 16


def test_one_record_that_takes_too_long_is_tried_again_until_postgres_is_quicker() -> None:
    log = Log({ONE: names("a", 5)})
    run = Run(log, Database(most_in_time=0))

    def look() -> None:
        if len(log.asked) == 10:
            run.database.most_in_time = 4

    log.before_read = look
    run.steps(20)
    assert log.asked[:10] == [4, 2, *(1 for _ in range(8))]
    assert run.database.rows == ["a0", "a1", "a2", "a3", "a4"]


def test_a_truncated_log_is_an_alarm_and_goes_on_at_its_head() -> None:
    topic = Partition("replies.truncated", 0)
    log = Log({topic: names("a", 9)}, first={topic: 6})
    run = Run(log, Database(offsets={topic: 2}))
    before = metrics.LOG_TRUNCATED.labels(topic.topic)._value.get()
    run.steps(5)
    assert run.database.rows == ["a6", "a7", "a8"]
    assert metrics.LOG_TRUNCATED.labels(topic.topic)._value.get() == before + 1


def replacements(topic: str, finding: str) -> float:
    return float(metrics.LOG_REPLACED.labels(topic, finding)._value.get())


@pytest.mark.parametrize("stored_id", ["", "this"])
def test_a_log_that_lost_its_end_is_an_alarm_and_read_on_at_its_end(stored_id: str) -> None:
    topic = Partition(f"replies.cut{stored_id}", 0)
    log = Log({topic: names("a", 2)}, ids={topic.topic: "this"})
    run = Run(log, Database(offsets={topic: 50}, topic_ids={topic: stored_id}))

    def grow() -> None:
        if len(log.asked) == 4:
            log.content[topic] += names("b", 2)

    log.before_read = grow
    run.steps(8)
    assert run.database.rows == ["b0", "b1"]
    assert run.database.offsets == {topic: 4}
    assert run.database.topic_ids == {topic: "this"}
    assert replacements(topic.topic, "cut") == 1


@pytest.mark.parametrize("stored", [1, 2, 50])
def test_a_topic_created_again_is_an_alarm_and_read_from_its_beginning(stored: int) -> None:
    topic = Partition(f"replies.renewed{stored}", 0)
    log = Log({topic: names("a", 2)}, ids={topic.topic: "this"})
    run = Run(log, Database(offsets={topic: stored}, topic_ids={topic: "that"}))
    run.steps(5)
    assert run.database.rows == ["a0", "a1"]
    assert run.database.topic_ids == {topic: "this"}
    assert replacements(topic.topic, "recreated") == 1


def test_a_position_from_before_ids_takes_that_of_its_topic() -> None:
    run = Run(Log({ONE: names("a", 3)}, ids={ONE.topic: "this"}), Database(offsets={ONE: 1}))
    run.steps(4)
    assert run.database.rows == ["a1", "a2"]
    assert run.database.topic_ids == {ONE: "this"}


def test_a_partition_without_a_leader_does_not_keep_the_others_waiting() -> None:
    log = Log({ONE: names("a", 3), OTHER: names("b", 3)}, unreachable={ONE})
    run = Run(log, Database())
    run.steps(4)
    assert run.database.rows == ["b0", "b1", "b2"]


def test_lag_is_reported_and_forgotten_with_its_topic() -> None:
    log = Log({ONE: names("a", 30)})
    run = Run(log, Database(), batch_records=1)
    seen: list[float | None] = []

    def look() -> None:
        (family,) = metrics.RECORDER_LAG.collect()
        samples = {sample.labels["topic"]: sample.value for sample in family.samples}
        seen.append(samples.get(ONE.topic))
        if len(seen) == 4:
            log.on_revoked(frozenset({ONE}))

    log.before_read = look
    run.steps(7)
    assert seen[2:4] == [28, 27]
    assert seen[-1] is None


@pytest.mark.parametrize(("failures", "chance", "delay_s"), [(1, 0.0, 0.1), (3, 0.0, 0.4), (10_000, 1.0, 1.5)])
def test_delays_double_up_to_a_bound_and_are_shortened_by_chance(failures: int, chance: float, delay_s: float) -> None:
    assert Backoff(first_s=0.1, longest_s=3.0, jitter=0.5).delay_s(failures, chance) == pytest.approx(delay_s)


def test_a_log_that_is_read_again_brings_no_old_rows_back() -> None:
    log = Log({ONE: names("a", 3)})
    run = Run(log, Database())
    # The records are from the beginning of time.
    run.now = 1_001.0
    run.steps(4)
    assert run.database.rows == []
    assert run.database.offsets == {ONE: 3}


def test_records_with_an_unknown_schema_wait_for_the_registry_with_their_partition_alone() -> None:
    log = Log({ONE: ["a0", f"{LATE}1", "a2"], OTHER: names("b", 3)})
    run = Run(log, Database(), batch_records=8)
    run.schemas.is_available = False
    stored: list[list[str]] = []
    reads = 0

    def look() -> None:
        nonlocal reads
        reads += 1
        stored.append(list(run.database.rows))
        if reads == 20:
            log.content[OTHER].append("b3")
        if reads == 40:
            run.schemas.is_available = True

    log.before_read = look
    run.steps(60)
    assert stored[5] == ["b0", "b1", "b2"]
    assert stored[39] == ["b0", "b1", "b2", "b3"]
    assert sorted(run.database.rows) == ["a0", "a2", "b0", "b1", "b2", "b3", f"{LATE}1"]
    assert run.database.offsets == {ONE: 3, OTHER: 4}
    assert 2 < run.schemas.look_ups < 20, "asked again with backoff"


def test_a_record_with_a_schema_that_is_registered_nowhere_is_skipped() -> None:
    log = Log({ONE: ["a0", f"{LATE}1", "a2"]})
    run = Run(log, Database())
    run.schemas.is_registered = False
    run.steps(5)
    assert run.database.rows == ["a0", "a2"]
    assert run.database.offsets == {ONE: 3}

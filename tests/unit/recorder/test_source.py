"""What the recorder takes of what its client has fetched: so many records, and about so many bytes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, KafkaException, TopicPartition

from fairlane.settings import Settings
from stream_processors.recorder import source as source_module
from stream_processors.recorder.projection import LogRecord
from stream_processors.recorder.source import CLOSE_TIMEOUT_S, REJOIN_TIMEOUT_S, Event, LogConsumer

Rebalance = Callable[["Client", list[TopicPartition]], None]


@dataclass(slots=True)
class Fetched:
    """A message as the client hands it out."""

    at: int
    content: bytes | None

    def error(self) -> None:
        return None

    def topic(self) -> str:
        return "replies.acme"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self.at

    def timestamp(self) -> tuple[int, int]:
        return TIMESTAMP_CREATE_TIME, 1_000

    def key(self) -> None:
        return None

    def value(self) -> bytes | None:
        return self.content


class Client:
    """Has fetched these messages, and says how long each poll may wait."""

    def __init__(self, sizes: list[int | None]) -> None:
        contents = (None if size is None else bytes(size) for size in sizes)
        self._messages: Iterator[Fetched] = iter([Fetched(at, content) for at, content in enumerate(contents)])
        self.waits_s: list[float] = []
        self.callbacks: dict[str, Rebalance] = {}
        self.is_closed = False

    def subscribe(self, _topics: list[str], **callbacks: "Rebalance") -> None:
        self.callbacks = callbacks

    def incremental_assign(self, _partitions: list[TopicPartition]) -> None:
        pass

    def incremental_unassign(self, _partitions: list[TopicPartition]) -> None:
        pass

    def rebalance(self, kind: str, *partitions: int) -> None:
        self.callbacks[kind](self, [TopicPartition("replies.acme", number) for number in partitions])

    def close(self) -> None:
        self.is_closed = True

    def poll(self, timeout_s: float) -> Fetched | None:
        self.waits_s.append(timeout_s)
        return next(self._messages, None)


def reading(monkeypatch: pytest.MonkeyPatch, sizes: list[int | None]) -> tuple[LogConsumer, Client]:
    client = Client(sizes)
    monkeypatch.setattr(source_module, "SkippingConsumer", lambda *_args, **_options: client)
    return LogConsumer(Settings()), client


def offsets(events: list[Event]) -> list[int]:
    return [event.offset for event in events if isinstance(event, LogRecord)]


def test_what_is_more_than_so_many_bytes_is_read_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    source, client = reading(monkeypatch, [10, 89, None, 1, 500, 1, 1])
    assert offsets(source.read(1_000, 100, 0.1)) == [0, 1, 2, 3]
    assert offsets(source.read(1_000, 100, 0.1)) == [4]
    assert offsets(source.read(1_000, 100, 0.1)) == [5, 6]
    assert source.read(1_000, 100, 0.1) == []
    # It waits for the first alone.
    assert [wait_s for wait_s in client.waits_s if wait_s] == [0.1] * 4


def test_no_more_records_are_taken_than_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = reading(monkeypatch, [1] * 7)
    assert [offsets(source.read(3, 100, 0.1)) for _ in range(4)] == [[0, 1, 2], [3, 4, 5], [6], []]


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> tuple[LogConsumer, Client, list[float]]:
    """In the group, with its client and its clock."""
    client, now = Client([]), [0.0]
    monkeypatch.setattr(source_module, "SkippingConsumer", lambda *_args, **_options: client)
    source = LogConsumer(Settings(), lambda: now[0])
    source.start(lambda _new: None, lambda _gone: None)
    return source, client, now


@pytest.mark.parametrize("kind", ["on_revoke", "on_lost"])
def test_a_client_that_does_not_come_back_to_the_group_is_given_up(
    member: tuple[LogConsumer, Client, list[float]], kind: str
) -> None:
    source, client, now = member
    client.rebalance("on_assign", 0, 1)
    now[0] = 1_000.0
    assert source.read(1, 1, 0) == []
    client.rebalance(kind, 0, 1)
    now[0] += REJOIN_TIMEOUT_S
    assert source.read(1, 1, 0) == []
    now[0] += 0.1
    with pytest.raises(KafkaException, match="nothing was assigned for 30 s"):
        source.read(1, 1, 0)


@pytest.mark.parametrize("assigned", [(0, 1), (7,), ()])
def test_who_was_told_of_an_assignment_since_is_in_the_group(
    member: tuple[LogConsumer, Client, list[float]], assigned: tuple[int, ...]
) -> None:
    source, client, now = member
    client.rebalance("on_assign", 0, 1)
    client.rebalance("on_lost", 0, 1)
    client.rebalance("on_assign", *assigned)
    now[0] += 10 * REJOIN_TIMEOUT_S
    assert source.read(1, 1, 0) == []


def test_who_keeps_a_partition_is_in_the_group(member: tuple[LogConsumer, Client, list[float]]) -> None:
    source, client, now = member
    client.rebalance("on_assign", 0, 1)
    client.rebalance("on_revoke", 0)
    now[0] += 10 * REJOIN_TIMEOUT_S
    assert source.read(1, 1, 0) == []


def test_the_process_does_not_outlive_a_close_that_hangs(
    member: tuple[LogConsumer, Client, list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, client, _ = member
    armed: list[tuple[float, bool]] = []

    class Timer:
        def cancel(self) -> None:
            armed.append((0.0, client.is_closed))

    def exit_after(timeout_s: float) -> Timer:
        armed.append((timeout_s, client.is_closed))
        return Timer()

    monkeypatch.setattr(source_module, "exit_after", exit_after)
    source.close()
    assert armed == [(CLOSE_TIMEOUT_S, False), (0.0, True)]

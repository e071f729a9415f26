"""What the recorder takes of what its client has fetched: so many records, and about so many bytes."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME

from fairlane.settings import Settings
from stream_processors.recorder import source as source_module
from stream_processors.recorder.projection import LogRecord
from stream_processors.recorder.source import Event, Source


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

    def poll(self, timeout_s: float) -> Fetched | None:
        self.waits_s.append(timeout_s)
        return next(self._messages, None)


def reading(monkeypatch: pytest.MonkeyPatch, sizes: list[int | None]) -> tuple[Source, Client]:
    client = Client(sizes)
    monkeypatch.setattr(source_module, "Consumer", lambda *_args, **_options: client)
    return Source(Settings()), client


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

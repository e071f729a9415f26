"""Dead-letter topics of a test's own, letters on them, and the command line over both."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import NewTopic

from fairlane import names
from fairlane.dead_letters import DeadLetterError, LetterWriter, dead_letter_headers
from fairlane.records import InferenceRequest, SourceCoordinate, WorkItem
from fairlane_server.cli import main
from fairlane_server.dead_letters import bulk
from fairlane_server.dead_letters.bulk import DeadLetters
from tests.kit.pipeline import Pipeline
from tests.kit.waiting import eventually
from tests.kit.work_items import work_item

Run = Callable[..., tuple[int, str, str]]


_SOURCE_OFFSET = 77


class EngineDiedError(DeadLetterError):
    """Why the letters of these tests died."""


@dataclass(slots=True)
class DeadLettersBench:
    """The two topics, and the tenants and models of a pipeline in which nothing runs."""

    pipeline: Pipeline
    run: Run
    topics: dict[DeadLetters, str]
    _originals: int = field(default=0)

    def bury(self, request: InferenceRequest, tenant: str = "a", error: Exception | None = None) -> SourceCoordinate:
        """A letter as a consumer writes it. Returns where it stands."""
        item = work_item(self.pipeline, request=request, tenant=tenant, offset=_SOURCE_OFFSET)
        return self.bury_bytes(self.pipeline.codec.encode(item), request.request_id, error, item=item)

    def bury_bytes(
        self,
        value: bytes,
        key: str,
        error: Exception | None = None,
        *,
        topic: DeadLetters = DeadLetters.WORK,
        origin: str | None = None,
        item: WorkItem | None = None,
    ) -> SourceCoordinate:
        self._originals += 1
        origin = origin or names.priority_topic(self.pipeline.pool, "normal")
        written = dead_letter_headers(
            SourceCoordinate(origin, 0, self._originals),
            1_000,
            error or EngineDiedError("the engine died"),
            LetterWriter("consumer-1", "a.group"),
            tenant=None if item is None else item.tenant,
            model=None if item is None else item.request.model,
        )
        (place,) = self.pipeline.write(self.topics[topic], [(key.encode(), value)], written)
        return place

    def json(self, *arguments: str) -> Any:
        """What a command that succeeds prints as its one JSON object."""
        code, text, complaint = self.run(*arguments, "--json")
        assert (code, complaint) == (0, "")
        return json.loads(text)

    def lines(self, *arguments: str) -> list[Any]:
        """What a command that succeeds prints as JSON, one object a line."""
        code, text, complaint = self.run(*arguments, "--json")
        assert (code, complaint) == (0, "")
        return [json.loads(line) for line in text.splitlines()]


@contextmanager
def dead_letters(
    broker: str, unique: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[DeadLettersBench]:
    """The bench on a broker, its topics named after ``unique``."""
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", broker)
    topics = {name: f"{unique}.dead-letter.{name}" for name in DeadLetters}
    for name, topic in topics.items():
        monkeypatch.setitem(bulk.TOPICS, name, topic)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(["dlq", *arguments])
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, captured.out, captured.err

    with Pipeline(broker, folder, unique) as pipeline:
        made = pipeline.admin.create_topics([NewTopic(topic, 1, 1) for topic in topics.values()])
        for future in made.values():
            future.result(10)
        # The broker says so a moment before its metadata do.
        eventually(lambda: pipeline.admin.list_topics(timeout=10).topics.keys() >= set(topics.values()))
        yield DeadLettersBench(pipeline, run, topics)

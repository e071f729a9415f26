"""Doubles of the log and the chunk reader around a submitter."""

from dataclasses import dataclass, field

from fairlane.client.connector import KafkaHeaders
from fairlane.records import (
    InferenceReply,
)
from fairlane.schema_files import default_codec
from producers.openai_api.errors import GatewayError


@dataclass
class Log:
    """What was published; the error is raised by the next one."""

    records: list[tuple[str, str, object, dict[str, object]]] = field(default_factory=list)
    error: Exception | None = None

    async def publish(self, topic: str, request_id: str, value: bytes, headers: KafkaHeaders) -> None:
        if self.error is not None:
            raise self.error
        self.records.append((topic, request_id, default_codec().decode(value), dict(headers)))


@dataclass
class Chunks:
    """How many streams of a tenant there are."""

    streams: int = 0
    follows: bool = True

    async def follow(self, tenant: str) -> bool:
        self.streams += self.follows
        return self.follows

    def leave(self, tenant: str) -> None:
        self.streams -= 1


@dataclass
class Recorded:
    """Replies that stand where this instance does not read."""

    replies: dict[tuple[str, str], InferenceReply] = field(default_factory=dict)
    asked: int = 0
    failures: int = 0

    async def find(self, tenant: str, request_id: str) -> InferenceReply | None:
        self.asked += 1
        if self.failures:
            self.failures -= 1
            raise GatewayError(503, "unavailable", "Postgres is away")
        return self.replies.get((tenant, request_id))

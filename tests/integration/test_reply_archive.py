"""Looking up the reply to a repeated request, in a projection and a log that may be away, behind or cut short."""

import asyncio
from collections.abc import Iterator

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from pydantic import SecretStr

from fairlane.kafka_config import connection
from fairlane.names import replies_topic
from fairlane.records import InferenceReply, SourceCoordinate, TenantSpec
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings, Settings
from stream_processors.dispatcher.deduplication.reply_archive import KafkaReplyArchive
from stream_processors.dispatcher.deduplication.stage import ReplyGoneError, ReplyUnknownError
from stream_processors.recorder.positions import Move, Partition, Stored
from stream_processors.recorder.projection import LogRecord, project
from stream_processors.recorder.store import RecorderStore
from tests.kit.recorder_kit import LogWriter, delete_reply_topics, make_topics, reply_to
from tests.kit.stack import PostgresServer

pytestmark = pytest.mark.broker

NOWHERE = "postgresql://fairlane@127.0.0.1:1/fairlane?connect_timeout=1"


class Kit:
    """A tenant's reply topic, the projection, and the archive that reads both."""

    def __init__(self, broker: str, migrated: PostgresServer, tenant: str) -> None:
        self.tenant, self.broker = tenant, broker
        self.topic = replies_topic(tenant)
        self.settings = Settings(kafka_bootstrap_servers=broker, postgres_dsn=migrated.dispatcher_dsn)
        self.archive = KafkaReplyArchive(self.settings, default_codec())
        self.writer = LogWriter(broker, tenant)
        self.store = RecorderStore(migrated.recorder_dsn)

    def record(self, reply: InferenceReply) -> int:
        """Write it and project it. Returns its offset."""
        (offset,) = self.writer.write(self.topic, [reply])
        where = Partition(self.topic, 0)
        if (place := self.store.next_offsets([where]).get(where)) is None:
            place = Stored(0)
            self.store.start_at({where: place})
        value = default_codec().encode(reply)
        rows = project([LogRecord(self.topic, 0, offset, 1_000, None, value)], default_codec())
        self.store.write(rows, {where: Move(place.next_offset, offset + 1)})
        return offset

    def cut(self, before: int) -> None:
        """Retention removes what stands before this offset."""
        admin = AdminClient(connection(KafkaSettings(kafka_bootstrap_servers=self.broker)))
        for deleted in admin.delete_records([TopicPartition(self.topic, 0, before)]).values():
            deleted.result(10)

    def find(self, number: int) -> InferenceReply | None:
        place = SourceCoordinate(f"requests.{self.tenant}", 0, number)
        return asyncio.run(self.archive.find(self.tenant, f"{self.tenant}-{number}", place))

    def close(self) -> None:
        self.archive.close()
        self.writer.close()
        self.store.close()


@pytest.fixture
def kit(broker: str, migrated: PostgresServer, unique: str) -> Iterator[Kit]:
    make_topics(broker, TenantSpec(unique))
    made = Kit(broker, migrated, unique)
    yield made
    made.close()
    delete_reply_topics(broker, unique)


def test_a_reply_that_is_recorded_is_found(kit: Kit) -> None:
    reply = reply_to(kit.tenant, 1)
    kit.record(reply)
    assert kit.find(1) == reply
    assert kit.find(2) is None, "nothing is recorded of it"


def test_a_refusal_is_known_when_the_log_was_cut_short_and_an_answer_is_gone(kit: Kit) -> None:
    kit.record(reply_to(kit.tenant, 1))
    refusal = reply_to(kit.tenant, 2, outcome="rejected", code="overloaded", message="full", output=None)
    last = kit.record(refusal)
    kit.cut(last + 1)
    with pytest.raises(ReplyGoneError):
        kit.find(1)
    assert kit.find(2) == refusal


def test_a_projection_that_is_away_does_not_say_that_there_is_no_reply(kit: Kit) -> None:
    archive = KafkaReplyArchive(kit.settings.model_copy(update={"postgres_dsn": SecretStr(NOWHERE)}), default_codec())
    with pytest.raises(ReplyUnknownError):
        asyncio.run(archive.find(kit.tenant, "1", SourceCoordinate("requests.a", 0, 1)))
    archive.close()


def test_a_log_that_does_not_answer_does_not_say_that_there_is_no_reply(kit: Kit) -> None:
    kit.record(reply_to(kit.tenant, 1))
    deaf = kit.settings.model_copy(update={"kafka_bootstrap_servers": "127.0.0.1:1"})
    archive = KafkaReplyArchive(deaf, default_codec())
    with pytest.raises(ReplyUnknownError):
        asyncio.run(archive.find(kit.tenant, f"{kit.tenant}-1", SourceCoordinate(f"requests.{kit.tenant}", 0, 1)))
    archive.close()

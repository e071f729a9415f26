"""Check of the promise from outside: one committed reply per request, and one row in Postgres that agrees."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

import psycopg
from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, Message, TopicPartition

from fairlane.kafka_clients import KafkaAdmin, KafkaConsumer
from fairlane.kafka_config import connection, read_committed_consumer
from fairlane.names import group_id, replies_topic, requests_topic
from fairlane.records import InferenceReply
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings

_POLL_S = 1.0
_CALL_TIMEOUT_S = 10.0
_LOOK_AGAIN_S = 0.2
_ROWS = "SELECT request_id, outcome, replies_seen FROM results WHERE request_id = ANY(%s)"


@dataclass(frozen=True, slots=True)
class PromiseCheck:
    """Request ids that break the promise, by kind."""

    requests: int
    unanswered: list[str] = field(default_factory=list)
    answered_twice: list[str] = field(default_factory=list)
    without_row: list[str] = field(default_factory=list)
    rows_that_differ: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not (self.unanswered or self.answered_twice or self.without_row or self.rows_that_differ)


def check(
    settings: KafkaSettings, postgres_dsn: str, tenants: Iterable[str], request_ids: Collection[str], timeout_s: float
) -> PromiseCheck:
    """Read the reply topics from their beginning, then wait until the recorder has projected all of it.

    Raises KafkaException when the broker does not answer, TimeoutError when a topic could not be read to its end.
    """
    codec, wanted = default_codec(), set(request_ids)
    records = committed_records(settings, [replies_topic(tenant) for tenant in tenants], timeout_s)
    replies = [codec.decode_as(InferenceReply, record.value()) for record in records]
    counts = Counter(reply.request_id for reply in replies if reply.request_id in wanted and not reply.replayed)
    outcomes = {reply.request_id: reply.outcome for reply in replies if reply.request_id in wanted}
    rows = _rows(postgres_dsn, list(wanted), timeout_s)
    return PromiseCheck(
        requests=len(wanted),
        unanswered=sorted(one for one in wanted if counts[one] == 0),
        answered_twice=sorted(one for one in wanted if counts[one] > 1),
        without_row=sorted(one for one in wanted if one not in rows),
        rows_that_differ=sorted(one for one, row in rows.items() if row != (outcomes.get(one), 1)),
    )


def committed_records(settings: KafkaSettings, topics: Iterable[str], timeout_s: float) -> list[Message]:
    """Every committed record of these topics, up to their present ends; waits for open transactions.

    Raises KafkaException when the broker does not answer, TimeoutError when a topic could not be read to its end.
    """
    deadline = monotonic() + timeout_s
    consumer = KafkaConsumer(
        read_committed_consumer(settings, group_id("fairlane-check")) | {"enable.partition.eof": True}
    )
    try:
        places = [
            (topic, partition)
            for topic in topics
            for partition in consumer.list_topics(topic, timeout=_CALL_TIMEOUT_S).topics[topic].partitions
        ]
        behind = {
            place: consumer.get_watermark_offsets(TopicPartition(*place), timeout=_CALL_TIMEOUT_S)[1]
            for place in places
        }
        consumer.assign([TopicPartition(*place, OFFSET_BEGINNING) for place in places])
        records: list[Message] = []
        while behind:
            if monotonic() > deadline:
                raise TimeoutError(f"not read to the end within {timeout_s:g} s: {sorted(behind)}")
            message = consumer.poll(_POLL_S)
            if message is None:
                continue
            error, place, offset = message.error(), (str(message.topic()), message.partition()), message.offset() or 0
            if error is None:
                records.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                # It counts the markers of transactions, which no record's offset does.
                if offset >= behind.get(place, 0):
                    behind.pop(place, None)
            elif error.fatal() or not error.retriable():
                raise KafkaException(error)
        return records
    finally:
        consumer.close()


@dataclass(frozen=True, slots=True)
class Protection:
    """What keeps tenants apart, as a tenant and a user of Postgres find it."""

    foreign_topics_refused: bool
    """Kafka refuses each tenant the topics of every other."""
    postgres_encrypted: bool

    def in_words(self) -> str:
        refuses = "refuses" if self.foreign_topics_refused else "does not refuse"
        postgres = "with" if self.postgres_encrypted else "without"
        return f"Kafka {refuses} each tenant the topics of the others; Postgres was read {postgres} TLS."


def protection(settings: Mapping[str, KafkaSettings], postgres_dsn: str) -> Protection:
    """``settings``: by tenant. Raises KafkaException when the broker does not answer."""
    return Protection(
        all(
            _is_refused(own, topic_of(other))
            for tenant, own in settings.items()
            for other in settings
            for topic_of in (requests_topic, replies_topic)
            if other != tenant
        ),
        _is_encrypted(postgres_dsn),
    )


def _is_refused(settings: KafkaSettings, topic: str) -> bool:
    error = KafkaAdmin(connection(settings)).list_topics(topic, timeout=_CALL_TIMEOUT_S).topics[topic].error
    return error is not None and error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED


def _is_encrypted(dsn: str) -> bool:
    with psycopg.connect(dsn, connect_timeout=5) as own:
        return own.execute("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").fetchone() == (True,)


def _rows(dsn: str, request_ids: list[str], timeout_s: float) -> dict[str, tuple[Any, ...]]:
    deadline = monotonic() + timeout_s
    while True:
        with psycopg.connect(dsn, connect_timeout=5) as own:
            own.execute("SELECT set_config('fairlane.tenant', '*', true)")
            rows = {row[0]: row[1:] for row in own.execute(_ROWS, (request_ids,)).fetchall()}
        if len(rows) == len(request_ids) or monotonic() > deadline:
            return rows
        sleep(_LOOK_AGAIN_S)

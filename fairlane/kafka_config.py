"""Configuration of confluent-kafka clients: connection, security and tuning."""

from typing import Any

from confluent_kafka import KafkaError

from fairlane.record_bounds import MAX_RECORD_BYTES
from fairlane.settings import KafkaSettings, Settings

ClientConfig = dict[str, Any]

METADATA_REFRESH_MS = 2_000
MAX_MESSAGE_BYTES = MAX_RECORD_BYTES
HEARTBEAT_DELIVERY_TIMEOUT_MS = 2_000
MAX_HEARTBEATS_QUEUED = 64
IDLE_FETCH_WAIT_MS = 500
"""Longest wait of a broker before it answers a fetch without data, for readers whose partitions seldom change. An added
partition waits for the end of the running fetch. A fetch with data is answered at once."""
CHUNK_LIFE_MS = 5_000
MAX_CHUNKS_QUEUED = 16_384

UNCERTAIN_DELIVERY_ERRORS = frozenset(
    {
        KafkaError._MSG_TIMED_OUT,
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
        KafkaError._PURGE_INFLIGHT,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NETWORK_EXCEPTION,
    }
)
"""Delivery errors after which the record may be in the log nonetheless."""


CREDENTIALS_SOURCE = "fairlane.credentials"
"""Key of the function that returns the credentials as they are now; only ``fairlane.kafka_clients`` takes it."""


def connection(settings: KafkaSettings) -> ClientConfig:
    """Connection settings of every client. The result contains the password: never log it."""
    config: ClientConfig = {
        "bootstrap.servers": settings.kafka_bootstrap_servers,
        "security.protocol": settings.kafka_security_protocol,
        "socket.nagle.disable": True,
        "topic.metadata.refresh.interval.ms": METADATA_REFRESH_MS,
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 1_000,
        "log_level": 3,
    }
    if settings.kafka_sasl_mechanism is not None:
        config["sasl.mechanism"] = settings.kafka_sasl_mechanism
    if (credentials := settings.kafka_credentials()) is not None:
        config["sasl.username"] = credentials.username
        config["sasl.password"] = credentials.password
        if settings.kafka_credentials_may_change:
            config[CREDENTIALS_SOURCE] = settings.kafka_credentials
    if settings.kafka_ssl_ca_file is not None:
        config["ssl.ca.location"] = str(settings.kafka_ssl_ca_file)
    return config


def authorities(settings: KafkaSettings) -> dict[str, str]:
    """Arguments of ``aiokafka.helpers.create_ssl_context``. OpenSSL looks into a folder at every connection."""
    found = settings.kafka_ssl_ca_file
    if found is None:
        return {}
    return {"capath" if found.is_dir() else "cafile": str(found)}


def idempotent_producer(settings: KafkaSettings) -> ClientConfig:
    """Configuration of a producer whose acknowledged records are durable and in the log once."""
    return connection(settings) | {
        "enable.idempotence": True,
        "acks": "all",
        "linger.ms": 1,
        "message.max.bytes": MAX_MESSAGE_BYTES,
        "delivery.timeout.ms": 30_000,
        "retry.backoff.ms": 10,
        "retry.backoff.max.ms": 500,
    }


def heartbeat_producer(settings: Settings, name: str) -> ClientConfig:
    """Configuration of a producer of heartbeats, which soon lose their value: short queue, short delivery timeout.

    Idempotent, so that retries keep the order: the last heartbeat must stay the last one.
    """
    return idempotent_producer(settings) | {
        "client.id": f"{settings.instance_id}-{name}",
        "linger.ms": 0,
        "delivery.timeout.ms": HEARTBEAT_DELIVERY_TIMEOUT_MS,
        "request.timeout.ms": HEARTBEAT_DELIVERY_TIMEOUT_MS // 2,
        "queue.buffering.max.messages": MAX_HEARTBEATS_QUEUED,
    }


def chunk_producer(settings: Settings) -> ClientConfig:
    """Configuration of a producer of streamed text: sent at once, dropped if the broker does not accept it soon."""
    return connection(settings) | {
        "client.id": f"{settings.instance_id}-chunks",
        "acks": "1",
        "linger.ms": 0,
        "message.max.bytes": MAX_MESSAGE_BYTES,
        "delivery.timeout.ms": CHUNK_LIFE_MS,
        "request.timeout.ms": CHUNK_LIFE_MS // 2,
        "queue.buffering.max.messages": MAX_CHUNKS_QUEUED,
    }


def transactional_producer(settings: KafkaSettings, transactional_id: str, timeout_ms: int) -> ClientConfig:
    """Configuration of a producer for the two exactly-once hops.

    librdkafka waits ``retry.backoff.ms`` on CONCURRENT_TRANSACTIONS: with its default every commit takes 100 ms. The
    delivery timeout is well below the transaction timeout: after a failed delivery the transaction can be aborted and
    retried without that record, whereas an expired transaction fences its producer.
    """
    return idempotent_producer(settings) | {
        "transactional.id": transactional_id,
        "transaction.timeout.ms": timeout_ms,
        "delivery.timeout.ms": timeout_ms // 2,
        "topic.metadata.propagation.max.ms": timeout_ms // 5,
        "linger.ms": 0,
        "retry.backoff.ms": 2,
        "retry.backoff.max.ms": 50,
    }


def read_committed_consumer(settings: KafkaSettings, group_id: str) -> ClientConfig:
    """Configuration of a consumer of transactional topics, without automatic commits or silent offset resets."""
    return connection(settings) | {
        "group.id": group_id,
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        # A batch corrupted on disk is an error (see `fairlane.skipping_consumer`), never an altered record.
        "check.crcs": settings.kafka_check_crcs,
        "fetch.wait.max.ms": 100,
        "fetch.queue.backoff.ms": 10,
        "fetch.error.backoff.ms": 50,
        "retry.backoff.ms": 10,
        "retry.backoff.max.ms": 500,
        "fetch.message.max.bytes": MAX_MESSAGE_BYTES,
        "queued.max.messages.kbytes": 32_768,
        "allow.auto.create.topics": False,
    }

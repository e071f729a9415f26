"""Configuration of confluent-kafka clients: connection, security and the tuning every client of ours shares."""

from typing import Any

from fairlane.settings import KafkaSettings

ClientConfig = dict[str, Any]

METADATA_REFRESH_MS = 2_000
MAX_MESSAGE_BYTES = 8 * 1024 * 1024


def connection(settings: KafkaSettings) -> ClientConfig:
    """What every client needs to connect. The result holds the password: never log it."""
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
        config["sasl.username"] = settings.kafka_sasl_username
    if settings.kafka_sasl_password is not None:
        config["sasl.password"] = settings.kafka_sasl_password.get_secret_value()
    if settings.kafka_ssl_ca_file is not None:
        config["ssl.ca.location"] = str(settings.kafka_ssl_ca_file)
    return config


def idempotent_producer(settings: KafkaSettings) -> ClientConfig:
    """A producer whose acknowledged records are durable and stand in the log once."""
    return connection(settings) | {
        "enable.idempotence": True,
        "acks": "all",
        "linger.ms": 1,
        "message.max.bytes": MAX_MESSAGE_BYTES,
        "delivery.timeout.ms": 30_000,
        "retry.backoff.ms": 10,
        "retry.backoff.max.ms": 500,
    }


def transactional_producer(settings: KafkaSettings, transactional_id: str, timeout_ms: int) -> ClientConfig:
    """A producer for the two exactly-once hops.

    librdkafka waits ``retry.backoff.ms`` on CONCURRENT_TRANSACTIONS: with its default every commit takes 100 ms. A
    record that cannot be delivered must fail well before the broker ends the transaction: then it can be aborted and
    tried without that record; a transaction that expired fences its producer instead.
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
    """A consumer of transactional topics that commits nothing by itself and never resets silently."""
    return connection(settings) | {
        "group.id": group_id,
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "fetch.wait.max.ms": 100,
        "fetch.queue.backoff.ms": 10,
        "fetch.error.backoff.ms": 50,
        "retry.backoff.ms": 10,
        "retry.backoff.max.ms": 500,
        "fetch.message.max.bytes": MAX_MESSAGE_BYTES,
        "queued.max.messages.kbytes": 32_768,
        "allow.auto.create.topics": False,
    }

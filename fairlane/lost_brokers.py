"""Detect a Kafka client that has lost all its brokers for good.

librdkafka forgets every broker when a metadata response names topics but no broker. A single broker that shuts down
sends such responses, and a whole cluster that restarts may send them too. One thread then schedules a re-bootstrap, and
in a race another cancels it (librdkafka issue 5301, versions 2.13 to 2.16): the client never connects again and reports
no error. Only its statistics show it.
"""

from confluent_kafka import KafkaError, KafkaException

from fairlane.kafka_config import ClientConfig

STATISTICS_INTERVAL_MS = 15_000
_BROKER_SOURCES = ('"source":"learned"', '"source":"configured"')
"""Sources of brokers with an address. The logical `GroupCoordinator` has no address and another source."""


class LostBrokersError(KafkaException):
    """Raised by the next poll of a client that must be replaced by a new one."""


class BrokersWatch:
    """A ``stats_cb`` that raises from the client's poll once two reports in a row name no broker with an address."""

    def __init__(self) -> None:
        self._without_brokers = 0

    def __call__(self, statistics: str) -> None:
        """Check a report, up to megabytes of JSON, without parsing it. Raises LostBrokersError."""
        if any(source in statistics for source in _BROKER_SOURCES):
            self._without_brokers = 0
            return
        self._without_brokers += 1
        if self._without_brokers > 1:
            reason = "the client has no broker left to connect to"
            raise LostBrokersError(KafkaError(KafkaError._ALL_BROKERS_DOWN, reason, fatal=True))


def with_broker_check(config: ClientConfig) -> ClientConfig:
    """Add the check to the configuration of a client that is polled continuously; without polls, reports pile up."""
    return config | {"statistics.interval.ms": STATISTICS_INTERVAL_MS, "stats_cb": BrokersWatch()}

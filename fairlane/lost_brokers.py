"""Detection of a Kafka client that has lost all its brokers for good.

librdkafka forgets every broker when a metadata response names topics but no broker. A single broker that shuts down
sends such responses, and so may a whole cluster that restarts. The re-bootstrap that should follow is scheduled by one
thread and cancelled by another when they meet in the wrong order (librdkafka issue 5301, versions 2.13 to 2.16): the
client then connects to nothing, ever again, and reports nothing. Only its statistics show it.
"""

from confluent_kafka import KafkaError, KafkaException

from fairlane.kafka import ClientConfig

STATISTICS_INTERVAL_MS = 15_000
_BROKER_SOURCES = ('"source":"learned"', '"source":"configured"')
"""Of brokers with an address. What is left without them is the logical `GroupCoordinator`, which has none."""


class LostBrokersError(KafkaException):
    """Raised by a client's next poll: it must be replaced by a new one."""


class BrokersWatch:
    """Reads a client's statistics and raises from its poll once two in a row name no broker with an address."""

    def __init__(self) -> None:
        self._without_brokers = 0

    def __call__(self, statistics: str) -> None:
        """Take the statistics, JSON of up to megabytes, without parsing them. Raises LostBrokersError."""
        if any(source in statistics for source in _BROKER_SOURCES):
            self._without_brokers = 0
            return
        self._without_brokers += 1
        if self._without_brokers > 1:
            reason = "the client has no broker left to connect to"
            raise LostBrokersError(KafkaError(KafkaError._ALL_BROKERS_DOWN, reason, fatal=True))


def watched(config: ClientConfig) -> ClientConfig:
    """The configuration of a client that is polled all the time; statistics of any other would pile up unread."""
    return config | {"statistics.interval.ms": STATISTICS_INTERVAL_MS, "stats_cb": BrokersWatch()}

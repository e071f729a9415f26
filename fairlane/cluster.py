"""Connection errors of Kafka clients, in one line each, and a watch over the brokers they know."""

from typing import Any

from confluent_kafka import KafkaError, KafkaException

from fairlane.kafka_config import ClientConfig


class LastConnectionError:
    """An ``error_cb`` that keeps the reason why a client cannot connect; librdkafka's timeout error lacks it."""

    def __init__(self) -> None:
        self.text: str | None = None

    def __call__(self, error: KafkaError) -> None:
        # "all brokers are down" only repeats what the error before it explains.
        if error.code() != KafkaError._ALL_BROKERS_DOWN or self.text is None:
            self.text = error.str()


def quiet_config(config: ClientConfig, errors: LastConnectionError) -> ClientConfig:
    """The configuration with librdkafka's output on stderr off and connection errors kept in ``errors``."""
    return config | {"log_level": 0, "error_cb": errors}


def one_line(text: str) -> str:
    return " ".join(text.split())


def reason_of(error: BaseException) -> str:
    """The reason of a failed request in one line: the broker's text instead of the exception's repr."""
    detail: Any = error.args[0] if error.args else error
    text = detail.str() if isinstance(detail, KafkaError) else str(detail)
    return one_line(text) or type(error).__name__


STATISTICS_INTERVAL_MS = 15_000
_BROKER_SOURCES = ('"source":"learned"', '"source":"configured"')
"""Sources of brokers with an address. The logical `GroupCoordinator` has no address and another source."""


class LostBrokersError(KafkaException):
    """Raised by the next poll of a client that must be replaced by a new one.

    librdkafka forgets every broker when a metadata response names topics but no broker. A single broker that shuts down
    sends such responses, and a whole cluster that restarts may. One thread then schedules a re-bootstrap, and in a race
    another cancels it (librdkafka issue 5301, versions 2.13 to 2.16): the client never connects again and reports no
    error. Only its statistics show it.
    """


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

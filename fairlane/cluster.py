"""Kafka admin client for commands: each call has a timeout, each error is one line."""

import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient, ClusterMetadata

from fairlane.kafka_config import ClientConfig, connection
from fairlane.settings import KafkaSettings

CONNECT_TIMEOUT_S = 8.0
REQUEST_TIMEOUT_S = 20.0


class ClusterError(Exception):
    """A Kafka call failed. The message is one line and contains no secret."""


class LastConnectionError:
    """An ``error_cb`` that keeps the reason why a client cannot connect; librdkafka's timeout error lacks it."""

    def __init__(self) -> None:
        self._text: str | None = None

    def __call__(self, error: KafkaError) -> None:
        # "all brokers are down" only repeats what the error before it explains.
        if error.code() != KafkaError._ALL_BROKERS_DOWN or self._text is None:
            self._text = error.str()

    @property
    def text(self) -> str | None:
        return self._text


def quiet_config(config: ClientConfig, errors: LastConnectionError) -> ClientConfig:
    """The configuration with librdkafka's output on stderr off and connection errors kept in ``errors``."""
    return config | {"log_level": 0, "error_cb": errors}


def unreachable(settings: KafkaSettings, reason: str) -> ClusterError:
    """The error for a cluster that does not answer."""
    return ClusterError(
        f"KAFKA_BOOTSTRAP_SERVERS={settings.kafka_bootstrap_servers}: no broker answers ({one_line(reason)})"
    )


def one_line(text: str) -> str:
    return " ".join(text.split())


class Cluster:
    """Admin client of one cluster."""

    def __init__(self, settings: KafkaSettings, connect_timeout_s: float | None = None) -> None:
        """Build the client without contacting a broker. Raises ClusterError for invalid settings."""
        self._settings = settings
        self._connect_timeout_s = CONNECT_TIMEOUT_S if connect_timeout_s is None else connect_timeout_s
        self._errors = LastConnectionError()
        if settings.kafka_ssl_ca_file is not None and not settings.kafka_ssl_ca_file.is_file():
            raise ClusterError(f"KAFKA_SSL_CA_FILE={settings.kafka_ssl_ca_file}: no such file")
        try:
            self.admin = AdminClient(quiet_config(connection(settings), self._errors))
        except (KafkaException, ValueError) as error:
            raise ClusterError(f"Kafka client: {reason_of(error)}") from None

    def metadata(self) -> ClusterMetadata:
        """Metadata of brokers and all topics. Raises ClusterError when no broker answers within the connect timeout."""
        try:
            return self.admin.list_topics(timeout=self._connect_timeout_s)
        except KafkaException as error:
            self.admin.poll(0.1)  # serves the error callback, at once or a moment later
            raise unreachable(self._settings, self._errors.text or reason_of(error)) from None

    def wait_for(self, condition: Callable[[ClusterMetadata], str | None], timeout_s: float) -> None:
        """Wait until ``condition`` of the metadata returns None. Raises ClusterError with what it returned last, or if
        no broker answers."""
        deadline = time.monotonic() + timeout_s
        while (missing := condition(self.metadata())) is not None:
            if time.monotonic() > deadline:
                raise ClusterError(f"not there after {timeout_s:g} s: {missing}")
            time.sleep(0.05)


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

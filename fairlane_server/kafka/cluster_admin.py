"""Kafka admin client for commands: each call has a timeout, each error is one line."""

import time
from collections.abc import Callable

from confluent_kafka import KafkaException
from confluent_kafka.admin import ClusterMetadata

from fairlane.cluster import LastConnectionError, one_line, quiet_config, reason_of
from fairlane.kafka_clients import KafkaAdmin
from fairlane.kafka_config import connection
from fairlane.settings import KafkaSettings

CONNECT_TIMEOUT_S = 8.0
REQUEST_TIMEOUT_S = 20.0


class ClusterError(Exception):
    """A Kafka call failed. The message is one line and contains no secret."""


def unreachable(settings: KafkaSettings, reason: str) -> ClusterError:
    """The error for a cluster that does not answer."""
    return ClusterError(
        f"KAFKA_BOOTSTRAP_SERVERS={settings.kafka_bootstrap_servers}: no broker answers ({one_line(reason)})"
    )


class ClusterAdmin:
    """Admin client of one cluster."""

    def __init__(self, settings: KafkaSettings, connect_timeout_s: float | None = None) -> None:
        """Build the client without contacting a broker. Raises ClusterError for invalid settings."""
        self._settings = settings
        self._connect_timeout_s = CONNECT_TIMEOUT_S if connect_timeout_s is None else connect_timeout_s
        self._errors = LastConnectionError()
        if settings.kafka_ssl_ca_file is not None and not settings.kafka_ssl_ca_file.exists():
            raise ClusterError(f"KAFKA_SSL_CA_FILE={settings.kafka_ssl_ca_file}: no such file or folder")
        try:
            self.admin = KafkaAdmin(quiet_config(connection(settings), self._errors))
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

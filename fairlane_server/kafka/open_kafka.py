"""No service of several tenants on a Kafka that asks for no password: each of them could read and write for all."""

from collections.abc import Collection

from fairlane.settings import Settings
from fairlane_server.store_error import ReportableError


class OpenKafkaError(ReportableError):
    """Several tenants would share a Kafka that asks for no password."""


def check_open_kafka(settings: Settings, tenants: Collection[str]) -> None:
    """Raises OpenKafkaError for more than one tenant on a connection without a password, unless ALLOW_OPEN_KAFKA."""
    if settings.kafka_security_protocol.startswith("SASL") or settings.allow_open_kafka or len(tenants) < 2:
        return
    raise OpenKafkaError(
        f"KAFKA_SECURITY_PROTOCOL is {settings.kafka_security_protocol}, so Kafka asks for no password, and there are "
        f"{len(tenants)} tenants: each could read and write for the others. Set up users (`fairlane access apply`), or "
        "set ALLOW_OPEN_KAFKA=true if whoever reaches the brokers may do everything"
    )

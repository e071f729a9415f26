"""A dispatcher on a Kafka that asks for no password, when a second tenant comes."""

from pathlib import Path

import pytest

from fairlane.records import TenantSpec
from tests.kit.pipeline import Pipeline, unique_name

pytestmark = pytest.mark.broker


def test_a_second_tenant_is_not_served_on_a_kafka_that_is_open_to_all(broker: str, tmp_path: Path) -> None:
    with Pipeline(broker, tmp_path, unique_name(), tenants=("a",)) as pipeline:
        servers = pipeline.settings.kafka_bootstrap_servers
        dispatcher = pipeline.dispatcher(
            1,
            {"KAFKA_BOOTSTRAP_SERVERS": servers, "KAFKA_SECURITY_PROTOCOL": "PLAINTEXT", "ALLOW_OPEN_KAFKA": "false"},
        )
        dispatcher.wait_ready(60)
        # By one whose settings permit it.
        second = TenantSpec(pipeline.tenant("b"))
        pipeline.tenants[second.tenant] = second
        pipeline.apply()
        assert dispatcher.wait_ended(30) == 1
        [event] = dispatcher.events("dispatcher_failed")
        assert event["kind"] == "OpenKafkaError"
        assert "there are 2 tenants" in str(event["error"])

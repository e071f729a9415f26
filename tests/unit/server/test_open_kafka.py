"""Several tenants share no Kafka that asks for no password, unless somebody says that they may."""

import pytest

from fairlane.settings import Settings
from fairlane_server.kafka.open_kafka import OpenKafkaError, check_open_kafka

SASL = {"kafka_sasl_mechanism": "SCRAM-SHA-512", "kafka_sasl_username": "u", "kafka_sasl_password": "p"}


@pytest.mark.parametrize("protocol", ["PLAINTEXT", "SSL"])
def test_several_tenants_without_a_password_are_refused(protocol: str) -> None:
    settings = Settings.model_validate({"kafka_security_protocol": protocol, "allow_open_kafka": False})
    with pytest.raises(OpenKafkaError, match=f"is {protocol}, .* 2 tenants: .* ALLOW_OPEN_KAFKA"):
        check_open_kafka(settings, {"acme", "globex"})


@pytest.mark.parametrize(
    ("given", "tenants"),
    [
        ({}, {"acme"}),
        ({}, set()),
        ({"allow_open_kafka": True}, {"acme", "globex"}),
        ({"kafka_security_protocol": "SASL_SSL", **SASL}, {"acme", "globex"}),
        ({"kafka_security_protocol": "SASL_PLAINTEXT", **SASL}, {"acme", "globex"}),
    ],
)
def test_one_tenant_passwords_and_permission_pass(given: dict[str, object], tenants: set[str]) -> None:
    check_open_kafka(Settings.model_validate(given), tenants)

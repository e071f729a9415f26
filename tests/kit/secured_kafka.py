"""A broker with SASL and TLS."""

from dataclasses import dataclass, field

from deploy.local.kafka import HOST, Kafka


@dataclass(frozen=True, slots=True)
class SecuredKafka(Kafka):
    """A node that asks clients for SCRAM on one more port."""

    secured_port: int = field(kw_only=True)

    def _properties(self) -> str:
        plain = f"{HOST}:{self.port},CONTROLLER://{HOST}:{self.controller_port}"
        secured = f"PLAINTEXT://{plain},SECURED://{HOST}:{self.secured_port}"
        here = {
            "listeners": secured,
            "advertised.listeners": secured,
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURED:SASL_PLAINTEXT",
            "listener.name.secured.sasl.enabled.mechanisms": "SCRAM-SHA-512",
            "listener.name.secured.scram-sha-512.sasl.jaas.config": (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            ),
        }
        # The last of two lines counts.
        return Kafka._properties(self) + "".join(f"{name}={value}\n" for name, value in here.items())

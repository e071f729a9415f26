"""Every setting of every process, read from the environment. ``.env.example`` and docs/settings.md are made from it."""

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]


class KafkaSettings(BaseSettings):
    """How to reach Kafka. The only settings the client SDK reads."""

    model_config = SettingsConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)

    kafka_bootstrap_servers: str = Field(
        "127.0.0.1:9092", description="Brokers to start from, host:port, comma-separated"
    )
    kafka_security_protocol: SecurityProtocol = Field("PLAINTEXT", description="How connections to Kafka are secured")
    kafka_sasl_mechanism: SaslMechanism | None = Field(None, description="SASL mechanism, with a SASL_* protocol")
    kafka_sasl_username: str | None = Field(None, description="SASL user")
    kafka_sasl_password: SecretStr | None = Field(None, description="SASL password")
    kafka_ssl_ca_file: Path | None = Field(
        None, description="CA certificates that the brokers' are checked against (PEM)"
    )
    schema_registry_url: str | None = Field(
        None, description="Confluent-compatible schema registry; unset: the ids in schemas/ids.yaml"
    )

    @model_validator(mode="after")
    def _sasl_is_complete(self) -> "KafkaSettings":
        if self.kafka_security_protocol.startswith("SASL"):
            for name in ("kafka_sasl_mechanism", "kafka_sasl_username", "kafka_sasl_password"):
                if getattr(self, name) is None:
                    raise ValueError(
                        f"{name.upper()} is needed with KAFKA_SECURITY_PROTOCOL={self.kafka_security_protocol}"
                    )
        return self


class Settings(KafkaSettings):
    """Settings of the services and the command line. Secrets are ``SecretStr`` and never printed."""

    consumer_group_protocol: Literal["consumer", "classic"] = Field(
        "consumer", description="Group protocol of the inference consumers; classic for brokers before 4.0"
    )
    postgres_dsn: SecretStr = Field(
        SecretStr("postgresql://fairlane@127.0.0.1:5432/fairlane"),
        description="Postgres, as the role of the services, which cannot bypass row-level security",
    )
    postgres_owner_dsn: SecretStr | None = Field(
        None, description="Postgres, as the role that owns the tables; used by `fairlane db upgrade` alone"
    )
    redis_url: SecretStr | None = Field(None, description="Redis; holds only what can be rebuilt, so it may be missing")
    instance_id: str = Field(
        "local-1",
        pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}$",
        description="Stable name of this slot; part of its transactional.id",
    )
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port of /health, /health/ready and /metrics; 0 picks a free one"
    )
    metrics_host: str = Field("127.0.0.1", description="Address that port listens on; 0.0.0.0 in a container")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Least level that is logged")
    log_format: Literal["json", "console"] = Field("json", description="One JSON object a line, or for a person")

    group_prefix: str = Field("fairlane", description="First part of every consumer group id")
    dispatcher_session_timeout_ms: int = Field(6_000, ge=1_000, description="A dispatcher silent for this long is dead")
    transaction_timeout_ms: int = Field(10_000, ge=1_000, description="Longest life of an open Kafka transaction")
    max_undone_span: int = Field(
        20_000,
        ge=10,
        le=20_000,
        description="Offsets between the first undone and the newest before a partition is paused",
    )
    max_transaction_records: int = Field(
        512, ge=1, le=10_000, description="Most source records settled in one transaction"
    )

    max_input_bytes: int = Field(1_048_576, ge=1, description="Largest input of one request")
    max_input_items: int = Field(512, ge=1, description="Most texts, documents or messages in one request")
    max_timeout_ms: int = Field(86_400_000, ge=1, description="Longest timeout a request may name")
    max_output_tokens: int = Field(4_096, ge=1, description="Largest max_tokens a request may name")
    max_queue_size: int = Field(
        10_000, ge=1, description="Most requests a dispatcher holds in memory before it reads no more"
    )
    max_queue_bytes: int = Field(
        268_435_456, ge=1, description="Most bytes of requests a dispatcher holds in memory before it reads no more"
    )
    dedupe_ttl_s: int = Field(86_400, ge=1, description="How long a request id is remembered to drop its duplicates")

    max_batch_size: int = Field(32, ge=1, le=1_024, description="Most items in one micro-batch")
    max_batch_tokens: int = Field(16_384, ge=1, description="Most estimated tokens in one micro-batch")
    batch_timeout_ms: int = Field(
        20, ge=0, le=100, description="How long a micro-batch waits for more items under load"
    )
    max_prefetch_items: int = Field(256, ge=1, description="Most items a consumer holds per priority")
    max_prefetch_bytes: int = Field(67_108_864, ge=1, description="Most bytes a consumer holds in all priorities")
    engine: Literal["real", "simulated"] = Field(
        "real", description="simulated answers without a model, for load tests; every reply says so"
    )
    simulated_prefill_tokens_per_s: float = Field(20_000.0, gt=0, description="Speed of the simulated engine's prefill")
    simulated_decode_tokens_per_s: float = Field(2_000.0, gt=0, description="Speed of the simulated engine's decode")
    engine_threads: int = Field(0, ge=0, description="CPU threads of a torch engine; 0 lets torch decide")
    models_dir: Path = Field(
        Path(".fairlane/models"), description="Folder that the paths in models.yaml are relative to"
    )
    models_file: Path = Field(Path("deploy/models.yaml"), description="The models and the pools that serve them")
    tenants_file: Path = Field(Path("deploy/tenants.yaml"), description="The tenants")

    recorder_batch_records: int = Field(
        1_000, ge=1, description="Most records in one Postgres transaction of the recorder"
    )
    drain_timeout_s: float = Field(25.0, gt=0, description="How long a process may finish its work after SIGTERM")

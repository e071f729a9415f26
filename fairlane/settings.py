"""All settings of all processes, read from the environment. Source of ``.env.example`` and docs/settings.md.

A setting NAME may also be in a file that the variable NAME_FILE names, so that no secret is in an environment.
"""

import os
from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field, PrivateAttr, SecretStr, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from fairlane import names
from fairlane.file_text import FileText, present
from fairlane.kafka_credentials import CredentialsFile, KafkaCredentials
from fairlane.outcomes import GuardrailCheck, Priority
from fairlane.records import MOST_INPUT_ITEMS

SecurityProtocol = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
Network = IPv4Network | IPv6Network
SaslMechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]

IDEMPOTENCY_TTL_S = 86_400
"""How long the gateway keeps an idempotency key. Not a setting: the API promises 24 hours."""


class KafkaSettings(BaseSettings):
    """Connection to Kafka. The only settings that the client SDK reads."""

    model_config = SettingsConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)

    kafka_bootstrap_servers: str = "127.0.0.1:9092"
    """Brokers to start from, host:port, comma-separated."""
    kafka_security_protocol: SecurityProtocol = "PLAINTEXT"
    """How connections to Kafka are secured."""
    kafka_sasl_mechanism: SaslMechanism | None = None
    """SASL mechanism, with a SASL_* protocol."""
    kafka_sasl_username: str | None = None
    """SASL user."""
    kafka_sasl_password: SecretStr | None = None
    """SASL password."""
    kafka_credentials_file: Path | None = None
    """File with SASL user and password, as `fairlane access` writes it, instead of KAFKA_SASL_USERNAME and
    KAFKA_SASL_PASSWORD. Once it is replaced, new connections use what it holds, without a restart."""
    kafka_ssl_ca_file: Path | None = None
    """CA certificates that the brokers' certificates are verified against (PEM): a file, read when a client is made, or
    a folder prepared by `openssl rehash`, looked into at every connection."""
    kafka_check_crcs: bool = True
    """Whether consumers verify the checksums of record batches; turn it off to get past a corrupt batch."""
    schema_registry_url: str | None = None
    """Confluent-compatible schema registry; unset: the ids in schemas/ids.yaml."""

    topic_prefix: str = ""
    """Prefix of every topic, consumer group, transactional id and key in Redis: pipelines with different prefixes share
    a cluster. At most 40 of a-z, 0-9, dot and hyphen; read once, when a process starts."""

    _credentials_file: CredentialsFile | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _values_in_files(cls, given: dict[str, Any]) -> dict[str, Any]:
        """Add the value of each setting NAME whose variable NAME_FILE is set; a given value goes first."""
        files = {name: os.environ.get(f"{name.upper()}_FILE") for name in cls.model_fields if name not in given}
        if both := [name.upper() for name in cls.model_fields if _is_set(name) and _is_set(f"{name}_FILE")]:
            raise ValueError(f"{both[0]} and {both[0]}_FILE are both set: leave one of them out")
        found = {name: _content_of(f"{name.upper()}_FILE", file) for name, file in files.items() if file}
        # As it is, a secret keeps its file: pydantic would copy the text.
        secret = {
            name
            for name, field in cls.model_fields.items()
            if SecretStr in (field.annotation, *get_args(field.annotation))
        }
        given = given | {name: SecretStr(text) if name in secret else text for name, text in found.items()}
        return given | _credentials_of(given)

    @field_validator("topic_prefix")
    @classmethod
    def _topic_prefix_is_that_of_the_process(cls, given: str) -> str:
        if given != names.TOPIC_PREFIX:
            raise ValueError(
                f"TOPIC_PREFIX is read once, when fairlane is imported, and was {names.TOPIC_PREFIX!r} then: it cannot "
                f"be {given!r} now"
            )
        return given

    @model_validator(mode="after")
    def _sasl_is_complete(self) -> "KafkaSettings":
        if self.kafka_security_protocol.startswith("SASL"):
            for name in ("kafka_sasl_mechanism", "kafka_sasl_username", "kafka_sasl_password"):
                if getattr(self, name) is None:
                    raise ValueError(
                        f"{name.upper()} is needed with KAFKA_SECURITY_PROTOCOL={self.kafka_security_protocol}"
                    )
        return self

    @model_validator(mode="after")
    def _credentials_are_followed(self) -> "KafkaSettings":
        first = self.kafka_credentials()
        if self.kafka_credentials_file is not None and first is not None:
            self._credentials_file = CredentialsFile(self.kafka_credentials_file, first, self.kafka_sasl_mechanism)
        return self

    def kafka_credentials(self) -> KafkaCredentials | None:
        """User and password for a connection that is opened now; None without both."""
        if self._credentials_file is not None:
            return self._credentials_file.now()
        if self.kafka_sasl_username is None or self.kafka_sasl_password is None:
            return None
        return KafkaCredentials(self.kafka_sasl_username, present(self.kafka_sasl_password.get_secret_value()))

    @property
    def kafka_credentials_may_change(self) -> bool:
        """Whether ``kafka_credentials`` returns what a file holds."""
        password = self.kafka_sasl_password
        return self._credentials_file is not None or (
            password is not None and isinstance(password.get_secret_value(), FileText)
        )


class Settings(KafkaSettings):
    """Settings of the services and the command line. Secrets are ``SecretStr`` and never printed."""

    consumer_group_protocol: Literal["consumer", "classic"] = "consumer"
    """Group protocol of the inference consumers and the gateways; classic for brokers before 4.0."""
    postgres_dsn: SecretStr = SecretStr("postgresql://127.0.0.1:5432/fairlane")
    """Postgres connection of this process, as the role of its service."""
    postgres_owner_dsn: SecretStr | None = None
    """Postgres connection of the role that owns the tables; used only by `fairlane db upgrade`, `keys`, `users`,
    `audit` and `tenants apply`."""
    postgres_role_prefix: str = Field("fairlane", pattern=r"^[a-z_][a-z0-9_]{0,47}$")
    """Beginning of the names of the services' roles in Postgres (PREFIX_gateway), to which `fairlane db upgrade` gives
    their rights."""
    redis_url: SecretStr | None = None
    """Redis for state, `rediss://USER:PASSWORD@HOST:PORT/0?ssl_ca_certs=FILE`, or `redis://` without TLS: seen request
    ids, idempotency keys, quotas and limits. Needs `noeviction` and an append-only file. Unset: duplicates run again
    and each process enforces limits on its own."""
    redis_cache_url: SecretStr | None = None
    """Redis for caches: a second server with its own memory limit; unset: nothing is cached in Redis."""
    instance_id: str = Field("local-1", pattern=r"^[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}$")
    """Stable name of this instance; part of its transactional.id."""
    metrics_port: int = Field(0, ge=0, le=65535)
    """Port of /health, /health/ready and /metrics; 0 picks a free one."""
    metrics_host: str = "127.0.0.1"
    """Address that METRICS_PORT is bound to; 0.0.0.0 in a container."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """Lowest level that is logged."""
    log_format: Literal["json", "console"] = "json"
    """json: one object per line; console: for people."""

    kafka_user_passwords: SecretStr | None = None
    """Passwords of users that `fairlane access apply` creates, USER=PASSWORD separated by spaces; users not named get
    random ones."""
    allow_open_kafka: bool = False
    """Serve several tenants although Kafka asks for no password: whoever reaches it can then read and write for all."""
    group_prefix: str = Field("fairlane", pattern=r"^[a-zA-Z0-9.-]+$")
    """Prefix of every consumer group and transactional id of a service, after TOPIC_PREFIX. Letters, digits, dots and
    hyphens."""
    dispatcher_session_timeout_ms: int = Field(6_000, ge=1_000)
    """Session timeout of the dispatchers' consumer group."""
    transaction_timeout_ms: int = Field(10_000, ge=1_000)
    """Longest duration of a Kafka transaction."""
    max_undone_span: int = Field(20_000, ge=10, le=20_000)
    """A partition is paused when this many offsets lie between the first unfinished record and the newest."""
    max_transaction_records: int = Field(512, ge=1, le=10_000)
    """Most source records finished in one transaction."""

    max_input_bytes: int = Field(1_048_576, ge=1)
    """Largest input of one request."""
    max_input_items: int = Field(512, ge=1, le=MOST_INPUT_ITEMS)
    """Most texts, documents or messages in one request."""
    max_timeout_ms: int = Field(86_400_000, ge=1)
    """Longest timeout a request may ask for."""
    max_output_tokens: int = Field(4_096, ge=1)
    """Largest max_tokens a request may ask for."""
    max_queue_size: int = Field(10_000, ge=1)
    """Most online requests queued at a dispatcher, shared by the tenants; more are refused. As many backfill requests
    may be queued beside them; more are not read."""
    max_queue_bytes: int = Field(67_108_864, ge=1)
    """Most bytes of requests queued at a dispatcher, for online and for backfill requests each."""
    max_invalid_records_per_s: int = Field(200, ge=1)
    """Refused or unreadable records per second that a dispatcher reads from one partition while others have records
    too; a larger record counts once per 32 KiB."""
    max_feedback_per_s: int = Field(100, ge=1)
    """Feedback per second that a dispatcher reads from one partition; a larger record counts once per 32 KiB."""
    fairness_policy: Literal["drr", "vtc", "fifo"] = "drr"
    """Scheduling between tenants: deficit round robin by tokens, virtual token counter, or first come first served (the
    baseline of the benchmarks)."""
    admission_safety_margin: float = Field(0.1, ge=0, lt=1)
    """Share of a request's remaining time that its predicted completion must leave unused for admission."""
    latency_target_ms: str = ""
    """Longest predicted time in the queue of an admitted online request by class (high=500,normal=2000), for tenants
    that set none. A class that is not named: a quarter of the request's timeout."""
    target_queue_ms: float = Field(50.0, gt=0)
    """Least work that is dispatched ahead of the consumers, as time at the pool's measured rate."""
    dedupe_ttl_s: int = Field(86_400, ge=1)
    """How long a request id is remembered for deduplication."""
    dedupe_max_ids: int = Field(400_000, ge=1)
    """Most request ids remembered per tenant; requests beyond that run without deduplication."""

    retrieval_budget_ms: int = Field(150, ge=1, le=10_000)
    """Longest a scheduled request waits for its passages and conversation history."""
    retrieval_embedder: Literal["static", "openai", "pool"] = "static"
    """Embedder of documents and queries: a static model in the process, a server with an OpenAI-compatible
    /v1/embeddings, or a model of an embed pool."""
    retrieval_embedder_path: Path = Path("all-minilm-l6-v2-static")
    """Folder of the static embedder, in MODELS_DIR unless absolute."""
    retrieval_embedder_url: str | None = None
    """Base URL of the openai embedder, with its /v1."""
    retrieval_embedder_key: SecretStr | None = None
    """API key of the openai embedder."""
    retrieval_embedder_model: str = "all-minilm-l6-v2"
    """Model of the openai or pool embedder."""
    retrieval_embedder_dimensions: int = Field(384, ge=1, le=4_000)
    """Dimensions of the openai or pool embedder's vectors."""
    retrieval_embedder_tenant: str | None = None
    """Tenant that the pool embedder's requests are charged to."""
    retrieval_max_concurrency: int = Field(8, ge=1, le=100)
    """Most concurrent retrievals; each may use two connections to Postgres."""
    cache_ttl_s: int = Field(300, ge=1)
    """How long passages and answers are cached in Redis."""
    cache_semantic_threshold: float = Field(0.95, gt=0, le=1)
    """Lowest cosine similarity at which two queries share a cached answer."""

    max_batch_size: int = Field(32, ge=1, le=1_024)
    """Most items in one micro-batch."""
    max_batch_tokens: int = Field(16_384, ge=1)
    """Most estimated tokens in one micro-batch."""
    batch_timeout_ms: int = Field(20, ge=0, le=100)
    """How long a micro-batch waits for more items under load."""
    max_prefetch_items: int = Field(256, ge=1)
    """Most items a consumer prefetches per priority."""
    max_prefetch_bytes: int = Field(67_108_864, ge=1)
    """Most bytes a consumer prefetches over all priorities."""
    engine: Literal["real", "simulated"] = "real"
    """simulated: answers without a model, for load tests; every reply says so."""
    simulated_prefill_tokens_per_s: float = Field(20_000.0, gt=0)
    """Speed of the simulated engine's prefill."""
    simulated_decode_tokens_per_s: float = Field(2_000.0, gt=0)
    """Speed of the simulated engine's decode."""
    simulated_batch_ms: float = Field(0.0, ge=0)
    """Fixed time per batch of the simulated engine."""
    simulated_memory_tokens: int = Field(0, ge=0)
    """Most prompt tokens of one item before the simulated engine runs out of memory; 0: no limit."""
    engine_hang_timeout_s: float = Field(60.0, gt=0)
    """An engine without progress for this long is restarted."""
    dead_letter_max_share: float = Field(0.5, gt=0, le=1)
    """A consumer exits when more than this share of its tenants' latest items are dead letters, not counting the tenant
    with the most."""
    device: str = Field("auto", pattern=r"auto|cpu|cuda(:\d+)?")
    """Device of the torch engines; auto: the GPU if there is one."""
    allow_unsafe_weights: bool = False
    """Load model formats that can execute code while they are loaded: TorchScript, pickles (.bin) and exported programs
    with operators outside the allowed list."""
    vllm_python: Path = Path(".venv-vllm/bin/python")
    """Python interpreter of the environment with vLLM; `make vllm` creates it."""
    engine_threads: int = Field(0, ge=0)
    """CPU threads of a torch engine; 0: torch decides."""
    models_dir: Path = Path(".fairlane/models")
    """Folder that paths in models.yaml are relative to."""
    models_cache_dir: Path = Path(".fairlane/models-cache")
    """Folder on a disk of this machine that keeps downloaded models, by digest; its processes share it."""
    models_cache_max_bytes: int = Field(53_687_091_200, ge=1)
    """Most bytes of MODELS_CACHE_DIR. For a new model, what no process uses is removed, used longest ago first."""
    models_cache_timeout_s: float = Field(3_600.0, gt=0)
    """How long a process waits for another one that downloads the same model."""
    engine_memory_max_bytes: int | None = Field(None, ge=1)
    """Most memory of a consumer's engines together; without it, what the machine or the container has left."""
    load_memory_reserve_bytes: int = Field(536_870_912, ge=0)
    """Memory to leave free on the machine and on the GPU when a version is loaded beside others."""
    previous_version_keep_s: float = Field(900.0, ge=0)
    """How long a version that gets no more requests stays loaded, if no other one needs its memory."""
    mlflow_tracking_uri: str | None = Field(None, pattern=r"^https?://[^/@?#]+(/[^?#]*)?$")
    """Address of the MLflow server whose registry models:/ names, http(s)://HOST:PORT."""
    mlflow_tracking_token: SecretStr | None = None
    """Bearer token for MLflow."""
    mlflow_tracking_username: str | None = None
    """User for MLflow, without MLFLOW_TRACKING_TOKEN."""
    mlflow_tracking_password: SecretStr | None = None
    """Password for MLflow."""
    mlflow_tracking_server_cert_path: Path | None = None
    """CA certificates that MLflow's certificate is verified against (PEM); unset: those of the system."""
    models_file: Path = Path("deploy/models.yaml")
    """File that defines the models and the pools that serve them."""
    endpoints_file: Path | None = None
    """File that defines the servers of models that run elsewhere (engines openai-endpoint and v2-endpoint)."""
    tenants_file: Path = Path("deploy/tenants.yaml")
    """File that defines the tenants."""
    prices_file: Path = Path("deploy/prices.yaml")
    """File that defines the prices of the models."""

    guardrail_checks: str = ""
    """Checks whose processes start with a consumer, comma-separated (pii,secrets), also post_processing; others start
    when a request first needs them."""
    guardrail_timeout_ms: int = Field(5_000, ge=10, le=600_000)
    """Longest a question to a check may take, and longest a request waits for the process of a check that is not there;
    then the check has failed. The first load of a check may take a minute."""
    guardrail_memory_bytes: int = Field(1 << 30, ge=1 << 26)
    """Memory that the process of a check may need for texts, beyond what it has when it is loaded (up to 0.9 GB); it is
    ended when it needs more, and the check has failed."""
    guardrail_hold_back_characters: int = Field(200, ge=0, le=100_000)
    """Characters of a streamed answer that are held back while its output is checked."""
    recorder_batch_records: int = Field(1_000, ge=1)
    """Most records in one Postgres transaction of the recorder."""
    # A key that outlives its reply would report the request as in flight.
    results_ttl_s: int = Field(86_400, ge=IDEMPOTENCY_TTL_S)
    """How long replies are kept in Postgres and can be fetched by id; at least DEDUPE_TTL_S and the 24 h of an
    idempotency key."""
    usage_ttl_s: int = Field(7_776_000, ge=86_400)
    """How long usage records are kept in Postgres."""
    usage_daily_ttl_s: int = Field(94_608_000, ge=86_400)
    """How long the daily sums of usage and costs are kept in Postgres; never shorter than USAGE_TTL_S."""
    spend_anomaly_least: int = Field(1, ge=0)
    """What a tenant may spend in an hour, in whole units of the currency, without an alarm about unusual spending."""
    audit_ttl_s: int = Field(7_776_000, ge=86_400)
    """How long audit records (decisions and their reasons) are kept in Postgres."""
    conversation_ttl_s: int = Field(2_592_000, ge=1)
    """How long the turns of a conversation are kept."""
    feedback_ttl_s: int = Field(7_776_000, ge=3_600)
    """How long feedback is kept in Postgres."""
    labels_ttl_s: int = Field(7_776_000, ge=3_600)
    """How long items of the labelling queue are kept, with their labels."""
    labels_max_open: int = Field(1_000, ge=0)
    """Most open items of a tenant in the labelling queue; 0 queues none."""
    labels_sample_rate: float = Field(1.0, ge=0, le=1)
    """Part of the outputs with bad feedback or a guardrail hit that is queued for labelling."""
    drift_block_requests: int = Field(64, ge=0, le=1_024)
    """Requests of each block in which drift is looked for, by tenant and model; 0 looks for none. Another size begins
    all references anew."""
    drift_block_s: int = Field(300, ge=1)
    """Least duration of such a block. With more traffic a block is a sample of it."""
    drift_reference_s: int = Field(86_400, ge=0)
    """Least duration of the reference that blocks are compared with, and of the calibration behind it, which measures
    how far blocks usually are from it. A day has all hours in it."""
    drift_false_alarms_per_month: float = Field(1.0, gt=0, le=1_000)
    """Alarms about drift in 30 days of the whole deployment, on average, without any drift; at most."""
    drift_ttl_s: int = Field(7_776_000, ge=86_400)
    """How long findings of drift are kept in Postgres, and states of streams without requests."""
    admin_host: str = "127.0.0.1"
    """Address that the admin API listens on. Beyond this machine, put a TLS proxy that only administrators reach before
    it."""
    admin_port: int = Field(8_081, ge=0, le=65_535)
    """Port of the admin API; 0 picks a free one."""
    gateway_host: str = "127.0.0.1"
    """Address that the gateway listens on; 0.0.0.0 in a container."""
    gateway_port: int = Field(8_080, ge=0, le=65_535)
    """Port of the gateway; 0 picks a free one."""
    gateway_workers: int = Field(1, ge=1, le=64)
    """Processes that serve the gateway's port. Each has its own bounds and limits; the metrics of worker n (from 0) are
    on METRICS_PORT plus n."""
    gateway_wait_s: float = Field(60.0, gt=0, le=3_600)
    """Longest a call to the gateway waits for its reply; then it returns the request's id."""
    gateway_redis_timeout_s: float = Field(0.25, gt=0, le=60)
    """Longest the gateway waits for Redis; after that it continues without Redis until it answers again. The admin API
    waits as long for a session."""
    gateway_max_body_bytes: int = Field(4_194_304, ge=1_024)
    """Largest body of a call to the gateway, except uploaded files."""
    gateway_max_file_bytes: int = Field(536_870_912, ge=1_024)
    """Largest file that may be uploaded."""
    gateway_body_budget_bytes: int = Field(268_435_456, ge=1_024)
    """Most bytes of request bodies in the memory of one gateway, until their requests are published; beyond it calls
    get 503. Uploaded files do not count: they are streamed to disk."""
    gateway_tenant_body_budget_bytes: int = Field(67_108_864, ge=1_024)
    """The same limit per tenant; beyond it the tenant's calls get 429."""
    gateway_max_in_flight: int = Field(10_000, ge=1)
    """Most requests in flight at one gateway; more are refused."""
    gateway_max_claims: int = Field(50_000, ge=1)
    """Most idempotency keys per tenant in Redis; keys beyond it are known only to the gateway that got them."""
    gateway_max_connections: int = Field(20_000, ge=1)
    """Most open connections to one gateway; more get 503."""
    gateway_max_connections_per_address: int = Field(10_000, ge=1)
    """The same limit per address, or per /64 network of IPv6; behind a load balancer, which is one address, set it to
    GATEWAY_MAX_CONNECTIONS."""
    gateway_trusted_proxies: str = ""
    """Networks of load balancers, comma-separated (10.0.0.0/8,fd00::/8), whose X-Forwarded-For is trusted when failed
    keys are counted per address; empty: none is trusted."""
    gateway_docs: bool = True
    """Whether the gateway serves /docs, /redoc and /openapi.json, without authentication."""
    gateway_key_rate_per_s: float = Field(100.0, gt=0)
    """Sustained calls per second of one key or user."""
    gateway_key_burst: int = Field(1_000, ge=1)
    """Burst of calls of one key or user."""
    gateway_tenant_rate_per_s: float = Field(1_000.0, gt=0)
    """Sustained calls per second of one tenant at one gateway."""
    gateway_tenant_burst: int = Field(10_000, ge=1)
    """Burst of calls of one tenant at one gateway."""
    gateway_failed_keys_per_s: float = Field(10.0, gt=0)
    """Failed keys per second allowed from one address, or one /64 network of IPv6, with a burst of ten times as many;
    beyond it unknown keys get 429 without a look-up. Raise it behind a load balancer that is not in
    GATEWAY_TRUSTED_PROXIES."""
    gateway_key_grace_s: float = Field(60.0, ge=0, le=86_400)
    """How long verified keys and users are accepted while Postgres is unavailable or slow; a key revoked meanwhile is
    accepted as long."""
    jwt_issuer: str | None = None
    """Required issuer (`iss`) of the callers' tokens."""
    jwt_audience: str | None = None
    """Required audience (`aud`) of the callers' tokens."""
    jwt_jwks_url: str | None = None
    """URL of the issuer's signing keys (JWKS); unset: only API keys are accepted."""
    jwt_leeway_s: float = Field(30.0, ge=0, le=300)
    """Tolerated difference between the issuer's clock and ours."""
    oidc_issuer: str | None = None
    """OpenID Connect issuer at which browsers log in, exactly as its tokens name it (`iss`); unset: no login."""
    oidc_client_id: str | None = None
    """Name of the gateway at that issuer."""
    oidc_client_secret: SecretStr | None = None
    """Its secret; unset: a public client."""
    oidc_scopes: str = "openid"
    """Scopes to ask for, separated by spaces."""
    oidc_redirect_url: str | None = None
    """Where the issuer sends browsers back to: the address of the site as browsers know it, and /auth/callback."""
    admin_sessions: bool = False
    """Whether the admin API takes the sessions of browsers that log in at the gateway. Then a person who takes over a
    gateway can administer as those who log in there."""
    session_absolute_s: float = Field(43_200.0, ge=1, le=2_592_000)
    """How long the session of a browser lasts after its login."""
    session_idle_s: float = Field(1_800.0, ge=1, le=2_592_000)
    """How long it lasts without a call."""
    result_cache_ttl_s: int = Field(300, ge=1)
    """How long results are cached in Redis for the gateway."""
    files_url: str = Field(".fairlane/files", validate_default=True, min_length=1)
    """Where the files of offline jobs are stored: a folder, or s3://bucket/prefix."""
    files_spool_dir: Path | None = None
    """Folder for incomplete uploads if FILES_URL is not a folder; needs disk space for 16 files of
    GATEWAY_MAX_FILE_BYTES; unset: the system's temporary folder."""
    files_max_count: int = Field(10_000, ge=0)
    """Most uploaded files per tenant."""
    files_max_bytes: int = Field(10_737_418_240, ge=0)
    """Most bytes of uploaded files per tenant."""
    files_ttl_s: int = Field(2_592_000, ge=3_600)
    """How long an uploaded file is kept, and a batch's output from the end of the batch; an upload may ask for less."""
    gateway_max_document_bytes: int = Field(20_971_520, ge=1_024)
    """Largest document that may be uploaded to a collection."""
    documents_max_count: int = Field(10_000, ge=0)
    """Most documents per tenant, those of its collections and those on their way."""
    documents_max_bytes: int = Field(2_147_483_648, ge=0)
    """Most bytes of documents per tenant, as they were uploaded."""
    documents_max_passages: int = Field(1_000_000, ge=0)
    """Most passages per tenant; a document beyond it fails."""
    erasures_max_names: int = Field(250_000, ge=1)
    """Most conversations and requests per tenant that its erasures of the last AUDIT_TTL_S name."""
    ingest_concurrency: int = Field(2, ge=1, le=32)
    """Documents that one process ingests at a time, each with a parser process of its own."""
    ingest_max_parse_s: float = Field(60.0, gt=0, le=3_600)
    """Longest time to read a document and divide it into passages; a document that takes longer fails."""
    ingest_max_parser_bytes: int = Field(1_073_741_824, ge=268_435_456)
    """Most memory of a parser process (address space); a document that needs more fails."""
    drain_timeout_s: float = Field(25.0, gt=0)
    """How long a process may take to finish its work after SIGTERM."""

    @field_validator("files_url")
    @classmethod
    def _files_url_is_whole(cls, given: str) -> str:
        # Jobs store this URL, and their runner may have another working directory.
        return given if "://" in given else str(Path(given).absolute())

    @field_validator("gateway_trusted_proxies")
    @classmethod
    def _trusted_proxies_are_networks(cls, given: str) -> str:
        _networks(given)
        return given

    @property
    def trusted_proxies(self) -> tuple[Network, ...]:
        """The networks in ``gateway_trusted_proxies``."""
        return _networks(self.gateway_trusted_proxies)

    @field_validator("guardrail_checks")
    @classmethod
    def _guardrail_checks_exist(cls, given: str) -> str:
        _checks(given)
        return given

    @property
    def started_checks(self) -> tuple[str, ...]:
        """The names in ``guardrail_checks``."""
        return _checks(self.guardrail_checks)

    @field_validator("latency_target_ms")
    @classmethod
    def _latency_targets_are_classes(cls, given: str) -> str:
        _latency_targets(given)
        return given

    @property
    def latency_targets(self) -> Mapping[str, int]:
        """The targets in ``latency_target_ms``, in milliseconds by class."""
        return _latency_targets(self.latency_target_ms)

    @model_validator(mode="after")
    def _replies_outlive_their_ids(self) -> "Settings":
        if self.results_ttl_s < self.dedupe_ttl_s:
            raise ValueError(
                f"RESULTS_TTL_S is {self.results_ttl_s} and DEDUPE_TTL_S {self.dedupe_ttl_s}: an id that is remembered "
                "longer than its reply would get no answer"
            )
        return self

    @model_validator(mode="after")
    def _tokens_are_checked_whole(self) -> "Settings":
        if self.jwt_jwks_url is not None:
            for name in ("jwt_issuer", "jwt_audience"):
                if getattr(self, name) is None:
                    raise ValueError(f"{name.upper()} is needed with JWT_JWKS_URL")
        return self

    @model_validator(mode="after")
    def _login_is_complete(self) -> "Settings":
        needed = ("oidc_issuer", "oidc_client_id", "oidc_redirect_url")
        given = [name for name in (*needed, "oidc_client_secret") if getattr(self, name) is not None]
        for name in needed:
            if given and name not in given:
                raise ValueError(f"{name.upper()} is needed with {given[0].upper()}")
        if self.admin_sessions and self.oidc_issuer is None:
            raise ValueError("OIDC_ISSUER is needed with ADMIN_SESSIONS")
        if "openid" not in self.oidc_scopes.split():
            raise ValueError("OIDC_SCOPES must have openid")
        return self


def _is_set(variable: str) -> bool:
    return bool(os.environ.get(variable.upper()))


def _content_of(variable: str, file: str) -> FileText:
    """The file's text without the end of its line. Raises ValueError, which quotes nothing of it."""
    try:
        return FileText.of(Path(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{variable}={file} cannot be read: {type(error).__name__}") from None
    except ValueError as error:
        raise ValueError(f"{variable}={file} {error}") from None


def _credentials_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in the file that KAFKA_CREDENTIALS_FILE names, if it is set. Raises ValueError, which quotes nothing
    of it."""
    file = given.get("kafka_credentials_file")
    if not file:
        return {"kafka_credentials_file": None} if file == "" else {}
    for name in ("kafka_sasl_username", "kafka_sasl_password"):
        if given.get(name) is not None:
            raise ValueError(f"{name.upper()} and KAFKA_CREDENTIALS_FILE are both set: leave one of them out")
    try:
        found = KafkaCredentials.read(Path(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"KAFKA_CREDENTIALS_FILE={file} cannot be read: {type(error).__name__}") from None
    except ValueError as error:
        raise ValueError(f"KAFKA_CREDENTIALS_FILE={file}: {error}") from None
    mechanism = given.get("kafka_sasl_mechanism") or found.mechanism
    if found.mechanism not in (None, mechanism):
        raise ValueError(f"KAFKA_SASL_MECHANISM={mechanism} is not the one in KAFKA_CREDENTIALS_FILE={file}")
    return {
        "kafka_sasl_mechanism": mechanism,
        "kafka_sasl_username": found.username,
        "kafka_sasl_password": SecretStr(found.password),
    }


def _latency_targets(given: str) -> dict[str, int]:
    """Raises ValueError for anything but CLASS=MILLISECONDS, comma-separated."""
    targets: dict[str, int] = {}
    for part in filter(None, map(str.strip, given.split(","))):
        name, separator, target_ms = part.partition("=")
        if not separator or name not in tuple(Priority) or not target_ms.isdecimal() or int(target_ms) < 1:
            raise ValueError(f"{part!r} is not CLASS=MILLISECONDS, with a class of {', '.join(Priority)}")
        targets[name] = int(target_ms)
    return targets


def _checks(given: str) -> tuple[str, ...]:
    """Raises ValueError for a name that is no check's."""
    names = tuple(filter(None, map(str.strip, given.split(","))))
    for name in names:
        if name not in tuple(GuardrailCheck):
            raise ValueError(f"unknown check {name!r}; known: {', '.join(GuardrailCheck)}")
    return names


def _networks(given: str) -> tuple[Network, ...]:
    return tuple(ip_network(part.strip()) for part in given.split(",") if part.strip())

"""Layout of a stack: paths of the project and of a data directory, and the addresses of the parts."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fairlane.settings import KafkaSettings
from fairlane_server.access.credentials import read_credentials
from fairlane_server.postgres.rights import PostgresRole
from fairlane_server.private_files import write_private
from fairlane_server.redis.credentials import read_redis_urls


class StackError(Exception):
    """The stack cannot start or go on; the message says why and what to do."""


class AlreadyRunningError(StackError):
    """Another supervisor holds this data directory."""


PROJECT_ROOT = Path(__file__).resolve().parents[2]
DEFAULT_DATA_DIR = PROJECT_ROOT / ".fairlane"
KAFKA_LIBS_DIR = DEFAULT_DATA_DIR / "kafka" / "libs"
"""The jars are resolved once per checkout and shared by every data directory."""


class DataDir:
    """The folders of one stack. Two stacks never share a data directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.kafka = root / "kafka"
        self.postgres = root / "postgres"
        """The cluster and the file with its passwords."""
        self.logs = root / "logs"
        """One `NAME.log` per process."""
        self.certificates = root / "certificates"
        self.credentials = root / "credentials"
        """One `USER.env` per user of a secured Kafka, one `USER.redis.env` per user of a secured Redis."""
        self.env = root / "env"
        """Environments for a shell, each with the addresses and passwords that one kind of user needs."""
        self.files = root / "files"
        """Files of offline jobs, a folder for each tenant."""
        self.run = root / "run"
        self.lock_file = self.run / "lock"
        """Held with flock by the supervisor for as long as it lives."""
        self.ports_file = self.run / "ports.json"
        """The ports of the last run, taken again when they are still free."""
        self.endpoints_file = self.run / "stack.json"
        """Mode 0600: it holds passwords."""
        self.processes_file = self.run / "processes.json"

    def create(self) -> None:
        """Create the folders that belong to the stack as a whole; each part creates its own."""
        for folder in (self.root, self.logs, self.run):
            folder.mkdir(parents=True, exist_ok=True)


def in_wheel(server: str, package: str, module: str, path: str) -> Path:
    """A file of a package that brings a server. Raises StackError: the package is not installed."""
    # Found without importing it: the import of Postgres' looks for a runtime folder and warns where there is none.
    found = find_spec(module)
    if found is None or found.origin is None:
        raise StackError(f"{server} is not installed: run `make install` (package {package})")
    file = Path(found.origin).parent / path
    if not file.exists():
        raise StackError(f"the package {package} has no {file}: reinstall it")
    return file


POSTGRES_VARIABLE = "POSTGRES_DSN"
POSTGRES_OWNER_VARIABLE = "POSTGRES_OWNER_DSN"
POSTGRES_VARIABLES: Mapping[PostgresRole, str] = {role: f"POSTGRES_{role.name}_DSN" for role in PostgresRole}
"""Of an external Postgres, where its services have roles of their own: what each gets as POSTGRES_VARIABLE."""
_OF_SERVICES = ("kafka_bootstrap_servers", "allow_open_kafka", "files_url")


@dataclass(frozen=True, slots=True, repr=False)
class Endpoints:
    """The addresses of the parts; empty for a part that the stack does not have. Shown with passwords masked.

    The variable of each is its name in capitals, and POSTGRES_VARIABLE that of the DSN of the process's own role.

    Attributes:
        postgres_owner_dsn: for migrations: the role that owns the tables.
        postgres_dsns: by role.
        gateway_url: for its callers; no service needs it.
        admin_url: of the admin API, likewise.
        files_url: of the gateway's and the jobs' files: an absolute path, or `s3://bucket/prefix`.
        kafka_ca_file: certificates that a secured Kafka's are verified against; empty: it is not secured.
        kafka_credentials: folder with a file `USER.env` for each user of a secured Kafka.
        allow_open_kafka: "true" for a Kafka of the stack's own that is not secured.
        redis_credentials: folder with a file `USER.redis.env` for each user of a secured Redis; empty: it is not
            secured. ``redis_url`` and ``redis_cache_url`` are the operator's then.
    """

    kafka_bootstrap_servers: str = ""
    postgres_owner_dsn: str = ""
    redis_url: str = ""
    gateway_url: str = ""
    files_url: str = ""
    redis_cache_url: str = ""
    postgres_dsns: Mapping[PostgresRole, str] = field(default_factory=dict)
    kafka_ca_file: str = ""
    kafka_credentials: str = ""
    allow_open_kafka: str = ""
    redis_credentials: str = ""
    admin_url: str = ""

    def kafka_env(self, user: str) -> dict[str, str]:
        """The environment of a process that acts as this user of Kafka; no more than the address where Kafka is not
        secured. Raises StackError: the user has no credentials."""
        address = self._variables("kafka_bootstrap_servers")
        if not self.kafka_ca_file:
            return address
        security = {"KAFKA_SECURITY_PROTOCOL": "SASL_SSL", "KAFKA_SSL_CA_FILE": self.kafka_ca_file}
        try:
            return {**address, **security, **read_credentials(Path(self.kafka_credentials), user)}
        except (OSError, ValueError) as error:
            raise StackError(f"no credentials of {user}: {error}") from None

    def kafka_settings(self, user: str) -> KafkaSettings:
        """The same for a client in this process."""
        return KafkaSettings.model_validate({name.lower(): value for name, value in self.kafka_env(user).items()})

    def redis_env(self, user: str) -> dict[str, str]:
        """The environment of a process that acts as this user of Redis, with the servers that it has rights on; every
        server where Redis is not secured. Raises StackError: the user's credentials cannot be read."""
        if not self.redis_credentials:
            return self._variables("redis_url", "redis_cache_url")
        try:
            return read_redis_urls(Path(self.redis_credentials), user) if user else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise StackError(f"no credentials of {user}: {error}") from None

    def postgres_dsn(self, role: PostgresRole) -> str:
        """The DSN of a role; empty if the stack has no Postgres."""
        return self.postgres_dsns.get(role, "")

    def postgres_env(self, role: PostgresRole | None) -> dict[str, str]:
        """The environment of a process that acts as this role of Postgres; nothing for one that uses no Postgres."""
        dsn = "" if role is None else self.postgres_dsn(role)
        return {POSTGRES_VARIABLE: dsn} if dsn else {}

    @property
    def service_env(self) -> dict[str, str]:
        """The environment of every service; those that use Postgres or a secured Redis get more."""
        return self._variables(*_OF_SERVICES) | self.redis_env("")

    def operator_env(self, user: str) -> dict[str, str]:
        """The environment of the command line of operators: this user of Kafka, the operator's of the others."""
        on_redis = self._variables("redis_url", "redis_cache_url")
        return {**self.service_env, **on_redis, **self.postgres_env(PostgresRole.OPERATOR), **self.kafka_env(user)}

    @property
    def owner_env(self) -> dict[str, str]:
        """The environment of commands that act as the owner of the tables: `db upgrade`, `keys`, `users`, `audit`."""
        return self._variables("postgres_owner_dsn")

    def _variables(self, *names: str) -> dict[str, str]:
        return {name.upper(): address for name in names if (address := getattr(self, name))}

    def masked(self) -> dict[str, object]:
        """The addresses by name, with passwords masked, as they may be printed."""
        return {name: _masked(value) for name, value in asdict(self).items()}

    def __repr__(self) -> str:
        """Passwords masked."""
        return f"Endpoints({', '.join(f'{name}={value!r}' for name, value in self.masked().items())})"

    def save(self, file: Path) -> None:
        """Write them, passwords included, to a file that only its owner can read."""
        write_private(file, json.dumps(asdict(self), indent=2))

    @classmethod
    def load(cls, file: Path) -> "Endpoints | None":
        """Read what `save` wrote; None if there is nothing that can be read."""
        try:
            raw: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            dsns = {PostgresRole(role): dsn for role, dsn in raw.pop("postgres_dsns", {}).items()}
            return cls(**raw, postgres_dsns=dsns)
        except (OSError, ValueError, TypeError):
            return None


def _masked(value: str | Mapping[str, str]) -> str | dict[str, str]:
    return mask(value) if isinstance(value, str) else {name: mask(address) for name, address in value.items()}


def mask(address: str) -> str:
    """`address` with its password replaced by asterisks, in a URL as well as in `key=value` form."""
    in_url = re.sub(r"(://[^:/@\s]*):[^/\s]*@", r"\1:***@", address)
    return re.sub(r"(password=)('[^']*'|\S+)", r"\1***", in_url)

"""Layout of a stack: paths of the project and of a data directory, and the addresses of the parts."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path


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
        self.redis = root / "redis"
        self.redis_cache = root / "redis-cache"
        self.logs = root / "logs"
        """One `NAME.log` per process."""
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


def write_private(path: Path, text: str) -> None:
    """Write `text` to `path` in one step, readable by its owner only."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    draft.replace(path)


KAFKA_VARIABLE = "KAFKA_BOOTSTRAP_SERVERS"
POSTGRES_VARIABLE = "POSTGRES_DSN"
POSTGRES_OWNER_VARIABLE = "POSTGRES_OWNER_DSN"
POSTGRES_GATEWAY_VARIABLE = "POSTGRES_GATEWAY_DSN"
"""Of an external Postgres: what the gateway gets as `POSTGRES_DSN`."""
REDIS_VARIABLE = "REDIS_URL"
REDIS_CACHE_VARIABLE = "REDIS_CACHE_URL"
FILES_VARIABLE = "FILES_URL"


@dataclass(frozen=True, slots=True, repr=False)
class Endpoints:
    """The addresses of the parts; empty for a part that the stack does not have. Shown with passwords masked.

    Attributes:
        postgres_owner_dsn: for migrations: the role that owns the tables.
        postgres_gateway_dsn: for the gateway, a role with fewer rights than the services'; empty: as the services.
        gateway_url: for its callers; no service needs it.
        files_url: of the gateway's and the jobs' files: an absolute path, or `s3://bucket/prefix`.
    """

    kafka_bootstrap_servers: str = ""
    postgres_dsn: str = ""
    postgres_owner_dsn: str = ""
    redis_url: str = ""
    gateway_url: str = ""
    files_url: str = ""
    redis_cache_url: str = ""
    postgres_gateway_dsn: str = ""

    @property
    def service_env(self) -> dict[str, str]:
        """The environment of a service; the owner of the tables is not in it."""
        variables = {
            KAFKA_VARIABLE: self.kafka_bootstrap_servers,
            POSTGRES_VARIABLE: self.postgres_dsn,
            REDIS_VARIABLE: self.redis_url,
            REDIS_CACHE_VARIABLE: self.redis_cache_url,
            FILES_VARIABLE: self.files_url,
        }
        return {name: value for name, value in variables.items() if value}

    @property
    def gateway_env(self) -> dict[str, str]:
        """The environment of the gateway."""
        own = {POSTGRES_VARIABLE: self.postgres_gateway_dsn} if self.postgres_gateway_dsn else {}
        return self.service_env | own

    @property
    def migration_env(self) -> dict[str, str]:
        """The environment of `fairlane db upgrade`: a service's, and the owner of the tables."""
        owner = {POSTGRES_OWNER_VARIABLE: self.postgres_owner_dsn} if self.postgres_owner_dsn else {}
        return self.service_env | owner

    def masked(self) -> dict[str, str]:
        """The addresses by name, with passwords masked, as they may be printed."""
        return {name: mask(value) for name, value in asdict(self).items()}

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
            raw: Mapping[str, str] = json.loads(file.read_text(encoding="utf-8"))
            return cls(**raw)
        except (OSError, ValueError, TypeError):
            return None


def mask(address: str) -> str:
    """`address` with its password replaced by asterisks, in a URL as well as in `key=value` form."""
    in_url = re.sub(r"(://[^:/@\s]*):[^/\s]*@", r"\1:***@", address)
    return re.sub(r"(password=)('[^']*'|\S+)", r"\1***", in_url)

"""Paths of the project and of a data directory."""

import os
from dataclasses import dataclass
from pathlib import Path


class StackError(Exception):
    """The stack cannot start or go on; the message says why and what to do."""


class AlreadyRunningError(StackError):
    """Another supervisor holds this data directory."""


PROJECT_ROOT = Path(__file__).resolve().parents[2]
DEFAULT_DATA_DIR = PROJECT_ROOT / ".fairlane"
KAFKA_LIBS_DIR = DEFAULT_DATA_DIR / "kafka" / "libs"
"""The jars are resolved once per checkout and shared by every data directory."""


@dataclass(frozen=True, slots=True)
class DataDir:
    """The folders of one stack. Two stacks never share a data directory."""

    root: Path

    @property
    def kafka(self) -> Path:
        """Kafka's properties and its log segments."""
        return self.root / "kafka"

    @property
    def postgres(self) -> Path:
        """Postgres' cluster and the file with its passwords."""
        return self.root / "postgres"

    @property
    def redis(self) -> Path:
        """The append-only file of the Redis with state."""
        return self.root / "redis"

    @property
    def redis_cache(self) -> Path:
        """The working directory of the Redis with caches, which keeps nothing on disk."""
        return self.root / "redis-cache"

    @property
    def logs(self) -> Path:
        """One `NAME.log` per process."""
        return self.root / "logs"

    @property
    def files(self) -> Path:
        """Files of offline jobs, a folder for each tenant."""
        return self.root / "files"

    @property
    def run(self) -> Path:
        """What a running stack says about itself: lock, ports, endpoints, processes."""
        return self.root / "run"

    @property
    def lock_file(self) -> Path:
        """Held with flock by the supervisor for as long as it lives."""
        return self.run / "lock"

    @property
    def ports_file(self) -> Path:
        """The ports of the last run, taken again when they are still free."""
        return self.run / "ports.json"

    @property
    def endpoints_file(self) -> Path:
        """How to reach each part (mode 0600: it holds passwords)."""
        return self.run / "stack.json"

    @property
    def processes_file(self) -> Path:
        """Process ids with their start times."""
        return self.run / "processes.json"

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

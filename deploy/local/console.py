"""Terminal output of the stack: events, logs with a coloured prefix, tables, and the first screen."""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import yaml
from rich.console import Console as RichConsole
from rich.table import Table

from deploy.local.endpoints import Endpoints, mask
from deploy.local.layout import PROJECT_ROOT, DataDir, StackError, write_private
from deploy.local.services import MODELS_FILE
from deploy.local.status import PartStatus, StackStatus
from fairlane_server.api_keys.key_store import ApiKeys, ApiKeysError

COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
"""ANSI foreground colours of the prefixes, in the order in which processes first say something."""

RESET = "\033[0m"


class Console:
    """Writes whole lines, from any thread.

    Args:
        out: where to write.
        follow: whether lines of logs are shown at all.
    """

    def __init__(self, out: TextIO | None = None, *, follow: bool = True) -> None:
        self._out = out or sys.stdout
        self._colour_of: dict[str, int] = {}
        self._in_colour = self._out.isatty()
        self._follow = follow
        self._following = False
        self._lock = threading.Lock()

    def report(self, name: str, message: str) -> None:
        """Show what happened to a process."""
        first, *rest = message.splitlines() or [""]
        self._write(name, first if not self._in_colour else f"\033[1m{first}{RESET}")
        for line in rest:
            self._write(name, line)

    def log_line(self, name: str, line: str) -> None:
        """Show a line of a log, once `begin_to_follow` was called; before that the logs only hold how servers start."""
        if self._following:
            self._write(name, line)

    def begin_to_follow(self) -> None:
        """Show the logs from now on, if they are to be shown."""
        self._following = self._follow

    def _write(self, name: str, text: str) -> None:
        with self._lock:
            colour = self._colour_of.setdefault(name, COLOURS[len(self._colour_of) % len(COLOURS)])
            prefix = f"{name:<20} | "
            shown = f"\033[{colour}m{prefix}{RESET}{text}" if self._in_colour else f"{prefix}{text}"
            self._out.write(shown + "\n")
            self._out.flush()


def print_status(status: StackStatus) -> None:
    """Print the parts of a stack as a table."""
    if not status.running:
        print(f"no stack is running in {status.data_dir}")
        return
    table = Table(title=f"Fairlane in {status.data_dir}, supervisor {status.supervisor_pid}", title_justify="left")
    for column in ("part", "state", "pid", "deaths", "address", "health"):
        table.add_column(column, overflow="fold")
    for part in status.parts:
        table.add_row(*_row(part))
    RichConsole().print(table)


def _row(part: PartStatus) -> Sequence[str]:
    health = "-" if part.problem is None and not part.checked else (part.problem or "ok")
    pid = "" if part.pid is None else str(part.pid)
    return (part.name, part.state, pid, str(part.deaths), part.address, health)


KEY_FILE = "demo-key"
"""In the data directory, readable by its owner only."""
KEY_NAME = "demo (make up)"
TENANTS_FILE = PROJECT_ROOT / "deploy" / "tenants.yaml"


def demo_key(data_dir: DataDir, owner_dsn: str) -> tuple[str, bool]:
    """The key of the demo's tenant, and whether it was made now. One that was revoked or has no row is replaced.

    Raises:
        StackError: Postgres refuses to make one.
    """
    file = data_dir.root / KEY_FILE
    tenant = demo_tenant()
    try:
        with ApiKeys(owner_dsn) as keys:
            if file.exists():
                text = file.read_text(encoding="utf-8").strip()
                if any(key.key_id in text for key in keys.list(tenant)):
                    return text, False
            text = keys.create(tenant, KEY_NAME).text
    except ApiKeysError as error:
        raise StackError(f"no key for {tenant}: {error}") from None
    write_private(file, text)
    return text, True


def demo_tenant() -> str:
    """The first tenant of deploy/tenants.yaml."""
    return str(yaml.safe_load(TENANTS_FILE.read_text(encoding="utf-8"))["tenants"][0]["tenant"])


def demo_model() -> str:
    """The first model of deploy/models.yaml that generates text."""
    models = yaml.safe_load(MODELS_FILE.read_text(encoding="utf-8"))["models"]
    return next(str(model["model"]) for model in models if "generate" in model["tasks"])


def addresses(endpoints: Endpoints) -> str:
    """One line per part, passwords masked."""
    lines = {
        "gateway": endpoints.gateway_url,
        "kafka": endpoints.kafka_bootstrap_servers,
        "postgres": mask(endpoints.postgres_dsn),
        "redis": mask(endpoints.redis_url),
        "cache": mask(endpoints.redis_cache_url),
        "files": endpoints.files_url,
    }
    return "\n".join(f"  {name:<9} {address}" for name, address in lines.items() if address)


def first_requests(endpoints: Endpoints, key_file: Path, new_key: str | None) -> str:
    """A call of the gateway with curl, and the same request over Kafka in Python; both run as they stand.

    Args:
        endpoints: of the running stack.
        key_file: the file that holds the key.
        new_key: the key, if it was made now: it is shown this once.
    """
    tenant, model = demo_tenant(), demo_model()
    shown = f"Key of tenant {tenant}, shown once:\n  {new_key}\n" if new_key else ""
    return f"""{shown}It is in {key_file}. A first request:

  curl -s {endpoints.gateway_url}/v1/chat/completions \\
    -H "Authorization: Bearer $(cat {key_file})" \\
    -H "Content-Type: application/json" \\
    -d '{{"model": "{model}", "max_tokens": 16,
         "messages": [{{"role": "user", "content": "Say hello."}}]}}'

The same over Kafka, with {PROJECT_ROOT / ".venv/bin/python"}:

  from fairlane import Client
  with Client("{tenant}", bootstrap_servers="{endpoints.kafka_bootstrap_servers}") as client:
      model = "{model}"
      handle = client.submit(model=model, prompt="Hello", max_tokens=16)
      print(handle.result(60).output.text)
"""

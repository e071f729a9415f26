"""docker-compose.yml as the tests see it: variables filled in, services by kind."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from deploy.local.layout import PROJECT_ROOT
from deploy.settings_docs import COMPOSE_FILE, COMPOSE_VARIABLE

OURS = "fairlane"
PASSWORDS = {
    "KAFKA_ADMIN_PASSWORD": "admin20",
    "KAFKA_REGISTRY_PASSWORD": "registry21",
    "KAFKA_DISPATCHER_PASSWORD": "dispatcher22",
    "KAFKA_RECORDER_PASSWORD": "recorder23",
    "KAFKA_GATEWAY_PASSWORD": "gateway24",
    "KAFKA_BACKFILL_PASSWORD": "backfill25",
    "KAFKA_ADMIN_API_PASSWORD": "api29",
    "KAFKA_OPERATOR_PASSWORD": "operator26",
    "KAFKA_VIEWER_PASSWORD": "viewer30",
    "KAFKA_GENERATE_PASSWORD": "generate27",
    "KAFKA_ENCODE_PASSWORD": "encode28",
    "POSTGRES_ADMIN_PASSWORD": "admin1",
    "POSTGRES_OWNER_PASSWORD": "owner2",
    "POSTGRES_DISPATCHER_PASSWORD": "dispatcher3",
    "POSTGRES_RECORDER_PASSWORD": "recorder6",
    "POSTGRES_GATEWAY_PASSWORD": "gateway5",
    "POSTGRES_BACKFILL_PASSWORD": "backfill7",
    "POSTGRES_INGEST_PASSWORD": "ingest13",
    "POSTGRES_OPERATOR_PASSWORD": "operator8",
    "POSTGRES_ADMIN_API_PASSWORD": "api13",
    "REDIS_DISPATCHER_PASSWORD": "dispatcher9",
    "REDIS_GATEWAY_PASSWORD": "gateway10",
    "REDIS_CONSUMER_PASSWORD": "consumer11",
    "REDIS_SESSIONS_PASSWORD": "sessions13",
    "REDIS_ADMIN_API_PASSWORD": "api14",
    "REDIS_OPERATOR_PASSWORD": "operator12",
}
NEEDED = {**PASSWORDS, "TORCH_INDEX_URL": "https://index.test/cpu"}
"""The variables without which it does not start."""


@dataclass(frozen=True, slots=True)
class ComposeService:
    """One service.

    Attributes:
        name: its name, and its host name in the network.
        raw: what the file says, with every variable filled in.
    """

    name: str
    raw: Mapping[str, Any]

    @property
    def image(self) -> str:
        return str(self.raw["image"])

    @property
    def is_ours(self) -> bool:
        """Whether it runs an image that is built from the Dockerfile."""
        return self.image.split(":")[0].startswith(OURS)

    @property
    def is_optional(self) -> bool:
        """Whether it runs with a profile alone."""
        return bool(self.raw.get("profiles"))

    @property
    def is_one_shot(self) -> bool:
        """Whether it ends by itself."""
        return bool(self.raw["restart"] == "no")

    @property
    def environment(self) -> Mapping[str, str]:
        """What it gets a value for; what is only handed on is not in it."""
        return {name: value for name, value in self.raw.get("environment", {}).items() if value is not None}

    @property
    def handed_on(self) -> frozenset[str]:
        """What it gets from .env or the shell, if it is set there."""
        return frozenset(name for name, value in self.raw.get("environment", {}).items() if value is None)

    @property
    def published(self) -> tuple[tuple[str, int, int], ...]:
        """Host address, port on the host, port in the container."""
        ports = (port.rsplit(":", 2) for port in self.raw.get("ports", ()))
        return tuple((host, int(outside), int(inside)) for host, outside, inside in ports)

    @property
    def mounts(self) -> Mapping[str, str]:
        """What is mounted, volume or file, by its path in the container."""
        pairs = (mount.split(":") for mount in self.raw.get("volumes", ()))
        return {target: source for source, target, *_ in pairs}

    @property
    def python_commands(self) -> tuple[tuple[str, ...], ...]:
        """What follows `python` in each command that it runs, in order."""
        command = self.raw["command"]
        if command[0] == "python":
            return (tuple(command[1:]),)
        assert command[:2] == ["sh", "-ec"], f"{self.name}: a script must stop at the first command that fails"
        lines = [line.split() for line in command[2].splitlines()]
        assert all(line[0] == "python" for line in lines)
        return tuple(tuple(line[1:]) for line in lines)


@cache
def compose() -> Mapping[str, Any]:
    """The whole file, with NEEDED for the variables that it needs and its own defaults for the others."""
    text = COMPOSE_FILE.read_text(encoding="utf-8")
    filled = COMPOSE_VARIABLE.sub(_value, text)
    assert not re.search(r"(?<!\$)\$(?!\$|\{)\w", filled.replace("$$", "")), "variables are written ${NAME...}"
    loaded: dict[str, Any] = yaml.safe_load(filled.replace("$$", "$"))
    return loaded


@cache
def services() -> Mapping[str, ComposeService]:
    """Every service by name."""
    return {name: ComposeService(name, raw) for name, raw in compose()["services"].items()}


def our_services() -> tuple[ComposeService, ...]:
    """The processes of the pipeline, those of a profile included."""
    return tuple(service for service in services().values() if service.is_ours and not service.is_one_shot)


def default_ones() -> tuple[ComposeService, ...]:
    """The processes of the pipeline that run without a profile."""
    return tuple(service for service in our_services() if not service.is_optional)


def dockerfile() -> tuple[tuple[str, str], ...]:
    """The instructions of the Dockerfile: name, and arguments on one line."""
    text = (PROJECT_ROOT / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    lines = (line.strip().partition(" ") for line in text.splitlines() if line.strip())
    return tuple((name, " ".join(arguments.split())) for name, _, arguments in lines)


def _value(match: re.Match[str]) -> str:
    name, operator, default = match.groups()
    return default if operator == "-" else NEEDED[name]

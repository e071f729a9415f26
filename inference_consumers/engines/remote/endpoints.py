"""The remote endpoints of a model's version: values that travel in its EngineSpec. No key is in them, only its file."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from urllib.parse import urlsplit

import msgspec

ANY_VERSION = ""


class BalancingPolicy(StrEnum):
    """How an endpoint is chosen among those that can take an item."""

    LEAST_OUTSTANDING = "least_outstanding"
    WEIGHTED_ROUND_ROBIN = "weighted_round_robin"


class ModelEndpoint(msgspec.Struct, frozen=True):
    """One server. ``url`` has no user, no query and no slash at its end; ``/v1/...`` or ``/v2/...`` is appended."""

    url: str
    weight: int = 1
    max_concurrent: int = 32
    """Items that it gets at a time."""
    served_name: str | None = None
    """The model's name at this server; None: as in models.yaml."""
    served_version: str | None = None
    """v2: the version at this server; None: its choice."""
    api_key_file: str | None = None
    ca_file: str | None = None
    """CA certificates (PEM) that its certificate is verified against; None: those of the machine."""

    @property
    def label(self) -> str:
        """Host and port: the endpoint's name in metrics and errors."""
        parts = urlsplit(self.url)
        return f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


class ModelEndpoints(msgspec.Struct, frozen=True):
    """The endpoints of one version, or of all versions of a model that have no entry of their own."""

    model: str
    version: str
    endpoints: tuple[ModelEndpoint, ...]
    policy: BalancingPolicy = BalancingPolicy.LEAST_OUTSTANDING
    connect_timeout_s: float = 2.0
    idle_timeout_s: float = 60.0
    """Longest time between two parts of an answer, and before the first one."""
    total_timeout_s: float = 600.0
    """Longest time of one try of an item."""
    wait_s: float = 10.0
    """How long an item waits while no endpoint is healthy."""
    health_interval_s: float = 5.0
    max_rows: int = 64
    """Most texts, or pairs of query and document, in one call."""
    tensors: Mapping[str, str] = {}
    """v2: names of tensors at the server, by ours; those that are missing are as ours."""


def endpoints_of(entries: Sequence[ModelEndpoints], model: str, version: str) -> ModelEndpoints | None:
    """The entry of a version: its own, or that of all versions."""
    by_version = {entry.version: entry for entry in entries if entry.model == model}
    return by_version.get(version) or by_version.get(ANY_VERSION)

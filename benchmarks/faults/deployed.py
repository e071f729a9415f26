"""Which pipeline on a broker a fault run is about: its tenants, models and groups."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fairlane import names
from fairlane.codec import Codec
from fairlane.records import ModelVersion
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings


class Deployed(Protocol):
    """Whatever knows them. All models are of one pool."""

    @property
    def settings(self) -> KafkaSettings: ...

    @property
    def codec(self) -> Codec: ...

    @property
    def tenants(self) -> Collection[str]:
        """By their whole names."""

    @property
    def models(self) -> Sequence[ModelVersion]: ...

    @property
    def group_prefix(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Deployment:
    """A pipeline described by its values."""

    settings: KafkaSettings
    tenants: tuple[str, ...]
    models: tuple[ModelVersion, ...]
    group_prefix: str
    codec: Codec = field(default_factory=default_codec)


def pool_of(deployed: Deployed) -> str:
    """Its one pool. Raises ValueError when there are more: one group must settle all work items."""
    (pool,) = {model.pool for model in deployed.models}
    return pool


def model_for(deployed: Deployed, task: str) -> ModelVersion:
    """The first that does this task."""
    return next(model for model in deployed.models if task in model.tasks)


def dispatcher_group(deployed: Deployed) -> str:
    """The group that settles requests."""
    return names.dispatcher_group(deployed.group_prefix)


def work_group(deployed: Deployed) -> str:
    """The group that settles work items."""
    return names.pool_group(deployed.group_prefix, pool_of(deployed))


def source_topics(deployed: Deployed) -> list[str]:
    """Topics that its dispatchers read: requests, offline requests, and work handed back by consumers."""
    return [
        *(names.requests_topic(tenant) for tenant in deployed.tenants),
        *(names.backfill_topic(tenant) for tenant in deployed.tenants),
        names.returned_topic(pool_of(deployed)),
    ]

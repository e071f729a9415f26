"""The pipeline on a broker that a fault run is about: its tenants, models and groups."""

from dataclasses import dataclass, field

from fairlane import names
from fairlane.codec import Codec
from fairlane.records import ModelVersion
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings


@dataclass(frozen=True, slots=True)
class Deployment:
    """``tenants`` are whole names; all models are of one pool, since one group must settle all work items."""

    settings: KafkaSettings
    tenants: tuple[str, ...]
    models: tuple[ModelVersion, ...]
    group_prefix: str
    codec: Codec = field(default_factory=default_codec)

    @property
    def pool(self) -> str:
        """Raises ValueError when there are more."""
        (pool,) = {model.pool for model in self.models}
        return pool

    @property
    def dispatcher_group(self) -> str:
        """The group that settles requests."""
        return names.dispatcher_group(self.group_prefix)

    @property
    def work_group(self) -> str:
        """The group that settles work items."""
        return names.pool_group(self.group_prefix, self.pool)

    @property
    def source_topics(self) -> list[str]:
        """Topics that its dispatchers read: requests, offline requests, and work handed back by consumers."""
        return [
            *(names.requests_topic(tenant) for tenant in self.tenants),
            *(names.backfill_topic(tenant) for tenant in self.tenants),
            names.returned_topic(self.pool),
        ]

    def model_for(self, task: str) -> ModelVersion:
        """The first that does this task."""
        return next(model for model in self.models if task in model.tasks)

"""Valid models of the control topic."""

from fairlane.models import is_model_name
from fairlane.names import is_name
from fairlane.records import ModelVersion
from stream_processors.dispatcher.last_good import LastGood


class ModelRegistry(LastGood[ModelVersion]):
    """Validates models. Pool names become part of topic names; an invalid one would stop the feeds of every
    dispatcher."""

    unusable = "model_unusable"

    def check(self, name: str, spec: ModelVersion) -> None:
        """Raises ValueError for an invalid model or pool name."""
        if spec.model != name or not is_model_name(name):
            raise ValueError(f"model: {spec.model!r} under the key {name!r}")
        for pool in (spec.pool, *spec.dedicated_pools):
            if not is_name(pool):
                raise ValueError(f"pool: {pool!r} cannot name one")

"""A change of one model's route, decided on what is published."""

from collections.abc import Callable

from fairlane.codec import Codec
from fairlane.names import MODEL_CHANGES_ID
from fairlane.records import ModelRoute
from fairlane.settings import KafkaSettings
from fairlane_server.control.exclusive_change import ExclusiveChange
from fairlane_server.control.published_models import model_topic
from fairlane_server.models.catalog import ModelRecord
from fairlane_server.models.changes import Published, moved_versions, route_of


def model_changes(settings: KafkaSettings) -> ExclusiveChange:
    """Changes of the published models: one after another, whoever makes them."""
    return ExclusiveChange(settings, MODEL_CHANGES_ID)


def change_route(
    settings: KafkaSettings, codec: Codec, model: str, decide: Callable[[Published], ModelRoute]
) -> ModelRoute:
    """Publish what ``decide`` makes of the published records, unless it is the route that there is. Returns the route.

    ``decide`` may be called several times; what it raises is passed on. Raises ClusterError.
    """
    made: list[ModelRoute] = []

    def decided(published: Published) -> tuple[list[ModelRecord], tuple[str, ...]]:
        made[:] = [decide(published)]
        if made == [route_of(published, model)]:
            return [], ()
        return [*moved_versions(published, model).values(), *made], ()

    model_changes(settings).make(model_topic(settings, codec), decided)
    return made[0]

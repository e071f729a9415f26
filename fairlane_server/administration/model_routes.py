"""Changes of models for callers of the admin API. The route that a change leaves is also its record: it says who, when
and why, and the recorder keeps every one."""

import re
from collections.abc import Callable, Sequence

from fairlane.codec import Codec
from fairlane.records import ModelRoute, ModelVersion
from fairlane.settings import Settings
from fairlane_server.control.published_models import model_topic
from fairlane_server.control.route_change import change_route, model_changes
from fairlane_server.evaluation.shadow_report import ShadowReport, read_shadow_report
from fairlane_server.evaluation.shadows import NoShadowError
from fairlane_server.models.catalog import ModelRecord
from fairlane_server.models.changes import (
    API,
    Author,
    ImmutableVersionError,
    Published,
    registered,
    route_of,
    versions_of,
)
from fairlane_server.postgres.model_history import RouteChange, read_model_history, read_rollout_decisions
from fairlane_server.rollouts.changes import NoRolloutError
from fairlane_server.store_error import ReportableError


class ModelError(ReportableError):
    """The change was refused; nothing was done."""


class ModelNotFoundError(ModelError):
    """No such model."""


class ModelConflictError(ModelError):
    """The state of the model does not permit it."""


class InvalidModelChangeError(ModelError):
    """The route would not be valid. ``field`` names what is wrong, in the terms of a route."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class ModelChangedError(ModelError):
    """It is not what the caller has read."""


_FIELD = re.compile(r"(?:[a-z_]+(?:\.[\w.-]+)*: )+")
"""Fields of a route, each in the one before it."""


def invalid_change(error: ValueError) -> InvalidModelChangeError:
    """A problem of a route, such as ``rules.canary: arms: ...``, as field and reason. The fields of a rollout,
    and of a shadow, are those of its plan."""
    message = str(error)
    found = _FIELD.match(message)
    fields = "" if found is None else found[0]
    return InvalidModelChangeError(
        message.removeprefix(fields),
        fields.removeprefix("rollout: ").removeprefix("shadow: ").removesuffix(": ").replace(": ", "."),
    )


class ModelRoutes:
    """The published versions and routes. For one thread at a time; changes of all processes follow one another."""

    def __init__(self, settings: Settings, codec: Codec) -> None:
        self._settings = settings
        self._codec = codec
        self._topic = model_topic(settings, codec)

    def read(self) -> dict[str, ModelRecord | None]:
        """The published versions and routes by key; None for one that cannot be read. Raises ClusterError."""
        return self._topic.read()

    def change(self, model: str, revision: int | None, decide: Callable[[Published], ModelRoute]) -> ModelRoute:
        """Publish the route that ``decide`` makes of what is published. ``revision``: the one that the caller has read,
        None if it does not matter. Raises ModelError, ClusterError."""

        def decided(published: Published) -> ModelRoute:
            present = route_of(published, model)
            if present is None and not versions_of(published, model):
                raise ModelNotFoundError("there is no such model")
            if revision is not None and (0 if present is None else present.revision) != revision:
                raise ModelChangedError("it was changed since it was read")
            return decide(published)

        try:
            return change_route(self._settings, self._codec, model, decided)
        except (NoRolloutError, NoShadowError) as error:
            raise ModelConflictError(str(error)) from None
        except ValueError as error:
            raise invalid_change(error) from None

    def register(self, version: ModelVersion, author: Author) -> ModelVersion:
        """Publish a version that gets only requests that name it. Raises ModelConflictError if it is published with
        other files, ClusterError."""
        made: list[ModelVersion] = []

        def decided(published: Published) -> tuple[Sequence[ModelRecord], tuple[str, ...]]:
            before = versions_of(published, version.model).get(version.version)
            made[:] = [registered(version, before, author, API)]
            return [] if made == [before] else [*made], ()

        try:
            model_changes(self._settings).make(self._topic, decided)
        except ImmutableVersionError as error:
            raise ModelConflictError(str(error)) from None
        return made[0]

    def history(self, model: str, most: int) -> Sequence[RouteChange]:
        """The newest changes, newest first, as far as they are recorded. Raises DatabaseError."""
        return read_model_history(self._settings, model, most)

    def decisions(self, model: str, rollout: str | None, most: int) -> Sequence[RouteChange]:
        """Decisions of a rollout, oldest first; of the latest one if none is named. Raises DatabaseError."""
        return read_rollout_decisions(self._settings, model, rollout, most)

    def shadow_report(self, run: str, most: int) -> ShadowReport:
        """Counts and comparison of a shadow, as far as they are recorded. Raises DatabaseError."""
        return read_shadow_report(self._settings, run, most)

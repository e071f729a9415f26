"""Follows a registry of models: which of its versions are new here, and whether those that are known are unchanged."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic

from fairlane import metrics
from fairlane.logs import get_logger
from fairlane.records import ModelVersion
from fairlane_server.artifacts.digest import ArtifactError
from fairlane_server.artifacts.registration import FetchedArtifact, fetch_artifact
from fairlane_server.artifacts.registry import RegistryVersion
from fairlane_server.artifacts.source import ArtifactUnavailableError, StopWait
from fairlane_server.artifacts.store import ArtifactStore
from fairlane_server.artifacts.sync_file import FollowedModel
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.models.catalog import ModelRecord
from fairlane_server.models.changes import (
    API,
    Author,
    ImmutableVersionError,
    Published,
    moved_versions,
    registered,
    route_of,
    versions_of,
    with_alias,
)
from fairlane_server.models.routes import version_key

log = get_logger(__name__)

_REFUSED_FOR_S = 3_600.0
MOST_NEW = 20
"""Versions of one model that one pass registers; the next goes on."""


@dataclass(frozen=True, slots=True)
class SyncPlan:
    """``new`` are to be registered, oldest first, at most MOST_NEW. ``known`` are published with their digests.
    ``taken`` are published from elsewhere, so that the registry's cannot be."""

    new: tuple[RegistryVersion, ...] = ()
    known: tuple[tuple[RegistryVersion, ModelVersion], ...] = ()
    taken: tuple[RegistryVersion, ...] = ()


def plan_sync(
    followed: FollowedModel, listed: Sequence[RegistryVersion], published: Mapping[str, ModelVersion]
) -> SyncPlan:
    """What to do about each version that is complete. Pure. ``published`` are those of the model, by name."""
    new: list[RegistryVersion] = []
    known: list[tuple[RegistryVersion, ModelVersion]] = []
    taken: list[RegistryVersion] = []
    for one in listed:
        if not one.is_ready or int(one.version) < followed.first_version:
            continue
        here = published.get(name_here(followed, one))
        if here is None:
            new.append(one)
        elif here.source == one.reference and here.artifact_digest is not None:
            known.append((one, here))
        else:
            taken.append(one)
    return SyncPlan(tuple(new[:MOST_NEW]), tuple(known), tuple(taken))


def name_here(followed: FollowedModel, version: RegistryVersion) -> str:
    """The name that a version of the registry has here."""
    return f"{followed.version_prefix}{version.version}"


def proposed(
    followed: FollowedModel,
    artifacts: Sequence[tuple[RegistryVersion, FetchedArtifact]],
    published: Published,
    author: Author,
) -> list[ModelRecord]:
    """The records of new versions, and of the route whose alias moves to the last of them. Pure.

    A version that somebody else has published meanwhile stays as it is. Without a champion no alias is set: the first
    version of a model gets no traffic by being proposed. Nor does the alias move to a version that could only be read
    after a newer one was published. Raises ImmutableVersionError.
    """
    model = followed.template.model
    before = versions_of(published, model)
    new: dict[str, ModelVersion] = {}
    for one, found in artifacts:
        version = version_from(followed, one, found)
        key = version_key(model, version.version)
        if version.version not in before:
            new[key] = registered(version, None, author, API)
        elif before[version.version].artifact_digest != found.digest:
            raise ImmutableVersionError(f"{key} is published with other files now")
    if not new or followed.alias is None or route_of(published, model) is None:
        return [*new.values()]
    *_, last = new.values()
    if _number(followed, last) < max((_number(followed, one) for one in before.values()), default=0):
        return [*new.values()]
    route = with_alias({**published, **new}, model, followed.alias, last.version, author)
    return [*new.values(), *moved_versions(published, model).values(), route]


def _number(followed: FollowedModel, version: ModelVersion) -> int:
    """The number of a published version in the registry; 0 if it is from elsewhere."""
    number = version.version.removeprefix(followed.version_prefix)
    is_followed = version.source == RegistryVersion(followed.registered_model, number, is_ready=True).reference
    return int(number) if is_followed and number.isdecimal() else 0


def version_from(followed: FollowedModel, one: RegistryVersion, found: FetchedArtifact) -> ModelVersion:
    """A version of the registry as it is registered here."""
    return replace(
        followed.template,
        version=name_here(followed, one),
        source=found.source,
        artifact_digest=found.digest,
        metrics=found.metrics,
        signature=found.description.signature,
        requirements=found.description.requirements,
    )


@dataclass(slots=True)
class SyncReport:
    """What one pass did: references of versions here, and by reference the reason why one was left out. ``changed``
    are registered versions whose files are others now at their source."""

    registered: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    verified: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    is_away: bool = False
    """Whether something failed because a server did not answer."""

    def fail(self, name: str, error: Exception) -> None:
        """Note why a model or a version was left out."""
        self.failed[name] = str(error)
        self.is_away |= isinstance(error, ArtifactUnavailableError | ClusterError)

    @property
    def is_good(self) -> bool:
        return not self.changed and not self.failed


class VersionReader:
    """Reads the files of new and of known versions, and remembers which it read: one whose files cannot be used is read
    again after an hour."""

    def __init__(self, store: ArtifactStore, stop: StopWait, clock: Callable[[], float] = monotonic) -> None:
        self._store = store
        self._stop = stop
        self._clock = clock
        self._refused: dict[str, tuple[float, str]] = {}
        """When and why, by reference in the registry."""
        self._read_at_s: dict[str, float] = {}
        """Of published versions."""
        self._changed: dict[str, set[str]] = {}
        """By model the published versions whose files were others when they were read last."""

    def fetch_new(
        self, followed: FollowedModel, new: Sequence[RegistryVersion], report: SyncReport
    ) -> list[tuple[RegistryVersion, FetchedArtifact]]:
        """The new versions whose files can be used, into the cache. Raises StoppedError."""
        found: list[tuple[RegistryVersion, FetchedArtifact]] = []
        for one in new:
            asked = replace(followed.template, version=name_here(followed, one), source=one.reference)
            key = version_key(asked.model, asked.version)
            refused_at_s, why = self._refused.get(one.reference, (-_REFUSED_FOR_S, ""))
            if self._clock() - refused_at_s < _REFUSED_FOR_S:
                report.failed[key] = why
                continue
            try:
                found.append((one, fetch_artifact(self._store, asked, self._stop)))
                self._read_at_s[key] = self._clock()
            except ArtifactError as error:
                report.fail(key, error)
                if not isinstance(error, ArtifactUnavailableError):
                    self._refused[one.reference] = (self._clock(), str(error))
                log.warning("version_left_out", model=asked.model, version=asked.version, reason=str(error))
        return found

    def verify(
        self, model: str, known: Sequence[tuple[RegistryVersion, ModelVersion]], every_s: float, report: SyncReport
    ) -> None:
        """Compare the files of registered versions at their source with their digests, of those that were not read for
        so long. One whose source is away is due again at once. Raises StoppedError."""
        changed = self._changed.setdefault(model, set())
        changed.intersection_update(version_key(model, version.version) for _, version in known)
        for one, version in known:
            reference = version_key(model, version.version)
            if self._clock() - self._read_at_s.get(reference, -math.inf) < every_s:
                continue
            try:
                found = self._store.digest(self._store.resolve(one.reference), self._stop)
            except ArtifactUnavailableError as error:
                report.fail(reference, error)
                continue
            except ArtifactError as error:
                report.fail(reference, error)
                self._read_at_s[reference] = self._clock()
                continue
            self._read_at_s[reference] = self._clock()
            if found == version.artifact_digest:
                report.verified.append(reference)
                changed.discard(reference)
                continue
            report.changed.append(reference)
            changed.add(reference)
            log.error(
                "artifact_changed",
                model=model,
                version=version.version,
                registered=version.artifact_digest,
                found=found,
            )
        metrics.ARTIFACTS_CHANGED.labels(model=model).set(len(changed))

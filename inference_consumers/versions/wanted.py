"""Versions that the consumers of a pool should have loaded, by the records of ``control.models``. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from fairlane.records import ModelRoute, ModelVersion
from fairlane_server.models.catalog import ModelCatalog
from fairlane_server.models.rollout_arms import is_active
from fairlane_server.models.routes import CHAMPION
from inference_consumers.batching.received_work import ModelKey


class Rank(IntEnum):
    """How much a version is needed: the smaller, the more."""

    CHAMPION = 0
    ARM = 1
    """Of a rule, or of a rollout that is under way."""
    ALIAS = 2
    SHADOW = 3
    """It runs copies alone."""


@dataclass(frozen=True, slots=True)
class WantedVersion:
    """A version to have loaded. ``fallback`` is the champion before this one: it serves where this one cannot be
    loaded."""

    version: ModelVersion
    rank: Rank
    fallback: ModelVersion | None = None

    @property
    def key(self) -> ModelKey:
        return self.version.model, self.version.version


def wanted_versions(catalog: ModelCatalog, pool: str, now_ms: int) -> tuple[WantedVersion, ...]:
    """Of each model of the pool the versions that requests, or copies of them, may get: the champion, every alias, arms
    of rules that are not over, those of a rollout under way, and the candidate of a shadow. Not those that are stopped.
    The most needed come first."""
    found: dict[ModelKey, WantedVersion] = {}
    for route in catalog.routes.values():
        for rank, version in _named(route, now_ms):
            model = usable(catalog, pool, (route.model, version))
            known = found.get((route.model, version))
            if model is None or (known is not None and known.rank <= rank):
                continue
            fallback = None
            if rank is Rank.CHAMPION and route.previous.get(CHAMPION, version) != version:
                fallback = usable(catalog, pool, (route.model, route.previous[CHAMPION]))
            found[route.model, version] = WantedVersion(model, rank, fallback)
    return tuple(sorted(found.values(), key=lambda one: (one.rank, one.key)))


def usable(catalog: ModelCatalog, pool: str, key: ModelKey) -> ModelVersion | None:
    """The version if it is published, for this pool, and not stopped."""
    model = catalog.versions.get(key)
    if model is None or catalog.is_stopped(model) or pool not in (model.pool, *model.dedicated_pools):
        return None
    return model


def champion_after(catalog: ModelCatalog, key: ModelKey) -> ModelKey | None:
    """The present champion of the model, if this version is the one before."""
    name, version = key
    route, champion = catalog.routes.get(name), catalog.champion(name)
    if route is None or champion is None or route.previous.get(CHAMPION) != version:
        return None
    return (name, champion.version) if champion.version != version else None


def _named(route: ModelRoute, now_ms: int) -> Iterator[tuple[Rank, str]]:
    """Versions by what names them."""
    if CHAMPION in route.aliases:
        yield Rank.CHAMPION, route.aliases[CHAMPION]
    if route.rollout is not None and is_active(route.rollout):
        yield Rank.ARM, route.rollout.candidate
        yield Rank.ARM, route.rollout.champion
    for rule in route.rules:
        # One that begins later is prepared for.
        if rule.until_ms is None or now_ms < rule.until_ms:
            for arm in rule.arms:
                yield Rank.ARM, route.aliases.get(arm.target[1:], "") if arm.target.startswith("@") else arm.target
    for version in route.aliases.values():
        yield Rank.ALIAS, version
    shadow = route.shadow
    if shadow is not None and shadow.stopped_at_ms is None and (shadow.until_ms is None or now_ms < shadow.until_ms):
        yield Rank.SHADOW, shadow.candidate

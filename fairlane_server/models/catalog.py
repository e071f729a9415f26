"""The catalog: all versions of all models with their routes, and the version that a request gets. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fairlane.frozen import frozen_dataclass
from fairlane.records import InferenceRequest, ModelRoute, ModelVersion, RouteArm, RouteRule
from fairlane_server.models.rollout_arms import is_active, rollout_rule
from fairlane_server.models.routes import CHAMPION, NAMED_VERSION, arm_for, rule_for, share_of, sticky_digest

ModelRecord = ModelVersion | ModelRoute
"""The records of the control topic of models."""


@frozen_dataclass(frozen=True, slots=True)
class Choice:
    """The version that a request gets. ``arm`` is the arm of the route, or the alias, that it was chosen by, or
    ``version`` if the request named it itself."""

    model: ModelVersion
    arm: str


@dataclass(frozen=True, slots=True)
class NoVersion:
    """Why a request gets no version. ``may_come``: it may be served later."""

    reason: str
    may_come: bool = False


Served = Callable[[ModelVersion, str], float | None]
"""The part of the consumers serving this tenant that have loaded a version, from 0 to 1; None while nothing is known of
them, and while the version is only being loaded. Of versions that are loaded by all consumers that name none it is 1.
"""


def nothing_known(_model: ModelVersion, _tenant: str) -> None:
    """For a caller that does not know what is loaded."""
    return


class ModelCatalog:
    """Immutable; a changed record makes a new one. A model without a route has no champion."""

    __slots__ = ("_champions", "_of_model", "_rules", "_simple", "routes", "versions")

    def __init__(self, versions: Iterable[ModelVersion] = (), routes: Iterable[ModelRoute] = ()) -> None:
        self.versions: Mapping[tuple[str, str], ModelVersion] = {(one.model, one.version): one for one in versions}
        self.routes: Mapping[str, ModelRoute] = {one.model: one for one in routes}
        self._of_model: dict[str, list[ModelVersion]] = {}
        for version in self.versions.values():
            self._of_model.setdefault(version.model, []).append(version)
        found = {
            name: self.versions.get((name, route.aliases.get(CHAMPION, ""))) for name, route in self.routes.items()
        }
        self._champions = {name: champion for name, champion in found.items() if champion is not None}
        self._rules = {name: _rules_of(route) for name, route in self.routes.items()}
        # What no rule and no other champion can change needs no decision.
        self._simple = {
            name: Choice(model, CHAMPION)
            for name, model in self._champions.items()
            if not self._rules[name] and self._champion_before(name) in (None, model)
        }

    @classmethod
    def of(cls, published: Mapping[str, ModelRecord]) -> "ModelCatalog":
        """The catalog of the records of a control topic, by key. A version under the name of its model alone is the
        champion: so it was when models had one version and no route."""
        records = published.values()
        routes = [one for one in records if isinstance(one, ModelRoute)]
        routes += [
            route_of_one(one) for key, one in published.items() if isinstance(one, ModelVersion) and key == one.model
        ]
        return cls((one for one in records if isinstance(one, ModelVersion)), routes)

    @property
    def champions(self) -> Mapping[str, ModelVersion]:
        """By model, the version that gets the requests of no rule. Only these models can be used by name."""
        return self._champions

    def champion(self, model: str) -> ModelVersion | None:
        return self._champions.get(model)

    def named(self, reference: str) -> ModelVersion | None:
        """The version that a reference names now, without the rules of its model: the champion for the name of a model.
        None if there is none, and for a stopped one that the reference names itself or by an alias."""
        name, at, alias = reference.partition("@")
        if at:
            route = self.routes.get(name)
            version = "" if route is None else route.aliases.get(alias, "")
        else:
            name, slash, version = reference.partition("/")
            if not slash:
                return self._champions.get(name)
        model = self.versions.get((name, version))
        return None if model is None or self.is_stopped(model) else model

    def is_stopped(self, model: ModelVersion) -> bool:
        route = self.routes.get(model.model)
        return route is not None and model.version in route.stopped

    def versions_of(self, model: str) -> Sequence[ModelVersion]:
        """All versions of a model."""
        return self._of_model.get(model, ())

    def sticky_key(self, request: InferenceRequest, tenant: str) -> str | None:
        """The digest of what the rollout of a request's model keeps on one arm; None without one under way.
        ``request.model`` is the name of the model."""
        route = self.routes.get(request.model)
        if route is None or route.rollout is None or not is_active(route.rollout):
            return None
        return sticky_digest(self._rules[request.model][-1], request, tenant)

    def choose(
        self, request: InferenceRequest, tenant: str, now_ms: int, served: Served = nothing_known
    ) -> Choice | NoVersion:
        """The version for a request.

        An arm of a route whose version is stopped, unknown or loaded by no consumer leaves its part of the requests to
        the champion. A champion that not all consumers have loaded shares them with the one before, in proportion to
        the consumers: so traffic follows an update. A version or alias that the request names has no replacement.
        """
        reference = request.model
        simple = self._simple.get(reference)
        if simple is not None:
            return simple
        name, at, alias = reference.partition("@")
        if at:
            return self._by_alias(name, alias, tenant, served)
        name, slash, version = reference.partition("/")
        if slash:
            return self._by_version(name, version, tenant, served)
        return self._routed(name, request, tenant, now_ms, served)

    def again(
        self,
        version: str,
        arm: str | None,
        request: InferenceRequest,
        tenant: str,
        now_ms: int,
        served: Served = nothing_known,
    ) -> Choice | NoVersion:
        """The choice for a request that got this version before: the same, unless it was withdrawn or stopped, or no
        consumer has it while one has the version that it would get now. One that named the version itself gets it or
        none. ``request.model`` is the name of the model."""
        present = self.versions.get((request.model, version))
        if present is not None and not self.is_stopped(present):
            kept = Choice(present, arm or CHAMPION)
            if arm == NAMED_VERSION or served(present, tenant) != 0:
                return kept
            now = self.choose(request, tenant, now_ms, served)
            return now if isinstance(now, Choice) and served(now.model, tenant) else kept
        if arm == NAMED_VERSION:
            return self._by_version(request.model, version, tenant, served)
        return self.choose(request, tenant, now_ms, served)

    def _by_alias(self, name: str, alias: str, tenant: str, served: Served) -> Choice | NoVersion:
        route = self.routes.get(name)
        version = None if route is None else route.aliases.get(alias)
        if version is None:
            return NoVersion(f"{name} has no alias of this name" if self._knows(name) else "no model has this name")
        found = self._by_version(name, version, tenant, served)
        return found if isinstance(found, NoVersion) else Choice(found.model, alias)

    def _by_version(self, name: str, version: str, tenant: str, served: Served) -> Choice | NoVersion:
        model = self.versions.get((name, version))
        if model is None:
            return NoVersion(f"{name} has no version of this name" if self._knows(name) else "no model has this name")
        if self.is_stopped(model):
            return NoVersion(f"version {version} of {name} is stopped")
        if served(model, tenant) == 0:
            return NoVersion(f"no consumer has loaded version {version} of {name}", may_come=True)
        return Choice(model, NAMED_VERSION)

    def _routed(
        self, name: str, request: InferenceRequest, tenant: str, now_ms: int, served: Served
    ) -> Choice | NoVersion:
        champion = self._champions.get(name)
        if champion is None:
            return NoVersion(f"{name} has no {CHAMPION}" if self._knows(name) else "no model has this name")
        route = self.routes[name]
        default = self._default(champion, request, tenant, served)
        rule = rule_for(self._rules[name], request, tenant, now_ms)
        return default if rule is None else self._of_arm(arm_for(rule, request, tenant), route, tenant, served, default)

    def _of_arm(self, arm: RouteArm, route: ModelRoute, tenant: str, served: Served, default: Choice) -> Choice:
        version = route.aliases.get(arm.target[1:], "") if arm.target.startswith("@") else arm.target
        model = self.versions.get((route.model, version))
        if model is None or self.is_stopped(model):
            return default
        if model == default.model:
            return Choice(model, arm.arm)
        part = served(model, tenant)
        # Of a pool that nobody has heard of nothing is expected while another one serves.
        if part == 0 or (part is None and served(default.model, tenant)):
            return default
        return Choice(model, arm.arm)

    def _default(self, champion: ModelVersion, request: InferenceRequest, tenant: str, served: Served) -> Choice:
        """The champion, or the one before it for a part of the requests, as long as not all consumers have changed."""
        before = self._champion_before(champion.model)
        if before is None or before == champion:
            return Choice(champion, CHAMPION)
        new, old = served(champion, tenant) or 0.0, served(before, tenant) or 0.0
        if old == 0 or new >= 1 or (new and share_of(request.request_id) < new / (new + old)):
            return Choice(champion, CHAMPION)
        return Choice(before, CHAMPION)

    def _champion_before(self, name: str) -> ModelVersion | None:
        """The champion before the present one, unless it is withdrawn or stopped."""
        before = self.versions.get((name, self.routes[name].previous.get(CHAMPION, "")))
        return None if before is None or self.is_stopped(before) else before

    def _knows(self, name: str) -> bool:
        return name in self._of_model


def _rules_of(route: ModelRoute) -> tuple[RouteRule, ...]:
    """All rules by which a route divides requests: an active rollout has those that meet no other rule."""
    rollout = route.rollout
    return (*route.rules, rollout_rule(rollout)) if rollout is not None and is_active(rollout) else route.rules


def route_of_one(version: ModelVersion) -> ModelRoute:
    """The route of a model whose only version this is."""
    return ModelRoute(version.model, 1, {CHAMPION: version.version}, {})


def catalog_of(*versions: ModelVersion) -> ModelCatalog:
    """The catalog of these versions, each the champion of its model; of several of one model it is the last."""
    return ModelCatalog(versions, map(route_of_one, versions))

"""Versions that the consumers of a pool should have, by the published records."""

from dataclasses import replace

from fairlane.records import ModelRoute, ModelVersion, RouteArm, RouteRule
from fairlane.rollout_records import Rollout, RolloutGuards
from fairlane_server.models.catalog import ModelCatalog
from inference_consumers.versions.wanted import Rank, champion_after, usable, wanted_versions
from tests.kit.version_kit import MODEL, POOL, route, version

NOW_MS = 5_000
ONE, TWO, THREE = map(version, "123")


def wanted(records: list[ModelVersion], *routes: ModelRoute, pool: str = POOL) -> list[tuple[str, Rank]]:
    found = wanted_versions(ModelCatalog(records, routes), pool, NOW_MS)
    return [(one.version.version, one.rank) for one in found]


def rule(*targets: str, until_ms: int | None = None, from_ms: int | None = None) -> RouteRule:
    arms = tuple(RouteArm(f"arm-{target}", target, 100 / len(targets)) for target in targets)
    return RouteRule("rule", arms, until_ms=until_ms, from_ms=from_ms)


def rollout(status: str = "running") -> Rollout:
    return Rollout("r", "3", "1", (50.0, 100.0), RolloutGuards(), 0, "request", False, status, 0, 0, 0)


def test_the_champion_comes_first_then_arms_then_aliases() -> None:
    made = route("2", rules=(rule("1", "@champion"),), aliases={"candidate": "3"})
    assert wanted([ONE, TWO, THREE], made) == [("2", Rank.CHAMPION), ("1", Rank.ARM), ("3", Rank.ALIAS)]


def test_a_version_without_alias_rule_or_rollout_is_not_loaded() -> None:
    assert wanted([ONE, TWO], route("1")) == [("1", Rank.CHAMPION)]
    assert wanted([ONE, TWO]) == [], "a model without a route has no champion"


def test_versions_that_are_stopped_withdrawn_or_of_another_pool_are_not() -> None:
    made = route("1", aliases={"candidate": "2", "gone": "9", "elsewhere": "3"}, stopped=("2",))
    assert wanted([ONE, TWO, replace(THREE, pool="other")], made) == [("1", Rank.CHAMPION)]
    dedicated = replace(THREE, pool="other", dedicated_pools=(POOL,))
    assert ("3", Rank.ALIAS) in wanted([ONE, TWO, dedicated], made)


def test_rules_count_until_they_are_over_and_before_they_begin() -> None:
    assert wanted([ONE, TWO], route("1", rules=(rule("2", until_ms=NOW_MS),))) == [("1", Rank.CHAMPION)]
    later = route("1", rules=(rule("2", from_ms=NOW_MS + 1, until_ms=NOW_MS + 2),))
    assert wanted([ONE, TWO], later) == [("1", Rank.CHAMPION), ("2", Rank.ARM)]


def test_a_rollout_counts_while_it_is_under_way() -> None:
    assert wanted([ONE, THREE], route("1", rollout=rollout())) == [("1", Rank.CHAMPION), ("3", Rank.ARM)]
    assert wanted([ONE, THREE], route("1", rollout=rollout("aborted"))) == [("1", Rank.CHAMPION)]


def test_the_champion_before_stands_in_unless_it_is_stopped() -> None:
    records = [ONE, TWO]
    (found,) = wanted_versions(ModelCatalog(records, [route("2", "1")]), POOL, NOW_MS)
    assert found.fallback == ONE
    (found,) = wanted_versions(ModelCatalog(records, [route("2", "1", stopped=("1",))]), POOL, NOW_MS)
    assert found.fallback is None
    (found,) = wanted_versions(ModelCatalog(records, [route("2", "2")]), POOL, NOW_MS)
    assert found.fallback is None


def test_which_champion_came_after_a_version() -> None:
    catalog = ModelCatalog([ONE, TWO], [route("2", "1")])
    assert champion_after(catalog, (MODEL.model, "1")) == (MODEL.model, "2")
    assert champion_after(catalog, (MODEL.model, "2")) is None
    assert champion_after(catalog, ("other", "1")) is None
    assert usable(catalog, "other", (MODEL.model, "1")) is None

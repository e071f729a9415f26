"""The catalog: which version a request gets, at admission and when its version is gone."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.records import InferenceRequest, ModelRoute, ModelVersion, RequestInput, RouteArm, RouteRule
from fairlane_server.models.catalog import Choice, ModelCatalog, NoVersion, Served, catalog_of, route_of_one

ONE = ModelVersion("words", "1", "gpu", "simulated", ("generate",), "words", 4_096, 512)
TWO, THREE = replace(ONE, version="2"), replace(ONE, version="3")
CANARY = RouteRule(
    "canary", (RouteArm("new", "@candidate", 50.0), RouteArm("old", "1", 50.0)), tenants=("acme",), sticky_by="caller"
)
ROUTE = ModelRoute("words", 3, {"champion": "1", "candidate": "2"}, {}, rules=(CANARY,))


def catalog(*versions: ModelVersion, **route: Any) -> ModelCatalog:
    return ModelCatalog(versions or (ONE, TWO, THREE), [replace(ROUTE, **route)])


def request(model: str = "words", **changes: Any) -> InferenceRequest:
    return replace(InferenceRequest("id", model, "generate", RequestInput(prompt="p")), **changes)


def chosen(found: Choice | NoVersion) -> tuple[str, str] | str:
    return found.reason if isinstance(found, NoVersion) else (found.model.version, found.arm)


def served(*versions: str, **parts: float) -> Served:
    """All consumers have loaded these versions, and parts of them those."""
    known = {**dict.fromkeys(versions, 1.0), **{name.removeprefix("v"): part for name, part in parts.items()}}
    return lambda model, _tenant: known.get(model.version, 0.0)


def arms(models: ModelCatalog, tenant: str = "acme", **kwargs: Any) -> set[tuple[str, str] | str]:
    """The versions and arms that 50 callers get."""
    return {chosen(models.choose(request(requested_by=f"key:{n}"), tenant, 0, **kwargs)) for n in range(50)}


def test_a_model_with_one_version_has_it_as_champion() -> None:
    models = catalog_of(ONE)
    assert chosen(models.choose(request(), "acme", 0)) == ("1", "champion")
    assert chosen(models.choose(request("words@champion"), "acme", 0)) == ("1", "champion")
    assert models.champion("words") is ONE
    assert models.champion("other") is None


def test_rules_hold_for_whom_they_are_for_and_the_champion_serves_the_rest() -> None:
    assert arms(catalog()) == {("2", "new"), ("1", "old")}
    assert arms(catalog(), "globex") == {("1", "champion")}
    assert arms(catalog(rules=())) == {("1", "champion")}


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("words/1", ("1", "version")),
        ("words/3", ("3", "version")),
        ("words@candidate", ("2", "candidate")),
        ("words@champion", ("1", "champion")),
        ("words/9", "words has no version of this name"),
        ("words@none", "words has no alias of this name"),
        ("words/", "words has no version of this name"),
        ("words@", "words has no alias of this name"),
        ("none", "no model has this name"),
        ("none/1", "no model has this name"),
        ("none@champion", "no model has this name"),
        ("words/1@champion", "no model has this name"),
        ("", "no model has this name"),
    ],
)
def test_a_request_may_name_a_version_or_an_alias(reference: str, found: tuple[str, str] | str) -> None:
    assert chosen(catalog().choose(request(reference), "acme", 0)) == found


@pytest.mark.parametrize(
    ("reference", "version"),
    [
        ("words", "1"),
        ("words/2", "2"),
        ("words@candidate", "2"),
        ("words/3", None),
        ("words@stopped", None),
        ("words/9", None),
        ("words@none", None),
        ("other", None),
        ("other/1", None),
        ("other@champion", None),
        ("words/", None),
        ("words@", None),
        ("words/2@champion", None),
        ("words@candidate/2", None),
    ],
)
def test_a_reference_names_one_version_or_none(reference: str, version: str | None) -> None:
    aliases = {"champion": "1", "candidate": "2", "stopped": "3"}
    found = catalog(aliases=aliases, stopped=("3",)).named(reference)
    assert (None if found is None else found.version) == version


def test_what_an_arm_cannot_serve_goes_to_the_champion() -> None:
    only = {("1", "champion"), ("1", "old")}
    assert arms(catalog(stopped=("2",))) == only
    assert arms(catalog(ONE, THREE)) == only, "the version is not published"
    assert arms(catalog(), served=served("1", "3")) == only


def test_a_stopped_version_gets_nothing_even_by_its_own_name() -> None:
    models = catalog(stopped=("2",))
    assert chosen(models.choose(request("words/2"), "acme", 0)) == "version 2 of words is stopped"
    assert chosen(models.choose(request("words@candidate"), "acme", 0)) == "version 2 of words is stopped"


MOVED: dict[str, Any] = {"aliases": {"champion": "2"}, "previous": {"champion": "1"}, "rules": ()}


@pytest.mark.parametrize(
    ("loaded", "versions"),
    [
        (served("1", "2"), {"2"}),
        (served("1"), {"1"}),
        (served("2"), {"2"}),
        (served(), {"2"}),
        (served("1", v2=0.5), {"1", "2"}),
        (served("2", v1=0.5), {"2"}),
        (lambda _model, _tenant: None, {"2"}),
    ],
    ids=["both", "only the one before", "only the new one", "neither", "half have both", "all have it", "not known"],
)
def test_traffic_follows_an_update(loaded: Served, versions: set[str]) -> None:
    models = catalog(**MOVED)
    found = [models.choose(replace(request(), request_id=str(number)), "acme", 0, loaded) for number in range(50)]
    assert {chosen(one)[0] for one in found} == versions
    assert {chosen(one)[1] for one in found} == {"champion"}


def test_during_an_update_each_version_gets_the_part_of_its_consumers() -> None:
    models, loaded = catalog(**MOVED), served(v1=0.75, v2=0.25)
    found = [models.choose(replace(request(), request_id=str(number)), "acme", 0, loaded) for number in range(2_000)]
    new = sum(chosen(one)[0] == "2" for one in found)
    assert abs(new - 500) < 5 * (2_000 * 0.25 * 0.75) ** 0.5


def test_a_stopped_version_serves_nothing_until_the_new_champion_is_loaded() -> None:
    models = catalog(**MOVED, stopped=("1",))
    assert chosen(models.choose(request(), "acme", 0, served("1"))) == ("2", "champion")


def test_an_arm_in_a_pool_that_never_reported_gets_nothing_while_the_champion_is_served() -> None:
    def loaded(model: ModelVersion, _tenant: str) -> float | None:
        return None if model.version == "2" else 1.0

    assert arms(catalog(), served=loaded) == {("1", "champion"), ("1", "old")}
    assert arms(catalog(), served=lambda _model, _tenant: None) == {("2", "new"), ("1", "old")}


def test_a_version_or_alias_that_a_request_names_must_be_loaded() -> None:
    for reference in ("words/2", "words@candidate"):
        found = catalog().choose(request(reference), "acme", 0, served("1"))
        assert found == NoVersion("no consumer has loaded version 2 of words", may_come=True)
        assert isinstance(catalog().choose(request(reference), "acme", 0), Choice)


def test_an_admitted_request_moves_when_no_consumer_has_its_version_and_one_has_another() -> None:
    models = catalog(rules=())
    assert chosen(models.again("2", "new", request(), "acme", 0, served("1", "2"))) == ("2", "new")
    assert chosen(models.again("2", "new", request(), "acme", 0, served("1"))) == ("1", "champion")
    assert chosen(models.again("2", "new", request(), "acme", 0, served())) == ("2", "new"), "it waits"
    assert chosen(models.again("2", "version", request(), "acme", 0, served("1"))) == ("2", "version"), "it waits"


def test_of_records_of_an_older_deployment_the_one_under_the_name_of_its_model_is_the_champion() -> None:
    models = ModelCatalog.of({"words": ONE, "words/2": TWO, "other/1": replace(ONE, model="other")})
    assert models.champions == {"words": ONE}
    assert chosen(models.choose(request("other"), "acme", 0)) == "other has no champion"
    assert chosen(models.choose(request("other/1"), "acme", 0)) == ("1", "version")
    routed = ModelCatalog.of({"words/1": ONE, "words/2": TWO, "words": route_of_one(TWO)})
    assert routed.champions == {"words": TWO}


def test_without_its_champion_a_model_has_none() -> None:
    models = catalog(TWO)
    assert models.champion("words") is None
    assert chosen(models.choose(request(), "acme", 0)) == "words has no champion"
    assert chosen(models.choose(request("words/2"), "acme", 0)) == ("2", "version")


@pytest.mark.parametrize("changed", [{"aliases": {"champion": "3", "candidate": "3"}}, {"rules": ()}])
def test_an_admitted_request_keeps_its_version_whatever_the_route_says_now(changed: dict[str, Any]) -> None:
    for version, arm in (("1", "champion"), ("2", "new"), ("2", "candidate"), ("3", "version")):
        assert chosen(catalog(**changed).again(version, arm, request(), "acme", 0)) == (version, arm)


@pytest.mark.parametrize("gone", [{"stopped": ("2",)}, None], ids=["stopped", "withdrawn"])
def test_an_admitted_request_is_routed_again_when_its_version_is_gone(gone: dict[str, Any] | None) -> None:
    models = catalog(rules=(), **gone) if gone else catalog(ONE, THREE, rules=())
    assert chosen(models.again("2", "new", request(), "acme", 0)) == ("1", "champion")
    assert chosen(models.again("2", None, request(), "acme", 0)) == ("1", "champion"), "of an older dispatcher"
    refused = chosen(models.again("2", "version", request(), "acme", 0))
    assert refused == ("version 2 of words is stopped" if gone else "words has no version of this name")


@given(
    aliases=st.dictionaries(st.sampled_from(("champion", "candidate", "a")), st.sampled_from("1234")),
    stopped=st.sets(st.sampled_from("1234")),
    target=st.sampled_from(("1", "2", "4", "@candidate", "@none")),
    reference=st.sampled_from(("words", "words/1", "words/4", "words@a", "words@champion", "none")),
    tenant=st.sampled_from(("acme", "globex")),
)
def test_no_request_gets_a_version_that_is_stopped_or_unknown_unless_it_is_the_champion(
    aliases: dict[str, str], stopped: set[str], target: str, reference: str, tenant: str
) -> None:
    rule = replace(CANARY, arms=(RouteArm("only", target, 100.0),))
    models = catalog(ONE, TWO, aliases=aliases, stopped=tuple(stopped), rules=(rule,))
    found = models.choose(request(reference), tenant, 0)
    if isinstance(found, Choice):
        assert found.model in (ONE, TWO)
        assert found.model.version not in stopped or (found.model.version, found.arm) == (
            aliases.get("champion"),
            "champion",
        )
        again = models.again(found.model.version, found.arm, request(), tenant, 0)
        assert isinstance(again, Choice)
    else:
        assert found.reason

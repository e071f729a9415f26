"""Changes of published models: what a file and commands make of what is there."""

from dataclasses import replace
from typing import Any

import pytest

from fairlane.records import ModelMetric, ModelRoute, ModelVersion, RouteArm, RouteRule
from fairlane_server.control.published_models import key_of
from fairlane_server.models.catalog import ModelRecord, route_of_one
from fairlane_server.models.changes import (
    API,
    FILE,
    Author,
    ImmutableVersionError,
    check_all,
    managed_by_api,
    moved_versions,
    of_file,
    registered,
    with_alias,
    with_rules,
    with_stopped,
    without_alias,
)
from fairlane_server.models.models_file import ModelsFile

ONE = ModelVersion("words", "1", "gpu", "torch", ("generate",), "words", 4_096, 512)
TWO = replace(ONE, version="2", path="words-2")
RULE = RouteRule("all", (RouteArm("one", "1", 100.0),))
AUTHOR, LATER = Author("ops@desk", 1_000, "first"), Author("ops@desk", 2_000, "then")


def published(*records: ModelRecord) -> dict[str, ModelRecord | None]:
    return {key_of(record): record for record in records}


def file_of(*versions: ModelVersion, champion: str = "1") -> ModelsFile:
    return ModelsFile(versions, {"words": {"champion": champion}})


def test_a_new_file_makes_versions_then_routes() -> None:
    records = of_file(file_of(ONE, TWO), {}, AUTHOR)
    assert list(records) == ["words/1", "words/2", "words"]
    assert records["words/1"] == replace(ONE, registered_at_ms=1_000, registered_by="ops@desk")
    assert records["words"] == ModelRoute(
        "words", 1, {"champion": "1"}, {}, changed_at_ms=1_000, changed_by="ops@desk", reason="first"
    )


def test_an_unchanged_file_makes_what_is_there() -> None:
    first = published(*of_file(file_of(ONE), {}, AUTHOR).values())
    assert of_file(file_of(ONE), first, LATER) == first


def test_a_file_with_another_champion_makes_the_next_revision_and_keeps_other_aliases() -> None:
    first = of_file(file_of(ONE), {}, AUTHOR)
    route = first["words"]
    assert isinstance(route, ModelRoute)
    present = published(first["words/1"], replace(route, aliases={"champion": "1", "old": "1"}))
    moved = of_file(file_of(TWO, champion="2"), present, LATER)["words"]
    assert isinstance(moved, ModelRoute)
    assert (moved.revision, moved.aliases, moved.previous) == (2, {"champion": "2", "old": "1"}, {"champion": "1"})
    assert (moved.changed_at_ms, moved.reason, moved.managed_by) == (2_000, "then", FILE)


@pytest.mark.parametrize(
    "changed", [{"pool": "other"}, {"max_batch_size": 4}, {"dedicated_pools": ("own",)}, {"smaller_model": "tiny"}]
)
def test_where_a_version_is_served_may_change(changed: dict[str, Any]) -> None:
    before = registered(ONE, None, AUTHOR, FILE)
    now = registered(replace(ONE, **changed), before, LATER, FILE)
    assert now == replace(before, **changed)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"path": "else"}, "path"),
        ({"engine": "vllm"}, "engine"),
        ({"dtype": "float16"}, "dtype"),
        ({"tasks": ("embed",)}, "tasks"),
        ({"artifact_digest": "sha256:other"}, "artifact_digest"),
    ],
)
def test_what_determines_the_answers_of_a_version_never_changes(changed: dict[str, Any], field: str) -> None:
    before = registered(replace(ONE, artifact_digest="sha256:this"), None, AUTHOR, API)
    assert registered(ONE, before, LATER, FILE) == before, "a file names no digest"
    with pytest.raises(ImmutableVersionError, match=f"version 1 of words is published with another {field}"):
        registered(replace(ONE, **changed), before, LATER, API)


def test_an_alias_moves_with_who_when_why_and_what_was_before() -> None:
    present = published(*of_file(file_of(ONE, TWO), {}, AUTHOR).values())
    moved = with_alias(present, "words", "champion", "2", LATER)
    assert (moved.aliases, moved.previous, moved.revision) == ({"champion": "2"}, {"champion": "1"}, 2)
    assert (moved.changed_by, moved.changed_at_ms, moved.reason, moved.managed_by) == ("ops@desk", 2_000, "then", API)
    after = {**present, "words": moved}
    assert with_alias(after, "words", "champion", "2", LATER) is moved, "it is there already"
    assert managed_by_api(after) == {"words"}


def test_the_first_alias_of_a_model_is_its_champion() -> None:
    present = published(ONE)
    assert with_alias(present, "words", "champion", "1", AUTHOR).aliases == {"champion": "1"}
    with pytest.raises(ValueError, match="aliases: champion is missing"):
        with_alias(present, "words", "candidate", "1", AUTHOR)


def test_an_alias_of_an_unknown_version_is_refused() -> None:
    present = published(*of_file(file_of(ONE), {}, AUTHOR).values())
    with pytest.raises(ValueError, match=r"aliases\.candidate: unknown version '7'; known: 1"):
        with_alias(present, "words", "candidate", "7", LATER)


def test_a_version_is_stopped_and_resumed() -> None:
    present = published(*of_file(file_of(ONE, TWO), {}, AUTHOR).values())
    stopped = with_stopped(present, "words", "2", LATER, stopped=True)
    assert (stopped.stopped, stopped.revision) == (("2",), 2)
    after = {**present, "words": stopped}
    assert with_stopped(after, "words", "2", LATER, stopped=False).stopped == ()
    for version, why in (("1", "'1' is the champion"), ("7", "unknown version '7'")):
        with pytest.raises(ValueError, match=why):
            with_stopped(present, "words", version, LATER, stopped=True)
    with pytest.raises(ValueError, match="it has no route"):
        with_stopped({}, "words", "1", LATER, stopped=True)


def test_what_was_before_an_alias_stays_known_when_something_else_changes() -> None:
    present = published(*of_file(file_of(ONE, TWO), {}, AUTHOR).values())
    present["words"] = with_alias(present, "words", "champion", "2", LATER)
    present["words"] = with_alias(present, "words", "tried", "1", LATER)
    ruled = with_rules(present, "words", (RULE,), LATER)
    assert (ruled.previous, ruled.rules) == ({"champion": "1"}, (RULE,))
    present["words"] = ruled
    assert with_rules(present, "words", (RULE,), LATER) is ruled
    gone = without_alias(present, "words", "tried", LATER)
    assert gone.aliases == {"champion": "2"}
    for alias, why in (("champion", "champion is missing"), ("none", "it has no alias 'none'")):
        with pytest.raises(ValueError, match=why):
            without_alias(present, "words", alias, LATER)


def test_a_version_of_an_older_deployment_moves_when_a_route_takes_its_place() -> None:
    """It is under the name of its model, where the route has to be."""
    before: dict[str, ModelRecord | None] = {"words": ONE}
    assert moved_versions(before, "words") == {"words/1": ONE}
    assert moved_versions({"words/1": ONE}, "words") == {}
    route = with_alias({**before, "words/2": TWO}, "words", "champion", "2", AUTHOR)
    assert (route.revision, route.aliases, route.previous) == (2, {"champion": "2"}, {"champion": "1"})
    records = of_file(file_of(TWO, champion="2"), before, AUTHOR)
    assert records["words/1"] == ONE
    assert records["words"] == replace(route, changed_at_ms=AUTHOR.at_ms, reason="first", managed_by=FILE)


def test_nothing_that_a_route_names_is_withdrawn() -> None:
    records = of_file(file_of(ONE, TWO), {}, AUTHOR)
    check_all({}, records, ())
    check_all(published(*records.values()), {}, ["words/2"])
    with pytest.raises(ValueError, match=r"words: aliases\.champion: unknown version '1'; known: 2"):
        check_all(published(*records.values()), {}, ["words/1"])
    route = replace(route_of_one(ONE), stopped=("1",))
    with pytest.raises(ValueError, match="stopped: '1' is the champion"):
        check_all(published(*records.values()), {"words": route}, ())


def test_a_file_may_leave_the_description_of_a_version_to_its_registration() -> None:
    described = replace(
        ONE,
        source="models:/words/1",
        artifact_digest="sha256:1",
        metrics=(ModelMetric("accuracy", 0.9),),
        signature="{}",
        requirements=("torch",),
    )
    before = registered(described, None, AUTHOR, API)
    assert registered(ONE, before, LATER, API) == before
    with pytest.raises(ImmutableVersionError, match="published with another metrics"):
        registered(replace(ONE, metrics=(ModelMetric("accuracy", 0.8),)), before, LATER, API)

"""Names that are drawn for the hostile tenant's tries."""

from random import Random
from uuid import UUID

import pytest

from deploy.local.layout import PROJECT_ROOT
from tests.hostile_tenant.attack import draw_target
from tests.hostile_tenant.cluster_operations import OPERATIONS
from tests.hostile_tenant.drawing import CHANGES, MOST_CHARACTERS, Names
from tests.hostile_tenant.oracle import Actor, Kind, Oracle
from tests.hostile_tenant.world import Attacker, Pipeline, describe_world

PIPELINES = (Pipeline("", {"acme": ("search",), "a": ()}, ("fast",)), Pipeline("staging.", {"acme": ()}, ("fast",)))
TOPICS = {name: UUID(int=1) for name in ("requests.acme", "requests.a", "replies.acme", "staging.requests.acme")}
WORLD = describe_world(PIPELINES, TOPICS, ["fairlane_tenant_acme_2"])
ACME = Attacker("fairlane_tenant_acme", Actor("", "tenant", "acme"))
KINDS = (Kind.TOPIC, Kind.GROUP, Kind.TRANSACTIONAL_ID)


def names() -> Names:
    return Names(WORLD, Oracle.from_file(PROJECT_ROOT / "topics.yaml"))


@pytest.mark.parametrize("kind", KINDS)
def test_own_names_those_of_others_and_borderline_ones_are_drawn_and_can_be_sent(kind: Kind) -> None:
    rng, drawer = Random(1), names()
    drawn = [drawer.draw(rng, ACME.actor, kind) for _ in range(3_000)]
    known, owned = {*WORLD.names[kind]}, {*drawer.owned(ACME.actor, kind)}
    assert known <= {*drawn}, "every name that exists"
    assert len({*drawn} - known) > 500, "and many that do not"
    assert not owned or sum(name in owned for name in drawn) > 600
    assert max(map(len, drawn)) == MOST_CHARACTERS
    assert all(len(name.encode()) < 32_767 for name in drawn)


def test_the_same_seed_draws_the_same_targets() -> None:
    def targets(seed: int) -> list[object]:
        rng, drawer = Random(seed), names()
        return [draw_target(rng, drawer, WORLD, ACME, operation) for operation in OPERATIONS for _ in range(5)]

    assert targets(7) == targets(7) != targets(8)


def test_a_target_has_what_its_operation_is_about() -> None:
    rng, drawer = Random(2), names()
    for operation in OPERATIONS:
        target = draw_target(rng, drawer, WORLD, ACME, operation)
        assert target.attacker == ACME.user
        if "existing" in operation.draws:
            assert target.topic in TOPICS
        if "user" in operation.draws:
            assert target.user in WORLD.users


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_makes_another_name(change: object) -> None:
    assert callable(change)
    made = {change(Random(seed), "requests.acme-2", WORLD.prefixes) for seed in range(100)}
    assert made - {"requests.acme-2"}
    # Nothing that would be the same on the wire is a change.
    assert all(isinstance(name, str) for name in made)


def test_names_of_every_kind_of_trouble_are_drawn() -> None:
    rng, drawer = Random(3), names()
    drawn = {drawer.draw(rng, ACME.actor, Kind.TOPIC) for _ in range(20_000)}
    expected = (
        "",
        "*",
        "__consumer_offsets",
        "__transaction_state",
        "requests.acme2",
        "REQUESTS.ACME",
        "requests_acme",
    )
    assert {*expected} <= drawn
    assert any("\u0430" in name for name in drawn), "a Cyrillic letter"
    assert any("\0" in name for name in drawn)
    assert "staging.requests.a" in drawn, "the prefix of the other pipeline"


def test_even_of_an_empty_name_something_is_made() -> None:
    for change in CHANGES.values():
        for seed in range(20):
            assert isinstance(change(Random(seed), "", ("", "staging.")), str)

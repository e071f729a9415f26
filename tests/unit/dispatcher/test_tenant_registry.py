"""A specification that cannot be used changes nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fairlane.records import TenantGroup, TenantSpec
from fairlane_server.control.last_good import LastGood
from fairlane_server.control.tenants_file import load_tenants
from stream_processors.dispatcher.registry import check_tenant


def test_the_last_good_specification_stays() -> None:
    registry = LastGood(check_tenant, "tenant_unusable")
    good = TenantSpec("acme", weight=2.0)
    assert registry.usable({"acme": good}) == {"acme": good}
    cycle = (TenantGroup("a", 1.0, "b"), TenantGroup("b", 1.0, "a"))
    for bad in (TenantSpec("acme", weight=0.0), TenantSpec("acme", weight=-1.0), TenantSpec("acme", groups=cycle)):
        assert registry.usable({"acme": bad, "new": replace(bad, tenant="new")}) == {"acme": good}


@pytest.mark.parametrize(
    "bad",
    [
        TenantSpec("acme", pool="gpu a"),
        TenantSpec("acme", pool="gpu.a"),
        TenantSpec("acme", pool=""),
        TenantSpec("acme", services=("good", "no/good")),
        TenantSpec("other"),
    ],
    ids=str,
)
def test_names_that_no_topic_can_have_are_not_used(bad: TenantSpec) -> None:
    registry, good = LastGood(check_tenant, "tenant_unusable"), TenantSpec("acme", pool="own", services=("billing",))
    assert registry.usable({"acme": bad}) == {}
    assert registry.usable({"acme": good}) == {"acme": good}
    assert registry.usable({"acme": bad, "no name": TenantSpec("no name")}) == {"acme": good}


@pytest.mark.parametrize(
    "numbers",
    [
        {"requests_per_s": 1e-322},
        {"requests_per_s": 1e-20},
        {"requests_per_s": 0.0},
        {"requests_per_s": float("nan")},
        {"requests_per_s": 1e7},
        {"requests_per_s": 1.0, "burst_requests": 0},
        {"tokens_per_minute": 0},
        {"tokens_per_day": -1},
        {"max_prompt_tokens": 0},
        {"max_completion_tokens": -1},
        {"max_queue_requests": 0},
        {"max_queue_bytes": -1},
        {"weight": 1e-300},
        {"groups": (TenantGroup("a", 1e12),)},
    ],
    ids=str,
)
def test_numbers_that_no_file_may_hold_are_not_used(numbers: dict[str, Any]) -> None:
    registry, good = LastGood(check_tenant, "tenant_unusable"), TenantSpec("acme", requests_per_s=5.0)
    registry.usable({"acme": good})
    assert registry.usable({"acme": TenantSpec("acme", **numbers)}) == {"acme": good}


def test_what_a_file_may_hold_is_used(tmp_path: Path) -> None:
    """The same bounds, to the unit."""
    file = tmp_path / "tenants.yaml"
    file.write_text("""\
tenants:
  - tenant: least
    weight: 0.001
    queue: {max_requests: 1, max_bytes: 1}
    quotas: {requests_per_s: 0.001, burst_requests: 1, tokens_per_minute: 1, tokens_per_day: 1}
    groups: [{group: a, weight: 0.001}]
  - tenant: most
    weight: 1000000
    quotas: {requests_per_s: 1000000, burst_requests: 1000000}
    groups: [{group: a, weight: 1000000}]
  - tenant: plain
""")
    specs = {spec.tenant: spec for spec in load_tenants(file)}
    assert LastGood(check_tenant, "tenant_unusable").usable(specs) == specs


def test_a_tenant_that_is_withdrawn_is_gone() -> None:
    registry = LastGood(check_tenant, "tenant_unusable")
    registry.usable({"acme": TenantSpec("acme")})
    assert registry.usable({}) == {}


def test_nothing_changes_while_the_tenants_do_not() -> None:
    registry, specs = LastGood(check_tenant, "tenant_unusable"), {"acme": TenantSpec("acme")}
    assert registry.usable(specs) is registry.usable(specs)

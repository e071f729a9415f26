"""Tenants as JSON, and what is decided about changes of them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fairlane.guardrail_records import GuardrailPolicy, GuardrailRule
from fairlane.records import Budget, LatencyTarget, TenantGroup, TenantSpec
from fairlane_server.administration.tenants import (
    ETagNeededError,
    TenantChangedError,
    TenantConflictError,
    TenantNotFoundError,
    decide_removal,
    decide_set,
    etag_of,
)
from fairlane_server.control.published_tenants import managed_by_api, with_api_tenants
from fairlane_server.control.publisher import compare
from fairlane_server.control.tenants_file import API, load_tenants, tenant_document, tenant_of_json
from fairlane_server.yaml_config import ConfigError, load_json

REPOSITORY = Path(__file__).parents[3]
FULL = TenantSpec(
    "acme",
    weight=2.5,
    classes=("high",),
    models=("m",),
    services=("search",),
    pool="own",
    max_queue_requests=7,
    max_queue_bytes=8,
    requests_per_s=1.5,
    burst_requests=3,
    tokens_per_minute=4,
    tokens_per_day=5,
    groups=(TenantGroup("a", 2.0), TenantGroup("b", 1.0, "a")),
    forbidden_degradations=("no_retrieval",),
    max_prompt_tokens=9,
    max_completion_tokens=10,
    cache="exact",
    latency_targets=(LatencyTarget("high", 200),),
    budgets=(Budget("tenant", "month", "EUR", 5_000_000, 7_250_000_000, True), Budget("key:a", "day", "EUR", None, 1)),
    guardrails=GuardrailPolicy(input=(GuardrailRule("secrets", "block", "closed"),)),
    managed_by=API,
)
OF_FILE = TenantSpec("globex")


def read_back(spec: TenantSpec) -> TenantSpec:
    return tenant_of_json(spec.tenant, json.dumps(tenant_document(spec)).encode())


def test_a_tenant_as_json_has_the_keys_of_the_file_and_is_read_back() -> None:
    assert all(getattr(FULL, name) != getattr(TenantSpec("x"), name) for name in TenantSpec.__slots__)
    assert read_back(FULL) == FULL
    for spec in load_tenants(REPOSITORY / "deploy" / "tenants.yaml"):
        assert read_back(spec) == replace(spec, managed_by=API)
    assert read_back(TenantSpec("acme")) == TenantSpec("acme", managed_by=API)


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ('{"wieght": 2}', "wieght"),
        ('{"weight": "2"}', "weight"),
        ('{"weight": 2, "weight": 3}', "weight"),
        ('{"quotas": {"tokens_per_day": 0}}', "quotas.tokens_per_day"),
        ('{"groups": [{"group": "a", "parent": "b"}]}', "groups[0].parent"),
        ('{"kafka": {"request_percent": 500}}', "kafka"),
        ('{"tenant": "globex"}', "tenant"),
        ("[]", ""),
        ("not json", ""),
        ('{"weight": NaN}', ""),
        ("[" * 100_000, ""),
    ],
)
def test_what_is_wrong_is_named(body: str, key: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        tenant_of_json("acme", body.encode())
    assert wrong.value.key == key


def test_numbers_keep_the_text_that_they_were_written_as() -> None:
    node = load_json(b'{"amount": 0.1000000000000000055, "count": 12, "text": "3.50"}')
    assert [node.fields[name].text for name in ("amount", "count", "text")] == ["0.1000000000000000055", "12", "3.50"]


def test_a_new_tenant_needs_no_etag_and_an_existing_one_does() -> None:
    change = decide_set({}, FULL, None, adopt=False)
    assert (change.before, change.after) == (None, FULL)
    published = {"acme": FULL}
    with pytest.raises(ETagNeededError):
        decide_set(published, FULL, None, adopt=False)
    with pytest.raises(TenantChangedError):
        decide_set(published, FULL, etag_of(replace(FULL, weight=1.0)), adopt=False)
    assert decide_set(published, replace(FULL, weight=3.0), etag_of(FULL), adopt=False).before == FULL
    with pytest.raises(TenantNotFoundError):
        decide_set({}, FULL, etag_of(FULL), adopt=False)
    # Unreadable by this version: it can be replaced by whoever has seen that.
    assert decide_set({"acme": None}, FULL, etag_of(None), adopt=False).before is None


def test_a_tenant_of_the_file_is_changed_once_it_is_adopted() -> None:
    published = {"globex": OF_FILE}
    wanted = replace(OF_FILE, weight=2.0, managed_by=API)
    with pytest.raises(TenantConflictError, match="tenants file"):
        decide_set(published, wanted, etag_of(OF_FILE), adopt=False)
    assert decide_set(published, wanted, etag_of(OF_FILE), adopt=True).after == wanted
    with pytest.raises(TenantConflictError):
        decide_removal(published, "globex", etag_of(OF_FILE))
    with pytest.raises(TenantNotFoundError):
        decide_removal(published, "initech", None)
    assert decide_removal({"acme": FULL}, "acme", etag_of(FULL)).after is None


def test_a_pool_is_dedicated_to_one_tenant() -> None:
    with pytest.raises(TenantConflictError) as wrong:
        decide_set({"globex": replace(OF_FILE, pool="own")}, FULL, None, adopt=False)
    assert wrong.value.field == "pool"


def test_the_file_leaves_the_apis_tenants_alone() -> None:
    of_api = {"acme": FULL, "initech": TenantSpec("initech", managed_by=API)}
    published = {**of_api, "globex": OF_FILE, "gone": TenantSpec("gone")}
    assert managed_by_api(published) == of_api
    file = {"acme": TenantSpec("acme"), "globex": OF_FILE, "new": TenantSpec("new")}
    made = compare(file, published, managed_by_api(published))
    assert [*made.changed] == ["new"]
    assert (made.unchanged, made.unknown, made.foreign) == (("globex",), ("gone",), ("acme",))
    forced = compare(file, published, of_api.keys() - file.keys())
    assert [*forced.changed] == ["acme", "new"]
    assert forced.unknown == ("gone",)


def test_no_command_forgets_a_tenant_of_the_api() -> None:
    found = with_api_tenants([TenantSpec("acme"), OF_FILE], {"acme": FULL, "unreadable": None, "globex": OF_FILE})
    assert found == (FULL, OF_FILE)

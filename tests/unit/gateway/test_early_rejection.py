"""Refused before it is published is only what would be refused anyway."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.outcomes import Code, Degradation
from fairlane.records import InferenceRequest, ModelVersion, RequestInput, TenantSpec
from fairlane_server.admission_rule import CAPACITY_TTL_MS, MOST_RETRY_MS, CapacityState, PoolCapacity, predict
from fairlane_server.kafka.load_board import LoadView, PoolRow, TenantRow
from fairlane_server.models.catalog import catalog_of
from producers.gateway.pipeline.early_rejection import (
    FRESH_MS,
    NO_CAPACITY,
    SLACK_MS,
    LatestLoad,
    RegistrySnapshot,
    pool_of,
    reject_early,
)
from producers.openai_api.errors import GatewayError

NOW = 1_000_000_000
MODEL = ModelVersion("chat", "1", "gpu", "simulated", ("generate",), "chat", 4_096, 512)
SPEC = TenantSpec("acme", max_queue_requests=100)
REGISTRY = RegistrySnapshot({"acme": SPEC}, catalog_of(MODEL))
REQUEST = InferenceRequest("id-1", "chat", "generate", RequestInput(prompt="p"), timeout_ms=30_000)
POOL = PoolRow("gpu", 2, 0, 0, 1_000.0, 0.5, 4_000, 1_000, 3, 500, {"normal": 3}, 1)
TENANT = TenantRow("acme", "gpu", 1.0, 3, 500, 0, 400.0, None, 1.0)


def picture(
    pool: PoolRow | None = POOL, tenant: TenantRow | None = TENANT, at_ms: int = NOW, dispatchers: int = 1
) -> LatestLoad:
    seen = LatestLoad()
    seen.look(view(pool, tenant, at_ms, dispatchers))
    return seen


def view(pool: PoolRow | None, tenant: TenantRow | None, at_ms: int, dispatchers: int = 1) -> LoadView:
    return LoadView(at_ms, dispatchers, 0, () if pool is None else (pool,), () if tenant is None else (tenant,))


def asked(
    seen: LatestLoad | None = None, registry: RegistrySnapshot = REGISTRY, now_ms: int = NOW, **fields: Any
) -> GatewayError | None:
    return reject_early("acme", replace(REQUEST, **fields), registry, seen or picture(), now_ms)


def told(refusal: GatewayError | None) -> tuple[int, str]:
    assert refusal is not None
    return refusal.status, refusal.code


def test_what_there_is_room_for_is_let_in() -> None:
    assert asked() is None


def test_whoever_is_not_registered_is_refused() -> None:
    refusal = reject_early("globex", REQUEST, REGISTRY, picture(), NOW)
    assert told(refusal) == (403, Code.FORBIDDEN)


def test_models_that_are_not_there_or_not_for_the_tenant_are_refused() -> None:
    assert told(asked(model="secret prompt")) == (404, Code.UNKNOWN_MODEL)
    assert "secret" not in str(asked(model="secret prompt")), "what stands in the wrong field is not quoted"
    narrow = RegistrySnapshot({"acme": replace(SPEC, models=("other",))}, catalog_of(MODEL))
    assert told(asked(registry=narrow)) == (403, Code.FORBIDDEN)


@pytest.mark.parametrize(
    "registry", [RegistrySnapshot(), RegistrySnapshot({"acme": SPEC}), RegistrySnapshot(None, catalog_of(MODEL))]
)
def test_nothing_is_refused_while_tenants_and_models_are_not_known(registry: RegistrySnapshot) -> None:
    assert asked(registry=registry, model="unknown") is None


# Capacity


def lost(since_ms: int, **changes: Any) -> LatestLoad:
    seen = LatestLoad()
    seen.look(view(replace(POOL, **changes), TENANT, NOW - since_ms))
    seen.look(view(replace(POOL, consumers=0, consumers_gone=2), TENANT, NOW))
    return seen


def test_a_pool_that_lost_its_consumers_for_longer_than_there_is_time_is_no_capacity() -> None:
    refusal = asked(lost(60_000))
    assert told(refusal) == (503, NO_CAPACITY)
    assert refusal is not None
    assert refusal.retry_after_ms is not None
    assert refusal.retry_after_ms >= 60_000


def test_a_pool_that_was_lost_a_moment_ago_may_be_back_in_time() -> None:
    assert asked(lost(5_000)) is None
    assert told(asked(lost(5_000), timeout_ms=2_000)) == (503, NO_CAPACITY)


def test_a_pool_that_never_reported_takes_anything() -> None:
    """Work that comes is its reason to start."""
    assert asked(picture(None, None)) is None
    assert asked(picture(replace(POOL, consumers=0, capacity_tokens_per_s=0.0), None), timeout_ms=1) is None


def test_a_pool_that_came_back_takes_work_again() -> None:
    seen = lost(60_000)
    seen.look(view(POOL, TENANT, NOW))
    assert asked(seen) is None


def test_a_smaller_model_may_answer_from_another_pool() -> None:
    tiny = replace(MODEL, model="tiny", pool="elsewhere")
    models = catalog_of(replace(MODEL, smaller_model="tiny"), tiny)
    assert asked(lost(60_000), RegistrySnapshot({"acme": SPEC}, models)) is None


@pytest.mark.parametrize(
    ("spec", "smaller"),
    [
        ({}, {"pool": MODEL.pool}),
        ({}, {"tasks": ("embed",)}),
        ({}, None),
        ({"models": ("chat",)}, {}),
        ({"forbidden_degradations": (Degradation.SMALLER_MODEL,)}, {}),
    ],
    ids=["in the same pool", "does something else", "is not there", "may not be used", "forbidden"],
)
def test_a_smaller_model_that_cannot_answer_sooner_saves_nothing(
    spec: dict[str, Any], smaller: dict[str, Any] | None
) -> None:
    models = [replace(MODEL, smaller_model="tiny")]
    if smaller is not None:
        models.append(replace(MODEL, **{"model": "tiny", "pool": "elsewhere", **smaller}))
    registry = RegistrySnapshot({"acme": replace(SPEC, **spec)}, catalog_of(*models))
    assert told(asked(lost(60_000), registry)) == (503, NO_CAPACITY)


# The queue


def full(**changes: Any) -> LatestLoad:
    row = replace(TENANT, waiting_requests=100, waiting_tokens=40_000, shed_recently={Code.OVERLOADED: 3})
    return picture(POOL, replace(row, **changes))


def test_a_full_queue_that_refuses_already_is_overloaded() -> None:
    refusal = asked(full())
    assert told(refusal) == (429, Code.OVERLOADED)
    assert refusal is not None
    assert refusal.retry_after_ms is not None
    assert refusal.retry_after_ms >= 10_000, "a tenth of 40,000 tokens at 400 a second"


@pytest.mark.parametrize(
    "changes",
    [
        {"waiting_requests": 99},
        {"shed_recently": {}},
        {"shed_recently": {"expired": 9}},
        {"shed_recently": {"latency_target": 9}},
    ],
)
def test_it_is_not_sure_that_a_queue_is_full(changes: Mapping[str, Any]) -> None:
    """Offline work counts among what waits, and what was refused may have been for another reason."""
    assert asked(full(**changes)) is None


def test_another_tenants_queue_is_its_own() -> None:
    row = replace(TENANT, tenant="globex", waiting_requests=100, shed_recently={Code.OVERLOADED: 3})
    assert asked(picture(POOL, row)) is None


# The deadline


def test_what_was_dispatched_before_takes_longer_than_there_is_time() -> None:
    refusal = asked(picture(replace(POOL, in_flight_tokens=60_000)))
    assert told(refusal) == (429, Code.DEADLINE_UNMEETABLE)
    assert asked(picture(replace(POOL, in_flight_tokens=60_000)), timeout_ms=60_000) is None


def test_what_waits_is_not_surely_before_it() -> None:
    """Not even of the tenant itself: it may be backfill, or have later deadlines, which go after it."""
    tenant = replace(TENANT, waiting_tokens=200_000, entitled_share=0.5)
    assert asked(picture(replace(POOL, waiting_tokens=200_000), tenant)) is None


def test_a_request_that_says_nothing_has_the_time_of_its_class() -> None:
    seen = picture(replace(POOL, in_flight_tokens=50_000))
    assert asked(seen, timeout_ms=None) is None
    assert told(asked(seen, timeout_ms=None, priority="high")) == (429, Code.DEADLINE_UNMEETABLE)


@pytest.mark.parametrize("dispatchers", [0])
def test_nothing_is_refused_for_the_load_while_no_dispatcher_reports(dispatchers: int) -> None:
    assert asked(picture(replace(POOL, in_flight_tokens=10**9), dispatchers=dispatchers)) is None


def test_nothing_is_refused_by_what_was_heard_too_long_ago() -> None:
    seen = picture(replace(POOL, in_flight_tokens=10**9))
    assert asked(seen, now_ms=NOW + FRESH_MS) is not None
    assert asked(seen, now_ms=NOW + FRESH_MS + 1) is None
    assert asked(lost(60_000), now_ms=NOW + FRESH_MS + 1) is None


@given(
    st.integers(0, 200_000), st.integers(0, 200_000), st.integers(0, 400), st.integers(1, 120_000), st.integers(0, 3)
)
def test_an_idle_pool_refuses_nobody(in_flight: int, waiting: int, requests: int, timeout_ms: int, shed: int) -> None:
    """Whatever else was heard: the dispatcher takes what comes when nothing is in flight and nothing waits."""
    row = replace(TENANT, waiting_requests=requests, waiting_tokens=waiting, shed_recently={Code.OVERLOADED: shed})
    pool = replace(POOL, in_flight_tokens=in_flight, waiting_tokens=waiting)
    refusal = asked(picture(pool, row), timeout_ms=timeout_ms)
    if refusal is not None:
        assert in_flight or waiting or (requests >= SPEC.max_queue_requests and shed)
        assert refusal.retry_after_ms is not None
        assert refusal.retry_after_ms > 0


@pytest.mark.parametrize(
    ("own", "dedicated", "expected"),
    [(None, (), "gpu"), ("gpu", (), "gpu"), ("own", ("own",), "own"), ("own", (), None)],
)
def test_the_pool_is_the_tenants_own_if_it_has_one(own: str | None, dedicated: tuple[str, ...], expected: str) -> None:
    assert pool_of(replace(SPEC, pool=own), replace(MODEL, dedicated_pools=dedicated)) == expected


def test_a_lost_pool_is_lost_since_its_last_report_counted() -> None:
    def known(seen: LatestLoad, pool: str) -> PoolCapacity:
        return seen.ahead(pool, NOW).capacity

    assert known(lost(7_000), "gpu") == PoolCapacity(CapacityState.LOST, lost_for_ms=7_000 + CAPACITY_TTL_MS)
    assert known(picture(), "gpu").state is CapacityState.LIVE
    assert known(picture(), "never") == PoolCapacity()


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0.01, 1), st.integers(1, 60_000))
def test_the_dispatcher_would_refuse_it_for_the_same_load(
    in_flight: int, waiting: int, own: int, share: float, timeout_ms: int
) -> None:
    """By the same prediction, which is never sooner for a request that costs something."""
    pool = replace(POOL, in_flight_tokens=in_flight, waiting_tokens=waiting)
    seen = picture(pool, replace(TENANT, waiting_tokens=own, entitled_share=share))
    refusal = asked(seen, timeout_ms=timeout_ms)
    prediction = predict(seen.ahead("gpu", NOW), cost_tokens=0)
    if refusal is not None:
        assert refusal.code == Code.DEADLINE_UNMEETABLE
        assert prediction.finish_ms > timeout_ms
        assert refusal.retry_after_ms is not None
        assert refusal.retry_after_ms >= min(prediction.ms_until_in_time(timeout_ms) - 1, MOST_RETRY_MS / 1.5)
    else:
        assert prediction.wait_ms <= timeout_ms + SLACK_MS

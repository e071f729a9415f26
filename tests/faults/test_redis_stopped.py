"""Redis goes away, or hangs, while every request asks it for quota and for duplicates, and those that are answered from
documents ask it for their passages: none fails or waits because of it, and the passages come from Postgres.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep

import pytest

from benchmarks.load import LoadGenerator, submitted_within
from fairlane.clock import now_ms
from fairlane.outcomes import Outcome
from fairlane.records import TenantSpec
from tests.kit.handbook import AROUND_S, BUDGET_MS, WARM_UP_S, Probes, allowed_p99_ms, fill, grounded, p99_ms
from tests.kit.load_kit import ENV, POOL, Load, check_promise
from tests.kit.own_redis import OwnRedis, own_redis_server
from tests.kit.pipeline import Pipeline
from tests.kit.stack import PostgresServer

pytestmark = [pytest.mark.broker, pytest.mark.model, pytest.mark.alone]

_ANSWER_TIMEOUT_S = 60.0

Say = Callable[[str], None]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[OwnRedis]:
    with own_redis_server(tmp_path / "redis") as server:
        yield server


@pytest.mark.parametrize("fault", ["gone", "hung"])
@pytest.mark.parametrize("outage_s", [5.0, pytest.param(30.0, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_no_request_fails_because_redis_does(
    broker: str,
    redis: OwnRedis,
    migrated: PostgresServer,
    unique: str,
    tmp_path: Path,
    seed: int,
    say: Say,
    fault: str,
    outage_s: float,
) -> None:
    say(f"seed {seed}, Redis {fault} for {outage_s:g} s")
    # Quotas that nobody exceeds, and every request asks for.
    specs = [
        TenantSpec(
            tenant,
            requests_per_s=1_000.0,
            burst_requests=5_000,
            tokens_per_minute=10**8,
            tokens_per_day=10**11,
        )
        for tenant in ("a", "b")
    ]
    env = {**ENV, "POSTGRES_DSN": migrated.dispatcher_dsn, "RETRIEVAL_BUDGET_MS": str(BUDGET_MS)}
    with Pipeline(broker, tmp_path / "pipeline", unique, tenants=specs, redis_url=redis.url, env=env) as pipeline:
        grounded_tenant = pipeline.tenant("b")
        fill(migrated.operator_dsn, grounded_tenant)
        pipeline.start(dispatchers=1, consumers=POOL.consumers)
        replies = pipeline.replies()
        probes = Probes(pipeline, "b", replies)
        probes.wait_found("passages")
        load = Load(pipeline, seed)
        seconds = WARM_UP_S + AROUND_S + outage_s + AROUND_S
        plain = load.plan([load.offered("a", 0.2)], seconds)
        asking = grounded(pipeline, load.plan([load.offered("b", 0.2)], seconds))
        with LoadGenerator(pipeline.settings, list(pipeline.tenants)) as generator:
            generator.start(sorted([*plain, *asking], key=lambda record: record.at_s))
            sleep(WARM_UP_S + AROUND_S)  # the load before the fault; nothing is waited for
            redis.kill() if fault == "gone" else redis.hang()
            begun_at_ms = now_ms()
            sleep(outage_s)  # the fault itself
            ended_at_ms = now_ms()
            redis.start() if fault == "gone" else redis.go_on()
            generator.wait_published(seconds + 60)
            generator.wait_answered(_ANSWER_TIMEOUT_S)
            observed = generator.observed()
        found = replies.wait([one.request_id for one in observed])
        check_promise(pipeline, observed, probes.request_ids)
    assert {one.outcome for one in observed} == {Outcome.OK}
    warm_at_ms = generator.started_at_ms + round(WARM_UP_S * 1_000)
    for tenant in pipeline.tenants:
        own = [one for one in observed if one.tenant == tenant and one.submitted_at_ms >= warm_at_ms]
        during = submitted_within(own, (begun_at_ms, ended_at_ms))
        around = [one for one in own if one not in during]
        with_passages = [sum(bool(found[one.request_id].passages) for one in part) for part in (during, around)]
        say(
            f"{tenant}: {len(during)} of {len(own)} requests during the outage, "
            f"with passages {with_passages[0]}, and {with_passages[1]} of the others; "
            f"p99 {p99_ms(during)} ms, others {p99_ms(around)} ms; "
            f"slowest {max(one.latency_ms for one in during)} ms, others {max(one.latency_ms for one in around)} ms"
        )
        assert len(during) > outage_s / 2
        assert p99_ms(during) <= allowed_p99_ms(around)
        if tenant == grounded_tenant:
            # Without Redis they are found as often as with it, which a slow machine makes less often.
            share = with_passages[1] / len(around)
            assert share > 0.3
            assert with_passages[0] >= 0.7 * share * len(during)

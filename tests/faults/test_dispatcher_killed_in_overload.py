"""The only dispatcher is killed while tenants ask for three times the capacity, and two take its place."""

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from time import monotonic, sleep

import pytest

from benchmarks.faults.rig import members
from benchmarks.load import LoadGenerator, completions, waits
from benchmarks.service_curve import longest_common_wait
from benchmarks.simulated_pool import UNBOUNDED
from fairlane.clock import now_ms
from fairlane.names import LEDGER_AUDIT
from fairlane.outcomes import Outcome
from fairlane.records import AuditEvent, TenantSpec
from tests.kit.fair_again import (
    OFFERED,
    PUBLISHED_PART,
    RESTORED_WITHIN_MS,
    WEIGHTS,
    allowed_gap_tokens,
    judge,
    served_again_after_ms,
)
from tests.kit.load_kit import ENV, NO_ENGINE_TIME, POOL, Load, check_promise
from tests.kit.pipeline import Pipeline
from tests.kit.waiting import eventually, until_ms

pytestmark = [pytest.mark.broker, pytest.mark.alone]

_HELD_REQUESTS = 200_000
_HELD_BYTES = 1 << 30
_NO_TARGET = {"LATENCY_TARGET_MS": "high=86400000,normal=86400000,low=86400000"}
_WARM_UP_S = 3.0
_OWN_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 60.0

Say = Callable[[str], None]


@pytest.mark.parametrize(
    ("before_s", "after_s"),
    [(8.0, 15.0), pytest.param(30.0, 60.0, marks=[pytest.mark.long, pytest.mark.timeout(600)])],
)
def test_nothing_is_lost_and_fairness_returns(
    broker: str, redis_url: str, unique: str, tmp_path: Path, seed: int, say: Say, before_s: float, after_s: float
) -> None:
    """``after_s`` counts from when both own tenants."""
    say(f"seed {seed}")
    specs = [
        TenantSpec(tenant, weight=WEIGHTS[tenant], max_queue_requests=_HELD_REQUESTS, max_queue_bytes=_HELD_BYTES)
        for tenant in OFFERED
    ]
    with Pipeline(
        broker, tmp_path, unique, tenants=specs, redis_url=redis_url, env=ENV | UNBOUNDED | _NO_TARGET
    ) as pipeline:
        pipeline.start(dispatchers=1, consumers=POOL.consumers)
        load = Load(pipeline, seed)
        published_s = before_s + PUBLISHED_PART * after_s
        planned = load.plan([load.offered(tenant, part) for tenant, part in OFFERED.items()], published_s)
        with LoadGenerator(pipeline.settings, list(pipeline.tenants)) as generator:
            generator.start(planned)
            sleep(before_s)  # the overload before the fault; nothing is waited for
            killed_at_ms, owned_after_ms = kill_and_replace(pipeline)
            generator.wait_published(published_s + 60)
            after = (killed_at_ms, killed_at_ms + owned_after_ms + round(after_s * 1000))
            until_ms(after[1], after_s + 60)
            # Enough was seen. What still waits is answered by a faster pool, in a fraction of the time.
            for number in range(1, POOL.consumers + 1):
                pipeline.consumer(POOL.consumers + number, NO_ENGINE_TIME)
            generator.wait_answered(sum(OFFERED.values()) * published_s + _ANSWER_TIMEOUT_S)
            observed = generator.observed()
        check_promise(pipeline, observed)
        refused = {one.request_id for one in observed if one.outcome != Outcome.OK}
        why = next(decisions(pipeline, refused), None)
        started_at_ms = generator.started_at_ms
    tenants = list(pipeline.tenants)
    before = (started_at_ms + round(_WARM_UP_S * 1000), killed_at_ms)
    allowed = allowed_gap_tokens(POOL, load.sampler)
    weights = {spec.tenant: spec.weight for spec in pipeline.tenants.values()}
    seen = judge(completions(observed), weights, before, after, allowed)
    served_after_ms = served_again_after_ms(observed, tenants, killed_at_ms)
    restored_ms = max(seen.fair_after_ms, served_after_ms)
    say(
        f"difference of service {seen.steady_gap_tokens:.0f} cost tokens before the kill and {seen.gap_tokens:.0f} "
        f"after it, allowed {allowed:.0f}; from the kill: both own tenants after {owned_after_ms} ms, everybody is "
        f"served again after {served_after_ms} ms, the difference is within what is allowed from {seen.fair_after_ms} "
        f"ms on; so fairness is restored {restored_ms} ms after the kill"
    )
    assert not refused, f"{len(refused)} of {len(observed)} were refused; the first by {why}"
    # Everybody had something waiting throughout, so that a difference of service is one of fairness.
    throughout = (before[0], after[1])
    assert longest_common_wait(waits(observed, tenants, after[1]), throughout) == throughout
    assert seen.steady_gap_tokens <= allowed
    assert restored_ms <= RESTORED_WITHIN_MS


def decisions(pipeline: Pipeline, request_ids: Collection[str]) -> Iterator[AuditEvent]:
    """What was decided about these requests."""
    if request_ids:
        reader = pipeline.reader(LEDGER_AUDIT)
        reader.read_to_end()
        yield from (one for one in pipeline.decoded(reader, AuditEvent) if one.request_id in request_ids)


def kill_and_replace(pipeline: Pipeline) -> tuple[int, int]:
    """SIGKILL the dispatcher, start it again as its supervisor would, and a second one with it. Returns when it was
    killed and how many milliseconds later both owned partitions."""
    # It stands in the group until its session times out, under the name that its successor has.
    dead = {member.member_id for member in members(pipeline.admin, pipeline.dispatcher_group)}
    assert len(dead) == 1
    pipeline.processes["dispatcher-1"].kill()
    killed_at_ms, killed_at = now_ms(), monotonic()
    names = sorted(pipeline.dispatcher(number).name for number in (1, 2))

    def both_own() -> bool:
        here = members(pipeline.admin, pipeline.dispatcher_group)
        return sorted(member.name for member in here) == names and all(
            member.partitions and member.member_id not in dead for member in here
        )

    eventually(both_own, _OWN_TIMEOUT_S, "partitions for both dispatchers")
    return killed_at_ms, round((monotonic() - killed_at) * 1000)

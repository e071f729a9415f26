"""What the dispatcher learns of its surroundings, and of what became of its own transactions."""

from prometheus_client import REGISTRY

from fairlane.records import TenantSpec
from fairlane_server.admission_rule import CapacityState
from stream_processors.dispatcher.output.tenant_counters import TenantCounters
from stream_processors.dispatcher.scheduling.in_flight import RESERVATION_TTL_MS
from tests.kit.dispatcher_bench import Bench, encoded


def test_a_report_from_before_the_start_is_as_old_as_its_record() -> None:
    bench = Bench()
    bench.report(1_000.0, age_ms=240_000)
    lost = bench.dispatcher.scheduler.capacity.pool("pool", bench.now_ms)
    assert (lost.state, lost.lost_for_ms, lost.last_cost_tokens_per_s) == (CapacityState.LOST, 240_000, 1_000.0)
    bench.report(500.0)
    assert bench.dispatcher.scheduler.capacity.pool("pool", bench.now_ms).state is CapacityState.LIVE


def test_what_waits_for_its_transaction_holds_its_room_until_that_committed() -> None:
    bench = Bench()
    bench.report()
    settled = bench.run(encoded(1))
    in_flight = bench.dispatcher.scheduler.in_flight
    held = in_flight.tokens("pool")
    assert held
    assert in_flight.expire(bench.now_ms + 10 * RESERVATION_TTL_MS) == 0
    bench.dispatcher.on_committed(settled)
    assert in_flight.expire(bench.now_ms + RESERVATION_TTL_MS - 1) == 0
    assert in_flight.tokens("pool") == held
    assert in_flight.expire(bench.now_ms + RESERVATION_TTL_MS) == 1
    assert in_flight.tokens("pool") == 0


def shown(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, labels)


def test_a_pool_that_nobody_sends_to_is_shown_as_well() -> None:
    bench = Bench()
    bench.report(500.0, pool="quiet")
    bench.dispatcher.updates.show()
    assert shown("fairlane_pool_consumers", pool="quiet") == 1
    bench.now_ms += 60_000
    bench.dispatcher.updates.show()
    assert shown("fairlane_pool_consumers", pool="quiet") == 0
    assert shown("fairlane_pool_lost_seconds", pool="quiet") == 60


def test_what_was_counted_of_a_tenant_goes_with_it() -> None:
    bench = Bench()
    counts, tenants = bench.dispatcher.output.counts, ("acme", "brief-stay")
    counts.set_tenants(tenants)
    bench.register([TenantSpec(name) for name in tenants])
    bench.assign("requests.brief-stay")
    bench.report()
    bench.run(encoded(1), topic="requests.brief-stay")
    bench.run(encoded(2))
    kept = shown("fairlane_requests_read_total", tenant="acme")
    assert kept
    assert shown("fairlane_requests_read_total", tenant="brief-stay") == 1
    assert shown("fairlane_decisions_total", tenant="brief-stay", decision="dispatched", code="") == 1

    counts.set_tenants(["acme"])
    bench.register([TenantSpec("acme")])
    bench.run(b"", b"", encoded(3), topic="requests.brief-stay")
    (reply,) = bench.decoded("replies.brief-stay")
    assert reply.code == "forbidden"
    labelled = {
        (metric.name, sample.labels["tenant"])
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if "tenant" in sample.labels
    }
    assert not [name for name, tenant in labelled if tenant == "brief-stay"]
    assert shown("fairlane_requests_read_total", tenant="acme") == kept
    refused = shown("fairlane_decisions_total", tenant="", decision="refused", code="forbidden")
    assert refused, "counted for all that are not registered"


def test_before_the_tenants_are_known_each_is_counted_by_its_name() -> None:
    assert TenantCounters().label("acme") == "acme"

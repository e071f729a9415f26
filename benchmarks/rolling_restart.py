"""rolling-restart: latency and throughput of tenants while a pool's consumers restart one after another.

Three consumers whose simulated engines take a fixed time for a batch, under a steady load of 60 % of their capacity:
90 % of what two can do. Each gets SIGTERM, must end with status 0, is started again at once, and owns partitions by the
broker's word before the next one's turn. Six partitions, so that two and three members have equally many.

Throughput is the number of replies that readers of committed records see within a second, wherever that second lies
between the first SIGTERM and the last consumer's partitions; latency is that of the requests published then. Both are
compared with the same load on the same consumers just before.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from confluent_kafka.admin import AdminClient

from benchmarks.cluster import BenchStack, cluster, wait_until
from benchmarks.faults.rig import members
from benchmarks.load import WARM_UP_S, LoadGenerator, Observed, Offered, latency_percentile_ms, plan, submitted_within
from benchmarks.result import Figure, Result
from benchmarks.service_curve import Interval, least_within
from benchmarks.simulated_pool import POOL, UNBOUNDED, UNBOUNDED_TENANT, consumer, dispatcher, fixed_batch_engine
from benchmarks.trace import TraceSampler
from fairlane.clock import now_ms
from fairlane.kafka_clients import KafkaAdmin
from fairlane.kafka_config import connection
from fairlane.names import pool_group, priority_topic
from fairlane.outcomes import Priority
from producers.replay.trace import TraceRow

NAME = "rolling-restart"
CALM_S = 30.0
HOW = f"one run of three restarts after {CALM_S:g} s of calm"
CONSUMERS = tuple(f"consumer-{number}" for number in range(1, 4))
LOAD = 0.6
"""In parts of the capacity of all consumers."""
BATCH_MS, BATCH_ITEMS = 400.0, 8
WINDOW_MS = 1_000
AIM_THROUGHPUT, AIM_P99 = 0.5, 3.0
_PARTITIONS = 6
_TENANTS = ("acme", "globex", "initech")
_LONGEST_RESTART_S = 60.0
_TIMEOUT_MS = 120_000
_ANSWER_TIMEOUT_S = 60.0
_SEED = 31
_ENGINE = fixed_batch_engine(BATCH_MS, BATCH_ITEMS)
_EQUAL = (TraceRow(0.0, 50, 20), TraceRow(1.0, 50, 20))
"""All requests cost the same."""


def run(calm_s: float = CALM_S, consumers: Sequence[str] = CONSUMERS) -> Result:
    """Restart these, one after the other, after so many seconds without any restart."""
    services = [
        dispatcher(env=UNBOUNDED),
        *(consumer(number, _ENGINE) for number in range(1, len(CONSUMERS) + 1)),
    ]
    tenants = [{"tenant": tenant, **UNBOUNDED_TENANT} for tenant in _TENANTS]
    partitions = {priority_topic(POOL, priority): _PARTITIONS for priority in Priority}
    seconds = WARM_UP_S + calm_s + _LONGEST_RESTART_S * len(consumers)
    with (
        cluster(services, tenants=tenants, partitions=partitions) as running,
        LoadGenerator(running.settings, _TENANTS) as load,
    ):
        admin, group = KafkaAdmin(connection(running.settings)), pool_group(running.settings.group_prefix, POOL)
        wait_until(lambda: _ids(admin, group), _LONGEST_RESTART_S, "partitions for every consumer")
        rate = LOAD * len(CONSUMERS) * BATCH_ITEMS * 1000 / BATCH_MS / len(_TENANTS)
        offered = [Offered(tenant, rate, steady=True, timeout_ms=_TIMEOUT_MS) for tenant in _TENANTS]
        load.start(plan(offered, seconds, TraceSampler(_EQUAL, _SEED, scale=1.0)))
        calm_interval = load.interval(calm_s)
        wait_until(lambda: now_ms() >= calm_interval[1], WARM_UP_S + calm_s + 10, "the end of the calm")
        restarts = {name: _restart(running, partial(_ids, admin, group), name) for name in consumers}
        restless_interval = (calm_interval[1], now_ms())
        load.cut()
        load.wait_published(_ANSWER_TIMEOUT_S)
        load.wait_answered(_ANSWER_TIMEOUT_S)
        observed, lag_ms = load.observed(), load.checked_lag_ms()
    calm, restless = _phase(observed, calm_interval), _phase(observed, restless_interval)
    unserved = sum(not one.served for one in observed)
    least, least_calm = (phase["least_in_window"] / calm["replies_per_window"] for phase in (restless, calm))
    p99_ratio = restless["p99_ms"] / calm["p99_ms"]
    ended_s, owned_s = zip(*restarts.values(), strict=True)
    return Result(
        NAME,
        (
            Figure("requests that were not served", unserved, "", "at most", 0),
            Figure("replies in the worst second divided by the calm mean", least, "ratio", "at least", AIM_THROUGHPUT),
            Figure("the same in the calm", least_calm, "ratio"),
            Figure("p99 divided by the calm p99", p99_ratio, "ratio", "at most", AIM_P99),
            Figure("calm p99", calm["p99_ms"], "ms"),
            Figure("p99", restless["p99_ms"], "ms"),
            Figure("calm p50", calm["p50_ms"], "ms"),
            Figure("p50", restless["p50_ms"], "ms"),
            Figure("requests", len(observed), ""),
            Figure("of these published while consumers were restarted", restless["requests"], ""),
            Figure("longest end", max(ended_s), "s"),
            Figure("longest restart, until it owned partitions", max(owned_s), "s"),
        ),
        (
            {
                **{f"{name}_ended_s": ended for name, (ended, _) in restarts.items()},
                **{f"{name}_owned_s": owned for name, (_, owned) in restarts.items()},
                "generator_lag_ms": lag_ms,
            },
        ),
    )


def _ids(admin: AdminClient, group: str) -> dict[str, str]:
    """By the broker's word, the member id of each consumer; empty unless all have equally many of all partitions."""
    found = members(admin, group)
    each = len(Priority) * _PARTITIONS // len(CONSUMERS)
    shared = len(found) == len(CONSUMERS) and all(len(member.partitions) == each for member in found)
    return {member.name: member.member_id for member in found} if shared else {}


def _restart(running: BenchStack, ids: Callable[[], Mapping[str, str]], name: str) -> tuple[float, float]:
    """Seconds from SIGTERM to the end of a consumer, and until it owned partitions again."""
    supervisor = running.stack.supervisor
    before, pid = ids()[name], supervisor.process(name).pid
    asked_at_ms = now_ms()
    supervisor.restart(name)
    wait_until(lambda: supervisor.process(name).pid != pid, _LONGEST_RESTART_S, f"the end of {name}")
    ended_at_ms = now_ms()
    status = supervisor.process(name).last_exit
    if status != 0:
        raise RuntimeError(f"{name} ended with {status} on SIGTERM")
    wait_until(lambda: ids().get(name, before) != before, _LONGEST_RESTART_S, f"partitions for {name}")
    return (ended_at_ms - asked_at_ms) / 1000, (now_ms() - asked_at_ms) / 1000


def _phase(observed: Sequence[Observed], interval: Interval) -> dict[str, float]:
    """What tenants saw in a part of the run."""
    start, end = interval
    mine = submitted_within(observed, interval)
    seen = [one.seen_at_ms for one in observed if one.served]
    return {
        "requests": len(mine),
        "p50_ms": latency_percentile_ms(mine, 0.5),
        "p99_ms": latency_percentile_ms(mine, 0.99),
        "replies_per_window": sum(start <= at < end for at in seen) / (end - start) * WINDOW_MS,
        "least_in_window": least_within(seen, interval, WINDOW_MS),
    }

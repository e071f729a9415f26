"""How long rows are kept: what of a projection is too old, and when old rows are removed."""

from itertools import count as counter
from itertools import pairwise

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from fairlane.records import InferenceReply, SourceCoordinate
from fairlane.schema_files import default_codec
from fairlane.settings import IDEMPOTENCY_TTL_S, Settings
from stream_processors.recorder.projection import LogRecord, Projection, project
from stream_processors.recorder.retention import (
    INTERVAL_S,
    OldRows,
    Removal,
    RemovalLag,
    RemovalSchedule,
    Rule,
    drop_old,
    rules_of,
)
from stream_processors.recorder.tables import (
    ALL_TABLES,
    DAILY_SUMS,
    ERASED,
    ERASURES,
    HOURLY_SUMS,
    LABEL_ITEMS,
    MODEL_ROUTES,
    MODEL_VERSIONS,
    RESULTS,
    TENANTS,
    USAGE,
)
from tests.kit.waiting import eventually

SUMS = (*DAILY_SUMS, HOURLY_SUMS)


def projected(*at_ms: int) -> Projection:
    records = [
        LogRecord(
            "replies.acme",
            0,
            offset,
            at,
            None,
            default_codec().encode(
                InferenceReply(f"r-{offset}", "acme", "ok", source=SourceCoordinate("q", 0, offset))
            ),
        )
        for offset, at in enumerate(at_ms)
    ]
    return project(records, default_codec())


def test_every_table_that_grows_has_a_rule_and_its_column_is_a_time_in_milliseconds() -> None:
    rules = rules_of(Settings())
    growing = {table.name for table in ALL_TABLES} - {TENANTS.name, MODEL_VERSIONS.name, MODEL_ROUTES.name}
    assert {rule.name for rule in rules} == growing | {table.name for table in (*SUMS, ERASURES, ERASED, LABEL_ITEMS)}
    assert all(rule.column in rule.table.columns for rule in rules)
    assert all(rule.column.endswith("_at_ms") or rule.table in (*SUMS, ERASED) for rule in rules)
    kept_days = {rule.name: rule.keep_s / 86_400 for rule in rules}
    assert kept_days == {
        "results": 1,
        "conversation_turns": 30,
        "usage": 90,
        "audit_logs": 90,
        "feedback": 90,
        "label_items": 90,
        "evaluation_results": 1,
        "usage_daily": 3 * 365,
        "usage_daily_callers": 3 * 365,
        "erasures": 90,
        "erased": 0,
        "usage_hourly": 90,
    }


def test_sums_are_never_removed_before_what_they_sum_up() -> None:
    rules = {rule.name: rule.keep_s for rule in rules_of(Settings(usage_ttl_s=10**9, usage_daily_ttl_s=86_400))}
    assert rules["usage_daily"] == rules["usage_daily_callers"] == rules["usage"] == 10**9


@given(st.lists(st.integers(0, 100_000), max_size=20), st.integers(0, 200_000))
def test_old_rows_of_a_projection_are_dropped_and_no_others(at_ms: list[int], now_ms: int) -> None:
    projection = projected(*at_ms)
    drop_old(projection, (Rule(RESULTS, "replied_at_ms", 50),), now_ms)
    at = list(RESULTS.columns).index("replied_at_ms")
    left = sorted(int(str(row[at])) for layer in projection.layers.get("results", ()) for row in layer)
    assert left == sorted(at for at in at_ms if at >= now_ms - 50_000)
    assert all(projection.layers.get("results", ())), "an empty layer would be an empty statement"


def test_all_tables_get_their_turn_and_a_table_with_more_to_remove_goes_on_after_a_pause() -> None:
    schedule = RemovalSchedule(["a", "b"], at_once=100)
    assert schedule.next_due() == ("a", 0.0, 100)
    schedule.removed("a", 100, took_s=0.4, now=10.0, chance=0.5)
    assert schedule.next_due() == ("b", 0.0, 100)
    schedule.removed("b", 99, took_s=0.4, now=10.0, chance=0.5)
    # As long as it took: at most half of the time.
    assert schedule.next_due() == ("a", 10.4, 100)
    schedule.removed("a", 0, took_s=0.1, now=10.5, chance=0.0)
    assert schedule.next_due() == ("a", 10.5 + 0.75 * INTERVAL_S, 100)


def test_removals_that_take_too_long_become_smaller_and_grow_again() -> None:
    schedule = RemovalSchedule(["a"], at_once=400)
    sizes = []
    for _ in range(6):
        sizes.append(schedule.next_due()[2])
        schedule.failed("a", now=0.0, chance=0.5, was_late=True)
    assert sizes == [400, 200, 100, 50, 50, 50]
    schedule.failed("a", now=0.0, chance=0.5, was_late=False)
    for _ in range(4):
        sizes.append(schedule.next_due()[2])
        schedule.removed("a", 50, 0.1, 0.0, 0.5)
    assert sizes[6:] == [50, 100, 200, 400]


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_failures_are_tried_again_later(chance: float) -> None:
    schedule = RemovalSchedule(["a"])
    schedule.failed("a", now=100.0, chance=chance, was_late=False)
    _, due_at, _ = schedule.next_due()
    assert 103.0 < due_at < 107.0


@given(st.lists(st.tuples(st.integers(0, 1_000), st.floats(0, 5)), min_size=2, max_size=30))
def test_removing_takes_half_of_the_time_at_most(steps: list[tuple[int, float]]) -> None:
    schedule, now, busy_s = RemovalSchedule(["a"]), 0.0, 0.0
    begun = []
    for count, took_s in steps:
        _, due_at, _ = schedule.next_due()
        now = max(now, due_at)
        begun.append(now)
        now += took_s
        busy_s += took_s
        schedule.removed("a", count, took_s, now, 0.5)
    assert busy_s <= schedule.next_due()[1] - busy_s + 1e-6
    assert all(later > earlier for earlier, later in pairwise(begun))


def test_the_lag_counts_from_what_was_left_and_grows_while_nothing_is_removed() -> None:
    rules = (Rule(RESULTS, "replied_at_ms", 50), Rule(USAGE, "occurred_at_ms", 100))
    lag = RemovalLag(rules, started_ms=1_000_000)
    assert lag.lags_ms(1_000_000) == {"results": 0, "usage": 0}
    # Never looked at: since the start.
    assert lag.lags_ms(1_005_000) == {"results": 5_000, "usage": 5_000}
    lag.removed("results", 955_000, oldest_ms=900_000)
    assert lag.lags_ms(1_005_000) == {"results": 55_000, "usage": 5_000}
    lag.removed("results", 956_000, oldest_ms=None)
    assert lag.lags_ms(1_006_000) == {"results": 0, "usage": 6_000}
    # Days without another removal.
    assert lag.lags_ms(1_006_000 + 3 * 86_400_000)["results"] == 3 * 86_400_000
    # A clock that was set back.
    assert lag.lags_ms(0) == {"results": 0, "usage": 0}


def test_removals_that_fail_from_the_start_are_shown_as_lag() -> None:
    class Unreachable(OldRows):
        def remove(self, rule: Rule, before_ms: int, most: int) -> tuple[int, int | None]:
            raise psycopg.OperationalError("away")

    hours = counter()
    failures: list[BaseException] = []
    rule = Rule(RESULTS, "replied_at_ms", 86_400)
    removal = Removal(Unreachable("host=nowhere"), (rule,), failures.append, lambda: 3_600_000 * next(hours))
    removal.start()
    labels = {"table": "results"}
    eventually(lambda: (REGISTRY.get_sample_value("fairlane_retention_lag_seconds", labels) or 0.0) >= 3_600)
    removal.stop()
    assert not failures


def test_replies_are_kept_as_long_as_their_ids_and_keys() -> None:
    with pytest.raises(ValueError, match="RESULTS_TTL_S is 86400 and DEDUPE_TTL_S 86401"):
        Settings(dedupe_ttl_s=86_401)
    assert Settings(results_ttl_s=86_401, dedupe_ttl_s=86_401).results_ttl_s == 86_401
    with pytest.raises(ValueError, match=r"results_ttl_s\n.*greater than or equal to 86400"):
        Settings(results_ttl_s=IDEMPOTENCY_TTL_S - 1, dedupe_ttl_s=3_600)
    assert Settings(results_ttl_s=IDEMPOTENCY_TTL_S, dedupe_ttl_s=3_600).results_ttl_s == IDEMPOTENCY_TTL_S

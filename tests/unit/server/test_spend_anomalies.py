"""Hours of unusual spending: what is usual, and what a tenant may spend in any case."""

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.settings import Settings
from fairlane_server.cli import anomalies, main
from fairlane_server.costs.anomalies import HourlyCost, HourlySpending, compared_hours, judge

HOUR = 490_000
LEAST = 1_000


def judged(by_hour: Mapping[int, int], first: int = HOUR - 24 * 30, least: int = LEAST) -> HourlySpending:
    costs = [HourlyCost("acme", "XTS", hour, nanos) for hour, nanos in by_hour.items()]
    return judge(costs, {"acme": first}, HOUR, least)[0]


def steady(nanos: int, now: int) -> dict[int, int]:
    return dict.fromkeys(compared_hours(HOUR), nanos) | {HOUR: now}


def test_three_neighbouring_hours_of_each_of_two_weeks_are_compared() -> None:
    hours = compared_hours(HOUR)
    assert len(hours) == len(set(hours)) == 42
    assert {HOUR - 24, HOUR - 23, HOUR - 25, HOUR - 14 * 24} <= set(hours)
    assert max(hours) < HOUR


def test_steady_spending_may_grow_by_one_and_a_half_times_itself() -> None:
    assert not judged(steady(100_000, 250_000)).is_anomaly
    verdict = judged(steady(100_000, 250_001))
    assert (verdict.is_anomaly, verdict.median_nanos, verdict.limit_nanos) == (True, 100_000, 250_000)


def test_earlier_peaks_do_not_make_a_peak_usual() -> None:
    history = steady(100_000, 5_000_000)
    for day in (1, 5, 9):
        history[HOUR - 24 * day] = 9_000_000
    assert judged(history).is_anomaly


def test_spending_that_always_varies_may_vary() -> None:
    history = {hour: 50_000 * (1 + index % 5) for index, hour in enumerate(compared_hours(HOUR))}
    assert not judged(history | {HOUR: 500_000}).is_anomaly
    assert judged(history | {HOUR: 700_000}).is_anomaly


def test_little_is_never_unusual() -> None:
    assert not judged({HOUR: LEAST}).is_anomaly
    assert judged({HOUR: LEAST + 1}).is_anomaly, "silence is a history too"


def test_without_three_days_of_history_there_is_no_limit() -> None:
    for age, limit in ((71, None), (72, LEAST)):
        verdict = judged({HOUR: 10**9}, first=HOUR - age)
        assert verdict.limit_nanos == limit
    assert judged({HOUR: 10**9}, first=HOUR).ratio == 0.0


def test_an_hour_that_is_over_counts_for_one_more_hour() -> None:
    costs = [HourlyCost("acme", "XTS", HOUR - 1, 10**9), HourlyCost("acme", "XTS", HOUR, 5)]
    found = judge(costs, {"acme": 0}, HOUR, LEAST)
    assert [(one.hour, one.is_anomaly) for one in found] == [(HOUR - 1, True), (HOUR, False)]


def test_tenants_and_currencies_are_apart() -> None:
    costs = [HourlyCost("a", "XTS", HOUR, 10**9), HourlyCost("a", "EUR", HOUR, 1), HourlyCost("b", "XTS", HOUR, 1)]
    found = judge(costs, {"a": 0, "b": 0}, HOUR, LEAST)
    assert [(one.tenant, one.currency) for one in found if one.is_anomaly] == [("a", "XTS")]
    assert len(found) == 3


@given(st.lists(st.integers(0, 10**12), min_size=42, max_size=42), st.integers(1, 10**13), st.integers(0, 10**12))
def test_more_is_never_less_unusual(history: list[int], now: int, more: int) -> None:
    past = dict(zip(compared_hours(HOUR), history, strict=True))
    less, much = judged(past | {HOUR: now}), judged(past | {HOUR: now + more})
    assert less.limit_nanos == much.limit_nanos is not None
    assert less.ratio <= much.ratio
    assert less.limit_nanos is not None
    assert less.limit_nanos >= max(LEAST, less.median_nanos)


def test_the_command_shows_anomalies_and_with_all_the_others_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [
        HourlySpending("acme", "XTS", HOUR, 3 * 10**9, 10**9, 2 * 10**9),
        HourlySpending("globex", "XTS", HOUR, 1, 0, None),
    ]

    def read(_settings: Settings, _now_ms: int) -> list[HourlySpending]:
        return found

    monkeypatch.setattr(anomalies, "hourly_spending", read)

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(("anomalies", *arguments))
        assert ended.value.code == 0
        return capsys.readouterr().out

    assert [line.split() for line in run().splitlines()[1:]] == [
        ["acme", "2025-11-24", "16:00:00", "3", "1", "2", "XTS", "yes"]
    ]
    assert len(run("--all").splitlines()) == 3
    (other,) = json.loads(run("--all", "--json", "--tenant", "globex"))["hours"]
    assert (other["is_anomaly"], other["limit"], other["spent"]) == (False, None, "0.000000001")

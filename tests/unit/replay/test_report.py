"""What is counted, and how it is told."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.service_curve import percentile
from fairlane.outcomes import Code, Outcome
from fairlane.records import InferenceReply, TokenUsage
from producers.replay.calls import INTERRUPTED, NOT_SENT, OK, TIMEOUT, CallOutcome, of_refusal, of_reply
from producers.replay.profiles import PROFILES
from producers.replay.report import (
    COLUMNS,
    Histogram,
    Scenario,
    Tallies,
    markdown,
    outcome_lines,
    tenant_rows,
)

_SERVED = CallOutcome(OK, prompt_tokens=30, output_tokens=10)
_SHED = CallOutcome("overloaded", shed=True)


def add(
    tallies: Tallies,
    outcome: CallOutcome,
    due_s: float = 1.0,
    took_s: float = 0.1,
    tenant: str = "acme",
    first_text_s: float | None = None,
    **sent: float | None,
) -> None:
    """A call that was sent when it was due, unless ``sent_s`` says otherwise."""
    sent_s = sent.get("sent_s", due_s)
    tallies.add(tenant, outcome, due_s=due_s, sent_s=sent_s, ended_s=due_s + took_s, first_text_s=first_text_s)


@given(st.lists(st.floats(0.01, 1e7), min_size=1, max_size=300), st.sampled_from((0.0, 0.5, 0.95, 0.99, 1.0)))
def test_a_percentile_is_right_to_a_hundredth(times_ms: list[float], part: float) -> None:
    histogram = Histogram()
    for time_ms in times_ms:
        histogram.add(time_ms)
    found, exact = histogram.percentile_ms(part), percentile(times_ms, part)

    assert found is not None
    assert exact * 0.9999 <= found <= exact * 1.0101


def test_a_histogram_stays_small_whatever_it_is_given() -> None:
    histogram = Histogram()
    assert histogram.percentile_ms(0.5) is None
    for number in range(200_000):
        histogram.add(number**2 * 0.01)
    for odd in (-1.0, 0.0, 1e300, math.inf):
        histogram.add(odd)

    assert histogram.count == 200_004
    assert len(histogram._buckets) < 2_400
    assert histogram.largest_ms == math.inf


def test_only_what_came_in_time_is_good() -> None:
    tallies = Tallies(("acme",), 0.5)
    add(tallies, _SERVED)
    add(tallies, CallOutcome(OK, degraded=True, prompt_tokens=30, output_tokens=10), took_s=0.6)
    for outcome in (_SHED, CallOutcome("expired"), CallOutcome(INTERRUPTED)):
        add(tallies, outcome)
    add(tallies, CallOutcome(NOT_SENT), sent_s=None)
    found = tallies.report(2.0, interrupted=False).total

    assert (found.calls, found.in_time, found.shed, found.degraded, found.failed) == (6, 1, 1, 1, 2)
    assert found.outcomes == {"expired": 1, INTERRUPTED: 1, NOT_SENT: 1, OK: 2, "overloaded": 1}
    assert (found.answers_in_time_per_s, found.output_tokens_per_s, found.tokens_per_s) == (0.5, 5.0, 20.0)
    assert found.calls_per_s == 2.5
    assert found.failure_rate == pytest.approx(2 / 6, abs=1e-6)


def test_time_counts_from_when_a_call_was_due() -> None:
    tallies = Tallies(("acme",), 10)
    add(tallies, _SERVED, due_s=1.0, took_s=3.0, sent_s=2.0, first_text_s=2.5)
    found = tallies.report(5.0, interrupted=False).total

    assert found.latency_ms.p50 == pytest.approx(3_000, rel=0.011)
    assert found.first_text_ms.p50 == pytest.approx(1_500, rel=0.011)
    assert found.late_ms.p99 == pytest.approx(1_000, rel=0.011)
    assert found.most_late_ms == 1_000


def test_a_server_cannot_make_a_report_grow() -> None:
    tallies = Tallies(("acme",), 1)
    for number in range(1_000):
        add(tallies, CallOutcome(f"code_{number}"))
    outcomes = tallies.report(1.0, interrupted=False).total.outcomes

    assert len(outcomes) == 65
    assert outcomes["other"] == 1_000 - 64


def test_each_tenant_has_its_own_figures() -> None:
    tallies = Tallies(("acme", "globex"), 1.0)
    for _ in range(3):
        add(tallies, _SERVED)
    add(tallies, _SHED, tenant="globex")
    report = tallies.report(2.0, interrupted=True)

    assert {tenant: summary.calls for tenant, summary in report.tenants.items()} == {"acme": 3, "globex": 1}
    assert report.total.calls == 4
    assert report.as_json()["tenants"]["globex"]["shed"] == 1
    rows = tenant_rows(report)
    assert [row[0] for row in rows] == ["acme", "globex", "all"]
    assert {len(row) for row in rows} == {len(COLUMNS)}
    assert any("interrupted" in line for line in outcome_lines(report))
    with pytest.raises(KeyError):
        add(tallies, _SERVED, tenant="initech")


def test_a_load_that_was_less_than_asked_for_says_so() -> None:
    tallies = Tallies(("acme",), 1.0)
    assert not any("not sent" in line for line in outcome_lines(tallies.report(1.0, interrupted=False)))
    add(tallies, CallOutcome(NOT_SENT), sent_s=None)
    report = tallies.report(1.0, interrupted=False)

    assert "1 calls were not sent: the load was less than was asked for" in outcome_lines(report)


def test_the_result_table_has_a_row_for_each_scenario() -> None:
    tallies = Tallies(("acme",), 1.0)
    for answer in (_SERVED, _SERVED, _SHED, CallOutcome(TIMEOUT)):
        add(tallies, answer, took_s=0.2)
    report = tallies.report(2.0, interrupted=False)
    lines = markdown(
        [Scenario("burst", 200, report), Scenario("empty", 1, Tallies((), 1).report(1, interrupted=False))]
    )

    assert lines.splitlines() == [
        "| scenario | users | RPS | p50 ms | p95 ms | p99 ms | failure rate | shed | degraded | in by second try |",
        "|---|---|---|---|---|---|---|---|---|---|",
        "| burst | 200 | 2.0 | 200 | 200 | 200 | 25.0% | 25.0% | 0.0% | - |",
        "| empty | 1 | 0.0 | - | - | - | 0.0% | 0.0% | 0.0% | - |",
    ]


@pytest.mark.parametrize(
    ("outcome", "code", "expected", "shed"),
    [
        (Outcome.OK, None, "ok", False),
        (Outcome.REJECTED, Code.OVERLOADED, "overloaded", True),
        (Outcome.REJECTED, Code.DEADLINE_UNMEETABLE, "deadline_unmeetable", True),
        (Outcome.REJECTED, Code.INVALID, "invalid", False),
        (Outcome.EXPIRED, None, "expired", False),
        (Outcome.FAILED, Code.ENGINE_ERROR, "engine_error", False),
    ],
)
def test_a_reply_is_told_by_its_code(outcome: Outcome, code: Code | None, expected: str, *, shed: bool) -> None:
    reply = InferenceReply("id", "acme", outcome, code=code, usage=TokenUsage(3, 4), degradations=("shorter_context",))

    assert of_reply(reply) == CallOutcome(expected, shed, True, 3, 4)


def test_a_refusal_over_http_is_told_by_its_code_or_its_status() -> None:
    assert of_refusal(429, "overloaded") == CallOutcome("overloaded", shed=True)
    assert of_refusal(503, "no_capacity") == CallOutcome("no_capacity", shed=True)
    assert of_refusal(502, None) == CallOutcome("http_502")
    assert of_refusal(400, "what? <b>this</b>") == CallOutcome("unreadable")


def test_a_profile_has_its_users_for_its_time() -> None:
    burst = PROFILES["burst"]

    assert set(PROFILES) == {"baseline", "burst", "saturation", "degradation", "overload"}
    assert [burst.users_at(at_s) for at_s in (0, 19.9, 20, 39.9, 40, 59.9, 60)] == [10, 10, 200, 200, 10, 10, None]
    shorter = burst.scaled(users=4, seconds=3)
    assert [(stage.seconds, stage.users) for stage in shorter.stages] == [(1, 1), (1, 4), (1, 1)]
    assert (shorter.most_users, shorter.think_s) == (4, burst.think_s)
    for wrong in ({"users": 0}, {"seconds": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            burst.scaled(**wrong)

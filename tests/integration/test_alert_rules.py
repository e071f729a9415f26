"""The alert rules, evaluated by Prometheus's own promtool over series that must alarm and series that must not.

``SKIP_PROMTOOL=1`` skips this; without it, a missing promtool fails.
"""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from deploy.local.layout import PROJECT_ROOT

PROMTOOL = PROJECT_ROOT / ".fairlane" / "promtool" / "promtool"
RULES = PROJECT_ROOT / "deploy" / "prometheus" / "alerts.yml"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(os.environ.get("SKIP_PROMTOOL") == "1", reason="SKIP_PROMTOOL=1: no rule is evaluated"),
]

Labels = dict[str, str]


@dataclass(frozen=True, slots=True)
class Case:
    """A rule over series with a value each minute, in promtool's notation: `_x4` is four times none, `0x4` five zeros.

    Attributes:
        alarms: the minutes at which it alarms, with these labels and this summary; at ``quiet`` ones it does not.
    """

    alert: str
    series: dict[str, str]
    alarms: tuple[int, ...]
    quiet: tuple[int, ...]
    labels: Labels
    summary: str

    def __str__(self) -> str:
        return self.alert


HARD_OF_ACME = 'tenant="acme",of="tenant",period="day",limit="hard"'
PAGE, TICKET = {"severity": "page"}, {"severity": "ticket"}


def counted(alert: str, series: str, window: int, labels: Labels, summary: str, others: dict[str, str]) -> Case:
    """A counter that begins with its first count at minute 20, and counts again at minute 60."""
    values = {series: "_x20 1x39 2x40", **others}
    alarms = (20, 19 + window, 60, 59 + window)
    return Case(alert, values, alarms, (19, 20 + window, 59, 61 + window), labels, summary)


CASES = (
    counted(
        "RedisStateRefusesWrites",
        'fairlane_redis_refused_writes_total{kind="id",reason="memory"}',
        5,
        PAGE | {"kind": "id", "reason": "memory"},
        "The Redis for state refuses id (memory)",
        {'fairlane_redis_refused_writes_total{kind="id",reason="tenant_bound"}': "0+1x99"},
    ),
    counted(
        "TenantKeepsAllItsIds",
        'fairlane_redis_refused_writes_total{kind="id",reason="tenant_bound"}',
        15,
        TICKET | {"kind": "id", "reason": "tenant_bound"},
        "A tenant has reached its bound of id: duplicates of its further requests run again",
        {'fairlane_redis_refused_writes_total{kind="id",reason="memory"}': "0+1x99"},
    ),
    Case(
        "RedisStateEvicts",
        {"fairlane_redis_state_evicted_keys": "0x4 1 0"},
        (5,),
        (4, 6),
        PAGE,
        "The Redis for state evicted keys that it must keep",
    ),
    Case(
        "RedisStateUnsafe",
        {"fairlane_redis_state_unsafe": "0x4 1x4 0"},
        (6,),
        (4, 5, 10),
        TICKET,
        "The Redis for state is configured so that it may lose entries",
    ),
    Case(
        "RedisStateNearlyFull",
        {"fairlane_redis_state_memory_share": "0.8x9 0.81x9 0.8"},
        (15, 19),
        (9, 14, 20),
        TICKET,
        "The Redis for state uses 81% of its memory",
    ),
    counted(
        "LogReplaced",
        'fairlane_log_replaced_total{topic="requests.acme",finding="recreated"}',
        10,
        PAGE | {"topic": "requests.acme", "finding": "recreated"},
        "A stored position is not in the log of requests.acme: recreated",
        {},
    ),
    counted(
        "LogTruncated",
        'fairlane_log_truncated_total{topic="requests.acme"}',
        10,
        PAGE | {"topic": "requests.acme"},
        "Retention removed records of requests.acme before they were read",
        {},
    ),
    Case(
        "RetentionLags",
        {'fairlane_retention_lag_seconds{table="results"}': "3600x9 3601x19 60"},
        (20, 29),
        (9, 19, 30),
        TICKET | {"table": "results"},
        "Old rows of results are not removed from Postgres",
    ),
    Case(
        "GuardrailDown",
        {'fairlane_guardrail_ready{check="secrets"}': "1x4 0x4 1", 'fairlane_guardrail_ready{check="pii"}': "1x20"},
        (6, 9),
        (4, 5, 10),
        PAGE | {"check": "secrets"},
        "The check secrets does not run: requests that need it are refused, or go on unchecked",
    ),
    Case(
        "BudgetSpent",
        {
            f'fairlane_budget_spent_ratio{{{HARD_OF_ACME},instance="a"}}': "0.5x19",
            f'fairlane_budget_spent_ratio{{{HARD_OF_ACME},instance="b"}}': "0.99x4 1x4 0",
        },
        (5, 9),
        (4, 10),
        TICKET | {"tenant": "acme", "of": "tenant", "period": "day", "limit": "hard"},
        "acme has reached its hard budget of the day (tenant)",
    ),
    Case(
        "UnusualSpending",
        {
            'fairlane_spend_anomaly_ratio{tenant="acme",currency="EUR",instance="a"}': "1x4 2.5x4 1",
            'fairlane_spend_anomaly_ratio{tenant="acme",currency="EUR",instance="b"}': "0x19",
        },
        (5, 9),
        (4, 10),
        TICKET | {"tenant": "acme", "currency": "EUR"},
        "acme spends 2.5 times what is usual at most at this time of the day",
    ),
    Case(
        "Drift",
        {
            'fairlane_drift_findings{tenant="acme",model="digits",statistic="confidence",instance="a"}': "0x4 1x4 0",
            'fairlane_drift_findings{tenant="acme",model="digits",statistic="confidence",instance="b"}': "0x19",
        },
        (5, 9),
        (4, 10),
        TICKET | {"tenant": "acme", "model": "digits", "statistic": "confidence"},
        "confidence of acme and digits changed in the last day",
    ),
    counted(
        "RolledBack",
        'fairlane_rollout_decisions_total{model="digits",decision="rolled_back"}',
        10,
        TICKET | {"model": "digits", "decision": "rolled_back"},
        "The candidate of digits was worse than the champion, and was taken back",
        {},
    ),
    Case(
        "RolloutsNotJudged",
        {'fairlane_rollout_looks_failed_total{server="Postgres"}': "0x4 3 6 9 9x9"},
        (8,),
        (4, 13),
        PAGE | {"server": "Postgres"},
        "Rollouts are not judged, since Postgres does not answer the admin API's process",
    ),
    Case(
        "EvaluationFell",
        {
            'fairlane_evaluation_fell{tenant="acme",model="digits",version="2",instance="a"}': "0x4 1x4 0x9",
            'fairlane_evaluation_fell{tenant="acme",model="digits",version="1",instance="a"}': "0x19",
        },
        (5, 9),
        (4, 10),
        TICKET | {"tenant": "acme", "model": "digits", "version": "2"},
        "Version 2 of digits scores worse than the baseline of acme",
    ),
    Case(
        "EvaluationOverdue",
        {'fairlane_evaluation_overdue{tenant="acme",model="digits",instance="a"}': "0x4 1x19 0"},
        (15, 24),
        (4, 14, 25),
        TICKET | {"tenant": "acme", "model": "digits"},
        "digits is not measured as acme has scheduled it",
    ),
    Case(
        "BudgetsUnknown",
        {'fairlane_budgets_unknown{instance="a"}': "0x4 3x4 0", 'fairlane_budgets_unknown{instance="b"}': "0x19"},
        (6, 9),
        (4, 5, 10),
        PAGE | {"instance": "a"},
        "A dispatcher does not know what 3 tenants have spent: their hard budgets refuse everything",
    ),
    counted(
        "BudgetReservationsLost",
        "fairlane_budget_reservations_lost_total",
        15,
        TICKET,
        "Reservations of budgets were dropped because their end was not read",
        {},
    ),
    Case(
        "VersionNotLoaded",
        {
            'fairlane_versions_missing{state="failed"}': "0x4 2x5 0x9",
            'fairlane_versions_missing{state="loading"}': "1x19",
        },
        (6, 10),
        (4, 5, 12),
        TICKET | {"state": "failed"},
        "A consumer cannot load 2 versions, or their smoke sets failed: they get no requests there",
    ),
    Case(
        "ModelFilesReplaced",
        {'fairlane_artifacts_changed{model="digits"}': "0x4 2x4 0"},
        (5, 9),
        (4, 10),
        TICKET | {"model": "digits"},
        "The files of 2 registered versions of digits were replaced at their source",
    ),
    counted(
        "DeadLetters",
        'fairlane_dead_letters_total{topic="dead-letter.requests",problem="empty"}',
        15,
        TICKET | {"topic": "dead-letter.requests", "problem": "empty"},
        "Records went to the dead-letter topic dead-letter.requests (empty)",
        {},
    ),
    counted(
        "UnreadableRecords",
        'fairlane_unreadable_records_total{reader="work_feed",problem="bad_checksum"}',
        15,
        TICKET | {"reader": "work_feed", "problem": "bad_checksum"},
        "The reader work_feed skipped unreadable records (bad_checksum)",
        {},
    ),
)


def test_every_rule_has_a_case() -> None:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    assert [case.alert for case in CASES] == [rule["alert"] for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_rule_alarms_when_it_should_and_only_then(case: Case, tmp_path: Path) -> None:
    firing = [{"exp_labels": case.labels, "exp_annotations": {"summary": case.summary}}]
    moments = {minute: firing if minute in case.alarms else [] for minute in (*case.quiet, *case.alarms)}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        "alert_rule_test": [
            {"eval_time": f"{minute}m", "alertname": case.alert, "exp_alerts": expected}
            for minute, expected in sorted(moments.items())
        ],
    }
    file = tmp_path / "case.yml"
    # JSON is YAML.
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run(
        (str(PROMTOOL), "test", "rules", str(file)), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr

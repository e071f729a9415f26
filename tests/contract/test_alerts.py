"""The alert rules: about metrics and labels that exist, known to Prometheus and to the documentation.

tests/integration/test_alert_rules.py evaluates them.
"""

import re
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

from deploy.local.layout import PROJECT_ROOT
from fairlane import metrics
from tests.contract.compose_file import services

PROMETHEUS = PROJECT_ROOT / "deploy" / "prometheus"
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))


@each_rule
def test_a_rule_is_about_a_metric_that_there_is(rule: dict[str, Any]) -> None:
    assert metrics.LOG_REPLACED is not None
    (name,) = set(re.findall(r"fairlane_\w+", rule["expr"]))
    assert name.removesuffix("_total") in {family.name for family in REGISTRY.collect()}
    assert rule["labels"]["severity"] in {"page", "ticket"}
    assert rule["annotations"]["summary"]


@each_rule
def test_a_rule_is_about_labels_that_its_metric_has(rule: dict[str, Any]) -> None:
    (name,) = set(re.findall(r"fairlane_\w+", rule["expr"]))
    declared = {
        metric._name: set(metric._labelnames)
        for metric in vars(metrics).values()
        if isinstance(metric, MetricWrapperBase)
    }[name.removesuffix("_total")]
    grouped = [label for labels in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in labels.split(", ")]
    matched = re.findall(r"(\w+)(?:=|!=|=~|!~)\"", rule["expr"])
    shown = re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])
    assert {*grouped, *matched, *shown} <= declared
    assert not grouped or set(shown) <= set(grouped)


@each_rule
def test_the_first_count_of_a_new_series_alarms_too(rule: dict[str, Any]) -> None:
    """The series is there from the event on: what happens once is never an increase."""
    for counter, window in re.findall(r"increase\(([^\[]+)\[(\w+)\]\) > 0", rule["expr"]):
        assert f"or ({counter} > 0 unless {counter} offset {window})" in rule["expr"]


@each_rule
def test_what_to_do_is_in_the_documentation(rule: dict[str, Any]) -> None:
    (name,) = set(re.findall(r"fairlane_\w+", rule["expr"]))
    text = (PROJECT_ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    alarms = text[text.index("\n## Alarms") : text.index("\n## At 3 a.m.")]
    assert f"`{name}" in alarms


def test_prometheus_reads_them() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    assert config["rule_files"] == ["/etc/prometheus/alerts.yml"]
    mounted = services()["prometheus"].raw["volumes"]
    assert "./deploy/prometheus/alerts.yml:/etc/prometheus/alerts.yml:ro" in mounted

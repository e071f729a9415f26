"""Files of rules: what is read, and that every mistake is reported with its file and line."""

from pathlib import Path

import pytest

from fairlane.records import RouteArm, RouteRule
from fairlane_server.models.rules_file import load_rules
from fairlane_server.yaml_config import ConfigError

GOOD = """\
routes:
  - model: digits
    rules:
      - rule: canary
        tenants: [acme, globex]
        callers: ["key:1"]
        tasks: [classify]
        from: 2026-01-05T08:00:00Z
        until: 2026-01-12
        sticky_by: caller
        arms:
          - {arm: new, target: "@candidate", percent: 2.5}
          - {arm: old, target: "1", percent: 97.5}
  - model: words
    rules: []
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "rules.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_rule_is_read(tmp_path: Path) -> None:
    rule = RouteRule(
        "canary",
        (RouteArm("new", "@candidate", 2.5), RouteArm("old", "1", 97.5)),
        ("acme", "globex"),
        ("key:1",),
        ("classify",),
        1_767_600_000_000,
        1_768_176_000_000,
        "caller",
    )
    assert load_rules(write(tmp_path, GOOD)) == {"digits": (rule,), "words": ()}


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("model: words", "model: digits", 14, "'digits' is in the file twice"),
        ("rule: canary", "rule: Canary", 4, "'Canary' does not match"),
        ("[classify]", "[sing]", 7, "unknown task 'sing'"),
        ("sticky_by: caller", "sticky_by: moon", 10, "unknown sticky key 'moon'"),
        ("2026-01-12", "soon", 9, "must be a date"),
        ("percent: 2.5", "percent: 250", 12, "must be from 0 to 100"),
        ("percent: 2.5", "weight: 2.5", 12, "unknown key"),
        ("        tasks", "        task", 7, "unknown key"),
        ("    rules: []\n", "", 14, "missing: rules"),
    ],
)
def test_a_mistake_names_file_and_line(tmp_path: Path, old: str, new: str, line: int, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError, match=message) as caught:
        load_rules(write(tmp_path, GOOD.replace(old, new)))
    assert caught.value.line == line

"""Plans of rollouts from files and bodies: the same keys, defaults for what is left out, errors with the key."""

from pathlib import Path

import pytest

from fairlane.rollout_records import RolloutGuards
from fairlane_server.rollouts.changes import RolloutPlan
from fairlane_server.rollouts.plan_file import load_plan, plan_of_json
from fairlane_server.yaml_config import ConfigError


def test_a_plan_without_keys_is_the_default(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text("{}\n")
    assert load_plan(file, "2") == RolloutPlan("2")
    assert plan_of_json(b'{"candidate": "2"}') == RolloutPlan("2")


def test_every_key_is_read(tmp_path: Path) -> None:
    file = tmp_path / "plan.yaml"
    file.write_text(
        "steps: [5, 100]\nleast_step_s: 1.5\nsticky_by: caller\nneeds_approval: true\n"
        "guards: {most_cost_ratio: off, most_lost_quality: 'off', least_requests: 7, latency_quantile: 0.5}\n"
    )
    guards = RolloutGuards(most_cost_ratio=None, most_lost_quality=None, least_requests=7, latency_quantile=0.5)
    assert load_plan(file, "2") == RolloutPlan("2", (5.0, 100.0), guards, 1_500, "caller", True)


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (b"{}", "candidate"),
        (b'{"candidate": "no version!"}', "candidate"),
        (b'{"candidate": "2", "steps": [200]}', "steps[0]"),
        (b'{"candidate": "2", "sticky_by": "moon"}', "sticky_by"),
        (b'{"candidate": "2", "least_step_s": -1}', "least_step_s"),
        (b'{"candidate": "2", "guards": {"most_lost_quality": 0}}', "guards.most_lost_quality"),
        (b'{"candidate": "2", "guards": {"most_latency_ratio": 0}}', "guards.most_latency_ratio"),
        (b'{"candidate": "2", "guards": {"most_cost_ratio": 1}}', "guards.most_cost_ratio"),
        (b'{"candidate": "2", "guards": {"least_values": 3}}', "guards.least_values"),
        (b'{"candidate": "2", "guards": {"unknown": 3}}', "guards"),
    ],
)
def test_what_is_wrong_is_named(body: bytes, key: str) -> None:
    with pytest.raises(ConfigError) as raised:
        plan_of_json(body)
    assert raised.value.key.startswith(key) or key in raised.value.message

"""Metrics of engines among the consumer's own."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from inference_consumers.engine_process.host import EngineMetrics

SAID = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="%s"} %d
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{model_name="%s"} 17.0
"""


class Host:
    key = ("m", "1")

    def __init__(self, text: str) -> None:
        self.metrics_text = text


def shown(*texts: str) -> str:
    hosts: list[Any] = [Host(text) for text in texts]
    registry = CollectorRegistry()
    registry.register(EngineMetrics(lambda: hosts))
    return generate_latest(registry).decode()


def test_names_are_passed_through() -> None:
    assert shown(SAID % ("one", 3, "one")) == SAID.replace("%d", "3.0").replace("%s", "one")


def test_engines_share_their_families_and_what_is_none_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(SAID % ("one", 3, "one"), "no metric {", "", SAID % ("two", 4, "two"))
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    assert 'vllm:num_requests_running{model_name="one"} 3.0' in text
    assert 'vllm:num_requests_running{model_name="two"} 4.0' in text
    assert 'vllm:generation_tokens_total{model_name="two"} 17.0' in text
    assert "engine_metrics_unreadable" in "".join(capsys.readouterr())

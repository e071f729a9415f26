"""Numbers that documents name, held against the constants that they quote."""

import re

import pytest

from deploy.local.layout import PROJECT_ROOT
from fairlane.rollout_records import RolloutGuards
from fairlane.settings import Settings
from fairlane_server.guardrail_policy import MOST_PATTERN_CHARACTERS, MOST_SCHEMA_CHARACTERS
from fairlane_server.kafka.transactions import TransactionLoop
from fairlane_server.re2_patterns import MOST_MATCHES
from inference_consumers.capacity.measurement import FRESH_FOR_S
from inference_consumers.engine_process.stall_detection import TIMES_PREDICTED
from inference_consumers.guardrails.check import QuestionSize
from inference_consumers.guardrails.post_processing import MOST_REPAIRED_CHARACTERS
from inference_consumers.guardrails.registry import QUESTION_SIZES
from inference_consumers.guardrails.secrets import LEAST_ENTROPY_BITS
from stream_processors.dispatcher.admission.degradation import DEFAULT_LADDER

WORDS = {"ten": 10.0}


def setting(name: str) -> float:
    """The default of a setting."""
    return float(Settings.model_fields[name].default)


GUARDS = RolloutGuards()
HANG_TIMEOUT_S = TransactionLoop.__dataclass_fields__["hang_timeout_s"].default
CASES = [
    ("architecture.md", r"has not returned after (\d+) s", HANG_TIMEOUT_S),
    ("how-fairlane-decides.md", r"silent in one batch for longer than (\d+) s", setting("engine_hang_timeout_s") / 2),
    ("how-fairlane-decides.md", r"and (\w+) times what was\s+predicted", TIMES_PREDICTED),
    ("how-fairlane-decides.md", r"not run for (\d+) s of engine time", FRESH_FOR_S),
    ("how-fairlane-decides.md", r"As it rises past ([\d.]+),", DEFAULT_LADDER.up_at[0]),
    ("how-fairlane-decides.md", r"\u2026 ([\d.]+) one more step", DEFAULT_LADDER.up_at[-1]),
    ("how-fairlane-decides.md", r"given back after (\d+) s below", DEFAULT_LADDER.down_after_ms / 1_000),
    ("gateway.md", r"`ENGINE_HANG_TIMEOUT_S` \((\d+) s\)", setting("engine_hang_timeout_s")),
    ("bounds.md", r"at most (\d+) texts", QuestionSize().texts),
    ("bounds.md", r"texts and ([\d,]+) characters", QuestionSize().characters),
    ("bounds.md", r"\(`pii` ([\d,]+),", QUESTION_SIZES["pii"].characters),
    ("bounds.md", r"`prompt_injection` ([\d,]+)\)", QUESTION_SIZES["prompt_injection"].characters),
    ("guardrails-checks.md", r"at most ([\d,]+) characters, and matches", MOST_PATTERN_CHARACTERS),
    ("guardrails-checks.md", r"Behind ([\d,]+) matches", MOST_MATCHES),
    ("guardrails-checks.md", r"at most ([\d,]+) characters as compact JSON", MOST_SCHEMA_CHARACTERS),
    ("bounds.md", r"a JSON Schema of ([\d,]+)", MOST_SCHEMA_CHARACTERS),
    ("guardrails-checks.md", r"with (\d+) bits of entropy", LEAST_ENTROPY_BITS),
    ("guardrails-checks.md", r"if it has at most ([\d,]+) characters", MOST_REPAIRED_CHARACTERS),
    ("rollout-verdicts.md", r"\| `errors` \|[^|]*\| ([\d.]+) \|", GUARDS.most_added_failures),
    ("rollout-verdicts.md", r"\| `latency` \|[^|]*control's \| ([\d.]+) \|", float(GUARDS.most_latency_ratio or 0)),
    ("rollout-verdicts.md", r"\| `cost` \|[^|]*\| ([\d.]+) \|", float(GUARDS.most_cost_ratio or 0)),
    ("rollout-verdicts.md", r"\| `quality` \|[^|]*\| ([\d.]+) \|", float(GUARDS.most_lost_quality or 0)),
    ("rollout-verdicts.md", r"False rollback\*\*, (\d+) %", 100 * GUARDS.false_rollback_rate),
    ("rollout-verdicts.md", r"False pass\*\*, (\d+) %", 100 * GUARDS.false_pass_rate),
    ("rollout-verdicts.md", r"below (\d+) scores", GUARDS.least_values),
    ("rollout-verdicts.md", r"`key_correlation`,\s+([\d.]+)\)", GUARDS.key_correlation),
    ("adr/0030-graceful-degradation.md", r"one step down after (\d+) s", DEFAULT_LADDER.down_after_ms / 1_000),
    ("adr/0030-graceful-degradation.md", r"one step up per (\d+) ms", DEFAULT_LADDER.up_every_ms),
]


@pytest.mark.parametrize(("page", "pattern", "value"), CASES, ids=[f"{page}: {pattern}" for page, pattern, _ in CASES])
def test_a_number_in_a_document_is_that_of_the_code(page: str, pattern: str, value: float) -> None:
    found = re.findall(pattern, (PROJECT_ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert found, "the document no longer says it: change the pattern with the sentence"
    assert {WORDS.get(number) or float(number.replace(",", "")) for number in found} == {float(value)}

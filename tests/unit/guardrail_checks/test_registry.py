"""Loading checks, and what is not to be had."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from inference_consumers.guardrails.check import CheckUnavailableError
from inference_consumers.guardrails.registry import NAMES, load_checks

WITHOUT_MODELS = ("secrets", "patterns", "leaked_prompt", "repetition")


def test_checks_without_models_need_no_folder(tmp_path: Path) -> None:
    checks = load_checks(WITHOUT_MODELS, tmp_path)
    assert [check.name for check in checks.values()] == list(checks) == list(WITHOUT_MODELS)


@pytest.mark.parametrize("name", sorted({*NAMES, "magic"} - set(WITHOUT_MODELS)))
def test_a_check_that_is_not_to_be_had_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckUnavailableError) as refused:
        load_checks([name], tmp_path)
    assert refused.value.name == name
    assert f"the check {name} cannot be loaded" in str(refused.value)
    again = pickle.loads(pickle.dumps(refused.value))  # noqa: S301 - made here
    assert str(again) == str(refused.value)


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    program = (
        "import sys, inference_consumers.guardrails.registry, inference_consumers.guardrails.post_processing, "
        "fairlane_server.re2_patterns; "
        "print(sorted({'torch', 'spacy', 'presidio_analyzer', 'transformers', 're2'} & set(sys.modules)))"
    )
    done = subprocess.run((sys.executable, "-c", program), capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"

"""``fairlane evaluate`` through a whole pipeline: asked as a tenant, scored, compared, written down without texts."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fairlane_server import cli
from tests.kit.pipeline import Pipeline

pytestmark = [pytest.mark.full, pytest.mark.broker]

Evaluate = Callable[..., tuple[int, Any, str]]
SET = [{"id": f"good-{number}", "input": {"prompt": f"prompt {number}"}, "expected": ".+"} for number in range(5)]
SET += [
    {"id": "never", "input": {"prompt": "secret words"}, "expected": "^no engine says this$"},
    {"id": "no pattern", "input": {"prompt": "p"}, "expected": "("},
]


@pytest.fixture
def pipeline(broker: str, tmp_path: Path, unique: str) -> Iterator[Pipeline]:
    with Pipeline(broker, tmp_path, unique, tenants=("a",)) as made:
        made.start()
        yield made


@pytest.fixture
def evaluate(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Evaluate:
    monkeypatch.setenv("KAFKA_BOOTSTRAP_SERVERS", pipeline.settings.kafka_bootstrap_servers)
    file = tmp_path / "set.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in SET))

    def run(*arguments: str) -> tuple[int, Any, str]:
        with pytest.raises(SystemExit) as caught:
            cli.main(["evaluate", str(file), "--tenant", pipeline.tenant("a"), "--json", *arguments])
        captured = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, json.loads(captured.out) if captured.out else None, captured.err

    return run


def test_a_model_is_evaluated_and_compared(evaluate: Evaluate, pipeline: Pipeline, tmp_path: Path) -> None:
    model, out = pipeline.models[0].model, tmp_path / "scores.jsonl"
    code, found, complaint = evaluate(
        *("--model", model, "--against", f"{model}/1", "--scorer", "regex", "--max-tokens", "8", "--out", str(out))
    )
    assert code == 0, complaint
    for run, name in zip(found["runs"], (model, f"{model}/1"), strict=True):
        assert (run["model"], run["count"], run["not_scored"]) == (name, 6, 1)
        assert run["mean"] == pytest.approx(5 / 6)
        assert (run["versions"], run["failed"]) == ({"1": 7}, {})
        assert run["low"] < run["mean"] < run["high"]
    assert (found["comparison"]["pairs"], found["comparison"]["difference"]) == (6, 0.0)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["id"] for line in lines] == [one["id"] for one in SET]
    assert "secret" not in out.read_text()
    assert out.stat().st_mode & 0o077 == 0


def test_what_cannot_be_asked_is_an_error_in_one_line(evaluate: Evaluate, pipeline: Pipeline, tmp_path: Path) -> None:
    (tmp_path / "set.jsonl").write_text('{"id": "a", "input": {"prompt": "p"}}\n' * 2)
    code, _, complaint = evaluate("--model", pipeline.models[0].model)
    assert (code, complaint.count("\n")) == (1, 1)
    assert "line 2: id: 'a' is also the id of line 1" in complaint
    (tmp_path / "set.jsonl").write_text('{"id": "a", "input": {"promt": "p"}}\n')
    code, _, complaint = evaluate("--model", pipeline.models[0].model)
    assert (code, complaint.count("\n")) == (1, 1)
    assert "a: input.promt: no input has this field" in complaint

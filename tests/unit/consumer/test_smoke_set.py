"""The smoke set of a version: what it asks, what it demands, and what is wrong with it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fairlane.outcomes import Code
from fairlane.records import LabelScore, Output, TokenUsage
from inference_consumers.engine_process import smoke_set
from inference_consumers.engine_process.smoke_set import SMOKE_FILE, check_smoke_set
from inference_consumers.engines.protocol import (
    EngineItem,
    EngineLimits,
    EngineLoadError,
    EngineSpec,
    Failure,
    ItemOutcome,
    RunCost,
    RunObserver,
    Success,
)
from tests.kit.version_kit import MODEL

EXACT = {"smoke": {"scorer": "exact", "least_mean": 0.75, "max_tokens": 7}}


class Engine:
    """Answers each item as the test says."""

    name = "scripted"
    limits = EngineLimits(2, 100, 100, 100)

    def __init__(self, answer: Callable[[EngineItem], ItemOutcome]) -> None:
        self._answer = answer
        self.batches: list[list[EngineItem]] = []
        self.is_closed = False

    def load(self) -> None: ...

    def run(self, batch: Sequence[EngineItem], observer: RunObserver) -> RunCost:
        self.batches.append(list(batch))
        for index, item in enumerate(batch):
            observer.finished(index, self._answer(item))
        return RunCost()

    def close(self) -> None:
        self.is_closed = True


def echo(item: EngineItem) -> ItemOutcome:
    return Success(Output(text=item.input.prompt), TokenUsage())


def spec(folder: Path) -> EngineSpec:
    return EngineSpec(replace(MODEL, path="."), str(folder))


def write(folder: Path, *lines: object) -> EngineSpec:
    (folder / SMOKE_FILE).write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines))
    return spec(folder)


def example(number: int, expected: str, **given: object) -> dict[str, object]:
    return {"id": f"e{number}", "input": given or {"prompt": f"p{number}"}, "expected": expected}


def test_a_version_without_a_set_is_not_asked(tmp_path: Path) -> None:
    engine = Engine(echo)
    check_smoke_set(engine, spec(tmp_path))
    assert not engine.batches


def test_a_mean_that_reaches_the_bound_is_enough(tmp_path: Path) -> None:
    """Three of four right answers, in batches that the engine takes."""
    engine = Engine(echo)
    given = [example(number, f"p{number}" if number else "other") for number in range(4)]
    check_smoke_set(engine, write(tmp_path, EXACT, *given, ""))
    assert [[item.input.prompt for item in batch] for batch in engine.batches] == [["p0", "p1"], ["p2", "p3"]]
    assert {(item.task, item.parameters.max_tokens) for batch in engine.batches for item in batch} == {("generate", 7)}
    assert not engine.is_closed


@pytest.mark.parametrize("wrong", ["an answer", "a failure"])
def test_a_mean_below_the_bound_is_an_error_that_names_the_file(tmp_path: Path, wrong: str) -> None:
    def answer(item: EngineItem) -> ItemOutcome:
        if wrong == "a failure" and item.item_id == "e0":
            return Failure(Code.ENGINE_ERROR, "no")
        return echo(item)

    engine = Engine(answer)
    given = [example(0, "p0" if wrong == "a failure" else "other"), example(1, "p1")]
    with pytest.raises(EngineLoadError) as caught:
        check_smoke_set(engine, write(tmp_path, EXACT, *given))
    assert str(caught.value) == f"digits: {tmp_path / SMOKE_FILE}: mean score 0.5 of 2 examples is below 0.75"
    assert engine.is_closed


def test_images_are_classified_and_scored_by_their_first_label(tmp_path: Path) -> None:
    def classify(item: EngineItem) -> ItemOutcome:
        assert item.input.image is not None
        return Success(Output(labels=(LabelScore(item.input.image.decode(), 0.9), LabelScore("x", 0.1))), TokenUsage())

    head = {"smoke": {"scorer": "accuracy", "least_mean": 1}}
    engine = Engine(classify)
    check_smoke_set(engine, write(tmp_path, head, example(1, "seven", image="c2V2ZW4=")))
    assert engine.batches[0][0].task == "classify"


BROKEN = (
    (["{"], "line 1: Expecting property name"),
    ([{"smoke": {"scorer": "exact"}}], "line 1: Object missing required field `least_mean` - at `$.smoke`"),
    ([{"smoke": {"scorer": "exact", "least_mean": 2}}], "line 1: smoke.least_mean: 2 is not from 0 to 1"),
    ([{"smoke": {"scorer": "taste", "least_mean": 1}}, example(1, "a")], "line 1: smoke.scorer: 'taste' is none of ex"),
    ([EXACT], "no example"),
    ([EXACT, {"id": "e1"}], "line 2: input: must be an object that is not empty"),
    ([EXACT, example(1, "a", image="%")], "e1: input.image: must be base64"),
    ([EXACT, example(1, "a", colour="red")], "e1: input.colour: no input has this field"),
    ([EXACT, {"id": "e1", "input": {"prompt": "a"}}], "no example can be scored"),
)


@pytest.mark.parametrize(("lines", "reason"), BROKEN, ids=[reason for _, reason in BROKEN])
def test_a_set_that_cannot_be_used_is_an_error_that_names_the_line(
    tmp_path: Path, lines: list[object], reason: str
) -> None:
    with pytest.raises(EngineLoadError) as caught:
        check_smoke_set(Engine(echo), write(tmp_path, *lines))
    assert str(caught.value).startswith(f"digits: {tmp_path / SMOKE_FILE}: {reason}")


def test_a_set_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = write(tmp_path, EXACT, *(example(number, "a") for number in range(3)))
    monkeypatch.setattr(smoke_set, "MOST_SMOKE_EXAMPLES", 2)
    with pytest.raises(EngineLoadError, match="3 examples; at most 2"):
        check_smoke_set(Engine(echo), given)
    monkeypatch.setattr(smoke_set, "MOST_SMOKE_BYTES", 10)
    with pytest.raises(EngineLoadError, match="larger than 10 bytes"):
        check_smoke_set(Engine(echo), given)


def test_an_engine_that_fails_on_the_set_cannot_be_loaded(tmp_path: Path) -> None:
    def fail(_item: EngineItem) -> ItemOutcome:
        raise RuntimeError("about a prompt")

    with pytest.raises(EngineLoadError) as caught:
        check_smoke_set(Engine(fail), write(tmp_path, EXACT, example(1, "a")))
    assert str(caught.value).endswith(": RuntimeError")


def test_an_engine_in_the_place_of_the_models_own_is_not_asked(tmp_path: Path) -> None:
    given = write(tmp_path, EXACT, example(1, "a"))
    engine = Engine(echo)
    check_smoke_set(engine, EngineSpec(given.model, given.models_dir, engine="simulated"))
    assert not engine.batches

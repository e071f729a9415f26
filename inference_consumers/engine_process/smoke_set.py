"""Smoke set of a version: examples in its folder that its engine must answer well before it gets any requests.

``smoke.jsonl`` is an evaluation set (``fairlane_server/evaluation/evaluation_set.py``) after a first line that says how
it is scored, and the mean score to reach:

    {"smoke": {"scorer": "accuracy", "least_mean": 0.95}}
    {"id": "seven", "input": {"image": "iVBORw0K..."}, "expected": "7"}

``top`` is that of the scorer ndcg, ``max_tokens`` bounds an answer. Both may be absent.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fairlane.records import Parameters, RequestInput
from inference_consumers.engines.protocol import Engine, EngineItem, EngineSpec, Success, run_batch

if TYPE_CHECKING:
    from fairlane_server.evaluation.evaluation_set import EvaluationExample
    from fairlane_server.evaluation.scorers import ScorerName

SMOKE_FILE = "smoke.jsonl"
MOST_SMOKE_BYTES = 16 * 1024 * 1024
MOST_SMOKE_EXAMPLES = 256


class _Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    scorer: str
    least_mean: float
    top: int | None = None
    max_tokens: int | None = None


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    smoke: _Bound


class _SmokeSetError(Exception):
    """The set is not what it should be, or the answers are not."""


def check_smoke_set(engine: Engine, spec: EngineSpec) -> None:
    """Run the smoke set of a loaded engine's model, if its folder has one. An engine that answers in another's place
    (``spec.engine``) is not asked.

    Closes the engine and raises EngineLoadError for a set that cannot be used, and for a mean score below its bound.
    """
    file = spec.path / SMOKE_FILE
    if spec.engine is not None or not file.is_file():
        return
    try:
        _check(engine, file)
    except Exception as error:
        engine.close()
        # Of an error of the engine only its kind: its text may be long, and says little to who reads the log.
        why = str(error) if isinstance(error, _SmokeSetError) else type(error).__name__
        raise spec.error(f"{file}: {why}") from error


def _check(engine: Engine, file: Path) -> None:
    try:
        # Not every environment of an engine has them.
        from fairlane_server.evaluation.scorers import ScorerName
    except ImportError as error:
        raise _SmokeSetError(f"it is scored with {error.name}, which is not installed here") from error
    bound, examples = _read(file)
    if bound.scorer not in tuple(ScorerName):
        raise _SmokeSetError(f"line 1: smoke.scorer: {bound.scorer!r} is none of {', '.join(ScorerName)}")
    scorer = ScorerName(bound.scorer)
    values: list[float] = []
    each = max(1, engine.limits.max_batch_size)
    for start in range(0, len(examples), each):
        values += _scores(engine, examples[start : start + each], scorer, bound)
    if not values:
        raise _SmokeSetError("no example can be scored")
    mean = sum(values) / len(values)
    if not mean >= bound.least_mean:
        raise _SmokeSetError(f"mean score {mean:.4g} of {len(values)} examples is below {bound.least_mean:g}")


def _read(file: Path) -> "tuple[_Bound, tuple[EvaluationExample, ...]]":
    from fairlane_server.evaluation.evaluation_set import EvaluationSetError, read_evaluation_set

    if file.stat().st_size > MOST_SMOKE_BYTES:
        raise _SmokeSetError(f"larger than {MOST_SMOKE_BYTES} bytes")
    first, *rest = file.read_bytes().split(b"\n")
    try:
        bound = msgspec.convert(json.loads(first), _Head).smoke
    except (ValueError, msgspec.ValidationError) as error:
        raise _SmokeSetError(f"line 1: {error}") from error
    if not 0 <= bound.least_mean <= 1:
        raise _SmokeSetError(f"line 1: smoke.least_mean: {bound.least_mean:g} is not from 0 to 1")
    try:
        # An empty line in the place of the first, so that lines are counted as they are in the file.
        examples = read_evaluation_set([b"", *rest]).examples
    except EvaluationSetError as error:
        raise _SmokeSetError(str(error)) from error
    if len(examples) > MOST_SMOKE_EXAMPLES:
        raise _SmokeSetError(f"{len(examples)} examples; at most {MOST_SMOKE_EXAMPLES}")
    return bound, examples


def _scores(
    engine: Engine, examples: "tuple[EvaluationExample, ...]", scorer: "ScorerName", bound: _Bound
) -> list[float]:
    from fairlane_server.evaluation.run import answer_in
    from fairlane_server.evaluation.scorers import score

    outcomes = run_batch(engine, [_item(example, scorer, bound) for example in examples])
    values: list[float] = []
    for example, outcome in zip(examples, outcomes, strict=True):
        if not isinstance(outcome, Success):
            # As in an evaluation: no answer is no better than a wrong one.
            values.append(0.0)
            continue
        value = score(scorer, example.expected, answer_in(outcome.output), top=bound.top).value
        if value is not None:
            values.append(value)
    return values


def _item(example: "EvaluationExample", scorer: "ScorerName", bound: _Bound) -> EngineItem:
    from fairlane_server.evaluation.run import ExampleError, request_fields

    try:
        fields: dict[str, Any] = request_fields(example, scorer)
        task = fields.pop("task")
        # Lists of JSON become the tuples of the record, an image stays bytes.
        given = msgspec.convert(fields, RequestInput)
    except (ExampleError, msgspec.ValidationError) as error:
        raise _SmokeSetError(str(error)) from error
    return EngineItem(example.example_id, task, given, Parameters(max_tokens=bound.max_tokens))

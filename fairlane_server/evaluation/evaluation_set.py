"""Evaluation sets: JSON Lines, an example a line. Pure.

    {"id": "capital-1", "input": {"prompt": "The capital of France?"}, "expected": "Paris", "tags": {"topic": "maps"}}

``id`` is unique in the set. ``task`` may be absent: it follows from the scorer. ``input`` is an object; what may be in
it depends on the task. ``expected`` is what the scorer compares with, of any type; it may be absent. ``tags`` are texts
by name. Empty lines count, and are skipped.

An export of labels has in each line also what was answered (``output``), how people judged it (``label``) and where it
is from (``provenance``). A judge is calibrated with such lines, or with those that have an ``output`` and a ``rating``.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NoReturn

from fairlane.outcomes import Task
from fairlane_server.labelling.decisions import BAD, GOOD

MOST_EXAMPLES = 100_000
MOST_LINE_BYTES = 1 << 20
MOST_ID_CHARACTERS = 128
MOST_TAGS = 16
MOST_TAG_CHARACTERS = 256
_FIELDS = frozenset({"id", "task", "input", "expected", "tags", "rating"})
_OF_EXPORTS = frozenset({"output", "label", "provenance"})
"""What an export of labels says besides."""
_RATING_OF_LABEL = {GOOD: 1.0, BAD: 0.0}


class EvaluationSetError(ValueError):
    """An invalid set. ``line`` is the line at fault, from 1; 0: the set as a whole."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}" if line else reason)
        self.line = line
        self.reason = reason


@dataclass(frozen=True, slots=True)
class EvaluationExample:
    """One example. ``expected`` and ``task`` are None where none is given.

    Attributes:
        output: an answer to the input, as text; None without one.
        rating: how good people found this answer, from 0 to 1; None if they did not say.
        tenant, request_id: of the request that the example was made of; None if it was made of none.
    """

    example_id: str
    input: Mapping[str, Any]
    expected: Any
    tags: Mapping[str, str]
    task: str | None = None
    output: str | None = None
    rating: float | None = None
    tenant: str | None = None
    request_id: str | None = None


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Examples in the order of the file, and the hash of their content, 64 hexadecimal digits: the same whatever the
    white space and the order of fields."""

    examples: tuple[EvaluationExample, ...]
    digest: str


def read_evaluation_set(lines: Iterable[bytes]) -> EvaluationSet:
    """Raises EvaluationSetError for the first invalid line, and for a set without examples, or with too many."""
    examples: list[EvaluationExample] = []
    lines_of_ids: dict[str, int] = {}
    digest = sha256()
    for number, found in _objects(lines):
        example = example_of(number, found)
        if len(examples) == MOST_EXAMPLES:
            raise EvaluationSetError(number, f"more than {MOST_EXAMPLES} examples")
        first = lines_of_ids.setdefault(example.example_id, number)
        if first != number:
            raise EvaluationSetError(number, f"id: {example.example_id!r} is also the id of line {first}")
        examples.append(example)
        content: tuple[Any, ...] = (*(example.example_id, example.task, example.input, example.expected, example.tags),)
        judged = (example.output, example.rating, example.request_id)
        # A set without any of them has the digest that it had before there were these fields.
        content += judged if judged != (None, None, None) else ()
        digest.update(json.dumps(content, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    if not examples:
        raise EvaluationSetError(0, "no example")
    return EvaluationSet(tuple(examples), digest.hexdigest())


def line_of(example: EvaluationExample) -> str:
    """The example as a line of a set, in ASCII characters; without what an export says only of the people in it."""
    found: dict[str, Any] = {"id": example.example_id, "input": example.input, "expected": example.expected}
    found |= {"task": example.task} if example.task is not None else {}
    found |= {"tags": example.tags} if example.tags else {}
    found |= {"output": {"text": example.output}} if example.output is not None else {}
    found |= {"rating": example.rating} if example.rating is not None else {}
    if example.request_id is not None:
        found["provenance"] = {"tenant": example.tenant, "request_id": example.request_id}
    return json.dumps(found, separators=(",", ":"))


def _objects(lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if len(line) > MOST_LINE_BYTES:
            raise EvaluationSetError(number, f"longer than {MOST_LINE_BYTES} bytes")
        if not line.strip():
            continue
        try:
            found = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
        except UnicodeDecodeError:
            raise EvaluationSetError(number, "not UTF-8") from None
        except json.JSONDecodeError as error:
            raise EvaluationSetError(number, f"not JSON: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:
            raise EvaluationSetError(number, f"not JSON that can be used: {error}") from None
        if not isinstance(found, dict):
            raise EvaluationSetError(number, "not an object")
        yield number, found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def example_of(line: int, found: dict[str, Any]) -> EvaluationExample:
    """The example of one object. Raises EvaluationSetError."""
    if unknown := sorted(found.keys() - _FIELDS - _OF_EXPORTS):
        raise EvaluationSetError(line, f"{unknown[0]}: no field has this name; there are {', '.join(sorted(_FIELDS))}")
    example_id, given, tags = found.get("id"), found.get("input"), found.get("tags", {})
    task = found.get("task")
    if not isinstance(example_id, str) or not 0 < len(example_id) <= MOST_ID_CHARACTERS:
        raise EvaluationSetError(line, f"id: must be a text of 1 to {MOST_ID_CHARACTERS} characters")
    if task is not None and task not in tuple(Task):
        raise EvaluationSetError(line, f"task: {task!r} is none of {', '.join(Task)}")
    if not isinstance(given, dict) or not given:
        raise EvaluationSetError(line, "input: must be an object that is not empty")
    if not isinstance(tags, dict) or len(tags) > MOST_TAGS:
        raise EvaluationSetError(line, f"tags: must be an object with at most {MOST_TAGS} fields")
    for name, value in tags.items():
        if not isinstance(value, str) or max(len(name), len(value)) > MOST_TAG_CHARACTERS:
            raise EvaluationSetError(line, f"tags: names and values must be texts of at most {MOST_TAG_CHARACTERS}")
    return EvaluationExample(
        *(example_id, given, found.get("expected"), tags, task, _output(found), _rating(line, found)),
        *_origin(line, found),
    )


def _output(found: dict[str, Any]) -> str | None:
    """The text of an output; other outputs are judged by nobody."""
    output = found.get("output")
    text = output.get("text") if isinstance(output, dict) else output
    return text if isinstance(text, str) else None


def _rating(line: int, found: dict[str, Any]) -> float | None:
    rating = found.get("rating")
    if rating is None:
        label = found.get("label")
        return _RATING_OF_LABEL.get(label) if isinstance(label, str) else None
    if not isinstance(rating, (int, float)) or isinstance(rating, bool) or not 0 <= rating <= 1:
        raise EvaluationSetError(line, "rating: must be a number from 0 to 1")
    return float(rating)


def _origin(line: int, found: dict[str, Any]) -> tuple[str | None, str | None]:
    """The tenant and the id of the request that an exported example was made of."""
    provenance = found.get("provenance")
    if provenance is None:
        return None, None
    origin = provenance if isinstance(provenance, dict) else {}
    tenant, request_id = origin.get("tenant"), origin.get("request_id")
    if not isinstance(tenant, str) or not isinstance(request_id, str) or not 0 < len(request_id) <= MOST_ID_CHARACTERS:
        raise EvaluationSetError(line, "provenance: must name `tenant` and `request_id`")
    return tenant, request_id

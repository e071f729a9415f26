"""Evaluation sets: JSON Lines, an example a line. Pure.

    {"id": "capital-1", "input": {"prompt": "The capital of France?"}, "expected": "Paris", "tags": {"topic": "maps"}}

``id`` is unique in the set. ``task`` may be absent: it follows from the scorer. ``input`` is an object; what may be in
it depends on the task. ``expected`` is what the scorer compares with, of any type; it may be absent. ``tags`` are texts
by name. Empty lines count, and are skipped.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NoReturn

from fairlane.outcomes import Task

MOST_EXAMPLES = 100_000
MOST_LINE_BYTES = 1 << 20
MOST_ID_CHARACTERS = 128
MOST_TAGS = 16
MOST_TAG_CHARACTERS = 256
_FIELDS = frozenset({"id", "task", "input", "expected", "tags"})
_OF_EXPORTS = frozenset({"output", "label", "provenance"})
"""What an export of labels says besides; it is no part of the set."""


class EvaluationSetError(ValueError):
    """An invalid set. ``line`` is the line at fault, from 1; 0: the set as a whole."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}" if line else reason)
        self.line = line
        self.reason = reason


@dataclass(frozen=True, slots=True)
class EvaluationExample:
    """One example. ``expected`` and ``task`` are None where none is given."""

    example_id: str
    input: Mapping[str, Any]
    expected: Any
    tags: Mapping[str, str]
    task: str | None = None


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
        example = _example(number, found)
        if len(examples) == MOST_EXAMPLES:
            raise EvaluationSetError(number, f"more than {MOST_EXAMPLES} examples")
        first = lines_of_ids.setdefault(example.example_id, number)
        if first != number:
            raise EvaluationSetError(number, f"id: {example.example_id!r} is also the id of line {first}")
        examples.append(example)
        content = (example.example_id, example.task, example.input, example.expected, example.tags)
        digest.update(json.dumps(content, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    if not examples:
        raise EvaluationSetError(0, "no example")
    return EvaluationSet(tuple(examples), digest.hexdigest())


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


def _example(line: int, found: dict[str, Any]) -> EvaluationExample:
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
    return EvaluationExample(example_id, given, found.get("expected"), tags, task)

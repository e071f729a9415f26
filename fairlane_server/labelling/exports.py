"""What reviewers agreed on, as lines of an evaluation set, or of a fine-tuning file in OpenAI's chat format. Pure.

https://platform.openai.com/docs/guides/supervised-fine-tuning#formatting-your-data: one object a line, with `messages`.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fairlane.outcomes import GuardrailResult, Task
from fairlane.records import Message
from fairlane_server.conversations.turns import with_history
from fairlane_server.evaluation.evaluation_set import MOST_LINE_BYTES
from fairlane_server.labelling.decisions import GOOD, GivenLabel

_REVIEWER_ID_DIGITS = 16
_CONTEXT = ("passages", "history")
_CHANGED_BY_GUARDRAILS = frozenset({GuardrailResult.REDACTED, GuardrailResult.BLOCKED})


@dataclass(frozen=True, slots=True)
class AgreedItem:
    """An item on whose label two reviewers agreed, with all of its labels."""

    request_id: str
    origin: str
    model: str
    model_version: str
    arm: str | None
    task: str
    input: dict[str, Any]
    output: dict[str, Any]
    guardrails: list[dict[str, Any]]
    correction: str | None
    label: str
    answered_at_ms: int
    closed_at_ms: int
    labels: tuple[GivenLabel, ...]


@dataclass(frozen=True, slots=True)
class ExportedLines:
    """One example, and where it is from; each is a JSON object."""

    example: Mapping[str, Any]
    provenance: Mapping[str, Any]


def evaluation_line(item: AgreedItem, tenant: str, *, keep_context: bool = False) -> dict[str, Any] | None:
    """An example of an evaluation set: the input, what was answered, what is expected, and the provenance. ``expected``
    is None where reviewers agreed that an answer is bad and nobody wrote a better one, and of vectors and ranks.

    None for an item that is none: it is larger than a line of a set may be, or, unless ``keep_context``, its answer
    depended on passages or earlier turns, which cannot be asked again.
    """
    if not keep_context and any(item.input.get(name) for name in _CONTEXT):
        return None
    line = {
        "id": item.request_id,
        "task": item.task,
        "input": item.input,
        "output": item.output,
        "label": item.label,
        "expected": expected_of(item),
        "provenance": provenance_of(item, tenant),
    }
    return line if len(json_line(line)) <= MOST_LINE_BYTES else None


def json_line(line: Mapping[str, Any]) -> bytes:
    """The line of a file, in UTF-8."""
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def fine_tuning_lines(item: AgreedItem, tenant: str) -> ExportedLines | None:
    """An example for supervised fine-tuning. None for an item that is none: no text task, no agreed text, an answer
    from passages, which the example could not show, or a text that guardrails kept from the model or the caller."""
    expected = expected_of(item)
    if item.task != Task.GENERATE or expected is None or item.input.get("passages"):
        return None
    if any(one.get("verdict") in _CHANGED_BY_GUARDRAILS for one in item.guardrails):
        return None
    messages = messages_of(item.input)
    if not messages:
        return None
    example = {"messages": [*messages, {"role": "assistant", "content": expected}]}
    return ExportedLines(example, provenance_of(item, tenant))


def expected_of(item: AgreedItem) -> str | None:
    """What the output should have been: of a text the output itself if it is good, else the latest correction of those
    who agreed, else that of the feedback; of a class the label. No label says what a vector or ranks should be."""
    if item.task != Task.GENERATE:
        return item.label if item.task == Task.CLASSIFY else None
    if item.label == GOOD:
        text = item.output.get("text")
        return text if isinstance(text, str) else None
    corrections = [one.correction for one in item.labels if one.label == item.label and one.correction]
    return corrections[-1] if corrections else item.correction


def messages_of(content: Mapping[str, Any]) -> list[dict[str, str]]:
    """The chat that the model got: what was asked, with the turns before it; a prompt is a message of the user. Empty
    for an input without either."""
    asked, history = ([_message(one) for one in content.get(name) or ()] for name in ("messages", "history"))
    if not asked and content.get("prompt"):
        asked = [Message("user", content["prompt"])]
    return [asdict(one) for one in with_history(asked, history)] if asked else []


def provenance_of(item: AgreedItem, tenant: str) -> dict[str, Any]:
    """Where an example is from: the request, the model version and time of its answer, and who judged it."""
    return {
        "request_id": item.request_id,
        "tenant": tenant,
        "consent": "evaluation: allowed",
        "origin": item.origin,
        "model": item.model,
        "model_version": item.model_version,
        "arm": item.arm,
        "answered_at_ms": item.answered_at_ms,
        "agreed_at_ms": item.closed_at_ms,
        "label": item.label,
        "reviewers": [reviewer_id(tenant, one.reviewer) for one in item.labels if one.label == item.label],
    }


def reviewer_id(tenant: str, reviewer: str) -> str:
    """An opaque id of a reviewer, the same in all exports of a tenant."""
    return hashlib.sha256(f"{tenant}\0{reviewer}".encode()).hexdigest()[:_REVIEWER_ID_DIGITS]


def _message(plain: Mapping[str, str]) -> Message:
    return Message(plain["role"], plain["content"])

"""Requests of the demo: questions, texts, rankings and images, each with a check of its answer."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from pathlib import Path
from pydoc_data.topics import topics as python_documentation
from typing import Any

import yaml

from deploy.models.digits_data import load_split
from fairlane.records import InferenceReply

TENANTS = ("acme", "globex", "initech")
LANGUAGE_MODEL = "smollm2-135m-instruct"
TEXT_MODEL = "all-minilm-l6-v2"
IMAGE_MODEL = "digits"
TIMEOUT_MS = 120_000

_EMBEDDINGS = 12
_IMAGES = 12
_TOPICS = ("while", "if", "import", "class", "try", "lambda", "assert", "yield", "return", "del", "global", "with")
_CANDIDATES = 6

Check = Callable[[InferenceReply], bool]


@dataclass(frozen=True, slots=True)
class DemoRequest:
    task: str
    fields: Mapping[str, Any]
    is_right: Check
    show: Callable[[InferenceReply], str]
    tenant: str = ""


def build_workload(questions_file: Path) -> list[DemoRequest]:
    """About sixty requests, spread over the tenants and the priorities, tasks mixed."""
    makers = (_chats(questions_file), _rankings(), _embeddings(), _images())
    made = [one for one in chain.from_iterable(zip_longest(*makers)) if one is not None]
    priorities = {"acme": ("high", "normal"), "globex": ("normal", "low"), "initech": ("normal", "low")}
    spread = []
    for index, one in enumerate(made):
        tenant = TENANTS[index % len(TENANTS)]
        priority = priorities[tenant][index // len(TENANTS) % 2]
        fields = {**one.fields, "task": one.task, "priority": priority, "timeout_ms": TIMEOUT_MS}
        spread.append(replace(one, tenant=tenant, fields=fields))
    return spread


def _chats(questions_file: Path) -> Iterator[DemoRequest]:
    for entry in yaml.safe_load(questions_file.read_text(encoding="utf-8")):
        messages = entry.get("messages") or [{"role": "user", "content": entry["question"]}]
        fields = {"model": LANGUAGE_MODEL, "messages": messages, "max_tokens": entry["max_tokens"]}
        yield DemoRequest("generate", fields, _contains(str(entry["expect"])), text_of)


def _contains(expected: str) -> Check:
    return lambda reply: reply.output is not None and expected.lower() in (reply.output.text or "").lower()


def text_of(reply: InferenceReply) -> str:
    """The answer in one line."""
    return " ".join(((reply.output and reply.output.text) or "").split())


def _rankings() -> Iterator[DemoRequest]:
    """Which of six real passages of Python's documentation is about a statement."""
    passages = [_first_paragraph(topic) for topic in _TOPICS]
    for index, topic in enumerate(_TOPICS):
        chosen = [(index + step) % len(_TOPICS) for step in range(_CANDIDATES)]
        # The right one is at a different place each time.
        chosen = chosen[index % _CANDIDATES :] + chosen[: index % _CANDIDATES]
        fields = {
            "model": TEXT_MODEL,
            "query": f"How does the {topic} statement of Python work?",
            "documents": [passages[one] for one in chosen],
        }
        yield DemoRequest("rank", fields, _ranks_first(chosen.index(index)), _best)


def _first_paragraph(topic: str) -> str:
    prose = [part for part in python_documentation[topic].split("\n\n") if not re.match(r"\s|\S.*\n[*=-]+$", part)]
    return " ".join(" ".join(prose[:2]).split())[:600]


def _ranks_first(index: int) -> Check:
    return lambda reply: (
        reply.output is not None
        and reply.output.scores is not None
        and max(range(len(reply.output.scores)), key=reply.output.scores.__getitem__) == index
    )


def _best(reply: InferenceReply) -> str:
    scores = (reply.output and reply.output.scores) or ()
    return f"best of {len(scores)}: {max(scores, default=0):.2f}"


def _embeddings() -> Iterator[DemoRequest]:
    for topic in list(python_documentation)[:_EMBEDDINGS]:
        text = " ".join(python_documentation[topic].split())[:500]
        yield DemoRequest("embed", {"model": TEXT_MODEL, "texts": [text, topic]}, _is_two_unit_vectors, _vectors)


def _is_two_unit_vectors(reply: InferenceReply) -> bool:
    vectors = (reply.output and reply.output.embeddings) or ()
    return len(vectors) == 2 and all(abs(sum(x * x for x in vector) - 1) < 1e-3 for vector in vectors)


def _vectors(reply: InferenceReply) -> str:
    vectors = (reply.output and reply.output.embeddings) or ()
    return f"{len(vectors)} vectors of {len(vectors[0]) if vectors else 0}"


def _images() -> Iterator[DemoRequest]:
    """Handwritten digits that the classifier has not seen in its training."""
    split = load_split()
    for image, label in list(zip(split.test_images, split.test_labels, strict=True))[:_IMAGES]:
        fields = {"model": IMAGE_MODEL, "image": image.tobytes()}
        yield DemoRequest("classify", fields, _is_digit(str(label)), _label)


def _is_digit(expected: str) -> Check:
    return lambda reply: bool(reply.output and reply.output.labels and reply.output.labels[0].label == expected)


def _label(reply: InferenceReply) -> str:
    labels = (reply.output and reply.output.labels) or ()
    return f"{labels[0].label} ({labels[0].score:.0%})" if labels else ""

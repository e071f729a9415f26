"""Inputs to begin with, those to remember, and where failing ones are kept."""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from deploy.local.layout import PROJECT_ROOT

CORPUS = Path(__file__).parent / "corpus"
"""A folder for each target; every input in it is tried as it is before any mutation."""
FINDINGS = PROJECT_ROOT / ".fairlane" / "fuzz"

_CHAT = {
    "model": "words",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
}
_CALLS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (
        "/v1/chat/completions",
        {**_CHAT, "max_tokens": 4, "stream": False, "stop": ["\n"], "metadata": {"job": "1"}, "seed": 7, "user": "u"},
    ),
    (
        "/v1/chat/completions",
        {
            **_CHAT,
            "fairlane": {"priority": "low", "timeout_ms": 5_000, "retrieval": {"collection": "docs", "top_k": 2}},
        },
    ),
    (
        "/v1/chat/completions",
        {**_CHAT, "temperature": 0.5, "top_p": 0.9, "logprobs": True, "top_logprobs": 2, "stream": True},
    ),
    ("/v1/completions", {"model": "words", "prompt": "Once", "max_tokens": 4, "logprobs": 1, "stop": "."}),
    ("/v1/embeddings", {"model": "words", "input": ["one", "two"], "encoding_format": "base64"}),
    (
        "/v1/requests",
        {
            "model": "words",
            "task": "generate",
            "input": {"messages": [{"role": "user", "content": "Hello"}]},
            "parameters": {"max_tokens": 4, "temperature": 0.1, "stop": ["x"], "seed": 1, "logprobs": 2},
            "priority": "high",
            "metadata": {"a": "b"},
            "conversation_id": "c-1",
        },
    ),
    ("/inference", {"model": "words", "task": "embed", "input": {"texts": ["one", "two"]}, "timeout_ms": 2_000}),
    ("/v1/rank", {"model": "words", "query": "which?", "documents": ["this", "that"], "top_n": 1}),
    ("/v1/classify", {"model": "words", "image": base64.b64encode(bytes(64)).decode(), "top_n": 2}),
    (
        "/v1/batches",
        {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h", "metadata": {"a": "b"}},
    ),
)
_ROWS: tuple[Mapping[str, Any], ...] = (
    {"custom_id": "row-1", "method": "POST", "url": "/v1/chat/completions", "body": {**_CHAT, "max_tokens": 2}},
    {"id": "row-2", "prompt": "Once", "model": "words", "max_tokens": 2},
)


@cache
def remembered(target: str) -> tuple[bytes, ...]:
    """The committed inputs of a target, in the order of their names."""
    return tuple(file.read_bytes() for file in sorted((CORPUS / target).iterdir()))


@cache
def records() -> tuple[bytes, ...]:
    """Every golden example of a record, and the inputs to remember."""
    examples = sorted((PROJECT_ROOT / "schemas" / "examples").glob("*.bin"))
    return (*remembered("records"), *(file.read_bytes() for file in examples))


@cache
def bodies() -> tuple[bytes, ...]:
    """Valid bodies of every call that takes one, rows of files, and the inputs to remember."""
    rows = (json.dumps(row).encode() for row in _ROWS)
    return (*remembered("bodies"), *(body for _, body in calls()), *rows)


@cache
def calls() -> tuple[tuple[str, bytes], ...]:
    """Paths of the gateway, each with a valid body."""
    return tuple((path, json.dumps(body).encode()) for path, body in _CALLS)


def keep(name: str, content: bytes) -> Path:
    """Write a failing input down. Returns where."""
    FINDINGS.mkdir(parents=True, exist_ok=True)
    file = FINDINGS / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"
    file.write_bytes(content)
    return file


def chosen(seeds: Sequence[bytes], case: int) -> bytes | None:
    """The first cases are the seeds as they are; None from then on."""
    return seeds[case] if case < len(seeds) else None

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
_BODIES: tuple[Mapping[str, Any], ...] = (
    {**_CHAT, "max_tokens": 4, "stream": False, "stop": ["\n"], "metadata": {"job": "1"}, "seed": 7, "user": "u"},
    {**_CHAT, "fairlane": {"priority": "low", "timeout_ms": 5_000, "retrieval": {"collection": "docs", "top_k": 2}}},
    {
        **_CHAT,
        "temperature": 0.5,
        "top_p": 0.9,
        "logprobs": True,
        "top_logprobs": 2,
        "response_format": {"type": "text"},
    },
    {"model": "words", "prompt": "Once", "max_tokens": 4, "logprobs": 1, "stop": "."},
    {"model": "words", "input": ["one", "two"], "encoding_format": "base64"},
    {
        "model": "words",
        "task": "generate",
        "input": {"messages": [{"role": "user", "content": "Hello"}]},
        "parameters": {"max_tokens": 4, "temperature": 0.1, "stop": ["x"], "seed": 1, "logprobs": 2},
        "priority": "high",
        "metadata": {"a": "b"},
        "group": "search",
        "conversation_id": "c-1",
    },
    {"model": "words", "task": "embed", "input": {"texts": ["one", "two"]}, "timeout_ms": 2_000},
    {"model": "words", "query": "which?", "documents": ["this", "that"], "top_n": 1},
    {"model": "words", "image": base64.b64encode(bytes(64)).decode(), "top_n": 2},
    {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h", "metadata": {"a": "b"}},
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
    """Valid bodies of every call that takes one, and the inputs to remember."""
    return (*remembered("bodies"), *(json.dumps(body).encode() for body in _BODIES))


def keep(name: str, content: bytes) -> Path:
    """Write a failing input down. Returns where."""
    FINDINGS.mkdir(parents=True, exist_ok=True)
    file = FINDINGS / f"{name}-{hashlib.sha256(content).hexdigest()[:12]}"
    file.write_bytes(content)
    return file


def chosen(seeds: Sequence[bytes], case: int) -> bytes | None:
    """The first cases are the seeds as they are; None from then on."""
    return seeds[case] if case < len(seeds) else None

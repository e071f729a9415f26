"""Describe a letter for display. Pure; text written by a tenant appears only on request."""

import re
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from fairlane.records import InferenceReply
from fairlane_server.dead_letters.letters import Letter

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")

_NAMES = frozenset(
    {
        *("request_id", "replay_of", "tenant", "model", "model_version", "task", "engine", "pool", "group"),
        *("priority", "priority_class", "outcome", "code", "field", "finish_reason", "mode", "collection"),
        *("topic", "reply_to", "reply_topic", "dispatcher_id", "passage_id", "degradations"),
    }
)
"""Fields whose text is a name. All other text counts as written by a tenant, also in new fields."""

_MOST_ENTRIES = 100


def shown(text: str | None) -> str | None:
    """A valid name unchanged; for other text only its length, since a letter may contain unvalidated text."""
    return text if text is None or _NAME.fullmatch(text) else f"({len(text)} characters)"


def facts(letter: Letter) -> dict[str, object]:
    original = letter.original
    return {
        "topic": letter.place.topic,
        "partition": letter.place.partition,
        "offset": letter.place.offset,
        "died_at_ms": letter.died_at_ms,
        "bytes": len(letter.record.value),
        "record": letter.kind,
        "problem": letter.problem,
        "request_id": shown(letter.request_id),
        "replay_of": None if letter.request is None else shown(letter.request.replay_of),
        "tenant": shown(letter.tenant),
        "model": shown(letter.model),
        "exception": letter.exception,
        "message": letter.message,
        "original": None
        if original is None
        else {"topic": original.topic, "partition": original.partition, "offset": original.offset},
        "original_at_ms": letter.original_at_ms,
    }


def contents(letter: Letter, *, with_input: bool) -> object:
    """The record in a letter as JSON values; for text that is no name only its length, unless ``with_input``.
    Undecodable bytes are given in base64 with ``with_input``, else as None."""
    if letter.content is None:
        return {"base64": b64encode(letter.record.value).decode()} if with_input else None
    if with_input:
        return _plain(letter.content)
    plain = _measured(letter.content, "")
    if isinstance(letter.content, InferenceReply) and isinstance(plain, dict):
        # Services write it, and their messages quote no request.
        plain["message"] = letter.content.message
    return plain


def flat(value: object, name: str = "") -> list[tuple[str, str]]:
    """Flatten JSON values to pairs such as ``request.parameters.max_tokens`` and its value, without null and empty
    ones."""
    if isinstance(value, Mapping):
        return [line for key, inner in value.items() for line in flat(inner, f"{name}.{key}" if name else str(key))]
    if isinstance(value, list):
        return [line for number, inner in enumerate(value) for line in flat(inner, f"{name}[{number}]")]
    return [] if value is None else [(name, str(value))]


def _plain(value: Any) -> object:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    return b64encode(value).decode() if isinstance(value, bytes) else value


def _measured(value: Any, name: str) -> object:
    """Names and numbers as they are; of everything else only the size."""
    if is_dataclass(value):
        return {field.name: _measured(getattr(value, field.name), field.name) for field in fields(value)}
    if isinstance(value, str):
        return shown(value) if name in _NAMES else f"({len(value)} characters)"
    if isinstance(value, bytes):
        return f"({len(value)} bytes)"
    if isinstance(value, Mapping):
        return f"({len(value)} entries)"
    if isinstance(value, tuple | list):
        if len(value) > _MOST_ENTRIES:
            return f"({len(value)} entries)"
        return [_measured(inner, name) for inner in value]
    return value

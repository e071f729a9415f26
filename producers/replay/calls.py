"""Outcomes of the calls of a load test: from final replies, and from HTTP answers in OpenAI's format. Pure."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fairlane.outcomes import Code, Outcome
from fairlane.records import InferenceReply

OK = str(Outcome.OK)
TIMEOUT = "timeout"
"""No answer within the time of the call."""
NOT_SENT = "not_sent"
"""Too many calls were in flight, or the generator was too late."""
INTERRUPTED = "interrupted"
"""The run ended while the call was in flight."""
CONNECTION = "connection"
"""No connection, or one that broke."""
UNREADABLE = "unreadable"
"""The answer cannot be parsed."""

_SHED = frozenset(
    {
        *(Code.OVERLOADED, Code.DEADLINE_UNMEETABLE, Code.QUOTA_EXCEEDED, Code.DRAINING, "backpressure"),
        *(Code.INSUFFICIENT_QUOTA, Code.BUDGET_UNKNOWN),
        "rate_limit_exceeded",  # the gateway's code for a key or a user that calls too often
    }
)
OnText = Callable[[], None]
"""Called at the first text of a streamed answer."""

_WORD = re.compile(r"[a-z][a-z0-9_]{0,47}")
_TOO_MANY_REQUESTS = 429
_UNAVAILABLE = 503
_MOST_EVENT_BYTES = 16 * 1024 * 1024
_DATA = b"data:"
_END = b"[DONE]"


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """Outcome of a call.

    Attributes:
        code: ``ok``, or the reason, in one word.
        shed: refused because of load; ``retry_after_s``: when it says to come back.
        degraded: served with less than was requested.
        prompt_tokens, output_tokens: as the service counted them.
    """

    code: str
    shed: bool = False
    degraded: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0
    retry_after_s: float | None = None


def of_reply(reply: InferenceReply) -> CallOutcome:
    """Outcome of a final reply."""
    usage = reply.usage
    code = OK if reply.outcome == Outcome.OK else _word(reply.code or reply.outcome)
    tokens = usage.prompt_tokens, usage.completion_tokens
    retry_after_s = None if reply.retry_after_ms is None else reply.retry_after_ms / 1_000
    return CallOutcome(code, code in _SHED, bool(reply.degradations), *tokens, retry_after_s)


def of_refusal(status: int, code: object, retry_after_s: float | None = None) -> CallOutcome:
    """Outcome of an HTTP answer other than a success; ``code``: from its body, if there is one."""
    named = _word(code) if isinstance(code, str) and code else f"http_{status}"
    is_shed = named in _SHED or status in (_TOO_MANY_REQUESTS, _UNAVAILABLE)
    return CallOutcome(named, is_shed, retry_after_s=retry_after_s)


def of_body(status: int, body: bytes, retry_after_s: float | None = None) -> CallOutcome:
    """Outcome of an HTTP answer in one piece."""
    found = _object(body)
    if found is None:
        return CallOutcome(UNREADABLE) if status == 200 else of_refusal(status, None, retry_after_s)
    return _served(found) if status == 200 else of_refusal(status, _code(found), retry_after_s)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The time to retry of an answer's headers, whose names are in lower case."""
    for name, per_s in (("retry-after-ms", 1_000), ("retry-after", 1)):
        value = headers.get(name, "")
        if value.isascii() and value.isdecimal():
            return int(value) / per_s
    return None


def _word(text: str) -> str:
    """A code fit for a report, whatever a server sent."""
    return text if _WORD.fullmatch(text) else UNREADABLE


class ChatStreamParser:
    """Parses the events of a streamed answer, in pieces of any size."""

    def __init__(self, on_text: OnText) -> None:
        self._on_text: OnText | None = on_text
        self._rest = b""
        self._ended = False
        self._code: str | None = None
        self._last: dict[str, Any] = {}

    def feed(self, piece: bytes) -> None:
        """Take the next piece of the body. An event of another shape makes the answer unreadable."""
        self._rest += piece
        if len(self._rest) > _MOST_EVENT_BYTES:
            self._rest, self._code = b"", UNREADABLE
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                self._take(line[len(_DATA) :].strip())

    def outcome(self, status: int, retry_after_s: float | None = None) -> CallOutcome:
        """The outcome of the call, at the end of the body."""
        if status != 200:
            return of_body(status, self._rest, retry_after_s)
        if self._code is not None:
            return of_refusal(status, self._code)
        return _served(self._last) if self._ended else CallOutcome(UNREADABLE)

    def _take(self, data: bytes) -> None:
        if data == _END:
            self._ended = True
            return
        event = _object(data)
        if event is None:
            self._code = UNREADABLE
        elif "error" in event:
            self._code = str(_code(event))
        else:
            # Usage and Fairlane's fields may be in different events.
            self._last |= {name: event[name] for name in ("usage", "fairlane") if event.get(name)}
            if self._on_text is not None and _has_text(event):
                self._on_text()
                self._on_text = None


def _object(text: bytes) -> dict[str, Any] | None:
    """A JSON object; None for anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _has_text(event: dict[str, Any]) -> bool:
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return False
    delta = choices[0].get("delta")
    return isinstance(delta, dict) and bool(delta.get("content"))


def _code(body: dict[str, Any]) -> object:
    error = body.get("error")
    return error.get("code") if isinstance(error, dict) else None


def _served(body: dict[str, Any]) -> CallOutcome:
    usage, about = body.get("usage"), body.get("fairlane")
    usage = usage if isinstance(usage, dict) else {}
    degraded = isinstance(about, dict) and bool(about.get("degradations"))
    return CallOutcome(OK, False, degraded, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))


def _count(usage: dict[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) else 0

"""Parses answers in OpenAI's format, whole or as server-sent events. Pure."""

import json
from collections.abc import Callable
from typing import Any

from producers.replay.calls import OK, UNREADABLE, Answer, of_refusal

_MOST_EVENT_BYTES = 16 * 1024 * 1024
_DATA = b"data:"
_END = b"[DONE]"


def answer_of(status: int, body: bytes) -> Answer:
    """What became of a call that was answered in one piece."""
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        return Answer(UNREADABLE) if status == 200 else of_refusal(status, None)
    if status != 200:
        return of_refusal(status, _code(found))
    return _served(found)


class ChatStream:
    """Follows the events of a streamed answer; give it the body as it comes, in any pieces."""

    def __init__(self, on_text: Callable[[], None]) -> None:
        """``on_text``: called once, at the first text."""
        self._on_text: Callable[[], None] | None = on_text
        self._rest = b""
        self._ended = False
        self._code: str | None = None
        self._last: dict[str, Any] = {}

    def feed(self, piece: bytes) -> None:
        """Take the next piece of the body. What is not an event of this shape makes the answer unreadable."""
        self._rest += piece
        if len(self._rest) > _MOST_EVENT_BYTES:
            self._rest, self._code = b"", UNREADABLE
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                self._take(line[len(_DATA) :].strip())

    def answer(self, status: int) -> Answer:
        """What became of the call, once the body is over."""
        if status != 200:
            return answer_of(status, self._rest)
        if self._code is not None:
            return of_refusal(status, self._code)
        return _served(self._last) if self._ended else Answer(UNREADABLE)

    def _take(self, data: bytes) -> None:
        if data == _END:
            self._ended = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self._code = UNREADABLE
        elif "error" in event:
            self._code = str(_code(event))
        else:
            # Usage and what Fairlane says may stand in different events.
            self._last |= {name: event[name] for name in ("usage", "fairlane") if event.get(name)}
            if self._on_text is not None and _has_text(event):
                self._on_text()
                self._on_text = None


def _has_text(event: dict[str, Any]) -> bool:
    choices = event.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        return False
    delta = choices[0].get("delta")
    return isinstance(delta, dict) and bool(delta.get("content"))


def _code(body: dict[str, Any]) -> object:
    error = body.get("error")
    return error.get("code") if isinstance(error, dict) else None


def _served(body: dict[str, Any]) -> Answer:
    usage, about = body.get("usage"), body.get("fairlane")
    usage = usage if isinstance(usage, dict) else {}
    degraded = isinstance(about, dict) and bool(about.get("degradations"))
    return Answer(OK, False, degraded, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))


def _count(usage: dict[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) else 0

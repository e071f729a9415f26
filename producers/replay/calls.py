"""Calls of a load test: the port of targets, and the outcome of a call. Pure."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fairlane.outcomes import Code, Outcome
from fairlane.records import InferenceReply
from producers.replay.trace import Call

OK = str(Outcome.OK)
TIMEOUT = "timeout"
"""No answer within the time the call had."""
NOT_SENT = "not_sent"
"""The generator had as many under way as it may have, or came to it too late: nobody was asked."""
INTERRUPTED = "interrupted"
"""The run was ended while it was under way."""
CONNECTION = "connection"
"""The connection could not be made, or broke."""
UNREADABLE = "unreadable"
"""The answer was none that can be read."""
RATE_LIMITED = "rate_limit_exceeded"
"""The gateway's word for a key or a user that calls too often."""

_SHED = frozenset(
    {Code.OVERLOADED, Code.DEADLINE_UNMEETABLE, Code.QUOTA_EXCEEDED, Code.DRAINING, RATE_LIMITED, "backpressure"}
)
_WORD = re.compile(r"[a-z][a-z0-9_]{0,47}")
_TOO_MANY_REQUESTS = 429
_UNAVAILABLE = 503


@dataclass(frozen=True, slots=True)
class Answer:
    """How a call ended.

    Attributes:
        code: ``ok``, or why not, in one word.
        shed: it was refused because there is too much to do, and not for what it is.
        degraded: it was served with less than was asked for.
        prompt_tokens, output_tokens: as the service counted them.
    """

    code: str
    shed: bool = False
    degraded: bool = False
    prompt_tokens: int = 0
    output_tokens: int = 0


def of_reply(reply: InferenceReply) -> Answer:
    """What a final reply stands for."""
    usage = reply.usage
    code = OK if reply.outcome == Outcome.OK else word(reply.code or reply.outcome)
    return Answer(code, code in _SHED, bool(reply.degradations), usage.prompt_tokens, usage.completion_tokens)


def of_refusal(status: int, code: object) -> Answer:
    """What an HTTP answer that is no success stands for; ``code`` is the word in its body, if it has one."""
    named = word(code) if isinstance(code, str) and code else f"http_{status}"
    return Answer(named, named in _SHED or status in (_TOO_MANY_REQUESTS, _UNAVAILABLE))


def word(text: str) -> str:
    """A code fit for a report, whatever a server said."""
    return text if _WORD.fullmatch(text) else UNREADABLE


OnText = Callable[[], None]


class Target(Protocol):
    """A way into Fairlane, for any number of tasks at once."""

    async def start(self) -> None:
        """Make ready. Raises what its own errors are when it cannot work at all."""
        ...

    async def ask(self, call: Call, timeout_s: float, on_text: OnText) -> Answer:
        """Make one call and wait for the end of its answer. May be cancelled at any time, and leaves nothing behind.

        Args:
            call: what to ask, in whose name.
            timeout_s: how long its asker waits; the service is told, where it can be. Whoever calls ends the wait.
            on_text: called when the first text of a stream is here.
        """
        ...

    async def close(self) -> None: ...

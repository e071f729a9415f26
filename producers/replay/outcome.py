"""Outcome of a call, independent of the target. Pure."""

import re
from dataclasses import dataclass

from fairlane.outcomes import Code, Outcome
from fairlane.records import InferenceReply

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

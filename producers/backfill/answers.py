"""Results of rows as written to the output. Pure."""

import json
from dataclasses import dataclass
from typing import Any

from fairlane.outcomes import Code, Outcome
from fairlane.records import InferenceReply, Output
from fairlane_server.cost_tokens import cost_tokens
from producers.backfill.job import Tally
from producers.backfill.openai_responses import body_of
from producers.backfill.row import BadRow

EXPIRED_MESSAGE = "not done when the completion window ended"
CANCELLED_MESSAGE = "the job was cancelled before it was done"


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """The end of one row.

    Attributes:
        row: its number in the input, from 0.
        row_id: what it called itself.
        url: of an OpenAI batch line.
        request_id: None when it was never sent.
        outcome: as in a reply.
        code: why it was rejected or failed.
        field: that is at fault.
        message: why.
        model: that answered.
        finish_reason: of a generated text.
        output: what the model said, as JSON: of our own form, or the body of a response to an OpenAI line.
        prompt_tokens: spent.
        completion_tokens: spent.
        cost_tokens: spent; 0 when an earlier answer was given again.
    """

    row: int
    row_id: str | None
    url: str | None
    request_id: str | None
    outcome: str
    code: str | None = None
    field: str | None = None
    message: str | None = None
    model: str | None = None
    finish_reason: str | None = None
    output: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_tokens: int = 0

    @property
    def size_bytes(self) -> int:
        """About what it takes in memory."""
        return 400 + len(self.output or "") + len(self.message or "") + len(self.row_id or "")


def of_reply(row: int, row_id: str | None, url: str | None, reply: InferenceReply, created_s: int) -> RowAnswer:
    """The answer that a final reply is."""
    output = None
    if reply.outcome == Outcome.OK:
        output = _plain(reply.output) if url is None else body_of(url, reply, created_s)
    usage = reply.usage
    return RowAnswer(
        row,
        row_id,
        url,
        reply.request_id,
        reply.outcome,
        reply.code,
        reply.field,
        reply.message,
        reply.model,
        reply.finish_reason,
        output,
        usage.prompt_tokens,
        usage.completion_tokens,
        0 if reply.cache_use is not None else cost_tokens(usage.prompt_tokens, usage.completion_tokens),
    )


def of_bad_row(row: int, bad: BadRow) -> RowAnswer:
    """The answer to a row that cannot be run."""
    return RowAnswer(row, bad.row_id, bad.url, None, Outcome.REJECTED, Code.INVALID, bad.field, bad.reason)


def unfinished(row: int, row_id: str | None, url: str | None, request_id: str | None, outcome: Outcome) -> RowAnswer:
    """The answer to a row that nobody waits for any longer: expired or cancelled."""
    message = EXPIRED_MESSAGE if outcome is Outcome.EXPIRED else CANCELLED_MESSAGE
    return RowAnswer(row, row_id, url, request_id, outcome, message=message)


def tally_of(answers: "list[RowAnswer]") -> Tally:
    """The sums of some answers."""
    ok = expired = cancelled = 0
    prompt = completion = cost = 0
    for answer in answers:
        ok += answer.outcome == Outcome.OK
        expired += answer.outcome == Outcome.EXPIRED
        cancelled += answer.outcome == Outcome.CANCELLED
        prompt += answer.prompt_tokens
        completion += answer.completion_tokens
        cost += answer.cost_tokens
    return Tally(ok, len(answers) - ok - expired - cancelled, expired, cancelled, prompt, completion, cost)


def _plain(output: Output | None) -> str:
    if output is None:
        return "{}"
    plain: dict[str, Any] = {
        "text": output.text,
        "embeddings": output.embeddings,
        "scores": output.scores,
        "labels": None
        if output.labels is None
        else [{"label": one.label, "score": one.score} for one in output.labels],
        "logprobs": None
        if output.logprobs is None
        else [
            {
                "token": one.token,
                "logprob": one.logprob,
                "top": [{"token": top.token, "logprob": top.logprob} for top in one.top],
            }
            for one in output.logprobs
        ],
    }
    said = {name: value for name, value in plain.items() if value is not None}
    return json.dumps(said, ensure_ascii=False, separators=(",", ":"))

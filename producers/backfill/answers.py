"""Results of rows as written to the output. Pure."""

from dataclasses import dataclass, fields

from pydantic_core import to_json

from fairlane.outcomes import Code, Outcome
from fairlane.records import InferenceReply, Output
from fairlane_server.admission_rule import cost_tokens
from producers.backfill.job import BadRow, RowTally
from producers.openai_api.responses import RequestEcho, chat_completion, completion, embeddings

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"

EXPIRED_MESSAGE = "not done when the completion window ended"
CANCELLED_MESSAGE = "the job was cancelled before it was done"


@dataclass(frozen=True, slots=True)
class RowAnswer:
    """Result of one row.

    Attributes:
        row: number of the row in the input, from 0.
        row_id: the row's own id.
        url: of an OpenAI batch line.
        request_id: None if the row was never sent.
        outcome: as in a reply, like ``code``, ``field``, ``message``, ``model`` and ``finish_reason``.
        output: JSON text: our own form, or for an OpenAI line the body of the response.
        cost_tokens: tokens charged; 0 for an answer from the response cache.
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
        """Approximate size in memory."""
        return 400 + len(self.output or "") + len(self.message or "") + len(self.row_id or "")


def of_reply(row: int, row_id: str | None, url: str | None, reply: InferenceReply, created_s: int) -> RowAnswer:
    """Result from a final reply."""
    output = None
    if reply.outcome == Outcome.OK:
        output = _plain(reply.output) if url is None else _openai_body(url, reply, created_s)
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


def _openai_body(url: str, reply: InferenceReply, created_s: int) -> str:
    asked = RequestEcho(reply.request_id, reply.model or "", created_s)
    if url == EMBEDDINGS:
        return embeddings(reply, asked, as_base64=False, dimensions=None).decode()
    return (chat_completion if url == CHAT else completion)(reply, asked).decode()


def of_bad_row(row: int, bad: BadRow) -> RowAnswer:
    """Result of an invalid row."""
    return RowAnswer(row, bad.row_id, bad.url, None, Outcome.REJECTED, Code.INVALID, bad.field, bad.reason)


def unfinished(row: int, row_id: str | None, url: str | None, request_id: str | None, outcome: Outcome) -> RowAnswer:
    """Result of an expired or cancelled row without a reply."""
    message = EXPIRED_MESSAGE if outcome is Outcome.EXPIRED else CANCELLED_MESSAGE
    return RowAnswer(row, row_id, url, request_id, outcome, message=message)


def tally_of(answers: "list[RowAnswer]") -> RowTally:
    """Counts and token sums of results."""
    ok = expired = cancelled = 0
    prompt = completion = cost = 0
    for answer in answers:
        ok += answer.outcome == Outcome.OK
        expired += answer.outcome == Outcome.EXPIRED
        cancelled += answer.outcome == Outcome.CANCELLED
        prompt += answer.prompt_tokens
        completion += answer.completion_tokens
        cost += answer.cost_tokens
    return RowTally(ok, len(answers) - ok - expired - cancelled, expired, cancelled, prompt, completion, cost)


def _plain(output: Output | None) -> str:
    if output is None:
        return "{}"
    values = {field.name: getattr(output, field.name) for field in fields(output)}
    return to_json({name: value for name, value in values.items() if value is not None}).decode()

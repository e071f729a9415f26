"""What a tenant may get wrong: bytes that are no request, and requests that must be refused, by field."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fairlane.codec import DecodeProblem
from fairlane.outcomes import Code, Outcome, Task
from fairlane.records import InferenceReply, InferenceRequest, Parameters, RequestInput, Retrieval
from fairlane.records import Message as ChatMessage
from tests.kit.pipeline import Pipeline

SECRET = "the quarterly numbers are terrible"
"""The prompt; it must not be seen in a header, an audit event, a refusal or a log."""
_YEAR_MS = 365 * 86_400_000

Garbage = Callable[[Pipeline], bytes | None]


def encoded(pipeline: Pipeline) -> bytes:
    return pipeline.codec.encode(pipeline.request(prompt=SECRET))


def reply_record(pipeline: Pipeline) -> bytes:
    return pipeline.codec.encode(InferenceReply("x", pipeline.tenant("a"), Outcome.OK, message=SECRET))


GARBAGE: tuple[tuple[str, DecodeProblem, Garbage], ...] = (
    ("random bytes", DecodeProblem.BAD_MAGIC, lambda _: b"\x93" + random.Random(1).randbytes(300)),
    ("text", DecodeProblem.BAD_MAGIC, lambda _: SECRET.encode()),
    ("an empty value", DecodeProblem.EMPTY, lambda _: b""),
    ("no value", DecodeProblem.EMPTY, lambda _: None),
    ("half a frame", DecodeProblem.TRUNCATED_BODY, lambda _: b"\0\0\0"),
    ("a truncated record", DecodeProblem.TRUNCATED_BODY, lambda pipeline: encoded(pipeline)[:-9]),
    ("a frame without a body", DecodeProblem.TRUNCATED_BODY, lambda pipeline: encoded(pipeline)[:5]),
    ("trailing bytes", DecodeProblem.TRAILING_BYTES, lambda pipeline: encoded(pipeline) + SECRET.encode()),
    ("an unknown schema id", DecodeProblem.UNKNOWN_SCHEMA_ID, lambda pipeline: b"\0\0\x01\0\0" + encoded(pipeline)[5:]),
    ("a record of another type", DecodeProblem.UNEXPECTED_TYPE, reply_record),
    (
        "text that is no UTF-8",
        DecodeProblem.INVALID_BODY,
        lambda pipeline: encoded(pipeline).replace(SECRET.encode(), b"\xff" * len(SECRET)),
    ),
)


Change = Callable[[Pipeline], InferenceRequest]


def changed(**fields: Any) -> Change:
    return lambda pipeline: pipeline.request(**fields)


def parameters(**fields: Any) -> Change:
    return lambda pipeline: pipeline.request(parameters=replace(Parameters(max_tokens=4), **fields))


def given(task: str, **fields: Any) -> Change:
    return lambda pipeline: pipeline.request(task, input=RequestInput(**fields))


INVALID = Code.INVALID
FORBIDDEN = Code.FORBIDDEN
WRONG: tuple[tuple[str, str, str, Change], ...] = (
    ("a record that names another tenant", FORBIDDEN, "tenant", lambda p: p.request(tenant=p.tenant("b"))),
    ("a reply to another tenant", FORBIDDEN, "reply_to", lambda p: p.request(reply_to=f"replies.{p.tenant('b')}")),
    (
        "a reply to a tenant whose name begins alike",
        FORBIDDEN,
        "reply_to",
        lambda p: p.request(reply_to=f"replies.{p.tenant('a')}2"),
    ),
    ("a reply to a control topic", FORBIDDEN, "reply_to", changed(reply_to="control.tenants")),
    ("a reply to nowhere", FORBIDDEN, "reply_to", changed(reply_to="")),
    (
        "a reply to a service that is not registered",
        FORBIDDEN,
        "reply_to",
        lambda p: p.request(reply_to=f"replies.{p.tenant('a')}.billing"),
    ),
    ("an unknown model", Code.UNKNOWN_MODEL, "model", changed(model="gpt-17")),
    ("a task the model does not do", INVALID, "task", lambda p: replace(p.request(), task="embed")),
    ("an unknown task", INVALID, "task", lambda p: replace(p.request(), task="translate")),
    ("an unknown priority", INVALID, "priority", changed(priority="urgent")),
    ("no input to generate", INVALID, "input", given(Task.GENERATE)),
    ("an empty prompt", INVALID, "input.prompt", given(Task.GENERATE, prompt="")),
    ("no messages", INVALID, "input.messages", given(Task.GENERATE, messages=())),
    ("an empty message", INVALID, "input.messages", given(Task.GENERATE, messages=(ChatMessage("user", ""),))),
    ("no input to embed", INVALID, "input", given(Task.EMBED)),
    ("no texts", INVALID, "input.texts", given(Task.EMBED, texts=())),
    ("an empty text", INVALID, "input.texts[1]", given(Task.EMBED, texts=("one", ""))),
    ("no input to rank", INVALID, "input", given(Task.RANK)),
    ("no query", INVALID, "input.query", given(Task.RANK, query="", documents=("one",))),
    ("no documents", INVALID, "input.documents", given(Task.RANK, query="which?", documents=())),
    ("no input to classify", INVALID, "input", given(Task.CLASSIFY)),
    ("an empty image", INVALID, "input.image", given(Task.CLASSIFY, image=b"")),
    ("input for another task", INVALID, "input", given(Task.GENERATE, texts=("one",))),
    ("a text of 2 MB", INVALID, "input", given(Task.GENERATE, prompt=SECRET * (2 * 2**20 // len(SECRET)))),
    ("an image of 2 MB", INVALID, "input", given(Task.CLASSIFY, image=bytes(2 * 2**20))),
    ("too many texts", INVALID, "input.texts", given(Task.EMBED, texts=("one",) * 513)),
    ("negative max_tokens", INVALID, "parameters.max_tokens", parameters(max_tokens=-1)),
    ("max_tokens beyond the model", INVALID, "parameters.max_tokens", parameters(max_tokens=513)),
    ("a temperature that is not a number", INVALID, "parameters.temperature", parameters(temperature=float("nan"))),
    ("an infinite temperature", INVALID, "parameters.temperature", parameters(temperature=float("inf"))),
    ("a negative temperature", INVALID, "parameters.temperature", parameters(temperature=-0.1)),
    ("a top_p of 0", INVALID, "parameters.top_p", parameters(top_p=0.0)),
    ("a top_p that is not a number", INVALID, "parameters.top_p", parameters(top_p=float("nan"))),
    ("an empty stop string", INVALID, "parameters.stop[0]", parameters(stop=("",))),
    ("a negative seed", INVALID, "parameters.seed", parameters(seed=-1)),
    ("too many alternatives", INVALID, "parameters.logprobs", parameters(logprobs=21)),
    ("a replay of what is no id", INVALID, "replay_of", changed(replay_of="order-7")),
    ("a timeout of 0", INVALID, "timeout_ms", changed(timeout_ms=0)),
    ("a negative timeout", INVALID, "timeout_ms", changed(timeout_ms=-5)),
    ("a timeout of a year", INVALID, "timeout_ms", changed(timeout_ms=_YEAR_MS)),
    ("metadata of 9 kB", INVALID, "metadata", changed(metadata={"note": "x" * 9_000})),
    ("a retrieval of nothing", INVALID, "retrieval.top_k", changed(retrieval=Retrieval("manuals", 0))),
    ("an empty conversation id", INVALID, "conversation_id", changed(conversation_id="")),
)

BAD_IDS: tuple[tuple[str, str], ...] = (
    ("an empty id", ""),
    ("an id that is no UUID", "42"),
    ("an id of 5,000 characters", "x" * 5_000),
    ("an id with a line break", "6f9619ff-8b86-d011-b42d-00c04fc964ff\n"),
)

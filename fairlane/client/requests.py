"""Builds requests and checks them before they are sent. The dispatcher remains the authority."""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final, Required, TypedDict, Unpack

from fairlane.clock import now_ms
from fairlane.names import may_carry_replies_of
from fairlane.outcomes import CacheMode, Priority, Task
from fairlane.records import InferenceRequest, Message, Parameters, RequestInput, Retrieval

_TASKS: Final = frozenset(task.value for task in Task)
_PRIORITIES: Final = frozenset(priority.value for priority in Priority)
_CACHE_MODES: Final = frozenset(mode.value for mode in CacheMode)
_MOST_ID_CHARS: Final = 128
_ROLES: Final = frozenset({"system", "user", "assistant"})
_INPUTS_OF_TASK: Final[Mapping[str, tuple[str, ...]]] = {
    Task.GENERATE: ("messages", "prompt"),
    Task.EMBED: ("texts",),
    Task.RANK: ("query", "documents"),
    Task.CLASSIFY: ("image",),
}
_INPUTS: Final = tuple(entry.name for entry in fields(RequestInput))
_PARAMETERS: Final = tuple(entry.name for entry in fields(Parameters))
_UUID: Final = re.compile(r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}")
_LARGEST_INT: Final = 2**63 - 1
_MOST_LOGPROBS: Final = 20

ChatTurn = Message | Mapping[str, str]
"""A message, or a mapping with ``role`` and ``content``."""


class RequestFields(TypedDict, total=False):
    """Fields of ``submit``, by keyword. Only ``model`` and the input of the task are required.

    Fields:
        model: the name of the model, as in models.yaml.
        task: generate (default), embed, rank or classify.
        messages: generate: the chat, as :class:`Message` or ``{"role": ..., "content": ...}``.
        prompt: generate, instead of ``messages``: plain text to go on with.
        texts: embed: the texts, one vector each.
        query: rank: what the documents are ranked against.
        documents: rank: the documents, one score each, in this order.
        image: classify: a PNG, JPEG or WebP file, or raw 8-bit grey pixels of the model's size, row by row.
        max_tokens: generate: most tokens of the answer.
        temperature: generate: 0 (default) is greedy.
        top_p: generate: nucleus sampling, above 0 and at most 1.
        stop: generate: text, or several, at which the answer ends.
        seed: generate: makes sampling repeatable.
        stream: generate: send the text as it comes to the tenant's chunk topic too. ``client.stream`` sets it.
        logprobs: generate: log probabilities of the answer's tokens, with this many alternatives each, at most 20.
        priority: high, normal (default) or low.
        timeout_ms: the deadline, in milliseconds from the broker's receipt; none: the service's own.
        reply_to: another of the tenant's reply topics; then the handle reports the publication only.
        retrieval: where to look for context first.
        group: one of the tenant's own groups, which share its weight.
        conversation_id: generate: names the conversation that this goes on with; the input is what is new alone.
        conversation_after: with it, the request id of the turn that was seen last: the answer knows it.
        cache: which answers given before may be given again: none, exact or semantic. Default: the tenant's own.
        metadata: strings that come back nowhere but in the records.
        request_id: a UUID; the same id runs once, however often it is published. Default: a new one.
    """

    model: Required[str]
    task: str
    messages: Iterable[ChatTurn] | None
    prompt: str | None
    texts: Sequence[str] | None
    query: str | None
    documents: Sequence[str] | None
    image: bytes | None
    max_tokens: int | None
    temperature: float
    top_p: float
    stop: str | Sequence[str]
    seed: int | None
    stream: bool
    logprobs: int | None
    priority: str
    timeout_ms: int | None
    reply_to: str | None
    retrieval: Retrieval | None
    group: str | None
    conversation_id: str | None
    conversation_after: str | None
    cache: str | None
    metadata: Mapping[str, str] | None
    request_id: str | None


def new_request_id() -> str:
    """A UUID that sorts by time (RFC 9562, version 7)."""
    random = int.from_bytes(os.urandom(10), "big")
    value = (now_ms() & (1 << 48) - 1) << 80 | 7 << 76 | (random >> 62 & 0xFFF) << 64 | 2 << 62 | random & (1 << 62) - 1
    digits = f"{value:032x}"
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def build_request(**given: Unpack[RequestFields]) -> InferenceRequest:
    """The request these fields make; see :class:`RequestFields`. Not checked yet.

    Raises:
        ValueError: a field has a form no record can hold; the message begins with its name.
        TypeError: there is no such field, or ``model`` is missing.
    """
    values: dict[str, Any] = {"task": Task.GENERATE.value, "stop": (), **given}
    if unknown := values.keys() - RequestFields.__annotations__.keys():
        raise TypeError(f"a request has no field {', '.join(sorted(unknown))}")
    if values.get("messages") is not None:
        values["messages"] = tuple([_message(turn) for turn in values["messages"]])
    for name in ("texts", "documents"):
        if isinstance(values.get(name), str):
            raise ValueError(f"{name}: a single text; give a list of texts")  # noqa: TRY004 - every mistake is a ValueError
        values[name] = None if values.get(name) is None else tuple(values[name])
    values["stop"] = (values["stop"],) if isinstance(values["stop"], str) else tuple(values["stop"])
    values["metadata"] = dict(values.get("metadata") or {})
    if values.get("request_id") is None:
        values["request_id"] = new_request_id()
    task_input, parameters = (
        {name: values.pop(name) for name in names if name in values} for names in (_INPUTS, _PARAMETERS)
    )
    return InferenceRequest(input=RequestInput(**task_input), parameters=Parameters(**parameters), **values)


def streamed(request: InferenceRequest, reply_topic: str) -> InferenceRequest:
    """The request, asking for its text as it comes, for a client that reads this reply topic.

    Raises:
        ValueError: it has no text that could come, or its reply, with which every stream ends, would go elsewhere.
    """
    if request.task != Task.GENERATE:
        raise ValueError(f"task: {request.task!r} does not stream, only {Task.GENERATE} does")
    if request.reply_to not in (None, reply_topic):
        raise ValueError(f"reply_to: a stream ends with its reply, which must go to {reply_topic}")
    return replace(request, parameters=replace(request.parameters, stream=True))


def check_request(request: InferenceRequest, tenant: str) -> None:
    """Find the obvious mistakes of a request that this tenant is about to publish.

    Raises:
        ValueError: the message begins with the field that is wrong. It shows no text of the input.
    """
    if _UUID.fullmatch(request.request_id) is None:
        raise ValueError("request_id: not a UUID")
    if not request.model:
        raise ValueError("model: empty")
    if request.task not in _TASKS:
        raise ValueError(f"task: {request.task!r} is none of {_listed(_TASKS)}")
    if request.priority not in _PRIORITIES:
        raise ValueError(f"priority: {request.priority!r} is none of {_listed(_PRIORITIES)}")
    _check_input(request.task, request.input)
    _check_parameters(request.parameters)
    _check_context(request)
    _check_whole("timeout_ms", request.timeout_ms, least=1)
    if request.tenant is not None and request.tenant != tenant:
        raise ValueError(f"tenant: {request.tenant!r}, but this client publishes as {tenant!r}")
    if request.reply_to is not None and not may_carry_replies_of(request.reply_to, tenant):
        raise ValueError(f"reply_to: {request.reply_to!r} is no reply topic of {tenant!r}")
    if not all(isinstance(text, str) for pair in request.metadata.items() for text in pair):
        raise ValueError("metadata: keys and values must be strings")


def _check_input(task: str, given: RequestInput) -> None:
    expected = _INPUTS_OF_TASK[task]
    for name in _INPUTS:
        if getattr(given, name) is not None and name not in expected:
            raise ValueError(f"{name}: no input of task {task}, which takes {' or '.join(expected)}")
    if task == Task.GENERATE:
        if (given.messages is None) == (given.prompt is None):
            raise ValueError("messages: give either messages or prompt")
        expected = ("prompt",) if given.messages is None else ("messages",)
    for name in expected:
        if not getattr(given, name):
            raise ValueError(f"{name}: missing or empty, and task {task} needs it")
    for turn in given.messages or ():
        if turn.role not in _ROLES:
            raise ValueError(f"messages: role {turn.role!r} is none of {_listed(_ROLES)}")


def _check_context(request: InferenceRequest) -> None:
    if request.cache is not None and request.cache not in _CACHE_MODES:
        raise ValueError(f"cache: {request.cache!r} is none of {_listed(_CACHE_MODES)}")
    if request.conversation_id is not None:
        if request.task != Task.GENERATE:
            raise ValueError(f"conversation_id: is for task {Task.GENERATE} alone")
        if not 1 <= len(request.conversation_id) <= _MOST_ID_CHARS:
            raise ValueError(f"conversation_id: must have from 1 to {_MOST_ID_CHARS} characters")
    if request.conversation_after is not None:
        if request.conversation_id is None:
            raise ValueError("conversation_after: needs a conversation_id")
        if _UUID.fullmatch(request.conversation_after) is None:
            raise ValueError("conversation_after: not the id of a request")


def _check_parameters(parameters: Parameters) -> None:
    _check_whole("max_tokens", parameters.max_tokens, least=1)
    _check_whole("logprobs", parameters.logprobs, least=0, most=_MOST_LOGPROBS)
    _check_whole("seed", parameters.seed, least=-_LARGEST_INT - 1)
    if not (math.isfinite(parameters.temperature) and parameters.temperature >= 0):
        raise ValueError(f"temperature: {parameters.temperature} is not 0 or more")
    if not 0 < parameters.top_p <= 1:
        raise ValueError(f"top_p: {parameters.top_p} is not above 0 and at most 1")
    if not all(parameters.stop):
        raise ValueError("stop: holds an empty text")


def _check_whole(name: str, value: int | None, least: int, most: int = _LARGEST_INT) -> None:
    if value is None:
        return
    if type(value) is not int:
        raise ValueError(f"{name}: not a whole number")
    if not least <= value <= most:
        raise ValueError(f"{name}: {value} is not between {least} and {most}")


def _message(turn: ChatTurn) -> Message:
    if isinstance(turn, Message):
        return turn
    if set(turn) != {"role", "content"}:
        raise ValueError(f"messages: a message has role and content, not {_listed(turn)}")
    return Message(role=turn["role"], content=turn["content"])


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))

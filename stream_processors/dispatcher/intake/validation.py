"""Validation of decoded requests, cancels and feedback against tenant, models and limits. Pure."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fairlane.feedback import fault_of
from fairlane.frozen import frozen_dataclass
from fairlane.names import SHARED_REPLIES, is_name, is_replies_of, is_request_id, replies_topic
from fairlane.outcomes import DEFAULT_TIMEOUT_MS, CacheMode, Code, Priority, RetrievalMode, Task
from fairlane.record_bounds import (
    MAX_METADATA_BYTES,
    MAX_REQUEST_HEADER_BYTES,
    MAX_REQUEST_HEADERS,
    MAX_REQUESTED_BY_CHARS,
    MAX_STOP_STRINGS,
)
from fairlane.records import (
    CancelRequest,
    Feedback,
    InferenceRequest,
    ModelVersion,
    Parameters,
    RequestInput,
    TenantSpec,
)
from fairlane_server.image_header import image_header, image_tokens
from fairlane_server.models.catalog import ModelCatalog, NoVersion, Served, nothing_known
from fairlane_server.models.routes import model_of
from stream_processors.dispatcher.scheduling.cost import BYTES_PER_TOKEN

DEFAULT_BACKFILL_TIMEOUT_MS = 86_400_000

MAX_ID_CHARS = 128
_ROLES = frozenset({"system", "user", "assistant"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,63}")
_MAX_STOP_CHARS = 256
_MAX_TEMPERATURE = 2.0
_MAX_TOP_K = 64
_MAX_SEED = 2**63 - 1
_MAX_LOGPROBS = 20
_LOADING_RETRY_MS = 5_000
"""Until another look is worth it whether a consumer has loaded a version."""

_FIELDS_OF_TASK: Mapping[str, tuple[tuple[str, ...], ...]] = {
    Task.GENERATE: (("messages",), ("prompt",)),
    Task.EMBED: (("texts",),),
    Task.RANK: (("query", "documents"),),
    Task.CLASSIFY: (("image",),),
}
_TASKS = frozenset(Task)
_PRIORITIES = frozenset(Priority)
_RETRIEVAL_MODES = frozenset(RetrievalMode)
_CACHE_MODES = frozenset(CacheMode)
_INPUT_FIELDS = ("messages", "prompt", "texts", "query", "documents", "image")


@frozen_dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds on every request, from the settings."""

    max_input_bytes: int
    max_input_items: int
    max_timeout_ms: int
    max_output_tokens: int


@frozen_dataclass(frozen=True, slots=True)
class Rejection:
    """Reason of a rejection, for the tenant: code, field at fault, message; when to try again, if that may help."""

    code: Code
    field: str
    message: str
    retry_after_ms: int | None = None


@frozen_dataclass(frozen=True, slots=True)
class ValidRequest:
    """Result for a valid request: its model version, the arm that this was chosen by, its reply topic, its timeout, and
    the input size by ``charged_bytes``."""

    model: ModelVersion
    arm: str
    reply_topic: str
    timeout_ms: int
    input_bytes: int


def validate(
    request: InferenceRequest,
    tenant: str,
    spec: TenantSpec | None,
    models: ModelCatalog,
    limits: RequestLimits,
    *,
    now_ms: int,
    backfill: bool,
    served: Served = nothing_known,
) -> ValidRequest | Rejection:
    """Check one request of ``tenant``, the tenant of its topic.

    The tenant's ``max_prompt_tokens`` is not checked here: bytes do not determine tokens, and the consumer counts them
    with the model's tokenizer.
    """
    refusal = _identity(request, tenant, spec)
    if refusal is not None:
        return refusal
    if spec is None:
        return Rejection(Code.FORBIDDEN, "tenant", f"{tenant} is not registered")
    # Before anything is said of what there is: a tenant learns nothing of models that it may not use.
    if spec.models and model_of(request.model) not in spec.models:
        return Rejection(Code.FORBIDDEN, "model", f"{tenant} may not use {_shown(request.model)}")
    choice = models.choose(request, tenant, now_ms, served)
    if isinstance(choice, NoVersion) and choice.may_come and backfill:
        choice = models.choose(request, tenant, now_ms)
    if isinstance(choice, NoVersion):
        return refusal_of(choice)
    model = choice.model
    refusal = _routing(request, spec, model, limits)
    if refusal is not None:
        return refusal
    input_bytes = size_of_input(request.input)
    refusal = next(_input(request, limits, input_bytes), None) or next(
        _parameters(request.parameters, model, limits), None
    )
    if refusal is not None:
        return refusal
    timeout_ms = request.timeout_ms
    if timeout_ms is None:
        default_ms = DEFAULT_BACKFILL_TIMEOUT_MS if backfill else DEFAULT_TIMEOUT_MS[request.priority]
        timeout_ms = min(default_ms, limits.max_timeout_ms)
    charged = charged_bytes(request.input)
    return ValidRequest(model, choice.arm, request.reply_to or replies_topic(tenant), timeout_ms, charged)


def refusal_of(why: NoVersion) -> Rejection:
    """The refusal of a request that gets no version of its model."""
    if why.may_come:
        return Rejection(Code.OVERLOADED, "model", why.reason, _LOADING_RETRY_MS)
    return Rejection(Code.UNKNOWN_MODEL, "model", why.reason)


def validate_cancel(cancel: CancelRequest, tenant: str) -> Rejection | None:
    """The reason to refuse a cancel on a topic of ``tenant``; None if valid."""
    if not is_request_id(cancel.request_id):
        return _invalid("request_id", "must be a UUID")
    return _disagreement(cancel.tenant, tenant)


def validate_feedback(feedback: Feedback, tenant: str) -> Rejection | None:
    """The reason to refuse feedback on a topic of ``tenant``; None if valid. Whether the request exists is known to the
    recorder alone."""
    fault = fault_of(feedback)
    return _disagreement(feedback.tenant, tenant) if fault is None else _invalid(*fault)


def validate_headers(headers: Sequence[tuple[str, bytes]]) -> Rejection | None:
    """The refusal of a record with too many or too large headers; None if valid."""
    if not headers:
        return None
    if len(headers) > MAX_REQUEST_HEADERS:
        return _invalid("headers", f"{len(headers)} headers are more than {MAX_REQUEST_HEADERS}")
    size_bytes = sum([len(name) + len(value or b"") for name, value in headers])
    if size_bytes > MAX_REQUEST_HEADER_BYTES:
        return _invalid("headers", f"{size_bytes} bytes are more than {MAX_REQUEST_HEADER_BYTES}")
    return None


def within_tenant_bound(request: InferenceRequest, model: ModelVersion, spec: TenantSpec | None) -> InferenceRequest:
    """The request with ``max_tokens`` lowered to its tenant's bound; the same object if already within it.

    It is not rejected: the bound is meant to shorten answers, and ``finish_reason`` reports a cut. A request without
    ``max_tokens`` asks for the model's maximum.
    """
    most = None if spec is None else spec.max_completion_tokens
    if most is None or request.task != Task.GENERATE:
        return request
    asked = request.parameters.max_tokens
    allowed = min(most, asked or model.max_output_tokens or most)
    if allowed == asked:
        return request
    return replace(request, parameters=replace(request.parameters, max_tokens=allowed))


def cache_mode(request: InferenceRequest, spec: TenantSpec | None) -> str:
    """The cache mode of a valid request: its own, else its tenant's."""
    mode = request.cache or (CacheMode.NONE if spec is None else spec.cache)
    return mode if mode in _CACHE_MODES else CacheMode.NONE


def reply_topic_for_refusal(request: InferenceRequest, tenant: str, spec: TenantSpec | None) -> str:
    """The reply topic of a rejection: ``reply_to`` if the tenant may use it, else the tenant's own."""
    asked = request.reply_to
    # A shared topic is allowed for every tenant, so that a waiting call learns that its tenant is not registered.
    if asked is not None and (asked in SHARED_REPLIES or (spec is not None and _may_reply_to(asked, spec))):
        return asked
    return replies_topic(tenant)


def size_of_input(content: RequestInput) -> int:
    """Bytes of text and image in the input."""
    size = 0
    for message in content.messages or ():
        size += len(message.role) + _utf8_bytes(message.content)
    for text in (content.prompt, content.query, *(content.texts or ()), *(content.documents or ())):
        if text is not None:
            size += _utf8_bytes(text)
    return size + len(content.image or b"")


def charged_bytes(content: RequestInput) -> int:
    """Input size in bytes for cost estimation. An image counts by its pixels, as an equivalent number of text bytes,
    since a small file can contain very many pixels."""
    image = content.image or b""
    if not image:
        return size_of_input(content)
    return size_of_input(content) - len(image) + BYTES_PER_TOKEN * image_tokens(image)


def _utf8_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _shown(value: str) -> str:
    """The value quoted if it has the form of a name, else its length: it may be prompt text in the wrong field, and
    audit events never contain request text."""
    return repr(value) if _NAME.fullmatch(value) else f"({len(value)} characters)"


def name_or_none(value: str) -> str | None:
    """The value if it has the form of a name, as ``_shown``."""
    return value if _NAME.fullmatch(value) else None


def _invalid(field: str, message: str) -> Rejection:
    return Rejection(Code.INVALID, field, message)


def _identity(request: InferenceRequest, tenant: str, spec: TenantSpec | None) -> Rejection | None:
    if not is_request_id(request.request_id):
        return _invalid("request_id", "must be a UUID")
    if request.replay_of is not None and not is_request_id(request.replay_of):
        return _invalid("replay_of", "must be a UUID")
    disagreement = _disagreement(request.tenant, tenant)
    if disagreement is not None:
        return disagreement
    if request.reply_to is not None and spec is not None and not _may_reply_to(request.reply_to, spec):
        return Rejection(Code.FORBIDDEN, "reply_to", f"{_shown(request.reply_to)} is no reply topic of {tenant}")
    return None


def _disagreement(named: str | None, tenant: str) -> Rejection | None:
    """The refusal if a record names a tenant other than that of its topic."""
    if named is None or named == tenant:
        return None
    return Rejection(Code.FORBIDDEN, "tenant", f"this topic belongs to {tenant}, the record names another tenant")


def _may_reply_to(topic: str, spec: TenantSpec) -> bool:
    own = replies_topic(spec.tenant)
    return topic in (own, *SHARED_REPLIES) or (
        is_replies_of(topic, spec.tenant) and topic[len(own) + 1 :] in spec.services
    )


def _routing(
    request: InferenceRequest, spec: TenantSpec, model: ModelVersion, limits: RequestLimits
) -> Rejection | None:
    if request.task not in _TASKS:
        return _invalid("task", f"{_shown(request.task)} is none of {', '.join(Task)}")
    if request.task not in model.tasks:
        return _invalid("task", f"{model.model} does not {request.task}, only {', '.join(model.tasks)}")
    if request.priority not in _PRIORITIES:
        return _invalid("priority", f"{_shown(request.priority)} is none of {', '.join(Priority)}")
    if request.priority not in spec.classes:
        return Rejection(Code.FORBIDDEN, "priority", f"{spec.tenant} may not use the class {request.priority}")
    if request.group is not None and all(request.group != group.group for group in spec.groups):
        return _invalid("group", f"{spec.tenant} has no group {_shown(request.group)}")
    if request.timeout_ms is not None and not 1 <= request.timeout_ms <= limits.max_timeout_ms:
        return _invalid("timeout_ms", f"must be from 1 to {limits.max_timeout_ms}, not {request.timeout_ms}")
    if request.requested_by is not None and not 1 <= len(request.requested_by) <= MAX_REQUESTED_BY_CHARS:
        return _invalid("requested_by", f"must have from 1 to {MAX_REQUESTED_BY_CHARS} characters")
    metadata_bytes = sum(_utf8_bytes(key) + _utf8_bytes(value) for key, value in request.metadata.items())
    if metadata_bytes > MAX_METADATA_BYTES:
        return _invalid("metadata", f"{metadata_bytes} bytes are more than {MAX_METADATA_BYTES}")
    return _context(request)


def _context(request: InferenceRequest) -> Rejection | None:
    """Check cache mode, conversation and retrieval."""
    if request.cache is not None and request.cache not in _CACHE_MODES:
        return _invalid("cache", f"{_shown(request.cache)} is none of {', '.join(CacheMode)}")
    if request.task != Task.GENERATE:
        for name in ("retrieval", "conversation_id"):
            if getattr(request, name) is not None:
                return _invalid(name, f"is for {Task.GENERATE} alone, not for {request.task}")
    if request.conversation_id is not None and not 1 <= len(request.conversation_id) <= MAX_ID_CHARS:
        return _invalid("conversation_id", f"must have from 1 to {MAX_ID_CHARS} characters")
    if request.conversation_after is not None:
        if request.conversation_id is None:
            return _invalid("conversation_after", "needs a conversation_id")
        if not is_request_id(request.conversation_after):
            return _invalid("conversation_after", "must be the id of a request")
    if request.retrieval is not None:
        if not is_name(request.retrieval.collection):
            # Not quoted, and not in an audit event either: it may be text.
            return _invalid("retrieval.collection", "no collection can have this name")
        if not 1 <= request.retrieval.top_k <= _MAX_TOP_K:
            return _invalid("retrieval.top_k", f"must be from 1 to {_MAX_TOP_K}, not {request.retrieval.top_k}")
        if request.retrieval.mode not in _RETRIEVAL_MODES:
            modes = ", ".join(RetrievalMode)
            return _invalid("retrieval.mode", f"{_shown(request.retrieval.mode)} is none of {modes}")
    return None


def _input(request: InferenceRequest, limits: RequestLimits, input_bytes: int) -> Iterator[Rejection]:
    content = request.input
    if input_bytes > limits.max_input_bytes:
        yield _invalid("input", f"{input_bytes} bytes are more than {limits.max_input_bytes}")
    given = tuple(name for name in _INPUT_FIELDS if getattr(content, name) is not None)
    choices = _FIELDS_OF_TASK[request.task]
    if given not in choices:
        wanted = " or ".join(" and ".join(choice) for choice in choices)
        yield _invalid("input", f"{request.task} takes {wanted}, not {' and '.join(given) or 'an empty input'}")
    for name in given:
        value = getattr(content, name)
        if not value:
            yield _invalid(f"input.{name}", "must not be empty")
        if isinstance(value, tuple):
            if len(value) > limits.max_input_items:
                yield _invalid(f"input.{name}", f"{len(value)} items are more than {limits.max_input_items}")
            for index, item in enumerate(value):
                if isinstance(item, str) and not item:
                    yield _invalid(f"input.{name}[{index}]", "must not be empty")
    for index, message in enumerate(content.messages or ()):
        if message.role not in _ROLES:
            # Never quoted, even if it looks like a name: a client that swaps role and content puts its text here.
            yield _invalid(f"input.messages[{index}].role", "must be system, user or assistant")
    header = image_header(content.image or b"")
    if header is not None and header.refusal is not None:
        yield _invalid("input.image", header.refusal)
    if content.messages and not any(message.content for message in content.messages):
        yield _invalid("input.messages", "all messages are empty")


def _parameters(parameters: Parameters, model: ModelVersion, limits: RequestLimits) -> Iterator[Rejection]:
    most = min(limits.max_output_tokens, model.max_output_tokens) or limits.max_output_tokens
    if parameters.max_tokens is not None and not 1 <= parameters.max_tokens <= most:
        yield _invalid("parameters.max_tokens", f"must be from 1 to {most}, not {parameters.max_tokens}")
    temperature = parameters.temperature
    if not (math.isfinite(temperature) and 0 <= temperature <= _MAX_TEMPERATURE):
        yield _invalid("parameters.temperature", f"must be from 0 to {_MAX_TEMPERATURE:g}, not {temperature}")
    if not (math.isfinite(parameters.top_p) and 0 < parameters.top_p <= 1):
        yield _invalid("parameters.top_p", f"must be above 0 and at most 1, not {parameters.top_p}")
    if len(parameters.stop) > MAX_STOP_STRINGS:
        yield _invalid("parameters.stop", f"{len(parameters.stop)} strings are more than {MAX_STOP_STRINGS}")
    for index, stop in enumerate(parameters.stop):
        if not 1 <= len(stop) <= _MAX_STOP_CHARS:
            yield _invalid(f"parameters.stop[{index}]", f"must have from 1 to {_MAX_STOP_CHARS} characters")
    if parameters.seed is not None and not 0 <= parameters.seed <= _MAX_SEED:
        yield _invalid("parameters.seed", "must not be negative")
    if parameters.logprobs is not None and not 0 <= parameters.logprobs <= _MAX_LOGPROBS:
        yield _invalid("parameters.logprobs", f"must be from 0 to {_MAX_LOGPROBS}, not {parameters.logprobs}")

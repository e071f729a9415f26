"""Validation of requests: every refusal names the field at fault, nothing is let through that breaks a limit."""

import math
import re
from dataclasses import replace
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fairlane.names import GATEWAY_REPLIES, JOBS_REPLIES
from fairlane.outcomes import DEFAULT_TIMEOUT_MS, Code
from fairlane.records import (
    InferenceRequest,
    Message,
    ModelVersion,
    Parameters,
    RequestInput,
    Retrieval,
    TenantGroup,
    TenantSpec,
)
from fairlane_server.models.catalog import catalog_of
from stream_processors.dispatcher.intake.validation import (
    DEFAULT_BACKFILL_TIMEOUT_MS,
    Rejection,
    RequestLimits,
    ValidRequest,
    charged_bytes,
    reply_topic_for_refusal,
    size_of_input,
    validate,
)

LIMITS = RequestLimits(max_input_bytes=1_048_576, max_input_items=8, max_timeout_ms=86_400_000, max_output_tokens=512)
SPEC = TenantSpec(
    "acme",
    classes=("high", "normal"),
    models=("chat", "embed"),
    services=("search",),
    groups=(TenantGroup("search"), TenantGroup("images", parent="search")),
)
YEAR_MS = 365 * 86_400_000


def model(name: str, *tasks: str, max_output_tokens: int = 0) -> ModelVersion:
    return ModelVersion(name, "1", "gpu", "causal-lm", tasks, name, 2_048, max_output_tokens)


MODELS = catalog_of(
    model("chat", "generate", max_output_tokens=256),
    model("embed", "embed", "rank"),
    model("digits", "classify"),
)


def request(**changes: Any) -> InferenceRequest:
    """A good request of acme's, with these fields changed; names that are fields of the parameters change those."""
    plain = InferenceRequest(str(uuid4()), "chat", "generate", RequestInput(prompt="What is a tram?"))
    parameters = {name: changes.pop(name) for name in tuple(changes) if name in Parameters.__slots__}
    return replace(plain, parameters=replace(plain.parameters, **parameters), **changes)


def check(
    asked: InferenceRequest, *, spec: TenantSpec | None = SPEC, backfill: bool = False
) -> ValidRequest | Rejection:
    return validate(asked, "acme", spec, MODELS, LIMITS, now_ms=0, backfill=backfill)


def embed(**content: Any) -> InferenceRequest:
    return request(model="embed", task="embed", input=RequestInput(**content))


def rank(**content: Any) -> InferenceRequest:
    return request(model="embed", task="rank", input=RequestInput(**content))


def chat(*messages: Message) -> InferenceRequest:
    return request(input=RequestInput(messages=messages))


INVALID: dict[str, tuple[InferenceRequest, str]] = {
    "no id": (request(request_id=""), "request_id"),
    "an id that is no UUID": (request(request_id="order-7"), "request_id"),
    "an id with more behind it": (request(request_id=f"{uuid4()}\n"), "request_id"),
    "an unknown task": (request(task="paint"), "task"),
    "a task of 10,000 letters": (request(task="p" * 10_000), "task"),
    "a task that the model does not do": (request(task="embed", input=RequestInput(texts=("a",))), "task"),
    "an unknown priority": (request(priority="urgent"), "priority"),
    "a timeout of zero": (request(timeout_ms=0), "timeout_ms"),
    "a negative timeout": (request(timeout_ms=-1), "timeout_ms"),
    "a timeout of a year": (request(timeout_ms=YEAR_MS), "timeout_ms"),
    "an empty conversation": (request(conversation_id=""), "conversation_id"),
    "a long conversation id": (request(conversation_id="c" * 129), "conversation_id"),
    "too much metadata": (request(metadata={"note": "é" * 4_096}), "metadata"),
    "retrieval from nowhere": (request(retrieval=Retrieval("")), "retrieval.collection"),
    "no passage": (request(retrieval=Retrieval("docs", 0)), "retrieval.top_k"),
    "too many passages": (request(retrieval=Retrieval("docs", 65)), "retrieval.top_k"),
    "retrieval for vectors": (
        request(task="embed", model="embed", input=RequestInput(texts=("one",)), retrieval=Retrieval("docs")),
        "retrieval",
    ),
    "an unknown cache": (request(cache="all"), "cache"),
    "no cache's name": (request(cache=""), "cache"),
    "a conversation of vectors": (
        request(task="embed", model="embed", input=RequestInput(texts=("one",)), conversation_id="c-1"),
        "conversation_id",
    ),
    "after a turn of no conversation": (
        request(conversation_after="00000000-0000-0000-0000-000000000001"),
        "conversation_after",
    ),
    "after what is no turn": (request(conversation_id="c-1", conversation_after="the last"), "conversation_after"),
    "an unknown way to retrieve": (request(retrieval=Retrieval("docs", mode="m" * 10_000)), "retrieval.mode"),
    "no way to retrieve": (request(retrieval=Retrieval("docs", mode="")), "retrieval.mode"),
    "an unknown group": (request(group="mail"), "group"),
    "a group of 10,000 letters": (request(group="g" * 10_000), "group"),
    "a group without a name": (request(group=""), "group"),
    "an empty input": (request(input=RequestInput()), "input"),
    "2 MB of input": (request(input=RequestInput(prompt="x" * 2_000_000)), "input"),
    "2 MB of letters that take two bytes": (request(input=RequestInput(prompt="é" * 600_000)), "input"),
    "input of another task": (request(input=RequestInput(texts=("a",))), "input"),
    "two inputs": (request(input=RequestInput(prompt="a", texts=("b",))), "input"),
    "a query without documents": (rank(query="a"), "input"),
    "documents without a query": (rank(documents=("a",)), "input"),
    "an empty prompt": (request(input=RequestInput(prompt="")), "input.prompt"),
    "no messages": (chat(), "input.messages"),
    "messages of nothing": (chat(Message("user", ""), Message("assistant", "")), "input.messages"),
    "an unknown role": (chat(Message("user", "a"), Message("root", "b")), "input.messages[1].role"),
    "too many messages": (chat(*[Message("user", "a")] * 9), "input.messages"),
    "no texts": (embed(texts=()), "input.texts"),
    "an empty text": (embed(texts=("a", "")), "input.texts[1]"),
    "too many texts": (embed(texts=("a",) * 9), "input.texts"),
    "an empty query": (rank(query="", documents=("a",)), "input.query"),
    "an empty document": (rank(query="a", documents=("",)), "input.documents[0]"),
    "an empty image": (
        request(model="digits", task="classify", input=RequestInput(image=b"")),
        "input.image",
    ),
    "negative max_tokens": (request(max_tokens=-5), "parameters.max_tokens"),
    "max_tokens of zero": (request(max_tokens=0), "parameters.max_tokens"),
    "more max_tokens than the model's": (request(max_tokens=257), "parameters.max_tokens"),
    "a temperature that is no number": (request(temperature=math.nan), "parameters.temperature"),
    "an infinite temperature": (request(temperature=math.inf), "parameters.temperature"),
    "a negative temperature": (request(temperature=-0.1), "parameters.temperature"),
    "a high temperature": (request(temperature=2.1), "parameters.temperature"),
    "a top_p of zero": (request(top_p=0.0), "parameters.top_p"),
    "a top_p above one": (request(top_p=1.01), "parameters.top_p"),
    "a top_p that is no number": (request(top_p=math.nan), "parameters.top_p"),
    "too many stops": (request(stop=("a",) * 9), "parameters.stop"),
    "an empty stop": (request(stop=("a", "")), "parameters.stop[1]"),
    "a long stop": (request(stop=("a" * 257,)), "parameters.stop[0]"),
    "a negative seed": (request(seed=-1), "parameters.seed"),
    "a seed of 64 bits": (request(seed=2**63), "parameters.seed"),
    "a negative number of alternatives": (request(logprobs=-1), "parameters.logprobs"),
    "too many alternatives": (request(logprobs=21), "parameters.logprobs"),
    "a replay of what is no id": (request(replay_of="order-7"), "replay_of"),
}


@pytest.mark.parametrize(("asked", "field"), INVALID.values(), ids=INVALID.keys())
def test_what_is_invalid_is_refused_by_field(asked: InferenceRequest, field: str) -> None:
    refusal = check(asked, spec=replace(SPEC, models=()))
    assert isinstance(refusal, Rejection)
    assert (refusal.code, refusal.field) == (Code.INVALID, field)
    assert refusal.message
    assert len(refusal.message) < 300


REFUSED: dict[str, tuple[InferenceRequest, TenantSpec | None, Code, str]] = {
    "another tenant": (request(tenant="zenith"), SPEC, Code.FORBIDDEN, "tenant"),
    "a tenant nobody registered": (request(), None, Code.FORBIDDEN, "tenant"),
    "an unknown model": (request(model="gpt"), replace(SPEC, models=()), Code.UNKNOWN_MODEL, "model"),
    "an unknown version of a model that is not the tenant's": (
        request(model="digits/9"),
        SPEC,
        Code.FORBIDDEN,
        "model",
    ),
    "a model that is not the tenant's": (
        request(model="digits", task="classify", input=RequestInput(image=b"p")),
        SPEC,
        Code.FORBIDDEN,
        "model",
    ),
    "a class that is not the tenant's": (request(priority="low"), SPEC, Code.FORBIDDEN, "priority"),
}


@pytest.mark.parametrize(("asked", "spec", "code", "field"), REFUSED.values(), ids=REFUSED.keys())
def test_what_the_tenant_may_not_do_is_refused(
    asked: InferenceRequest, spec: TenantSpec | None, code: Code, field: str
) -> None:
    refusal = check(asked, spec=spec)
    assert isinstance(refusal, Rejection)
    assert (refusal.code, refusal.field) == (code, field)


@pytest.mark.parametrize(
    "topic",
    [
        "replies.zenith",
        "replies.acme2",
        "replies.acme2.search",
        "replies.evil.search",
        "replies.acme.mail",
        "replies.acme.search.more",
        "replies.acme.",
        "replies.acme.Search",
        "gateway.replies.acme",
        "jobs",
        "requests.acme",
        "ledger.usage",
        "priority.gpu.high",
        "",
    ],
)
def test_a_reply_topic_of_somebody_else_is_refused(topic: str) -> None:
    asked = request(reply_to=topic)
    refusal = check(asked)
    assert isinstance(refusal, Rejection)
    assert (refusal.code, refusal.field) == (Code.FORBIDDEN, "reply_to")
    assert reply_topic_for_refusal(asked, "acme", SPEC) == "replies.acme", "the refusal itself goes to the tenant's own"


@pytest.mark.parametrize("topic", ["replies.acme", "replies.acme.search"])
def test_a_reply_topic_of_ones_own_is_used(topic: str) -> None:
    asked = request(reply_to=topic)
    valid = check(asked)
    assert isinstance(valid, ValidRequest)
    assert valid.reply_topic == topic
    assert reply_topic_for_refusal(asked, "acme", SPEC) == topic
    assert reply_topic_for_refusal(asked, "acme", None) == "replies.acme"


@pytest.mark.parametrize("topic", [GATEWAY_REPLIES, JOBS_REPLIES])
def test_the_shared_reply_topics_are_everybodys(topic: str) -> None:
    asked = request(reply_to=topic)
    valid = check(asked)
    assert isinstance(valid, ValidRequest)
    assert valid.reply_topic == topic
    assert reply_topic_for_refusal(asked, "acme", SPEC) == topic
    assert reply_topic_for_refusal(asked, "acme", None) == topic, "who waits there hears that it is not registered"


GOOD: dict[str, InferenceRequest] = {
    "a prompt": request(),
    "its own tenant's name": request(tenant="acme"),
    "an id without hyphens": request(request_id=uuid4().hex),
    "messages, one of them empty": chat(Message("system", ""), Message("user", "hello"), Message("assistant", "hi")),
    "texts": embed(texts=("a", "b")),
    "a query and documents": rank(query="a", documents=("b",)),
    "every limit reached": request(
        timeout_ms=86_400_000,
        max_tokens=256,
        temperature=2.0,
        top_p=1.0,
        stop=("x" * 256,) * 8,
        seed=2**63 - 1,
        conversation_id="c" * 128,
        retrieval=Retrieval("docs", 64),
        metadata={"k" * 192: "v" * 8_000},
        input=RequestInput(prompt="x" * 1_048_576),
    ),
    "a group": request(group="search"),
    "a group in a group": request(group="images"),
    "an earlier answer": request(cache="exact"),
    "a similar answer": request(cache="semantic"),
    "no earlier answer": request(cache="none"),
    "a turn": request(conversation_id="c-1"),
    "the next turn": request(conversation_id="c-1", conversation_after="00000000-0000-0000-0000-000000000001"),
    "vectors alone": request(retrieval=Retrieval("docs", mode="vector")),
    "what was found before": request(retrieval=Retrieval("docs", mode="cached")),
    "the least of everything": request(timeout_ms=1, max_tokens=1, temperature=0.0, top_p=1e-9, seed=0),
}


@pytest.mark.parametrize("asked", GOOD.values(), ids=GOOD.keys())
def test_good_requests_are_valid(asked: InferenceRequest) -> None:
    valid = check(asked)
    assert isinstance(valid, ValidRequest), valid
    assert valid.model is MODELS.champion(asked.model)
    assert valid.input_bytes == size_of_input(asked.input)


@pytest.mark.parametrize("priority", ["high", "normal"])
def test_a_request_without_a_timeout_gets_that_of_its_class(priority: str) -> None:
    online, offline = check(request(priority=priority)), check(request(priority=priority), backfill=True)
    assert isinstance(online, ValidRequest)
    assert isinstance(offline, ValidRequest)
    assert (online.timeout_ms, offline.timeout_ms) == (DEFAULT_TIMEOUT_MS[priority], DEFAULT_BACKFILL_TIMEOUT_MS)


def test_a_default_timeout_obeys_the_limit_as_well() -> None:
    limits = replace(LIMITS, max_timeout_ms=5_000)
    valid = validate(request(), "acme", SPEC, MODELS, limits, now_ms=0, backfill=True)
    assert isinstance(valid, ValidRequest)
    assert valid.timeout_ms == 5_000


def test_the_size_of_an_input_is_its_bytes() -> None:
    content = RequestInput(
        messages=(Message("user", "é"),), prompt="abc", texts=("a", "ß"), query="q", documents=("€",), image=b"1234"
    )
    assert size_of_input(content) == (4 + 2) + 3 + (1 + 2) + 1 + 3 + 4


TEXT = st.text(max_size=12)
NAMES = st.sampled_from(("chat", "embed", "digits", "acme", "replies.acme", "replies.acme.search", "replies.zenith"))
TEXTS = st.lists(TEXT, max_size=10).map(tuple)
INPUTS = st.builds(
    RequestInput,
    messages=st.none()
    | st.lists(st.builds(Message, TEXT | st.sampled_from(("user", "system")), TEXT), max_size=10).map(tuple),
    prompt=st.none() | TEXT,
    texts=st.none() | TEXTS,
    query=st.none() | TEXT,
    documents=st.none() | TEXTS,
    image=st.none() | st.binary(max_size=8),
)
ONE_INPUT = st.one_of(
    st.builds(RequestInput, prompt=TEXT),
    st.builds(RequestInput, texts=TEXTS),
    st.builds(RequestInput, query=TEXT, documents=TEXTS),
    st.builds(RequestInput, image=st.binary(max_size=8)),
)
NUMBERS = st.integers(-(2**63), 2**63 - 1)
SMALL = st.integers(-2, 600)
GOOD_INPUTS = {
    ("chat", "generate"): RequestInput(prompt="hi"),
    ("embed", "embed"): RequestInput(texts=("a",)),
    ("embed", "rank"): RequestInput(query="a", documents=("b", "c")),
    ("digits", "classify"): RequestInput(image=b"pixels"),
}
CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "request_id": TEXT,
    "model": st.sampled_from(tuple(MODELS.champions)) | TEXT,
    "task": st.sampled_from(("generate", "embed", "rank", "classify")) | TEXT,
    "input": ONE_INPUT | INPUTS,
    "priority": st.sampled_from(("high", "normal", "low")) | TEXT,
    "timeout_ms": SMALL | NUMBERS,
    "tenant": NAMES | TEXT,
    "reply_to": NAMES | TEXT,
    "retrieval": st.builds(Retrieval, TEXT, SMALL, st.sampled_from(("hybrid", "vector", "cached")) | TEXT),
    "group": st.sampled_from(("search", "mail")) | TEXT,
    "conversation_id": TEXT,
    "metadata": st.dictionaries(TEXT, TEXT, max_size=3),
    "max_tokens": SMALL | NUMBERS,
    "temperature": st.floats() | st.floats(0, 2),
    "top_p": st.floats() | st.floats(0, 1),
    "stop": st.lists(TEXT, max_size=10).map(tuple),
    "seed": NUMBERS,
}


@st.composite
def requests(draw: st.DrawFn) -> InferenceRequest:
    """A good request with a few fields changed to anything their types allow."""
    (name, task), content = draw(st.sampled_from(tuple(GOOD_INPUTS.items())))
    changed = draw(st.lists(st.sampled_from(tuple(CHANGES)), max_size=4, unique=True))
    return request(
        **{"model": name, "task": task, "input": content} | {field: draw(CHANGES[field]) for field in changed}
    )


SPECS = st.builds(
    TenantSpec,
    tenant=st.just("acme"),
    classes=st.sampled_from((("high", "normal", "low"), ("normal",))),
    models=st.sampled_from(((), ("chat", "embed"))),
    services=st.sampled_from(((), ("search",))),
    groups=st.sampled_from(((), (TenantGroup("search"),))),
)
LIMITS_SMALL = st.builds(
    RequestLimits, st.integers(3, 40), st.integers(1, 4), st.integers(1, 10**8), st.integers(1, 600)
)


@given(asked=requests(), spec=SPECS, limits=LIMITS_SMALL, backfill=st.booleans())
@example(asked=request(request_id="\ud800", model="\ud800"), spec=SPEC, limits=LIMITS, backfill=False)
@example(asked=request(input=RequestInput(prompt="\ud800")), spec=SPEC, limits=LIMITS, backfill=False)
def test_a_verdict_on_anything(
    asked: InferenceRequest, spec: TenantSpec, limits: RequestLimits, backfill: bool
) -> None:
    """No request raises; a refusal names a field, and a valid request keeps every limit."""
    verdict = validate(asked, "acme", spec, MODELS, limits, now_ms=0, backfill=backfill)
    if isinstance(verdict, Rejection):
        path = re.sub(r"\[\d+\]", "", verdict.field).split(".")
        part: Any = asked
        for name in path[: 1 if verdict.field.startswith("retrieval") else None]:
            assert hasattr(part, name), verdict.field
            part = getattr(part, name) if not isinstance(getattr(part, name), tuple) else Message("", "")
        assert 0 < len(verdict.message) < 300
        return
    assert asked.tenant in {None, "acme"}
    assert verdict.reply_topic in {"replies.acme", *(f"replies.acme.{service}" for service in spec.services)}
    assert verdict.reply_topic == (asked.reply_to or "replies.acme")
    assert asked.task in verdict.model.tasks
    assert not spec.models or asked.model in spec.models
    assert asked.priority in spec.classes
    assert asked.group in {None, *(group.group for group in spec.groups)}
    assert asked.retrieval is None or asked.retrieval.mode in {"hybrid", "vector", "cached"}
    assert 1 <= verdict.timeout_ms <= limits.max_timeout_ms
    assert 0 < size_of_input(asked.input) <= limits.max_input_bytes
    # An image may be charged more than it has bytes.
    assert verdict.input_bytes == charged_bytes(asked.input)
    content, parameters = asked.input, asked.parameters
    items = content.messages or content.texts or content.documents or ()
    assert len(items) <= limits.max_input_items
    assert parameters.max_tokens is None or 1 <= parameters.max_tokens <= limits.max_output_tokens
    assert 0 <= parameters.temperature <= 2
    assert 0 < parameters.top_p <= 1
    assert len(parameters.stop) <= 8
    assert all(parameters.stop)
    assert parameters.seed is None or parameters.seed >= 0


def test_what_names_a_version_that_nobody_has_loaded_is_told_when_to_retry_and_backfill_waits() -> None:
    def checked(*, backfill: bool) -> ValidRequest | Rejection:
        asked = request(model="chat/1")
        return validate(
            *(asked, "acme", SPEC, MODELS, LIMITS), now_ms=0, backfill=backfill, served=lambda _model, _tenant: 0.0
        )

    refused = checked(backfill=False)
    assert isinstance(refused, Rejection)
    assert (refused.code, refused.field) == (Code.OVERLOADED, "model")
    assert refused.retry_after_ms is not None
    assert isinstance(checked(backfill=True), ValidRequest)

"""Validation: whatever a request holds, a verdict; and the bounds, to the unit."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.outcomes import Code, Priority, Task
from fairlane.records import (
    CancelRequest,
    InferenceRequest,
    Message,
    ModelVersion,
    Parameters,
    RequestInput,
    Retrieval,
    TenantSpec,
)
from fairlane_server.image_header import LEAST_IMAGE_TOKENS, MAX_PIXELS, PIXELS_PER_TOKEN
from fairlane_server.models.catalog import catalog_of
from stream_processors.dispatcher.intake.validation import (
    Rejection,
    RequestLimits,
    ValidRequest,
    reply_topic_for_refusal,
    validate,
    validate_cancel,
    within_tenant_bound,
)
from stream_processors.dispatcher.scheduling.cost import CostModel

ID = "6f9619ff-8b86-d011-b42d-00c04fc964ff"
LIMITS = RequestLimits(max_input_bytes=100, max_input_items=4, max_timeout_ms=86_400_000, max_output_tokens=64)
SHORT = replace(LIMITS, max_timeout_ms=1_000)
ALL_TASKS = ModelVersion("all", "1", "pool", "simulated", tuple(map(str, Task)), "all", 4_096, 512)
NO_OUTPUT = replace(ALL_TASKS, model="encoder", max_output_tokens=0)
MODELS = catalog_of(ALL_TASKS, NO_OUTPUT)
SPEC = TenantSpec("acme", services=("search",))
GOOD = InferenceRequest(ID, "all", "generate", RequestInput(prompt="x"))


def verdict(
    request: InferenceRequest, spec: TenantSpec | None = SPEC, *, backfill: bool = False
) -> ValidRequest | Rejection:
    return validate(request, "acme", spec, MODELS, LIMITS, now_ms=0, backfill=backfill)


def refused(request: InferenceRequest, spec: TenantSpec | None = SPEC) -> tuple[str, str]:
    found = verdict(request, spec)
    assert isinstance(found, Rejection), found
    return found.code, found.field


any_text = st.text(max_size=20) | st.sampled_from(["all", "encoder", "generate", "embed", "acme", "normal", ID])
inputs = st.builds(
    RequestInput,
    messages=st.none() | st.lists(st.builds(Message, any_text, any_text), max_size=3).map(tuple),
    prompt=st.none() | any_text,
    texts=st.none() | st.lists(any_text, max_size=6).map(tuple),
    query=st.none() | any_text,
    documents=st.none() | st.lists(any_text, max_size=6).map(tuple),
    image=st.none() | st.binary(max_size=120),
)
parameters = st.builds(
    Parameters,
    max_tokens=st.none() | st.integers(-(2**31), 2**31 - 1),
    temperature=st.floats(),
    top_p=st.floats(),
    stop=st.lists(any_text, max_size=10).map(tuple),
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    stream=st.booleans(),
    logprobs=st.none() | st.integers(-(2**31), 2**31 - 1),
)
requests = st.builds(
    InferenceRequest,
    request_id=any_text | st.just(ID),
    model=any_text,
    task=any_text,
    input=inputs,
    parameters=parameters,
    priority=any_text,
    timeout_ms=st.none() | st.integers(-(2**63), 2**63 - 1),
    tenant=st.none() | any_text,
    reply_to=st.none() | any_text,
    retrieval=st.none() | st.builds(Retrieval, any_text, st.integers(-(2**31), 2**31 - 1)),
    conversation_id=st.none() | any_text,
    metadata=st.dictionaries(any_text, any_text, max_size=3),
)


@given(requests, st.booleans())
def test_every_request_gets_a_verdict(request: InferenceRequest, backfill: bool) -> None:
    found = verdict(request, backfill=backfill)
    if isinstance(found, Rejection):
        assert found.field.partition("[")[0].partition(".")[0] in InferenceRequest.__slots__
        assert found.message
        assert found.code in {Code.INVALID, Code.FORBIDDEN, Code.UNKNOWN_MODEL}
    else:
        assert found.reply_topic == "replies.acme"
        assert found.timeout_ms >= 1
    assert reply_topic_for_refusal(request, "acme", SPEC) == "replies.acme"


PROMPT = "0123456789" * 100


@given(requests.map(lambda request: replace(request, input=RequestInput(prompt=PROMPT, texts=(PROMPT, "")))))
def test_a_refusal_never_quotes_the_input(request: InferenceRequest) -> None:
    found = verdict(request)
    assert isinstance(found, Rejection)
    assert PROMPT[:20] not in found.message


@pytest.mark.parametrize(
    "request_id", [ID, ID.upper(), ID.replace("-", ""), "00000000-0000-0000-0000-000000000000"], ids=str
)
def test_a_uuid_in_any_spelling_is_an_id(request_id: str) -> None:
    assert isinstance(verdict(replace(GOOD, request_id=request_id)), ValidRequest)


@pytest.mark.parametrize(
    ("field", "inside", "outside"),
    [
        ("timeout_ms", (1, 86_400_000), (0, 86_400_001)),
        ("parameters.max_tokens", (1, 64), (0, 65)),
        ("parameters.temperature", (0.0, 2.0), (-1e-9, 2.001)),
        ("parameters.top_p", (1e-9, 1.0), (0.0, 1.001)),
        ("parameters.seed", (0, 2**63 - 1), (-1,)),
        ("parameters.logprobs", (0, 20), (-1, 21)),
        ("parameters.stop", (("a",) * 8,), (("a",) * 9,)),
        ("conversation_id", ("c", "c" * 128), ("", "c" * 129)),
        ("metadata", ({"k": "v" * 8_191},), ({"k": "v" * 8_192},)),
        ("retrieval.top_k", (Retrieval("c", 1), Retrieval("c", 64)), (Retrieval("c", 0), Retrieval("c", 65))),
        ("retrieval.collection", (Retrieval("c" * 39),), (Retrieval(""), Retrieval("c" * 40), Retrieval("A c"))),
        ("input", (RequestInput(prompt="x" * 100),), (RequestInput(prompt="x" * 101), RequestInput(prompt="é" * 51))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_bounds(field: str, inside: tuple[Any, ...], outside: tuple[Any, ...]) -> None:
    def with_value(value: Any) -> InferenceRequest:
        whole, _, part = field.partition(".")
        if whole == "parameters":
            return replace(GOOD, parameters=replace(Parameters(), **{part: value}))
        return replace(GOOD, **{whole: value})

    for value in inside:
        assert isinstance(verdict(with_value(value)), ValidRequest)
    for value in outside:
        assert refused(with_value(value)) == (Code.INVALID, field)


def test_an_encoder_takes_no_limit_of_its_own_on_output() -> None:
    embed = replace(GOOD, model="encoder", task="embed", input=RequestInput(texts=("a",)))
    assert isinstance(verdict(replace(embed, parameters=Parameters(max_tokens=64))), ValidRequest)


@pytest.mark.parametrize("priority", Priority)
def test_the_timeout_of_a_class_is_its_default(priority: Priority) -> None:
    found = verdict(replace(GOOD, priority=str(priority)))
    assert isinstance(found, ValidRequest)
    assert found.timeout_ms == {"high": 30_000, "normal": 60_000, "low": 120_000}[priority]
    offline = verdict(replace(GOOD, priority=str(priority)), backfill=True)
    assert isinstance(offline, ValidRequest)
    assert offline.timeout_ms == 86_400_000
    short = validate(replace(GOOD, priority=str(priority)), "acme", SPEC, MODELS, SHORT, now_ms=0, backfill=True)
    assert isinstance(short, ValidRequest)
    assert short.timeout_ms == SHORT.max_timeout_ms


@pytest.mark.parametrize(
    ("reply_to", "allowed"),
    [
        ("replies.acme", True),
        ("replies.acme.search", True),
        ("replies.acme.billing", False),
        ("replies.acme2", False),
        ("replies.acme.search.more", False),
        ("gateway.replies", True),
        ("jobs.replies", True),
        ("gateway.replies.acme", False),
        ("replies.", False),
        ("requests.acme", False),
        ("priority.pool.high", False),
        ("", False),
    ],
)
def test_where_a_reply_may_go(reply_to: str, allowed: bool) -> None:
    request = replace(GOOD, reply_to=reply_to)
    if allowed:
        found = verdict(request)
        assert isinstance(found, ValidRequest)
        assert found.reply_topic == reply_to
    else:
        assert refused(request) == (Code.FORBIDDEN, "reply_to")
    # A refusal of it goes where a reply might have gone.
    assert reply_topic_for_refusal(request, "acme", SPEC) == (reply_to if allowed else "replies.acme")


def test_a_tenant_that_is_not_registered_is_refused() -> None:
    assert refused(GOOD, None) == (Code.FORBIDDEN, "tenant")


def test_a_tenant_may_name_itself_and_nobody_else() -> None:
    assert isinstance(verdict(replace(GOOD, tenant="acme")), ValidRequest)
    assert refused(replace(GOOD, tenant="globex")) == (Code.FORBIDDEN, "tenant")


def test_what_a_tenant_may_use() -> None:
    assert refused(GOOD, replace(SPEC, models=("encoder",))) == (Code.FORBIDDEN, "model")
    assert refused(GOOD, replace(SPEC, classes=("high",))) == (Code.FORBIDDEN, "priority")


# Cancels


@pytest.mark.parametrize("named", [None, "acme"])
def test_a_cancel_of_the_topics_own_tenant_counts(named: str | None) -> None:
    assert validate_cancel(CancelRequest(ID, named), "acme") is None


@pytest.mark.parametrize(
    ("cancel", "code", "field"),
    [
        (CancelRequest(ID, "other"), Code.FORBIDDEN, "tenant"),
        (CancelRequest(ID, ""), Code.FORBIDDEN, "tenant"),
        (CancelRequest("order-7"), Code.INVALID, "request_id"),
    ],
)
def test_other_cancels_count_for_nothing(cancel: CancelRequest, code: Code, field: str) -> None:
    refusal = validate_cancel(cancel, "acme")
    assert refusal is not None
    assert (refusal.code, refusal.field) == (code, field)


# What a tenant may have of any model


@pytest.mark.parametrize(
    ("most", "asked", "allowed"),
    [(None, None, None), (None, 64, 64), (80, 64, 64), (80, 80, 80), (80, 81, 80), (80, None, 80), (600, None, 512)],
)
def test_an_answer_is_at_most_what_its_tenant_may_have(
    most: int | None, asked: int | None, allowed: int | None
) -> None:
    spec = replace(SPEC, max_completion_tokens=most)
    given = replace(GOOD, parameters=Parameters(asked, seed=7))
    bounded = within_tenant_bound(given, ALL_TASKS, spec)
    assert bounded == replace(given, parameters=Parameters(allowed, seed=7))
    assert (bounded is given) == (asked == allowed)
    embed = replace(given, task="embed")
    assert within_tenant_bound(embed, ALL_TASKS, spec) is embed
    assert within_tenant_bound(given, ALL_TASKS, None) is given


def png_of(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR" + width.to_bytes(4) + height.to_bytes(4)


@pytest.mark.parametrize(
    ("width", "height", "said"),
    [
        (50_000, 50_000, f"the PNG has 50000 x 50000 pixels; at most {MAX_PIXELS} are taken"),
        (MAX_PIXELS + 1, 1, f"the PNG has {MAX_PIXELS + 1} x 1 pixels; at most {MAX_PIXELS} are taken"),
        (0, 8, "the PNG has 0 x 8 pixels, which is none"),
    ],
)
def test_an_image_of_a_size_that_is_not_taken_is_refused_by_its_header(width: int, height: int, said: str) -> None:
    image = replace(GOOD, task="classify", input=RequestInput(image=png_of(width, height)))
    assert verdict(image) == Rejection(Code.INVALID, "input.image", said)


def test_a_small_file_of_many_pixels_is_charged_by_its_pixels() -> None:
    costs = CostModel()

    def cost(image: bytes) -> int:
        found = verdict(replace(GOOD, task="classify", input=RequestInput(image=image)))
        assert isinstance(found, ValidRequest)
        return costs.estimate("acme", NO_OUTPUT, found.input_bytes, None).total

    assert cost(bytes(64)) == LEAST_IMAGE_TOKENS
    assert cost(png_of(4_096, 4_096)) == LEAST_IMAGE_TOKENS + MAX_PIXELS // PIXELS_PER_TOKEN
    assert cost(b"GIF89a, of which only the engine knows what it is") == LEAST_IMAGE_TOKENS


def test_a_long_prompt_is_not_refused_on_an_estimate() -> None:
    """A thousand bytes may be one token."""
    spec = replace(SPEC, max_prompt_tokens=1)
    assert isinstance(verdict(replace(GOOD, input=RequestInput(prompt=" " * 100)), spec), ValidRequest)

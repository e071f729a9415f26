"""OpenAI's own client against the routes: its whole suite, and what a scripted pipeline alone can bring about."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from fairlane.client.reassembly import TextDelta
from fairlane.guardrail_records import GuardrailVerdict
from fairlane.records import (
    CacheUse,
    Cost,
    HistoryUse,
    Output,
    PassageReference,
    RetrievalUse,
    TokenLogprob,
    TopLogprob,
)
from producers.openai_api.errors import GatewayError
from tests.kit.openai_kit import EMBEDDER, KEY, MODEL, VIEWER_KEY, Gate, Script, ScriptedSubmitter, build, serving
from tests.kit.openai_suite import QUESTION, OpenAISuite, Service

# Shorter than anything that is waited for here, and longer than what the machine needs for it.
WAIT_S = 0.2


@pytest.fixture(scope="module")
def module_submitter() -> ScriptedSubmitter:
    return ScriptedSubmitter()


@pytest.fixture(scope="module")
def url(module_submitter: ScriptedSubmitter) -> Iterator[str]:
    with serving(build(module_submitter)) as url:
        yield url


@pytest.fixture
def submitter(module_submitter: ScriptedSubmitter) -> ScriptedSubmitter:
    module_submitter.clear()
    return module_submitter


@pytest.fixture
def service(url: str, submitter: ScriptedSubmitter) -> Service:
    return Service(url, KEY, MODEL, EMBEDDER)


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with service.client() as client:
        yield client


class TestScriptedPipeline(OpenAISuite):
    pass


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    given: dict[str, Any] = {"model": MODEL, "messages": QUESTION} | fields
    return client.chat.completions.create(**given)


def test_parameters_reach_the_request(client: openai.OpenAI, submitter: ScriptedSubmitter) -> None:
    ask(
        client,
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        stop=["a", "b"],
        seed=7,
        metadata={"team": "atlas"},
        logprobs=True,
        top_logprobs=2,
        extra_body={
            "fairlane": {
                "priority": "high",
                "timeout_ms": 5_000,
                "retrieval": {"collection": "atlas", "top_k": 2},
                "cache": "exact",
                "group": "web",
            }
        },
    )
    tenant, request = submitter.submitted[-1]
    given = request.parameters
    assert (tenant, request.tenant, request.reply_to) == ("acme", None, None)
    assert (given.max_tokens, given.temperature, given.top_p, given.stop, given.seed, given.logprobs) == (
        9,
        0.5,
        0.9,
        ("a", "b"),
        7,
        2,
    )
    assert (request.priority, request.timeout_ms, request.cache, request.group) == ("high", 5_000, "exact", "web")
    assert request.retrieval is not None
    assert (request.retrieval.collection, request.retrieval.top_k) == ("atlas", 2)
    assert request.metadata == {"team": "atlas"}


def test_defaults_are_those_of_openai(client: openai.OpenAI, submitter: ScriptedSubmitter) -> None:
    ask(client)
    client.completions.create(model=MODEL, prompt="p", stop="x")
    (_, chat), (_, completion) = submitter.submitted
    assert (chat.parameters.temperature, chat.parameters.top_p, chat.parameters.max_tokens) == (1.0, 1.0, None)
    assert (completion.parameters.max_tokens, completion.parameters.stop) == (16, ("x",))
    assert chat.parameters.logprobs is completion.parameters.logprobs is None


def test_a_conversation_is_named_by_its_options(client: openai.OpenAI, submitter: ScriptedSubmitter) -> None:
    first = ask(client, extra_body={"fairlane": {"conversation_id": "c-1"}})
    after = first.model_extra["fairlane"]["request_id"]
    ask(client, extra_body={"fairlane": {"conversation_id": "c-1", "conversation_after": after}})
    request = submitter.submitted[-1][1]
    assert (request.conversation_id, request.conversation_after) == ("c-1", after)
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client, extra_body={"fairlane": {"conversation_after": after}})
    assert raised.value.param == "fairlane.conversation_after"


def test_what_was_done_to_a_request_is_told(client: openai.OpenAI, submitter: ScriptedSubmitter) -> None:
    earlier = "0198a2f0-7c1e-7d3a-9f10-2b6a4c5d6e7f"
    submitter.scripts.append(
        Script(
            outcome={
                "degradations": ("vector_only",),
                "passages": (PassageReference("atlas/france.md#0", 0.5),),
                "retrieval_use": RetrievalUse("atlas", "vector", "late", 3, 150),
                "cache_use": CacheUse("exact", earlier, 5),
                "history_use": HistoryUse(4, "shortened", 2),
                "finish_reason": "length",
                "cost": Cost(153_600, "XTS"),
                "guardrails": (GuardrailVerdict("output", "pii", "redacted", ("PERSON",)),),
            }
        )
    )
    answer = ask(client)
    told = answer.model_extra["fairlane"]
    assert told["degradations"] == ["vector_only"]
    assert told["passages"] == [{"passage_id": "atlas/france.md#0", "score": 0.5}]
    assert told["retrieval"] == {"collection": "atlas", "mode": "vector", "reason": "late"}
    assert told["cache"] == {"mode": "exact", "request_id": earlier, "answered_at_ms": 5, "similarity": 1.0}
    assert told["history"] == {"messages": 4, "reason": "shortened"}
    assert told["cost"] == {"amount": "0.0001536", "currency": "XTS"}
    assert told["guardrails"] == [{"stage": "output", "check": "pii", "verdict": "redacted", "types": ["PERSON"]}]
    assert answer.choices[0].finish_reason == "length"


def test_a_withheld_answer_ends_with_its_finish_reason_and_no_text(
    client: openai.OpenAI, submitter: ScriptedSubmitter
) -> None:
    verdict = GuardrailVerdict("output", "toxicity", "blocked", ("toxic",))
    outcome = {
        "outcome": "failed",
        "code": "guardrail_blocked",
        "output": None,
        "finish_reason": "content_filter",
        "guardrails": (verdict,),
    }
    submitter.scripts += [Script(outcome=outcome), Script(outcome=outcome, deltas=(TextDelta("It is "),))]
    whole = ask(client)
    assert (whole.choices[0].finish_reason, whole.choices[0].message.content) == ("content_filter", "")
    assert whole.model_extra["fairlane"]["guardrails"][0]["verdict"] == "blocked"
    chunks = list(ask(client, stream=True))
    said = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert said == ["It is "], "what was checked is out; nothing of the rest is"
    assert chunks[-1].choices[0].finish_reason == "content_filter"
    assert chunks[-1].model_extra["fairlane"]["guardrails"][0]["check"] == "toxicity"


def test_log_probabilities(client: openai.OpenAI, submitter: ScriptedSubmitter) -> None:
    tokens = (TokenLogprob("Par", -0.5, (TopLogprob("Par", -0.5), TopLogprob("Lo", -1.5))), TokenLogprob("ís", -0.25))
    script = Script(outcome={"output": Output(text="París", logprobs=tokens)})
    submitter.scripts.extend([script] * 3)

    content = ask(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [(one.token, one.logprob, bytes(one.bytes).decode()) for one in content] == [
        ("Par", -0.5, "Par"),
        ("ís", -0.25, "ís"),
    ]
    assert [(one.token, one.logprob) for one in content[0].top_logprobs] == [("Par", -0.5), ("Lo", -1.5)]

    *_, last = ask(client, logprobs=True, stream=True)
    assert [one.token for one in last.choices[0].logprobs.content] == ["Par", "ís"]

    plain = client.completions.create(model=MODEL, prompt="p", logprobs=2).choices[0].logprobs
    assert plain is not None
    assert (plain.tokens, plain.token_logprobs, plain.text_offset) == (["Par", "ís"], [-0.5, -0.25], [0, 3])
    assert plain.top_logprobs == [{"Par": -0.5, "Lo": -1.5}, {}]


@pytest.mark.parametrize(
    ("outcome", "code", "error", "status", "told_code"),
    [
        ("rejected", "invalid", openai.BadRequestError, 400, "invalid"),
        ("rejected", "unknown_model", openai.NotFoundError, 404, "model_not_found"),
        ("rejected", "forbidden", openai.PermissionDeniedError, 403, "forbidden"),
        ("rejected", "overloaded", openai.RateLimitError, 429, "overloaded"),
        ("rejected", "quota_exceeded", openai.RateLimitError, 429, "rate_limit_exceeded"),
        ("rejected", "insufficient_quota", openai.RateLimitError, 429, "insufficient_quota"),
        ("rejected", "budget_unknown", openai.InternalServerError, 503, "budget_unknown"),
        ("rejected", "deadline_unmeetable", openai.RateLimitError, 429, "deadline_unmeetable"),
        ("rejected", "draining", openai.InternalServerError, 503, "draining"),
        ("rejected", "guardrail_blocked", openai.BadRequestError, 400, "content_filter"),
        ("rejected", "guardrail_unavailable", openai.InternalServerError, 503, "guardrail_unavailable"),
        ("failed", "guardrail_unavailable", openai.InternalServerError, 503, "guardrail_unavailable"),
        ("expired", None, openai.InternalServerError, 504, "expired"),
        ("cancelled", None, openai.APIStatusError, 499, "cancelled"),
        ("failed", "context_too_long", openai.BadRequestError, 400, "context_length_exceeded"),
        ("failed", "engine_error", openai.InternalServerError, 500, "engine_error"),
    ],
)
def test_every_end_has_its_error(
    client: openai.OpenAI,
    submitter: ScriptedSubmitter,
    outcome: str,
    code: str | None,
    error: type[openai.APIStatusError],
    status: int,
    told_code: str,
) -> None:
    script = Script(outcome={"outcome": outcome, "code": code, "output": None, "field": "parameters.max_tokens"})
    for stream in (False, True):
        submitter.scripts.append(script)
        with pytest.raises(error) as raised:
            ask(client, stream=stream)
        assert (raised.value.status_code, raised.value.code) == (status, told_code)
        assert raised.value.param == "max_tokens"
        assert raised.value.request_id == submitter.submitted[-1][1].request_id
        assert raised.value.message


def test_a_field_of_the_options_is_named_as_it_was_given(client: openai.OpenAI, submitter: ScriptedSubmitter) -> None:
    submitter.scripts.append(
        Script(outcome={"outcome": "rejected", "code": "invalid", "field": "retrieval.collection", "output": None})
    )
    with pytest.raises(openai.BadRequestError) as raised:
        ask(client)
    assert raised.value.param == "fairlane.retrieval.collection"


def test_the_client_comes_back_when_it_is_told_to(service: Service, submitter: ScriptedSubmitter) -> None:
    refusal = {"outcome": "rejected", "code": "overloaded", "output": None, "retry_after_ms": 20}
    busy = GatewayError(429, "overloaded", "the queue is full", retry_after_ms=20)
    submitter.scripts += [Script(outcome=refusal), Script(refused=busy)]
    with service.client(max_retries=2) as client:
        raw = client.chat.completions.with_raw_response.create(model=MODEL, messages=QUESTION)
    assert raw.retries_taken == 2
    assert len(submitter.submitted) == 2


def test_when_to_come_back_is_in_the_headers(client: openai.OpenAI, submitter: ScriptedSubmitter) -> None:
    submitter.scripts.append(Script(refused=GatewayError(503, "unavailable", "no Kafka", retry_after_ms=1_200)))
    with pytest.raises(openai.InternalServerError) as raised:
        ask(client)
    headers = raised.value.response.headers
    assert (headers["retry-after"], headers["retry-after-ms"]) == ("2", "1200")
    assert raised.value.type == "server_error"


def test_who_may_not_send_work(service: Service, submitter: ScriptedSubmitter) -> None:
    with service.client(api_key=VIEWER_KEY) as client:
        assert client.models.list().data
        with pytest.raises(openai.PermissionDeniedError) as raised:
            ask(client)
    assert raised.value.type == "permission_error"
    assert submitter.submitted == []


def test_a_call_that_waits_too_long_is_not_sent_again() -> None:
    submitter, gate = ScriptedSubmitter(), Gate()
    submitter.scripts += [Script(before_reply=gate)] * 2
    with (
        serving(build(submitter, wait_s=WAIT_S)) as url,
        Service(url, KEY, MODEL, EMBEDDER).client(max_retries=2) as client,
    ):
        for stream in (False, True):
            with pytest.raises(openai.APIError) as raised:
                list(ask(client, stream=stream))
            assert raised.value.code == "timeout"
            assert submitter.submitted[-1][1].request_id in raised.value.message
        gate.open()
    assert len(submitter.submitted) == 2
    assert all(waiting.forgotten for waiting in submitter.waiting)
    assert not submitter.cancelled

"""OpenAI's interface: what is sent, and what an answer means."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fairlane.outcomes import Code, FinishReason
from fairlane.records import Message, Output, Parameters, RequestInput, TokenLogprob, TokenUsage, TopLogprob
from inference_consumers.engines.protocol import NOT_FINITE, EngineItem, Failure, ItemOutcome, Success
from inference_consumers.engines.remote.connection import refusal, retry_after_s
from inference_consumers.engines.remote.errors import EndpointFailedError, ItemRefusedError
from inference_consumers.engines.remote.openai_messages import (
    GenerateCall,
    StreamedAnswer,
    embedding_content,
    served_names,
    vectors_of,
)

ITEM = EngineItem("i", "generate", RequestInput(prompt="Hi"), Parameters(8))


def call(prompt: Any = "Hi", **parameters: Any) -> GenerateCall:
    item = replace(ITEM, parameters=replace(ITEM.parameters, **parameters))
    return GenerateCall(item, prompt, 5, 64, 8, item.parameters.stop)


def taken(answer: StreamedAnswer, *documents: Any) -> list[str]:
    return [answer.take(one if isinstance(one, bytes) else json.dumps(one).encode()) for one in documents]


def outcome_of(*documents: Any) -> ItemOutcome:
    answer = StreamedAnswer(call())
    taken(answer, *documents)
    return answer.outcome()


def choice(text: str | None = None, reason: str | None = None, **others: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": reason, **others}], "model": "m", "usage": None}


def test_token_ids_go_to_completions_and_turns_to_chats() -> None:
    body = json.loads(call([1, 2, 3], logprobs=2).content("m"))
    assert (call([1, 2, 3]).path, body["prompt"], body["logprobs"]) == ("/v1/completions", [1, 2, 3], 2)
    turns = (Message("user", "lone \ud800"), Message("assistant", "b"))
    body = json.loads(call(turns, logprobs=0).content("m"))
    assert call(turns).path == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "lone \ufffd"}, {"role": "assistant", "content": "b"}]
    assert (body["logprobs"], body["top_logprobs"]) == (True, 0)
    assert {"stop", "seed"}.isdisjoint(body)


def test_an_answer_is_its_parts_and_the_count_of_the_server() -> None:
    answer = StreamedAnswer(call())
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    texts = taken(
        answer, choice("one"), choice(""), choice(" two", "length"), {"choices": [], "usage": usage}, b"[DONE]"
    )
    assert texts == ["one", "", " two", "", ""]
    assert answer.is_done
    assert answer.outcome() == Success(Output(text="one two"), TokenUsage(7, 3, 4), FinishReason.LENGTH)


def test_without_a_count_the_prompt_is_as_sent_and_each_part_a_token() -> None:
    answer = StreamedAnswer(call())
    taken(answer, choice("one"), choice(" two", "stop"))
    assert answer.outcome() == Success(Output(text="one two"), TokenUsage(5, 2), FinishReason.STOP)


@pytest.mark.parametrize(
    ("stated", "usage"),
    [
        ({"prompt_tokens": 64, "completion_tokens": 8, "prompt_tokens_details": {"cached_tokens": 64}}, (64, 8, 64)),
        ({"prompt_tokens": -5, "completion_tokens": -5, "prompt_tokens_details": {"cached_tokens": -5}}, (5, 2, 0)),
        ({"prompt_tokens": 10**23, "completion_tokens": 10**23}, (5, 2, 0)),
        ({"prompt_tokens": 10**12, "completion_tokens": 9}, (5, 2, 0)),
        ({"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}, (7, 3, 0)),
        ({"completion_tokens": 3}, (5, 3, 0)),
    ],
)
def test_a_count_that_cannot_be_is_replaced_by_our_own(stated: dict[str, Any], usage: tuple[int, int, int]) -> None:
    answer = StreamedAnswer(call())
    taken(answer, choice("one"), choice(" two", "stop"), {"choices": [], "usage": stated})
    assert answer.usage == TokenUsage(*usage)


def test_an_answer_in_more_parts_than_it_may_have_tokens_is_not_charged_for_them() -> None:
    answer = StreamedAnswer(call())
    taken(answer, *[choice("a")] * 20)
    assert answer.usage == TokenUsage(5, 8)


@pytest.mark.parametrize(
    ("documents", "why"),
    [
        ([choice("one")], "has no end"),
        ([choice("one", "abort")], "has no end"),
        ([b"<html>"], "not what this interface answers"),
        ([[1]], "not what this interface answers"),
        ([{"choices": [{"text": 7}]}], "not what this interface answers"),
        ([{"error": {"message": "secret"}}], "ended its answer with an error"),
    ],
)
def test_what_is_no_answer_is_the_fault_of_the_endpoint(documents: list[Any], why: str) -> None:
    with pytest.raises(EndpointFailedError, match=why) as caught:
        outcome_of(*documents)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("documents", "parameters", "is_answer"),
    [
        ([choice("", "stop")], {}, False),
        ([choice("", "stop")], {"stop": ("x",)}, True),
        ([choice("a \ufffd", "stop")], {}, False),
        ([choice("", "content_filter")], {}, True),
        ([choice("a", "tool_calls")], {}, False),
    ],
)
def test_an_answer_without_text_is_one_only_where_something_cut_it(
    documents: list[Any], parameters: dict[str, Any], is_answer: bool
) -> None:
    answer = StreamedAnswer(call(**parameters))
    taken(answer, *documents)
    outcome = answer.outcome()
    assert isinstance(outcome, Success) == is_answer
    if isinstance(outcome, Failure):
        assert outcome.code == Code.ENGINE_ERROR


def test_log_probabilities_end_with_the_text() -> None:
    lists = {
        "tokens": ["a", " b", "<end>"],
        "token_logprobs": [-1, -2, -3],
        "top_logprobs": [{"c": -9, "a": -1}, {}, None],
    }
    answer = StreamedAnswer(call(logprobs=1))
    taken(answer, choice("a b", "stop", logprobs=lists))
    outcome = answer.outcome()
    assert isinstance(outcome, Success)
    assert outcome.output.logprobs == (TokenLogprob("a", -1, (TopLogprob("a", -1),)), TokenLogprob(" b", -2, ()))


def test_vectors_are_put_into_the_order_of_the_texts() -> None:
    entries = [{"index": 1, "embedding": [3, 4]}, {"index": 0, "embedding": [1, 2]}]
    body = json.dumps({"data": entries, "usage": {"prompt_tokens": 6, "total_tokens": 6}}).encode()
    assert vectors_of(body, 2, 5, 64) == ([[1, 2], [3, 4]], 6)
    for impossible in (b"-6", b"65", b"1" + b"0" * 23):
        assert vectors_of(body.replace(b"6", impossible), 2, 5, 64)[1] == 5
    assert json.loads(embedding_content("m", ["a"])) == {"model": "m", "input": ["a"], "encoding_format": "float"}
    for wrong in (body.replace(b'"index": 1', b'"index": 2'), body.replace(b"[3, 4]", b'["3"]'), b"{}", b"\xff"):
        with pytest.raises(EndpointFailedError):
            vectors_of(wrong, 2, 5, 64)


@pytest.mark.parametrize("number", [b"NaN", b"-Infinity", b"null"])
def test_numbers_that_are_not_finite_are_the_fault_of_the_model_and_not_of_the_endpoint(number: bytes) -> None:
    body = b'{"model": "NaNo", "data": [{"index": 0, "embedding": [3, 4]}]}'
    assert vectors_of(body, 1, 5, 64) == ([[3, 4]], 5)
    with pytest.raises(ItemRefusedError) as raised:
        vectors_of(body.replace(b"4", number), 1, 5, 64)
    assert raised.value.failure == NOT_FINITE


def test_the_names_of_served_models() -> None:
    assert served_names(b'{"object": "list", "data": [{"id": "a", "owned_by": "x"}]}') == ["a"]
    with pytest.raises(EndpointFailedError):
        served_names(b'{"models": []}')


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 2048 tokens. However, you requested 4000 tokens",
        "The input (700 tokens) is longer than the model's context length (512 tokens)",
        "`inputs` must have less than 1024 tokens. Given: 2000",
        "the request exceeds the available context size",
        "Requested token count exceeds the model's maximum context length of 8192 tokens",
    ],
)
def test_the_words_of_servers_for_a_prompt_that_is_too_long(message: str) -> None:
    for document in ({"error": {"message": message}}, {"error": message}, {"message": message}, {"detail": message}):
        assert refusal(400, json.dumps(document).encode()).code == Code.CONTEXT_TOO_LONG


@pytest.mark.parametrize("message", ["max_tokens must be at least 1", "temperature must be non-negative", ""])
def test_other_words_are_of_other_refusals(message: str) -> None:
    assert refusal(400, json.dumps({"error": {"message": message}}).encode()).code == Code.INVALID


@pytest.mark.parametrize("odd", [7, ["max_tokens"], {"a": 1}, None, True])
def test_a_refusal_in_an_odd_shape_is_one_all_the_same(odd: Any) -> None:
    for error in ({"message": odd, "code": odd, "param": odd}, odd):
        assert refusal(422, json.dumps({"error": error, "detail": odd}).encode()).code == Code.INVALID


def test_retry_after_is_seconds_or_a_date() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    asked = (now + timedelta(seconds=7)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    stated = {"12": 12.0, asked: 7.0, "Thu, 01 Jan 1970 00:00:00 GMT": 0.0, "soon": None, "-1": None, "9" * 30: None}
    stated |= {"Mon, 01 Jan 99999999999999 00:00:00 GMT": None}
    assert {text: retry_after_s(text, lambda: now) for text in stated} == stated
    assert retry_after_s(None, lambda: now) is None

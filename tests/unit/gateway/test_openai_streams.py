"""Streams on the wire: what is held back, what keeps them alive, how they fail, and who is told to stop."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from fairlane.client.reassembly import TextDelta
from fairlane.records import Output
from tests.kit.openai_kit import KEY, MODEL, Gate, Script, ScriptedSubmitter, build, serving
from tests.kit.openai_suite import QUESTION
from tests.kit.waiting import PATIENCE_S, eventually

KEEP_ALIVE_S = 0.05
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(scope="module")
def module_submitter() -> ScriptedSubmitter:
    return ScriptedSubmitter()


@pytest.fixture(scope="module")
def url(module_submitter: ScriptedSubmitter) -> Iterator[str]:
    with serving(build(module_submitter, keep_alive_s=KEEP_ALIVE_S)) as url:
        yield url


@pytest.fixture
def submitter(module_submitter: ScriptedSubmitter) -> ScriptedSubmitter:
    module_submitter.clear()
    return module_submitter


@contextmanager
def posted(url: str, key: str | None = None, **fields: Any) -> Iterator[httpx.Response]:
    """A stream that is read as it comes."""
    body = {"model": MODEL, "messages": QUESTION, "stream": True} | fields
    headers = HEADERS if key is None else HEADERS | {"idempotency-key": key}
    with (
        httpx.Client(base_url=url, timeout=PATIENCE_S) as http,
        http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response,
    ):
        yield response


def texts(lines: Sequence[str]) -> str:
    """What the chunks among these lines say."""
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk.get("choices"))


def test_events_are_told_as_events(url: str, submitter: ScriptedSubmitter) -> None:
    submitter.scripts.append(Script(deltas=(TextDelta("The capital"), TextDelta(" of France is Paris."))))
    with posted(url) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-request-id"] == submitter.submitted[0][1].request_id
    assert lines[-1] == "data: [DONE]"
    assert texts(lines) == "The capital of France is Paris."
    assert submitter.submitted[0][1].parameters.stream
    assert "usage" not in json.loads(lines[0][6:])
    eventually(lambda: submitter.waiting[0].forgotten)
    assert not submitter.cancelled


def test_silence_is_filled_with_comments(url: str, submitter: ScriptedSubmitter) -> None:
    before, between = Gate(), Gate()
    submitter.scripts.append(Script(deltas=(before, TextDelta("a"), between, TextDelta("b"))))
    with posted(url) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines)[6:])["choices"][0]["delta"]["role"] == "assistant"
        while next(lines) != ": keep-alive":
            pass
        before.open()
        while texts([next(lines)]) != "a":
            pass
        while next(lines) != ": keep-alive":
            pass
        between.open()
        rest = list(lines)
    assert texts(rest) == "b"
    assert "data: [DONE]" in rest


def test_the_client_does_not_see_the_comments(url: str, submitter: ScriptedSubmitter) -> None:
    gate = Gate()
    submitter.scripts.append(Script(deltas=(TextDelta("a"), gate, TextDelta("b"))))
    with openai.OpenAI(api_key=KEY, base_url=f"{url}/v1", max_retries=0) as client:
        said = ""
        for chunk in client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True):
            said += chunk.choices[0].delta.content or ""
            if said == "a":
                gate.open()
    assert said == "ab"


def test_an_end_that_is_none_after_the_first_text_is_an_error_event(url: str, submitter: ScriptedSubmitter) -> None:
    failed = {"outcome": "failed", "code": "engine_error", "message": "the engine failed", "output": None}
    submitter.scripts += [Script(outcome=failed, deltas=(TextDelta("The"),))] * 2
    with posted(url) as response:
        assert response.status_code == 200
        *_, event, data = [line for line in response.iter_lines() if line]
    assert event == "event: error"
    assert json.loads(data[6:])["error"]["code"] == "engine_error"
    with openai.OpenAI(api_key=KEY, base_url=f"{url}/v1", max_retries=0) as client:
        stream = client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True)
        with pytest.raises(openai.APIError, match="the engine failed"):
            list(stream)


def test_a_refusal_after_the_silence_is_an_error_event(url: str, submitter: ScriptedSubmitter) -> None:
    gate = Gate()
    refused = {"outcome": "rejected", "code": "overloaded", "output": None, "retry_after_ms": 5}
    submitter.scripts.append(Script(outcome=refused, deltas=(gate,)))
    with posted(url) as response:
        lines = response.iter_lines()
        while next(lines) != ": keep-alive":
            pass
        gate.open()
        rest = [line for line in lines if line and not line.startswith(":")]
    assert rest[0] == "event: error"
    assert json.loads(rest[1][6:])["error"]["type"] == "rate_limit_error"
    assert len(rest) == 2


def test_a_run_that_begins_again_and_says_the_same_goes_on(url: str, submitter: ScriptedSubmitter) -> None:
    again = (TextDelta("The cap"), TextDelta("The", True, 2), TextDelta(" capital", False, 2), TextDelta(" is Paris"))
    submitter.scripts.append(Script(deltas=again))
    with posted(url) as response:
        lines = list(response.iter_lines())
    assert texts(lines) == "The capital is Paris"
    assert "data: [DONE]" in lines


@pytest.mark.parametrize(
    "deltas",
    [
        (TextDelta("The cap"), TextDelta("A", True, 2), TextDelta(" city", False, 2)),
        # What is left of it in the end is less than what was sent.
        (TextDelta("The cap"), TextDelta("The", True, 2)),
    ],
)
def test_a_run_that_begins_again_and_says_something_else_is_an_error(
    url: str, submitter: ScriptedSubmitter, deltas: Sequence[TextDelta]
) -> None:
    submitter.scripts.append(Script(deltas=deltas))
    with posted(url) as response:
        lines = [line for line in response.iter_lines() if line]
    error = json.loads(lines[-1][6:])["error"]
    assert error["code"] == "stream_restarted"
    assert submitter.submitted[0][1].request_id in error["message"]
    assert "data: [DONE]" not in lines
    eventually(lambda: submitter.waiting[0].forgotten)
    # Its answer can still be asked for.
    assert not submitter.cancelled


def test_who_leaves_a_stream_cancels_its_request(url: str, submitter: ScriptedSubmitter) -> None:
    submitter.scripts.append(Script(deltas=(TextDelta("a"), Gate())))
    with posted(url) as response:
        assert next(response.iter_lines())
    eventually(lambda: submitter.waiting[0].forgotten)
    assert submitter.cancelled


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_before_there_is_an_answer_cancels_too(url: str, submitter: ScriptedSubmitter, stream: bool) -> None:
    submitter.scripts.append(Script(before_reply=Gate(), deltas=(Gate(),)))
    left(url, stream=stream)
    eventually(lambda: submitter.waiting and submitter.waiting[0].forgotten)
    assert submitter.cancelled


def test_who_leaves_with_a_key_may_come_back(url: str, submitter: ScriptedSubmitter, unique: str) -> None:
    gate = Gate()
    submitter.scripts.append(Script(deltas=(TextDelta("a"), gate), outcome={"output": Output(text="ab")}))
    with posted(url, unique) as response:
        assert next(response.iter_lines())
    eventually(lambda: submitter.waiting[0].forgotten)
    assert not submitter.cancelled
    with posted(url, unique) as response:
        lines = list(response.iter_lines())
    assert texts(lines) == "ab"
    assert "data: [DONE]" in lines
    assert response.headers["x-request-id"] == submitter.submitted[0][1].request_id
    assert len(submitter.submitted) == 1


def left(url: str, *, stream: bool) -> None:
    """Ask, and hang up before any answer."""
    body = {"model": MODEL, "messages": QUESTION, "stream": stream}
    timeout = httpx.Timeout(PATIENCE_S, read=KEEP_ALIVE_S / 5)
    with httpx.Client(base_url=url, timeout=timeout) as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/chat/completions", json=body, headers=HEADERS)

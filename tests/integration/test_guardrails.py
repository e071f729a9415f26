"""Guardrails through real processes: input and answers, whole and streamed, answers in a format, and a check whose
process is killed."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import openai
import psutil
import pytest

from fairlane import names
from fairlane.client import Client
from fairlane.errors import Failed, Rejected
from fairlane.guardrail_records import GuardrailPolicy, GuardrailRule, PostProcessing
from fairlane.outcomes import Code, Decision, FinishReason, Outcome
from fairlane.records import AuditEvent, TenantSpec
from tests.kit.gateway_kit import LONG_MS, Served, serving
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

KEY = "AKIAQX7PLN4TEDLE6K77"
INPUT = GuardrailPolicy(
    input=(GuardrailRule("secrets", "block", "closed"), GuardrailRule("patterns", "redact", "closed")),
    patterns=("planted[.]person@[a-z.]+",),
)
OUTPUT = GuardrailPolicy(output=(GuardrailRule("patterns", "redact", "closed"),), denied_words=("without",))
BLOCKED = GuardrailPolicy(output=(GuardrailRule("patterns", "block", "closed"),), patterns=("(?:[a-z]+ ){39}[a-z]+",))
"""The simulated engine's answers of 40 words and more."""
AS_JSON = GuardrailPolicy(
    output=(GuardrailRule("patterns", "redact", "closed"),),
    patterns=("(?:[a-z]+ ){9}[a-z]+",),
    post_processing=PostProcessing(json_schema='{"type":"array","items":{"type":"string"}}'),
)
"""An answer of ten words becomes ``[pattern]``, which is nearly JSON; shorter ones are prose."""


@pytest.fixture(scope="module")
def served(
    broker: str, postgres: PostgresServer, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    tenants = [
        TenantSpec("in", guardrails=INPUT, cache="exact"),
        TenantSpec("out", guardrails=OUTPUT),
        TenantSpec("blocked", guardrails=BLOCKED),
        TenantSpec("json", guardrails=AS_JSON, cache="exact"),
        TenantSpec("free", cache="exact"),
    ]
    folder = tmp_path_factory.mktemp("guardrails")
    env = {
        "GUARDRAIL_CHECKS": "secrets",
        "GUARDRAIL_HOLD_BACK_CHARACTERS": "20",
        # Without the models of checks.
        "MODELS_DIR": str(folder / "models"),
    }
    with serving(broker, postgres, folder, redis_url=redis_url, env=env, tenants=tenants) as served:
        yield served


def asked(served: Served, tenant: str, text: str, **fields: object) -> Any:
    """The whole answer, or a list of its chunks."""
    body = served.chat(text, **fields)
    extra = {"fairlane": body.pop("fairlane")}
    with openai.OpenAI(base_url=served.url("/v1"), api_key=served.keys[tenant], max_retries=0) as client:
        answer: Any = client.chat.completions.create(**body, extra_body=extra)
        return list(answer) if "stream" in fields else answer


def ask(served: Served, tenant: str, text: str, **fields: object) -> openai.types.chat.ChatCompletion:
    answer: openai.types.chat.ChatCompletion = asked(served, tenant, text, **fields)
    return answer


def verdicts(answer: openai.types.chat.ChatCompletion) -> list[tuple[str, str, str]]:
    told = (answer.model_extra or {})["fairlane"]["guardrails"]
    return [(one["stage"], one["check"], one["verdict"]) for one in told]


def test_a_key_in_the_input_is_refused_and_an_address_is_redacted(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(served, "in", f"use {KEY}")
    assert caught.value.code == "content_filter"
    assert KEY not in str(caught.value)
    answer = ask(served, "in", "write to planted.person@example.com")
    assert verdicts(answer) == [("input", "secrets", "passed"), ("input", "patterns", "redacted")]
    with served.client("in") as client:
        status = client.get(f"/v1/results/{answer.id.removeprefix('chatcmpl-')}").json()
    assert [one["verdict"] for one in status["guardrails"]] == ["passed", "redacted"]


def test_an_answer_is_redacted_whole_and_streamed(served: Served) -> None:
    whole = ask(served, "out", "hello", max_tokens=40)
    text = whole.choices[0].message.content
    assert text is not None
    assert "without" not in text
    assert "[denied_word]" in text
    chunks = asked(served, "out", "hello", max_tokens=40, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[-1].model_extra["fairlane"]["guardrails"][0]["verdict"] == "redacted"


def test_a_blocked_answer_ends_its_stream(served: Served) -> None:
    answer = ask(served, "blocked", "hello", max_tokens=60)
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("content_filter", "")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 60
    pipeline = served.pipeline
    with Client(pipeline.tenant("blocked"), pipeline.settings.kafka_bootstrap_servers) as client:
        model = pipeline.model_for("generate")
        with client.stream(model=model, prompt="hello", max_tokens=400, timeout_ms=LONG_MS) as stream:
            with pytest.raises(Failed) as caught:
                list(stream)
            reply = stream.reply()
    assert caught.value.code == Code.GUARDRAIL_BLOCKED
    assert (reply.outcome, reply.finish_reason, reply.output) == (Outcome.FAILED, FinishReason.CONTENT_FILTER, None)
    assert len(stream.text.split()) < 60


def test_an_answer_is_repaired_to_its_format_whole_streamed_and_from_the_cache(served: Served) -> None:
    answers: list[openai.types.chat.ChatCompletion] = []

    def is_cached() -> bool:
        answers.append(ask(served, "json", "hello", max_tokens=10, temperature=0))
        return (answers[-1].model_extra or {})["fairlane"]["cache"] is not None

    eventually(is_cached, what="an answer from the cache")
    assert len(answers) > 1, "the first one was run"
    for answer in answers:
        assert answer.choices[0].message.content == '["pattern"]'
        assert verdicts(answer) == [("output", "patterns", "redacted"), ("output", "post_processing", "changed")]
    chunks = asked(served, "json", "hello", max_tokens=10, stream=True)
    assert [text for chunk in chunks if (text := chunk.choices[0].delta.content)] == ['["pattern"]']
    assert served.consumer.metric("fairlane_guardrail_ready", check="post_processing") == 1


def test_an_answer_in_another_format_is_withheld(served: Served) -> None:
    answer = ask(served, "json", "hello", max_tokens=9)
    assert (answer.choices[0].finish_reason, answer.choices[0].message.content) == ("content_filter", "")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9
    assert verdicts(answer) == [("output", "patterns", "passed"), ("output", "post_processing", "blocked")]
    with served.client("json") as client:
        result = client.get(f"/v1/results/{answer.id.removeprefix('chatcmpl-')}").json()
    assert (result["outcome"], result["code"]) == (Outcome.FAILED, Code.FORMAT_NOT_MET)
    assert "output" not in result
    assert result["message"] == "the answer is not in the format of the tenant's policy: not JSON"
    pipeline = served.pipeline
    with Client(pipeline.tenant("json"), pipeline.settings.kafka_bootstrap_servers) as kafka:
        model = pipeline.model_for("generate")
        with kafka.stream(model=model, prompt="hello", max_tokens=9, timeout_ms=LONG_MS) as stream:
            with pytest.raises(Failed) as caught:
                list(stream)
            assert stream.text == ""
    assert caught.value.code == Code.FORMAT_NOT_MET
    assert served.consumer.metric("fairlane_guardrail_verdicts_total", verdict="blocked", check="post_processing") == 2


def test_what_a_guardrail_did_is_in_the_audit_and_in_metrics(served: Served) -> None:
    pipeline = served.pipeline
    audit = pipeline.reader(names.LEDGER_AUDIT, from_beginning=False)
    request = pipeline.request(prompt=f"use {KEY}", timeout_ms=LONG_MS)
    before = served.consumer.metric("fairlane_guardrail_verdicts_total", verdict="blocked", check="secrets")
    replies = pipeline.replies("in", from_beginning=False)
    pipeline.publish("in", request)
    reply = replies.wait([request.request_id])[request.request_id]
    assert (reply.outcome, reply.code) == (Outcome.REJECTED, Code.GUARDRAIL_BLOCKED)

    def guarded() -> list[AuditEvent]:
        events = pipeline.decoded(audit, AuditEvent)
        return [one for one in events if one.request_id == request.request_id and one.decision == Decision.GUARDED]

    audit.wait(guarded, what="the audit event")
    (event,) = guarded()
    assert (event.code, event.message) == (Code.GUARDRAIL_BLOCKED, "input secrets blocked (aws_access_key)")
    assert served.consumer.metric("fairlane_guardrail_verdicts_total", verdict="blocked", check="secrets") > before
    assert served.consumer.metric("fairlane_guardrail_ready", check="secrets") == 1


def test_an_answer_from_the_cache_was_given_under_the_same_policy(served: Served) -> None:
    question = "what is cached under a policy?"
    first, other = (ask(served, tenant, question, temperature=0) for tenant in ("in", "free"))
    assert verdicts(other) == []

    def again() -> dict[str, object]:
        details: dict[str, object] = (ask(served, "in", question, temperature=0).model_extra or {})["fairlane"]
        return details

    eventually(lambda: again()["cache"] is not None, what="an answer from the cache")
    assert [one["verdict"] for one in again()["guardrails"]] == ["passed", "passed"]  # type: ignore[attr-defined]
    assert verdicts(first) == [("input", "secrets", "passed"), ("input", "patterns", "passed")]


def test_a_check_that_is_killed_opens_no_gate_and_loses_nothing(served: Served) -> None:
    pipeline = served.pipeline
    replies = pipeline.replies("in", from_beginning=False)
    killed = 0
    sent = []
    for number in range(60):
        prompt = f"use {KEY}" if number % 2 else f"question {number}"
        sent.append((number, pipeline.request(prompt=prompt, timeout_ms=LONG_MS)))
        pipeline.publish("in", sent[-1][1])
        if number % 10 == 5:
            for process in check_processes(served.consumer.pid):
                os.kill(process.pid, signal.SIGKILL)
                killed += 1
    assert killed
    ids = [request.request_id for _, request in sent]
    found = replies.wait(ids, 120)
    for number, request in sent:
        reply = found[request.request_id]
        allowed: set[tuple[str, str | None]] = {(Outcome.REJECTED, Code.GUARDRAIL_UNAVAILABLE)}
        allowed.add((Outcome.REJECTED, Code.GUARDRAIL_BLOCKED) if number % 2 else (Outcome.OK, None))
        assert (reply.outcome, reply.code) in allowed
    replies.read_to_end()
    assert replies.exactly_once(ids).keys() == set(ids)
    with pytest.raises(openai.BadRequestError):
        ask(served, "in", f"use {KEY}")


def test_a_consumer_that_is_killed_or_drained_with_work_in_checks_answers_each_once(served: Served) -> None:
    pipeline = served.pipeline
    replies = pipeline.replies("in", "out", from_beginning=False)
    ids: list[str] = []
    for end in (served.consumer.kill, served.consumer.stop):
        for number in range(60):
            request = pipeline.request(prompt=f"question {number}", timeout_ms=LONG_MS)
            pipeline.publish("in" if number % 2 else "out", request)
            ids.append(request.request_id)
        end()
        served.run_all()
    found = replies.wait(ids, 120)
    assert {reply.outcome for reply in found.values()} == {Outcome.OK}
    assert all(reply.guardrails for reply in found.values())
    replies.read_to_end()
    assert replies.exactly_once(ids).keys() == set(ids)


def check_processes(pid: int) -> list[psutil.Process]:
    """Those that run; one that was just killed may still be listed."""
    found = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.NoSuchProcess):
            if "inference_consumers.guardrails.process" in child.cmdline():
                found.append(child)
    return found


def test_a_tenant_whose_check_cannot_be_made_is_told_when_to_come_back(served: Served) -> None:
    pipeline = served.pipeline
    policy = GuardrailPolicy(input=(GuardrailRule("prompt_injection", "block", "closed"),))
    name = pipeline.tenant("free")
    before = pipeline.tenants[name]
    pipeline.tenants[name] = TenantSpec(name, guardrails=policy)
    try:
        pipeline.apply()
        fields: Any = {"model": pipeline.model_for("generate"), "prompt": "hello", "timeout_ms": LONG_MS}
        with Client(name, pipeline.settings.kafka_bootstrap_servers) as client:

            def is_refused() -> bool:
                return client.submit(**fields).reply(60).code == Code.GUARDRAIL_UNAVAILABLE

            eventually(is_refused, what="the new policy")
            with pytest.raises(Rejected) as caught:
                client.submit(**fields).result(60)
        assert caught.value.retry_after_ms
    finally:
        pipeline.tenants[name] = before
        pipeline.apply()

"""Answers whose policy has them changed after their checks, or withheld because of their format."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane import names
from fairlane.guardrail_records import GuardrailPolicy, GuardrailRule, PostProcessing
from fairlane.outcomes import Code, Decision, FinishReason, GuardrailFailure, GuardrailStage, Outcome
from fairlane.records import InferenceReply, Output, Parameters, TokenLogprob, TokenUsage
from fairlane_server.caching.responses import answer_of
from inference_consumers.batching.received_work import ReceivedWork
from inference_consumers.engines.protocol import CancelledItem, Success
from inference_consumers.guardrails.check import CheckContext, Finding, Processed
from inference_consumers.guardrails.decision import CheckFailure
from inference_consumers.guardrails.examination import CheckCall, Examination
from tests.kit.driver_bench import DriverBench, named, streaming
from tests.kit.scripted_checks import ScriptedChecks

USED = TokenUsage(7, 3)
SCHEMA = '{"type":"object","properties":{"name":{"type":"string"}},"required":["name"],"additionalProperties":false}'
AS_JSON = PostProcessing(json_schema=SCHEMA)
REDACT = GuardrailRule("pii", "redact", "closed")
BLOCK = GuardrailRule("secrets", "block", "closed")
SENTENCE = "This is the sentence that comes twice. "


def asked(wanted: PostProcessing, *rules: GuardrailRule, name: str = "a") -> ReceivedWork:
    made = named(name)
    return replace(made, item=replace(made.item, guardrails=GuardrailPolicy(output=rules, post_processing=wanted)))


def said(text: str) -> Success:
    return Success(Output(text=text), USED, FinishReason.STOP)


def answered(work: ReceivedWork, text: str) -> tuple[Any, DriverBench, ScriptedChecks]:
    """The reply to work that the engine answers with this text."""
    checks = ScriptedChecks(at_once=True)
    bench = DriverBench(checks=checks)
    bench.receive(work)
    bench.run_all(said(text))
    (reply,) = bench.replies
    return reply, bench, checks


def verdicts(reply: InferenceReply) -> list[str]:
    return list(map(str, reply.guardrails))


def bytes_written(bench: DriverBench) -> bytes:
    return b"".join(output.value for settled in bench.transactions.settlements for output in settled.outputs)


def test_an_answer_is_changed_after_its_checks_and_that_is_noted() -> None:
    reply, bench, checks = answered(
        asked(PostProcessing(deduplicate=True, trim=True), REDACT), f" {SENTENCE * 2}MAIL1 "
    )
    assert (reply.outcome, reply.output.text, reply.usage) == (Outcome.OK, f"{SENTENCE}[pii_type]", USED)
    assert verdicts(reply) == [
        "output pii redacted (pii_type)",
        "output post_processing changed (deduplicated, trimmed)",
    ]
    assert [call.check for call, _ in checks.calls] == ["pii", "post_processing", "pii"], "what is delivered is checked"
    (audit,) = bench.written(names.LEDGER_AUDIT)
    assert (audit.decision, audit.code, audit.message) == (Decision.GUARDED, None, "; ".join(verdicts(reply)))


def test_an_answer_that_needs_nothing_passes() -> None:
    reply, bench, checks = answered(asked(AS_JSON, REDACT), '{"name": "x"}')
    assert (reply.output.text, verdicts(reply)) == (
        '{"name": "x"}',
        ["output pii passed", "output post_processing passed"],
    )
    assert bench.written(names.LEDGER_AUDIT) == []
    assert len(checks.calls) == 2


def test_json_is_repaired_with_what_was_redacted_in_it() -> None:
    reply, _, _ = answered(asked(AS_JSON, REDACT), "Sure:\n```json\n{'name': 'MAIL1',}\n```")
    assert reply.output.text == '{"name": "[pii_type]"}'
    assert verdicts(reply)[-1] == "output post_processing changed (json_repaired)"


def test_an_answer_in_another_format_is_withheld_as_a_blocked_one_is() -> None:
    reply, bench, _ = answered(asked(AS_JSON), '{"name": "planted", "planted": 1}')
    assert (reply.outcome, reply.code, reply.output) == (Outcome.FAILED, Code.FORMAT_NOT_MET, None)
    assert (reply.finish_reason, reply.usage, reply.retry_after_ms) == (FinishReason.CONTENT_FILTER, USED, None)
    assert reply.message == (
        "the answer is not in the format of the tenant's policy: the schema's additionalProperties is not satisfied"
    )
    assert verdicts(reply) == ["output post_processing blocked (json_schema)"]
    (usage,) = bench.written(names.LEDGER_USAGE)
    assert (usage.outcome, usage.code, usage.completion_tokens) == ("failed", reply.code, 3)
    (audit,) = bench.written(names.LEDGER_AUDIT)
    assert (audit.code, audit.message) == (Code.FORMAT_NOT_MET, "output post_processing blocked (json_schema)")
    assert b"planted" not in bytes_written(bench)


def test_a_blocked_answer_is_not_processed() -> None:
    reply, _, checks = answered(asked(AS_JSON, BLOCK), '{"name": "KEY1"}')
    assert reply.code == Code.GUARDRAIL_BLOCKED
    assert [call.check for call, _ in checks.calls] == ["secrets"]


@pytest.mark.parametrize("rule", [BLOCK, replace(BLOCK, action="redact"), replace(BLOCK, action="log")])
def test_what_a_repair_writes_out_is_looked_at_once_more(rule: GuardrailRule) -> None:
    reply, bench, _ = answered(asked(AS_JSON, rule), '{"name": "\\u004bEY1",}')
    if rule.action == "log":
        assert (reply.outcome, reply.output.text) == (Outcome.OK, '{"name": "KEY1"}'), "it changes nothing"
        return
    assert (reply.outcome, reply.code) == (Outcome.FAILED, Code.GUARDRAIL_BLOCKED)
    assert verdicts(reply) == [
        "output secrets passed",
        "output post_processing changed (json_repaired)",
        "output secrets blocked (secrets_type)",
    ]
    assert b"KEY1" not in bytes_written(bench)


def test_what_a_rule_wrote_into_an_answer_is_not_found_again() -> None:
    policy = GuardrailPolicy(output=(REDACT,), post_processing=AS_JSON)

    def looked_at(*found: Finding) -> Examination:
        examination = Examination.of_answer(policy, '{"name": "Ann Lee",}', "")
        examination.answered([[Finding("PERSON", 10, 17, 1.0)]])
        processed = Processed('{"name": "[PERSON]"}', ("json_repaired",), is_put_together=True)
        examination.answered([processed])
        assert examination.call() == CheckCall("pii", CheckContext(), ('{"name": "[PERSON]"}',))
        examination.answered([list(found)])
        assert examination.call() is None
        return examination

    assert looked_at(Finding("PERSON", 11, 17, 1.0), Finding("PERSON", 10, 18, 1.0)).refusal is None
    assert looked_at(Finding("PERSON", 11, 19, 1.0)).refusal == Code.GUARDRAIL_BLOCKED
    assert looked_at(Finding("PERSON", 2, 6, 1.0)).refusal == Code.GUARDRAIL_BLOCKED


@pytest.mark.parametrize("reason", ["died", "timeout", "unavailable"])
@pytest.mark.parametrize("on_failure", list(GuardrailFailure))
def test_post_processing_that_is_not_made_closes_or_opens_as_the_policy_says(on_failure: str, reason: str) -> None:
    checks = ScriptedChecks()
    bench = DriverBench(checks=checks)
    bench.receive(asked(replace(AS_JSON, on_failure=on_failure)))
    bench.run_all(said("no json"))
    checks.fail_next(reason)
    (reply,) = bench.replies
    if on_failure is GuardrailFailure.OPEN:
        assert (reply.outcome, reply.output.text) == (Outcome.OK, "no json")
        assert verdicts(reply) == ["output post_processing failed_open"]
    else:
        assert (reply.outcome, reply.code, reply.output) == (Outcome.FAILED, Code.GUARDRAIL_UNAVAILABLE, None)
        assert reply.message == "the check post_processing of the output could not be made"
        assert reply.retry_after_ms is not None


@pytest.mark.parametrize("answer", [[], [[]], [Processed("a"), Processed("b")]])
def test_an_answer_of_another_shape_is_a_failure(answer: Any) -> None:
    examination = Examination.of_answer(GuardrailPolicy(post_processing=AS_JSON), "no json", "")
    examination.answered(answer)
    assert examination.refusal == Code.GUARDRAIL_UNAVAILABLE
    of_a_check = Examination.of(GuardrailStage.OUTPUT, GuardrailPolicy(output=(BLOCK,)), ("a",))
    of_a_check.answered([Processed("a")])
    assert of_a_check.refusal == Code.GUARDRAIL_UNAVAILABLE


def test_log_probabilities_of_a_changed_answer_are_left_out() -> None:
    bench = DriverBench(checks=ScriptedChecks(at_once=True))
    bench.receive(asked(PostProcessing(trim=True)))
    bench.run_all(Success(Output(text=" a", logprobs=(TokenLogprob(" a", -0.5),)), USED))
    (reply,) = bench.replies
    assert (reply.output.text, reply.output.logprobs) == ("a", None)


def test_answers_without_text_go_as_they_are() -> None:
    bench = DriverBench(checks=ScriptedChecks(refusal=CheckFailure("busy")))
    bench.receive(asked(AS_JSON))
    bench.run_all(Success(Output(embeddings=((1.0,),)), USED))
    (reply,) = bench.replies
    assert (reply.outcome, reply.guardrails) == (Outcome.OK, ())


def test_what_is_cached_is_what_was_delivered_under_the_policy() -> None:
    work = asked(AS_JSON)
    request = replace(work.item.request, parameters=Parameters(temperature=0.0))
    work = replace(work, item=replace(work.item, request=request))
    reply, _, _ = answered(work, "{'name': 'x'}")
    kept = answer_of(work.item, reply)
    assert kept is not None
    key, answer = kept
    assert (answer.output.text, answer.guardrails) == ('{"name": "x"}', reply.guardrails)
    other = replace(work.item, guardrails=GuardrailPolicy(post_processing=replace(AS_JSON, trim=True)))
    assert (answer_of(other, reply) or kept)[0] != key
    unprocessed = replace(reply, guardrails=(replace(reply.guardrails[0], verdict="failed_open"),))
    assert answer_of(work.item, unprocessed) is None


# Streams


def test_a_stream_is_released_at_its_end_in_one_piece() -> None:
    checks = ScriptedChecks()
    bench = DriverBench(checks=checks, hold_back=0)
    bench.receive(streaming(asked(AS_JSON, REDACT)))
    bench.start()
    text = "{'name': 'MAIL1'}" + " " * 5_000
    for start in range(0, len(text), 100):
        bench.tell({}, [(0, text[start : start + 100])])
    assert (bench.chunks.written, checks.calls) == ([], [])
    bench.tell({0: said(text)})
    checks.answer_all()
    (reply,) = bench.replies
    assert reply.output.text == '{"name": "[pii_type]"}'
    written = [(one.text, one.number, one.last) for one in bench.chunks.written]
    assert written == [(reply.output.text, 0, False), ("", 1, True)]
    bench.end()
    assert bench.driver.is_at_rest


@pytest.mark.parametrize("outcome", [said("no json"), CancelledItem(USED)])
def test_of_a_stream_that_is_withheld_or_cancelled_nothing_is_released(outcome: Success | CancelledItem) -> None:
    bench = DriverBench(checks=ScriptedChecks(at_once=True))
    bench.receive(streaming(asked(AS_JSON)))
    bench.start()
    bench.tell({}, [(0, "no json")])
    bench.tell({0: outcome})
    bench.end()
    (reply,) = bench.replies
    assert reply.outcome == (Outcome.FAILED if isinstance(outcome, Success) else Outcome.CANCELLED)
    assert bench.chunks.written == []
    assert bench.driver.is_at_rest


def test_a_stream_whose_engine_dies_is_answered_by_the_next_run() -> None:
    bench = DriverBench(checks=ScriptedChecks(at_once=True))
    bench.receive(streaming(asked(PostProcessing(trim=True))))
    bench.start()
    bench.tell({}, [(0, "half an ans")])
    bench.die()
    bench.load()
    bench.start()
    bench.tell({0: said(" whole ")}, [(0, " whole ")])
    (reply,) = bench.replies
    assert [(one.text, one.number) for one in bench.chunks.written] == [("whole", 0), ("", 1)]
    assert reply.output.text == "whole"


@given(st.lists(st.sampled_from((SENTENCE, "MAIL1 ", "word ", "\n\n\n\n", " ")), max_size=30), st.booleans())
def test_what_is_streamed_is_what_the_reply_says(words: list[str], deduplicate: bool) -> None:
    text = "".join(words)
    bench = DriverBench(checks=ScriptedChecks(at_once=True), hold_back=5)
    bench.receive(streaming(asked(PostProcessing(deduplicate=deduplicate, trim=True), REDACT)))
    bench.start()
    for word in words:
        bench.tell({}, [(0, word)])
    bench.tell({0: said(text)})
    (reply,) = bench.replies
    assert "".join(one.text for one in bench.chunks.written) == reply.output.text
    assert "MAIL1" not in reply.output.text

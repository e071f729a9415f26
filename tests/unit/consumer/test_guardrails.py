"""What becomes of work whose input or answer is checked, with checks that answer when the test says so."""

import sys
from collections.abc import Callable
from dataclasses import fields, replace
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane import names
from fairlane.guardrail_records import GuardrailPolicy, GuardrailRule, GuardrailVerdict
from fairlane.outcomes import Code, Decision, FinishReason, GuardrailAction, GuardrailFailure, Outcome
from fairlane.records import (
    InferenceReply,
    Message,
    Output,
    Passage,
    RequestInput,
    TokenLogprob,
    TokenUsage,
    WorkItem,
)
from inference_consumers.batching.received_work import ReceivedWork
from inference_consumers.consumer import Prefetch
from inference_consumers.engines.protocol import CancelledItem, Failure, Success
from inference_consumers.guardrails.decision import CheckFailure
from tests.kit.cpu_time import cpu_time
from tests.kit.driver_bench import OK, DriverBench, named, streaming
from tests.kit.scripted_checks import ScriptedChecks
from tests.unit.consumer.test_consumer_prefetch import consumer_of, full_after

USED = TokenUsage(7, 3)


def rule(check: str, action: str, on_failure: str = "closed") -> GuardrailRule:
    return GuardrailRule(check, action, on_failure)


BLOCK_KEYS = GuardrailPolicy(input=(rule("secrets", "block"),))
REDACT_MAIL = GuardrailPolicy(input=(rule("pii", "redact"),))
CHECK_ANSWERS = GuardrailPolicy(output=(rule("pii", "redact"), rule("toxicity", "block")))


def guarded(name: str, policy: GuardrailPolicy, prompt: str = "hello", **fields: Any) -> ReceivedWork:
    """Work with this policy; ``fields`` of its item."""
    made = named(name)
    request = replace(made.item.request, input=RequestInput(prompt=prompt), **fields.pop("request", {}))
    return replace(made, item=replace(made.item, request=request, guardrails=policy, **fields))


def said(text: str) -> Success:
    return Success(Output(text=text), USED, FinishReason.STOP)


def bench_of(**options: Any) -> tuple[DriverBench, ScriptedChecks]:
    checks = ScriptedChecks()
    return DriverBench(checks=checks, **options), checks


def verdicts(reply: InferenceReply) -> list[str]:
    return list(map(str, reply.guardrails))


def prompts(bench: DriverBench) -> list[str | None]:
    """Prompts that the engine saw."""
    return [item.input.prompt for _, items in bench.host.given for item in items]


# Input


def test_input_waits_for_its_checks_and_runs_when_it_passed() -> None:
    bench, checks = bench_of()
    bench.receive(guarded("a", BLOCK_KEYS), named("b"))
    assert bench.start() == ["b"], "what is not checked does not wait"
    bench.tell({0: OK})
    bench.end()
    assert bench.start() == []
    checks.answer_next()
    assert bench.start() == ["a"]
    bench.tell({0: said("fine")})
    replies = {reply.request_id: reply for reply in bench.replies}
    assert (replies["a"].outcome, verdicts(replies["a"])) == (Outcome.OK, ["input secrets passed"])
    assert replies["b"].guardrails == ()
    assert bench.written(names.LEDGER_AUDIT) == []


def test_blocked_input_is_refused_and_no_engine_sees_it() -> None:
    bench, checks = bench_of()
    bench.receive(guarded("a", BLOCK_KEYS, "my KEY123"))
    checks.answer_all()
    assert bench.start() == []
    (reply,) = bench.replies
    assert (reply.outcome, reply.code, reply.output) == (Outcome.REJECTED, Code.GUARDRAIL_BLOCKED, None)
    assert (reply.retry_after_ms, reply.usage, reply.finish_reason) == (None, TokenUsage(), None)
    assert reply.message == "the check secrets of the input blocked the request: secrets_type"
    assert reply.guardrails == (GuardrailVerdict("input", "secrets", "blocked", ("secrets_type",)),)
    (usage,) = bench.written(names.LEDGER_USAGE)
    assert (usage.outcome, usage.code, usage.prompt_tokens, usage.batch_size) == ("rejected", reply.code, 0, 0)
    (audit,) = bench.written(names.LEDGER_AUDIT)
    assert (audit.decision, audit.code) == (Decision.GUARDED, Code.GUARDRAIL_BLOCKED)
    assert audit.message == "input secrets blocked (secrets_type)"
    written = b"".join(output.value for settled in bench.transactions.settlements for output in settled.outputs)
    assert b"KEY123" not in written


def test_a_later_rule_sees_what_the_one_before_left_and_the_engine_sees_that() -> None:
    policy = GuardrailPolicy(input=(rule("pii", "redact"), rule("secrets", "block"), rule("patterns", "log", "open")))
    bench, checks = bench_of()
    bench.receive(guarded("a", policy, "MAILKEY and WORD"))
    assert checks.answer_next().texts == ("MAILKEY and WORD",)
    assert checks.answer_next().texts == ("[pii_type] and WORD",)
    assert checks.answer_next().texts == ("[pii_type] and WORD",)
    bench.run_all(said("ok"))
    assert prompts(bench) == ["[pii_type] and WORD"]
    (reply,) = bench.replies
    assert verdicts(reply) == [
        "input pii redacted (pii_type)",
        "input secrets passed",
        "input patterns logged (patterns_type)",
    ]
    (audit,) = bench.written(names.LEDGER_AUDIT)
    assert (audit.code, audit.message) == (None, "; ".join(verdicts(reply)))


def test_every_text_of_a_request_is_checked_and_rewritten() -> None:
    parts: dict[str, Any] = {
        "messages": (Message("system", "MAIL1"), Message("user", "MAIL2")),
        "texts": ("MAIL3", "-"),
        "query": "MAIL4",
        "documents": ("MAIL5",),
    }
    bench, checks = bench_of()
    work = guarded(
        "a",
        REDACT_MAIL,
        request={"metadata": {"MAIL6": "MAIL7"}},
        passages=(Passage("p", "MAIL8", 0.5),),
        history=(Message("user", "MAIL9"), Message("assistant", "-")),
    )
    request = replace(
        work.item.request,
        input=RequestInput(**parts),
        parameters=replace(work.item.request.parameters, stop=("MAIL0",)),
    )
    work = replace(work, item=replace(work.item, request=request))
    bench.receive(work)
    call = checks.answer_next()
    assert sorted(call.texts) == sorted(["-", "-", *(f"MAIL{number}" for number in range(10))])
    assert bench.start() == ["a"]
    (item,) = bench.host.given[0][1]
    assert "MAIL" not in repr(item)
    assert [message.content for message in item.input.messages or ()] == ["[pii_type]", "[pii_type]"]
    assert [message.role for message in item.input.messages or ()] == ["system", "user"]


def test_no_text_of_a_work_item_is_left_out() -> None:
    """A text field that is added to a request must be checked too: every string of an item is text or named here."""
    not_text = {"request_id", "model", "task", "priority", "tenant", "reply_to", "conversation_id", "group"}
    not_text |= {"replay_of", "cache", "conversation_after", "requested_by"}
    strings = {
        name
        for name, kind in WorkItem.__dataclass_fields__["request"].type.__annotations__.items()
        if "str" in str(kind)
    }
    assert strings - not_text == {"metadata"}
    assert {name for name, kind in RequestInput.__annotations__.items() if "str" in str(kind)} == {
        *("prompt", "texts", "query", "documents")
    }


def test_what_is_kept_of_a_conversation_is_what_the_model_saw() -> None:
    bench, checks = bench_of()
    bench.receive(guarded("a", REDACT_MAIL, "write to MAIL1", request={"conversation_id": "c"}))
    checks.answer_all()
    bench.run_all(said("done"))
    (reply,) = bench.replies
    assert reply.turn.messages == (Message("user", "write to [pii_type]"),)


def test_work_that_is_handed_back_goes_as_it_came_and_is_checked_again() -> None:
    bench, checks = bench_of()
    work = guarded("a", REDACT_MAIL, "write to MAIL1")
    bench.receive(work)
    checks.answer_all()
    bench.run_all(Failure(Code.OVERLOADED, "no memory"))
    (returned,) = bench.written(names.returned_topic("gpu"))
    assert returned == replace(work.item, handed_back=1)
    assert bench.replies == []


@pytest.mark.parametrize("reason", ["died", "timeout", "unavailable"])
@pytest.mark.parametrize("action", [GuardrailAction.LOG, GuardrailAction.REDACT, GuardrailAction.BLOCK])
def test_a_check_that_is_not_made_closes_or_opens_as_the_policy_says(action: str, reason: str) -> None:
    for on_failure in GuardrailFailure:
        bench, checks = bench_of()
        bench.receive(guarded("a", GuardrailPolicy(input=(rule("pii", action, on_failure),)), "MAIL"))
        checks.fail_next(reason)
        bench.run_all(said("ok"))
        (reply,) = bench.replies
        if on_failure is GuardrailFailure.OPEN:
            assert (reply.outcome, verdicts(reply)) == (Outcome.OK, ["input pii failed_open"])
            assert prompts(bench) == ["MAIL"]
        else:
            assert (reply.outcome, reply.code) == (Outcome.REJECTED, Code.GUARDRAIL_UNAVAILABLE)
            assert (verdicts(reply), prompts(bench)) == (["input pii failed_closed"], [])
            assert reply.message == "the check pii of the input could not be made"
            assert 5_000 <= reply.retry_after_ms <= 7_500


def test_checks_that_take_nothing_are_failed_checks() -> None:
    checks = ScriptedChecks(refusal=CheckFailure("busy"))
    bench = DriverBench(checks=checks)
    bench.receive(guarded("a", BLOCK_KEYS), guarded("b", replace(BLOCK_KEYS, input=(rule("secrets", "log", "open"),))))
    bench.run_all(said("ok"))
    outcomes = {reply.request_id: (reply.outcome, reply.code) for reply in bench.replies}
    assert outcomes == {"a": (Outcome.REJECTED, Code.GUARDRAIL_UNAVAILABLE), "b": (Outcome.OK, None)}


def test_a_consumer_without_checks_refuses_what_is_to_be_checked() -> None:
    bench = DriverBench()
    bench.receive(guarded("a", BLOCK_KEYS))
    assert [reply.code for reply in bench.replies] == [Code.GUARDRAIL_UNAVAILABLE]


def test_an_answer_of_another_shape_is_a_failed_check() -> None:
    bench, checks = bench_of()
    bench.receive(guarded("a", BLOCK_KEYS))
    checks.waiting.pop()[1]([[], []])
    assert [reply.code for reply in bench.replies] == [Code.GUARDRAIL_UNAVAILABLE]


def test_work_that_expires_in_a_check_gets_one_reply() -> None:
    bench, checks = bench_of()
    work = guarded("a", BLOCK_KEYS, deadline_at_ms=2_000)
    bench.receive(work)
    assert 1_000 < checks.calls[0][1] < 1_500, "the time that is left, and a little more"
    consumer = consumer_of(bench, Prefetch(10, 1_000))
    bench.now_ms = 3_000
    checks.fail_next("timeout")
    assert bench.replies == [], "the check did not fail: there was no time for it"
    consumer.watch()
    assert [reply.outcome for reply in bench.replies] == [Outcome.EXPIRED]
    assert bench.start() == []
    assert len(bench.replies) == 1


def test_work_that_is_cancelled_in_a_check_gets_one_reply() -> None:
    bench, checks = bench_of()
    consumer = consumer_of(bench, Prefetch(10, 1_000))
    bench.receive(guarded("a", BLOCK_KEYS), guarded("b", BLOCK_KEYS))
    bench.driver.cancellations.add("acme", "a", bench.now_ms)
    consumer.cancel("acme", "a")
    assert [(reply.request_id, reply.outcome) for reply in bench.replies] == [("a", Outcome.CANCELLED)]
    # This one's cancel is known before anybody asked to drop it.
    bench.driver.cancellations.add("acme", "b", bench.now_ms)
    checks.answer_all()
    assert bench.start() == []
    assert [reply.request_id for reply in bench.replies] == ["a", "b"]


def test_work_of_a_partition_that_moved_on_is_left_to_its_new_owner() -> None:
    bench, checks = bench_of()
    consumer = consumer_of(bench, Prefetch(10, 1_000))
    dropped, passed = guarded("a", BLOCK_KEYS), guarded("b", BLOCK_KEYS)
    bench.receive(dropped)
    consumer.on_revoked()
    assert bench.driver.is_done, "an unknown partition is nobody's"
    bench.receive(passed)
    bench.revoked.add(passed.claim)
    checks.answer_all()
    assert (bench.start(), bench.replies, bench.driver.is_done) == ([], [], True)


def test_what_is_being_checked_counts_as_fetched_and_held() -> None:
    bench, checks = bench_of()
    consumer = consumer_of(bench, Prefetch(2, 1 << 20))
    bench.receive(guarded("a", BLOCK_KEYS), guarded("b", BLOCK_KEYS))
    assert full_after(bench, consumer) == {"normal"}
    assert (consumer.reading().held_items, consumer.reading().held_tokens) == (2, 20)
    assert not bench.driver.is_done
    assert bench.driver.is_at_rest, "it stays undone in the log"
    bench.driver.end_checks()
    checks.answer_all()
    assert (bench.replies, bench.start()) == ([], [])


# Answers


def test_an_answer_is_checked_before_it_is_settled() -> None:
    bench, checks = bench_of()
    bench.receive(guarded("a", CHECK_ANSWERS))
    assert bench.start() == ["a"], "its input is not checked"
    bench.tell({0: said("write to MAIL1")})
    bench.end()
    assert bench.replies == []
    assert not bench.driver.is_at_rest
    checks.answer_all()
    (reply,) = bench.replies
    assert (reply.outcome, reply.output.text, reply.finish_reason) == (Outcome.OK, "write to [pii_type]", "stop")
    assert verdicts(reply) == ["output pii redacted (pii_type)", "output toxicity passed"]
    assert bench.driver.is_at_rest


def test_a_blocked_answer_is_withheld_and_what_it_cost_is_reported() -> None:
    bench, checks = bench_of()
    bench.receive(guarded("a", CHECK_ANSWERS))
    bench.run_all(said("VILE"))
    checks.answer_all()
    (reply,) = bench.replies
    assert (reply.outcome, reply.code, reply.output) == (Outcome.FAILED, Code.GUARDRAIL_BLOCKED, None)
    assert (reply.finish_reason, reply.usage, reply.retry_after_ms) == (FinishReason.CONTENT_FILTER, USED, None)
    assert reply.message == "the check toxicity of the output blocked the request: toxicity_type"
    (usage,) = bench.written(names.LEDGER_USAGE)
    assert (usage.outcome, usage.code, usage.completion_tokens) == ("failed", reply.code, 3)
    written = b"".join(output.value for settled in bench.transactions.settlements for output in settled.outputs)
    assert b"VILE" not in written


def test_log_probabilities_of_an_answer_that_was_redacted_are_left_out() -> None:
    bench, checks = bench_of()
    bench.receive(guarded("a", CHECK_ANSWERS), guarded("b", CHECK_ANSWERS))
    bench.start()
    spelled = (TokenLogprob("MAIL", -0.5), TokenLogprob("1", -0.5))
    answers = {index: Success(Output(text=text, logprobs=spelled), USED) for index, text in ((0, "MAIL1"), (1, "none"))}
    bench.tell(dict(answers))
    checks.answer_all()
    by_text = {reply.output.text: reply.output.logprobs for reply in bench.replies}
    assert by_text == {"[pii_type]": None, "none": spelled}


def test_vectors_and_failures_have_no_answer_to_check() -> None:
    bench, checks = bench_of()
    bench.receive(guarded("a", CHECK_ANSWERS), guarded("b", CHECK_ANSWERS))
    bench.start()
    bench.tell({0: Success(Output(embeddings=((1.0,),)), USED), 1: Failure(Code.ENGINE_ERROR, "broken")})
    assert checks.calls == []
    assert sorted(reply.outcome for reply in bench.replies) == [Outcome.FAILED, Outcome.OK]


def test_answers_in_checks_hold_back_new_runs() -> None:
    bench, checks = bench_of(max_items=1)
    bench.receive(*(guarded(str(number), CHECK_ANSWERS) for number in range(9)))
    for _ in range(5):
        assert bench.start()
        bench.tell({0: said("ok")})
        bench.end()
    assert bench.start() == []
    checks.answer_all()
    assert bench.start()


def test_both_stages_of_a_policy_are_in_the_reply_in_order() -> None:
    policy = replace(CHECK_ANSWERS, input=BLOCK_KEYS.input)
    bench = DriverBench(checks=ScriptedChecks(at_once=True))
    bench.receive(guarded("a", policy))
    bench.run_all(said("ok"))
    (reply,) = bench.replies
    assert verdicts(reply) == ["input secrets passed", "output pii passed", "output toxicity passed"]


# Streams


def released(bench: DriverBench) -> str:
    return "".join(one.text for one in bench.chunks.written)


def numbers(bench: DriverBench) -> list[tuple[int, bool]]:
    return [(one.number, one.last) for one in bench.chunks.written]


def test_a_stream_is_released_as_far_as_it_is_checked() -> None:
    bench, checks = bench_of(hold_back=20)
    bench.receive(streaming(guarded("a", CHECK_ANSWERS)))
    bench.start()
    bench.tell({}, [(0, "x" * 90)])
    assert bench.chunks.written == []
    bench.tell({}, [(0, "y" * 90)])
    assert len(checks.waiting) == 1, "one window at a time"
    checks.answer_next()
    checks.answer_next()
    assert released(bench) == "x" * 70
    checks.answer_all()
    assert released(bench) == "x" * 90 + "y" * 70
    bench.tell({0: said("x" * 90 + "y" * 90)})
    checks.answer_all()
    assert released(bench) == "x" * 90 + "y" * 90
    assert numbers(bench) == [(0, False), (1, False), (2, False), (3, True)]
    assert bench.replies[0].output.text == released(bench)


def test_what_is_still_being_written_is_found_before_its_beginning_is_out() -> None:
    bench, checks = bench_of(hold_back=5)
    bench.receive(streaming(guarded("a", CHECK_ANSWERS)))
    bench.start()
    text = "z" * 75 + " MAILaddress " + "z" * 70
    for letter in text:
        bench.tell({}, [(0, letter)])
        checks.answer_all()
    bench.tell({0: said(text)})
    checks.answer_all()
    assert released(bench) == text.replace("MAILaddress", "[pii_type]") == bench.replies[0].output.text


def test_a_long_finding_is_held_whole_and_not_looked_at_for_each_letter() -> None:
    bench, checks = bench_of(hold_back=10)
    bench.receive(streaming(guarded("a", CHECK_ANSWERS)))
    bench.start()
    text = "z" * 80 + " MAIL" + "m" * 2_000
    for letter in text:
        bench.tell({}, [(0, letter)])
        checks.answer_all()
    assert released(bench) == "z" * 80 + " "
    assert len(checks.calls) < 100
    bench.tell({0: said(text)})
    checks.answer_all()
    assert released(bench) == "z" * 80 + " [pii_type]"


def test_a_blocked_stream_ends_and_its_run_is_stopped() -> None:
    bench, checks = bench_of(hold_back=10)
    bench.receive(streaming(guarded("a", CHECK_ANSWERS)), named("b"))
    ids = bench.start()
    index = ids.index("a")
    bench.tell({}, [(index, "good " * 20)])
    checks.answer_all()
    assert released(bench) == ("good " * 20)[:-10]
    bench.tell({}, [(index, "and VILE " + "more " * 20)])
    checks.answer_all()
    assert bench.host.cancelled == [(bench.run_id, (index,))]
    assert "VILE" not in released(bench)
    assert [reply.request_id for reply in bench.replies] == [], "until the engine says what it cost"
    bench.tell({index: CancelledItem(USED), 1 - index: OK})
    replies = {reply.request_id: reply for reply in bench.replies}
    assert (replies["a"].outcome, replies["a"].code) == (Outcome.FAILED, Code.GUARDRAIL_BLOCKED)
    assert (replies["a"].usage, replies["a"].output) == (USED, None)
    assert verdicts(replies["a"])[-1] == "output toxicity blocked (toxicity_type)"
    assert numbers(bench) == [(0, False), (1, True)]
    assert replies["b"].outcome == Outcome.OK


@pytest.mark.parametrize("end", ["died", "failed"])
def test_a_refused_stream_does_not_run_again_when_its_engine_dies(end: str) -> None:
    bench, checks = bench_of(hold_back=10)
    bench.receive(streaming(guarded("a", CHECK_ANSWERS)), streaming(guarded("b", CHECK_ANSWERS)))
    ids = bench.start()
    bench.tell({}, [(ids.index("a"), "VILE " + "x" * 100), (ids.index("b"), "fine " * 30)])
    checks.answer_all()
    if end == "died":
        bench.die()
        bench.load()
    else:
        bench.end()
    assert [(reply.request_id, reply.code) for reply in bench.replies] == [("a", Code.GUARDRAIL_BLOCKED)]
    assert bench.start() == ["b"]
    bench.tell({0: said("fine again")}, [(0, "fine again")])
    checks.answer_all()
    assert [reply.request_id for reply in bench.replies] == ["a", "b"]
    assert bench.replies[1].output.text == "fine again"
    again = [(one.text, one.number) for one in bench.chunks.written if one.work.runs == 2]
    assert again == [("fine again", 0), ("", 1)], "numbered from the start"


def test_the_answer_follows_the_window_that_is_being_checked() -> None:
    bench, checks = bench_of(hold_back=0)
    bench.receive(streaming(guarded("a", CHECK_ANSWERS)))
    bench.start()
    bench.tell({}, [(0, "x" * 70)])
    bench.tell({0: said("x" * 70 + "MAIL")}, [(0, "MAIL")])
    assert len(checks.waiting) == 1
    checks.answer_all()
    assert released(bench) == "x" * 70 + "[pii_type]"
    assert numbers(bench)[-1] == (2, True)
    assert len(bench.replies) == 1


def test_a_stream_whose_check_fails_is_closed() -> None:
    bench, checks = bench_of(hold_back=0)
    bench.receive(streaming(guarded("a", CHECK_ANSWERS)))
    bench.start()
    bench.tell({}, [(0, "x" * 70)])
    checks.fail_next()
    bench.tell({0: CancelledItem(USED)})
    (reply,) = bench.replies
    assert (reply.outcome, reply.code, reply.finish_reason) == (Outcome.FAILED, Code.GUARDRAIL_UNAVAILABLE, None)
    assert reply.retry_after_ms is not None
    assert released(bench) == ""


def test_a_stream_that_is_cancelled_ends() -> None:
    bench, checks = bench_of(hold_back=0)
    bench.receive(streaming(guarded("a", CHECK_ANSWERS)))
    bench.start()
    bench.tell({}, [(0, "x" * 70)])
    checks.answer_all()
    bench.tell({0: CancelledItem(USED)})
    bench.end()
    assert [reply.outcome for reply in bench.replies] == [Outcome.CANCELLED]
    assert numbers(bench) == [(0, False), (1, True)]
    assert bench.driver.is_at_rest


@given(
    st.lists(st.sampled_from(("MAIL1 ", "some text ", "KEY ", "é")), max_size=60),
    st.lists(st.integers(1, 40), max_size=30),
    st.integers(0, 30),
)
def test_released_text_is_the_answer(words: list[str], cuts: list[int], hold_back: int) -> None:
    """However the text is cut, what was streamed is what the reply says, and no address is in it. An address is no
    longer than what is held back."""
    text = "".join(words)
    bench = DriverBench(checks=ScriptedChecks(at_once=True), hold_back=max(hold_back, len("MAIL1")))
    bench.receive(streaming(guarded("a", CHECK_ANSWERS)))
    bench.start()
    rest = text
    for cut in cuts:
        if rest[:cut]:
            bench.tell({}, [(0, rest[:cut])])
        rest = rest[cut:]
    bench.tell({0: said(text)}, [(0, rest)] if rest else [])
    (reply,) = bench.replies
    assert released(bench) == reply.output.text == text.replace("MAIL1", "[pii_type]")
    assert [one.number for one in bench.chunks.written] == list(range(len(bench.chunks.written)))


# A tenant without a policy


LOOKS = [0]


def look(_: object) -> None:
    LOOKS[0] += 1


COUNTED: Any = type("CountedItem", (WorkItem,), {"guardrails": property(look, lambda _, __: None)})
"""A work item that counts the looks at its policy, which is None."""


def counted(name: str) -> ReceivedWork:
    made = streaming(named(name))
    return replace(made, item=COUNTED(**{one.name: getattr(made.item, one.name) for one in fields(made.item)}))


def served_without_a_policy(count: int, make: Callable[[str], ReceivedWork]) -> DriverBench:
    """Items on their whole way, from the log to the reply; half of them are streamed."""
    bench = DriverBench(max_items=count, max_tokens=10**6)
    bench.receive(*(make(str(number)) for number in range(count)))
    ids = bench.start()
    bench.tell(dict.fromkeys(range(len(ids)), OK), [(index, "text") for index in range(0, len(ids), 2)])
    assert len(bench.replies) == len(ids) == count
    return bench


def calls_of_guardrails(count: int) -> int:
    """Calls of functions of the package while so many items without a policy are served."""
    calls = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        calls += event == "call" and "/inference_consumers/guardrails/" in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        served_without_a_policy(count, lambda name: streaming(named(name)))
    finally:
        sys.setprofile(None)
    return calls


def test_no_function_of_the_guardrails_is_called_for_an_item_without_a_policy() -> None:
    """Those that are called look whether there is anything to do, once for a poll or a run."""
    assert calls_of_guardrails(20) == calls_of_guardrails(200) > 0


def test_work_without_a_policy_costs_no_more_than_comparisons_with_none() -> None:
    items = 2_000
    LOOKS[0] = 0
    served_without_a_policy(items, counted)
    looks = LOOKS[0] / items
    assert looks >= 1, "they are counted"
    with cpu_time() as served:
        served_without_a_policy(items, lambda name: streaming(named(name)))
    item = named("a").item
    with cpu_time() as compared:
        for _ in range(100_000):
            _ = item.guardrails is None
    assert looks * compared.spent_s / 100_000 < 0.02 * served.spent_s / items

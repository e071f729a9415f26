"""What rules make of findings and failures, whatever they are."""

from hypothesis import given
from hypothesis import strategies as st

from fairlane.guardrail_records import GuardrailPolicy, GuardrailRule
from fairlane.outcomes import Code, GuardrailAction, GuardrailFailure, GuardrailResult, GuardrailStage
from inference_consumers.guardrails.check import Finding
from inference_consumers.guardrails.decision import MOST_TYPES, CheckFailure, rule_on
from inference_consumers.guardrails.examination import Examination
from inference_consumers.guardrails.rewriting import Rewriting

ACTIONS = [GuardrailAction.LOG, GuardrailAction.REDACT, GuardrailAction.BLOCK]
SECRET = "s3cret"

texts = st.lists(st.text("ab "), min_size=1, max_size=3).map(tuple)
spans = st.builds(
    lambda kind, start, length: Finding(kind, start, start + length, 0.5),
    st.sampled_from(("EMAIL", "KEY")),
    st.integers(-3, 20),
    st.integers(1, 9),
)
rules = st.builds(
    GuardrailRule, st.just("pii"), st.sampled_from(ACTIONS), st.sampled_from([str(one) for one in GuardrailFailure])
)


@given(rules, texts, st.data())
def test_a_rule_passes_redacts_or_blocks(
    rule: GuardrailRule, given_texts: tuple[str, ...], data: st.DataObject
) -> None:
    answer = [data.draw(st.lists(spans, max_size=3)) for _ in given_texts]
    ruling = rule_on("input", rule, tuple(map(Rewriting.of, given_texts)), answer)
    found = {one.type for one_text in answer for one in one_text}
    after = tuple(text.text for text in ruling.texts)
    assert set(ruling.verdict.types) == found
    if not found:
        assert (ruling.verdict.verdict, ruling.refusal, after) == (GuardrailResult.PASSED, None, given_texts)
    elif rule.action == GuardrailAction.LOG:
        assert (ruling.verdict.verdict, ruling.refusal, after) == (GuardrailResult.LOGGED, None, given_texts)
    elif rule.action == GuardrailAction.REDACT:
        assert (ruling.verdict.verdict, ruling.refusal) == (GuardrailResult.REDACTED, None)
    else:
        assert (ruling.verdict.verdict, ruling.refusal) == (GuardrailResult.BLOCKED, Code.GUARDRAIL_BLOCKED)


@given(rules, texts, st.sampled_from([CheckFailure("died"), (), [[]] * 4]))
def test_without_findings_for_every_text_the_check_has_failed(
    rule: GuardrailRule, given_texts: tuple[str, ...], answer: CheckFailure | list[list[Finding]]
) -> None:
    ruling = rule_on("output", rule, tuple(map(Rewriting.of, given_texts)), answer)
    assert tuple(text.text for text in ruling.texts) == given_texts
    if rule.on_failure == GuardrailFailure.OPEN:
        assert (ruling.verdict.verdict, ruling.refusal) == (GuardrailResult.FAILED_OPEN, None)
    else:
        assert ruling.verdict.verdict == GuardrailResult.FAILED_CLOSED
        assert ruling.refusal == Code.GUARDRAIL_UNAVAILABLE


@given(st.lists(rules, max_size=4), st.lists(st.sampled_from(["found", "nothing", "failed"]), min_size=4, max_size=4))
def test_an_examination_asks_its_rules_in_order_until_one_refuses(
    asked_rules: list[GuardrailRule], answers: list[str]
) -> None:
    examination = Examination.of(GuardrailStage.INPUT, GuardrailPolicy(tuple(asked_rules)), (f"my {SECRET}",))
    asked = 0
    while (call := examination.call()) is not None:
        assert examination.refusal is None
        answer = answers[asked]
        at = call.texts[0].find(SECRET)
        findings = [[Finding("KEY", at, at + len(SECRET), 1.0)] if answer == "found" and at >= 0 else []]
        examination.answered(CheckFailure("died") if answer == "failed" else findings)
        asked += 1
    assert len(examination.verdicts) == asked
    assert examination.refusal is not None or asked == len(asked_rules)
    assert all(SECRET not in str(verdict) for verdict in examination.verdicts)


def test_types_in_a_verdict_are_bounded_and_each_is_there_once() -> None:
    answer = [[Finding(f"type{number % 40:02}" + "x" * 99, 0, 1, 1.0) for number in range(99)]]
    ruling = rule_on("input", GuardrailRule("pii", "log", "open"), (Rewriting.of("a"),), answer)
    assert len(ruling.verdict.types) == len(set(ruling.verdict.types)) == MOST_TYPES
    assert max(map(len, ruling.verdict.types)) == 64

"""One example of a run: the requests that it takes, one after another, and the score that their replies make. Pure.

>>> grading = Grading(example, plan, secret="…")
>>> asked = grading.first()
>>> further = grading.replied("answer", reply)
>>> grading.scored
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fairlane.outcomes import Outcome, Task
from fairlane.records import InferenceReply
from fairlane_server.evaluation.evaluation_set import EvaluationExample
from fairlane_server.evaluation.judge import (
    JUDGE,
    MOST_VERDICT_TOKENS,
    NO_VERDICT,
    Rubric,
    comparing_messages,
    grade_of,
    grading_messages,
    pair_verdict,
    question_of,
    score_of_grade,
)
from fairlane_server.evaluation.run import ExampleError, answer_of, request_fields, score_without_answer
from fairlane_server.evaluation.scorers import AnswerScore, ScorerName, score

ANSWER, OTHER, VERDICT, REVERSED = "answer", "other", "verdict", "reversed"
"""The requests of an example: what is measured, the answer that a judge compares it with, and the judge's verdicts on
it alone or first, and second."""


@dataclass(frozen=True, slots=True)
class JudgePlan:
    """A judge and how it is asked.

    Attributes:
        reference: the model that judges, as requests name it.
        against: the reference of a model whose answers those of the run are compared with; None: answers are graded.
        calibration_id: of what says how far its grades can be relied on; None without one.
        version: the version that was calibrated.
        scores: by grade, what an answer with it is worth; empty without a calibration.
    """

    reference: str
    rubric: Rubric
    against: str | None = None
    calibration_id: str | None = None
    version: str | None = None
    scores: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MeasurePlan:
    """What a run asks and how it scores.

    Attributes:
        reference: the model, as requests name it.
        scorer: a ``ScorerName``, or ``JUDGE`` with a ``judge``.
        top: for ndcg, the ranks that count.
        max_tokens: of an answer; None: the service's own.
    """

    reference: str
    scorer: str
    top: int | None = None
    max_tokens: int | None = None
    judge: JudgePlan | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of an example: which one, and its fields for ``Client.submit``."""

    part: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ExampleScore:
    """What is stored of an example: nothing of a text.

    Attributes:
        value, reason: as of an ``AnswerScore``.
        failure: why there is no answer, as code or outcome; None with one.
        model_version: of the answer.
        judged: the verdicts as they were given (``grade``, or ``pair`` and ``follows_order``), with the ``version`` of
            the judge and its tokens.
        prompt_tokens, completion_tokens: of the requests that are measured, without the judge's.
        costs: of all requests, also the judge's, by currency, in billionths of its unit, as far as prices are known.
        is_degraded: the service saved on the answer, since it was under load.
    """

    value: float | None
    reason: str = ""
    failure: str | None = None
    model_version: str | None = None
    judged: Mapping[str, Any] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    costs: Mapping[str, int] = field(default_factory=dict)
    is_degraded: bool = False


def check_example(example: EvaluationExample, plan: MeasurePlan) -> None:
    """Raises ExampleError for an example that makes no request, or that a judge cannot judge."""
    Grading(example, plan, "").first()
    if plan.judge is not None and question_of(example.input) is None:
        raise ExampleError(f"{example.example_id}: input: a judge needs a prompt or messages")


@dataclass(slots=True)
class Grading:
    """State of one example. ``secret`` is unknown to whoever wrote its texts. ``scored`` is None until it is over."""

    example: EvaluationExample
    plan: MeasurePlan
    secret: str
    scored: ExampleScore | None = None
    _texts: dict[str, str] = field(default_factory=dict)
    _verdicts: dict[str, str | None] = field(default_factory=dict)
    _versions: set[str] = field(default_factory=set)
    _model_version: str | None = None
    _tokens: tuple[int, int] = (0, 0)
    _costs: Counter[str] = field(default_factory=Counter)
    _is_degraded: bool = False
    _judge_tokens: tuple[int, int] = (0, 0)

    def first(self) -> Sequence[Asked]:
        """The requests to begin with. Raises ExampleError."""
        references = {ANSWER: self.plan.reference}
        if self.plan.judge is not None and self.plan.judge.against is not None:
            references[OTHER] = self.plan.judge.against
        return [Asked(part, self._fields(reference)) for part, reference in references.items()]

    def replied(self, part: str, reply: InferenceReply) -> Sequence[Asked]:
        """Take a reply. Returns the requests that follow from it."""
        if self.scored is not None:
            return ()
        if reply.cost is not None:
            self._costs[reply.cost.currency] += reply.cost.nanos
        if part in {VERDICT, REVERSED}:
            self._judged(part, reply)
            return ()
        self._tokens = _added(self._tokens, reply)
        if reply.outcome != Outcome.OK:
            self._fail(part, reply)
            return ()
        if part == ANSWER:
            self._model_version, self._is_degraded = reply.model_version, bool(reply.degradations)
        if self.plan.judge is None:
            made = score(ScorerName(self.plan.scorer), self.example.expected, answer_of(reply), top=self.plan.top)
            self._end(made)
            return ()
        return self._to_be_judged(part, reply, self.plan.judge)

    def _fields(self, reference: str) -> dict[str, Any]:
        scorer = ScorerName.EXACT if self.plan.scorer == JUDGE else ScorerName(self.plan.scorer)
        fields = {"model": reference, "cache": "none", **request_fields(self.example, scorer)}
        if fields["task"] == Task.GENERATE and self.plan.max_tokens is not None:
            fields["max_tokens"] = self.plan.max_tokens
        return fields

    def _fail(self, part: str, reply: InferenceReply) -> None:
        """That the model which answers are compared with fails says nothing of the one that is measured."""
        failure = reply.code or reply.outcome
        if part == ANSWER:
            self._end(score_without_answer(reply), failure)
        else:
            self._end(AnswerScore(None, f"nothing to compare with: {failure}"))

    def _to_be_judged(self, part: str, reply: InferenceReply, judge: JudgePlan) -> Sequence[Asked]:
        text = answer_of(reply)
        if not isinstance(text, str):
            self._end(AnswerScore(None, "answer: must be a text"))
            return ()
        self._texts[part] = text
        if len(self._texts) < (1 if judge.against is None else 2):
            return ()
        question = question_of(self.example.input) or ""
        reference = self.example.expected if isinstance(self.example.expected, str) else None
        mine, other = self._texts[ANSWER], self._texts.get(OTHER)
        if other is None:
            messages = grading_messages(judge.rubric, question, reference, mine, f"{self.secret}\0{VERDICT}")
            return [_verdict(VERDICT, judge, messages)]
        return [
            _verdict(
                part,
                judge,
                comparing_messages(judge.rubric, question, reference, *answers, f"{self.secret}\0{part}"),
            )
            for part, answers in ((VERDICT, (mine, other)), (REVERSED, (other, mine)))
        ]

    def _judged(self, part: str, reply: InferenceReply) -> None:
        self._judge_tokens = _added(self._judge_tokens, reply)
        if reply.outcome != Outcome.OK:
            self._end(AnswerScore(None, f"{NO_VERDICT}: {reply.code or reply.outcome}"))
            return
        self._versions.add(reply.model_version or "")
        text = answer_of(reply)
        self._verdicts[part] = text if isinstance(text, str) else None
        judge = self.plan.judge
        if judge is None or len(self._verdicts) < (1 if judge.against is None else 2):
            return
        if judge.against is None:
            grade = grade_of(self._verdicts[VERDICT])
            value = None if grade is None else judge.scores[grade - 1] if judge.scores else score_of_grade(grade)
            self._end(AnswerScore(value, "" if grade else NO_VERDICT), judged={"grade": grade})
            return
        pair = pair_verdict(self._verdicts[VERDICT], self._verdicts[REVERSED])
        found = {"pair": pair.score, "follows_order": pair.follows_order}
        self._end(AnswerScore(pair.score, NO_VERDICT if pair.score is None else ""), judged=found)

    def _end(self, made: AnswerScore, failure: str | None = None, judged: Mapping[str, Any] | None = None) -> None:
        if self.plan.judge is not None:
            prompt, completion = self._judge_tokens
            tokens = {"prompt_tokens": prompt, "completion_tokens": completion}
            judged = {**(judged or {}), "versions": sorted(self._versions), **tokens}
        self.scored = ExampleScore(
            *(made.value, made.reason, failure, self._model_version, judged, *self._tokens),
            costs=dict(self._costs),
            is_degraded=self._is_degraded,
        )


def asked_for_calibration(example: EvaluationExample, judge: JudgePlan, secret: str) -> Asked | None:
    """What asks the judge about an answer that people have rated; None for an example without one."""
    question = question_of(example.input)
    if example.output is None or example.rating is None or question is None:
        return None
    # Without a reference: for a good answer an export expects that answer itself.
    return _verdict(VERDICT, judge, grading_messages(judge.rubric, question, None, example.output, secret))


def _verdict(part: str, judge: JudgePlan, messages: Sequence[Mapping[str, str]]) -> Asked:
    fields = {"model": judge.reference, "messages": messages, "cache": "none", "max_tokens": MOST_VERDICT_TOKENS}
    return Asked(part, fields)


def _added(tokens: tuple[int, int], reply: InferenceReply) -> tuple[int, int]:
    return tokens[0] + reply.usage.prompt_tokens, tokens[1] + reply.usage.completion_tokens

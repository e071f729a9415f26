"""Guardrail stage of a consumer: input is checked before it waits for an engine, answers before they are settled.

The checks run in processes of their own. An item is asked about one rule at a time; its state is changed under the
consumer's lock, and nothing is asked, written or settled with it held.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from fairlane.clock import ClockMs
from fairlane.guardrail_records import GuardrailPolicy
from fairlane.outcomes import Code, GuardrailResult, GuardrailStage
from fairlane.ownership import Claim
from fairlane.records import TokenUsage
from inference_consumers.batching.received_work import ReceivedWork
from inference_consumers.engines.protocol import CancelledItem, Failure, ItemOutcome, Success
from inference_consumers.guardrails.decision import Answers, CheckFailure
from inference_consumers.guardrails.examination import CheckCall, Examination
from inference_consumers.guardrails.held_stream import HeldStream
from inference_consumers.guardrails.texts import (
    input_texts,
    system_prompt,
    with_input_texts,
    with_output_text,
)
from inference_consumers.results.chunk_writer import StreamedText
from inference_consumers.results.settled import EngineRun, Settled, Withheld, no_run

_ANSWER_WITHIN_MS = 60_000
"""At least, or until its deadline: an answer that was computed is not given up for its deadline alone."""

_PAST_DEADLINE_MS = 100
"""Checks of input are given up so long behind the deadline: by then it is past by every clock."""

RunKey = tuple[int, int]
"""An item in a run: the run's id, and the item's place in it."""


class Checks(Protocol):
    """The checks by name; see :class:`inference_consumers.guardrails.process.checks.CheckProcesses`."""

    def submit(
        self, tenant: str, call: CheckCall, within_ms: int, done: Callable[[Answers | CheckFailure], None]
    ) -> CheckFailure | None:
        """Have this asked in the tenant's turns; ``done`` gets the answer, on another thread. Returns a failure at once
        if it cannot be."""


class NoChecks:
    """No check can be carried out: what its policy closes is refused."""

    def submit(
        self,
        tenant: str,  # noqa: ARG002
        call: CheckCall,  # noqa: ARG002 - nothing is asked
        within_ms: int,  # noqa: ARG002
        done: Callable[[Answers | CheckFailure], None],  # noqa: ARG002
    ) -> CheckFailure | None:
        """See ``Checks``."""
        return CheckFailure("unavailable")


class Outlet(Protocol):
    """Where checked items go; the driver of the engines."""

    def input_passed(self, work: ReceivedWork) -> None:
        """It may run now. Called under the lock."""

    def is_cancelled(self, work: ReceivedWork) -> bool:
        """Whether it was cancelled."""

    def stop_item(self, key: RunKey) -> None:
        """Stop an item that runs: its text is refused."""

    def write(self, texts: Sequence[StreamedText]) -> None: ...

    def submit(self, settled: Sequence[Settled]) -> None: ...


@dataclass(slots=True, eq=False)
class InputJob:
    """Work whose input is being checked."""

    work: ReceivedWork
    examination: Examination


@dataclass(slots=True, eq=False)
class _AnswerJob:
    key: RunKey
    work: ReceivedWork
    outcome: Success | CancelledItem
    run: EngineRun
    examination: Examination
    stream: HeldStream | None


@dataclass(slots=True, eq=False)
class _WindowJob:
    key: RunKey
    work: ReceivedWork
    stream: HeldStream
    examination: Examination


_Job = InputJob | _AnswerJob | _WindowJob


@dataclass(slots=True)
class Guardrails:
    """Every item that is being checked. Methods are called under the lock unless they say otherwise; the
    caller of a method calls ``pump`` once the lock is released."""

    checks: Checks
    outlet: Outlet
    changed: threading.Condition
    clock: ClockMs
    is_current: Callable[[Claim], bool]
    hold_back: int = 200
    """Characters of a streamed answer."""
    _inputs: dict[Claim, InputJob] = field(default_factory=dict)
    _answers: dict[RunKey, _AnswerJob] = field(default_factory=dict)
    _streams: dict[RunKey, HeldStream] = field(default_factory=dict)
    _ready: deque[_Job] = field(default_factory=deque)

    def add(self, job: InputJob) -> None:
        """Check the input of this work."""
        self._inputs[job.work.claim] = job
        self._ready.append(job)

    def text(self, key: RunKey, work: ReceivedWork, delta: str) -> None:
        """More text of a streamed answer whose policy concerns answers."""
        stream = self._streams.get(key)
        if stream is None:
            policy = work.item.guardrails
            assert policy is not None  # noqa: S101 - the driver asks nothing about other work
            stream = self._streams[key] = HeldStream(policy, system_prompt(work.item), self.hold_back)
        # What post-processing makes of an answer shows at its end: nothing is released before, and its outcome has it.
        if stream.policy.post_processing is None:
            stream.add(delta)
            self._begin_window(key, work, stream)

    def takes(self, key: RunKey, work: ReceivedWork, outcome: ItemOutcome, run: EngineRun) -> bool:
        """Whether the stage settles this outcome: an answer to check, or what became of a stream that was refused."""
        stream, policy = self._streams.get(key), work.item.guardrails
        usage = TokenUsage() if isinstance(outcome, Failure) else outcome.usage
        if stream is not None and stream.refused is not None:
            self._put(_AnswerJob(key, work, CancelledItem(usage), run, stream.refused, stream))
            return True
        if policy is None or not concerns_answers(policy) or not isinstance(outcome, Success):
            return False
        text = outcome.output.text
        if text is None:
            # Vectors, scores and the labels of a model are not text.
            return False
        examination = Examination.of_answer(policy, text, system_prompt(work.item))
        self._put(_AnswerJob(key, work, outcome, run, examination, stream))
        return True

    def leave(self, key: RunKey, work: ReceivedWork) -> list[StreamedText]:
        """An item ended, and the stage did not take it: the end of its stream, if any of it was released."""
        if key in self._answers:
            return []
        stream = self._streams.pop(key, None)
        if stream is None or not stream.chunks:
            return []
        return [StreamedText(work, stream.chunks, "", last=True)]

    def is_refused(self, key: RunKey) -> bool:
        """Whether the text of an item that still runs was refused."""
        stream = self._streams.get(key)
        return stream is not None and stream.refused is not None

    def take_inputs(self, condition: Callable[[ReceivedWork], bool]) -> list[ReceivedWork]:
        """Remove work whose input is being checked."""
        taken = [job for job in self._inputs.values() if condition(job.work)]
        for job in taken:
            del self._inputs[job.work.claim]
        return [_judged(job.work, job.examination) for job in taken]

    def inputs(self) -> Iterable[ReceivedWork]:
        return (job.work for job in self._inputs.values())

    @property
    def input_count(self) -> int:
        return len(self._inputs)

    @property
    def answer_count(self) -> int:
        return len(self._answers)

    @property
    def held_items(self) -> int:
        return len(self._inputs) + len(self._answers)

    @property
    def held_tokens(self) -> int:
        """Cost of the work whose input is being checked; that of an answer is spent."""
        return sum(job.work.item.cost_tokens for job in self._inputs.values())

    def stop(self) -> None:
        """Forget everything: what is not settled stays undone in the log."""
        for held in (self._inputs, self._answers, self._streams, self._ready):
            held.clear()

    def pump(self) -> None:
        """Ask what is to be asked. Not under the lock."""
        while True:
            with self.changed:
                job = self._ready.popleft() if self._ready else None
            if job is None:
                return
            call = job.examination.call()
            if call is None:
                self._finish(job)
                continue
            tenant = job.work.item.tenant
            refusal = self.checks.submit(tenant, call, self._within_ms(job), partial(self._answered, job))
            if refusal is not None:
                self._apply(job, refusal)

    def _answered(self, job: _Job, answer: Answers | CheckFailure) -> None:
        self._apply(job, answer)
        self.pump()

    def _apply(self, job: _Job, answer: Answers | CheckFailure) -> None:
        if isinstance(job, InputJob) and isinstance(answer, CheckFailure) and self._left_ms(job) <= 0:
            # Its time is over, whatever became of the check: the consumer takes it as expired.
            return
        # Nobody else touches an examination while its question is being answered.
        job.examination.answered(answer)
        with self.changed:
            if self._is_held(job):
                self._ready.append(job)

    def _within_ms(self, job: _Job) -> int:
        left_ms = self._left_ms(job)
        return max(0, left_ms) + _PAST_DEADLINE_MS if isinstance(job, InputJob) else max(_ANSWER_WITHIN_MS, left_ms)

    def _left_ms(self, job: _Job) -> int:
        return job.work.item.deadline_at_ms - self.clock()

    def _is_held(self, job: _Job) -> bool:
        match job:
            case InputJob():
                return self._inputs.get(job.work.claim) is job
            case _AnswerJob():
                return self._answers.get(job.key) is job
            case _WindowJob():
                return self._streams.get(job.key) is job.stream

    def _finish(self, job: _Job) -> None:
        """All rules of the stage have ruled. Not under the lock."""
        match job:
            case InputJob():
                self._finish_input(job)
            case _AnswerJob():
                self._finish_answer(job)
            case _WindowJob():
                self._finish_window(job)

    def _finish_input(self, job: InputJob) -> None:
        examination, settled = job.examination, None
        work = _judged(job.work, examination)
        is_redacted = any(one.verdict == GuardrailResult.REDACTED for one in examination.verdicts)
        if is_redacted and examination.refusal is None:
            item = with_input_texts(work.item, [text.text for text in examination.texts])
            work = work if item is work.item else replace(work, item=item, given=work.item)
        with self.changed:
            if self._inputs.get(work.claim) is not job:
                return
            del self._inputs[work.claim]
            if not self.is_current(work.claim):
                return
            if examination.refusal is not None:
                settled = Settled(work, _withheld(examination, examination.refusal), no_run(self.clock()))
            elif self.outlet.is_cancelled(work):
                settled = Settled(work, CancelledItem(TokenUsage()), no_run(self.clock()))
            else:
                self.outlet.input_passed(work)
        if settled is not None:
            self.outlet.submit([settled])

    def _finish_answer(self, job: _AnswerJob) -> None:
        examination, stream = job.examination, job.stream
        work = _judged(job.work, examination)
        texts: list[StreamedText] = []
        outcome: Success | CancelledItem | Withheld = job.outcome
        if examination.refusal is not None:
            outcome = _withheld(examination, examination.refusal, job.outcome.usage)
        elif isinstance(outcome, Success):
            outcome = with_output_text(outcome, examination.texts[0].text)
        if stream is not None:
            if examination.refusal is None and (rest := stream.rest(examination)):
                texts.append(StreamedText(work, stream.chunks - 1, rest))
            if stream.chunks:
                texts.append(StreamedText(work, stream.chunks, "", last=True))
        with self.changed:
            if self._answers.get(job.key) is not job:
                return
        self.outlet.write(texts)
        self.outlet.submit([Settled(work, outcome, job.run)])
        with self.changed:
            # Only now: until then the consumer is not at rest.
            self._answers.pop(job.key, None)
            self._streams.pop(job.key, None)
            self.changed.notify_all()

    def _finish_window(self, job: _WindowJob) -> None:
        with self.changed:
            if not self._is_held(job):
                return
            text, number = job.stream.finish(), job.stream.chunks - 1
        if job.stream.refused is not None:
            self.outlet.stop_item(job.key)
        elif text:
            self.outlet.write([StreamedText(job.work, number, text)])
        with self.changed:
            job.stream.resume()
            answer = self._answers.get(job.key)
            if answer is None:
                self._begin_window(job.key, job.work, job.stream)
            else:
                if job.stream.refused is not None:
                    answer.examination = job.stream.refused
                self._ready.append(answer)

    def _put(self, job: _AnswerJob) -> None:
        self._answers[job.key] = job
        # Otherwise it follows the window that is being checked.
        if job.stream is None or not job.stream.is_checking:
            self._ready.append(job)

    def _begin_window(self, key: RunKey, work: ReceivedWork, stream: HeldStream) -> None:
        window = stream.begin()
        if window is not None:
            self._ready.append(_WindowJob(key, work, stream, window))


def concerns_answers(policy: GuardrailPolicy) -> bool:
    """Whether the policy checks or changes the text of answers."""
    return bool(policy.output) or policy.post_processing is not None


def input_job(work: ReceivedWork) -> InputJob | None:
    """The check of this work's input; None if its policy has no rule for it, or there is no text."""
    policy = work.item.guardrails
    if policy is None or not policy.input:
        return None
    examination = Examination.of(GuardrailStage.INPUT, policy, input_texts(work.item))
    return InputJob(work, examination) if examination.texts else None


def _judged(work: ReceivedWork, examination: Examination) -> ReceivedWork:
    return replace(work, verdicts=(*work.verdicts, *examination.verdicts)) if examination.verdicts else work


def _withheld(examination: Examination, code: Code, usage: TokenUsage | None = None) -> Withheld:
    last = examination.verdicts[-1]
    if code == Code.FORMAT_NOT_MET:
        message = f"the answer is not in the format of the tenant's policy: {examination.reason}"
    elif last.verdict == GuardrailResult.BLOCKED:
        found = f": {', '.join(last.types)}"
        message = f"the check {last.check} of the {last.stage} blocked the request{found}"
    else:
        message = f"the check {last.check} of the {last.stage} could not be made"
    return Withheld(examination.stage, code, message, usage or TokenUsage())

"""What a run in an engine's process tells its consumer, and when."""

from typing import Any

import msgspec

from fairlane.outcomes import Code
from fairlane.records import Output, TokenUsage
from inference_consumers.engine_process.child import RunReport
from inference_consumers.engine_process.messages import FromEngine, RunEnded, RunStep, Text
from inference_consumers.engines.protocol import CancelledItem, Failure, Problem, RunCost, Success


class Sent:
    """A channel that keeps what is written; and which runs ended."""

    def __init__(self) -> None:
        self.messages: list[FromEngine] = []
        self.ended: list[int] = []

    def write(self, message: FromEngine) -> None:
        self.messages.append(message)


def report(sent: Any, items: int, *, continuous: bool = True) -> RunReport:
    return RunReport(sent, 7, items, sent.ended.append, lambda: 0.0, ends_by_itself=continuous)


def success(prompt: int, completion: int, cached: int = 0) -> Success:
    return Success(Output(text="a"), TokenUsage(prompt, completion, cached))


def test_a_continuous_run_ends_with_the_step_after_its_last_outcome_and_sums_what_was_computed() -> None:
    sent = Sent()
    run = report(sent, 3)
    run.text(0, "a")
    run.finished(0, success(prompt=10, completion=5, cached=8))
    run.finished(2, Failure(Code.ENGINE_ERROR, "no"))
    run.step()
    assert not sent.ended
    run.finished(1, CancelledItem(TokenUsage(4, 2)))
    run.step()
    run.step()
    first, second, ended = sent.messages
    assert isinstance(first, RunStep)
    assert isinstance(second, RunStep)
    assert first.texts == (Text(0, "a"),)
    assert [[one.index for one in step.finished] for step in (first, second)] == [[0, 2], [1]]
    assert ended == RunEnded(7, 0.0, useful_tokens=13, computed_tokens=13)
    assert sent.ended == [7]


def test_a_continuous_run_of_nothing_ends_with_its_first_step() -> None:
    sent = Sent()
    report(sent, 0).step()
    assert sent.messages == [RunEnded(7, 0.0)]
    assert sent.ended == [7]


def test_another_run_ends_when_it_is_told_to_and_counts_as_it_says() -> None:
    sent = Sent()
    run = report(sent, 1, continuous=False)
    run.finished(0, success(prompt=10, completion=5))
    run.step()
    assert not sent.ended
    run.end(RunCost(useful_tokens=15, computed_tokens=20))
    assert sent.messages[-1] == RunEnded(7, 0.0, useful_tokens=15, computed_tokens=20)
    assert sent.ended == [7]


def test_an_end_without_every_outcome_is_a_problem_and_an_answer_that_is_no_text_a_failure() -> None:
    sent = Sent()
    run = report(sent, 2, continuous=False)
    run.finished(0, Success(Output(text="\ud800"), TokenUsage(1, 1)))
    run.end(RunCost())
    step, ended = sent.messages
    assert isinstance(step, RunStep)
    assert step.finished[0].outcome == Failure(Code.ENGINE_ERROR, "the answer cannot be sent: UnicodeEncodeError")
    assert ended == RunEnded(7, 0.0, problem=Problem("MissingOutcome"))
    assert msgspec.msgpack.encode(ended)


def test_a_count_that_no_message_takes_fails_its_item_and_not_the_run() -> None:
    sent = Sent()
    run = report(sent, 2)
    run.finished(0, success(prompt=10**23, completion=1))
    run.finished(1, success(prompt=3, completion=1))
    run.step()
    step, ended = sent.messages
    assert isinstance(step, RunStep)
    assert step.finished[0].outcome == Failure(Code.ENGINE_ERROR, "the answer cannot be sent: OverflowError")
    assert ended == RunEnded(7, 0.0, useful_tokens=4, computed_tokens=4)
    assert msgspec.msgpack.encode(ended)

"""Copies for evaluation in a consumer: apart from requests, behind them, and without harm to them."""

from dataclasses import replace
from typing import Any

import pytest

from fairlane.evaluation_records import EvaluationMark
from fairlane.names import DEAD_LETTER_WORK, EVALUATION_REPLIES, EVALUATION_TENANT, LEDGER_USAGE
from fairlane.outcomes import Code, Health
from fairlane.records import InferenceReply, TokenUsage
from fairlane_server.kafka.transactions import OutputRecord, Settlement
from inference_consumers.batching.received_work import ReceivedWork
from inference_consumers.engine_process.messages import Finished, Loaded, RunEnded, RunStep
from inference_consumers.engine_process.states import EngineState
from inference_consumers.engines.protocol import CancelledItem, Failure, LoadFailed, Problem
from inference_consumers.results.records import AnswerWriter
from inference_consumers.results.retries import Again
from tests.kit.driver_bench import CRASHED, OK, DriverBench, FakeHost, named

CANDIDATE = ("chat", "2")


def copy(name: str, *, model: tuple[str, str] = CANDIDATE, **fields: Any) -> ReceivedWork:
    made = named(name, priority="low", model=model, **fields)
    mark = EvaluationMark("shadow", "chat-2-1", "candidate", "acme", f"of-{name}")
    request = replace(made.item.request, conversation_id="talk-1")
    item = replace(
        made.item, tenant=EVALUATION_TENANT, reply_topic=EVALUATION_REPLIES, evaluation=mark, request=request
    )
    return replace(made, item=item)


class CopyBench(DriverBench):
    """Two engines: of the champion, and of the candidate that copies are for."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.other = FakeHost(key=CANDIDATE)
        self.driver.engines.by_key = {
            **self.driver.engines.by_key,
            CANDIDATE: EngineState(self.other, 4, 1_000),
        }
        self.driver.engine_loaded(self.other, Loaded("fake", continuous=False, seconds=0.1))

    def started(self) -> tuple[list[str], list[str]]:
        """What ``start`` sent to each engine."""
        before = len(self.host.given), len(self.other.given)
        while self.driver.start_one():
            pass
        given = self.host.given[before[0] :], self.other.given[before[1] :]
        return tuple([item.item_id for _, items in runs for item in items] for runs in given)  # type: ignore[return-value]

    def finish(self, outcome: Any = OK, problem: Problem | None = None) -> None:
        """The latest run of the candidate ends, each of its items so."""
        run_id, items = self.other.given[-1]
        if problem is None:
            finished = tuple(Finished(index, outcome) for index in range(len(items)))
            self.driver.engine_stepped(self.other, RunStep(run_id, (), finished))
        self.driver.engine_ended(self.other, RunEnded(run_id, 0.1, problem=problem))

    @property
    def ends(self) -> list[tuple[str, str, str | None]]:
        return [(one.request_id, one.outcome, one.code) for one in self.written(EVALUATION_REPLIES)]


def test_copies_run_when_no_request_waits_and_never_with_one() -> None:
    bench = CopyBench()
    bench.add(named("r-1"), copy("c-1"), copy("c-2", model=("chat", "1")), named("r-2"))
    assert bench.started() == (["r-1", "r-2"], []), "one batch at a time: they share a device"
    bench.tell({0: OK, 1: OK})
    bench.end()
    first = bench.started()
    assert sorted(map(len, first)) == [0, 1], "copies of two versions are two batches, one after the other"


def test_a_request_does_not_wait_for_a_batch_of_copies_which_ends_and_runs_again() -> None:
    bench = CopyBench()
    bench.add(copy("c-1"), copy("c-2"))
    assert bench.started() == ([], ["c-1", "c-2"])
    bench.add(named("r-1"))
    assert bench.started() == (["r-1"], []), "beside the copies, which are told to end"
    assert bench.other.cancelled == [(bench.other.given[-1][0], (0, 1))]
    bench.finish(CancelledItem(OK.usage))
    assert not bench.ends, "nobody cancelled them"
    bench.tell({0: OK})
    bench.end()
    assert bench.started() == ([], ["c-1", "c-2"])
    bench.finish()
    assert [end[:2] for end in bench.ends] == [("c-1", "ok"), ("c-2", "ok")]
    assert [reply.outcome for reply in bench.replies] == ["ok"]


def test_a_request_for_an_engine_that_runs_copies_ends_them_and_is_next() -> None:
    bench = CopyBench()
    bench.add(copy("c-1", model=("chat", "1")))
    bench.started()
    copies = bench.run_id
    bench.add(named("r-1"))
    assert bench.started() == ([], [])
    assert bench.host.cancelled == [(copies, (0,))]
    bench.tell({0: CancelledItem(OK.usage)}, run_id=copies)
    assert bench.started() == (["r-1"], [])


def test_a_copy_is_answered_for_the_recorder_alone() -> None:
    bench = CopyBench()
    bench.add(copy("c-1"))
    bench.started()
    bench.finish()
    (settlement,) = bench.transactions.settlements
    assert [one.topic for one in settlement.outputs] == [EVALUATION_REPLIES, LEDGER_USAGE]
    (reply,), (usage,) = bench.written(EVALUATION_REPLIES), bench.written(LEDGER_USAGE)
    assert (reply.evaluation.request_id, reply.evaluation.tenant) == ("of-c-1", "acme")
    assert (reply.tenant, usage.tenant) == (EVALUATION_TENANT, EVALUATION_TENANT)
    assert reply.turn is None, "it adds nothing to the conversation of its original"


def test_what_fails_on_every_copy_changes_nothing_for_requests() -> None:
    bench = CopyBench()
    rates = bench.driver.meter.rates
    for number in range(30):
        bench.add(copy(f"c-{number}"))
        bench.started()
        bench.finish(problem=Problem("ValueError", transient=False))
        while bench.started() != ([], []):
            bench.finish(problem=Problem("ValueError", transient=False))
    assert {code for _, _, code in bench.ends} == {Code.POISON}
    assert len(bench.ends) == 30
    assert not bench.written(DEAD_LETTER_WORK), "it would be the request of a tenant in one more place"
    assert not bench.fatal, "dead copies do not end the consumer"
    assert bench.driver.meter.rates == rates
    assert bench.driver.meter.health(0) is Health.HEALTHY


def test_a_candidate_that_crashes_is_no_failure_of_the_consumer() -> None:
    bench = CopyBench()
    bench.add(copy("c-1"))
    for _ in range(2):
        assert bench.started() == ([], ["c-1"])
        bench.driver.engine_died(bench.other, CRASHED)
        assert not bench.driver.lost_engines, "that would keep requests away"
        bench.other.life += 1
        bench.driver.engine_loaded(bench.other, Loaded("fake", continuous=False, seconds=0.1))
    assert bench.driver.meter.health(0) is Health.HEALTHY
    bench.driver.engine_failed(bench.other, LoadFailed("it died too often"))
    assert not bench.fatal
    assert bench.driver.served[0] == (("chat", "1"),)
    bench.add(named("r-1"))
    assert bench.started()[0] == ["r-1"]


def test_a_copy_that_a_continuous_engine_runs_alone_makes_way_for_a_request() -> None:
    bench = DriverBench(continuous=True)
    alone = copy("c-1", model=bench.host.key)
    bench.driver.waiting.add_again((Again((alone,), alone=True),))
    assert bench.start() == ["c-1"]
    bench.add(named("r-1"))
    assert not bench.start()
    assert bench.host.cancelled == [(bench.run_id, (0,))]
    bench.tell({0: CancelledItem(TokenUsage())})
    bench.end()
    assert bench.start() == ["r-1"]
    bench.tell({0: OK})
    bench.end()
    assert bench.start() == ["c-1"]
    assert bench.driver.engines.runs.of(bench.host.key)[0].alone, "it is still a suspect"


def test_an_engine_that_ran_requests_is_one_of_the_consumer_for_good() -> None:
    bench = CopyBench()
    bench.add(named("r-1", model=CANDIDATE))
    bench.started()
    bench.finish()
    bench.add(copy("c-1"))
    bench.started()
    bench.driver.engine_died(bench.other, CRASHED)
    assert bench.driver.lost_engines == ["chat"]
    bench.driver.engine_failed(bench.other, LoadFailed("it died too often"))
    assert bench.fatal


@pytest.mark.parametrize("outcome", [Failure(Code.ENGINE_ERROR, "broken"), OK])
def test_a_topic_that_refuses_the_reply_to_a_copy_holds_up_nothing(outcome: Any) -> None:
    bench = CopyBench()
    bench.add(copy("c-1"))
    bench.started()
    bench.finish(outcome)
    (settlement,) = bench.transactions.settlements
    kept = bench.driver.settler.unpublishable(settlement, "UNKNOWN_TOPIC_OR_PART")
    assert kept == Settlement(settlement.claim, settlement.outputs[1:])


def test_a_copy_whose_time_is_over_is_dropped() -> None:
    bench = CopyBench()
    bench.add(copy("c-1", deadline_at_ms=bench.now_ms - 1))
    (expired,) = bench.driver.waiting.take_expired(bench.now_ms)
    settled = AnswerWriter(bench.driver.settler.answers.codec, "consumer-1").expired(expired, bench.now_ms)
    record = settled.outputs[0]
    assert isinstance(record, OutputRecord)
    reply = bench.driver.settler.answers.codec.decode_as(InferenceReply, record.value)
    assert (record.topic, reply.outcome, reply.evaluation) == (
        *(EVALUATION_REPLIES, "expired"),
        expired.item.evaluation,
    )


def test_copies_run_beside_requests_of_an_engine_that_takes_items_as_they_come() -> None:
    bench = CopyBench(continuous=True)
    bench.add(named("r-1"))
    assert bench.started() == (["r-1"], [])
    bench.add(copy("c-1"))
    assert bench.started() == ([], ["c-1"])
    assert bench.started() == ([], [])
    assert not bench.other.cancelled


def test_copies_that_wait_hold_up_no_fetching_of_requests() -> None:
    bench = CopyBench()
    bench.add(copy("c-1"), named("r-1", priority="low"))
    waiting = bench.driver.waiting
    assert (len(waiting), waiting.count("low")) == (2, 1)
    assert waiting.size_bytes("low") == named("r-1", priority="low").size_bytes

"""Engines that fail, die and hang, in real consumers: what each trouble costs, and whom."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.local.services import Service
from fairlane import names
from fairlane.outcomes import Code, Outcome, Task
from fairlane.records import Parameters, ReplyChunk
from fairlane_server.processes.restarts import EXIT_NO_RESTART
from tests.kit.deployment import model_per_task
from tests.kit.log_reader import Replies
from tests.kit.pipeline import Pipeline
from tests.kit.processes import ServiceProcess
from tests.kit.troubled_engine import (
    ALWAYS,
    DEADLY,
    ENDLESS,
    KILLED,
    ONCE,
    PADDED,
    PADDING_TOKENS,
    POISON,
    TOO_LARGE,
)
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

PATIENCE_MS = 120_000
MAX_BATCH_SIZE = 32
WORDS_PER_S = 100


@pytest.fixture
def pipeline(broker: str, tmp_path: Path, unique: str) -> Iterator[Pipeline]:
    models = model_per_task(unique, f"{unique}-pool")
    with Pipeline(broker, tmp_path, unique, tenants=("a", "b"), models=models) as pipeline:
        yield pipeline


def troubled(pipeline: Pipeline, **env: str) -> ServiceProcess:
    arguments = ("-m", "tests.kit.troubled_consumer", "--pool", pipeline.pool)
    return pipeline.launch(Service(f"consumer-{pipeline.pool}-2", arguments, env))


class EngineMeters:
    """What a consumer counted about its engine since a moment, and how long ago that was."""

    def __init__(self, consumer: ServiceProcess, model: str) -> None:
        self._consumer = consumer
        self._model = model
        self._before: dict[tuple[str, str], float] = {}
        self._started_s = 0.0

    def start(self) -> "EngineMeters":
        self._before = self._all()
        self._started_s = monotonic()
        return self

    @property
    def passed_s(self) -> float:
        return monotonic() - self._started_s

    def since(self, name: str, kind: str = "") -> float:
        """By how much a sample named ``fairlane_<name>`` has grown; ``kind`` is its label ``kind`` or ``reason``."""
        place = f"fairlane_{name}", kind
        return self._all().get(place, 0.0) - self._before.get(place, 0.0)

    def _all(self) -> dict[tuple[str, str], float]:
        found: dict[tuple[str, str], float] = {}
        for family in text_string_to_metric_families(self._consumer.get("/metrics")[1]):
            for sample in family.samples:
                labels = sample.labels
                if labels.get("model") == self._model and "le" not in labels:
                    found[sample.name, labels.get("kind") or labels.get("reason") or ""] = sample.value
        return found


def check_troubles_are_counted(pipeline: Pipeline, consumer: ServiceProcess) -> None:
    model = pipeline.model_for(Task.GENERATE)
    dead = consumer.metric("fairlane_dead_letters_total", topic=names.DEAD_LETTER_WORK, problem="poison")
    assert dead == 2, "the one that breaks engines and the one that kills them"
    assert consumer.metric("fairlane_dead_letters_total") == 2
    for reason in ("transient", "split", "engine_died"):
        assert consumer.metric("fairlane_retries_total", model=model, reason=reason) > 0, reason
    # By itself, and again after it was handed back.
    assert consumer.metric("fairlane_out_of_memory_total", model=model) >= 2
    assert consumer.metric("fairlane_handed_back_total", model=model) == 1
    restarts = "fairlane_engine_restarts_total"
    assert consumer.metric(restarts, model=model) in range(6, 10), "four and five, some of them in common"
    assert consumer.metric(restarts, model=model, end="crashed") >= 2
    assert consumer.metric(restarts, model=model, end="killed") >= 3


def check_streams_are_measured(pipeline: Pipeline, consumer: ServiceProcess, replies: Replies) -> None:
    """Three padded answers of four words, streamed."""
    meters = EngineMeters(consumer, pipeline.model_for(Task.GENERATE)).start()
    parameters = Parameters(max_tokens=4, stream=True)
    requests = [pipeline.request(prompt=PADDED, parameters=parameters, timeout_ms=PATIENCE_MS) for _ in range(3)]
    pipeline.publish("a", *requests)
    answers = replies.wait([request.request_id for request in requests]).values()
    prompt = sum(answer.usage.prompt_tokens for answer in answers)
    completion = sum(answer.usage.completion_tokens for answer in answers)
    assert completion == 12
    # An answer is out before the end of its batch is counted.
    eventually(lambda: meters.since("batch_wait_seconds_count") == 3, what="the last batch counted")
    batches = meters.since("batch_items_count")
    assert batches in (1, 2, 3)
    assert meters.since("batch_fill_count") == meters.since("engine_seconds_count") == batches
    assert 3 / MAX_BATCH_SIZE <= meters.since("batch_fill_sum") <= batches
    assert meters.since("batch_items_sum") == 3
    assert meters.since("time_to_first_token_seconds_count") == 3
    assert meters.since("inter_token_seconds_count") == completion - 3
    assert meters.since("computed_tokens_total", "useful") == prompt + completion
    assert meters.since("computed_tokens_total", "padding") == 3 * PADDING_TOKENS
    assert meters.since("tokens_total", "prompt") == prompt
    assert meters.since("tokens_total", "completion") == completion
    at_least_s = completion / WORDS_PER_S
    assert 0 < meters.since("inter_token_seconds_sum") < 3 * meters.passed_s, "three at a time"
    assert 0 < meters.since("time_to_first_token_seconds_sum") < 3 * meters.passed_s
    assert 0.9 * at_least_s < meters.since("engine_seconds_sum") < meters.passed_s
    assert 0.9 * at_least_s < meters.since("engine_busy_seconds_total") < meters.passed_s
    assert meters.since("retries_total", "transient") == meters.since("out_of_memory_total") == 0
    assert consumer.metric("fairlane_running_items") == 0


def test_each_trouble_is_answered_as_what_it_is_and_costs_nobody_else(pipeline: Pipeline) -> None:
    prompts = (POISON, DEADLY, KILLED, TOO_LARGE, ALWAYS)
    pipeline.dispatcher().wait_ready()
    pipeline.wait_all_own()
    bad = {prompt: pipeline.request(prompt=prompt, timeout_ms=PATIENCE_MS) for prompt in prompts}
    good = [pipeline.request(timeout_ms=PATIENCE_MS) for _ in range(20)]
    # Before there is a consumer, so that they make one batch.
    pipeline.publish("a", *good[:10], *bad.values(), *good[10:])
    consumer = troubled(
        pipeline, SIMULATED_DECODE_TOKENS_PER_S=str(WORDS_PER_S), MAX_BATCH_SIZE=str(MAX_BATCH_SIZE)
    ).wait_ready()
    replies = pipeline.replies("a")
    everything = [request.request_id for request in (*good, *bad.values())]
    answers = replies.wait(everything, 60)
    assert {answers[request.request_id].outcome for request in good} == {Outcome.OK}
    told = {
        prompt: (answers[request.request_id].outcome, answers[request.request_id].code)
        for prompt, request in bad.items()
    }
    assert told == {
        POISON: (Outcome.FAILED, Code.POISON),
        DEADLY: (Outcome.FAILED, Code.POISON),
        KILLED: (Outcome.FAILED, Code.RETRIES_EXHAUSTED),
        TOO_LARGE: (Outcome.REJECTED, Code.OVERLOADED),
        ALWAYS: (Outcome.FAILED, Code.RETRIES_EXHAUSTED),
    }
    assert "died" not in (answers[bad[POISON].request_id].message or "")
    assert "SIGSEGV" in (answers[bad[DEADLY].request_id].message or "")
    assert "SIGKILL" in (answers[bad[KILLED].request_id].message or "")

    once = pipeline.request(prompt=ONCE, timeout_ms=PATIENCE_MS)
    pipeline.publish("a", once)
    answer = replies.wait([once.request_id])[once.request_id]
    assert (answer.outcome, answer.attempts) == (Outcome.OK, 2)
    replies.read_to_end()
    replies.exactly_once(everything)
    check_troubles_are_counted(pipeline, consumer)
    check_streams_are_measured(pipeline, consumer, replies)
    assert not any(prompt in consumer.log() for prompt in prompts)
    assert consumer.stop() == 0


def test_a_hung_engine_is_started_again_and_others_run_what_waited_behind_it(pipeline: Pipeline) -> None:
    stuck = troubled(pipeline, ENGINE_HANG_TIMEOUT_S="5", MAX_BATCH_SIZE="1")
    pipeline.start(env={"MAX_BATCH_SIZE": "1"})
    dispatcher = pipeline.processes["dispatcher-1"]
    stuck.wait_ready()
    pipeline.wait_all_own()
    eventually(lambda: dispatcher.metric("fairlane_pool_consumers", pool=pipeline.pool) == 2, what="both")
    replies = pipeline.replies("a")
    # Which consumer gets which is the dispatcher's affair; the good one answers the endless ones as well.
    endless = [pipeline.request(prompt=ENDLESS, timeout_ms=PATIENCE_MS) for _ in range(4)]
    others = [pipeline.request(timeout_ms=PATIENCE_MS) for _ in range(16)]
    pipeline.publish("a", *endless, *others)

    eventually(lambda: stuck.metric("fairlane_engine_failing") == 1, what="a report that it fails")
    eventually(lambda: stuck.metric("fairlane_handed_back_total") >= 1, what="its queue handed back")
    requests = [request.request_id for request in (*endless, *others)]
    answers = replies.wait(requests, 40)
    assert {answers[request.request_id].outcome for request in others} == {Outcome.OK}
    found = [answers[request.request_id] for request in endless]
    # What hung twice alone is proven to be the cause; without that proof it is given up after some ends of the engine.
    assert {answer.code for answer in found} & {Code.POISON, Code.RETRIES_EXHAUSTED}
    assert all(answer.outcome == Outcome.OK or "no progress" in (answer.message or "") for answer in found)
    replies.read_to_end()
    replies.exactly_once(requests)
    assert stuck.alive
    assert stuck.events("engine_hung")
    assert ENDLESS not in stuck.log()
    eventually(lambda: stuck.metric("fairlane_engine_failing") == 0, what="a report that it is well again")


def test_a_consumer_that_would_bury_its_topic_ends_for_good_and_says_why(pipeline: Pipeline) -> None:
    pipeline.dispatcher().wait_ready()
    pipeline.wait_all_own()
    requests = {name: [pipeline.request(prompt=POISON, timeout_ms=PATIENCE_MS) for _ in range(40)] for name in "ab"}
    for name, sent in requests.items():
        pipeline.publish(name, *sent)
    consumer = troubled(pipeline, MAX_BATCH_SIZE="8")
    assert consumer.wait_ended(60) == EXIT_NO_RESTART
    [event] = consumer.events("consumer_failed")
    assert event["error"].startswith("10 of the latest 10 items of all tenants but the worst")
    pipeline.consumer().wait_ready()
    buried = 0
    for name, sent in requests.items():
        replies, ids = pipeline.replies(name), [request.request_id for request in sent]
        answers = replies.wait(ids, 60)
        buried += sum(answer.outcome == Outcome.FAILED for answer in answers.values())
        replies.read_to_end()
        replies.exactly_once(ids)
    assert buried < 60, "the others were left to a consumer whose engine works"


def test_a_tenant_whose_items_are_all_poison_ends_no_consumer(pipeline: Pipeline) -> None:
    consumer = troubled(pipeline)
    pipeline.dispatcher().wait_ready()
    pipeline.wait_all_own()
    consumer.wait_ready()
    poison = [pipeline.request(prompt=POISON, timeout_ms=PATIENCE_MS) for _ in range(250)]
    pipeline.publish("a", *poison)
    told = pipeline.replies("a").wait([request.request_id for request in poison], 60)
    assert {answer.code for answer in told.values()} == {Code.POISON}
    good = [pipeline.request(timeout_ms=PATIENCE_MS) for _ in range(5)]
    pipeline.publish("b", *good)
    answers = pipeline.replies("b").wait([request.request_id for request in good], 60)
    assert {answer.outcome for answer in answers.values()} == {Outcome.OK}
    assert consumer.alive
    assert consumer.stop() == 0


def test_an_innocent_item_whose_engine_is_killed_twice_and_stopped_once_is_answered(pipeline: Pipeline) -> None:
    consumer = troubled(pipeline, SIMULATED_DECODE_TOKENS_PER_S="20", ENGINE_HANG_TIMEOUT_S="5")
    pipeline.dispatcher().wait_ready()
    pipeline.wait_all_own()
    consumer.wait_ready()
    replies, chunks = pipeline.replies("a"), pipeline.reader(f"chunks.{pipeline.tenant('a')}")
    request = pipeline.request(timeout_ms=PATIENCE_MS)
    request = replace(request, parameters=Parameters(max_tokens=60, stream=True))
    pipeline.publish("a", request)

    def engine_of_attempt(number: int) -> psutil.Process:
        """The process that runs it for this time, as soon as it has said a word."""
        chunks.wait(
            lambda: any(chunk.attempt == number for chunk in pipeline.decoded(chunks, ReplyChunk)), what="a word"
        )
        model = pipeline.model_for(Task.GENERATE)
        return next(child for child in psutil.Process(consumer.pid).children() if model in child.cmdline())

    engine_of_attempt(1).kill()
    engine_of_attempt(2).kill()
    engine_of_attempt(3).suspend()
    answer = replies.wait([request.request_id], 60)[request.request_id]
    assert (answer.outcome, answer.attempts) == (Outcome.OK, 4)
    assert answer.usage.completion_tokens == 60
    assert [event["kind"] for event in consumer.events("engine_lost")] == ["killed", "killed", "stopped"]
    assert consumer.metric("fairlane_dead_letters_total") == 0
    assert consumer.stop() == 0


def test_what_runs_is_finished_before_the_end_and_what_streams_too(pipeline: Pipeline) -> None:
    consumer = troubled(pipeline, SIMULATED_DECODE_TOKENS_PER_S="20")
    pipeline.dispatcher().wait_ready()
    pipeline.wait_all_own()
    consumer.wait_ready()
    replies, chunks = pipeline.replies("a"), pipeline.reader(f"chunks.{pipeline.tenant('a')}")
    request = pipeline.request(timeout_ms=PATIENCE_MS)
    request = replace(request, parameters=Parameters(max_tokens=30, stream=True))
    pipeline.publish("a", request)
    chunks.wait(lambda: chunks.records, what="a first word")
    assert consumer.stop() == 0
    answer = replies.wait([request.request_id])[request.request_id]
    assert (answer.outcome, answer.usage.completion_tokens) == (Outcome.OK, 30)
    chunks.read_to_end()
    told = pipeline.decoded(chunks, ReplyChunk)
    assert answer.output is not None
    assert "".join(chunk.text for chunk in told) == answer.output.text
    assert [chunk.seq for chunk in told] == list(range(len(told)))
    assert [chunk.last for chunk in told] == [False] * (len(told) - 1) + [True]
    assert {chunk.attempt for chunk in told} == {1}


def test_a_consumer_is_not_ready_while_its_engine_is_started_again(pipeline: Pipeline) -> None:
    pipeline.start()
    consumer = pipeline.processes[f"consumer-{pipeline.pool}-1"]
    model = pipeline.models[1].model
    engine = next(child for child in psutil.Process(consumer.pid).children() if model in child.cmdline())
    told: list[tuple[int, str]] = []

    def not_ready() -> bool:
        told.append(consumer.get("/health/ready"))
        return told[-1][0] == 503

    engine.kill()
    eventually(not_ready, 20, "a word that an engine is missing")
    conditions = json.loads(told[-1][1])["conditions"]
    assert conditions == {"engines": f"starting again: {model}", "producer": None, "assignment": None}
    assert consumer.get("/health")[0] == 200
    # The engines of its other models serve meanwhile, and this one as soon as it is there.
    requests = [pipeline.request(task, timeout_ms=PATIENCE_MS) for task in (Task.GENERATE, Task.EMBED)]
    pipeline.publish("a", *requests)
    consumer.wait_ready()
    answers = pipeline.replies("a").wait([request.request_id for request in requests], 40)
    assert {answer.outcome for answer in answers.values()} == {Outcome.OK}
    assert consumer.metric("fairlane_engine_restarts_total") == 1
    assert consumer.metric("fairlane_ready") == 1
    assert consumer.stop() == 0

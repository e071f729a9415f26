"""Answers that are given again, by real dispatchers and consumers over a real Redis."""

from collections.abc import Iterator, Sequence

import pytest
from redis import Redis

from fairlane import names
from fairlane.client import Client
from fairlane.outcomes import CacheMode, Decision, Outcome, Task
from fairlane.records import AuditEvent, InferenceReply, InferenceRequest, Parameters, TenantSpec, UsageEvent, WorkItem
from tests.kit.log_reader import LogReader, Replies
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.waiting import eventually

pytestmark = pytest.mark.broker

SLOW = {"SIMULATED_DECODE_TOKENS_PER_S": "100"}
"""An answer takes a good tenth of a second: whoever asks the same meanwhile comes in time."""


@pytest.fixture(scope="module")
def pipeline(broker: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    folder, unique = tmp_path_factory.mktemp("answers"), unique_name()
    tenants = ("a", "b", TenantSpec("always", cache=CacheMode.EXACT))
    with Pipeline(broker, folder, unique, tenants=tenants, redis_url=redis_url) as pipeline:
        pipeline.start(env=SLOW)
        yield pipeline


@pytest.fixture(scope="module")
def replies(pipeline: Pipeline) -> Replies:
    return pipeline.replies()


class Ledger:
    """What was dispatched, spent and decided since it was made."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._work = pipeline.reader(names.priority_topic(pipeline.pool, "normal"), from_beginning=False)
        self._usage = pipeline.reader(names.LEDGER_USAGE, from_beginning=False)
        self._audit = pipeline.reader(names.LEDGER_AUDIT, from_beginning=False)

    def _decoded(self, reader: LogReader) -> LogReader:
        reader.read_to_end()
        return reader

    def dispatched(self) -> list[str]:
        self._work.read_to_end()
        items = [self._pipeline.codec.decode_as(WorkItem, record.value()) for record in self._work.records]
        return [item.request.request_id for item in items]

    def usage(self) -> list[UsageEvent]:
        return self._pipeline.decoded(self._decoded(self._usage), UsageEvent)

    def given_again(self) -> list[str]:
        events = self._pipeline.decoded(self._decoded(self._audit), AuditEvent)
        return [event.request_id for event in events if event.decision == Decision.CACHED]


def ask(pipeline: Pipeline, prompt: str, cache: str | None = CacheMode.EXACT) -> InferenceRequest:
    return pipeline.request(prompt=prompt, cache=cache)


def one_after_the_other(
    pipeline: Pipeline, replies: Replies, tenant: str, requests: Sequence[InferenceRequest]
) -> list[InferenceReply]:
    """Each is sent when the one before is answered and, if it is to be kept, kept."""
    answers = []
    for request in requests:
        before = kept(pipeline, tenant)
        pipeline.publish(tenant, request)
        reply = replies.wait([request.request_id])[request.request_id]
        answers.append(reply)
        mode = request.cache or pipeline.tenants[pipeline.tenant(tenant)].cache
        if reply.cache_use is None and mode != CacheMode.NONE and request.parameters.temperature == 0:
            wait_until_kept(pipeline, tenant, before + 1)
    return answers


def wait_until_kept(pipeline: Pipeline, tenant: str, count: int) -> None:
    eventually(lambda: kept(pipeline, tenant) >= count, what="an answer that is kept")


def kept(pipeline: Pipeline, tenant: str) -> int:
    """How many answers are kept for a tenant."""
    assert pipeline.redis_url is not None
    with Redis.from_url(pipeline.redis_url) as redis:
        return sum(1 for _ in redis.scan_iter(f"cache:response:{pipeline.tenant(tenant)}:*"))


def test_the_same_again_is_answered_without_a_run(pipeline: Pipeline, replies: Replies) -> None:
    ledger = Ledger(pipeline)
    first, again = ask(pipeline, "the same"), ask(pipeline, "the same")
    one, other = one_after_the_other(pipeline, replies, "a", (first, again))
    assert (one.cache_use, other.outcome, other.output) == (None, Outcome.OK, one.output)
    assert other.cache_use is not None
    assert (other.cache_use.mode, other.cache_use.request_id) == (CacheMode.EXACT, first.request_id)
    assert other.cache_use.answered_at_ms == one.timings.engine_finished_at_ms
    assert (other.usage, other.finish_reason, other.model_version) == (one.usage, one.finish_reason, one.model_version)
    assert ledger.dispatched() == [first.request_id]
    assert ledger.given_again() == [again.request_id]
    spent = {event.request_id: event for event in ledger.usage()}
    assert spent.keys() == {first.request_id, again.request_id}
    assert not spent[first.request_id].cached
    cached = spent[again.request_id]
    assert (cached.cached, cached.cost_tokens, cached.engine_ms, cached.work) == (True, 0, 0, other.source)


def test_nobody_gets_the_answer_of_another_tenant(pipeline: Pipeline, replies: Replies) -> None:
    ledger = Ledger(pipeline)
    first, theirs = ask(pipeline, "ours alone"), ask(pipeline, "ours alone")
    one_after_the_other(pipeline, replies, "a", (first,))
    (reply,) = one_after_the_other(pipeline, replies, "b", (theirs,))
    assert (reply.outcome, reply.cache_use) == (Outcome.OK, None)
    assert ledger.dispatched() == [first.request_id, theirs.request_id]


def test_equal_requests_at_the_same_time_are_run_once(pipeline: Pipeline, replies: Replies) -> None:
    ledger = Ledger(pipeline)
    equal = [ask(pipeline, "all at once") for _ in range(50)]
    others = [ask(pipeline, f"no. {number}") for number in range(5)]
    pipeline.publish("a", *equal, *others)
    answers = replies.wait([request.request_id for request in (*equal, *others)], 60)
    assert {reply.outcome for reply in answers.values()} == {Outcome.OK}
    run = set(ledger.dispatched())
    assert len(run & {request.request_id for request in equal}) == 1
    assert {request.request_id for request in others} <= run
    (first,) = run & {request.request_id for request in equal}
    uses = [answers[request.request_id].cache_use for request in equal if request.request_id != first]
    assert {None if use is None else use.request_id for use in uses} == {first}
    assert len(ledger.given_again()) == 49
    replies.read_to_end()
    assert all(count == 1 for count in replies.counts.values())


def test_nothing_is_kept_for_whom_did_not_ask(pipeline: Pipeline, replies: Replies) -> None:
    ledger = Ledger(pipeline)
    plain = [ask(pipeline, "no cache", None), ask(pipeline, "no cache", None), ask(pipeline, "no cache")]
    warm = [pipeline.request(prompt="warm", cache="exact", parameters=Parameters(4, 0.7)) for _ in range(2)]
    answers = one_after_the_other(pipeline, replies, "a", (*plain, *warm))
    assert [reply.cache_use for reply in answers] == [None] * 5
    assert len(ledger.dispatched()) == 5


def test_a_tenant_may_say_so_for_all_its_requests(pipeline: Pipeline, replies: Replies) -> None:
    asked = [ask(pipeline, "always", None), ask(pipeline, "always", None), ask(pipeline, "always", CacheMode.NONE)]
    vectors = [pipeline.request(Task.EMBED), pipeline.request(Task.EMBED)]
    answers = one_after_the_other(pipeline, replies, "always", (*asked, *vectors))
    assert [reply.cache_use is not None for reply in answers] == [False, True, False, False, True]
    assert answers[4].output == answers[3].output


def test_what_somebody_else_put_there_is_no_answer(pipeline: Pipeline, replies: Replies, redis_url: str) -> None:
    first = ask(pipeline, "poisoned")
    one_after_the_other(pipeline, replies, "a", (first,))
    with Redis.from_url(redis_url) as redis:
        entries = {key: redis.get(key) for key in redis.scan_iter(f"cache:response:{pipeline.tenant('a')}:*")}
        assert entries
        for key, entry in entries.items():
            assert isinstance(entry, bytes)
            redis.set(key, entry[:-3] + b"\x00\x00\x00", px=60_000)
    again = ask(pipeline, "poisoned")
    pipeline.publish("a", again)
    reply = replies.wait([again.request_id])[again.request_id]
    assert (reply.outcome, reply.cache_use) == (Outcome.OK, None)


def test_a_stream_ends_with_the_kept_text(pipeline: Pipeline) -> None:
    with Client(tenant=pipeline.tenant("always"), settings=pipeline.settings) as client:
        model, before = pipeline.model_for(Task.GENERATE), kept(pipeline, "always")
        with client.stream(model=model, prompt="as a stream", max_tokens=4) as stream:
            first = "".join(delta.text for delta in stream)
        wait_until_kept(pipeline, "always", before + 1)
        with client.stream(model=model, prompt="as a stream", max_tokens=4) as stream:
            again = "".join(delta.text for delta in stream)
            reply = stream.reply(30)
    assert first == again == (reply.output.text if reply.output else None)
    assert reply.cache_use is not None

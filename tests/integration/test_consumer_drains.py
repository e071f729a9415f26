"""What a consumer does with what it holds when it is asked to end, on the real broker."""

from collections.abc import Iterator
from time import monotonic

import pytest

from fairlane import names
from fairlane.outcomes import Outcome
from fairlane.records import Parameters, UsageEvent
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.waiting import eventually
from tests.kit.work_items import work_item, write_work

pytestmark = [pytest.mark.full, pytest.mark.broker]

ITEM_S = 0.2
ENV = {"SIMULATED_DECODE_TOKENS_PER_S": str(4 / ITEM_S), "MAX_BATCH_SIZE": "1"}


@pytest.fixture(scope="module")
def pipeline(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """Neither a dispatcher nor a second consumer: nobody else answers."""
    with Pipeline(broker, tmp_path_factory.mktemp("drains"), unique_name()) as pipeline:
        yield pipeline


def test_little_is_answered_before_the_consumer_leaves(pipeline: Pipeline) -> None:
    """Others would have it only when the group has noticed."""
    consumer = pipeline.consumer(1, ENV).wait_ready()
    items = [work_item(pipeline, offset=number) for number in range(4)]
    write_work(pipeline, *items)
    eventually(lambda: consumer.metric("fairlane_prefetched_items") >= 2, what="a few in its hands")
    assert consumer.stop() == 0

    replies = pipeline.replies()
    replies.read_to_end()
    answers = replies.exactly_once(item.request.request_id for item in items)
    assert {reply.outcome for reply in answers.values()} == {Outcome.OK}


@pytest.mark.alone
def test_a_batch_that_outlasts_the_drain_is_left_to_another_consumer(pipeline: Pipeline) -> None:
    drain_s, batch_s, tokens, session_s = 1, 20, 40, 45
    env = {
        "DRAIN_TIMEOUT_S": str(drain_s),
        "MAX_BATCH_SIZE": "4",
        "SIMULATED_DECODE_TOKENS_PER_S": str(4 * tokens / batch_s),
    }
    usage = pipeline.reader(names.LEDGER_USAGE, from_beginning=False)
    requests = [pipeline.request(parameters=Parameters(max_tokens=tokens)) for _ in range(8)]
    items = [work_item(pipeline, request=request, offset=200 + place) for place, request in enumerate(requests)]
    # Before there is a consumer, and where they are read together: they make whole batches.
    write_work(pipeline, *items, key="one partition")
    # So long would the group miss it, if it did not leave.
    pipeline.lengthen_session(session_s)
    began = monotonic()
    consumer = pipeline.consumer(1, env).wait_ready()
    eventually(lambda: consumer.metric("fairlane_running_items") == 4, what="a batch at its engine")
    eventually(lambda: consumer.metric("fairlane_prefetched_items") == 4, what="more behind it")
    assert consumer.stop() == 0
    assert monotonic() - began < batch_s, "a batch that began after this cannot have been waited for"
    gone = "the group without it"
    eventually(lambda: consumer.name not in pipeline.assignments(pipeline.pool_group()), session_s - 15, gone)

    replies = pipeline.replies()
    replies.read_to_end()
    ids = {request.request_id for request in requests}
    assert not ids & replies.by_id.keys()
    other = pipeline.consumer(2).wait_ready()
    answers = replies.wait(ids)
    assert {reply.outcome for reply in answers.values()} == {Outcome.OK}
    assert other.stop() == 0
    replies.read_to_end()
    replies.exactly_once(ids)
    usage.read_to_end()
    assert sorted(event.request_id for event in pipeline.decoded(usage, UsageEvent)) == sorted(ids)


def test_much_is_left_in_the_log(pipeline: Pipeline) -> None:
    item_s = 0.5
    consumer = pipeline.consumer(1, {**ENV, "SIMULATED_DECODE_TOKENS_PER_S": str(4 / item_s)}).wait_ready()
    items = [work_item(pipeline, offset=100 + number) for number in range(60)]
    write_work(pipeline, *items)
    eventually(lambda: consumer.metric("fairlane_prefetched_items") >= 50, what="all of it in its hands")
    began = monotonic()
    assert consumer.stop() == 0
    assert monotonic() - began < len(items) * item_s / 2

    replies = pipeline.replies()
    replies.read_to_end()
    ids = {item.request.request_id for item in items}
    answered = ids & replies.by_id.keys()
    replies.exactly_once(answered)
    assert 0 < len(answered) < len(items) / 2
    pipeline.consumer(1, {"MAX_BATCH_SIZE": "32"}).wait_ready()
    replies.wait(ids)
    replies.read_to_end()
    replies.exactly_once(ids)

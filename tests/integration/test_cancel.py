"""A cancel by the client, through dispatcher and consumer: whatever the request is at, it is answered once."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fairlane import names
from fairlane.client import Client
from fairlane.errors import Cancelled
from fairlane.outcomes import Outcome
from fairlane.records import UsageEvent
from tests.kit.pipeline import Pipeline, unique_name

pytestmark = pytest.mark.broker

SLOW = {"SIMULATED_DECODE_TOKENS_PER_S": "20", "MAX_BATCH_SIZE": "1"}
LONG = 400
"""Tokens: 20 s at that speed."""
WAIT_S = 30


@pytest.fixture(scope="module")
def pipeline(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    with Pipeline(broker, tmp_path_factory.mktemp("cancel"), unique_name(), tenants=("a",)) as pipeline:
        pipeline.start(env=SLOW)
        yield pipeline


@contextmanager
def client_of(pipeline: Pipeline) -> Iterator[Client]:
    with Client(tenant=pipeline.tenant("a"), bootstrap_servers=pipeline.settings.kafka_bootstrap_servers) as client:
        yield client


def test_what_runs_stops_and_what_it_cost_is_booked(pipeline: Pipeline) -> None:
    usage = pipeline.reader(names.LEDGER_USAGE, from_beginning=False)
    consumer = pipeline.processes[f"consumer-{pipeline.pool}-1"]
    model = pipeline.model_for("generate")
    with client_of(pipeline) as client:
        running = client.stream(model=model, prompt="go on", max_tokens=LONG, timeout_ms=120_000)
        next(iter(running))
        waiting = client.submit(model=model, prompt="wait", max_tokens=LONG, timeout_ms=120_000)
        waiting.published(WAIT_S)
        waiting.cancel()
        with pytest.raises(Cancelled):
            waiting.result(WAIT_S)
        running.close()
        reply = running.reply(WAIT_S)
        assert reply.outcome == Outcome.CANCELLED
        assert 0 < reply.usage.completion_tokens < LONG
        after = client.submit(model=model, prompt="next", max_tokens=2, timeout_ms=120_000)
        assert after.result(WAIT_S).outcome == Outcome.OK
        late = client.submit(model=model, prompt="done", max_tokens=2, timeout_ms=120_000)
        assert late.result(WAIT_S).outcome == Outcome.OK
        late.cancel()

    def booked() -> dict[str, UsageEvent]:
        return {event.request_id: event for event in pipeline.decoded(usage, UsageEvent)}

    usage.wait(lambda: late.request_id in booked(), what="the last one's usage")
    event = booked()[running.request_id]
    assert (event.outcome, event.completion_tokens) == (Outcome.CANCELLED, reply.usage.completion_tokens)
    assert consumer.metric("fairlane_cancelled_running_total") == 1
    replies = pipeline.replies("a")
    replies.read_to_end()
    replies.exactly_once([running.request_id, waiting.request_id, after.request_id, late.request_id])

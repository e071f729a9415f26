"""A consumer whose transactional.id another producer takes: what it ran is not committed, it ends, and comes back."""

from pathlib import Path

import pytest
from confluent_kafka import Producer

from fairlane import names
from fairlane.kafka_config import transactional_producer
from fairlane.outcomes import Outcome
from fairlane.records import Parameters, UsageEvent
from tests.kit.pipeline import Pipeline
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

SLOW = {"MAX_BATCH_SIZE": "4", "SIMULATED_DECODE_TOKENS_PER_S": "16"}
"""Half a second for a batch: the takeover comes while one runs."""
REQUESTS = 40
PATIENCE_MS = 600_000


def test_a_fenced_consumer_drops_its_batch_and_ends_and_nothing_is_answered_twice(
    broker: str, tmp_path: Path, unique: str
) -> None:
    with Pipeline(broker, tmp_path, unique, tenants=("a",), env=SLOW) as pipeline:
        usage = pipeline.reader(names.LEDGER_USAGE, from_beginning=False)
        pipeline.start(consumers=2)
        fenced, other = (pipeline.processes[f"consumer-{pipeline.pool}-{number}"] for number in (1, 2))
        requests = [
            pipeline.request(parameters=Parameters(max_tokens=8), timeout_ms=PATIENCE_MS) for _ in range(REQUESTS)
        ]
        pipeline.publish("a", *requests)
        eventually(lambda: fenced.metric("fairlane_running_items") > 0, 20, "a batch at its engine")

        transactional_id = f"{pipeline.group_prefix}.consumer.{pipeline.pool}.{fenced.name}"
        thief = Producer(transactional_producer(pipeline.settings, transactional_id, 10_000))
        thief.init_transactions(20)
        assert fenced.wait_ended() == 1
        (event,) = fenced.events("consumer_failed")
        assert event["kind"] == "FatalTransactionError"
        assert "Traceback" not in fenced.log()

        # As its supervisor would. Now the thief is the one that is fenced, and it had no transaction open.
        fenced.start().wait_ready()
        pipeline.wait_all_own()
        more = [pipeline.request(timeout_ms=PATIENCE_MS) for _ in range(8)]
        pipeline.publish("a", *more)
        request_ids = {request.request_id for request in (*requests, *more)}
        replies = pipeline.replies("a")
        answers = replies.wait(request_ids, 60)
        assert {answer.outcome for answer in answers.values()} == {Outcome.OK}
        assert {fenced.stop(), other.stop()} == {0}
        replies.read_to_end()
        replies.exactly_once(request_ids)
        usage.read_to_end()
        paid = [event.request_id for event in pipeline.decoded(usage, UsageEvent) if event.request_id in request_ids]
        assert sorted(paid) == sorted(request_ids)

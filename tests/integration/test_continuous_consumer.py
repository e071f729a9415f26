"""A consumer whose engine takes items while others run commits them out of order: what that is worth when it dies."""

from pathlib import Path

import pytest

from deploy.local.services import Service
from fairlane import names
from fairlane.outcomes import Outcome
from fairlane.records import Parameters, UsageEvent, WorkItem
from tests.kit.pipeline import Pipeline
from tests.kit.processes import ServiceProcess
from tests.kit.waiting import eventually
from tests.kit.work_items import work_item, write_work

pytestmark = [pytest.mark.full, pytest.mark.broker]

TOKENS_PER_S = 20
LONG_TOKENS = 400
"""20 s: it never ends before its consumer is killed."""
SHORT_ITEMS = 30
"""Of one token each: 1.5 s for all together."""
PATIENCE_MS = 600_000


def continuous(pipeline: Pipeline, number: int, **env: str) -> ServiceProcess:
    arguments = ("-m", "tests.kit.continuous_consumer", "--pool", pipeline.pool)
    return pipeline.launch(Service(f"consumer-{pipeline.pool}-{number}", arguments, env))


def generation(pipeline: Pipeline, tokens: int, offset: int) -> WorkItem:
    request = pipeline.request(parameters=Parameters(max_tokens=tokens))
    return work_item(pipeline, request=request, cost_tokens=tokens, offset=offset, deadline_ms=PATIENCE_MS)


def test_what_overtook_a_long_item_is_not_run_again_when_the_consumer_dies(
    broker: str, tmp_path: Path, unique: str
) -> None:
    with Pipeline(broker, tmp_path, unique, tenants=("a",)) as pipeline:
        usage, replies = pipeline.reader(names.LEDGER_USAGE, from_beginning=False), pipeline.replies("a")
        doomed = continuous(pipeline, 1, SIMULATED_DECODE_TOKENS_PER_S=str(TOKENS_PER_S)).wait_ready()
        long, *short = (
            generation(pipeline, LONG_TOKENS if number == 0 else 1, number) for number in range(1 + SHORT_ITEMS)
        )
        long_id, short_ids = long.request.request_id, {item.request.request_id for item in short}

        (place,) = write_work(pipeline, long, key=long_id)
        eventually(lambda: doomed.metric("fairlane_running_items") == 1, 20, "the long one at the engine")
        behind = write_work(pipeline, *short, key=long_id)
        assert {(other.topic, other.partition) for other in behind} == {(place.topic, place.partition)}
        overtook = replies.wait(short_ids, 15)
        assert {answer.outcome for answer in overtook.values()} == {Outcome.OK}
        assert doomed.metric("fairlane_running_items") == 1
        assert long_id not in replies.by_id
        doomed.kill()

        other = continuous(pipeline, 2).wait_ready()
        answer = replies.wait([long_id], 40)[long_id]
        assert answer.usage is not None
        assert (answer.outcome, answer.usage.completion_tokens) == (Outcome.OK, LONG_TOKENS)
        # Something behind all of it: when it is answered, whatever else would be run again has been read.
        last = generation(pipeline, 1, 1 + SHORT_ITEMS)
        last_id = last.request.request_id
        write_work(pipeline, last, key=long_id)
        replies.wait([last_id])
        assert other.metric("fairlane_batch_items_sum") == 2, "the long one and the last one"
        assert other.stop() == 0

        everything = {long_id, last_id, *short_ids}
        replies.read_to_end()
        replies.exactly_once(everything)
        usage.read_to_end()
        paid = [event.request_id for event in pipeline.decoded(usage, UsageEvent)]
        assert sorted(paid) == sorted(everything)

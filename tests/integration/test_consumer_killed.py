"""Half of a pool dies: the other half goes on with all it has, before the group moves the dead one's partitions."""

from collections.abc import Callable
from pathlib import Path
from time import monotonic

import pytest

from benchmarks.faults.promise import examine
from fairlane.outcomes import Outcome
from fairlane.records import Parameters
from tests.kit.pipeline import Pipeline
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.broker, pytest.mark.alone]

SESSION_TIMEOUT_S = 20
"""Of the pool's group; 45 s is the broker's default. Until it is over the group believes that the dead one lives."""

BATCH_ITEMS = 4
SPEED = {
    # A batch of 4 requests of 50 output tokens takes 0.4 s.
    "SIMULATED_PREFILL_TOKENS_PER_S": "1e9",
    "SIMULATED_DECODE_TOKENS_PER_S": "500",
    "MAX_BATCH_SIZE": str(BATCH_ITEMS),
}
REQUESTS_PER_S = 10
"""What one consumer answers."""
ANSWERS = 4 * 2 * BATCH_ITEMS
"""Four windows of one consumer."""
PATIENCE_MS = 600_000


def rate_per_s(answered: Callable[[], float], count: int) -> float:
    """The pace of the next so many answers."""
    before, began = answered(), monotonic()
    eventually(lambda: answered() >= before + count, what=f"{count} answers of the living")
    return count / (monotonic() - began)


def test_the_other_one_goes_on_before_the_group_knows(broker: str, tmp_path: Path, unique: str) -> None:
    with Pipeline(broker, tmp_path, unique, tenants=("a",), env=SPEED) as pipeline:
        pipeline.lengthen_session(SESSION_TIMEOUT_S)
        pipeline.start(consumers=2)
        dispatcher = pipeline.processes["dispatcher-1"]
        living, doomed = (pipeline.processes[f"consumer-{pipeline.pool}-{number}"] for number in (1, 2))

        def in_pool(metric: str) -> float:
            return dispatcher.metric(f"fairlane_{metric}", pool=pipeline.pool)

        def answered() -> float:
            return living.metric("fairlane_replies_total")

        replies = pipeline.replies("a")
        requests = [
            pipeline.request(parameters=Parameters(max_tokens=50), timeout_ms=PATIENCE_MS)
            for _ in range(REQUESTS_PER_S * (SESSION_TIMEOUT_S + 5))
        ]
        pipeline.publish("a", *requests)
        replies.reader.wait(lambda: len(replies.reader.records) >= 30, what="replies of both")
        eventually(lambda: in_pool("pool_consumers") == 2, what="both consumers in the dispatcher's books")
        # What it does here when nothing is wrong: 10 requests a second on a machine that is quick.
        calm_per_s = rate_per_s(answered, 4 * BATCH_ITEMS)

        doomed.kill()
        killed_at = monotonic()
        left = pipeline.assignments(pipeline.pool_group())[doomed.name]
        assert left, "the group knows nothing yet"
        eventually(lambda: in_pool("pool_consumers") == 1, what="one consumer in the dispatcher's books")
        # The window is that of the living one from now on. What it answers is asked of itself: the transaction that the
        # dead one left open hides replies from readers for as long as it may live.
        known_after_s = monotonic() - killed_at
        alone_per_s = rate_per_s(answered, ANSWERS)
        assert pipeline.assignments(pipeline.pool_group()).get(doomed.name) == left, "the group has moved nothing yet"
        assert known_after_s <= SESSION_TIMEOUT_S / 2, "a report counts for 3 s"
        assert alone_per_s > 0.6 * calm_per_s, f"{alone_per_s:.1f} requests a second, before {calm_per_s:.1f}"

        # The partitions move, what lay there is answered too, and everything once.
        answers = replies.wait([request.request_id for request in requests], 90)
        assert {answer.outcome for answer in answers.values()} == {Outcome.OK}
        findings = examine(pipeline.deployment, dict.fromkeys(answers, str(Outcome.OK)), postgres_dsn=None, timeout_s=0)
        assert findings.problems == []

"""Every consumer of a pool is killed with work in hand and comes back later: honest refusals, patient work waits, all
of it is served."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import sleep

import pytest

from benchmarks.load import LoadGenerator, Observed, submitted_within
from fairlane.clock import now_ms
from fairlane.names import backfill_topic, requests_topic
from fairlane.outcomes import Code, Outcome
from fairlane.records import InferenceReply
from fairlane_server.admission_rule import CAPACITY_TTL_MS
from tests.kit.load_kit import ENV, NO_ENGINE_TIME, POOL, Load, check_promise
from tests.kit.pipeline import Pipeline
from tests.kit.waiting import eventually, until_ms

pytestmark = [pytest.mark.broker, pytest.mark.alone]

_IMPATIENT_MS = 5_000
_WARM_UP_S = 5.0
_ANSWER_TIMEOUT_S = 180.0
_MEDIAN_REFUSAL_MS = 1_000
"""Who is told when its time is over is told after 5 s."""
_RETRIED = 5
_RETRY_TIMEOUT_S = 90.0
_MESSAGE = re.compile(r"it would be done in ([0-9.]+) s; its deadline, less the margin, is in ([0-9.]+) s")
_NO_LONGER = re.compile(r"after [0-9]+ ms of waiting the deadline can no longer be met")

Say = Callable[[str], None]


@pytest.mark.parametrize("outage_s", [12.0, pytest.param(30.0, marks=[pytest.mark.long, pytest.mark.timeout(600)])])
def test_refusals_are_honest_and_what_waits_is_served(
    broker: str, redis_url: str, unique: str, tmp_path: Path, seed: int, say: Say, outage_s: float
) -> None:
    say(f"seed {seed}")
    # What is queued during an outage is a matter of deadlines here.
    env = ENV | {"LATENCY_TARGET_MS": "normal=86400000"}
    with Pipeline(broker, tmp_path, unique, tenants=("a", "b"), redis_url=redis_url, env=env) as pipeline:
        pipeline.start(dispatchers=1, consumers=POOL.consumers)
        load = Load(pipeline, seed)
        # Together as much as the pool can do, so that it has work in hand when it dies.
        impatient = load.offered("a", 0.1, timeout_ms=_IMPATIENT_MS)
        patient = load.offered("b", 0.1)
        batch = load.offered("b", 0.8, backfill=True)
        planned = load.plan([impatient, patient, batch], _WARM_UP_S + outage_s)
        batch_topics = set(map(backfill_topic, pipeline.tenants))
        batch_ids = {record.request.request_id for record in planned if record.topic in batch_topics}
        with LoadGenerator(pipeline.settings, list(pipeline.tenants)) as generator:
            generator.start(planned)
            sleep(_WARM_UP_S)  # the load before the fault; nothing is waited for
            killed_at_ms, lost_at_ms = kill_all(pipeline)
            generator.wait_published(outage_s + 60)
            back_at_ms = now_ms()
            before_return = generator.observed()
            for number in range(1, POOL.consumers + 1):
                pipeline.consumer(number, NO_ENGINE_TIME)
            generator.wait_answered(_ANSWER_TIMEOUT_S)
            served_at_ms = now_ms()
            observed = generator.observed()
        check_promise(pipeline, observed)
        # On a machine that is too slow for the load some are refused before; that is no matter of the outage.
        refused = [one for one in observed if one.refused and one.submitted_at_ms >= killed_at_ms]
        messages = {request_id: replies[0].message or "" for request_id, replies in all_replies(pipeline).items()}
        values = {record.request.request_id: record.value for record in planned}
        retry_when_told(pipeline, refused, values, say)
    in_hand = [one for one in observed if 0 < one.dispatched_at_ms <= killed_at_ms < one.replied_at_ms]
    during = submitted_within(observed, (killed_at_ms, back_at_ms))
    patient_during = [one for one in during if one.timeout_ms != _IMPATIENT_MS]
    kinds = Counter(
        (one.request_id in batch_ids, one.timeout_ms == _IMPATIENT_MS, one.outcome, one.code) for one in during
    )
    say(
        f"{len(in_hand)} in hand when the consumers died, {len(during)} came while nobody was there; all answered "
        f"{served_at_ms - back_at_ms} ms after the return: (batch, impatient, outcome, code) {dict(kinds)}"
    )
    assert in_hand
    # Who waits is not answered before the return, and then served; who could not wait is told so, before it or at it.
    unanswered = {one.request_id for one in before_return if not one.outcome}
    assert {one.request_id for one in patient_during} <= unanswered
    assert {one.request_id in batch_ids for one in patient_during} == {True, False}
    patient_all = [one for one in observed if one.timeout_ms != _IMPATIENT_MS]
    assert {one.outcome for one in patient_all} == {Outcome.OK}
    assert {one.outcome for one in in_hand} <= {Outcome.OK, Outcome.EXPIRED}
    impatient_during = [one for one in during if one.timeout_ms == _IMPATIENT_MS]
    known = submitted_within(impatient_during, (lost_at_ms, back_at_ms))
    assert {one.outcome for one in known} == {Outcome.REJECTED}
    # Who came before that was known, and had time left at the return, may have been served after all.
    over = [one for one in impatient_during if one.submitted_at_ms + _IMPATIENT_MS < back_at_ms]
    assert {one.outcome for one in over} <= {Outcome.REJECTED, Outcome.EXPIRED}
    check_refusals(refused, messages, lost_at_ms, say)


def kill_all(pipeline: Pipeline) -> tuple[int, int]:
    """SIGKILL every consumer. Returns when the last was dead, and when the dispatcher knew that it has none."""
    consumers = [pipeline.processes[f"consumer-{pipeline.pool}-{number}"] for number in range(1, POOL.consumers + 1)]
    for consumer in consumers:
        consumer.kill()
    killed_at_ms = now_ms()
    dispatcher = pipeline.processes["dispatcher-1"]
    eventually(
        lambda: dispatcher.metric("fairlane_pool_consumers", pool=pipeline.pool) == 0,
        what="the dispatcher's knowing that all consumers are gone",
    )
    return killed_at_ms, now_ms()


def all_replies(pipeline: Pipeline) -> dict[str, list[InferenceReply]]:
    replies = pipeline.replies()
    replies.read_to_end()
    return replies.by_id


def retry_when_told(pipeline: Pipeline, refused: Sequence[Observed], values: dict[str, bytes], say: Say) -> None:
    """Those that may come back first do so, under the same ids and no sooner than they were told, and are served."""
    again = pipeline.replies("a", from_beginning=False)
    first = sorted(refused, key=may_retry_at_ms)[:_RETRIED]
    for one in first:
        until_ms(may_retry_at_ms(one), _RETRY_TIMEOUT_S)
        pipeline.write(requests_topic(one.tenant), [(one.request_id.encode(), values[one.request_id])])
    outcomes = Counter(reply.outcome for reply in again.wait([one.request_id for one in first]).values())
    say(f"{len(first)} of {len(refused)} that were refused tried again when told: {dict(outcomes)}")
    assert outcomes == {Outcome.OK: _RETRIED}


def may_retry_at_ms(one: Observed) -> int:
    return one.seen_at_ms + (one.retry_after_ms or 0)


def check_refusals(refused: Sequence[Observed], messages: dict[str, str], lost_at_ms: int, say: Say) -> None:
    """Told at once, why, and to come back no sooner than such an outage is expected to end: after as long again.

    By the time of the reply's record: what a killed consumer's open transaction hides is seen when the broker ends it.
    """
    times = [one.replied_at_ms - one.submitted_at_ms for one in refused]
    retries = [one.retry_after_ms or 0 for one in refused]
    say(f"{len(times)} refused after {median(times)} ms in the middle, to retry in {min(retries)} to {max(retries)} ms")
    assert {one.code for one in refused} == {Code.DEADLINE_UNMEETABLE}
    assert median(times) <= _MEDIAN_REFUSAL_MS
    # Before it called the pool lost the dispatcher had not heard of it for that long.
    heard_at_ms = lost_at_ms - CAPACITY_TTL_MS
    for one in refused:
        if one.submitted_at_ms >= lost_at_ms:
            assert (one.retry_after_ms or 0) >= one.submitted_at_ms - heard_at_ms
        if one.submitted_at_ms < lost_at_ms and _NO_LONGER.fullmatch(messages[one.request_id]):
            continue  # it was in hand, and was told when the pool was lost
        told = _MESSAGE.fullmatch(messages[one.request_id])
        assert told is not None, messages[one.request_id]
        predicted_s, left_s = map(float, told.groups())
        assert predicted_s > left_s
        assert left_s <= _IMPATIENT_MS / 1000

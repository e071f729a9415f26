"""What consumers tell the dispatchers, on the real broker: capacity, and work that no engine has room for."""

import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from statistics import median

import pytest

from fairlane import names
from fairlane.outcomes import Code, Decision, Health, Outcome
from fairlane.records import AuditEvent, CapacityReport, TenantSpec, UsageEvent, WorkItem
from tests.kit.deployment import model_per_task
from tests.kit.log_reader import LogReader, Replies
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.processes import ServiceProcess
from tests.kit.waiting import eventually
from tests.kit.work_items import work_item, write_work

pytestmark = [pytest.mark.full, pytest.mark.broker]

MEMORY_TOKENS = 50
FITS, TOO_LARGE = "x" * 4 * 20, "x" * 4 * 100


@pytest.fixture(scope="module")
def pipeline(broker: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    """A pool and a pool of one tenant, without consumers and without a dispatcher: work is written as one would."""
    folder, unique = tmp_path_factory.mktemp("capacity"), unique_name()
    pool, dedicated = f"{unique}-pool", f"{unique}-own"
    words, *others = model_per_task(unique, pool)
    words = replace(words, max_batch_size=8, max_batch_tokens=4_096, dedicated_pools=(dedicated,))
    tenants = ("a", TenantSpec("b", pool=dedicated))
    with Pipeline(broker, folder, unique, tenants=tenants, models=(words, *others)) as pipeline:
        yield pipeline


@pytest.fixture
def reports(pipeline: Pipeline) -> LogReader:
    return pipeline.reader(names.CONTROL_CAPACITY, from_beginning=False)


@pytest.fixture(scope="module")
def replies(pipeline: Pipeline) -> Replies:
    return pipeline.replies()


def of(pipeline: Pipeline, reader: LogReader, consumer: ServiceProcess) -> list[CapacityReport]:
    """What one consumer reported, by its key."""
    name = consumer.name.encode()
    return [pipeline.codec.decode_as(CapacityReport, one.value()) for one in reader.records if one.key() == name]


def started(pipeline: Pipeline, env: dict[str, str] | None = None, *, pool: str | None = None) -> ServiceProcess:
    consumer = pipeline.consumer(1, env, pool=pool).wait_ready()
    pipeline.wait_all_own()
    return consumer


@pytest.mark.alone
def test_an_idle_and_a_busy_consumer_report_four_times_a_second_and_the_last_report_drains(
    pipeline: Pipeline, reports: LogReader, replies: Replies
) -> None:
    # Eight answers of 4 tokens take 1.6 s: the engine runs while reports are sent.
    consumer = started(pipeline, {"SIMULATED_DECODE_TOKENS_PER_S": "20"})
    reports.wait(lambda: len(of(pipeline, reports, consumer)) >= 8, what="reports of an idle consumer")
    idle = of(pipeline, reports, consumer)
    first = idle[0]
    assert (first.pool, first.models) == (pipeline.pool, tuple(sorted(model.model for model in pipeline.models)))
    assert (first.health, first.draining) == (Health.HEALTHY, False)
    # The largest of its models; the settings bound them.
    assert (first.max_batch_size, first.max_batch_tokens) == (32, 16_384)
    assert (first.cost_tokens_per_s, first.in_flight_items, first.batch_fill) == (0, 0, 0)
    owned = {partition for _topic, partition in pipeline.assignments(pipeline.pool_group())[consumer.name]}
    assert set(idle[-1].partitions) == owned != set()

    work = [work_item(pipeline, offset=number) for number in range(24)]
    write_work(pipeline, *work)
    answers = replies.wait([one.request.request_id for one in work])
    reports.read_to_end()
    reports.wait(lambda: of(pipeline, reports, consumer)[-1].in_flight_items == 0, what="a report of nothing left")
    busy = of(pipeline, reports, consumer)[len(idle) :]
    assert max(report.in_flight_items for report in busy) >= 16
    assert max(report.in_flight_tokens for report in busy) >= 16 * work[0].cost_tokens
    last = busy[-1]
    # 8 x 28 cost tokens in the 1.6 s of a batch, or somewhat more, are 140 a second.
    batch_s = median(
        ((reply.timings.engine_finished_at_ms or 0) - (reply.timings.engine_started_at_ms or 0)) / 1_000
        for reply in answers.values()
    )
    assert batch_s >= 1.6
    assert 0.7 * 8 * 28 <= last.cost_tokens_per_s * batch_s <= 1.1 * 8 * 28
    assert 0.7 * 8 * 4 <= last.decode_tokens_per_s * batch_s <= 1.1 * 8 * 4
    assert last.prefill_tokens_per_s == pytest.approx(last.decode_tokens_per_s * 5, rel=0.01)
    assert last.batch_fill > 0.5
    assert consumer.metric("fairlane_capacity_tokens_per_second", kind="cost") == pytest.approx(last.cost_tokens_per_s)

    times = [report.reported_at_ms for report in (*idle, *busy)]
    gaps = sorted(later - earlier for earlier, later in pairwise(times))
    assert 200 <= gaps[len(gaps) // 2] <= 300
    # There were three batches. A machine that does something else for a moment makes one gap, or two.
    assert gaps[-3] < 1_500, "no batch keeps it from reporting"

    assert consumer.stop() == 0
    reports.read_to_end()
    told = [report.draining for report in of(pipeline, reports, consumer)]
    assert told == [False] * (len(told) - 1) + [True]


@pytest.mark.alone
def test_it_says_that_it_drains_before_its_batch_is_done(
    pipeline: Pipeline, reports: LogReader, replies: Replies
) -> None:
    consumer = started(pipeline, {"SIMULATED_DECODE_TOKENS_PER_S": "1"})
    one = work_item(pipeline)
    write_work(pipeline, one)
    reports.wait(lambda: any(report.in_flight_items for report in of(pipeline, reports, consumer)), what="it runs")
    consumer.send(signal.SIGTERM)
    assert consumer.wait_ended() == 0
    reply = replies.wait([one.request.request_id])[one.request.request_id]
    assert reply.outcome == Outcome.OK
    reports.read_to_end()
    first = next(report for report in of(pipeline, reports, consumer) if report.draining)
    assert first.in_flight_items == 1
    assert first.reported_at_ms < (reply.timings.engine_finished_at_ms or 0), "the item takes four seconds"


def test_an_item_too_large_is_handed_back_once_and_then_refused(pipeline: Pipeline, replies: Replies) -> None:
    ledgers = {name: pipeline.reader(name, from_beginning=False) for name in (names.LEDGER_USAGE, names.LEDGER_AUDIT)}
    returned = pipeline.reader(names.returned_topic(pipeline.pool))
    large = work_item(pipeline, TOO_LARGE, offset=100)
    small = [work_item(pipeline, offset=101 + number) for number in range(5)]
    placed = write_work(pipeline, *small[:2], large, *small[2:])  # before there is a consumer: they make one batch
    consumer = started(pipeline, {"SIMULATED_MEMORY_TOKENS": str(MEMORY_TOKENS)})
    answers = replies.wait([one.request.request_id for one in small])
    assert {answer.outcome for answer in answers.values()} == {Outcome.OK}

    returned.wait(lambda: returned.records)
    (record,) = returned.records
    back = pipeline.codec.decode_as(WorkItem, record.value())
    assert record.key() == large.request.request_id.encode()
    assert back == replace(large, handed_back=1)
    # What is readable with read_committed was committed together: the ledgers have it as well, and nothing is answered.
    usage, audit = events_of(pipeline, ledgers, large)
    assert [(one.outcome, one.code, one.work) for one in usage] == [(Outcome.REJECTED, Code.OVERLOADED, placed[2])]
    assert [(one.decision, one.code, one.source) for one in audit] == [
        (Decision.HANDED_BACK, Code.OVERLOADED, large.source)
    ]
    replies.read_to_end()
    assert large.request.request_id not in replies.by_id
    tenant = large.tenant
    assert consumer.metric("fairlane_handed_back_total", tenant=tenant) == 1
    assert consumer.metric("fairlane_replies_total", tenant=tenant, code="overloaded") == 0

    (again,) = write_work(pipeline, back)
    answer = replies.wait([large.request.request_id])[large.request.request_id]
    assert (answer.outcome, answer.code, answer.output) == (Outcome.REJECTED, Code.OVERLOADED, None)
    assert str(MEMORY_TOKENS) in (answer.message or "")
    usage, audit = events_of(pipeline, ledgers, large)
    assert [one.work for one in usage] == [placed[2], again]
    assert [one.decision for one in audit] == [Decision.HANDED_BACK, Decision.REFUSED]

    (after,) = (work_item(pipeline, offset=110),)
    write_work(pipeline, after)
    replies.wait([after.request.request_id])
    assert consumer.stop() == 0
    for reader in (returned, replies):
        reader.read_to_end()
    assert len(returned.records) == 1, "the second time it is refused"
    replies.exactly_once([one.request.request_id for one in (large, *small, after)])
    assert TOO_LARGE not in consumer.log()


def test_what_was_handed_back_and_then_fits_is_answered(pipeline: Pipeline, replies: Replies) -> None:
    consumer = started(pipeline, {"SIMULATED_MEMORY_TOKENS": str(MEMORY_TOKENS)})
    fits = replace(work_item(pipeline, offset=200), handed_back=1, degradations=("shorter_context",))
    write_work(pipeline, fits)
    answer = replies.wait([fits.request.request_id])[fits.request.request_id]
    assert (answer.outcome, answer.degradations) == (Outcome.OK, ("shorter_context",))
    assert consumer.stop() == 0


def test_a_consumer_that_is_killed_hands_nothing_back_twice(pipeline: Pipeline, replies: Replies) -> None:
    usage = pipeline.reader(names.LEDGER_USAGE, from_beginning=False)
    returned = pipeline.reader(names.returned_topic(pipeline.pool), from_beginning=False)
    env = {"SIMULATED_MEMORY_TOKENS": str(MEMORY_TOKENS), "SIMULATED_DECODE_TOKENS_PER_S": "50", "MAX_BATCH_SIZE": "4"}
    work = [work_item(pipeline, FITS if number % 4 == 0 else TOO_LARGE, offset=400 + number) for number in range(80)]
    small, large = work[::4], [one for one in work if one not in work[::4]]
    write_work(pipeline, *work)
    for enough in (15, 30):
        consumer = started(pipeline, env)
        returned.wait(partial(has_records, returned, enough), what="some work handed back")
        consumer.kill()
    assert len(returned.records) < len(large), "killed while there was work left"
    consumer = started(pipeline, env)
    replies.wait([one.request.request_id for one in small], 30)
    returned.wait(lambda: len(returned.records) >= len(large))
    assert consumer.stop() == 0
    for reader in (returned, usage, replies):
        reader.read_to_end()
    ids = sorted(one.request.request_id for one in large)
    assert sorted((record.key() or b"").decode() for record in returned.records) == ids
    settled = [event.request_id for event in pipeline.decoded(usage, UsageEvent)]
    assert sorted(settled) == sorted(one.request.request_id for one in work)
    assert not replies.by_id.keys() & set(ids)
    replies.exactly_once([one.request.request_id for one in small])


def test_what_cannot_be_handed_back_is_refused_at_once(pipeline: Pipeline, replies: Replies) -> None:
    """The topic of the pool it names is not there."""
    consumer = started(pipeline, {"SIMULATED_MEMORY_TOKENS": str(MEMORY_TOKENS)})
    stray = replace(work_item(pipeline, TOO_LARGE, offset=500), pool=f"{pipeline.unique}-nowhere")
    write_work(pipeline, stray, pool=pipeline.pool)
    answer = replies.wait([stray.request.request_id], 60)[stray.request.request_id]
    assert (answer.outcome, answer.code) == (Outcome.REJECTED, Code.OVERLOADED)
    assert "cannot be handed back" in (answer.message or "")
    assert consumer.stop() == 0


def test_a_pool_of_one_tenant_is_served_by_consumers_of_its_own(
    pipeline: Pipeline, reports: LogReader, replies: Replies
) -> None:
    dedicated = pipeline.models[0].dedicated_pools[0]
    consumer = pipeline.consumer(1, pool=dedicated).wait_ready()
    own = work_item(pipeline, tenant="b", pool=dedicated, offset=300)
    write_work(pipeline, own)
    answer = replies.wait([own.request.request_id])[own.request.request_id]
    assert (answer.outcome, answer.tenant) == (Outcome.OK, pipeline.tenant("b"))
    reports.wait(lambda: of(pipeline, reports, consumer))
    report = of(pipeline, reports, consumer)[-1]
    assert (report.pool, report.models) == (dedicated, (pipeline.models[0].model,))
    assert (report.max_batch_size, report.max_batch_tokens) == (8, 4_096)
    assert consumer.stop() == 0


def test_a_member_without_partitions_promises_nothing(pipeline: Pipeline, reports: LogReader) -> None:
    """Five members, four partitions a topic."""
    members = {member.name: member for member in (pipeline.consumer(number) for number in range(1, 6))}
    owned: dict[str, set[tuple[str, int]]] = {}

    def settled() -> bool:
        nonlocal owned
        # With four that own something it may still be the fourth that is about to give its partitions to the fifth.
        if not pipeline.is_stable(pipeline.pool_group()):
            return False
        owned = pipeline.assignments(pipeline.pool_group())
        return owned.keys() == members.keys() and sum(map(bool, owned.values())) == 4

    # Five processes start at once, on a machine that may be busy.
    eventually(settled, 120, "five members, one of them without partitions")
    # Whoever owned something for a moment, before the others came, has said so; now it must be silent.
    reports.read_to_end()
    silent = {name for name, partitions in owned.items() if not partitions}
    said = {name: len(of(pipeline, reports, member)) for name, member in members.items()}
    reports.wait(
        lambda: all(
            len(of(pipeline, reports, member)) >= said[name] + 8
            for name, member in members.items()
            if name not in silent
        ),
        what="two seconds of reports",
    )
    for name in silent:
        assert len(of(pipeline, reports, members[name])) <= said[name] + 2
    for member in members.values():
        member.send(signal.SIGTERM)
    for member in members.values():
        assert member.wait_ended() == 0


def has_records(reader: LogReader, count: int) -> bool:
    return len(reader.records) >= count


def events_of(
    pipeline: Pipeline, ledgers: dict[str, LogReader], item: WorkItem
) -> tuple[list[UsageEvent], list[AuditEvent]]:
    """What stands in the ledgers about an item, in order."""
    for reader in ledgers.values():
        reader.read_to_end()
    request_id = item.request.request_id
    usage = pipeline.decoded(ledgers[names.LEDGER_USAGE], UsageEvent)
    audit = pipeline.decoded(ledgers[names.LEDGER_AUDIT], AuditEvent)
    return (
        [event for event in usage if event.request_id == request_id],
        [event for event in audit if event.request_id == request_id],
    )

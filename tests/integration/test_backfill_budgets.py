"""Batch jobs under budgets: reserved as a whole, refused if they do not fit, held back when the money is gone."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fairlane.clock import now_ms
from fairlane.outcomes import Code, Outcome
from fairlane.records import Budget, InferenceReply, Parameters, Price, TenantSpec
from fairlane_server.postgres.connection import connect
from producers.backfill.job import Status, Wanted
from tests.kit.backfill_bench import BackfillBench, backfill_bench, read_lines
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = pytest.mark.broker

# A row costs 4 x 8 nanos for its answer, and a little for its prompt.
PRICE = Price(0, None, input_nanos=1_000_000, output_nanos=8_000_000)
LIMIT = 5_000
MONTH = Budget("tenant", "month", "XTS", hard_nanos=LIMIT)


@pytest.fixture(scope="module")
def bench(broker: str, postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackfillBench]:
    """With a dispatcher, a consumer and a recorder on one database."""
    folder = tmp_path_factory.mktemp("budgets")
    tenants = (TenantSpec("a", budgets=(MONTH,)), TenantSpec("b", budgets=(replace(MONTH, hard_nanos=50_000),)))
    with Pipeline(broker, folder, unique_name(), tenants=tenants) as pipeline:
        pipeline.price(PRICE)
        with backfill_bench(pipeline, postgres, folder) as bench:
            pipeline.recorder(postgres_dsn=bench.database.recorder_dsn)
            pipeline.start(env={"POSTGRES_DSN": bench.database.dispatcher_dsn})
            yield bench
            for process in pipeline.processes.values():
                # Before its database goes.
                process.kill()


def places(bench: BackfillBench, name: str, rows: int) -> tuple[Path, Path]:
    return bench.file(f"{name}.jsonl", bench.lines(rows)), bench.folder / f"{name}.out.jsonl"


def answered(pipeline: Pipeline) -> InferenceReply:
    """The reply to a request of more than 100 nanos, by a dispatcher that has just started."""
    dispatcher = pipeline.processes["dispatcher-1"]
    dispatcher.kill()
    dispatcher.start()
    dispatcher.wait_ready()
    request = pipeline.request(parameters=Parameters(max_tokens=16))
    replies = pipeline.replies("a", from_beginning=False)
    pipeline.publish("a", request)
    return replies.wait([request.request_id])[request.request_id]


def test_a_job_that_does_not_fit_as_a_whole_is_refused_before_anything_is_sent(bench: BackfillBench) -> None:
    job = bench.submit(*places(bench, "large", 1_000))
    assert bench.run(job) is Status.FAILED
    found = bench.found(job)
    assert found.planned == 0
    assert found.reason is not None
    assert "more than what is left of the month budget of the tenant" in found.reason
    assert "it renews at" in found.reason


def test_a_job_holds_what_it_has_reserved_against_other_jobs_and_requests(bench: BackfillBench) -> None:
    pipeline = bench.pipeline
    first = bench.submit(*places(bench, "first", 100))
    # As if a runner had begun it, and were slow.
    with connect(bench.database.owner_dsn, "tests") as owner:
        owner.execute("SELECT set_config('fairlane.tenant', '*', true)")
        owner.execute(
            "UPDATE backfill_jobs SET status = 'running', reserved_nanos = 4900, reserved_currency = 'XTS', "
            "lease_until = clock_timestamp() + interval '1 hour' WHERE job_id = %s",
            (first.job_id,),
        )
    second = bench.submit(*places(bench, "second", 10))
    assert bench.run(second) is Status.FAILED
    assert "0.0000049 reserved by other jobs" in (bench.found(second).reason or "")

    paused = bench.submit(*places(bench, "paused", 10))
    with connect(bench.database.owner_dsn, "tests") as owner:
        owner.execute("SELECT set_config('fairlane.tenant', '*', true)")
        owner.execute(
            "UPDATE backfill_jobs SET status = 'paused', planned_rows = 5, reserved_nanos = 340, "
            "reserved_currency = 'XTS' WHERE job_id = %s",
            (paused.job_id,),
        )
    assert bench.store.steer(paused.job_id, Wanted.RUN, now_ms()) is not None
    assert bench.run(paused) is Status.FAILED, "what it had reserved was free meanwhile"
    assert "0.0000049 reserved by other jobs" in (bench.found(paused).reason or "")

    # A dispatcher that starts knows it before it reads the first request.
    assert answered(pipeline).code == Code.INSUFFICIENT_QUOTA
    with connect(bench.database.owner_dsn, "tests") as owner:
        owner.execute("SELECT set_config('fairlane.tenant', '*', true)")
        owner.execute(
            "UPDATE backfill_jobs SET status = 'queued', reserved_nanos = NULL, lease_until = NULL WHERE job_id = %s",
            (first.job_id,),
        )
    assert answered(pipeline).outcome == Outcome.OK
    assert bench.run(first) is Status.COMPLETED
    assert bench.found(first).tally.ok == 100


@pytest.mark.full
def test_a_job_whose_budget_ends_under_way_ends_with_what_was_paid_for(bench: BackfillBench) -> None:
    pipeline = bench.pipeline
    source, output = places(bench, "ends", 200)
    job = bench.submit(source, output, tenant="b", chunk_rows=50, max_open_chunks=4, window_ms=60_000)
    consumer, dispatcher = pipeline.processes[f"consumer-{pipeline.pool}-1"], pipeline.processes["dispatcher-1"]
    consumer.kill()
    eventually(lambda: dispatcher.metric("fairlane_pool_consumers", pool=pipeline.pool) == 0, what="the lost pool")
    runner = bench.process("run", job.job_id)
    eventually(lambda: bench.found(job).planned == 200, what="all rows under way")
    tenant = pipeline.tenant("b")
    # Enough for one row, and a soft amount that shows when the dispatcher knows it.
    lower = replace(MONTH, soft_nanos=0, hard_nanos=50)
    pipeline.tenants[tenant] = replace(pipeline.tenants[tenant], budgets=(lower,))
    pipeline.apply()
    eventually(lambda: dispatcher.metric("fairlane_budget_spent_ratio", tenant=tenant) >= 1, what="the lower budget")
    consumer.start()
    eventually(lambda: bench.found(job).status.is_final, what="the end of the job", timeout_s=120)
    runner.kill()
    found = bench.found(job)
    assert found.status is Status.EXPIRED
    assert found.tally.failed == 0, "no row fails for the budget"
    assert found.tally.expired >= 190
    rows = read_lines(output)
    assert len(rows) == 200, "no row is lost"
    assert {row["outcome"] for row in rows} <= {Outcome.OK, Outcome.EXPIRED}

"""Jobs that are cancelled, paused or out of time while they run, on real parts with an engine that takes its time."""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fairlane.clock import now_ms
from fairlane.names import JOBS_REPLIES, backfill_topic
from fairlane.outcomes import Outcome
from fairlane_server.processes.service import StopSignal
from producers.backfill.job import MAX_COST_REACHED, Job, RowIds, Status
from tests.kit.backfill_bench import BackfillBench, Command, backfill_bench, read_lines
from tests.kit.log_reader import Replies
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.processes import ServiceProcess
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

# At most so many, however fast the machine is.
ROWS_PER_S = 32
SLOW_ENGINE = {"SIMULATED_BATCH_MS": "250", "MAX_BATCH_SIZE": "8"}
# A consumer that is stopped amid a transaction goes on with it.
PATIENT = {"TRANSACTION_TIMEOUT_MS": "60000"}
LONG_S = 240.0
PAUSED, TOO_EXPENSIVE, CANCELLED, EXPIRED, NOT_TO_BE_RUN = 3, 4, 5, 6, 7
DAY_MS = 86_400_000


@pytest.fixture(scope="module")
def bench(broker: str, postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackfillBench]:
    folder = tmp_path_factory.mktemp("steering")
    with Pipeline(broker, folder, unique_name(), env=SLOW_ENGINE | PATIENT) as pipeline:
        pipeline.start()
        # A consumer that is stopped stays a member.
        pipeline.lengthen_session(60)
        with backfill_bench(pipeline, postgres, folder) as made:
            yield made


@pytest.fixture
def command(bench: BackfillBench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return bench.command(monkeypatch, capsys)


def runner_of(bench: BackfillBench, job: Job, number: int = 1) -> ServiceProcess:
    return bench.process("run", job.job_id, "--lease-s", "2", "--json", name=f"run-{job.job_id}-{number}")


def wait_until_some_are_done(bench: BackfillBench, job: Job, planned: int = 1) -> None:
    def under_way() -> bool:
        found = bench.found(job)
        return found.tally.ok > 0 and found.planned >= planned

    eventually(under_way, what="a row that is done")
    assert not bench.found(job).status.is_final


@contextmanager
def engines_stopped(bench: BackfillBench) -> Iterator[None]:
    """However slow the test is, no row more is done meanwhile."""
    consumer = bench.pipeline.processes[f"consumer-{bench.pipeline.pool}-1"]
    consumer.pause()
    try:
        yield
    finally:
        consumer.resume()


def waiting(bench: BackfillBench) -> float:
    return bench.pipeline.processes["dispatcher-1"].metric("fairlane_waiting_requests", pool=bench.pipeline.pool)


def ids_of(job: Job, rows: int) -> set[str]:
    ids = RowIds(job.job_id, job.partitions)
    return {ids.id_of(row) for row in range(rows)}


def sent(bench: BackfillBench, job: Job) -> Counter[str]:
    """How often each row of a job stands in its tenant's topic."""
    reader = bench.pipeline.reader(backfill_topic(job.tenant))
    reader.read_to_end()
    own = ids_of(job, job.total_rows)
    keys = (record.key() for record in reader.records)
    return Counter(key.decode() for key in keys if isinstance(key, bytes) and key.decode() in own)


def test_a_job_that_is_cancelled_half_way(bench: BackfillBench, command: Command) -> None:
    rows, output = 500, bench.folder / "cancelled.out.jsonl"
    job = bench.submit(bench.file("cancelled.jsonl", bench.lines(rows)), output, chunk_rows=20, max_open_chunks=25)
    replies = Replies(bench.pipeline.reader(JOBS_REPLIES, from_beginning=False), bench.pipeline.codec)
    topic = bench.pipeline.reader(backfill_topic(job.tenant), from_beginning=False)
    stop = StopSignal()
    with ThreadPoolExecutor(1) as pool:
        try:
            # Whatever is still under way then is waited for.
            run = pool.submit(bench.run, job, stop=stop, grace_ms=1_000 * round(2 * LONG_S))
            wait_until_some_are_done(bench, job, planned=rows)
            with engines_stopped(bench):
                assert command("cancel", job.job_id)[0] == 0
                assert bench.found(job).status is Status.CANCELLING
                topic.wait(lambda: len(topic.records) > rows, LONG_S, "the cancels of its rows")
            assert run.result(LONG_S) is Status.CANCELLED
        finally:
            stop.stop()

    done, found = bench.found(job), read_lines(output)
    assert (done.status, done.tally.rows) == (Status.CANCELLED, rows)
    assert [line["row"] for line in found] == list(range(rows))
    outcomes = Counter(line["outcome"] for line in found)
    assert outcomes == {Outcome.OK: done.tally.ok, Outcome.CANCELLED: done.tally.cancelled}
    assert done.tally.cancelled > 0
    # Nobody gave up waiting: each was cancelled where it waited, and said so.
    replies.read_to_end()
    answers = replies.exactly_once(ids_of(job, rows))
    assert Counter(answer.outcome for answer in answers.values()) == outcomes
    eventually(lambda: waiting(bench) == 0, what="an empty queue")


def run_out_of_time(bench: BackfillBench, command: Command, window_s: int) -> list[dict[str, Any]]:
    """The rows that were answered before the window ended, of more than can be."""
    rows, name = 2 * ROWS_PER_S * window_s, f"late-{window_s}"
    output, errors = bench.folder / f"{name}.out.jsonl", bench.folder / f"{name}.err.jsonl"
    source = bench.file(f"{name}.jsonl", bench.lines(rows))
    _, said, _ = command(
        *("submit", str(source), str(output), "--errors", str(errors), "--tenant", bench.pipeline.tenant("a")),
        *("--chunk-rows", "20", "--max-open-chunks", "3", "--completion-window", f"{window_s}s", "--json"),
    )
    submitted = json.loads(said)
    assert submitted["deadline_at_ms"] == submitted["created_at_ms"] + 1_000 * window_s

    assert command("run", submitted["job_id"])[0] == EXPIRED

    ended = json.loads(command("status", submitted["job_id"], "--json")[1])
    assert (ended["status"], ended["deadline_at_ms"]) == ("expired", submitted["deadline_at_ms"])
    good, bad = read_lines(output), read_lines(errors)
    assert sorted(line["row"] for line in good + bad) == list(range(rows))
    assert {line["outcome"] for line in good} <= {Outcome.OK}
    assert {line["outcome"] for line in bad} == {Outcome.EXPIRED}
    assert (ended["rows"]["ok"], ended["rows"]["expired"]) == (len(good), len(bad))
    eventually(lambda: waiting(bench) == 0, what="an empty queue")
    return good


def test_a_job_whose_completion_window_ends_while_it_runs(bench: BackfillBench, command: Command) -> None:
    # A slow machine takes longer to answer the first row.
    assert any(run_out_of_time(bench, command, window_s) for window_s in (8, 30, 120))


def test_a_job_that_nobody_ran_within_its_window_ends_without_a_row_sent(bench: BackfillBench) -> None:
    output = bench.folder / "forgotten.out.jsonl"
    source = bench.file("forgotten.jsonl", [*bench.lines(30), "no json"])
    job = bench.submit(source, output, tenant="b", clock=lambda: now_ms() - DAY_MS - 1)
    assert job.job_id in {one.job_id for one in bench.store.waiting(1)}

    assert bench.run(job) is Status.EXPIRED

    assert Counter(line["outcome"] for line in read_lines(output)) == {Outcome.EXPIRED: 30, Outcome.REJECTED: 1}
    assert not sent(bench, job)
    assert bench.found(job).deadline_at_ms == job.created_at_ms + DAY_MS


def test_a_job_that_is_paused_while_it_runs_and_gone_on_with(bench: BackfillBench, command: Command) -> None:
    rows, output = 160, bench.folder / "paused.out.jsonl"
    job = bench.submit(bench.file("paused.jsonl", bench.lines(rows)), output, chunk_rows=20, max_open_chunks=2)
    first = runner_of(bench, job)
    wait_until_some_are_done(bench, job)

    # No chunk is planned then but those that may be open.
    with engines_stopped(bench):
        assert command("pause", job.job_id)[0] == 0
        assert first.wait_ended(LONG_S) == PAUSED, first.log()

    left = bench.found(job)
    assert left.status is Status.PAUSED
    assert left.planned < rows
    assert not output.exists()
    assert command("run", job.job_id)[0] == NOT_TO_BE_RUN
    assert command("resume", job.job_id)[0] == 0
    assert command("run", job.job_id)[0] == 0
    found = read_lines(output)
    assert [line["row"] for line in found] == list(range(rows))
    assert {line["outcome"] for line in found} == {Outcome.OK}
    assert sent(bench, job) == dict.fromkeys(ids_of(job, rows), 1)


def stopped_by_its_limit(bench: BackfillBench, command: Command, output: Path, rows: int) -> Job:
    """A job that is begun, and that nobody runs."""
    job = bench.submit(bench.file(f"{output.name}.in", bench.lines(rows)), output, chunk_rows=4, max_open_chunks=2)
    assert command("pause", job.job_id)[0] == 0
    assert command("resume", job.job_id, "--max-cost", "100")[0] == 0
    code, _, said = command("run", job.job_id)
    assert (code, f"resume {job.job_id} --max-cost" in said) == (TOO_EXPENSIVE, True)
    stopped = bench.found(job)
    assert (stopped.status, stopped.reason) == (Status.PAUSED, MAX_COST_REACHED)
    assert 0 < stopped.tally.ok < rows
    assert command("run", job.job_id)[0] == NOT_TO_BE_RUN
    return stopped


def test_a_job_that_its_limit_stopped_goes_on_with_a_higher_one(bench: BackfillBench, command: Command) -> None:
    output = bench.folder / "dear.out.jsonl"
    job = stopped_by_its_limit(bench, command, output, rows=40)

    assert command("resume", job.job_id, "--max-cost", "100000")[0] == 0
    assert command("run", job.job_id)[0] == 0

    assert [line["row"] for line in read_lines(output)] == list(range(40))
    assert set(sent(bench, job).values()) == {1}


def test_a_job_that_was_begun_and_is_cancelled_waits_for_a_runner(bench: BackfillBench, command: Command) -> None:
    output = bench.folder / "begun.out.jsonl"
    job = stopped_by_its_limit(bench, command, output, rows=40)

    code, _, said = command("cancel", job.job_id)
    assert (code, f"run {job.job_id}" in said) == (0, True)
    assert bench.found(job).status is Status.CANCELLING
    assert command("run", job.job_id)[0] == CANCELLED

    assert [line["row"] for line in read_lines(output)] == list(range(job.planned))
    assert command("results", job.job_id)[0] == 0

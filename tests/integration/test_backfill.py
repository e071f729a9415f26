"""Offline jobs on real Kafka, Postgres, dispatcher and consumer."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fairlane.outcomes import Outcome
from fairlane_server.postgres.connection import connect
from fairlane_server.processes.service import StopSignal
from producers.backfill.app import JobRunner
from producers.backfill.files import blob_of
from producers.backfill.job import FileFormat, Job, RowTally, Status, Wanted
from producers.backfill.job_store import JobStore
from tests.kit.backfill_bench import LEASE_S, BackfillBench, Command, backfill_bench, read_lines
from tests.kit.pipeline import Pipeline, unique_name
from tests.kit.s3_storage import keys_in, s3_storage
from tests.kit.stack import PostgresServer

pytestmark = pytest.mark.broker


@pytest.fixture(scope="module")
def bench(broker: str, postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackfillBench]:
    folder = tmp_path_factory.mktemp("backfill")
    with Pipeline(broker, folder, unique_name()) as pipeline:
        pipeline.start()
        with backfill_bench(pipeline, postgres, folder) as made:
            yield made


@pytest.fixture
def command(bench: BackfillBench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return bench.command(monkeypatch, capsys)


def test_a_job_of_plain_lines(bench: BackfillBench) -> None:
    lines = bench.lines(250)
    lines[7] = "no json"
    lines[100] = json.dumps({"id": "of nobody", "model": "no-such-model", "prompt": "why?"})
    source, output = bench.file("plain.jsonl", lines), bench.folder / "plain.out.jsonl"
    job = bench.submit(source, output, chunk_rows=40, max_open_chunks=2)

    assert bench.run(job) is Status.COMPLETED

    found = read_lines(output)
    assert [line["row"] for line in found] == list(range(250))
    assert [line["id"] for line in found[:3]] == ["row-0", "row-1", "row-2"]
    assert found[0]["output"]["text"]
    assert found[0]["usage"]["completion_tokens"] == 4
    assert found[7]["error"] == {"code": "invalid", "field": "row", "message": found[7]["error"]["message"]}
    assert found[100]["error"]["code"] == "unknown_model"
    done = bench.found(job)
    assert (done.status, done.tally.ok, done.tally.failed) == (Status.COMPLETED, 248, 2)
    assert done.tally.cost_tokens == sum(line["usage"]["cost_tokens"] for line in found)
    assert not list(bench.folder.glob("plain.out.jsonl.parts*"))


def test_openai_lines_with_an_error_file(bench: BackfillBench) -> None:
    words, vectors = bench.pipeline.model_for("generate"), bench.pipeline.model_for("embed")
    bodies = [
        ("/v1/chat/completions", {"model": words, "messages": [{"role": "user", "content": "why?"}], "max_tokens": 3}),
        ("/v1/embeddings", {"model": vectors, "input": ["one", "two"]}),
        ("/v1/completions", {"model": words, "prompt": "so", "max_tokens": 2}),
        ("/v1/chat/completions", {"model": "nobody's", "messages": [{"role": "user", "content": "why?"}]}),
        ("/v1/chat/completions", {"model": words, "messages": []}),
    ]
    lines = [
        json.dumps({"custom_id": f"c-{number}", "method": "POST", "url": url, "body": body})
        for number, (url, body) in enumerate(bodies)
    ]
    source, output, errors = (
        bench.file("batch.jsonl", lines),
        bench.folder / "b.out.jsonl",
        bench.folder / "b.err.jsonl",
    )
    job = bench.submit(source, output, errors=str(errors))

    assert bench.run(job) is Status.COMPLETED

    chat, embedding, completion = read_lines(output)
    assert chat["custom_id"] == "c-0"
    assert chat["error"] is None
    assert chat["response"]["status_code"] == 200
    assert chat["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert len(embedding["response"]["body"]["data"]) == 2
    assert completion["response"]["body"]["object"] == "text_completion"
    unknown, empty = read_lines(errors)
    assert (unknown["response"]["status_code"], unknown["response"]["body"]["error"]["code"]) == (
        404,
        "model_not_found",
    )
    assert empty["response"]["body"]["error"]["param"] == "body.messages"


def test_csv_in_and_parquet_out(bench: BackfillBench) -> None:
    source, output = bench.folder / "in.csv", bench.folder / "out.parquet"
    with source.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["question", "key", "of no interest"])
        table.writerows([f'line one\nline "two" of {number}', f"k{number}", "x"] for number in range(30))
    job = bench.submit(
        source,
        output,
        input_format=FileFormat.CSV,
        output_format=FileFormat.PARQUET,
        columns={"question": "prompt", "key": "id"},
        defaults={"model": bench.pipeline.model_for("generate"), "max_tokens": 2},
        chunk_rows=7,
    )

    assert bench.run(job) is Status.COMPLETED

    found = pq.read_table(output).to_pylist()
    assert [row["row_id"] for row in found] == [f"k{number}" for number in range(30)]
    assert {row["outcome"] for row in found} == {Outcome.OK}


def test_parquet_in_and_csv_out(bench: BackfillBench) -> None:
    source, output = bench.folder / "in.parquet", bench.folder / "out.csv"
    rows = [{"id": number, "texts": [f"text {number}", "another"]} for number in range(25)]
    pq.write_table(pa.Table.from_pylist(rows), source, row_group_size=10)
    job = bench.submit(
        source,
        output,
        input_format=FileFormat.PARQUET,
        output_format=FileFormat.CSV,
        defaults={"model": bench.pipeline.model_for("embed")},
        chunk_rows=4,
    )

    assert bench.run(job) is Status.COMPLETED

    with output.open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["row_id"] for row in found] == [str(number) for number in range(25)]
    assert all(len(json.loads(row["output"])["embeddings"]) == 2 for row in found)


def test_csv_in_s3_and_parquet_out(bench: BackfillBench, command: Command) -> None:
    model = bench.pipeline.model_for("generate")
    lines = [f'k{number},"why, {number}?",{model}\n' for number in range(40)]
    lines[7] = "k7,of nobody,no-such-model\n"
    lines[11] = "k11,,\n"
    with s3_storage("jobs") as endpoint:
        blob_of("s3://jobs/in.csv", endpoint).write([b"id,prompt,model\n", "".join(lines).encode()])
        submitted = command(
            *("submit", "s3://jobs/in.csv", "s3://jobs/out.parquet", "--errors", "s3://jobs/bad.parquet"),
            *("--endpoint", endpoint, "--tenant", bench.pipeline.tenant("a"), "--chunk-rows", "9", "--json"),
        )
        job_id = json.loads(submitted[1])["job_id"]

        assert command("run", job_id)[0] == 0

        assert command("results", job_id, "--out", str(bench.folder / "s3.parquet"))[0] == 0
        with blob_of("s3://jobs/bad.parquet", endpoint).open() as errors:
            failed = pq.read_table(errors).to_pylist()
        left = keys_in(endpoint, "jobs")
    found = pq.read_table(bench.folder / "s3.parquet").to_pylist()
    assert [row["row_id"] for row in found] == [f"k{number}" for number in range(40) if number not in (7, 11)]
    assert {row["outcome"] for row in found} == {Outcome.OK}
    assert [(row["row_id"], row["code"]) for row in failed] == [("k7", "unknown_model"), ("k11", "invalid")]
    assert left == {"in.csv", "out.parquet", "bad.parquet"}


def test_a_job_is_left_by_one_runner_and_gone_on_with_by_another(bench: BackfillBench) -> None:
    source, output = bench.file("left.jsonl", bench.lines(200)), bench.folder / "left.out.jsonl"
    job = bench.submit(source, output, chunk_rows=20, max_open_chunks=1, ordered=False)
    stop = StopSignal()
    stop.stop()

    assert bench.run(job, stop=stop) is Status.PAUSED
    assert bench.found(job).status is Status.RUNNING
    assert bench.run(job) is Status.COMPLETED

    assert sorted(line["row"] for line in read_lines(output)) == list(range(200))


def test_connections_to_postgres_that_break_hold_a_job_up_and_no_more(bench: BackfillBench) -> None:
    source, output = bench.file("cut.jsonl", bench.lines(120)), bench.folder / "cut.out.jsonl"
    job = bench.submit(source, output, chunk_rows=20, max_open_chunks=2)
    cut: list[int] = []

    def cut_all(_job: Job, _done: RowTally) -> None:
        with connect(bench.database.backfill_dsn, "test", autocommit=True) as connection:
            query = (
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE application_name = 'fairlane-backfill' AND datname = current_database()"
            )
            cut.append(len(connection.execute(query).fetchall()))

    runner = JobRunner(bench.settings, StopSignal(), lease_s=LEASE_S)

    assert runner.run(job.job_id, cut_all) is Status.COMPLETED

    bench.store.close()  # cut as well
    assert sum(cut) > 0
    assert [line["row"] for line in read_lines(output)] == list(range(120))
    assert bench.found(job).tally.rows == 120


def test_the_command_line_from_submission_to_results(bench: BackfillBench, command: Command, tmp_path: Path) -> None:
    source, output = bench.file("cli.jsonl", bench.lines(20)), bench.folder / "cli.out.jsonl"
    tenant = bench.pipeline.tenant("b")
    arguments = ("submit", str(source), str(output), "--tenant", tenant, "--json")

    code, dry, _ = command(*arguments, "--dry-run", "--max-cost", "1000000")
    estimate = json.loads(dry)
    assert (code, estimate["rows"], estimate["too_expensive"]) == (0, 20, False)
    assert estimate["cost_tokens"] == 20 * (2 + 2 * 4)
    code, _, said = command(*arguments, "--max-cost", "10")
    assert code == 4
    assert "--max-cost 10" in said

    job_id = json.loads(command(*arguments)[1])["job_id"]
    assert json.loads(command("pause", job_id, "--json")[1])["status"] == "paused"
    assert command("run", job_id)[0] == 7
    assert command("resume", job_id)[0] == 0
    process = bench.process("run", job_id, "--json")
    assert process.wait_ended() == 0, process.log()
    assert json.loads(command("status", job_id, "--json")[1])["rows"]["ok"] == 20
    assert command("results", job_id, "--out", str(tmp_path / "copy.jsonl"))[0] == 0
    assert len(read_lines(tmp_path / "copy.jsonl")) == 20
    code, _, said = command("cancel", job_id)
    assert (code, "too late" in said) == (1, True)
    listed = json.loads(command("list", "--tenant", tenant, "--json")[1])
    assert job_id in {entry["job_id"] for entry in listed["jobs"]}


def test_a_tenant_sees_its_own_jobs_alone(bench: BackfillBench) -> None:
    job = bench.submit(bench.file("own.jsonl", bench.lines(1)), bench.folder / "own.out.jsonl", tenant="b")
    other = JobStore(bench.database.backfill_dsn, bench.pipeline.tenant("a"))
    try:
        assert other.find(job.job_id) is None
        assert other.steer(job.job_id, Wanted.CANCEL, 1) is None
    finally:
        other.close()
    assert bench.store.steer(job.job_id, Wanted.CANCEL, 1) is not None
    assert bench.found(job).status is Status.CANCELLED

"""Runners of an offline job are killed, and stopped until others take over: every row is in the output once, and was
sent once."""

import json
import random
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from fairlane.names import backfill_topic
from producers.backfill.job import FileFormat, Job, RowIds, Status
from tests.kit.backfill_bench import BackfillBench, backfill_bench, read_lines
from tests.kit.pipeline import Pipeline
from tests.kit.processes import ServiceProcess
from tests.kit.stack import PostgresServer
from tests.kit.waiting import eventually

pytestmark = [pytest.mark.full, pytest.mark.broker]

LEFT = 3
NOT_TO_BE_RUN = 7
# Whoever is stopped amid a transaction keeps the job locked until Postgres ends it.
TAKE_OVER_S = 180.0
Say = Callable[[str], None]
_NUMBERS = count(1)


@dataclass(frozen=True)
class Plan:
    """A job, and how often its runners are struck in which way."""

    rows: int
    blows: Mapping[str, int]
    input_format: FileFormat = FileFormat.JSONL
    output_format: FileFormat = FileFormat.JSONL
    ordered: bool = True

    def submit(self, bench: BackfillBench, output: Path) -> Job:
        lines = bench.lines(self.rows)
        if self.input_format is FileFormat.CSV:
            rows = [json.loads(line) for line in lines]
            lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        source = bench.file(f"in.{self.input_format}", lines)
        return bench.submit(
            source,
            output,
            input_format=self.input_format,
            output_format=self.output_format,
            ordered=self.ordered,
            chunk_rows=100,
            max_open_chunks=3,
        )

    def rows_in(self, output: Path) -> list[int]:
        """In the order in which they stand there; sorted, if they may stand in any."""
        parquet = self.output_format is FileFormat.PARQUET
        found = pq.read_table(output).to_pylist() if parquet else read_lines(output)
        rows = [line["row"] for line in found]
        return rows if self.ordered else sorted(rows)


class Struck:
    """A job whose runners are struck at random moments."""

    def __init__(self, bench: BackfillBench, job: Job, dice: random.Random) -> None:
        self.bench = bench
        self.job = job
        self.dice = dice

    def runner(self) -> ServiceProcess:
        arguments = ("run", self.job.job_id, "--lease-s", "2", "--json")
        return self.bench.process(*arguments, name=f"backfill-{next(_NUMBERS)}")

    def wait_for_progress(self, process: ServiceProcess, least: int) -> None:
        """Until this runner has sent or written at least so many rows more; anything else may be half done then."""
        before = self.bench.found(self.job)

        def moved() -> bool:
            now = self.bench.found(self.job)
            assert process.alive or now.status.is_final, process.last_words()
            return now.status.is_final or now.planned + now.tally.rows >= before.planned + before.tally.rows + least

        eventually(moved, what="progress of the job")

    def kill_one(self) -> None:
        process = self.runner()
        self.wait_for_progress(process, self.dice.randint(1, 400))
        process.kill()

    def stop_one_until_another_took_over(self) -> None:
        stopped = self.runner()
        self.wait_for_progress(stopped, self.dice.randint(1, 400))
        stopped.pause()
        token = self.bench.found(self.job).token
        other = self.runner()
        eventually(lambda: self.bench.found(self.job).token > token, TAKE_OVER_S, "another runner")
        # However long the first one takes to see that it lost the job, no more of it is done meanwhile.
        other.pause()
        stopped.resume()
        assert stopped.wait_ended(TAKE_OVER_S) == NOT_TO_BE_RUN, stopped.log()
        other.kill()

    def ask_one_to_end(self) -> None:
        """SIGTERM leaves the job as it is, and its lease is free at once."""
        process = self.runner()
        self.wait_for_progress(process, self.dice.randint(1, 400))
        process.send(signal.SIGTERM)
        assert process.wait_ended() == LEFT, process.log()
        assert f"run {self.job.job_id} goes on" in process.log()
        assert self.bench.found(self.job).status is Status.RUNNING
        assert [job.job_id for job in self.bench.store.waiting(1)] == [self.job.job_id]

    def check(self, plan: Plan, output: Path) -> None:
        """Let the last runner finish, then look at every row."""
        rows = plan.rows
        last = self.runner()
        assert last.wait_ended(timeout_s=240) == 0, last.log()
        done = self.bench.found(self.job)
        assert (done.status, done.tally.ok, done.tally.rows) == (Status.COMPLETED, rows, rows)
        assert plan.rows_in(output) == list(range(rows))
        reader = self.bench.pipeline.reader(backfill_topic(self.job.tenant))
        reader.read_to_end()
        ids = RowIds(self.job.job_id, self.job.partitions)
        sent = Counter(record.key() for record in reader.records)
        assert {sent[ids.id_of(row).encode()] for row in range(rows)} == {1}


def strike(
    broker: str,
    postgres: PostgresServer,
    unique: str,
    folder: Path,
    seed: int,
    plans: Sequence[Plan],
    *,
    batch_ms: int = 100,
) -> None:
    dice = random.Random(seed)
    with Pipeline(broker, folder, unique, env={"SIMULATED_BATCH_MS": str(batch_ms)}) as pipeline:
        pipeline.start()
        with backfill_bench(pipeline, postgres, folder) as bench:
            for plan in plans:
                strike_one(bench, plan, dice)


def strike_one(bench: BackfillBench, plan: Plan, dice: random.Random) -> None:
    order = [blow for blow, times in plan.blows.items() for _ in range(times)]
    dice.shuffle(order)
    output = bench.folder / f"out.{plan.output_format}"
    struck = Struck(bench, plan.submit(bench, output), dice)
    for blow in order:
        {
            "kill": struck.kill_one,
            "stop": struck.stop_one_until_another_took_over,
            "end": struck.ask_one_to_end,
        }[blow]()
    assert not bench.found(struck.job).status.is_final, "the job ended before all blows fell"
    struck.check(plan, output)


def unordered_table(rows: int, **blows: int) -> Plan:
    return Plan(rows, blows, FileFormat.CSV, FileFormat.PARQUET, ordered=False)


def test_every_row_once_whatever_becomes_of_the_runners(
    broker: str, postgres: PostgresServer, unique: str, tmp_path: Path, seed: int, say: Say
) -> None:
    say(f"seed {seed}")
    # Who takes over from a stopped one is killed. All blows fall before the job ends, also where a look takes long.
    plans = (Plan(1_500, {"stop": 1, "end": 1}), unordered_table(800, kill=1))
    strike(broker, postgres, unique, tmp_path, seed, plans, batch_ms=400)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_row_once_however_many_are_killed(
    broker: str, postgres: PostgresServer, unique: str, tmp_path: Path, seed: int, say: Say
) -> None:
    say(f"seed {seed}")
    plans = (Plan(30_000, {"kill": 18, "stop": 4, "end": 4}), unordered_table(10_000, kill=7, stop=1, end=1))
    strike(broker, postgres, unique, tmp_path, seed, plans)

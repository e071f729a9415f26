"""Runners of an offline job are killed, and stopped until others take over: every row is in the output once, and was
sent once."""

import random
import signal
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from fairlane.names import backfill_topic
from producers.backfill.job import Job, Status
from tests.integration.backfill_bench import BackfillBench, backfill_bench, read_lines
from tests.integration.pipeline import Pipeline
from tests.integration.processes import ServiceProcess
from tests.stack import PostgresServer
from tests.waiting import eventually

pytestmark = pytest.mark.broker

LEFT = 3
NOT_TO_BE_RUN = 7
# Whoever is stopped amid a transaction keeps the job locked until Postgres ends it.
TAKE_OVER_S = 180.0
Say = Callable[[str], None]


class Struck:
    """A job whose runners are struck at random moments."""

    def __init__(self, bench: BackfillBench, job: Job, dice: random.Random) -> None:
        self.bench = bench
        self.job = job
        self.dice = dice
        self.numbers = count(1)

    def runner(self) -> ServiceProcess:
        arguments = ("run", self.job.job_id, "--lease-s", "2", "--json")
        return self.bench.process(*arguments, name=f"backfill-{next(self.numbers)}")

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

    def check(self, output: Path, rows: int) -> None:
        """Let the last runner finish, then look at every row."""
        last = self.runner()
        assert last.wait_ended(timeout_s=240) == 0, last.log()
        done = self.bench.found(self.job)
        assert (done.status, done.tally.ok, done.tally.rows) == (Status.COMPLETED, rows, rows)
        assert [line["row"] for line in read_lines(output)] == list(range(rows))
        reader = self.bench.pipeline.reader(backfill_topic(self.job.tenant))
        reader.read_to_end()
        sent = Counter(record.key() for record in reader.records)
        assert (len(sent), set(sent.values())) == (rows, {1})


def strike(
    broker: str, postgres: PostgresServer, unique: str, folder: Path, seed: int, rows: int, blows: dict[str, int]
) -> None:
    dice = random.Random(seed)
    order = [blow for blow, times in blows.items() for _ in range(times)]
    dice.shuffle(order)
    with Pipeline(broker, folder, unique, env={"SIMULATED_BATCH_MS": "100"}) as pipeline:
        pipeline.start()
        with backfill_bench(pipeline, postgres, folder) as bench:
            source, output = bench.file("in.jsonl", bench.lines(rows)), folder / "out.jsonl"
            struck = Struck(bench, bench.submit(source, output, chunk_rows=100, max_open_chunks=3), dice)
            for blow in order:
                {
                    "kill": struck.kill_one,
                    "stop": struck.stop_one_until_another_took_over,
                    "end": struck.ask_one_to_end,
                }[blow]()
            assert not bench.found(struck.job).status.is_final, "the job ended before all blows fell"
            struck.check(output, rows)


def test_every_row_once_whatever_becomes_of_the_runners(
    broker: str, postgres: PostgresServer, unique: str, tmp_path: Path, seed: int, say: Say
) -> None:
    say(f"seed {seed}")
    strike(broker, postgres, unique, tmp_path, seed, rows=3_000, blows={"kill": 1, "stop": 1, "end": 1})


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_row_once_however_many_are_killed(
    broker: str, postgres: PostgresServer, unique: str, tmp_path: Path, seed: int, say: Say
) -> None:
    say(f"seed {seed}")
    strike(broker, postgres, unique, tmp_path, seed, rows=40_000, blows={"kill": 25, "stop": 5, "end": 5})

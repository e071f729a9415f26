"""Jobs on a pipeline of real processes: submitting them, running them here or in processes of their own."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deploy.local.services import Service
from fairlane import logs
from fairlane.clock import ClockMs, now_ms
from fairlane.settings import Settings
from fairlane_server.processes.service import StopSignal
from producers.backfill.__main__ import main
from producers.backfill.app import JobRunner
from producers.backfill.job import Job, JobSpec, Status
from producers.backfill.job_store import JobStore
from producers.backfill.kafka import reply_partitions
from producers.backfill.submission import submit, survey
from tests.kit.pipeline import Pipeline
from tests.kit.processes import ServiceProcess
from tests.kit.stack import PostgresServer, migrated_database

LEASE_S = 2.0

Command = Callable[..., tuple[int, str, str]]


@dataclass
class BackfillBench:
    """A pipeline, and a database that knows jobs."""

    pipeline: Pipeline
    database: PostgresServer
    settings: Settings
    store: JobStore
    folder: Path

    def lines(self, count: int, **fields: Any) -> list[str]:
        """So many good rows."""
        model = self.pipeline.model_for("generate")
        return [
            json.dumps({"id": f"row-{number}", "model": model, "prompt": "why?", "max_tokens": 4, **fields})
            for number in range(count)
        ]

    def file(self, name: str, lines: list[str]) -> Path:
        path = self.folder / name
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    def submit(
        self, source: str | Path, output: str | Path, *, tenant: str = "a", clock: ClockMs = now_ms, **spec: Any
    ) -> Job:
        """Queue a job of a tenant of the pipeline."""
        made = JobSpec(str(source), str(output), **spec)
        whole = self.pipeline.tenant(tenant)
        surveyed = survey(whole, made)
        return submit(self.store, whole, made, surveyed, reply_partitions(self.settings), clock)

    def run(self, job: Job, *, stop: StopSignal | None = None, grace_ms: int = 30_000) -> Status:
        """Run it here."""
        return JobRunner(self.settings, stop or StopSignal(), lease_s=LEASE_S, grace_ms=grace_ms).run(job.job_id)

    def found(self, job: Job) -> Job:
        found = self.store.find(job.job_id)
        assert found is not None
        return found

    def process(self, *arguments: str, name: str = "backfill-1") -> ServiceProcess:
        """``python -m producers.backfill`` as a process that can be killed."""
        env = {"POSTGRES_DSN": self.database.backfill_dsn}
        return self.pipeline.launch(Service(name, ("-m", "producers.backfill", *arguments), env))

    def command(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
        """Runs a command in this process: its exit status, and what it wrote to stdout and to stderr."""
        for name, value in {**self.pipeline.env, "POSTGRES_DSN": self.database.backfill_dsn}.items():
            monkeypatch.setenv(name, value)
        # What a command does for the whole process is not for this one.
        monkeypatch.setattr(StopSignal, "install", lambda _self: None)
        monkeypatch.setattr(logs, "configure", lambda *_arguments: None)

        def run(*arguments: str) -> tuple[int, str, str]:
            capsys.readouterr()
            with pytest.raises(SystemExit) as ended:
                main(arguments)
            said = capsys.readouterr()
            return int(ended.value.code or 0), said.out, said.err

        return run


@contextmanager
def backfill_bench(pipeline: Pipeline, postgres: PostgresServer, folder: Path) -> Iterator[BackfillBench]:
    """A bench on a pipeline that runs."""
    with migrated_database(postgres, pipeline.unique) as database:
        settings = Settings(
            postgres_dsn=database.backfill_dsn,
            kafka_bootstrap_servers=pipeline.settings.kafka_bootstrap_servers,
            group_prefix=pipeline.group_prefix,
            instance_id="backfill-test",
        )
        store = JobStore(database.backfill_dsn)
        try:
            yield BackfillBench(pipeline, database, settings, store, folder)
        finally:
            store.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]

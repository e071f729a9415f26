"""``python -m producers.backfill``: the commands and their exit statuses."""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NoReturn

import typer
from confluent_kafka import KafkaException

from fairlane.clock import now_ms
from fairlane.schema_registry import RegistryError
from fairlane.settings import Settings
from fairlane_server.cli.output import FAILURE, AsJson, fail, say, settings_with, show_json, show_table
from fairlane_server.cli.progress import progress_bars
from fairlane_server.postgres.connection import ALL_TENANTS
from fairlane_server.processes.service import StopSignal
from fairlane_server.processes.start import begin_service
from producers.backfill import progress
from producers.backfill.app import JobRunner, NotToBeRunError
from producers.backfill.errors import JobFailedError, LeaseLostError, UnavailableError
from producers.backfill.files import LocalFile, absolute, blob_of, blocks_of
from producers.backfill.job import (
    DEFAULT_WINDOW_MS,
    MAX_COST_REACHED,
    FileFormat,
    Job,
    JobSpec,
    Status,
    Wanted,
)
from producers.backfill.job_store import JobStore
from producers.backfill.job_turns import MAX_JOBS
from producers.backfill.kafka import reply_partitions
from producers.backfill.lease import LEASE_S
from producers.backfill.progress import JobWatch, pace_json, pace_line
from producers.backfill.rows import FIELD_NAMES
from producers.backfill.service import serve
from producers.backfill.submission import TooExpensiveError, submit, survey

_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_WINDOW = re.compile(r"(\d{1,6})([smhd])")
MOST_ROWS_UNDER_WAY = 20_000
"""Bound of the rows in flight: their state and results are in memory."""

MOST_WINDOW_MS = 14 * 86_400_000
"""Retention of a backfill topic."""


def pairs(option: str, given: Iterable[str]) -> dict[str, str]:
    """``NAME=FIELD`` as a mapping. Raises ValueError."""
    found: dict[str, str] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not (separator and name and value):
            raise ValueError(f"{option} {text!r}: must be NAME=VALUE")
        if value not in FIELD_NAMES:
            raise ValueError(f"{option} {text!r}: {value!r} is none of {', '.join(sorted(FIELD_NAMES))}")
        found[name] = value
    return found


def defaults_of(given: Iterable[str]) -> dict[str, Any]:
    """``FIELD=VALUE`` as fields; a value that is valid JSON is parsed. Raises ValueError."""
    found: dict[str, Any] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or name not in FIELD_NAMES - {"id", "custom_id"}:
            raise ValueError(f"--default {text!r}: must be FIELD=VALUE")
        try:
            found[name] = json.loads(value)
        except (ValueError, RecursionError):
            found[name] = value
    return found


def window_ms(text: str) -> int:
    """``24h`` in milliseconds. Raises ValueError."""
    found = _WINDOW.fullmatch(text)
    window = 0 if found is None else int(found[1]) * _UNITS_MS[found[2]]
    if not 1_000 <= window <= MOST_WINDOW_MS:
        raise ValueError(f"--completion-window {text!r}: must be from 1s to 14d, for instance 90s, 30m, 24h")
    return window


def check_rows_under_way(chunk_rows: int, max_open_chunks: int) -> None:
    """Raises ValueError for too many rows in flight."""
    if chunk_rows * max_open_chunks > MOST_ROWS_UNDER_WAY:
        raise ValueError(
            f"--chunk-rows {chunk_rows} times --max-open-chunks {max_open_chunks}: "
            f"at most {MOST_ROWS_UNDER_WAY} rows may be under way"
        )


def format_of(url: str, otherwise: FileFormat) -> FileFormat:
    """The format of a file name's suffix."""
    ending = PurePosixPath(url).suffix.lstrip(".").lower()
    return FileFormat(ending) if ending in set(FileFormat) else otherwise


EXIT_CODES = {
    Status.COMPLETED: 0,
    Status.FAILED: FAILURE,
    Status.PAUSED: 3,
    Status.CANCELLED: 5,
    Status.EXPIRED: 6,
}
TOO_EXPENSIVE = 4
NOT_TO_BE_RUN = 7
_HELP = """Offline jobs: rows of a file through the backfill topics, results into a file.

Exit status: 0 completed; 1 an error, reported in one line; 3 paused or stopped, to be continued; 4 the estimated or
actual cost exceeds the limit; 5 cancelled; 6 rows expired at the end of the completion window; 7 another runner has the
job, or it cannot be run.
"""

app = typer.Typer(
    name="backfill",
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

JobId = Annotated[str, typer.Argument(metavar="JOB", help="The id of the job, as submit printed it.")]
MaxCost = Annotated[int | None, typer.Option("--max-cost", min=1, help="The most the job may cost, in cost tokens.")]


@app.command("submit")
def submit_command(
    source: Annotated[str, typer.Argument(metavar="INPUT", help="A path, or s3://bucket/key.")],
    output: Annotated[str | None, typer.Argument(metavar="OUTPUT", help="Likewise. Not needed to --dry-run.")] = None,
    tenant: Annotated[str, typer.Option(help="The tenant of the job.")] = "",
    input_format: Annotated[FileFormat | None, typer.Option(help="Default: the suffix of the name.")] = None,
    output_format: Annotated[FileFormat | None, typer.Option(help="Default: the suffix of the name.")] = None,
    errors: Annotated[str | None, typer.Option(help="Output of failed rows. Default: OUTPUT.")] = None,
    column: Annotated[
        list[str] | None, typer.Option(metavar="COLUMN=FIELD", help="CSV, Parquet: which field a column is.")
    ] = None,
    default: Annotated[
        list[str] | None, typer.Option(metavar="FIELD=VALUE", help="A field of every row that does not set it.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Short for --default model=NAME.")] = None,
    ordered: Annotated[bool, typer.Option("--ordered/--unordered", help="Rows in the order of the input.")] = True,
    chunk_rows: Annotated[int, typer.Option(min=1, max=10_000, help="Rows per chunk.")] = 1000,
    max_open_chunks: Annotated[int, typer.Option(min=1, max=64, help="Most chunks in flight.")] = 8,
    max_cost: MaxCost = None,
    completion_window: Annotated[str, typer.Option(help="Time limit from now on: 90s, 30m, 24h.")] = "",
    endpoint: Annotated[
        str | None, typer.Option(help="URL of S3-compatible storage, such as http://host:9000.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the estimated cost, submit nothing.")] = False,
    run: Annotated[bool, typer.Option("--run", help="Run it at once in this process.")] = False,
    as_json: AsJson = False,
) -> int:
    """Register a job: the input is read once, its rows are counted and its cost is estimated from some of them."""
    if not dry_run and output is None:
        fail("OUTPUT is missing")
    check_rows_under_way(chunk_rows, max_open_chunks)
    fields = {**defaults_of(default or ()), **({} if model is None else {"model": model})}
    # Absolute paths: the runner may have another working directory.
    spec = JobSpec(
        absolute(source),
        absolute(output or ""),
        input_format or format_of(source, FileFormat.JSONL),
        output_format or format_of(output or "", FileFormat.JSONL),
        errors and absolute(errors),
        pairs("--column", column or ()),
        fields,
        ordered,
        chunk_rows,
        max_open_chunks=max_open_chunks,
        max_cost_tokens=max_cost,
        window_ms=window_ms(completion_window) if completion_window else DEFAULT_WINDOW_MS,
        endpoint=endpoint,
    )
    settings = settings_with()
    surveyed = survey(tenant, spec)
    if dry_run:
        estimate = progress.estimate_json(surveyed[0], max_cost)
        show_json(estimate) if as_json else say(progress.estimate_line(surveyed[0]))
        return TOO_EXPENSIVE if estimate["too_expensive"] else 0
    with _store(settings) as store:
        job = submit(store, tenant, spec, surveyed, reply_partitions(settings), now_ms)
    if run:
        return _run(settings, job.job_id, lease_s=LEASE_S, as_json=as_json)
    shown = {**progress.job_json(job), "estimate": progress.estimate_json(surveyed[0], max_cost)}
    show_json(shown) if as_json else say(f"{job.job_id}  {progress.estimate_line(surveyed[0])}")
    return 0


@app.command("run")
def run_command(
    job_id: Annotated[str | None, typer.Argument(metavar="JOB", help="One job. Not needed with --all.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Run every queued job, until SIGTERM.")] = False,
    lease_s: Annotated[
        float, typer.Option(min=1.0, max=600.0, help="How long a killed runner keeps its job, in seconds.")
    ] = LEASE_S,
    max_jobs: Annotated[int, typer.Option(min=1, max=64, help="With --all: most jobs at a time.")] = MAX_JOBS,
    as_json: AsJson = False,
) -> int:
    """Run a job to its end, or every queued job. SIGINT and SIGTERM leave it to be continued later."""
    settings = settings_with()
    if every == (job_id is not None):
        fail("give either JOB or --all")
    if job_id is not None:
        return _run(settings, job_id, lease_s=lease_s, as_json=as_json)
    with progress_bars() as bars:
        # Inside the block: log lines are then printed above the bars.
        begin_service(settings, "backfill")
        serve(settings, lease_s=lease_s, max_jobs=max_jobs, watch=JobWatch(bars))
    return 0


@app.command("status")
def status_command(job_id: JobId, as_json: AsJson = False) -> None:
    """Status and progress of a job."""
    with _store(settings_with()) as store:
        job = _found(store.find(job_id), job_id)
    _show(job, as_json=as_json)


@app.command("list")
def list_command(
    tenant: Annotated[str | None, typer.Option(help="Only the jobs of this tenant.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1_000, help="Most jobs to list.")] = 50,
    as_json: AsJson = False,
) -> None:
    """The latest jobs, newest first."""
    with _store(settings_with(), tenant or ALL_TENANTS) as store:
        jobs = store.newest(limit)
    if as_json:
        show_json({"jobs": [progress.job_json(job) for job in jobs]})
    else:
        show_table(progress.COLUMNS, [progress.cells(job) for job in jobs])


@app.command("pause")
def pause_command(job_id: JobId, as_json: AsJson = False) -> None:
    """Pause a job: nothing more is sent; replies to the rows in flight are kept."""
    _steer(job_id, Wanted.PAUSE, as_json=as_json)


@app.command("resume")
def resume_command(job_id: JobId, max_cost: MaxCost = None, as_json: AsJson = False) -> None:
    """Queue a paused or failed job again. `run` continues it."""
    _steer(job_id, Wanted.RUN, max_cost_tokens=max_cost, as_json=as_json)


@app.command("cancel")
def cancel_command(job_id: JobId, as_json: AsJson = False) -> None:
    """Cancel a job: rows in flight are cancelled, and finished rows are written."""
    _steer(job_id, Wanted.CANCEL, as_json=as_json)


@app.command("results")
def results_command(
    job_id: JobId,
    out: Annotated[Path | None, typer.Option("--out", help="Copy the output to this file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Print the path of the output of a job; or copy the output."""
    with _store(settings_with()) as store:
        job = _found(store.find(job_id), job_id)
    if not job.status.is_final:
        fail(f"{job_id} is {job.status}: there is no output yet")
    if out is not None:
        written = blob_of(job.spec.output, job.spec.endpoint)
        LocalFile(out).write(blocks_of(written, written.fingerprint()))
    shown = {
        "job_id": job_id,
        "output": job.spec.output,
        "errors": job.spec.errors,
        "copy": None if out is None else str(out),
    }
    show_json(shown) if as_json else say(str(out or job.spec.output))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its status."""
    try:
        code = app(arguments, prog_name="python -m producers.backfill", standalone_mode=False)
    except typer.Abort:
        fail("stopped")
    except typer.TyperException as error:
        message = error.format_message()
        if "\n" in message:  # without a command: the whole help
            typer.echo(message, err=True)
            sys.exit(FAILURE)
        fail(f"{message} (see --help)")
    except TooExpensiveError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(TOO_EXPENSIVE)
    except NotToBeRunError as error:
        typer.echo(f"error: {error}: another runner has it, or it is paused, has ended or is not there", err=True)
        sys.exit(NOT_TO_BE_RUN)
    except LeaseLostError:
        typer.echo("error: another runner took the job over", err=True)
        sys.exit(NOT_TO_BE_RUN)
    except (UnavailableError, JobFailedError, RegistryError, OSError, ValueError) as error:
        fail(str(error))
    except KafkaException as error:
        fail(f"Kafka: {error.args[0].str()}")
    sys.exit(code if isinstance(code, int) else 0)


def _run(settings: Settings, job_id: str, *, lease_s: float, as_json: bool) -> int:
    stop = StopSignal()
    stop.install()
    with _store(settings) as store:
        job = _found(store.find(job_id), job_id)
        # An idle connection may be closed in the hours until it is used again.
        store.close()
        with progress_bars(as_json=as_json) as bars, JobWatch(bars).job() as on_progress:
            # Inside the block: log lines are then printed above the bar.
            begin_service(settings, "backfill")
            runner = JobRunner(settings, stop, lease_s=lease_s)
            status = runner.run(job_id, on_progress, wait_s=lease_s * 1.25)
        job = _found(store.find(job_id), job_id)
    _show(job, as_json=as_json)
    if status is Status.PAUSED and job.reason == MAX_COST_REACHED:
        typer.echo(f"stopped at --max-cost; python -m producers.backfill resume {job_id} --max-cost N", err=True)
        return TOO_EXPENSIVE
    if status is Status.PAUSED:
        how = "resume" if job.status is Status.PAUSED else "run"
        typer.echo(f"left as it is; python -m producers.backfill {how} {job_id} goes on", err=True)
    return EXIT_CODES.get(status, FAILURE)


def _steer(job_id: str, wanted: Wanted, *, as_json: bool, max_cost_tokens: int | None = None) -> None:
    with _store(settings_with()) as store:
        job = store.steer(job_id, wanted, now_ms(), max_cost_tokens=max_cost_tokens)
        if job is None:
            job = _found(store.find(job_id), job_id)
            fail(f"{job_id} is {job.status}: too late to {wanted}")
    _show(job, as_json=as_json)
    if job.status is Status.CANCELLING:
        typer.echo(
            f"its runner ends it; without one: python -m producers.backfill run {job_id}, or the service", err=True
        )


def _show(job: Job, *, as_json: bool) -> None:
    at_ms = now_ms()
    if as_json:
        show_json({**progress.job_json(job), **pace_json(job, at_ms)})
        return
    show_table(progress.COLUMNS, [progress.cells(job)])
    if pace := pace_line(job, at_ms):
        say(pace)


def _found(job: Job | None, job_id: str) -> Job:
    if job is None:
        fail(f"there is no job {job_id}")
    return job


def _store(settings: Settings, tenant: str = ALL_TENANTS) -> closing[JobStore]:
    return closing(JobStore(settings.postgres_dsn.get_secret_value(), tenant))


if __name__ == "__main__":
    main()

"""``fairlane replay``: requests of the log run again on a candidate, and on the version that answered them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from time import sleep
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairlane.clock import now_ms
from fairlane.schema_registry import codec_for
from fairlane_server.cli.output import (
    AsJson,
    BootstrapServers,
    fail,
    say,
    settings_with,
    show,
    show_json,
    show_list,
    show_table,
    utc,
)
from fairlane_server.cli.progress import interruptible, pace_text, progress_bar
from fairlane_server.command_author import command_author
from fairlane_server.control.published_models import model_topic
from fairlane_server.dead_letters.selection import parse_time
from fairlane_server.models.catalog import ModelCatalog
from fairlane_server.postgres.reading import reading

if TYPE_CHECKING:
    from fairlane_server.log_replay.plan import LogReplayAction
    from fairlane_server.log_replay.store import LogReplay, LogReplays

app = typer.Typer(help="Replays of the log: requests run again on another version.", no_args_is_help=True)

_WATCH_EVERY_S = 1.0
_REPORT_TIMEOUT_S = 600.0
_COLUMNS = ("replay", "name", "model", "candidate", "against", "state", "copied", "answered", "verdict", "made (UTC)")


def _time(option: str, text: str) -> int:
    try:
        return parse_time(text, now_ms())
    except ValueError as error:
        fail(f"{option} {text}: {error}")


Replay = Annotated[str, typer.Argument(metavar="REPLAY", help="Its id or its name.", show_default=False)]
Why = Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why; the audit keeps it.")]


@app.command("create")
def create_command(
    model: Annotated[str, typer.Option(metavar="MODEL", help="The name of the model.")],
    candidate: Annotated[str, typer.Option(metavar="VERSION", help="The version to try.")],
    from_ms: Annotated[
        int,
        typer.Option(
            "--from",
            metavar="TIME",
            parser=partial(_time, "--from"),
            help="Work dispatched then or later: 2h (ago), or ISO 8601 (UTC).",
        ),
    ],
    until_ms: Annotated[
        int | None,
        typer.Option("--to", metavar="TIME", parser=partial(_time, "--to"), help="Work dispatched before; now."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="VERSION", help="The version whose work is replayed; the champion.")
    ] = None,
    tenants: Annotated[
        list[str] | None,
        typer.Option("--tenant", metavar="TENANT", help="Of this tenant; repeat it for others. All that allow it."),
    ] = None,
    sample: Annotated[float, typer.Option(metavar="PART", help="Part of the requests, at most 1.")] = 0.1,
    max_requests: Annotated[int | None, typer.Option(metavar="N", help="At most so many requests.")] = None,
    max_outstanding: Annotated[int, typer.Option(metavar="N", help="Most copies that wait or run at a time.")] = 200,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="A name for it.")] = None,
    reason: Why = "",
    bootstrap_servers: BootstrapServers = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Plan a replay; the process of the admin API carries it out.

    Requests that were answered, of tenants that allow evaluation, run on the candidate and once more on the version
    that answered them, with the passages, history, seed and parameters of then. Nobody gets an answer.
    """
    from fairlane_server.log_replay.plan import LogReplayPlan, check_plan

    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    at_ms = now_ms()
    plan = LogReplayPlan(
        model=model,
        candidate=candidate,
        against=against,
        from_ms=from_ms,
        until_ms=at_ms if until_ms is None else until_ms,
        tenants=tuple(dict.fromkeys(tenants or ())),
        sample=sample,
        most_requests=max_requests,
        most_outstanding=max_outstanding,
        name=name,
        reason=reason,
    )
    published = model_topic(settings, codec_for(settings)).read()
    try:
        version = check_plan(plan, ModelCatalog.of({key: one for key, one in published.items() if one is not None}))
    except ValueError as error:
        fail(str(error))
    with _opened() as replays:
        made = replays.create(plan, version, command_author(), at_ms)
    show(_plain(made), f"{made.replay} is planned: version {candidate} beside {version}", as_json=as_json)


@app.command("list")
def list_command(
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=1_000, help="At most so many, the newest.")] = 50,
    *,
    as_json: AsJson = False,
) -> None:
    """List replays, the newest first."""
    with _opened() as replays:
        found = replays.page(None, limit)
    show_list("replays", found, _COLUMNS, _row, to_json=_plain, empty="there are no replays", as_json=as_json)


@app.command("status")
def status_command(replay: Replay, *, as_json: AsJson = False) -> None:
    """Show what a replay is about, and how far it is."""
    with _opened() as replays:
        found = replays.get(replay)
    if as_json:
        show_json(_plain(found))
    else:
        _say_status(found)


@app.command("watch")
def watch_command(replay: Replay, *, as_json: AsJson = False) -> None:
    """Show the progress of a replay until it ends, is paused, or Ctrl-C. Exits 1 if it failed."""
    from fairlane_server.log_replay.plan import ENDED, LogReplayState

    with _opened() as replays, interruptible() as is_to_stop:
        found = replays.get(replay)
        with progress_bar(found.replay, found.progress.all_offsets, as_json=as_json) as tell:
            while found.state not in {*ENDED, LogReplayState.PAUSED} and not is_to_stop():
                tell(found.progress.done_offsets, _pace(found))
                sleep(_WATCH_EVERY_S)
                found = replays.get(found.replay)
    if as_json:
        show_json(_plain(found))
    else:
        _say_status(found)
    if found.state is LogReplayState.FAILED:
        fail(f"{found.replay} failed: {found.trouble}")


@app.command("report")
def report_command(replay: Replay, *, as_json: AsJson = False) -> None:
    """Show the verdict of a replay and what it rests on. Of one that is not finished, of what has a result now."""
    from fairlane_server.log_replay.report import read_report

    with _opened() as replays:
        found = replays.get(replay)
    report = found.report
    if report is None:
        with reading(settings_with(), "fairlane-log-replays", _REPORT_TIMEOUT_S) as connection:
            report = asdict(read_report(connection, found.replay))
    if as_json:
        show_json({"replay": found.replay, "state": found.state, "is_final": found.report is not None, **report})
    else:
        _say_report(found, report)


@app.command("pause")
def pause_command(replay: Replay, reason: Why = "", *, as_json: AsJson = False) -> None:
    """Write no more copies. Those that wait or run are finished."""
    _steer(replay, "pause", reason, as_json=as_json)


@app.command("resume")
def resume_command(replay: Replay, reason: Why = "", *, as_json: AsJson = False) -> None:
    """Go on with a paused replay."""
    _steer(replay, "resume", reason, as_json=as_json)


@app.command("cancel")
def cancel_command(replay: Replay, reason: Why = "", *, as_json: AsJson = False) -> None:
    """End a replay. Copies that wait or run are finished."""
    _steer(replay, "cancel", reason, as_json=as_json)


def _opened() -> "LogReplays":
    # Other commands run without what this needs.
    from fairlane_server.log_replay.store import LogReplays

    return LogReplays(settings_with().postgres_dsn.get_secret_value())


def _steer(replay: str, action: "LogReplayAction | str", reason: str, *, as_json: bool) -> None:
    from fairlane_server.log_replay.plan import LogReplayAction

    with _opened() as replays:
        found = replays.steer(replay, LogReplayAction(action), command_author(), reason, now_ms())
    show(_plain(found), f"{found.replay} is {found.state}", as_json=as_json)


def _plain(replay: "LogReplay") -> dict[str, Any]:
    return asdict(replay)


def _row(replay: "LogReplay") -> Sequence[str]:
    return (
        replay.replay,
        replay.name or "-",
        replay.model,
        replay.candidate,
        replay.against,
        replay.state,
        str(replay.progress.counts.copied),
        str(_answered(replay)),
        "-" if replay.report is None else str(replay.report["verdict"]),
        utc(replay.created_at_ms),
    )


def _answered(replay: "LogReplay") -> int:
    """Requests whose copies all have a result, at most."""
    return min(replay.progress.answered.get(arm, 0) for arm in ("candidate", "champion"))


def _pace(replay: "LogReplay") -> str:
    progress = replay.progress
    return f"{progress.counts.copied} copied, {_answered(replay)} answered, " + pace_text(
        progress.per_s, progress.remaining_s
    )


def _say_status(replay: "LogReplay") -> None:
    progress = replay.progress
    name = "" if replay.name is None else f" ({replay.name})"
    say(f"{replay.replay}{name}: {replay.state}" + (f", {replay.trouble}" if replay.trouble else ""))
    say(f"  version {replay.candidate} of {replay.model} beside {replay.against}, by {replay.created_by}")
    say(f"  work of {utc(replay.from_ms)} to {utc(replay.until_ms)} UTC, {100 * replay.sample:g} % of the requests")
    if replay.ranges is not None:
        say(f"  {progress.done_offsets:,} of {progress.all_offsets:,} offsets, {len(replay.ranges)} partitions")
    counts = {name: count for name, count in asdict(progress.counts).items() if count}
    say("  " + (", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items()) or "nothing read"))
    if replay.progress.answered:
        columns = ("arm", "results", "failed", "did not run")
        by_arm = (progress.answered, progress.failed, progress.dropped)
        rows = [(arm, *(str(one.get(arm, 0)) for one in by_arm)) for arm in ("candidate", "champion")]
        show_table(columns, rows)
    if progress.per_s is not None and replay.ended_at_ms is None:
        say(f"  {pace_text(progress.per_s, progress.remaining_s)}")
    if replay.report is not None:
        say(f"  verdict: {replay.report['verdict']}")


def _say_report(replay: "LogReplay", report: Mapping[str, Any]) -> None:
    if replay.report is None:
        say(f"{replay.replay} is {replay.state}: so far")
    say(f"{report['verdict']}: {report['reason']}")
    for task in report["tasks"]:
        say(f"{task['task']}: {task['verdict']}, {task['pairs']} requests, {task['dropped']} did not run")
        equal = {arm: "-" if part is None else f"{100 * part:.4g} %" for arm, part in task["equal"].items()}
        say(
            f"  equal to the earlier answer: {equal['candidate']} of the candidate, {equal['champion']} of the champion"
        )
        columns = ("measure", "verdict", "pairs", "candidate", "champion", "excess", "at least", "at most", "tolerated")
        show_table(columns, [_finding(one) for one in task["findings"]])


def _finding(finding: Mapping[str, Any]) -> Sequence[str]:
    names = ("candidate", "champion", "excess", "lower", "upper", "tolerance")
    numbers = ["-" if finding[name] is None else f"{finding[name]:.4g}" for name in names]
    return (finding["measure"], finding["verdict"] or "no data", str(finding["pairs"]), *numbers)

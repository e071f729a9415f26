"""``fairlane evaluation``: measure models on stored sets, and compare what was measured."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Annotated

import typer

from fairlane import logs
from fairlane.errors import FairlaneError
from fairlane.money import nanos_text
from fairlane_server.cli.output import (
    AsJson,
    BootstrapServers,
    Tenant,
    fail,
    say,
    settings_with,
    show,
    show_json,
    show_list,
    show_table,
    utc,
    warn,
)
from fairlane_server.cli.progress import interruptible, progress_bar
from fairlane_server.command_author import command_author

if TYPE_CHECKING:
    from fairlane_server.evaluation.comparison import PairedComparison
    from fairlane_server.evaluation.measuring import JudgeWish, Measuring
    from fairlane_server.evaluation.run_store import StoredRun

LEFT = 3
"""Exit status of a run that was stopped, and can be resumed."""
_LOOK_S = 30.0
_STEP_S = 0.5

Stopping = Callable[[], bool]

evaluation = typer.Typer(help="Measure models on stored evaluation sets.", no_args_is_help=True)

SetArgument = Annotated[
    str, typer.Argument(metavar="SET", help="The name of the set, or name:version.", show_default=False)
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="The id of the run.", show_default=False)]
ScorerName = Annotated[
    str,
    typer.Option(
        "--scorer",
        metavar="NAME",
        help="exact, contains, regex, json_schema, accuracy, ndcg, similarity or judge: what is measured.",
    ),
]
Top = Annotated[int | None, typer.Option("--top", metavar="K", min=1, help="For ndcg: the ranks that count.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", metavar="N", min=1, help="Most tokens of an answer.")]
Priority = Annotated[
    str,
    typer.Option("--priority", metavar="CLASS", help="high, normal, low, or backfill: wait for free capacity."),
]
Judge = Annotated[str | None, typer.Option("--judge", metavar="MODEL", help="For judge: the model that judges.")]
RubricFile = Annotated[
    Path | None, typer.Option("--rubric", metavar="FILE", help="For judge: what makes an answer good, in words.")
]
Uncalibrated = Annotated[
    bool, typer.Option("--uncalibrated", help="Measure with a judge that cannot be relied on; the run says so.")
]


@evaluation.command("run")
def run_command(
    evaluation_set: SetArgument,
    tenant: Tenant,
    model: Annotated[str, typer.Option(metavar="MODEL", help="A model, model/version or model@alias.")],
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Another version, measured the same, to compare with.")
    ] = None,
    scorer: ScorerName = "exact",
    top: Top = None,
    max_tokens: MaxTokens = None,
    priority: Priority = "low",
    judge: Judge = None,
    rubric: RubricFile = None,
    calibration: Annotated[
        str | None, typer.Option(metavar="ID", help="For judge: its calibration; by default the latest.")
    ] = None,
    bootstrap_servers: BootstrapServers = None,
    *,
    pairwise: Annotated[
        bool, typer.Option("--pairwise", help="For judge: compare each answer with that of --against, in both orders.")
    ] = False,
    uncalibrated: Uncalibrated = False,
    as_json: AsJson = False,
) -> None:
    """Ask a model the examples of a stored set, and store the scores.

    Answers are greedy, and never from a cache. What the service refuses for want of capacity is tried again. Ctrl-C
    leaves the run; `fairlane evaluation resume` goes on with it, and asks nothing again that has an answer.
    """
    from dataclasses import replace

    from fairlane_server.evaluation.measuring import MeasureWish

    if pairwise and (against is None or judge is None):
        fail("--pairwise: needs --judge and --against")
    check_measure(scorer, priority, judge)
    wished = judge_wish(
        judge, rubric, against=against if pairwise else None, calibration=calibration, uncalibrated=uncalibrated
    )
    name, version = _set_reference(evaluation_set)
    wish = MeasureWish(model, scorer, top, max_tokens, priority, wished)
    wishes = [wish] if against is None or pairwise else [wish, replace(wish, reference=against)]
    with opened(tenant, bootstrap_servers) as measuring, interruptible() as stopping:
        begun = [measuring.start(name, version, one) for one in wishes]
        ended = [run for one in begun if (run := _ended(measuring, one, stopping, as_json=as_json)) is not None]
        if len(ended) < len(begun):
            _leave([one.run_id for one in begun], as_json=as_json)
        compared = _compared(measuring, *reversed(ended)) if len(ended) == 2 else None
    _show_runs(ended, compared, as_json=as_json)


@evaluation.command("resume")
def resume_command(
    run_id: RunArgument, tenant: Tenant, bootstrap_servers: BootstrapServers = None, *, as_json: AsJson = False
) -> None:
    """Go on with a run that was left, or whose process died a minute ago."""
    with opened(tenant, bootstrap_servers) as measuring, interruptible() as stopping:
        ended = _ended(measuring, measuring.take_over(run_id), stopping, as_json=as_json)
    if ended is None:
        _leave([run_id], as_json=as_json)
    else:
        _show_runs([ended], None, as_json=as_json)


@evaluation.command("cancel")
def cancel_command(run_id: RunArgument, tenant: Tenant, *, as_json: AsJson = False) -> None:
    """End a run that is under way, without a result."""
    with opened(tenant) as measuring:
        measuring.runs.cancel(run_id)
    show({"cancelled": run_id}, f"{run_id} is cancelled", as_json=as_json)


@evaluation.command("due")
def due_command(
    tenant: Tenant,
    bootstrap_servers: BootstrapServers = None,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again every half a minute, until Ctrl-C or SIGTERM.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Measure what the schedules of a tenant have due, and go on with what was left: for cron, or as a service.

    Any number of these may run: a model is measured by one at a time.
    """
    ended: list[StoredRun] = []
    with opened(tenant, bootstrap_servers) as measuring, interruptible() as stopping:
        while True:
            for run in measuring.go_on_with_due(stopping):
                if watch:
                    _say_run(run)
                else:
                    ended.append(run)
            if not watch or stopping():
                break
            _rest(stopping)
    if not watch:
        _show_runs(ended, None, as_json=as_json)


@evaluation.command("list")
def list_command(
    tenant: Tenant,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Only of this model, all versions.")] = None,
    name: Annotated[str | None, typer.Option("--set", metavar="NAME", help="Only on this set.")] = None,
    limit: Annotated[int, typer.Option(metavar="N", min=1, max=1_000, help="At most so many.")] = 50,
    *,
    as_json: AsJson = False,
) -> None:
    """List the runs, the newest first."""
    with opened(tenant) as measuring:
        found = measuring.runs.list(model, name, most=limit)
    show_list("runs", found, _COLUMNS, _row, to_json=asdict, empty="nothing was measured", as_json=as_json)


@evaluation.command("show")
def show_command(
    run_id: RunArgument,
    tenant: Tenant,
    *,
    examples: Annotated[bool, typer.Option("--examples", help="The score of each example, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a run."""
    with opened(tenant) as measuring:
        run = measuring.runs.find(run_id)
        scores = measuring.runs.scores(run_id) if examples else {}
        known = measuring.sets.examples(run.head.set_name, run.head.set_version) if examples else {}
    ids = {place: one.example_id for place, one in known.items()}
    if as_json:
        of_examples = [{"id": ids.get(place), "place": place, **asdict(one)} for place, one in scores.items()]
        show_json({"run": asdict(run), **({"scores": of_examples} if examples else {})})
        return
    _say_run(run)
    if examples:
        rows = [
            (str(place), ids.get(place, "erased"), "-" if one.value is None else f"{one.value:.4f}", one.reason)
            for place, one in scores.items()
        ]
        show_table(("place", "example", "score", "reason"), rows)


@evaluation.command("compare")
def compare_command(
    baseline: Annotated[str, typer.Argument(metavar="BASELINE", help="The id of a run.", show_default=False)],
    run_id: RunArgument,
    tenant: Tenant,
    *,
    as_json: AsJson = False,
) -> None:
    """Compare a run with another one of the same set and scorer, example by example."""
    with opened(tenant) as measuring:
        runs = [measuring.runs.find(one) for one in (baseline, run_id)]
        if runs[0].head.measure != runs[1].head.measure:
            fail("the runs cannot be compared: they differ in the content of the set, the scorer or its parameters")
        compared = _compared(measuring, *runs)
    _show_runs(runs, compared, as_json=as_json)


@contextmanager
def opened(tenant: str, bootstrap_servers: str | None = None) -> "Iterator[Measuring]":
    """What measures for a tenant. Errors of the client and of the examples end the command."""
    # Other commands run without what these need.
    from fairlane_server.evaluation.measuring import Measuring
    from fairlane_server.evaluation.run import ExampleError

    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    logs.configure(settings, "evaluation")
    with Measuring(settings, tenant, command_author()) as measuring:
        try:
            yield measuring
        except (FairlaneError, ExampleError, ValueError) as error:
            fail(str(error))


def check_measure(scorer: str, priority: str, judge: str | None) -> None:
    """End the command for a scorer or a priority that there is not."""
    from fairlane.outcomes import Priority as PriorityClass
    from fairlane_server.evaluation.asking import BACKFILL
    from fairlane_server.evaluation.judge import JUDGE
    from fairlane_server.evaluation.scorers import ScorerName as Scorer

    if scorer not in (known := (*Scorer, JUDGE)):
        fail(f"--scorer: {scorer!r} is none of {', '.join(known)}")
    if (scorer == JUDGE) != (judge is not None):
        fail("--judge: goes with --scorer judge, and both are needed")
    if priority not in (known := (*PriorityClass, BACKFILL)):
        fail(f"--priority: {priority!r} is none of {', '.join(known)}")


def judge_wish(
    judge: str | None, rubric: Path | None, *, against: str | None, calibration: str | None, uncalibrated: bool
) -> "JudgeWish | None":
    """The judge that options ask for. Ends the command without a rubric."""
    from fairlane_server.evaluation.judge import read_rubric
    from fairlane_server.evaluation.measuring import JudgeWish

    if judge is None:
        return None
    if rubric is None:
        fail("--rubric: a judge needs one")
    try:
        read = read_rubric(rubric.read_text(encoding="utf-8"))
    except ValueError as error:
        fail(f"{rubric}: {error}")
    return JudgeWish(judge, read, against, calibration, uncalibrated)


def _set_reference(text: str) -> tuple[str, int | None]:
    from fairlane_server.evaluation.set_store import set_reference

    try:
        return set_reference(text)
    except ValueError as error:
        fail(str(error))


def _ended(measuring: "Measuring", run: "StoredRun", stopping: Stopping, *, as_json: bool) -> "StoredRun | None":
    if stopping():
        return None
    with progress_bar(run.head.reference, run.head.examples, as_json=as_json) as tell:
        return measuring.go_on(run, stopping, tell)


def _leave(run_ids: Sequence[str], *, as_json: bool) -> None:
    text = "stopped; " + ", ".join(f"`fairlane evaluation resume {one}`" for one in run_ids) + " goes on"
    show({"left": list(run_ids)}, text, as_json=as_json)
    raise typer.Exit(LEFT)


def _rest(stopping: Stopping) -> None:
    until_s = monotonic() + _LOOK_S
    while monotonic() < until_s and not stopping():
        sleep(_STEP_S)


def _compared(measuring: "Measuring", baseline: "StoredRun", run: "StoredRun") -> "PairedComparison | None":
    from fairlane_server.evaluation.run_store import values_of
    from fairlane_server.evaluation.stored_runs import compare_by_place

    scores = [values_of(measuring.runs.scores(one.run_id)) for one in (baseline, run)]
    return compare_by_place(*scores)


_COLUMNS = ("run", "model", "set", "scorer", "state", "mean", "95 %", "scored", "failed", "since (UTC)", "by")


def _row(run: "StoredRun") -> Sequence[str]:
    head, result = run.head, run.result
    mean, interval = "-", "-"
    if result is not None and result.mean is not None:
        mean, interval = f"{result.mean:.4f}", f"{result.low:.4f} to {result.high:.4f}"
    return (
        *(run.run_id, head.reference, f"{head.set_name}:{head.set_version}", head.scorer, run.state, mean, interval),
        f"{run.stored if result is None else result.scored} of {head.examples}",
        "-" if result is None else _counted(result.failed),
        *(utc(run.started_at_ms), run.started_by),
    )


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{code} {count}" for code, count in counts.items()) or "0"


def _show_runs(runs: "Sequence[StoredRun]", compared: "PairedComparison | None", *, as_json: bool) -> None:
    if as_json:
        show_json({"runs": [*map(asdict, runs)], "comparison": None if compared is None else asdict(compared)})
        return
    if not runs:
        say("nothing is due")
        return
    show_table(_COLUMNS, map(_row, runs))
    for run in runs:
        _say_remarks(run)
    if compared is not None:
        say(
            f"difference {compared.difference:+.4f} ({compared.low:+.4f} to {compared.high:+.4f}), better in "
            f"{compared.better} and worse in {compared.worse} of {compared.pairs}, p = {compared.p_value:.3g}"
        )


def _say_run(run: "StoredRun") -> None:
    show_table(_COLUMNS, [_row(run)])
    _say_remarks(run)


def _say_remarks(run: "StoredRun") -> None:
    head, result = run.head, run.result
    if result is None:
        return
    say(
        f"{run.run_id}: versions {_counted(result.versions)}, {result.prompt_tokens:,} prompt and "
        f"{result.completion_tokens:,} output tokens"
        + (f", {result.judge_tokens:,} of the judge" if head.judge is not None else "")
        + "".join(f", {nanos_text(nanos)} {currency}" for currency, nanos in result.costs.items())
    )
    if result.degraded:
        warn(f"{run.run_id}: the service was under load and saved on {result.degraded} answers; measure again later")
    if result.follows_order:
        say(f"{run.run_id}: {result.follows_order} verdicts followed the order of the answers, and count as a half")
    if result.judge_refusal is not None:
        warn(f"{run.run_id}: the judge cannot be relied on: {result.judge_refusal}")
    if run.fall is not None and run.fall["is_fall"]:
        fall = run.fall
        warn(
            f"{run.run_id}: {fall['difference']:+.4f} from its baseline {head.baseline_run} (p = {fall['p_value']:.3g})"
        )

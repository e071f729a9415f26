"""``fairlane evaluate``: the examples of a set are asked of a model, scored, and compared with another version."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fairlane.client.sync import Client
from fairlane.errors import FairlaneError
from fairlane.settings import Settings
from fairlane_server.cli.output import AsJson, BootstrapServers, fail, say, settings_with, show_json, show_table
from fairlane_server.evaluation.evaluation_set import EvaluationSet, EvaluationSetError, read_evaluation_set
from fairlane_server.private_files import write_private

if TYPE_CHECKING:
    from fairlane_server.evaluation.comparison import PairedComparison
    from fairlane_server.evaluation.run import EvaluationRun
    from fairlane_server.evaluation.scorers import ScorerName

_BACKFILL = "backfill"


def evaluate_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The set, as JSON Lines; see docs/evaluation.md.")],
    tenant: Annotated[str, typer.Option(metavar="TENANT", help="The tenant that asks, with its user on Kafka.")],
    model: Annotated[str, typer.Option(metavar="MODEL", help="A model, model/version or model@alias.")],
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Another version, asked the same, to compare with.")
    ] = None,
    scorer: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="exact, contains, regex, json_schema, accuracy, ndcg or similarity: what is measured."
        ),
    ] = "exact",
    top: Annotated[int | None, typer.Option(metavar="K", min=1, help="For ndcg: the ranks that count.")] = None,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", min=1, help="Most tokens of an answer.")] = None,
    priority: Annotated[
        str, typer.Option(metavar="CLASS", help="high, normal, low, or backfill: wait for free capacity.")
    ] = "low",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the score of each example there, without its texts.")
    ] = None,
    bootstrap_servers: BootstrapServers = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Ask a model the examples of a file, and show its mean score with its 95 % interval. Stores nothing, and needs no
    Postgres; `fairlane evaluation run` stores.

    Answers are greedy, and never from a cache. What the service refuses for want of capacity is tried again.
    """
    # Other commands run without what these need.
    from fairlane_server.evaluation.run import ExampleError
    from fairlane_server.evaluation.scorers import ScorerName

    if scorer not in tuple(ScorerName):
        fail(f"--scorer: {scorer!r} is none of {', '.join(ScorerName)}")
    measured = ScorerName(scorer)
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    examples = _read(file)
    asked: dict[str, Any] = {"max_tokens": max_tokens, "cache": "none"}
    offline = priority == _BACKFILL
    if not offline:
        asked["priority"] = priority
    models = [model] if against is None else [model, against]
    try:
        runs = [_run(settings, tenant, one, examples, measured, top, asked, offline=offline) for one in models]
    except ExampleError as error:
        fail(f"{file}: {error}")
    except (FairlaneError, ValueError) as error:
        fail(str(error))
    compared = None if against is None else _compared(runs)
    if out is not None:
        _write(out, examples, runs)
    if as_json:
        show_json(_plain(examples, measured, runs, compared))
    else:
        _show(examples, runs, compared)


def _read(file: Path) -> EvaluationSet:
    try:
        with file.open("rb") as lines:
            return read_evaluation_set(lines)
    except EvaluationSetError as error:
        fail(f"{file}: {error}")


def _run(
    settings: Settings,
    tenant: str,
    model: str,
    examples: EvaluationSet,
    scorer: "ScorerName",
    top: int | None,
    asked: dict[str, Any],
    *,
    offline: bool,
) -> "EvaluationRun":
    from fairlane_server.evaluation.asking import ONLINE_PATIENCE_S, RETRIES
    from fairlane_server.evaluation.run import EvaluationRun, request_fields

    run = EvaluationRun(model)
    requests = [{"model": model, **request_fields(one, scorer), **asked} for one in examples.examples]
    for fields in requests:
        if fields["task"] != "generate":
            del fields["max_tokens"]
    with Client(tenant, settings=settings, offline=offline, retries=RETRIES) as client:
        handles = client.submit_many(requests)  # type: ignore[arg-type]  # checked as they are sent
        for example, handle in zip(examples.examples, list(handles), strict=True):
            run.answered(scorer, example, handle.reply(None if offline else ONLINE_PATIENCE_S), top)
    return run


def _compared(runs: "Sequence[EvaluationRun]") -> "PairedComparison | None":
    from fairlane_server.evaluation.comparison import compare

    candidate, baseline = runs
    try:
        return compare(baseline.values, candidate.values)
    except ValueError:
        return None


def _write(out: Path, examples: EvaluationSet, runs: "Sequence[EvaluationRun]") -> None:
    lines = (
        json.dumps({"id": example.example_id, "scores": {run.model: asdict(run.scores[place]) for run in runs}})
        for place, example in enumerate(examples.examples)
    )
    write_private(out, "".join(f"{line}\n" for line in lines))


def _plain(
    examples: EvaluationSet, scorer: "ScorerName", runs: "Sequence[EvaluationRun]", compared: "PairedComparison | None"
) -> dict[str, Any]:
    return {
        "set": {"examples": len(examples.examples), "digest": examples.digest},
        "scorer": scorer,
        "runs": [
            {
                "model": run.model,
                **asdict(run.mean),
                "versions": dict(run.versions),
                "failed": dict(run.failed),
                "not_scored": sum(one.value is None for one in run.scores),
            }
            for run in runs
        ],
        "comparison": None if compared is None else asdict(compared),
    }


def _show(examples: EvaluationSet, runs: "Sequence[EvaluationRun]", compared: "PairedComparison | None") -> None:
    say(f"{len(examples.examples)} examples, digest {examples.digest[:16]}")
    columns = ("model", "versions", "mean", "95 %", "scored", "without answer", "not scored")
    show_table(columns, [_row(run) for run in runs])
    if compared is not None:
        say(
            f"{runs[0].model} less {runs[1].model}: {compared.difference:+.4f} ({compared.low:+.4f} to "
            f"{compared.high:+.4f}), better in {compared.better} and worse in {compared.worse} of {compared.pairs}, "
            f"p = {compared.p_value:.3g}"
        )


def _row(run: "EvaluationRun") -> Sequence[str]:
    mean = run.mean
    return (
        run.model,
        ", ".join(sorted(run.versions)) or "-",
        "-" if mean.mean is None else f"{mean.mean:.4f}",
        f"{mean.low:.4f} to {mean.high:.4f}",
        str(mean.count),
        ", ".join(f"{code} {count}" for code, count in sorted(run.failed.items())) or "0",
        str(sum(one.value is None for one in run.scores)),
    )

"""``python -m deploy.demo_rollout``: a worse version is taken back by itself, those as good are promoted, and a replay
of the requests tells what has changed."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deploy.demo_rollout.traffic import Answers, Question, ask_until, images, prompts
from deploy.demo_rollout.versions import (
    BAD,
    BFLOAT16,
    CHAMPION,
    DIGITS,
    GOOD,
    INT8,
    LANGUAGE_MODEL,
    TENANT,
    make_versions,
)
from deploy.local.layout import DEFAULT_DATA_DIR, StackError
from deploy.local.services import GATEWAY, default_services, default_setup
from deploy.local.stack import LocalStack, kafka_credentials
from fairlane import Client
from fairlane.clock import now_ms
from fairlane.errors import FairlaneError
from fairlane.records import ModelRoute
from fairlane.rollout_records import RolloutGuards
from fairlane.schema_files import default_codec
from fairlane.settings import KafkaSettings
from fairlane_server.access.users import KafkaUser
from fairlane_server.control.published_models import PublishedModels
from fairlane_server.control.route_change import change_route
from fairlane_server.log_replay.plan import LogReplayPlan
from fairlane_server.log_replay.store import LogReplays
from fairlane_server.log_replay.verdict import ReplayFinding, ReplayVerdict
from fairlane_server.models.changes import Author
from fairlane_server.models.rollout_arms import CANDIDATE_ARM, CONTROL_ARM, RolloutStatus, is_active
from fairlane_server.models.routes import version_key
from fairlane_server.postgres.rights import PostgresRole
from fairlane_server.rollouts.changes import RolloutPlan, with_rollout
from fairlane_server.topics.families import KafkaRole

_LONGEST_S = 90.0
_LOOK_EVERY_S = 0.2
_REPLAYED = 100
_ASKED_AFTER = 64
# A small machine, a few hundred requests: what is tolerated is more than a deployment would.
_RATED = RolloutGuards(
    most_added_failures=0.05,
    most_latency_ratio=4.0,
    most_cost_ratio=None,
    most_lost_quality=0.1,
    require_quality=True,
)
# Nobody says whether the texts are right.
_UNRATED = replace(_RATED, most_lost_quality=None, require_quality=False)
_NOT_NEEDED = (GATEWAY, "backfill-1", "ingest-1", "setup-prices")


@dataclass(frozen=True, slots=True)
class Trial:
    """A rollout of the demo before it begins. ``questions`` are asked meanwhile."""

    model: str
    champion: str
    candidate: str
    guards: RolloutGuards
    questions: Iterator[Question]


@dataclass(frozen=True, slots=True)
class RolloutEnd:
    """A rollout of the demo: how it ended, after how long, and what was answered until then."""

    route: ModelRoute
    seconds: float
    answers: Answers

    @property
    def status(self) -> str:
        return "" if self.route.rollout is None else self.route.rollout.status


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    data_dir: Annotated[Path, typer.Option(help="Everything the stack writes is below it.")] = DEFAULT_DATA_DIR
    / "demo-rollout",
) -> None:
    """Roll out a version of a classifier that is worse, then one that is as good, judged by what users say; then a copy
    of a language model with numbers of 8 bits. Then replay the requests to the language model."""
    console = Console(stderr=as_json)
    try:
        is_good = _run(console, data_dir, as_json=as_json)
    except (StackError, FairlaneError, TimeoutError) as error:
        console.print(f"[red]demo: {error}[/red]")
        is_good = False
    sys.exit(0 if is_good else 1)


def _run(console: Console, data_dir: Path, *, as_json: bool) -> bool:
    console.print("Training two more versions of the digit classifier, one of them worse on purpose …")
    versions = make_versions(data_dir)
    for version, accuracy in versions.accuracies.items():
        console.print(f"  version {version}: {accuracy:.1%} of the held-out images right")
    env = {
        "MODELS_FILE": str(versions.models_file),
        "MODELS_DIR": str(versions.models_dir),
        "TENANTS_FILE": str(versions.tenants_file),
    }
    services = [
        replace(one, env={**one.env, **env})
        for one in default_services(models_file=versions.models_file)
        if one.name not in _NOT_NEEDED
    ]
    setup = [
        replace(one, env={**one.env, **env})
        for one in default_setup(kafka_credentials(data_dir))
        if one.name not in _NOT_NEEDED
    ]
    console.print("Starting Kafka, Postgres, Redis, the dispatcher, the recorder, the admin API and a pool …")

    def show(name: str, message: str) -> None:
        console.print(f"  {name:<22} {message}", style="dim", highlight=False, markup=False)

    with LocalStack(data_dir=data_dir, secured=True, setup=setup, services=services, report=show) as stack:
        users = stack.endpoints.kafka_settings
        operator = users(KafkaUser(KafkaRole.OPERATOR).name)
        failures: list[Exception] = []
        models = PublishedModels(operator, default_codec(), failures.append)
        models.start()
        started_at_ms = now_ms()
        with Client(TENANT, settings=users(KafkaUser(KafkaRole.TENANT, TENANT).name)) as client:
            drive = partial(_roll_out, console, operator, models, client)
            pictures, texts = images(), prompts()
            worse = drive(Trial(DIGITS, CHAMPION, BAD, _RATED, pictures))
            better = drive(Trial(DIGITS, CHAMPION, GOOD, _RATED, pictures))
            after = ask_until(client, pictures, lambda answers: answers.total >= _ASKED_AFTER, lambda _answers: None)
            smaller = drive(Trial(LANGUAGE_MODEL, BFLOAT16, INT8, _UNRATED, texts))
        replayed = _replay(console, stack.endpoints.postgres_dsn(PostgresRole.OPERATOR), started_at_ms)
        models.stop()
    if failures:
        raise StackError(f"the models could not be followed: {failures[0]}")
    ends = worse, better, smaller
    findings = {
        "the worse version was taken back": worse.status == RolloutStatus.ROLLED_BACK,
        "the version as good was promoted": better.status == RolloutStatus.PROMOTED,
        "then it answers everything": {version for _, version in after.requests} == {GOOD},
        "the copy of the language model with 8 bits was promoted": smaller.status == RolloutStatus.PROMOTED,
        "a replay tells its answers from the noise of the champion": replayed == ReplayVerdict.DIFFERENT,
        "no request was refused": not any(one.refused for one in (*(end.answers for end in ends), after)),
    }
    if as_json:
        print(json.dumps({"rollouts": [_plain(one) for one in ends], "findings": findings}, indent=2))
    else:
        for end in ends:
            _show(console, end)
        for finding, is_met in findings.items():
            console.print(f"{'[green]yes[/green]' if is_met else '[red]NO[/red] '} {finding}")
    return all(findings.values())


def _roll_out(
    console: Console, operator: KafkaSettings, models: PublishedModels, client: Client, trial: Trial
) -> RolloutEnd:
    """Start a rollout, and ask until it is over."""
    model, version = trial.model, trial.candidate
    plan = RolloutPlan(version, (50.0, 100.0), trial.guards, least_step_ms=0, sticky_by="request")
    author = Author("demo", now_ms(), "a demonstration")
    started = monotonic()
    made = change_route(operator, default_codec(), model, lambda known: with_rollout(known, model, plan, author))
    console.print(
        f"{version_key(model, version)} gets half of the requests, beside {version_key(model, trial.champion)}."
    )

    def is_over(_answers: Answers) -> bool:
        route = models.catalog.routes[model]
        is_decided = route.revision > made.revision and route.rollout is not None and not is_active(route.rollout)
        return is_decided or monotonic() - started > _LONGEST_S

    with console.status("asking") as status:
        answers = ask_until(client, trial.questions, is_over, lambda found: status.update(f"{found.total} answers"))
    route = models.catalog.routes[model]
    end = RolloutEnd(route, monotonic() - started, answers)
    console.print(f"After {answers.total} answers and {end.seconds:.0f} s: {end.status} ({route.reason}).")
    return end


def _replay(console: Console, dsn: str, from_ms: int) -> str | None:
    """Replay what the language model of the rollout's champion has answered. Returns the verdict."""
    plan = LogReplayPlan(
        LANGUAGE_MODEL, INT8, BFLOAT16, from_ms, now_ms(), sample=1.0, most_requests=_REPLAYED, reason="a demonstration"
    )
    until = monotonic() + _LONGEST_S
    with LogReplays(dsn) as replays, console.status("replaying") as status:
        made = replays.create(plan, BFLOAT16, "demo", now_ms())
        while (now := replays.get(made.replay)).ended_at_ms is None and monotonic() < until:
            status.update(f"replaying: {now.progress.answered}")
            sleep(_LOOK_EVERY_S)
    if now.report is None:
        console.print(f"The replay is {now.state}: {now.trouble}")
        return None
    table = Table("measure", "pairs", "candidate", "champion again", "excess between", "tolerated", "verdict")
    table.title = f"Replay of {version_key(LANGUAGE_MODEL, BFLOAT16)} on {INT8}: {now.report['verdict']}"
    for task in now.report["tasks"]:
        for found in (ReplayFinding(**one) for one in task["findings"]):
            values = [_number(one) for one in (found.candidate, found.champion, found.lower, found.upper)]
            bounds = " and ".join(values[2:])
            tolerated = _number(found.tolerance)
            table.add_row(found.measure, str(found.pairs), *values[:2], bounds, tolerated, found.verdict or "no data")
    console.print(table)
    return str(now.report["verdict"])


def _show(console: Console, end: RolloutEnd) -> None:
    rollout = end.route.rollout
    if rollout is None:
        return
    title = f"Rollout of {version_key(end.route.model, rollout.candidate)}: {end.status}"
    arms = Table("arm", "version", "answers", "right", title=title)
    for arm, answers in sorted(end.answers.requests.items()):
        right = f"{end.answers.accuracy(arm):.1%}" if end.answers.right else "-"
        arms.add_row(*arm, str(answers), right)
    console.print(arms)
    found = Table("guard", "verdict", "candidate", "control", "harm between", "tolerated")
    for one in rollout.findings:
        values = [_number(value) for value in (one.candidate, one.control, one.lower, one.upper)]
        found.add_row(
            one.guard, one.verdict or "no data", *values[:2], " and ".join(values[2:]), _number(one.tolerance)
        )
    console.print(found)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _plain(end: RolloutEnd) -> Mapping[str, Any]:
    return {
        "model": end.route.model,
        "candidate": None if end.route.rollout is None else end.route.rollout.candidate,
        "status": end.status,
        "reason": end.route.reason,
        "seconds": round(end.seconds, 1),
        "answers": {
            f"{arm} {version}": {"requests": count, "right": end.answers.right[arm, version]}
            for (arm, version), count in end.answers.requests.items()
            if arm in (CANDIDATE_ARM, CONTROL_ARM, "champion")
        },
        "refused": dict(end.answers.refused),
    }


if __name__ == "__main__":
    typer.run(main)

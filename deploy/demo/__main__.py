"""``python -m deploy.demo``: start the stack, ask, show, check, stop."""

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from deploy.demo import documents, report
from deploy.demo.checks import check, protection
from deploy.demo.report import DemoReply
from deploy.demo.workload import TENANTS, DemoRequest, build_workload
from deploy.local.kafka import ADMIN_USER
from deploy.local.layout import DEFAULT_DATA_DIR, StackError
from deploy.local.services import default_services, default_setup
from deploy.local.stack import LocalStack, kafka_credentials
from fairlane import Client, Handle
from fairlane.errors import FairlaneError
from fairlane.settings import KafkaSettings
from fairlane_server.access.users import KafkaUser
from fairlane_server.postgres.rights import PostgresRole
from fairlane_server.topics.families import KafkaRole

QUESTIONS = Path(__file__).with_name("questions.yaml")
_ANSWER_TIMEOUT_S = 120.0
_CHECK_TIMEOUT_S = 30.0


def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
    data_dir: Annotated[Path, typer.Option(help="Everything the stack writes is below it.")] = DEFAULT_DATA_DIR
    / "demo",
    plaintext: Annotated[bool, typer.Option("--plaintext", help="Kafka without TLS, passwords and rights.")] = False,
) -> None:
    """Send about sixty real requests of three tenants through the whole pipeline, and check every answer."""
    console = Console(stderr=as_json)
    try:
        ok = _run(console, data_dir, as_json=as_json, secured=not plaintext)
    except (StackError, FairlaneError, TimeoutError) as error:
        console.print(f"[red]demo: {error}[/red]")
        ok = False
    sys.exit(0 if ok else 1)


def _run(console: Console, data_dir: Path, *, as_json: bool, secured: bool) -> bool:
    console.print("Starting Kafka, Postgres, Redis, the dispatcher, the recorder and two pools of real models …")
    started = monotonic()
    # Everything shares this machine with two models at work; a search would often be late for its usual budget.
    services = [replace(one, env={**one.env, "RETRIEVAL_BUDGET_MS": "2000"}) for one in default_services()]

    def show(name: str, message: str) -> None:
        console.print(f"  {name:<22} {message}", style="dim", highlight=False, markup=False)

    setup = default_setup(kafka_credentials(data_dir) if secured else None)
    with LocalStack(data_dir=data_dir, secured=secured, setup=setup, services=services, report=show) as stack:
        console.print(f"Everything is ready after {monotonic() - started:.0f} s.")
        # Each tenant acts as itself, and the check as who may read every topic.
        by_tenant = {
            tenant: stack.endpoints.kafka_settings(KafkaUser(KafkaRole.TENANT, tenant).name) for tenant in TENANTS
        }
        asks = build_workload(QUESTIONS)
        asked_at = monotonic()
        answered = _ask_all(console, by_tenant, asks)
        seconds = monotonic() - asked_at
        operator_dsn = stack.endpoints.postgres_dsn(PostgresRole.OPERATOR)
        loaded = documents.ingest(operator_dsn)
        console.print(f"{documents.TENANT}'s handbook is loaded: {loaded.passages} passages in {loaded.seconds:.1f} s.")
        questions = documents.load_questions()
        with Client(documents.TENANT, settings=by_tenant[documents.TENANT]) as client:
            asked = [questions[index] for index in documents.ASKED]
            compared = documents.compare(client, asked, _ANSWER_TIMEOUT_S)
        request_ids = [one.reply.request_id for one in answered]
        request_ids += [reply.request_id for one in compared for reply in (one.grounded, one.ungrounded)]
        administrator = stack.endpoints.kafka_settings(ADMIN_USER)
        findings = check(administrator, operator_dsn, TENANTS, request_ids, _CHECK_TIMEOUT_S)
        found = protection(by_tenant, operator_dsn)
        table = report.rows(answered)
        if as_json:
            whole = report.as_json(table, compared, findings, seconds)
            print(json.dumps({**whole, "protection": asdict(found)}, indent=2))
        else:
            report.show(console, table, compared, findings, seconds)
            console.print(found.in_words())
        answered_all = all(one.reply.outcome == "ok" for one in answered)
        return findings.ok and answered_all and all(one.ok for one in compared)


def _ask_all(console: Console, settings: Mapping[str, KafkaSettings], asks: list[DemoRequest]) -> list[DemoReply]:
    """Publish everything, then wait for every reply while the bars move. ``settings``: by tenant."""
    columns = (TextColumn("{task.description:<10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as clients, Progress(*columns, console=console) as progress:
        by_tenant = {tenant: clients.enter_context(Client(tenant, settings=settings[tenant])) for tenant in TENANTS}
        bars = {
            tenant: progress.add_task(tenant, total=sum(ask.tenant == tenant for ask in asks)) for tenant in TENANTS
        }
        handles: list[tuple[DemoRequest, Handle]] = [(ask, by_tenant[ask.tenant].submit(**ask.fields)) for ask in asks]
        deadline = monotonic() + _ANSWER_TIMEOUT_S
        answered = []
        for ask, handle in handles:
            reply = handle.reply(max(0.1, deadline - monotonic()))
            answered.append(DemoReply(ask, reply, handle.received_at_ms or 0))
            progress.advance(bars[ask.tenant])
        return answered


if __name__ == "__main__":
    typer.run(main)

"""``python -m producers.replay play TRACE`` and ``python -m producers.replay profile NAME``."""

import itertools
from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from fairlane.errors import FairlaneError
from fairlane.names import is_name
from fairlane.settings import KafkaSettings
from fairlane_server.cli.output import fail, say, show_json, show_table
from producers.replay.load import play, run, run_users
from producers.replay.profiles import PROFILES
from producers.replay.report import COLUMNS, Scenario, markdown, outcome_lines, tenant_rows
from producers.replay.targets import GatewayTarget, LoadTarget, SdkTarget
from producers.replay.trace import PlanOptions, plan, read_trace

KEY_VARIABLE = "FAIRLANE_API_KEY"
DEFAULT_MODEL = "smollm2-135m-instruct"
_ONE_KEY = "key"
"""Tenant in reports of a key without a name."""


class Via(StrEnum):
    SDK = "sdk"
    GATEWAY = "gateway"


cli = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_show_locals=False)

ViaOption = Annotated[Via, typer.Option(help="The gateway, or the client SDK and Kafka")]
TenantOption = Annotated[
    list[str] | None, typer.Option("--tenant", help="sdk: in whose names; once for each tenant [default: acme]")
]
UrlOption = Annotated[str, typer.Option(help="gateway: where it is")]
KeyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--key",
        envvar=KEY_VARIABLE,
        show_envvar=True,
        help="gateway: an API key, or TENANT=KEY, once for each tenant (in the variable: with a space between). "
        "Other users of the machine can see the arguments of a command, and not its variables",
    ),
]
ModelOption = Annotated[str, typer.Option(help="What to ask")]
StreamOption = Annotated[bool, typer.Option("--stream", help="Have answers streamed, and measure the first text")]
TimeoutOption = Annotated[float, typer.Option(min=0.001, help="Seconds that a call has, from when it is due")]
InFlightOption = Annotated[int, typer.Option(min=1, max=100_000, help="Most calls under way; more are not sent")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object")]


@cli.callback()
def about() -> None:
    """Load for Fairlane: a recorded trace, or users in one of four profiles; reports latency, outcomes and goodput.

    Ctrl-C ends a run early and reports what there is.
    """


@cli.command("play")
def play_trace(
    trace: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="CSV, as docs/replay.md describes it")],
    via: ViaOption = Via.SDK,
    tenant: TenantOption = None,
    url: UrlOption = "http://127.0.0.1:8080",
    key: KeyOption = None,
    model: ModelOption = DEFAULT_MODEL,
    factor: Annotated[float, typer.Option(help="2 plays it twice as fast")] = 1.0,
    seconds: Annotated[float | None, typer.Option(min=0.001, help="Nothing is due from then on")] = None,
    calls: Annotated[int | None, typer.Option(min=1, help="Most calls")] = None,
    scale: Annotated[float, typer.Option(help="Multiplies the trace's tokens")] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Bounds prompt and answer together")] = 2_048,
    stream: StreamOption = False,
    timeout: TimeoutOption = 60.0,
    max_in_flight: InFlightOption = 10_000,
    as_json: JsonOption = False,
) -> None:
    """Play a trace: each call goes out when it is due, whether or not the last ones were answered."""
    try:
        options = PlanOptions(factor, seconds, calls, scale, max_tokens)
        tenants, target = _target(via, tenant, url, key, model, stream=stream, max_in_flight=max_in_flight)
        with trace.open(encoding="utf-8", newline="") as lines:
            due = plan(read_trace(lines, str(trace)), tenants, options)
            # A file that cannot be read at all is a mistake before anything is sent.
            due = itertools.chain(list(itertools.islice(due, 1)), due)
            report = run(
                target, tenants, timeout, lambda caller, stop: play(due, caller, stop, max_in_flight=max_in_flight)
            )
    except* (ValueError, OSError, FairlaneError) as errors:
        _fail(errors)
    if as_json:
        show_json(report.as_json())
        return
    show_table(COLUMNS, tenant_rows(report))
    for line in outcome_lines(report):
        say(line)


@cli.command("profile")
def run_profile(
    name: Annotated[list[str], typer.Argument(help=f"all, or some of: {', '.join(PROFILES)}")],
    via: ViaOption = Via.GATEWAY,
    tenant: TenantOption = None,
    url: UrlOption = "http://127.0.0.1:8080",
    key: KeyOption = None,
    model: ModelOption = DEFAULT_MODEL,
    users: Annotated[int | None, typer.Option(min=1, help="At the highest, instead of the profile's own")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.001, help="In all, instead of the profile's own")] = None,
    stream: StreamOption = False,
    timeout: TimeoutOption = 60.0,
    write: Annotated[Path | None, typer.Option(help="Write the result table there, as Markdown")] = None,
    as_json: JsonOption = False,
) -> None:
    """Run profiles, one after the other: users who ask, read the answer, think, and ask again."""
    names = list(PROFILES) if name == ["all"] else name
    if unknown := [one for one in names if one not in PROFILES]:
        fail(f"no profile is called {unknown[0]!r}; there are: {', '.join(PROFILES)}")
    done: list[Scenario] = []
    try:
        for profile in [PROFILES[one].scaled(users=users, seconds=seconds) for one in names]:
            tenants, target = _target(via, tenant, url, key, model, stream=stream, max_in_flight=profile.most_users)
            report = run(target, tenants, timeout, partial(run_users, profile, tenants))
            done.append(Scenario(profile.name, profile.most_users, report))
            if report.interrupted:
                break
        if write is not None:
            write.write_text(markdown(done), encoding="utf-8")
    except* (ValueError, OSError, FairlaneError) as errors:
        _fail(errors)
    if as_json:
        show_json({one.name: one.report.as_json() for one in done})
    else:
        say(markdown(done))
        for one in done:
            for line in outcome_lines(one.report):
                say(f"{one.name}: {line}")


def _fail(errors: ExceptionGroup[Exception]) -> NoReturn:
    """Report the first error: calls run in groups, and so do their errors."""
    first: Exception = errors
    while isinstance(first, ExceptionGroup):
        first = first.exceptions[0]
    fail(str(first))


def _target(
    via: Via,
    tenants: list[str] | None,
    url: str,
    keys: list[str] | None,
    model: str,
    *,
    stream: bool,
    max_in_flight: int,
) -> tuple[list[str], LoadTarget]:
    if via is Via.SDK:
        names = list(dict.fromkeys(tenants or ["acme"]))
        return names, SdkTarget(KafkaSettings(), names, model, stream=stream, max_in_flight=max_in_flight)
    by_tenant = _keys(keys or [])
    return list(by_tenant), GatewayTarget(url, by_tenant, model, stream=stream)


def _keys(given: list[str]) -> Mapping[str, str]:
    """By tenant. Raises ValueError, without a key in it."""
    if not given:
        raise ValueError(f"key: the gateway wants one; set {KEY_VARIABLE}, or give --key")
    found: dict[str, str] = {}
    for one in given:
        tenant, _, key = one.partition("=")
        # A key may end in the sign itself.
        tenant, key = (tenant, key) if key and is_name(tenant) else (_ONE_KEY, one)
        if tenant in found:
            raise ValueError("key: two without a name, or two of one tenant; write TENANT=KEY")
        found[tenant] = key
    return found


if __name__ == "__main__":
    cli()

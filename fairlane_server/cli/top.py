"""``fairlane top``: load per pool and tenant, live."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from fairlane.clock import now_ms
from fairlane.outcomes import Priority
from fairlane.schema_registry import codec_for
from fairlane_server.cli.output import AsJson, BootstrapServers, console, printable, settings_with, show_json, table
from fairlane_server.kafka.load_board import LoadBoard, LoadView, PoolRow, TenantRow
from fairlane_server.kafka.load_feed import LoadFeed

# Two heartbeats of everybody: what was written before is dated by clocks that may not agree with ours.
_SETTLE_S = 0.6

_POOL_COLUMNS = (
    *("pool", "consumers", "capacity tokens/s", "batch fill", "window", "in flight"),
    *("waiting", "high/normal/low", "dispatchers"),
)
_TENANT_COLUMNS = (
    *("tenant", "pool", "weight", "waiting", "tokens", "in flight", "tokens/s"),
    *("share", "entitled", "p99 wait", "shed (lately)"),
)

Interval = Annotated[float, typer.Option(metavar="SECONDS", min=0.1, max=60.0, help="Between two pictures.")]
Once = Annotated[bool, typer.Option("--once", help="Show one picture and end.")]


def top_command(
    bootstrap_servers: BootstrapServers = None, interval: Interval = 1.0, *, once: Once = False, as_json: AsJson = False
) -> None:
    """Watch pools and tenants until Ctrl-C: backlog, work in flight, shares and refusals.

    From what consumers, dispatchers and `tenants apply` say on the control topics; tokens are cost tokens. With --json
    one object a line, and with --once a single one; its `trouble` says why nothing comes in, and is null otherwise.
    """
    settings = settings_with(kafka_bootstrap_servers=bootstrap_servers)
    board = LoadBoard()
    feed = LoadFeed(settings, codec_for(settings), board)
    try:
        feed.catch_up()
        if once:
            feed.follow(_SETTLE_S)
            view = board.view(now_ms())
            if as_json:
                show_json(as_plain(view, feed.trouble))
            else:
                console().print(render(view, feed.trouble))
            return
        with _screen(as_json=as_json) as show:
            while True:
                show(board.view(now_ms()), feed.trouble)
                feed.follow(interval)
    except KeyboardInterrupt:
        return
    finally:
        feed.close()


def as_plain(view: LoadView, trouble: str | None) -> dict[str, object]:
    """The view as JSON values; ``trouble`` is why nothing new came, null when all is well."""
    return asdict(view) | {"trouble": trouble}


def render(view: LoadView, trouble: str | None) -> RenderableType:
    """The view as a person reads it; ``trouble`` is why nothing new came."""
    at = datetime.fromtimestamp(view.at_ms / 1_000, UTC)
    gone = f", {view.dispatchers_gone} gone" if view.dispatchers_gone else ""
    lines: list[RenderableType] = [
        Text(f"{at:%H:%M:%S} UTC  dispatchers: {view.dispatchers}{gone}"),
        table(_POOL_COLUMNS, map(_pool, view.pools), range(1, len(_POOL_COLUMNS) - 1)),
        Text(""),
        table(_TENANT_COLUMNS, map(_tenant, view.tenants), range(2, len(_TENANT_COLUMNS) - 1)),
    ]
    if trouble is not None:
        lines.insert(1, Text(f"nothing comes in: {printable(trouble)}", style="bold red"))
    return Group(*lines)


@contextmanager
def _screen(*, as_json: bool) -> Iterator[Callable[[LoadView, str | None], None]]:
    """Shows one picture after another: a live screen on a terminal, consecutive output elsewhere."""
    out = console()
    if as_json:
        yield lambda view, trouble: typer.echo(json.dumps(as_plain(view, trouble), ensure_ascii=False))
    elif out.is_terminal:
        with Live(console=out, screen=True, auto_refresh=False) as live:
            yield lambda view, trouble: live.update(render(view, trouble), refresh=True)
    else:
        yield lambda view, trouble: out.print(render(view, trouble))


def _pool(row: PoolRow) -> tuple[str, ...]:
    consumers = str(row.consumers)
    if row.consumers_failing:
        consumers += f", {row.consumers_failing} failing"
    if row.consumers_gone:
        consumers += f", {row.consumers_gone} gone"
    return (
        row.pool,
        consumers,
        f"{row.capacity_tokens_per_s:,.0f}",
        _percent(row.batch_fill),
        f"{row.window_tokens:,}",
        f"{row.in_flight_tokens:,}",
        f"{row.waiting_requests:,}",
        "/".join(str(row.waiting_by_class.get(name, 0)) for name in Priority),
        str(row.dispatchers),
    )


def _tenant(row: TenantRow) -> tuple[str, ...]:
    return (
        row.tenant,
        row.pool or "-",
        "-" if row.weight is None else f"{row.weight:g}",
        f"{row.waiting_requests:,}",
        f"{row.waiting_tokens:,}",
        f"{row.in_flight_tokens:,}",
        "-" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
        _percent(row.served_share),
        _percent(row.entitled_share),
        "-" if row.wait_p99_ms is None else f"{row.wait_p99_ms:,.0f} ms",
        _shed(row.shed, row.shed_recently),
    )


def _shed(total: Mapping[str, int], recently: Mapping[str, int]) -> str:
    """Each code with its count, and in parentheses how many of them came lately."""
    return ", ".join(
        f"{code} {count:,}" + (f" (+{recently[code]:,})" if code in recently else "") for code, count in total.items()
    )


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"

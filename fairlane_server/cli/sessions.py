"""``fairlane sessions``: sessions of browsers, as REDIS_URL of the user ``fairlane_sessions``."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fairlane import logs
from fairlane.clock import now_ms
from fairlane_server.cli.output import AsJson, Tenant, fail, settings_with, show, show_list, utc

if TYPE_CHECKING:
    from fairlane_server.sessions.store import ListedSession, RedisSessions

ResultT = TypeVar("ResultT")

_TIMEOUT_S = 10.0

Handle = Annotated[str | None, typer.Argument(metavar="SESSION", help="Of one session, as listed.", show_default=False)]
OfSubject = Annotated[
    str | None, typer.Option("--subject", metavar="SUBJECT", help="Only of this user.", show_default=False)
]

app = typer.Typer(help="Sessions of browsers that have logged in.", no_args_is_help=True)


@app.command("list")
def list_command(tenant: Tenant, subject: OfSubject = None, *, as_json: AsJson = False) -> None:
    """List a tenant's sessions, oldest first. What names one here is not what its browser shows."""
    found = _with_store(lambda store: store.list(tenant, subject))
    columns = ("session", "user", "role", "login (UTC)", "last used", "ends without use")
    show_list("sessions", found, columns, _row, to_json=_as_json, empty="there are no sessions", as_json=as_json)


@app.command("revoke")
def revoke_command(
    tenant: Tenant, session: Handle = None, subject: OfSubject = None, *, as_json: AsJson = False
) -> None:
    """End one session, or with --subject all sessions of a user. The next call of the browser is refused."""
    if (session is None) == (subject is None):
        fail("give either SESSION or --subject")
    if subject is not None:
        ended = _with_store(lambda store: store.end_all(tenant, subject))
    else:
        handle = session or ""
        ended = len(_with_store(lambda store: store.end_by_handle(tenant, handle)))
        if not ended:
            fail(f"tenant {tenant} has no session {handle}")
    logs.get_logger(__name__).info("sessions_ended", reason="revoked", tenant=tenant, who=subject, sessions=ended)
    show({"ended": ended}, f"ended {ended} sessions of tenant {tenant}", as_json=as_json)


def _with_store(use: "Callable[[RedisSessions], Awaitable[ResultT]]") -> ResultT:
    from fairlane_server.redis.availability import RedisAvailability
    from fairlane_server.redis.client import redis_client
    from fairlane_server.sessions.session import SessionLimits
    from fairlane_server.sessions.store import RedisSessions

    settings = settings_with()
    logs.configure(settings, "sessions")
    limits = SessionLimits(round(1_000 * settings.session_absolute_s), round(1_000 * settings.session_idle_s))

    async def run() -> ResultT:
        client = redis_client(settings.redis_url, _TIMEOUT_S)
        if client is None:
            fail("REDIS_URL is needed: sessions are kept there")
        watch = RedisAvailability(client, _TIMEOUT_S)
        try:
            return await use(RedisSessions(client, watch, _TIMEOUT_S, limits, now_ms))
        finally:
            await watch.close()
            await client.aclose()

    return asyncio.run(run())


def _row(listed: "ListedSession") -> tuple[str, ...]:
    session = listed.session
    times = (utc(at_ms)[:16] for at_ms in (session.created_ms, session.seen_ms, listed.ends_ms))
    return (listed.handle, session.subject, session.role or "-", *times)


def _as_json(listed: "ListedSession") -> object:
    return {"session": listed.handle, **asdict(listed.session), "ends_ms": listed.ends_ms}

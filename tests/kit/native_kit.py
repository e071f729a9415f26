"""The native routes over a scripted way to Kafka, a Redis in a dictionary and a memory of what was recorded."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.requests import HTTPConnection

from fairlane.clock import now_ms
from fairlane.outcomes import Decision, Outcome
from fairlane.records import (
    AuditEvent,
    Cost,
    InferenceReply,
    InferenceRequest,
    LabelScore,
    Output,
    SourceCoordinate,
    UsageEvent,
)
from fairlane_server.costs.daily_sums import Group, SumQuery, UsageSum
from fairlane_server.postgres.request_timeline import History, RecordedReply
from fairlane_server.redis.cache import RedisCache
from fairlane_server.store_error import StoreError
from producers.gateway.edge.body_limit import BodyLimit, body_budget
from producers.gateway.edge.error_responses import install
from producers.gateway.idempotency import Idempotency, LocalClaims
from producers.gateway.identity.identity import Identity, Role, Scope
from producers.gateway.native.deps import EventPolicy, NativeDeps, event_slots
from producers.gateway.native.routes import ShortPath, router
from producers.gateway.results.cache_entries import MOST_ENTRY_BYTES
from producers.gateway.results.request_store import EndedCursor, EndedFilter, RequestStore
from producers.gateway.results.results import Results
from producers.openai_api.errors import GatewayError, was_not_run
from tests.kit.cache_kit import DictRedis
from tests.kit.openai_kit import MODEL, ScriptedSubmitter, ScriptedWaiting
from tests.kit.waiting import PATIENCE_S, eventually

T = TypeVar("T")

KEY, OTHER_KEY, VIEWER_KEY, RESULTS_KEY, WORK_KEY = "acme", "globex", "acme-viewer", "acme-results", "acme-work"
MOST_BODY_BYTES = 65_536
ID = "0b0f1b52-6a3f-4f0e-9a55-0c6f6f5d8a11"
QUESTION = {"model": MODEL, "input": {"prompt": "What is the capital of France?"}}

_IDENTITIES = {
    KEY: Identity("acme", "key-1", Role.TENANT),
    OTHER_KEY: Identity("globex", "key-2", Role.TENANT),
    VIEWER_KEY: Identity("acme", "key-3", Role.VIEWER),
    RESULTS_KEY: Identity("acme", "key-4", Role.TENANT, frozenset({Scope.RESULTS})),
    WORK_KEY: Identity("acme", "key-5", Role.TENANT, frozenset({Scope.INFERENCE})),
}


class MemoryRequests(RequestStore):
    """In memory. ``error`` is raised by every question while set."""

    def __init__(self) -> None:
        self.replies: list[RecordedReply] = []
        self.decisions: list[AuditEvent] = []
        self.events: list[UsageEvent] = []
        self.erased: set[tuple[str, str]] = set()
        """Before when, by tenant and request."""
        self.error: Exception | None = None
        self.questions = 0

    async def open(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""

    def record(self, *replies: RecordedReply) -> None:
        """What the recorder would: a reply that stands in the log twice is one, which was seen twice."""
        for reply in replies:
            same = [at for at, one in enumerate(self.replies) if _source(one) == _source(reply)]
            if same:
                there = self.replies[same[0]]
                self.replies[same[0]] = replace(there, replies_seen=there.replies_seen + 1)
            else:
                self.replies.append(reply)

    def decide(self, *decisions: AuditEvent) -> None:
        """Likewise."""
        self.decisions += decisions

    def use(self, *events: UsageEvent) -> None:
        """Likewise."""
        self.events += events

    async def usage(self, tenant: str, query: SumQuery, behind: Sequence[str] | None, most: int) -> Sequence[UsageSum]:
        self._asked()
        groups: dict[tuple[Any, ...], list[UsageEvent]] = {}
        for event in self.events:
            day = datetime.fromtimestamp(event.occurred_at_ms / 1_000, UTC).date()
            is_asked_for = event.tenant == tenant and all(_key_of(event, one) == at for one, at in query.only.items())
            if is_asked_for and (query.since or day) <= day and (query.until is None or day < query.until):
                keys = tuple(_key_of(event, group) for group in query.by)
                groups.setdefault((*keys, event.cost.currency if event.cost else ""), []).append(event)
        sums = [_sum_of(keys, groups[keys]) for keys in sorted(groups)]
        return [one for one in sums if behind is None or one.place > tuple(behind)][:most]

    async def reply(self, tenant: str, request_id: str) -> RecordedReply | None:
        newest = self._of(tenant, request_id)
        return min(newest, key=lambda one: was_not_run(one.reply), default=None)

    async def history(self, tenant: str, request_id: str) -> History:
        replies = [replace(one, reply=replace(one.reply, output=None)) for one in self._of(tenant, request_id)]
        mine = [one for one in self.decisions if (one.tenant, one.request_id) == (tenant, request_id)]
        return History(tuple(sorted(mine, key=lambda one: one.occurred_at_ms)), replies=tuple(reversed(replies)))

    async def is_erased(self, tenant: str, request_id: str) -> bool:
        self._asked()
        return (tenant, request_id) in self.erased

    async def ended(
        self, tenant: str, wanted: EndedFilter, behind: EndedCursor | None, most: int
    ) -> Sequence[RecordedReply]:
        self._asked()
        found = sorted((one for one in self.replies if one.reply.tenant == tenant), key=place, reverse=True)
        found = [one for one in found if _is_wanted(one, wanted) and (behind is None or place(one) < _key(behind))]
        return [replace(one, reply=replace(one.reply, output=None)) for one in found[:most]]

    def _of(self, tenant: str, request_id: str) -> list[RecordedReply]:
        self._asked()
        mine = [one for one in self.replies if (one.reply.tenant, one.reply.request_id) == (tenant, request_id)]
        return sorted(mine, key=place, reverse=True)

    def _asked(self) -> None:
        self.questions += 1
        if self.error is not None:
            raise self.error


def _key_of(event: UsageEvent, group: Group) -> Any:
    day = datetime.fromtimestamp(event.occurred_at_ms / 1_000, UTC).date()
    return {
        Group.DAY: day,
        Group.MONTH: day.replace(day=1),
        Group.MODEL: event.model,
        Group.VERSION: event.model_version,
        Group.POOL: event.pool,
        Group.CLASS: event.priority_class,
        Group.CALLER: event.requested_by or "",
    }[group]


def _sum_of(keys: tuple[Any, ...], events: Sequence[UsageEvent]) -> UsageSum:
    return UsageSum(
        keys=keys[:-1],
        currency=keys[-1] or None,
        requests=len(events),
        cached_answers=sum(event.cached for event in events),
        prompt_tokens=sum(event.prompt_tokens for event in events),
        completion_tokens=sum(event.completion_tokens for event in events),
        cached_tokens=sum(event.cached_tokens for event in events),
        images=sum(event.images for event in events),
        engine_ms=sum(event.engine_ms for event in events),
        cost_nanos=sum(event.cost.nanos for event in events if event.cost) if keys[-1] else None,
    )


def _source(recorded: RecordedReply) -> object:
    """Which record of which tenant it answers."""
    return recorded.reply.tenant, recorded.reply.request_id, recorded.reply.source


def place(recorded: RecordedReply) -> tuple[Any, ...]:
    """Where it stands among all."""
    source = recorded.reply.source or SourceCoordinate("", -1, -1)
    return recorded.replied_at_ms, recorded.reply.request_id, source.topic, source.partition, source.offset


def _key(behind: EndedCursor) -> tuple[Any, ...]:
    return (
        behind.replied_at_ms,
        behind.request_id,
        behind.source_topic,
        behind.source_partition,
        behind.source_offset,
    )


def _is_wanted(one: RecordedReply, wanted: EndedFilter) -> bool:
    return (
        wanted.outcome in (None, one.reply.outcome)
        and wanted.model in (None, one.reply.model)
        and (wanted.since_ms is None or one.replied_at_ms >= wanted.since_ms)
        and (wanted.until_ms is None or one.replied_at_ms < wanted.until_ms)
    )


class NativeSubmitter(ScriptedSubmitter):
    """As for OpenAI's routes; replies come by as they would from the log."""

    def __init__(self) -> None:
        super().__init__()
        self.on_reply: Callable[[InferenceReply], None] = lambda _reply: None

    async def submit(self, tenant: str, request: InferenceRequest) -> ScriptedWaiting:
        waiting = await super().submit(tenant, request)
        if (reply := self.replies.get((tenant, request.request_id))) is not None:
            self.on_reply(reply)
        return waiting


class Bench:
    """One gateway's native part, and all that is behind it."""

    def __init__(self, **deps: Any) -> None:
        self.redis = DictRedis()
        self.store = MemoryRequests()
        self.submitter = NativeSubmitter()
        self.now_ms: int | None = None
        cache = RedisCache(
            self.redis,  # type: ignore[arg-type]  # the part that is used
            300,
            timeout_s=5.0,
            most_entry_bytes=MOST_ENTRY_BYTES,
        )
        self.results = Results(cache, self.store, self.clock)
        self.submitter.on_reply = lambda reply: self.results.remember((reply,))
        fields: dict[str, Any] = {"wait_s": PATIENCE_S, "events": EventPolicy(first_look_s=0.02, longest_look_s=0.05)}
        self.deps = NativeDeps(
            self.submitter,  # type: ignore[arg-type]  # a double
            authenticate,
            Idempotency(LocalClaims(), self.results.find_reply),
            on_accepted=self.results.accepted,
            clock_ms=self.clock,
            results=self.results,
            slots=event_slots(deps.pop("most_streams", 100)),
            **(fields | deps),
        )
        self.app = self._app()

    def clock(self) -> int:
        """The machine's, unless the test has set one."""
        return now_ms() if self.now_ms is None else self.now_ms

    def away(self, *, redis: bool = False, postgres: bool = False) -> None:
        """From here on these do not answer."""
        self.redis.error = ConnectionError("away") if redis else None
        self.store.error = StoreError("away") if postgres else None

    def _app(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
            await self.results.open()
            yield
            self.deps.kept.close()
            await self.results.close()

        app = FastAPI(lifespan=lifespan)
        install(app)
        app.include_router(router(self.deps))
        app.add_middleware(ShortPath, deps=self.deps)
        app.add_middleware(BodyLimit, max_bytes=MOST_BODY_BYTES, budget=body_budget(2**30, 2**30))
        return app

    def run(self, test: Callable[[httpx.AsyncClient], Awaitable[T]], key: str | None = KEY) -> T:
        """What comes of a test that calls the routes within this process."""

        async def within() -> T:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            transport = httpx.ASGITransport(self.app)
            async with (
                asyncio.timeout(PATIENCE_S),
                self.app.router.lifespan_context(self.app),
                httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as client,
            ):
                return await test(client)

        return asyncio.run(within())


async def authenticate(connection: HTTPConnection) -> Identity:
    """By a key that names its identity."""
    identity = _IDENTITIES.get(connection.headers.get("authorization", "").removeprefix("Bearer "))
    if identity is None:
        raise GatewayError(401, "unauthenticated", "no identity")
    return identity


def recorded(
    number: int, tenant: str = "acme", request_id: str | None = None, at_ms: int | None = None, **fields: Any
) -> RecordedReply:
    """The reply to a tenant's request with this number, a second after the one before."""
    defaults: dict[str, Any] = {
        "outcome": Outcome.OK,
        "model": MODEL,
        "task": "generate",
        "output": Output(text=f"answer {number}"),
        "source": SourceCoordinate(f"requests.{tenant}", 0, number),
    }
    reply = InferenceReply(request_id or f"{number:032x}", tenant, **(defaults | fields))
    return RecordedReply(reply, 1_760_000_000_000 + 1_000 * number if at_ms is None else at_ms)


def decided(decision: Decision, at_ms: int, request_id: str = ID, tenant: str = "acme", **fields: Any) -> AuditEvent:
    """A decision about the request that stands first in its tenant's topic."""
    source = SourceCoordinate(f"requests.{tenant}", 0, 1)
    return AuditEvent(request_id, tenant, decision, "dispatcher-1", at_ms, source, **fields)


def used(number: int, day: str = "2026-01-31", nanos: int | None = 100, **fields: Any) -> UsageEvent:
    """The usage of a tenant's work item with this number, at the beginning of a day."""
    values: dict[str, Any] = {
        "request_id": f"{number:032x}",
        "tenant": "acme",
        "pool": "generate",
        "model": MODEL,
        "model_version": "1",
        "priority_class": "normal",
        "outcome": Outcome.OK,
        "code": None,
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "cached_tokens": 1,
        "cost_tokens": 14,
        "engine_ms": 50,
        "occurred_at_ms": round(datetime.fromisoformat(f"{day}T00:00:00Z").timestamp() * 1_000) + number,
        "work": SourceCoordinate("priority.generate.normal", 0, number),
        "cost": None if nanos is None else Cost(nanos, "XTS"),
    }
    return UsageEvent(**(values | fields))


LABELS = Output(labels=(LabelScore("seven", 0.75), LabelScore("one", 0.25)))
SCORES = Output(scores=(0.25, 0.75, float("nan")))


@contextmanager
def served(bench: Bench) -> Iterator[str]:
    """Its base URL, with a real server in front of it."""
    config = uvicorn.Config(bench.app, port=0, log_level="error", ws="websockets-sansio", lifespan="on")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="native-routes", daemon=True)
    thread.start()
    try:
        eventually(lambda: server.started, what="the server")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not end"

"""Composition root of the gateway: reads the settings, wires the parts and owns their lifespan."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Literal

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, Field, SecretStr
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from starlette.requests import HTTPConnection
from starlette.responses import Response

from fairlane import logs
from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.kafka.feeds import FeedUnavailableError
from fairlane_server.processes.service import Readiness
from fairlane_server.redis.availability import RedisAvailability
from fairlane_server.redis.state import report_state
from producers.backfill.kafka import reply_partitions
from producers.gateway import openapi
from producers.gateway.edge import error_responses
from producers.gateway.edge.access_log import CallLog
from producers.gateway.edge.body_limit import BodyLimit, TrimWatch, body_budget, trim
from producers.gateway.idempotency import Idempotency, LocalClaims, RedisClaims
from producers.gateway.identity import assembly as identity
from producers.gateway.identity.authentication import RateLimitHeaders
from producers.gateway.identity.identity import Identity
from producers.gateway.native.deps import NativeDeps
from producers.gateway.native.routes import ShortPath
from producers.gateway.native.routes import router as native_router
from producers.gateway.openai.batch_deps import BatchDeps, FileLimits
from producers.gateway.openai.batches import router as batch_router
from producers.gateway.openai.files import MOST_FORM_BYTES
from producers.gateway.openai.router import router as openai_router
from producers.gateway.openai.streams import OpenAIDeps
from producers.gateway.pipeline.assembly import LogPipeline
from producers.gateway.pipeline.call_context import present
from producers.gateway.results.results import make_results

log = logs.get_logger(__name__)

CONDITIONS = ("log", "serving")
FILES_PATH = "/v1/files"

_UPKEEP_S = 0.25
_STORE_CHECK_S = 1.0
_TRIM_CHECK_S = 1.0
_DESCRIPTION = "Inference on Kafka behind HTTP: OpenAI's API and Fairlane's own."


class Alive(BaseModel):
    """The process answers."""

    status: Literal["alive"] = "alive"


class Ready(BaseModel):
    """Whether requests can be accepted."""

    status: Literal["ready", "not_ready"]
    conditions: dict[str, str | None] = Field(description="Each dependency, and why it is missing; null: available")
    degraded: dict[str, str] = Field(description="Each missing optional dependency, and the effect")


_READY = {
    **openapi.answered(
        Ready(status="ready", conditions=dict.fromkeys(CONDITIONS), degraded={}), "Requests can be accepted"
    ),
    **openapi.answered(
        Ready(status="not_ready", conditions={"log": None, "serving": "draining"}, degraded={}),
        "Requests cannot be accepted",
        503,
    ),
}


class Gateway:
    """All parts of one gateway process. Raises ValueError for an invalid setting.

    Attributes:
        app: the application; its lifespan opens and closes the connections.
        readiness: conditions under which requests can be served.
        failure: the fatal error, once there is one.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.readiness = Readiness(*CONDITIONS)
        self.failure: BaseException | None = None
        redis = self._redis = _redis(settings, settings.redis_url)
        self._cache = _redis(settings, settings.redis_cache_url)
        self._watch = None if redis is None else RedisAvailability(redis, settings.gateway_redis_timeout_s)
        self._identity = identity.assemble(settings, redis, self._watch)
        self._results = make_results(settings, self._cache)
        self.pipeline = LogPipeline(
            settings, codec_for(settings), self._results.find_reply, self._results.remember, self._fail
        )
        self.calls: CallLog | None = None
        self._budget = body_budget(settings.gateway_body_budget_bytes, settings.gateway_tenant_body_budget_bytes)
        self.app = FastAPI(
            title="Fairlane",
            description=_DESCRIPTION,
            version="0.1.0",
            lifespan=self._lifespan,
            redirect_slashes=False,
            # None disables the documentation pages too.
            openapi_url="/openapi.json" if settings.gateway_docs else None,
            # FastAPI's telemetry would record exception texts, which may quote caller input.
            telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        )
        error_responses.install(self.app)
        openapi.install(self.app)
        self._add_routes()
        self.app.include_router(self._health())
        # The middleware added last is the outermost.
        self.app.add_middleware(ShortPath, deps=self._native)
        self.app.add_middleware(RateLimitHeaders)
        self.app.add_middleware(
            BodyLimit,
            max_bytes=settings.gateway_max_body_bytes,
            budget=self._budget,
            # A file of the maximum size, plus the form around it.
            streamed={FILES_PATH: settings.gateway_max_file_bytes + MOST_FORM_BYTES},
        )
        self.app.add_middleware(self._call_log)

    @property
    def open_calls(self) -> int:
        """Number of calls in progress."""
        return 0 if self.calls is None else self.calls.open_calls

    def drain(self) -> None:
        """Reject new requests and wait for accepted ones. Event streams end now: their clients can reconnect to any
        instance. Call on the event loop."""
        self.pipeline.submitter.is_draining = True
        self._native.slots.ending.set()
        self.readiness.set("serving", "draining")

    def end_waiting(self) -> None:
        """Drain, and answer every waiting call that its request goes on. Call on the event loop."""
        self.drain()
        self.pipeline.end_waiting()
        self._results.arrivals.end_waiting()

    def degraded(self) -> dict[str, str]:
        """Unavailable optional dependencies, with the consequence of each."""
        missing = {}
        if self._redis is not None and not (self._watch is not None and self._watch.is_up):
            missing["redis"] = "limits and idempotency keys are this instance's own"
        if self._cache is not None and not self._results.is_cache_available:
            missing["redis-cache"] = "results come from Postgres"
        if not self._results.is_store_available:
            missing["postgres"] = "recorded results and new keys are not found"
        return missing

    def _call_log(self, app: object) -> CallLog:
        self.calls = CallLog(app)  # type: ignore[arg-type]  # starlette hands the next application to a factory
        return self.calls

    def _add_routes(self) -> None:
        settings, submitter = self._settings, self.pipeline.submitter
        claims: LocalClaims | RedisClaims = LocalClaims()
        if self._redis is not None and self._watch is not None:
            claims = RedisClaims(
                self._redis, self._watch, settings.gateway_redis_timeout_s, settings.gateway_max_claims
            )
        idempotency = Idempotency(claims, self._results.find_reply)
        openai = OpenAIDeps(
            submitter,
            self._authenticate,
            idempotency,
            settings.gateway_wait_s,
            self._results.accepted,
            models_of=self.pipeline.directory.models_of,
        )
        batches = self._batches = BatchDeps(
            self._authenticate,
            settings.postgres_dsn.get_secret_value(),
            settings.files_url,
            partial(reply_partitions, settings),
            limits=FileLimits(
                settings.files_max_count,
                settings.files_max_bytes,
                settings.gateway_max_file_bytes,
                settings.files_ttl_s,
            ),
            spool_dir=settings.files_spool_dir,
        )
        native = self._native = NativeDeps(
            submitter,
            self._authenticate,
            idempotency,
            settings.gateway_wait_s,
            self._results.accepted,
            results=self._results,
            identify=self._identity.gate.identify,
        )
        for router in (native_router(native), openai_router(openai), batch_router(batches)):
            self.app.include_router(router)

    async def _authenticate(self, connection: HTTPConnection) -> Identity:
        """Authenticate; record the caller for the access log."""
        found = await self._identity.gate(connection)
        caller = present.get()
        if caller is not None:
            caller.tenant, caller.subject = found.tenant, found.subject
        return found

    @asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if self._redis is not None:
                stack.push_async_callback(self._redis.aclose)
                reports = asyncio.create_task(report_state(self._redis), name="redis state")
                stack.push_async_callback(_cancelled, reports)
            if self._cache is not None:
                stack.push_async_callback(self._cache.aclose)
            if self._watch is not None:
                stack.push_async_callback(self._watch.close)
            stack.push_async_callback(self._identity.close)
            await self._identity.open()
            stack.push_async_callback(self._results.close)
            await self._results.open()
            stack.push_async_callback(self.pipeline.close)
            stack.callback(self._native.kept.close)
            try:
                await self.pipeline.start()
            except FeedUnavailableError as error:
                log.error("gateway_failed", reason=str(error))
                raise
            works = {
                "upkeep": self._upkeep(),
                "memory": self._trim_memory(),
                "store check": self._check_store(),
            }
            for name, work in works.items():
                task = asyncio.create_task(work, name=name)
                task.add_done_callback(self._upkeep_ended)
                stack.push_async_callback(_cancelled, task)
            self.readiness.set("serving")
            yield
            self.drain()

    async def _upkeep(self) -> None:
        """Keep the readiness condition ``log`` up to date."""
        while True:
            self.readiness.set("log", self.pipeline.trouble())
            await asyncio.sleep(_UPKEEP_S)

    async def _trim_memory(self) -> None:
        """Return memory to the system after a peak of request bodies."""
        watch = TrimWatch()
        while True:
            await asyncio.sleep(_TRIM_CHECK_S)
            if watch.is_due(self._budget.total):
                await asyncio.to_thread(trim)

    async def _check_store(self) -> None:
        """Probe Postgres, so that ``degraded`` is right even if no call uses it."""
        while True:
            await self._results.check_store()
            await asyncio.sleep(_STORE_CHECK_S)

    def _upkeep_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            log.error("gateway_failed", error=type(error).__name__)
            self.failure = error

    def _health(self) -> APIRouter:
        api = APIRouter(tags=["Health"])

        @api.get(
            "/health", summary="Whether the process answers", responses=openapi.answered(Alive(), "The process answers")
        )
        async def health() -> Alive:
            """Liveness only: no dependency is checked."""
            return Alive()

        @api.get(
            "/health/ready",
            summary="Whether it can take requests, and what it does without",
            responses=_READY,
        )
        async def ready(response: Response) -> Ready:
            """Kafka is required; Redis and Postgres may be unavailable for a while."""
            is_ready = self.readiness.ready
            response.status_code = 200 if is_ready else 503
            return Ready(
                status="ready" if is_ready else "not_ready",
                conditions=dict(self.readiness.reasons()),
                degraded=self.degraded(),
            )

        return api


def _redis(settings: Settings, url: SecretStr | None) -> "Redis | None":
    if url is None:
        return None
    return Redis.from_url(
        url.get_secret_value(),
        socket_timeout=settings.gateway_redis_timeout_s,
        socket_connect_timeout=settings.gateway_redis_timeout_s,
        retry=Retry(NoBackoff(), 0),
    )


async def _cancelled(task: "asyncio.Task[None]") -> None:
    while not task.done():
        # Repeated: redis-py may swallow a cancellation that arrives together with a reply.
        task.cancel()
        await asyncio.wait([task], timeout=1.0)
    with suppress(asyncio.CancelledError):
        task.result()

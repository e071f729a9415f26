"""Composition root of the gateway: reads the settings, wires the parts and owns their lifespan."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from typing import Literal

from confluent_kafka import Consumer
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel, Field
from starlette.responses import Response

from fairlane import logs
from fairlane.client.connector import KafkaConnector
from fairlane.clock import now_ms
from fairlane.codec import Codec
from fairlane.kafka_clients import KafkaProducer
from fairlane.names import gateway_chunks_group
from fairlane.outcomes import Code
from fairlane.records import InferenceReply
from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.erasure.expiry import Lifetimes
from fairlane_server.kafka.feeds import FeedUnavailableError
from fairlane_server.postgres.pool import DeadlinePool
from fairlane_server.processes.service import Readiness
from fairlane_server.redis.availability import WatchedRedis
from fairlane_server.redis.cache import RedisCache
from fairlane_server.redis.client import redis_client
from fairlane_server.redis.state import report_state
from fairlane_server.topics.families import load_families
from producers.backfill.kafka import reply_partitions
from producers.gateway import openapi
from producers.gateway.conversations.deps import ConversationDeps
from producers.gateway.conversations.routes import router as conversation_router
from producers.gateway.documents.deps import DocumentDeps
from producers.gateway.documents.routes import is_upload_path
from producers.gateway.documents.routes import router as document_router
from producers.gateway.edge import error_responses
from producers.gateway.edge.access_log import CallLog
from producers.gateway.edge.body_limit import BodyLimit, TrimWatch, body_budget, trim
from producers.gateway.idempotency import Idempotency, LocalClaims, RedisClaims
from producers.gateway.identity.compose import authentication
from producers.gateway.login.compose import browser_login
from producers.gateway.login.routes import router as login_router
from producers.gateway.native.deps import KEEP_S, NativeDeps
from producers.gateway.native.routes import ShortPath
from producers.gateway.native.routes import router as native_router
from producers.gateway.openai.batch_deps import BatchDeps, FileLimits
from producers.gateway.openai.batches import router as batch_router
from producers.gateway.openai.router import router as openai_router
from producers.gateway.openai.streams import OpenAIDeps
from producers.gateway.pipeline.chunk_reader import ChunkReader
from producers.gateway.pipeline.early_rejection import LatestLoad
from producers.gateway.pipeline.load_watch import LoadWatch, RegistryFeeds
from producers.gateway.pipeline.pending import Pending
from producers.gateway.pipeline.publisher import AsyncPublisher, producer_config
from producers.gateway.pipeline.reply_reader import ReplyReader
from producers.gateway.pipeline.submitter import Submitter
from producers.gateway.received_forms import MOST_FORM_BYTES
from producers.gateway.results.cache_entries import MOST_ENTRY_BYTES
from producers.gateway.results.request_store import RequestStore
from producers.gateway.results.results import RECENT_MS, Results
from producers.ingest.upload_store import DocumentQuota

log = logs.get_logger(__name__)

CONDITIONS = ("log", "serving")
FILES_PATH = "/v1/files"

_IDENTITY_CONNECTIONS = 4
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


NO_PARTITIONS = "no partition of the reply topic is read here"
NOT_ACKNOWLEDGED = "the log does not acknowledge what is published"


def _chunk_consumer(settings: Settings) -> Consumer:
    """A consumer that joins no group, despite its group id."""
    consumer = KafkaConnector(settings).chunk_reader(gateway_chunks_group(settings.group_prefix))
    assert isinstance(consumer, Consumer)  # noqa: S101 - a mistake in this package, not of a caller
    return consumer


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
        timeout_s = settings.gateway_redis_timeout_s
        redis = self._redis = WatchedRedis.of(redis_client(settings.redis_url, timeout_s), timeout_s)
        self._cache = redis_client(settings.redis_cache_url, timeout_s)
        dsn = settings.postgres_dsn.get_secret_value()
        # A separate pool: slow result queries must not block authentication.
        self._identity_pool = DeadlinePool(dsn, "fairlane-gateway-identity", _IDENTITY_CONNECTIONS)
        authenticated = authentication(settings, self._identity_pool, redis)
        self._authenticator = authenticated.authenticator
        self._login = browser_login(settings, redis, authenticated.users, authenticated.sessions)
        cache = RedisCache(self._cache, settings.result_cache_ttl_s, timeout_s, most_entry_bytes=MOST_ENTRY_BYTES)
        self._results = Results(cache, RequestStore(dsn), kept_s=settings.results_ttl_s)
        self._make_pipeline(codec_for(settings))
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
        self.app.add_middleware(
            BodyLimit,
            max_bytes=settings.gateway_max_body_bytes,
            budget=self._budget,
            streamed=self._streamed_bytes,
        )
        self.app.add_middleware(self._call_log)

    def _make_pipeline(self, codec: Codec) -> None:
        settings = self._settings
        latest_load = self._latest_load = LatestLoad()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._directory = RegistryFeeds(settings, codec, self._died)
        self._publisher = AsyncPublisher(
            lambda on_error, is_idempotent: KafkaProducer(
                producer_config(settings, on_error, is_idempotent=is_idempotent)
            ),
            self._died,
        )
        self._chunks = ChunkReader(
            lambda: _chunk_consumer(settings),
            codec,
            lambda request_id: request_id in self._pending,
            lambda chunks: self._pending.add(chunks),  # noqa: PLW0108 - made below
            self._died,
        )
        pending = self._pending = Pending(settings.gateway_max_in_flight, self._chunks, self._results.find_reply)
        self._submitter = Submitter(codec, self._publisher, pending, lambda: self._directory.registry, latest_load)
        self._replies = ReplyReader(settings, codec, pending, self._replied, self._died)
        self._load = LoadWatch(settings, codec, lambda view: self._soon(latest_load.look, view), self._died)

    @property
    def open_calls(self) -> int:
        """Number of calls in progress."""
        return 0 if self.calls is None else self.calls.open_calls

    def drain(self) -> None:
        """Report unready, and end event streams: their clients can reconnect to any instance. Call on the event
        loop."""
        self._native.ending.set()
        self.readiness.set("serving", "draining")

    def refuse(self) -> None:
        """Drain, reject new requests, and wait for accepted ones. Call on the event loop."""
        self.drain()
        self._submitter.is_draining = True

    def end_waiting(self) -> None:
        """Refuse, and answer every waiting call that its request goes on. Call on the event loop."""
        self.refuse()
        self._pending.end_waiting()
        self._publisher.end_waiting()
        self._results.arrivals.end_waiting()

    def degraded(self) -> dict[str, str]:
        """Unavailable optional dependencies, with the consequence of each."""
        missing = {}
        if self._redis is not None and not self._redis.watch.is_up:
            missing["redis"] = "limits and idempotency keys are this instance's own" + (
                "" if self._login is None else "; no browser has a session"
            )
        if self._cache is not None and not self._results.cache.is_available:
            missing["redis-cache"] = "results come from Postgres"
        if not self._results.is_store_available:
            missing["postgres"] = "recorded results and new keys are not found"
        return missing

    def _streamed_bytes(self, path: str) -> int | None:
        """Bound of a body that is streamed to disk: a file of the maximum size, plus the form around it."""
        if path == FILES_PATH:
            return self._settings.gateway_max_file_bytes + MOST_FORM_BYTES
        if is_upload_path(path):
            return self._settings.gateway_max_document_bytes + MOST_FORM_BYTES
        return None

    def _call_log(self, app: object) -> CallLog:
        self.calls = CallLog(app)  # type: ignore[arg-type]  # starlette hands the next application to a factory
        return self.calls

    def _add_routes(self) -> None:
        settings, submitter = self._settings, self._submitter
        claims: LocalClaims | RedisClaims = LocalClaims()
        if self._redis is not None:
            timeout_s = settings.gateway_redis_timeout_s
            claims = RedisClaims(self._redis.client, self._redis.watch, timeout_s, settings.gateway_max_claims)
        idempotency = Idempotency(claims, self._results.find_reply)
        openai = OpenAIDeps(
            submitter,
            self._authenticator,
            idempotency,
            settings.gateway_wait_s,
            self._results.accepted,
            models_of=self._directory.models_of,
            may_name=self._directory.may_name,
        )
        batches = BatchDeps(
            self._authenticator,
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
            self._authenticator,
            idempotency,
            settings.gateway_wait_s,
            self._results.accepted,
            results=self._results,
            registry=lambda: self._directory.registry,
            load=self._latest_load,
            identify=self._authenticator.identify,
        )
        documents = DocumentDeps(
            self._authenticator,
            settings.postgres_dsn.get_secret_value(),
            settings.files_url,
            batches.spool_folder,
            # Shared: together they leave some threads of the pool free.
            batches.calls,
            batches.transfers,
            DocumentQuota(settings.documents_max_count, settings.documents_max_bytes, settings.documents_max_passages),
            settings.gateway_max_document_bytes,
        )
        conversations = self._conversations = ConversationDeps(
            self._authenticator,
            settings.postgres_dsn.get_secret_value(),
            self._results,
            batches.calls,
            batches.transfers,
            load_families(),
            _lifetimes(settings),
            settings.erasures_max_names,
        )
        routers = (
            native_router(native),
            openai_router(openai),
            batch_router(batches),
            document_router(documents),
            conversation_router(conversations),
        )
        for router in routers:
            self.app.include_router(router)
        if self._login is not None:
            self.app.include_router(login_router(self._login, settings.trusted_proxies))

    @asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if self._redis is not None:
                stack.push_async_callback(self._redis.close)
                reports = asyncio.create_task(report_state(self._redis.client), name="redis state")
                stack.push_async_callback(_cancelled, reports)
            if self._cache is not None:
                stack.push_async_callback(self._cache.aclose)
            stack.push_async_callback(self._identity_pool.close)
            stack.push_async_callback(self._authenticator.close)
            if self._login is not None:
                stack.push_async_callback(self._login.close)
            await self._identity_pool.open()
            stack.push_async_callback(self._results.close)
            await self._results.open()
            stack.push_async_callback(self._close_pipeline)
            stack.callback(self._native.kept.close)
            try:
                await self._start_pipeline()
            except FeedUnavailableError as error:
                log.error("gateway_failed", reason=str(error))
                raise
            works = {
                "upkeep": self._upkeep(),
                "memory": self._trim_memory(),
                "store check": self._check_store(),
                "erasures": self._conversations.resume(),
            }
            for name, work in works.items():
                task = asyncio.create_task(work, name=name)
                task.add_done_callback(self._upkeep_ended)
                stack.push_async_callback(_cancelled, task)
            self.readiness.set("serving")
            yield
            self.refuse()

    async def _upkeep(self) -> None:
        """Keep the readiness condition ``log`` up to date."""
        while True:
            if not self._pending.owns_partitions:
                self.readiness.set("log", NO_PARTITIONS)
            else:
                self.readiness.set("log", None if self._publisher.is_available else NOT_ACKNOWLEDGED)
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

    async def _start_pipeline(self) -> None:
        loop = self._loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self._directory.start)
        for part in (self._publisher, self._chunks, self._replies, self._load):
            part.start()

    async def _close_pipeline(self) -> None:
        """Disconnect, after a short wait for records in flight."""
        loop = asyncio.get_running_loop()
        await asyncio.gather(
            self._publisher.close(),
            self._replies.close(),
            self._chunks.close(),
            loop.run_in_executor(None, self._load.stop),
            loop.run_in_executor(None, self._directory.stop),
        )

    def _replied(self, replies: Sequence[InferenceReply]) -> None:
        """Replies were read, on the reader's thread."""
        self._results.remember(replies)
        if refused := [reply for reply in replies if reply.code == Code.INSUFFICIENT_QUOTA]:
            self._soon(self._submitter.spent.learn, refused, now_ms())

    def _died(self, error: BaseException) -> None:
        """A thread has died."""
        self._soon(self._fail, error)

    def _soon(self, function: Callable[..., None], *arguments: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

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


def _lifetimes(settings: Settings) -> Lifetimes:
    """How long copies of what is erased live; other services are taken to have the same settings."""
    return Lifetimes(
        request_ms=settings.max_timeout_ms,
        cached_results_ms=1_000 * settings.result_cache_ttl_s,
        cached_answers_ms=1_000 * settings.cache_ttl_s,
        gateway_memory_ms=round(max(1_000 * KEEP_S, RECENT_MS)),
        audit_ms=1_000 * settings.audit_ttl_s,
        usage_ms=1_000 * settings.usage_ttl_s,
    )


async def _cancelled(task: "asyncio.Task[None]") -> None:
    while not task.done():
        # Repeated: redis-py may swallow a cancellation that arrives together with a reply.
        task.cancel()
        await asyncio.wait([task], timeout=1.0)
    with suppress(asyncio.CancelledError):
        task.result()

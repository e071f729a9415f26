"""Composition root of the admin API: reads the settings, wires the parts and owns their lifespan."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Literal

from fastapi import APIRouter, FastAPI
from pydantic import BaseModel
from starlette.responses import Response

from fairlane import logs
from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.administration.dead_letters import DeadLetterOffice
from fairlane_server.administration.evaluations import TenantEvaluations
from fairlane_server.administration.events import AdminAudit
from fairlane_server.administration.labels import TenantLabels
from fairlane_server.administration.log_replays import LogReplayOffice
from fairlane_server.administration.model_routes import ModelRoutes
from fairlane_server.administration.observer import Observer
from fairlane_server.administration.tenants import Tenants
from fairlane_server.api_keys.key_store import ApiKeys
from fairlane_server.log_replay.runner import LogReplayRunner
from fairlane_server.postgres.drift_findings import DriftFindings
from fairlane_server.postgres.pool import DeadlinePool
from fairlane_server.processes.service import Readiness
from fairlane_server.redis.availability import WatchedRedis
from fairlane_server.redis.client import redis_client
from fairlane_server.rollouts.controller import RolloutController
from producers.admin import (
    audit,
    dead_letters,
    drift,
    evaluations,
    identities,
    labels,
    log_replays,
    models,
    observation,
    rollouts,
    shadows,
    tenants,
)
from producers.admin.blocking import Serial
from producers.admin.deps import PREFIX, AdminDeps, Stores
from producers.gateway import openapi
from producers.gateway.edge import error_responses
from producers.gateway.edge.access_log import CallLog
from producers.gateway.edge.body_limit import BodyLimit, body_budget
from producers.gateway.identity.compose import authentication

log = logs.get_logger(__name__)

MOST_BODY_BYTES = 262_144
MOST_SET_BODY_BYTES = 16 * 1024 * 1024
"""Of an evaluation set; the command line takes larger ones."""
_SET_PATH = re.compile(rf"{PREFIX}/evaluations/[^/]+/sets/[^/]+")
_BUDGET_BYTES = 64 * MOST_BODY_BYTES
_IDENTITY_CONNECTIONS = 2
_CONDITIONS = ("serving",)


class Alive(BaseModel):
    """The process answers."""

    status: Literal["alive"] = "alive"


class Ready(BaseModel):
    """Whether calls are taken."""

    status: Literal["ready", "not_ready"]


class AdminApi:
    """All parts of the process. Raises ValueError for an invalid setting.

    Attributes:
        app: the application; its lifespan opens and closes the connections.
        readiness: conditions under which calls are taken. Postgres and Kafka are none of them: a call that needs one
            says so.
        failure: the error that ended the judging of rollouts, or the replays of the log, once there is one.
    """

    def __init__(self, settings: Settings) -> None:
        self.readiness = Readiness(*_CONDITIONS)
        self.failure: BaseException | None = None
        self.calls: CallLog | None = None
        dsn = settings.postgres_dsn.get_secret_value()
        self._pool = DeadlinePool(dsn, "fairlane-admin-identity", _IDENTITY_CONNECTIONS)
        timeout_s, has_sessions = settings.gateway_redis_timeout_s, settings.admin_sessions
        # For sessions alone: its user may not touch the counts of rate limits.
        redis_url = settings.redis_url if has_sessions else None
        self._redis = WatchedRedis.of(redis_client(redis_url, timeout_s), timeout_s)
        self._authenticator = authentication(
            settings, self._pool, self._redis, has_sessions=has_sessions, has_shared_limits=False
        ).authenticator
        self._stores = Stores(Serial("Postgres"), ApiKeys(dsn), AdminAudit(dsn))
        codec = codec_for(settings)
        # Changes of tenants record themselves, in the thread that makes them.
        self._kafka_audit = AdminAudit(dsn)
        self._kafka_calls = Serial("Kafka")
        self._kafka_keys = ApiKeys(dsn)
        self._tenants = Tenants(settings, codec, self._kafka_audit, self._kafka_keys)
        # Apart: a replay takes up to minutes.
        self._letter_calls, self._load_calls = Serial("dead letters"), Serial("loads")
        self._history_calls = Serial("histories")
        self._letter_audit = AdminAudit(dsn)
        self._office = DeadLetterOffice(settings, codec, self._letter_audit)
        self._observer = Observer(settings, codec)
        self._evaluation_calls, self._label_calls = Serial("evaluations"), Serial("labels")
        self._evaluation_audit, self._label_audit = AdminAudit(dsn), AdminAudit(dsn)
        routes = ModelRoutes(settings, codec)
        self._rollouts = RolloutController(settings, codec, partial(self._ended, "rollouts_failed"))
        self._replay_calls = Serial("replays of the log")
        self._replays = LogReplayOffice(settings)
        self._replay_runner = LogReplayRunner(settings, codec, partial(self._ended, "log_replays_failed"))
        self.app = FastAPI(
            title="Fairlane administration",
            description="Tenants, keys, users, models, rollouts, replays of the log, evaluations, labels, dead "
            "letters, loads, drift and audit of a deployment.",
            version="0.1.0",
            lifespan=self._lifespan,
            redirect_slashes=False,
            openapi_url="/openapi.json" if settings.gateway_docs else None,
            telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        )
        error_responses.install(self.app)
        openapi.install(self.app)
        deps = AdminDeps(self._authenticator, self._stores, self._kafka_calls)
        for router in (
            tenants.router(deps, self._tenants),
            identities.router(deps),
            dead_letters.router(deps, self._office, self._letter_calls),
            models.router(deps, routes, self._history_calls),
            rollouts.router(deps, routes, self._history_calls, self._rollouts),
            shadows.router(deps, routes, self._history_calls),
            log_replays.router(deps, self._replays, self._replay_calls, routes),
            observation.router(deps, self._observer, self._load_calls),
            drift.router(deps, DriftFindings(settings), self._history_calls),
            evaluations.router(deps, TenantEvaluations(dsn, self._evaluation_audit), self._evaluation_calls),
            labels.router(deps, TenantLabels(dsn, self._label_audit), self._label_calls),
            audit.router(deps),
        ):
            self.app.include_router(router, prefix=PREFIX)
        self.app.include_router(self._health())
        # The middleware added last is the outermost.
        self.app.add_middleware(
            BodyLimit,
            max_bytes=MOST_BODY_BYTES,
            budget=body_budget(_BUDGET_BYTES, _BUDGET_BYTES),
            streamed=_most_of_sets,
        )
        self.app.add_middleware(self._call_log)

    @property
    def open_calls(self) -> int:
        """Number of calls in progress."""
        return 0 if self.calls is None else self.calls.open_calls

    def _ended(self, event: str, error: BaseException) -> None:
        log.error(event, error=type(error).__name__)
        self.failure = error

    def drain(self) -> None:
        """Report unready."""
        self.readiness.set("serving", "draining")

    def refuse(self) -> None:
        """The port is closed by now: nothing is left to refuse."""
        self.drain()

    def end_waiting(self) -> None:
        """No call waits for more than its own bounded work."""
        self.drain()

    def _call_log(self, app: object) -> CallLog:
        self.calls = CallLog(app)  # type: ignore[arg-type]  # starlette hands the next application to a factory
        return self.calls

    @asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            stores = self._stores
            audits = (stores.audit, self._kafka_audit, self._letter_audit, self._evaluation_audit, self._label_audit)
            for part in (stores.keys, self._kafka_keys, self._tenants, self._observer, self._replays, *audits):
                stack.push_async_callback(partial(asyncio.to_thread, part.close))
            serials = (
                *(self._kafka_calls, self._letter_calls, self._load_calls, self._history_calls, self._replay_calls),
                *(self._evaluation_calls, self._label_calls),
            )
            for calls in (stores.calls, *serials):
                stack.push_async_callback(calls.close)
            if self._redis is not None:
                stack.push_async_callback(self._redis.close)
            stack.push_async_callback(self._pool.close)
            stack.push_async_callback(self._authenticator.close)
            await self._pool.open()
            self._rollouts.start()
            stack.push_async_callback(partial(asyncio.to_thread, self._rollouts.stop))
            self._replay_runner.start()
            stack.push_async_callback(partial(asyncio.to_thread, self._replay_runner.stop))
            self.readiness.set("serving")
            yield
            self.drain()

    def _health(self) -> APIRouter:
        api = APIRouter(tags=["Health"])

        @api.get("/health", responses=openapi.answered(Alive(), "The process answers"))
        async def health() -> Alive:
            """Liveness only: no dependency is checked."""
            return Alive()

        @api.get(
            "/health/ready",
            responses=openapi.answered(Ready(status="ready"), "Calls are taken")
            | openapi.answered(Ready(status="not_ready"), "It starts or ends", 503),
        )
        async def ready(response: Response) -> Ready:
            """Postgres and Kafka are not checked: calls that need one of them get 503 meanwhile."""
            is_ready = self.readiness.ready
            response.status_code = 200 if is_ready else 503
            return Ready(status="ready" if is_ready else "not_ready")

        return api


def _most_of_sets(path: str) -> int | None:
    return MOST_SET_BODY_BYTES if _SET_PATH.fullmatch(path) else None

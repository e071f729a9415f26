"""The thread that judges the rollouts under way, and advances, promotes or rolls back their candidates.

It keeps nothing: the state of a rollout is in its model's route, the evidence in Postgres. So it may be ended at any
time, and any number may run: a decision is published only on the route that it was made for.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from time import monotonic

import psycopg

from fairlane import metrics
from fairlane.clock import ClockMs, now_ms
from fairlane.codec import Codec
from fairlane.logs import get_logger
from fairlane.records import ModelRoute
from fairlane.schema_registry import RegistryError
from fairlane.settings import Settings
from fairlane_server.control.published_models import FollowedModels
from fairlane_server.control.route_change import change_route
from fairlane_server.kafka.cluster_admin import ClusterError
from fairlane_server.kafka.feeds import FeedUnavailableError
from fairlane_server.models.changes import Author, Published, route_of
from fairlane_server.models.rollout_arms import is_active
from fairlane_server.postgres.connection import ALL_TENANTS, DsnError, ReconnectingConnection, reason
from fairlane_server.postgres.rollout_evidence import read_rollout_evidence
from fairlane_server.rollouts.changes import advanced, rolled_back
from fairlane_server.rollouts.steps import StepAction, next_action
from fairlane_server.rollouts.verdict import StepVerdict, judge_step

log = get_logger(__name__)

AUTHOR = "rollout controller"
APPLICATION_NAME = "fairlane-rollouts"

_INTERVAL_S = 1.0
_MOST_BUSY = 0.1
"""Part of the time that it may keep Postgres busy: evidence of a long step takes longer to read."""
_CALL_TIMEOUT_S = 20.0
_STOP_TIMEOUT_S = 10.0


class RolloutController:
    """Looks once a second. ``on_failure`` is called on its thread with the error that ended it; Kafka or Postgres that
    cannot be reached is none."""

    def __init__(
        self,
        settings: Settings,
        codec: Codec,
        on_failure: Callable[[BaseException], None],
        wall_clock: ClockMs = now_ms,
    ) -> None:
        self._settings = settings
        self._codec = codec
        self._on_failure = on_failure
        self._wall_clock = wall_clock
        self._kept = ReconnectingConnection(
            settings.postgres_dsn.get_secret_value(),
            APPLICATION_NAME,
            _CALL_TIMEOUT_S,
            server_timeouts_s={"statement_timeout": _CALL_TIMEOUT_S},
        )
        self._models = FollowedModels(settings, codec)
        self._latest: Mapping[str, StepVerdict] = {}
        self._shown: set[str] = set()
        self._troubled: set[str] = set()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End it, after the look that is under way."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_TIMEOUT_S)

    @property
    def latest(self) -> Mapping[str, StepVerdict]:
        """The latest verdict on each rollout under way, by model. Any thread may read it."""
        return self._latest

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                started_s = monotonic()
                self._look()
                took_s = monotonic() - started_s
                self._stopping.wait(max(_INTERVAL_S, took_s / _MOST_BUSY - took_s))
        except Exception as error:  # noqa: BLE001 - handed to the owner
            self._on_failure(error)
        finally:
            self._models.stop()
            self._kept.close()

    def _look(self) -> None:
        """Judge every rollout once. One that cannot be judged keeps no other from it."""
        try:
            routes = self._models.catalog().routes
        except FeedUnavailableError as error:
            self._failed("Kafka", str(error))
            return
        active = [one for one in routes.values() if one.rollout is not None and is_active(one.rollout)]
        failures = [self._judged(route) for route in active if not self._stopping.is_set()]
        for server in self._troubled.difference(failures):
            log.info("rollouts_are_judged_again", server=server)
        self._troubled.intersection_update(failures)
        names = {route.model for route in active}
        self._latest = {name: verdict for name, verdict in self._latest.items() if name in names}
        steps = {one.model: one.rollout.step for one in active if one.rollout is not None}
        for name, step in steps.items():
            metrics.ROLLOUT_STEP.labels(model=name).set(step)
        for name in self._shown - steps.keys():
            metrics.ROLLOUT_STEP.remove(name)
        self._shown = set(steps)

    def _judged(self, route: ModelRoute) -> str | None:
        """Judge one rollout. Returns the server that failed, if one did."""
        try:
            self._look_at(route)
        except (ClusterError, RegistryError) as error:
            return self._failed("Kafka", str(error))
        except (psycopg.Error, DsnError) as error:
            return self._failed("Postgres", reason(error) if isinstance(error, psycopg.Error) else str(error))
        except Exception as error:
            log.exception("rollout_not_judged", model=route.model)
            return self._failed("controller", type(error).__name__)
        return None

    def _look_at(self, route: ModelRoute) -> None:
        rollout = route.rollout
        assert rollout is not None  # noqa: S101 - the caller has looked
        with self._kept.transaction(ALL_TENANTS) as connection:
            candidate, control = read_rollout_evidence(connection, route.model, rollout, self._wall_clock())
        verdict = judge_step(candidate, control, rollout.guards, len(rollout.steps) - 1)
        self._latest = {**self._latest, route.model: verdict}
        now = self._wall_clock()
        action, why = next_action(rollout, verdict.verdict, now)
        if action is not StepAction.STAY:
            self._carry_out(route, action, verdict, Author(AUTHOR, now, f"{why}: {verdict.reason}"))

    def _carry_out(self, route: ModelRoute, action: StepAction, verdict: StepVerdict, author: Author) -> None:
        def decided(published: Published) -> ModelRoute:
            present = route_of(published, route.model)
            if present is None or present.rollout != route.rollout:
                # Somebody was faster; the next look judges what there is now.
                raise _OvertakenError
            made = rolled_back if action is StepAction.ROLL_BACK else advanced
            return made(present, verdict, author)

        try:
            made = change_route(self._settings, self._codec, route.model, decided)
        except _OvertakenError:
            return
        assert made.rollout is not None  # noqa: S101 - decided has made it
        decision = made.rollout.decided
        metrics.ROLLOUT_DECISIONS.labels(model=route.model, decision=decision).inc()
        log.info(
            "rollout_decided",
            model=route.model,
            rollout=made.rollout.rollout,
            decision=decision,
            reason=author.reason,
            step=made.rollout.step,
            findings=[asdict(finding) for finding in verdict.findings],
        )

    def _failed(self, server: str, why: str) -> str:
        metrics.ROLLOUT_LOOKS_FAILED.labels(server=server).inc()
        if server not in self._troubled:
            self._troubled.add(server)
            log.warning("rollouts_not_judged", server=server, reason=why)
        return server


class _OvertakenError(Exception):
    """The route is not any more what the decision was made for."""

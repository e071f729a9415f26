"""The services of a test's pipeline under a supervisor, to be struck: what ends comes back, as in a deployment.

Two dispatchers, two consumers of one pool and the recorder.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.faults.plan import Cast
from benchmarks.faults.rig import Rig as AnyRig
from deploy.local.services import Service, SetupStep
from deploy.local.stack import LocalStack
from fairlane_server.postgres.rights import PostgresRole
from fairlane_server.processes.restarts import RestartPolicy
from tests.kit.pipeline import Pipeline
from tests.kit.redis_users import RedisUsers, check_no_refusal
from tests.kit.stack import PostgresServer

DISPATCHERS = ("dispatcher-1", "dispatcher-2")
CONSUMERS = ("consumer-1", "consumer-2")
RECORDER = "recorder-1"
CAST = Cast(DISPATCHERS, CONSUMERS, RECORDER)

# What is killed every few seconds must not look like a crash loop, and a crash loop must not look like kills: between
# two kills of the same service lie about six seconds, between two deaths in a loop at most three.
RESTARTS = RestartPolicy(max_deaths=8, window_s=30.0, max_delay_s=1.0)


class Rig(AnyRig):
    """Runs the services of ``pipeline`` while its context is open; their logs are below ``folder``."""

    def __init__(
        self,
        pipeline: Pipeline,
        folder: Path,
        database: PostgresServer,
        redis_url: str,
        *,
        env: Mapping[str, str],
    ) -> None:
        self.pipeline = pipeline
        self._redis_users = RedisUsers(redis_url, f"{pipeline.unique}-rig")

        def service(name: str, arguments: tuple[str, ...], role: PostgresRole | None = None) -> Service:
            made = Service(name, arguments, postgres_role=role)
            return replace(made, env={**pipeline.env, **pipeline.env_of(made), **self._redis_users.env_of(name), **env})

        dispatch, record = ("-m", "stream_processors.dispatcher"), ("-m", "stream_processors.recorder")
        consume = ("-m", "inference_consumers", "--pool", pipeline.pool, "--engine", "simulated")
        stack = LocalStack(
            data_dir=folder,
            # Nothing of these is started: they are looked up in ``environ``.
            parts=("kafka", "postgres"),
            setup=(SetupStep("setup-tables", ("-m", "fairlane_server.cli", "db", "upgrade"), after=(), as_owner=True),),
            services=(
                *(service(name, dispatch, PostgresRole.DISPATCHER) for name in DISPATCHERS),
                *(service(name, consume) for name in CONSUMERS),
                service(RECORDER, record, PostgresRole.RECORDER),
            ),
            environ={
                "KAFKA_BOOTSTRAP_SERVERS": pipeline.settings.kafka_bootstrap_servers,
                **database.environ,
            },
            policy=RESTARTS,
        )
        super().__init__(stack, pipeline.deployment, CAST)

    def __enter__(self) -> Self:
        """Start everything and wait until each service that shares work owns partitions."""
        self._redis_users.__enter__()
        self.stack.start()
        try:
            assert self.deaths == 0, f"{self.deaths} services died before anything was struck"
            self.wait_all_own(60)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """SIGKILL everything: what a clean end looks like is tested elsewhere."""
        self.stack.supervisor.request_stop(now=True)
        self.stack.stop()
        self._redis_users.__exit__(kind, error, trace)
        if kind is None:
            check_no_refusal(self.stack.data_dir.logs.glob("*.log"))

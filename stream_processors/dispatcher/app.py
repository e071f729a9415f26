"""Composition root of the dispatcher: reads the settings, wires the parts, runs until it is told to stop."""

import asyncio
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic

from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from fairlane import logs, names
from fairlane.clock import now_ms
from fairlane.feeds import Feed
from fairlane.kafka import connection, transactional_producer
from fairlane.ownership import Ownership
from fairlane.records import ModelVersion, TenantSpec
from fairlane.registry import codec_for
from fairlane.service import HealthServer, Readiness, exit_after
from fairlane.settings import Settings
from fairlane.transactions import Settlement, TransactionLoop
from stream_processors.dispatcher.archive import LoggedReplies
from stream_processors.dispatcher.decisions import DecisionWriter
from stream_processors.dispatcher.dispatcher import Dispatcher
from stream_processors.dispatcher.duplicates import DuplicateIndex, NoDuplicateIndex, RedisDuplicateIndex
from stream_processors.dispatcher.stream import RequestStream
from stream_processors.dispatcher.validation import Limits
from stream_processors.dispatcher.work_queue import ArrivalOrder

log = logs.get_logger(__name__)

_UPKEEP_S = 0.2
_MAX_OUTSIDE_GROUP_S = 90.0
_METADATA_EVERY_S = 1.0
_EXIT_MARGIN_S = 4.0
_SWITCH_INTERVAL_S = 0.0005
_METADATA_TIMEOUT_S = 5.0
_REVOKE_TIMEOUT_S = 3.0
_REDIS_TIMEOUT_S = 0.25


class DispatcherApp:
    """One dispatcher process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._readiness = Readiness("feeds", "producer", "assignment")
        self._health = HealthServer(self._readiness, settings.metrics_host, settings.metrics_port)
        self._codec = codec_for(settings)
        self._tenants = Feed(settings, self._codec, names.CONTROL_TENANTS, TenantSpec)
        self._models = Feed(settings, self._codec, names.CONTROL_MODELS, ModelVersion)
        self._admin = AdminClient(connection(settings))
        self._ownership = Ownership(settings.max_undone_span)
        self._archive = LoggedReplies(settings, self._codec)
        self._stopping = asyncio.Event()
        self._member_at = monotonic()
        self._failure: BaseException | None = None

    async def run(self) -> int:
        """Run until SIGTERM or a fatal error. Returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        self._health.start()

        def failed(error: BaseException) -> None:
            loop.call_soon_threadsafe(self._fail, error)

        for feed in (self._tenants, self._models):
            feed.on_failure(failed)
            await loop.run_in_executor(None, feed.start)
        self._readiness.set("feeds")
        redis = self._redis()
        transactions = self._transactions(failed)
        dispatcher = self._dispatcher(transactions, redis)
        transactions.fallback = dispatcher.writer.unpublishable

        def committed(_settled: Sequence[Settlement]) -> None:
            loop.call_soon_threadsafe(dispatcher.on_room)

        transactions.on_committed = committed
        await loop.run_in_executor(None, transactions.start)
        self._readiness.set("producer")
        stream = RequestStream(
            self._settings,
            self._ownership,
            on_record=dispatcher.on_record,
            on_revoked=partial(self._revoked, dispatcher, transactions),
            on_failure=failed,
        )
        tasks: list[asyncio.Task[None]] = []
        try:
            if await self._start(stream):
                tasks = [
                    asyncio.create_task(dispatcher.run(), name="intake"),
                    asyncio.create_task(dispatcher.settle_duplicates(), name="duplicates"),
                    asyncio.create_task(self._upkeep(stream, dispatcher, transactions), name="upkeep"),
                ]
                for task in tasks:
                    task.add_done_callback(self._task_ended)
                await self._stopping.wait()
        finally:
            await self._stop(stream, transactions, tasks, redis)
        if self._failure is not None:
            log.error("dispatcher_failed", error=str(self._failure), kind=type(self._failure).__name__)
            return 1
        return 0

    def _transactions(self, failed: Callable[[BaseException], None]) -> TransactionLoop:
        settings = self._settings
        transactional_id = f"{settings.group_prefix}.dispatcher.{settings.instance_id}"
        producer = Producer(transactional_producer(settings, transactional_id, settings.transaction_timeout_ms))
        return TransactionLoop(
            producer,
            self._ownership,
            on_fatal=failed,
            max_records=settings.max_transaction_records,
        )

    def _dispatcher(self, transactions: TransactionLoop, redis: "Redis | None") -> Dispatcher:
        settings = self._settings
        duplicates: DuplicateIndex = (
            NoDuplicateIndex() if redis is None else RedisDuplicateIndex(redis, settings.dedupe_ttl_s)
        )
        return Dispatcher(
            codec=self._codec,
            ownership=self._ownership,
            transactions=transactions,
            writer=DecisionWriter(self._codec, settings.instance_id),
            queue=ArrivalOrder(),
            duplicates=duplicates,
            archive=self._archive,
            limits=Limits(
                settings.max_input_bytes, settings.max_input_items, settings.max_timeout_ms, settings.max_output_tokens
            ),
            max_held=settings.max_queue_size,
            max_held_bytes=settings.max_queue_bytes,
            clock=now_ms,
            tenants=self._tenants.snapshot,
            models=self._models.snapshot,
        )

    def _redis(self) -> "Redis | None":
        url = self._settings.redis_url
        if url is None:
            return None
        return Redis.from_url(
            url.get_secret_value(),
            socket_timeout=_REDIS_TIMEOUT_S,
            socket_connect_timeout=_REDIS_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
        )

    async def _start(self, stream: RequestStream) -> bool:
        """Join the group as soon as there is a tenant; False when told to stop before."""
        while not self._stopping.is_set():
            topics = await self._existing_topics()
            if topics:
                await stream.start(topics)
                return True
            self._readiness.set("assignment", "no tenant has a request topic yet")
            await self._pause()
        return False

    async def _upkeep(self, stream: RequestStream, dispatcher: Dispatcher, transactions: TransactionLoop) -> None:
        """What has to be looked at again and again: new tenants, paused partitions, the membership."""
        look_at = 0.0
        # Before 3.12 wait_for loses a cancellation that comes together with what it waits for: being told ends it.
        while not self._stopping.is_set():
            dispatcher.tenants, dispatcher.models = self._tenants.snapshot, self._models.snapshot
            if stream.crashed is not None:
                raise RuntimeError("Faust stopped") from stream.crashed
            if not stream.rebalancing:
                wanted = self._wanted_topics()
                if wanted - stream.subscribed and monotonic() >= look_at:
                    look_at = monotonic() + _METADATA_EVERY_S
                    topics = await self._existing_topics()
                    if topics - stream.subscribed and not stream.rebalancing:
                        log.info("subscribing", topics=sorted(topics - stream.subscribed))
                        await stream.subscribe(topics | stream.subscribed)
                stream.refresh_membership()
                self._ownership.flow()
                stream.apply_pauses(self._ownership.paused())
                dispatcher.dispatch()
                transactions.commit_positions()
            # Settlements of revoked partitions vanish without a commit.
            dispatcher.on_room()
            self._check_membership(stream)
            await self._pause()

    def _check_membership(self, stream: RequestStream) -> None:
        """Ready only as a member; one that stays outside its group for long is stuck, and a restart is the cure."""
        if self._ownership.may_commit and not stream.rebalancing:
            self._member_at = monotonic()
            self._readiness.set("assignment")
            return
        outside_s = monotonic() - self._member_at
        if outside_s > _MAX_OUTSIDE_GROUP_S:
            raise RuntimeError(f"no member of the group for {outside_s:.0f} s")
        if not self._ownership.may_commit:
            self._readiness.set("assignment", "waiting for the group")

    async def _pause(self) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), _UPKEEP_S)
        except TimeoutError:
            return

    def _wanted_topics(self) -> frozenset[str]:
        tenants: Mapping[str, TenantSpec] = self._tenants.snapshot
        return frozenset(
            topic for tenant in tenants for topic in (names.requests_topic(tenant), names.backfill_topic(tenant))
        )

    async def _existing_topics(self) -> frozenset[str]:
        """The wanted topics that the cluster already shows with a leader; none while it does not answer."""
        loop = asyncio.get_running_loop()
        try:
            metadata = await loop.run_in_executor(None, lambda: self._admin.list_topics(timeout=_METADATA_TIMEOUT_S))
        except KafkaException as error:
            log.warning("metadata_unavailable", error=error.args[0].name())
            return frozenset()
        return frozenset(
            topic
            for topic in self._wanted_topics()
            if (found := metadata.topics.get(topic)) is not None
            and found.error is None
            and found.partitions
            and all(partition.leader >= 0 for partition in found.partitions.values())
        )

    async def _revoked(self, dispatcher: Dispatcher, transactions: TransactionLoop) -> None:
        """The open transaction ends before the group moves on."""
        dispatcher.on_revoked()

        def wait() -> bool:
            with transactions.between_transactions(_REVOKE_TIMEOUT_S) as ended:
                return ended

        if not await asyncio.get_running_loop().run_in_executor(None, wait):
            log.warning("transaction_outlived_revocation")

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stopping.set()

    def _task_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            self._fail(task.exception() or RuntimeError("unreachable"))

    async def _stop(
        self,
        stream: RequestStream,
        transactions: TransactionLoop,
        tasks: list[asyncio.Task[None]],
        redis: "Redis | None",
    ) -> None:
        self._readiness.set("assignment", "stopping")
        exit_timer = exit_after(self._settings.drain_timeout_s + _EXIT_MARGIN_S)
        loop = asyncio.get_running_loop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._failure is None:
            await loop.run_in_executor(None, transactions.drain, self._settings.drain_timeout_s)
        await stream.stop()
        await loop.run_in_executor(None, transactions.stop)
        for feed in (self._tenants, self._models):
            await loop.run_in_executor(None, feed.stop)
        self._archive.close()
        if redis is not None:
            await redis.aclose()
        self._health.stop()
        exit_timer.cancel()


def main() -> int:
    """Run a dispatcher in this process."""
    settings = Settings()
    logs.configure(settings, "dispatcher")
    # Three threads take turns on every request; at Python's default each turn may cost the next one 5 ms.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    return asyncio.run(DispatcherApp(settings).run())

"""Composition root of the dispatcher process: reads the settings, wires the parts, runs until SIGTERM or failure."""

import asyncio
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from time import monotonic
from typing import Any

from fairlane import logs, metrics, names
from fairlane.clock import monotonic_ms, now_ms
from fairlane.kafka_clients import KafkaAdmin, KafkaConsumer
from fairlane.kafka_config import connection, read_committed_consumer
from fairlane.ownership import Ownership
from fairlane.records import DispatchReport, TenantSpec
from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.control.last_good import LastGood
from fairlane_server.control.published_models import PublishedModels
from fairlane_server.conversations.conversations import PgTurnStore
from fairlane_server.costs.published_prices import PublishedPrices
from fairlane_server.kafka.feeds import Feed
from fairlane_server.kafka.open_kafka import OpenKafkaError, check_open_kafka
from fairlane_server.kafka.transactional_producer import TransactionalProducers
from fairlane_server.kafka.transactions import Settlement, TransactionLoop
from fairlane_server.models.catalog import ModelCatalog
from fairlane_server.processes.garbage_collection import collect_less_often
from fairlane_server.processes.service import HealthServer, Readiness, exit_after
from fairlane_server.processes.start import begin_service
from fairlane_server.redis.availability import RedisAvailability
from fairlane_server.redis.cache import ANSWER_TIMEOUT_S, RedisCache
from fairlane_server.redis.client import redis_client
from fairlane_server.redis.state import report_state
from fairlane_server.retrieval.embedders import query_embedder_for
from fairlane_server.retrieval.pgvector_search import PgVectorSearch
from fairlane_server.topics.families import pools_of
from stream_processors.dispatcher.assembly import assemble
from stream_processors.dispatcher.budgets.loader import SpendingLoader
from stream_processors.dispatcher.deduplication.reply_archive import KafkaReplyArchive
from stream_processors.dispatcher.enrichment.background_embedder import BackgroundEmbedder
from stream_processors.dispatcher.enrichment.history import HistoryReader
from stream_processors.dispatcher.enrichment.retriever import Retriever
from stream_processors.dispatcher.feedback.work_feed import WorkFeed
from stream_processors.dispatcher.feedback.work_records import FeedEvent
from stream_processors.dispatcher.output import heartbeat_report
from stream_processors.dispatcher.output.heartbeat_publisher import HeartbeatPublisher
from stream_processors.dispatcher.reading.request_topics import RequestTopics
from stream_processors.dispatcher.reading.stream import RequestStream
from stream_processors.dispatcher.registry import check_tenant
from stream_processors.dispatcher.response_cache.caches import PassageCache, QueryEmbeddings
from stream_processors.dispatcher.response_cache.lookup import CachedAnswers, SemanticCache

log = logs.get_logger(__name__)

_UPKEEP_S = 0.2
_MAX_OUTSIDE_GROUP_S = 60.0
_EXIT_MARGIN_S = 4.0
_CANCEL_AGAIN_AFTER_S = 0.2
_SWITCH_INTERVAL_S = 0.0005
_REVOKE_TIMEOUT_S = 3.0
_REDIS_TIMEOUT_S = 0.25
_SPENDING_TIMEOUT_S = 5.0
"""How long requests wait at the start for what was spent of the budgets; then hard ones refuse until it is known."""


class DispatcherApp:
    """One dispatcher process. To be made on the event loop that runs it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._failure: BaseException | None = None
        self._member_at = monotonic()
        self._started_at_ms = now_ms()
        self._readiness = Readiness("feeds", "producer", "assignment")
        self._health = HealthServer(self._readiness, settings.metrics_host, settings.metrics_port)
        self._codec = codec_for(settings)

        self._tenants = Feed(settings, self._codec, names.CONTROL_TENANTS, TenantSpec)
        self._models = PublishedModels(settings, self._codec, self._failed)
        self._prices = PublishedPrices(settings, self._codec, self._failed)
        self._usable_tenants = LastGood(check_tenant, "tenant_unusable")
        self._registered: tuple[Mapping[str, TenantSpec], ModelCatalog] = ({}, ModelCatalog())
        """As of the last ``_look_at_feeds``."""
        self._shown: tuple[object, object, object] = (None, None, None)
        self._work = WorkFeed(settings, self._codec, self._pools, self._on_work)
        # Reads the group's committed offsets without joining it, and does not wait for commits in progress.
        group = read_committed_consumer(settings, names.dispatcher_group(settings.group_prefix))
        self._group = KafkaConsumer(group | {"isolation.level": "read_uncommitted"})
        self._topics = RequestTopics(KafkaAdmin(connection(settings)), self._group)

        self._redis = redis_client(settings.redis_url, _REDIS_TIMEOUT_S)
        cache = redis_client(settings.redis_cache_url, _REDIS_TIMEOUT_S)
        self._redis_clients = [client for client in (self._redis, cache) if client is not None]
        self._redis_watch = None if self._redis is None else RedisAvailability(self._redis)
        if cache is None:
            log.info("caches_off", reason="REDIS_CACHE_URL is not set")
        stored = RedisCache(cache, settings.cache_ttl_s)
        answers = RedisCache(cache, settings.cache_ttl_s, ANSWER_TIMEOUT_S)
        self._caches = (stored, answers)
        # One enrichment may query passages and history at once, and an abandoned search keeps its connection for a
        # moment: hence twice the concurrency limit.
        self._passages = PgVectorSearch(
            settings.postgres_dsn.get_secret_value(), max_connections=2 * settings.retrieval_max_concurrency
        )
        self._embedder = BackgroundEmbedder(
            partial(query_embedder_for, settings), partial(self._readiness.degrade, "embedder")
        )
        # A static embedder is faster than a Redis round trip.
        vectors = QueryEmbeddings(self._embedder, None if settings.retrieval_embedder == "static" else stored)
        found_before = PassageCache(stored, monotonic_ms, settings.cache_ttl_s)
        known_ms = 1_000 * settings.cache_ttl_s
        retriever = Retriever(self._passages, vectors, monotonic_ms, found_before, known_ms)
        semantic = SemanticCache(answers, settings.cache_semantic_threshold)

        self._ownership = Ownership(settings.max_undone_span)
        self._archive = KafkaReplyArchive(settings, self._codec)
        transactional_ids = names.dispatcher_transactional_ids(settings.group_prefix, settings.instance_id)
        producers = TransactionalProducers(settings, transactional_ids, settings.transaction_timeout_ms)
        self._transactions = TransactionLoop(
            producers.make(),
            self._ownership,
            renewed=producers.renewed,
            on_fatal=self._failed,
            on_committed=self._committed,
            fallback=self._unpublishable,
            max_records=settings.max_transaction_records,
        )
        self._dispatcher = assemble(
            settings,
            self._codec,
            self._ownership,
            self._transactions,
            self._archive,
            None if self._redis is None or self._redis_watch is None else (self._redis, self._redis_watch),
            retriever,
            HistoryReader(PgTurnStore(self._passages.pool), monotonic_ms),
            CachedAnswers(semantic, retriever, vectors, settings.retrieval_budget_ms / 1_000),
            lambda: self._prices.book,
            now_ms,
        )
        budgets = self._dispatcher.output.budgets
        self._spending = SpendingLoader(budgets.ledger, self._passages.pool, now_ms)
        self._reporter = HeartbeatPublisher(settings, self._codec, self._heartbeat)
        self._stream = RequestStream(
            settings,
            self._ownership,
            on_poll=self._dispatcher.intake.receive,
            on_revoked=self._revoked,
            on_failure=self._failed,
        )
        self._dispatcher.on_backlog = self._reporter.arrived
        self._dispatcher.on_backfill = self._apply_pauses
        self._dispatcher.intake.buffer.on_change = self._hold_intake

    async def run(self) -> int:
        """Run until SIGTERM or a fatal error. Returns the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stopping.set)
        self._health.start()
        self._tenants.on_failure(self._failed)
        for feed in (self._tenants, self._models, self._prices):
            await self._loop.run_in_executor(None, feed.start)
        self._show_registry()
        self._work.on_failure(self._failed)
        await self._loop.run_in_executor(None, self._work.start)
        self._readiness.set("feeds")
        await self._passages.open()
        tasks = [asyncio.create_task(self._embedder.load(), name="embedder")]
        await self._spending.load_all(_SPENDING_TIMEOUT_S)
        await self._loop.run_in_executor(None, self._transactions.start)
        self._readiness.set("producer")
        collect_less_often()
        try:
            if await self._start():
                tasks += [self._owned(name, task) for name, task in self._tasks().items()]
                await self._stopping.wait()
        finally:
            await self._stop(tasks)
        if self._failure is not None:
            log.error("dispatcher_failed", error=str(self._failure), kind=type(self._failure).__name__)
            return 1
        return 0

    def _tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        dispatcher = self._dispatcher
        tasks = {
            "dispatcher": dispatcher.run(),
            "delivery": dispatcher.deliver(),
            "duplicates": dispatcher.deduplication.run(),
            "schemas": dispatcher.intake.run(),
            "heartbeat": self._reporter.run(),
            "upkeep": self._upkeep(),
            "spending": self._spending.run(),
        }
        return tasks if self._redis is None else tasks | {"redis state": report_state(self._redis)}

    def _owned(self, name: str, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":

        def ended(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._fail(error)

        task = asyncio.create_task(coroutine, name=name)
        task.add_done_callback(ended)
        return task

    def _failed(self, error: BaseException) -> None:
        """End the process. Called on any thread."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stopping.set()

    def _unpublishable(self, settlement: Settlement, reason: str) -> Settlement:
        kept = self._dispatcher.output.writer.unpublishable(settlement, reason)
        if kept is not settlement:
            metrics.DEAD_LETTERS.labels(topic=names.DEAD_LETTER_REQUESTS, problem="unpublishable").inc()
        return kept

    def _committed(self, settled: Sequence[Settlement]) -> None:
        """Pass committed settlements to the event loop. Runs on the transaction loop's thread."""
        self._loop.call_soon_threadsafe(self._dispatcher.on_committed, settled)

    def _pools(self) -> tuple[str, ...]:
        """The pools in use. Runs on the feed's thread."""
        tenants, models = self._registered
        return pools_of(tenants.values(), models.versions.values())

    def _look_at_feeds(self) -> tuple[Mapping[str, TenantSpec], ModelCatalog]:
        tenants = self._usable_tenants.usable(self._tenants.snapshot)
        self._registered = tenants, self._models.catalog
        return self._registered

    def _on_work(self, events: Sequence[FeedEvent]) -> None:
        """Pass the events to the event loop. Runs on the feed's thread."""
        self._loop.call_soon_threadsafe(self._learn, events)

    def _learn(self, events: Sequence[FeedEvent]) -> None:
        try:
            with metrics.stage_time("feedback"):
                self._dispatcher.updates.learn(events)
            self._dispatcher.dispatch()
        except Exception as error:  # noqa: BLE001 - asyncio would only log it, and requests popped from the queue would be lost
            self._fail(error)

    def _heartbeat(self, with_tenants: bool) -> DispatchReport:
        at_ms = now_ms()
        scheduler, stats = self._dispatcher.scheduler, self._dispatcher.output.counts.recent
        scheduler.refresh(at_ms)
        return heartbeat_report.report(
            scheduler,
            stats,
            self._settings.instance_id,
            self._started_at_ms,
            at_ms,
            with_tenants=with_tenants,
            budgets=self._dispatcher.output.budgets.loads() if with_tenants else (),
        )

    def _show_registry(self) -> None:
        """Pass tenants and models to the dispatcher when they, or the share of partitions read here, changed."""
        tenants, models = self._look_at_feeds()
        partitions = self._topics.parts(tenants, self._ownership.partitions())
        known_tenants, known_models, known_partitions = self._shown
        if tenants is not known_tenants or models is not known_models or partitions != known_partitions:
            if tenants is not known_tenants:
                self._dispatcher.output.counts.set_tenants(tenants)
            self._shown = (tenants, models, partitions)
            self._dispatcher.set_registry(tenants, models, partitions)

    async def _start(self) -> bool:
        """Join the group once a tenant's request topic exists. False when stopped before, when Kafka is open to all
        and may not be, or when the join timed out."""
        try:
            check_open_kafka(self._settings, self._registered[0])
        except OpenKafkaError as error:
            self._fail(error)
            return False
        while not self._stopping.is_set():
            topics = await self._topics.existing(self._topics.wanted(*self._look_at_feeds()))
            if any(not names.is_returned(topic) and topic != names.EVALUATION_WORK for topic in topics):
                return await self._join(topics)
            self._readiness.set("assignment", "no tenant has a request topic yet")
            await self._pause()
        return False

    async def _join(self, topics: frozenset[str]) -> bool:
        """Join the group within ``_MAX_OUTSIDE_GROUP_S``. False on timeout, which ends the process: Faust would wait
        without a bound, and a restart helps."""
        try:
            async with asyncio.timeout(_MAX_OUTSIDE_GROUP_S):
                await self._stream.start(topics)
        except TimeoutError:
            self._fail(RuntimeError(f"did not join its group within {_MAX_OUTSIDE_GROUP_S:.0f} s"))
            return False
        self._member_at = monotonic()
        return True

    async def _upkeep(self) -> None:
        """Periodic work every ``_UPKEEP_S``: registry changes, new topics, pauses, membership, deadlines, dispatch.

        Raises OpenKafkaError when a second tenant comes and Kafka is open to all and may not be."""
        stream, dispatcher = self._stream, self._dispatcher
        # Before Python 3.12 wait_for loses a cancellation that coincides with its result, hence the loop condition.
        while not self._stopping.is_set():
            self._show_registry()
            check_open_kafka(self._settings, self._registered[0])
            if stream.crashed is not None:
                raise RuntimeError("Faust stopped") from stream.crashed
            if not stream.rebalancing:
                wanted = self._topics.wanted(*self._registered)
                if self._topics.should_look(wanted, stream.subscribed):
                    topics = await self._topics.existing(wanted)
                    if topics - stream.subscribed and not stream.rebalancing:
                        log.info("subscribing", topics=sorted(topics - stream.subscribed))
                        await stream.subscribe(topics | stream.subscribed)
                stream.refresh_membership()
                self._ownership.flow()
                self._apply_pauses()
                self._hold_intake()
                dispatcher.follow_loaded()
                dispatcher.sweep()
                dispatcher.dispatch()
                self._transactions.commit_positions()
            dispatcher.scheduler.in_flight.expire(now_ms())
            dispatcher.updates.show()
            # Settlements of revoked partitions disappear without a commit, so no callback reports the freed room.
            dispatcher.intake.on_room()
            self._check_membership()
            await self._pause()

    def _apply_pauses(self) -> None:
        if not self._stream.rebalancing:
            held_up = self._transactions.sources_held_up()
            owned = self._ownership.partitions() if held_up else ()
            refused = {partition for partition in owned if partition.topic in held_up}
            self._stream.apply_pauses({*self._ownership.paused(), *self._dispatcher.paused_backfill(), *refused})

    def _hold_intake(self) -> None:
        intake = self._dispatcher.intake
        self._stream.hold(intake.held(), slow=intake.invalid_records.slow)

    def _check_membership(self) -> None:
        """Report readiness only as a group member. Raises RuntimeError after ``_MAX_OUTSIDE_GROUP_S`` outside the
        group: the member is stuck, and a restart helps."""
        if self._ownership.may_commit and not self._stream.rebalancing:
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

    async def _revoked(self) -> None:
        """Drop the state of revoked partitions, then wait for the open transaction before the rebalance goes on."""
        await self._dispatcher.on_revoked()

        def wait() -> bool:
            with self._transactions.between_transactions(_REVOKE_TIMEOUT_S) as ended:
                return ended

        if not await self._loop.run_in_executor(None, wait):
            log.warning("transaction_outlived_revocation")

    async def _stop(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        self._readiness.set("assignment", "stopping")
        exit_timer = exit_after(self._settings.drain_timeout_s + _EXIT_MARGIN_S)
        await _end(tasks)
        if self._failure is None:
            await self._loop.run_in_executor(None, self._transactions.drain, self._settings.drain_timeout_s)
        await self._reporter.stop()
        await self._stream.stop()
        await self._loop.run_in_executor(None, self._transactions.stop)
        await self._dispatcher.close()
        for cache in self._caches:
            await cache.settle()
        await self._embedder.aclose()
        await self._passages.close()
        for feed in (self._work, self._tenants, self._models, self._prices):
            await self._loop.run_in_executor(None, feed.stop)
        self._archive.close()
        self._group.close()
        if self._redis_watch is not None:
            await self._redis_watch.close()
        for client in self._redis_clients:
            await client.aclose()
        self._health.stop()
        exit_timer.cancel()


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel these tasks, repeatedly, until all have ended. One cancellation can be lost: before Python 3.12
    asyncio.wait_for, used by redis-py, swallows it when the reply arrives at the same moment."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=_CANCEL_AGAIN_AFTER_S)
    await asyncio.gather(*tasks, return_exceptions=True)


async def _run(settings: Settings) -> int:
    return await DispatcherApp(settings).run()


def main() -> int:
    """Run a dispatcher in this process."""
    settings = Settings()
    begin_service(settings, "dispatcher")
    # Three threads handle every request; at Python's default switch interval each hand-over may cost 5 ms. The gateway,
    # whose event loop does nearly everything, is slower with it.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    return asyncio.run(_run(settings))

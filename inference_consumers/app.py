"""Composition root of an inference consumer: reads the settings, loads the pool's versions, joins its group."""

import threading
from collections.abc import Callable
from functools import partial
from time import monotonic

from confluent_kafka import KafkaException

from fairlane import logs
from fairlane.clock import now_ms
from fairlane.codec import Codec
from fairlane.kafka_clients import KafkaProducer
from fairlane.kafka_config import chunk_producer, heartbeat_producer
from fairlane.names import consumer_transactional_ids, pool_group
from fairlane.ownership import Ownership
from fairlane.records import CapacityReport
from fairlane.schema_registry import codec_for
from fairlane.settings import Settings
from fairlane_server.costs.published_prices import PublishedPrices
from fairlane_server.kafka.feeds import FeedUnavailableError
from fairlane_server.kafka.transactional_producer import TransactionalProducers
from fairlane_server.kafka.transactions import TransactionLoop
from fairlane_server.models.routes import version_key
from fairlane_server.processes.garbage_collection import collect_less_often
from fairlane_server.processes.restarts import EXIT_NO_RESTART
from fairlane_server.processes.service import HealthServer, Readiness, StopSignal, exit_after
from inference_consumers.batching.batch_size import BatchLimits
from inference_consumers.batching.micro_batch import MicroBatcher
from inference_consumers.batching.priority_pick import PRIORITY_WEIGHTS
from inference_consumers.batching.waiting_work import WaitingWork
from inference_consumers.cancellations import CancellationFeed
from inference_consumers.capacity.reporter import CapacityReporter
from inference_consumers.consumer import InferenceConsumer, Prefetch
from inference_consumers.driver import EngineDriver, TooManyDeadLettersError
from inference_consumers.engine_process.stall_detection import StallTimeouts
from inference_consumers.engine_process.states import EngineStates
from inference_consumers.engines.protocol import EngineLoadError
from inference_consumers.group import PoolMember
from inference_consumers.guardrails.process.checks import check_processes
from inference_consumers.results.cache_writer import cache_writer_for
from inference_consumers.results.chunk_writer import ChunkWriter
from inference_consumers.results.dead_letter_share import DeadLetterShare
from inference_consumers.results.records import AnswerWriter
from inference_consumers.results.result_writer import ResultWriter
from inference_consumers.schema_waits import SchemaWaits
from inference_consumers.versions.pool_versions import PoolVersions

log = logs.get_logger(__name__)

_REVOKE_TIMEOUT_S = 3.0
_DRAIN_POLL_S = 0.02
_HAND_OVER_S = 2.0
"""About the time until others have the partitions of a member that left: what it holds is started here until then."""
_LOAD_POLL_S = 0.05
_EXIT_MARGIN_S = 3.0
_KEPT_ANSWERS_S = 0.5
_CHECK_END_S = 1.0


class ConsumerApp:
    """One inference consumer process of one pool."""

    def __init__(self, settings: Settings, pool: str) -> None:
        self._settings = settings
        self._pool = pool
        self._readiness = Readiness("engines", "producer", "assignment")
        self._health = HealthServer(self._readiness, settings.metrics_host, settings.metrics_port)
        self._stop = StopSignal()
        self._failure: BaseException | None = None
        self._kept = cache_writer_for(settings)
        self._checks = check_processes(settings, self._fail)

    def run(self) -> int:
        """Run until SIGTERM or a fatal error; main thread only. Returns the exit status."""
        self._stop.install()
        return self.run_here()

    def stop(self) -> None:
        self._stop.stop()

    def run_here(self) -> int:
        """Run on any thread until ``stop`` or a fatal error. Returns the exit status.

        The group is joined when the engines are loaded and warm: partitions of a member that cannot work yet would
        wait. Raises EngineLoadError when none can be, FeedUnavailableError when the control topics cannot be read.
        """
        settings = self._settings
        self._health.start()
        ownership = Ownership(settings.max_undone_span)
        transactions = self._transactions(ownership)
        codec = codec_for(settings)
        prices = PublishedPrices(settings, codec, self._fail)
        consumer = self._consumer(ownership, transactions, codec, prices)
        driver = consumer.driver
        versions = PoolVersions(settings, self._pool, codec, driver, lambda: bool(ownership.partitions()), self._fail)
        self._checks.start(settings.started_checks)
        if not self._load(versions):
            return 0
        transactions.start()
        if self._kept is not None:
            self._kept.start()
        reporter = self._reporter(consumer, ownership, versions)
        self._readiness.set("producer")
        feed = CancellationFeed(settings, consumer.codec, consumer.driver.cancellations, consumer.cancel, now_ms)
        feed.on_failure(self._fail)
        member = PoolMember(settings, self._pool, ownership, partial(self._revoked, consumer, transactions))
        try:
            prices.start()
            feed.start()
            threading.Thread(target=self._guarded, args=(driver.feed,), name="feeder", daemon=True).start()
            member.join()
            reporter.start()
            versions.begin_serving()
            collect_less_often()
            while not self._stop.stopping:
                consumer.poll_once(member)
                lost = driver.lost_engines
                self._readiness.set("engines", f"starting again: {', '.join(lost)}" if lost else versions.waiting_for)
                if ownership.membership is not None:
                    self._readiness.set("assignment")
        except (KafkaException, FeedUnavailableError) as error:
            self._fail(error)
        reporter.stop()
        versions.stop()
        self._drain(consumer, transactions, member, versions)
        feed.stop()
        prices.stop()
        reporter.join()
        if self._failure is not None:
            log.error("consumer_failed", error=str(self._failure), kind=type(self._failure).__name__)
            # Started again, it would bury the next few.
            return EXIT_NO_RESTART if isinstance(self._failure, TooManyDeadLettersError) else 1
        return 0

    def _load(self, versions: PoolVersions) -> bool:
        """Load what there is memory for, one version after the other. False when the end came first. Raises
        EngineLoadError when nothing can be loaded."""
        is_loaded = False
        try:
            versions.start()
            while not (is_loaded or self._stop.stopping):
                is_loaded = versions.is_loaded
                self._readiness.set("engines", None if is_loaded else versions.waiting_for or "loading")
                self._stop.wait(0 if is_loaded else _LOAD_POLL_S)
        finally:
            if not is_loaded:
                versions.stop()
                versions.close(gently=self._failure is None)
                self._checks.close(_CHECK_END_S)
                self._health.stop()
        if not is_loaded and self._failure is not None:
            raise EngineLoadError(str(self._failure))
        return is_loaded

    def _transactions(self, ownership: Ownership) -> TransactionLoop:
        settings = self._settings
        transactional_ids = consumer_transactional_ids(settings.group_prefix, self._pool, settings.instance_id)
        producers = TransactionalProducers(settings, transactional_ids, settings.transaction_timeout_ms)
        return TransactionLoop(
            producers.make(),
            ownership,
            renewed=producers.renewed,
            on_fatal=self._fail,
            max_records=settings.max_transaction_records,
        )

    def _consumer(
        self, ownership: Ownership, transactions: TransactionLoop, codec: Codec, prices: PublishedPrices
    ) -> InferenceConsumer:
        settings = self._settings
        group = pool_group(settings.group_prefix, self._pool)
        answers = AnswerWriter(codec, settings.instance_id, group, lambda: prices.book)
        settler = ResultWriter(answers, None if self._kept is None else self._kept.keep)
        transactions.fallback = settler.unpublishable
        limits = BatchLimits(settings.max_batch_size, settings.max_batch_tokens, settings.batch_timeout_ms)
        driver = EngineDriver(
            waiting=WaitingWork(MicroBatcher(limits), copies=WaitingWork(MicroBatcher(limits))),
            engines=EngineStates(),
            transactions=transactions,
            settler=settler,
            chunks=ChunkWriter(KafkaProducer(chunk_producer(settings)), codec),
            timeouts=StallTimeouts(round(settings.engine_hang_timeout_s * 1_000)),
            dead_letters=DeadLetterShare(settings.dead_letter_max_share),
            clock=now_ms,
            on_fatal=self._fail,
            is_current=ownership.is_current,
            checks=self._checks,
            hold_back=settings.guardrail_hold_back_characters,
        )
        return InferenceConsumer(
            codec=codec,
            ownership=ownership,
            transactions=transactions,
            driver=driver,
            prefetch=Prefetch(settings.max_prefetch_items, settings.max_prefetch_bytes),
            clock=now_ms,
            schema_waits=SchemaWaits(codec),
        )

    def _reporter(self, consumer: InferenceConsumer, ownership: Ownership, versions: PoolVersions) -> CapacityReporter:
        settings = self._settings

        def observe(draining: bool) -> CapacityReport | None:
            # A member without partitions can do nothing for its pool; what it could do must not be counted on.
            owned = {partition.partition for partition in ownership.partitions()}
            if not draining and not owned:
                return None
            reading = consumer.reading()
            served, limits = consumer.driver.served
            return CapacityReport(
                instance_id=settings.instance_id,
                pool=self._pool,
                models=tuple(dict.fromkeys(model for model, _ in served)),
                health=reading.health,
                draining=draining,
                prefill_tokens_per_s=reading.rates.prompt_tokens_per_s,
                decode_tokens_per_s=reading.rates.completion_tokens_per_s,
                max_batch_size=limits.max_items,
                max_batch_tokens=limits.max_tokens,
                batch_fill=reading.batch_fill,
                in_flight_items=reading.held_items,
                in_flight_tokens=reading.held_tokens,
                reported_at_ms=now_ms(),
                cost_tokens_per_s=reading.rates.cost_tokens_per_s,
                partitions=tuple(sorted(owned)),
                versions=tuple(version_key(*key) for key in served),
                follows_models=True,
                changes=versions.changes,
            )

        producer = KafkaProducer(heartbeat_producer(settings, "capacity"))
        return CapacityReporter(producer, consumer.codec, observe, self._fail)

    def _revoked(self, consumer: InferenceConsumer, transactions: TransactionLoop) -> None:
        consumer.on_revoked()
        with transactions.between_transactions(_REVOKE_TIMEOUT_S) as ended:
            if not ended:
                log.warning("transaction_outlived_revocation")

    def _guarded(self, work: "partial[None]") -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a thread that ends must end the process, not leave it half alive
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stop.stop()

    def _drain(
        self,
        consumer: InferenceConsumer,
        transactions: TransactionLoop,
        member: PoolMember,
        versions: PoolVersions,
    ) -> None:
        """Finish what is held, as far as that is quick, and what runs; commit, leave the group. What still waits in
        memory stays undone in the log."""
        self._readiness.set("assignment", "draining")
        driver = consumer.driver
        deadline = monotonic() + self._settings.drain_timeout_s
        exit_timer = exit_after(self._settings.drain_timeout_s + _EXIT_MARGIN_S)
        until = partial(self._poll_until, consumer, member)
        until(min(deadline, monotonic() + _HAND_OVER_S), lambda: driver.is_done)
        driver.stop()
        until(deadline, lambda: driver.is_at_rest)
        if self._failure is None:
            until(deadline, lambda: not transactions.unsettled_count)
        member.close()
        transactions.stop()
        driver.chunks.close()
        if self._kept is not None:
            self._kept.close(_KEPT_ANSWERS_S)
        versions.close(gently=driver.is_at_rest)
        driver.end_checks()
        self._checks.close(_CHECK_END_S)
        self._health.stop()
        exit_timer.cancel()

    def _poll_until(
        self, consumer: InferenceConsumer, member: PoolMember, deadline: float, done: Callable[[], bool]
    ) -> None:
        """Stay a member in good standing while work is finished: the group may move on, and commits must follow it."""
        member.pause_priorities(PRIORITY_WEIGHTS)
        while not done() and monotonic() < deadline and self._failure is None:
            member.poll(_DRAIN_POLL_S)
            consumer.watch()

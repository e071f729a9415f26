"""Composition root of an inference consumer: reads the settings, loads the engines, joins the pool's group."""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic

from confluent_kafka import KafkaException, Producer

from fairlane import logs
from fairlane.clock import now_ms
from fairlane.kafka import transactional_producer
from fairlane.models import load_models
from fairlane.ownership import Ownership
from fairlane.records import ModelVersion
from fairlane.registry import codec_for
from fairlane.service import HealthServer, Readiness, StopSignal, exit_after
from fairlane.settings import Settings
from fairlane.transactions import TransactionLoop
from inference_consumers.answers import AnswerWriter
from inference_consumers.consumer import InferenceConsumer, Prefetch
from inference_consumers.engines.protocol import Engine
from inference_consumers.engines.registry import create_engine
from inference_consumers.engines.simulated import SimulatedCost
from inference_consumers.group import PoolMember
from inference_consumers.micro_batch import PRIORITY_WEIGHTS, BatchLimits, MicroBatcher, ModelKey

log = logs.get_logger(__name__)

_REVOKE_TIMEOUT_S = 3.0
_DRAIN_POLL_S = 0.02
_EXIT_MARGIN_S = 3.0


class NoSuchPoolError(Exception):
    """models.yaml names no model for the pool."""


class ConsumerApp:
    """One inference consumer process of one pool."""

    def __init__(self, settings: Settings, pool: str) -> None:
        """Raises ConfigError for a bad models.yaml and NoSuchPoolError for a pool without models."""
        self._settings = settings
        self._pool = pool
        models = load_models(settings.models_file)
        self._models = {(model.model, model.version): model for model in models if model.pool == pool}
        if not self._models:
            pools = ", ".join(sorted({model.pool for model in models}))
            raise NoSuchPoolError(f"no model of {settings.models_file} is in the pool {pool}; pools: {pools}")
        self._readiness = Readiness("engines", "producer", "assignment")
        self._health = HealthServer(self._readiness, settings.metrics_host, settings.metrics_port)
        self._stop = StopSignal()
        self._failure: BaseException | None = None

    def run(self) -> int:
        """Run until SIGTERM or a fatal error; main thread only. Returns the exit status."""
        self._stop.install()
        return self.run_here()

    def stop(self) -> None:
        """Drain and end, as on SIGTERM."""
        self._stop.stop()

    def run_here(self) -> int:
        """Run on any thread until ``stop`` or a fatal error. Returns the exit status."""
        settings = self._settings
        self._health.start()
        engines = self._load_engines()
        ownership = Ownership(settings.max_undone_span)
        transactions = self._transactions(ownership)
        consumer = self._consumer(engines, ownership, transactions)
        transactions.start()
        self._readiness.set("producer")
        member = PoolMember(settings, self._pool, ownership, partial(self._revoked, consumer, transactions))
        engine_thread = threading.Thread(target=self._guarded, args=(consumer.run_engines,), name="engine", daemon=True)
        engine_thread.start()
        member.join()
        try:
            while not self._stop.stopping:
                consumer.poll_once(member)
                if ownership.membership is not None:
                    self._readiness.set("assignment")
        except KafkaException as error:
            self._fail(error)
        self._drain(consumer, transactions, member, engine_thread, engines)
        if self._failure is not None:
            log.error("consumer_failed", error=str(self._failure), kind=type(self._failure).__name__)
            return 1
        return 0

    def _load_engines(self) -> Mapping[ModelKey, Engine]:
        settings = self._settings
        cost = SimulatedCost(
            prefill_tokens_per_s=settings.simulated_prefill_tokens_per_s,
            decode_tokens_per_s=settings.simulated_decode_tokens_per_s,
        )
        engines = {}
        for key, model in self._models.items():
            override = "simulated" if settings.engine == "simulated" else None
            engine = create_engine(
                model, settings.models_dir, settings.engine_threads, engine=override, simulated_cost=cost
            )
            engine.load()
            log.info("engine_ready", model=model.model, version=model.version, engine=engine.name)
            engines[key] = engine
        self._readiness.set("engines")
        return engines

    def _transactions(self, ownership: Ownership) -> TransactionLoop:
        settings = self._settings
        transactional_id = f"{settings.group_prefix}.consumer.{self._pool}.{settings.instance_id}"
        producer = Producer(transactional_producer(settings, transactional_id, settings.transaction_timeout_ms))
        return TransactionLoop(producer, ownership, on_fatal=self._fail, max_records=settings.max_transaction_records)

    def _consumer(
        self, engines: Mapping[ModelKey, Engine], ownership: Ownership, transactions: TransactionLoop
    ) -> InferenceConsumer:
        settings = self._settings
        codec = codec_for(settings)
        answers = AnswerWriter(codec)
        transactions.fallback = answers.unpublishable
        limits = BatchLimits(settings.max_batch_size, settings.max_batch_tokens, settings.batch_timeout_ms)
        by_model = {key: self._limits(model) for key, model in self._models.items()}
        return InferenceConsumer(
            codec=codec,
            ownership=ownership,
            transactions=transactions,
            answers=answers,
            batcher=MicroBatcher(limits, by_model),
            engines=engines,
            prefetch=Prefetch(settings.max_prefetch_items, settings.max_prefetch_bytes),
            clock=now_ms,
        )

    def _limits(self, model: ModelVersion) -> BatchLimits:
        settings = self._settings
        return BatchLimits(
            min(settings.max_batch_size, model.max_batch_size),
            min(settings.max_batch_tokens, model.max_batch_tokens),
            settings.batch_timeout_ms,
        )

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
        engine_thread: threading.Thread,
        engines: Mapping[ModelKey, Engine],
    ) -> None:
        """Finish the running batch, commit, leave the group. What waits in memory stays undone in the log."""
        self._readiness.set("assignment", "draining")
        deadline = monotonic() + self._settings.drain_timeout_s
        exit_timer = exit_after(self._settings.drain_timeout_s + _EXIT_MARGIN_S)
        consumer.stop()
        self._poll_until(member, deadline, lambda: not engine_thread.is_alive())
        if self._failure is None:
            self._poll_until(member, deadline, lambda: not transactions.pending_count)
        member.close()
        transactions.stop()
        for engine in engines.values():
            engine.close()
        self._health.stop()
        exit_timer.cancel()

    def _poll_until(self, member: PoolMember, deadline: float, done: Callable[[], bool]) -> None:
        """Stay a member in good standing while work is finished: the group may move on, and commits must follow it."""
        member.pause_priorities(PRIORITY_WEIGHTS)
        while not done() and monotonic() < deadline and self._failure is None:
            member.poll(_DRAIN_POLL_S)

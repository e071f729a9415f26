"""Wires the dispatcher's parts from the settings."""

import asyncio
from collections.abc import Callable

from redis.asyncio import Redis

from fairlane.clock import ClockMs
from fairlane.codec import Codec
from fairlane.names import dispatcher_group
from fairlane.ownership import Ownership
from fairlane.settings import Settings
from fairlane_server.costs.price_book import PriceBook
from fairlane_server.kafka.transactions import TransactionLoop
from fairlane_server.redis.availability import RedisAvailability
from stream_processors.dispatcher.admission.quota_charges import QuotaCharges
from stream_processors.dispatcher.admission.quotas import LocalQuotas, Quotas
from stream_processors.dispatcher.admission.redis_quotas import RedisQuotas
from stream_processors.dispatcher.admission.rules import AdmissionPolicy
from stream_processors.dispatcher.admission.stage import AdmissionInbox, AdmissionStage
from stream_processors.dispatcher.budgets.gate import BudgetGate
from stream_processors.dispatcher.cancellation import CancellationService
from stream_processors.dispatcher.deduplication.accepted_ids import AcceptedIds, NoAcceptedIds, RedisAcceptedIds
from stream_processors.dispatcher.deduplication.stage import DeduplicationStage, ReplyArchive
from stream_processors.dispatcher.dispatcher import Dispatcher
from stream_processors.dispatcher.enrichment.concurrency_limiter import FairConcurrencyLimiter
from stream_processors.dispatcher.enrichment.history import HistoryReader
from stream_processors.dispatcher.enrichment.retriever import Retriever
from stream_processors.dispatcher.enrichment.stage import EnrichmentStage
from stream_processors.dispatcher.evaluation.stage import EvaluationStage
from stream_processors.dispatcher.feedback.scheduler_updates import SchedulerUpdates
from stream_processors.dispatcher.intake.buffer import IntakeBuffer
from stream_processors.dispatcher.intake.classifier import RecordClassifier
from stream_processors.dispatcher.intake.invalid_record_limiter import InvalidRecordLimiter
from stream_processors.dispatcher.intake.partition_limiter import PartitionLimiter
from stream_processors.dispatcher.intake.schema_waits import SchemaWaitQueue
from stream_processors.dispatcher.intake.stage import IntakeStage
from stream_processors.dispatcher.intake.validation import RequestLimits
from stream_processors.dispatcher.output.decision_records import DecisionWriter
from stream_processors.dispatcher.output.stage import OutputStage
from stream_processors.dispatcher.output.tenant_counters import TenantCounters
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.registry import Registry
from stream_processors.dispatcher.response_cache.lookup import CacheLookup
from stream_processors.dispatcher.response_cache.stage import ResponseCacheStage
from stream_processors.dispatcher.scheduling.capacity import CapacityBoard
from stream_processors.dispatcher.scheduling.in_flight import InFlight
from stream_processors.dispatcher.scheduling.scheduler import Scheduler, SchedulerPolicy
from stream_processors.dispatcher.scheduling.window import Fleet


def assemble(
    settings: Settings,
    codec: Codec,
    ownership: Ownership,
    transactions: TransactionLoop,
    archive: ReplyArchive,
    redis: "tuple[Redis, RedisAvailability] | None",
    retriever: Retriever,
    histories: HistoryReader,
    cache_lookup: CacheLookup,
    prices: Callable[[], PriceBook],
    clock: ClockMs,
) -> Dispatcher:
    """Build everything between the request stream and the transaction loop. ``redis`` stores quotas and accepted ids;
    ``prices`` returns the present prices."""
    admission_policy = AdmissionPolicy(
        safety_margin=settings.admission_safety_margin,
        max_waiting_requests=settings.max_queue_size,
        max_waiting_bytes=settings.max_queue_bytes,
    )
    policy = SchedulerPolicy(settings.fairness_policy, admission_policy, settings.target_queue_ms)
    instance_id = settings.instance_id
    scheduler: Scheduler[QueuedRequest] = Scheduler(policy, CapacityBoard(), InFlight(instance_id), Fleet(instance_id))
    writer = DecisionWriter(codec, instance_id, dispatcher_group(settings.group_prefix), prices)
    registry = Registry(latency_targets=settings.latency_targets)
    counts, wake, deliverable = TenantCounters(), asyncio.Event(), asyncio.Event()
    inbox = AdmissionInbox(wake)
    quotas: Quotas = LocalQuotas(clock, scheduler.part)
    accepted_ids: AcceptedIds = NoAcceptedIds()
    if redis is not None:
        client, watch = redis
        quotas = RedisQuotas(client, quotas, watch)
        accepted_ids = RedisAcceptedIds(client, settings.dedupe_ttl_s, watch, settings.dedupe_max_ids)
    charges = QuotaCharges(quotas, registry)
    budgets = BudgetGate(scheduler, prices)
    output = OutputStage(transactions, writer, counts, scheduler, charges, budgets, accepted_ids, clock)
    limits = RequestLimits(
        settings.max_input_bytes, settings.max_input_items, settings.max_timeout_ms, settings.max_output_tokens
    )
    classifier = RecordClassifier(codec, writer, limits, registry, counts, clock)
    invalid_records = InvalidRecordLimiter(settings.max_invalid_records_per_s)
    feedback = PartitionLimiter(settings.max_feedback_per_s)
    buffer, schemas = IntakeBuffer(transactions), SchemaWaitQueue(codec)
    intake = IntakeStage(ownership, transactions, classifier, buffer, invalid_records, feedback, schemas, clock, wake)
    response_cache = ResponseCacheStage(cache_lookup, inbox, registry, output, deliverable)
    deduplication = DeduplicationStage(ownership, archive, inbox, scheduler, response_cache, output)
    # One tenant's slow searches leave permits for the others.
    most = settings.retrieval_max_concurrency
    limiter = FairConcurrencyLimiter(most, per_tenant=(most + 1) // 2)
    budget_s = settings.retrieval_budget_ms / 1_000
    enrichment = EnrichmentStage(retriever, histories, limiter, budget_s, scheduler.in_flight, deliverable)
    admission = AdmissionStage(ownership, classifier, registry, scheduler, enrichment, output)
    evaluation = EvaluationStage(ownership, classifier, registry, scheduler, admission.ladder, output)
    return Dispatcher(
        ownership=ownership,
        registry=registry,
        intake=intake,
        deduplication=deduplication,
        response_cache=response_cache,
        inbox=inbox,
        admission=admission,
        scheduler=scheduler,
        enrichment=enrichment,
        output=output,
        evaluation=evaluation,
        cancellation=CancellationService(
            ownership, classifier, deduplication, response_cache, inbox, scheduler, enrichment, output
        ),
        updates=SchedulerUpdates(scheduler, registry.costs, counts, response_cache, budgets, evaluation, clock),
        clock=clock,
        wake=wake,
        deliverable=deliverable,
    )

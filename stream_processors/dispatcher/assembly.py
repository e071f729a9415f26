"""Wires the dispatcher's parts from the settings."""

import asyncio
from dataclasses import dataclass

from redis.asyncio import Redis

from fairlane.clock import ClockMs
from fairlane.codec import Codec
from fairlane.names import dispatcher_group
from fairlane.ownership import Ownership
from fairlane.settings import Settings
from fairlane_server.kafka.transactions import TransactionLoop
from fairlane_server.redis.availability import RedisAvailability
from stream_processors.dispatcher.admission.degradation import Ladder
from stream_processors.dispatcher.admission.inbox import AdmissionInbox
from stream_processors.dispatcher.admission.local_quotas import LocalQuotas, Quotas
from stream_processors.dispatcher.admission.quota_charges import QuotaCharges
from stream_processors.dispatcher.admission.redis_quotas import RedisQuotas
from stream_processors.dispatcher.admission.rules import AdmissionPolicy
from stream_processors.dispatcher.admission.stage import AdmissionStage
from stream_processors.dispatcher.cancellation import CancellationService
from stream_processors.dispatcher.deduplication.accepted_ids import (
    AcceptedIds,
    NoAcceptedIds,
    RedisAcceptedIds,
)
from stream_processors.dispatcher.deduplication.recent_results import RecentResults
from stream_processors.dispatcher.deduplication.stage import DeduplicationStage, ReplyArchive
from stream_processors.dispatcher.dispatcher import Dispatcher
from stream_processors.dispatcher.enrichment.concurrency_limiter import FairConcurrencyLimiter
from stream_processors.dispatcher.enrichment.history import HistoryReader
from stream_processors.dispatcher.enrichment.retriever import Retriever
from stream_processors.dispatcher.enrichment.stage import EnrichmentStage
from stream_processors.dispatcher.feedback.scheduler_updates import SchedulerUpdates
from stream_processors.dispatcher.intake.buffer import IntakeBuffer
from stream_processors.dispatcher.intake.classifier import RecordClassifier
from stream_processors.dispatcher.intake.invalid_record_limiter import InvalidRecordLimiter
from stream_processors.dispatcher.intake.schema_waits import SchemaWaitQueue
from stream_processors.dispatcher.intake.stage import IntakeStage
from stream_processors.dispatcher.intake.validation import RequestLimits
from stream_processors.dispatcher.output.admission_audits import AdmissionAudits
from stream_processors.dispatcher.output.decision_records import DecisionWriter
from stream_processors.dispatcher.output.rejected_and_expired import RejectedAndExpired
from stream_processors.dispatcher.output.tenant_counters import TenantCounters
from stream_processors.dispatcher.output.tenant_stats import TenantStats
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.registry import PoolReassignment, Registry
from stream_processors.dispatcher.response_cache.cached_reply import CachedReplyWriter
from stream_processors.dispatcher.response_cache.lookup import CacheLookup
from stream_processors.dispatcher.response_cache.stage import ResponseCacheStage
from stream_processors.dispatcher.scheduling.capacity import CapacityBoard
from stream_processors.dispatcher.scheduling.cost import CostModel
from stream_processors.dispatcher.scheduling.in_flight import InFlight
from stream_processors.dispatcher.scheduling.scheduler import Scheduler, SchedulerPolicy
from stream_processors.dispatcher.scheduling.window import Fleet


@dataclass(frozen=True, slots=True)
class DispatcherParts:
    """The parts used by the composition root."""

    dispatcher: Dispatcher
    scheduler: Scheduler[QueuedRequest]
    updates: SchedulerUpdates
    counts: TenantCounters
    stats: TenantStats
    writer: DecisionWriter
    redis_watch: RedisAvailability | None


def assemble(
    settings: Settings,
    codec: Codec,
    ownership: Ownership,
    transactions: TransactionLoop,
    archive: ReplyArchive,
    redis: "Redis | None",
    retriever: Retriever,
    histories: HistoryReader,
    answer_lookup: CacheLookup,
    clock: ClockMs,
) -> DispatcherParts:
    """Build everything between the request stream and the transaction loop."""
    policy = SchedulerPolicy(
        fairness=settings.fairness_policy,
        admission=AdmissionPolicy(
            safety_margin=settings.admission_safety_margin,
            max_waiting_requests=settings.max_queue_size,
            max_waiting_bytes=settings.max_queue_bytes,
        ),
        target_queue_ms=settings.target_queue_ms,
    )
    instance_id = settings.instance_id
    scheduler: Scheduler[QueuedRequest] = Scheduler(policy, CapacityBoard(), InFlight(instance_id), Fleet(instance_id))
    writer = DecisionWriter(codec, instance_id, dispatcher_group(settings.group_prefix))
    costs, counts, stats = CostModel(), TenantCounters(), TenantStats()
    limits = RequestLimits(
        settings.max_input_bytes, settings.max_input_items, settings.max_timeout_ms, settings.max_output_tokens
    )
    registry, wake, deliverable = Registry(), asyncio.Event(), asyncio.Event()
    reassignment = PoolReassignment(registry, costs)
    classifier = RecordClassifier(codec, writer, limits, costs, registry, counts, clock)
    local_quotas = LocalQuotas(clock, scheduler.part)
    quotas: Quotas = local_quotas
    accepted_ids: AcceptedIds = NoAcceptedIds()
    redis_watch = None if redis is None else RedisAvailability(redis)
    if redis is not None and redis_watch is not None:
        quotas = RedisQuotas(redis, local_quotas, redis_watch)
        accepted_ids = RedisAcceptedIds(redis, settings.dedupe_ttl_s, redis_watch, settings.dedupe_max_ids)
    charges = QuotaCharges(quotas, registry)
    audits = AdmissionAudits(transactions, writer)
    rejections = RejectedAndExpired(transactions, charges, scheduler, writer, counts, stats, accepted_ids)
    inbox, recent_results = AdmissionInbox(wake), RecentResults()
    intake = IntakeStage(
        ownership,
        transactions,
        classifier,
        IntakeBuffer(transactions),
        InvalidRecordLimiter(settings.max_invalid_records_per_s),
        SchemaWaitQueue(codec),
        clock,
        wake,
    )
    response_cache = ResponseCacheStage(
        answer_lookup,
        inbox,
        transactions,
        reassignment,
        CachedReplyWriter(codec, instance_id),
        counts,
        recent_results,
        clock,
        deliverable,
    )
    deduplication = DeduplicationStage(
        ownership,
        transactions,
        accepted_ids,
        inbox,
        writer,
        counts,
        archive,
        clock,
        scheduler,
        response_cache,
        recent_results,
    )
    # One tenant's slow searches leave permits for the others.
    most = settings.retrieval_max_concurrency
    limiter = FairConcurrencyLimiter(most, per_tenant=(most + 1) // 2)
    budget_s = settings.retrieval_budget_ms / 1_000
    enrichment = EnrichmentStage(retriever, histories, limiter, budget_s, scheduler.in_flight, deliverable)
    dispatcher = Dispatcher(
        ownership=ownership,
        transactions=transactions,
        registry=registry,
        reassignment=reassignment,
        intake=intake,
        deduplication=deduplication,
        response_cache=response_cache,
        inbox=inbox,
        admission=AdmissionStage(
            ownership,
            transactions,
            registry,
            reassignment,
            classifier,
            charges,
            scheduler,
            Ladder(),
            costs,
            enrichment,
            accepted_ids,
            rejections,
            audits,
            writer,
            counts,
            stats,
            clock,
        ),
        charges=charges,
        scheduler=scheduler,
        enrichment=enrichment,
        context_tokens=classifier.context,
        rejections=rejections,
        audits=audits,
        cancellation=CancellationService(
            ownership,
            transactions,
            classifier,
            scheduler,
            deduplication,
            response_cache,
            inbox,
            enrichment,
            rejections,
            audits,
            writer,
            counts,
            clock,
        ),
        writer=writer,
        counts=counts,
        stats=stats,
        clock=clock,
        wake=wake,
        deliverable=deliverable,
    )
    updates = SchedulerUpdates(scheduler, costs, counts, stats, clock, recent_results, response_cache.settled)
    return DispatcherParts(dispatcher, scheduler, updates, counts, stats, writer, redis_watch)

"""Classify an arrived record: new request, requeued work, copy, cancel, feedback, rejection or dead letter.

Pure except for metrics and logs: one record in; a queued request, a cancel, feedback or output records out.
"""

from dataclasses import dataclass, field, replace
from traceback import extract_tb

from fairlane import metrics
from fairlane.clock import ClockMs
from fairlane.codec import Codec, DecodeError, DecodeProblem, SchemaNotLoadedError
from fairlane.logs import get_logger
from fairlane.names import (
    DEAD_LETTER_REQUESTS,
    EVALUATION_REPLIES,
    EVALUATION_TENANT,
    EVALUATION_WORK,
    is_backfill,
    is_request_id,
    is_returned,
    may_carry_replies_of,
    returned_topic,
    tenant_of_request_topic,
)
from fairlane.outcomes import Code, Decision, Priority
from fairlane.ownership import Claim, PartitionId
from fairlane.records import CancelRequest, Feedback, InferenceRequest, RequestInput, WorkItem
from fairlane.trace_context import trace_headers
from fairlane_server.kafka.transactions import OutputRecord
from stream_processors.dispatcher.intake.validation import (
    Rejection,
    RequestLimits,
    cache_mode,
    validate,
    validate_cancel,
    validate_feedback,
    validate_headers,
    within_tenant_bound,
)
from stream_processors.dispatcher.output.decision_records import DecisionWriter
from stream_processors.dispatcher.output.tenant_counters import TenantCounters
from stream_processors.dispatcher.queued_request import CancelCommand, QueuedRequest, ReceivedRecord
from stream_processors.dispatcher.registry import Registry
from stream_processors.dispatcher.scheduling.cost import ContextTokens

log = get_logger(__name__)

UNKNOWN_TENANT = ""
"""Tenant of an unreadable or invalid record on a requeue topic; no tenant has this name."""

Verdict = QueuedRequest | CancelCommand | Feedback | tuple[OutputRecord, ...]
"""The request to admit, the cancel to carry out, the feedback to pass on, or the outputs that answer the record."""

_PRIORITIES = frozenset(Priority)


@dataclass(slots=True)
class RecordClassifier:
    """Decodes and validates records against the present tenants and models."""

    codec: Codec
    writer: DecisionWriter
    limits: RequestLimits
    registry: Registry
    counts: TenantCounters
    clock: ClockMs
    context: ContextTokens = field(default_factory=ContextTokens)
    """Estimates the tokens that enrichment will add to a request."""

    def classify(self, claim: Claim, arrival: ReceivedRecord, unknown_because: str | None = None) -> Verdict:
        """Decode and validate one record. Returns the request to admit, the cancel, the feedback, or the outputs that
        answer it.

        Args:
            claim: of the record.
            arrival: the record.
            unknown_because: with this reason, a record with an unknown schema becomes a dead letter.

        Raises:
            SchemaNotLoadedError: the schema must be fetched first, and ``unknown_because`` is None. Any other failure
                becomes a dead letter.
        """
        try:
            try:
                return self._read(claim, arrival)
            except DecodeError as error:
                return self._unreadable(arrival, error)
            except SchemaNotLoadedError as error:
                if unknown_because is None:
                    raise
                problem = DecodeProblem.UNKNOWN_SCHEMA_ID
                return self._unreadable(arrival, DecodeError(problem, f"{error}: {unknown_because}"))
        except SchemaNotLoadedError:
            raise
        except Exception as error:  # noqa: BLE001 - what our own code fails on is dead-lettered; intake goes on
            return self.broken(arrival, error)

    def _read(self, claim: Claim, arrival: ReceivedRecord) -> Verdict:
        """Raises DecodeError and SchemaNotLoadedError."""
        if arrival.problem is not None:
            raise arrival.problem
        if is_returned(arrival.partition.topic) or arrival.partition.topic == EVALUATION_WORK:
            return self._admitted_before(claim, arrival)
        tenant = _tenant_of(arrival)
        record = self.codec.decode_any((InferenceRequest, CancelRequest, Feedback), arrival.value, may_ask=False)
        if isinstance(record, InferenceRequest):
            return self._request(record, claim, arrival, tenant)
        if isinstance(record, CancelRequest):
            return self._cancel(record, claim, arrival, tenant)
        return self._feedback(record, arrival, tenant)

    def _unreadable(self, arrival: ReceivedRecord, error: DecodeError) -> tuple[OutputRecord, ...]:
        """A dead letter; for an oversized request whose id can be decoded, a rejection instead. Of a copy no dead
        letter is made: it would be the request of a tenant in one more place."""
        if arrival.partition.topic == EVALUATION_WORK:
            log.error("copy_unreadable", offset=arrival.offset, problem=error.problem)
            metrics.COPIES_UNREADABLE.labels(problem=error.problem).inc()
            return ()
        tenant = _tenant_of(arrival)
        request_id = error.leading.get("request_id", "")
        if error.record_type is InferenceRequest and is_request_id(request_id):
            self.counts.read(tenant)
            # reply_to comes after the undecoded field, so the reply goes to the tenant's own topic.
            request = InferenceRequest(
                request_id, error.leading.get("model", ""), error.leading.get("task", ""), RequestInput()
            )
            refusal = Rejection(Code.INVALID, error.field or "request", error.reason)
            return self._refused(request, arrival, tenant, refusal, self.clock())
        self.counts.decided(tenant, Decision.DEAD_LETTERED, error.problem)
        metrics.DEAD_LETTERS.labels(topic=DEAD_LETTER_REQUESTS, problem=error.problem).inc()
        return self.writer.dead_letter(arrival, tenant, error, self.clock())

    def _cancel(
        self, record: CancelRequest, claim: Claim, arrival: ReceivedRecord, tenant: str
    ) -> CancelCommand | tuple[OutputRecord, ...]:
        refusal = validate_headers(arrival.headers) or validate_cancel(record, tenant)
        if refusal is None:
            return CancelCommand(claim, tenant, record.request_id, arrival.timestamp_ms)
        self.counts.decided(tenant, Decision.CANCEL_REFUSED, refusal.code)
        return self.writer.cancel_refused(record, arrival, tenant, refusal, self.clock())

    def _feedback(self, record: Feedback, arrival: ReceivedRecord, tenant: str) -> Feedback | tuple[OutputRecord, ...]:
        refusal = validate_headers(arrival.headers) or validate_feedback(record, tenant)
        if refusal is None:
            return replace(record, tenant=tenant, given_at_ms=arrival.timestamp_ms)
        self.counts.decided(tenant, Decision.FEEDBACK_REFUSED, refusal.code)
        return self.writer.feedback_refused(record, arrival, tenant, refusal, self.clock())

    def _request(
        self, request: InferenceRequest, claim: Claim, arrival: ReceivedRecord, tenant: str
    ) -> QueuedRequest | tuple[OutputRecord, ...]:
        now_ms = self.clock()
        self.counts.read(tenant)
        spec = self.registry.tenants.get(tenant)
        backfill = is_backfill(arrival.partition.topic)
        verdict = validate_headers(arrival.headers) or validate(
            *(request, tenant, spec, self.registry.models, self.limits),
            now_ms=now_ms,
            backfill=backfill,
            served=self.registry.served,
        )
        if isinstance(verdict, Rejection):
            return self._refused(request, arrival, tenant, verdict, now_ms)
        pool = self.registry.pool_for(verdict.model, tenant)
        if isinstance(pool, Rejection):
            return self._refused(request, arrival, tenant, pool, now_ms)
        body = self.codec.body_if_current(InferenceRequest, arrival.value or b"")
        encoded = None if body is None else (request, body)
        if request.model != verdict.model.model:
            # It named a version or an alias; from here on the version is beside the request.
            request = replace(request, model=verdict.model.model)
        request = within_tenant_bound(request, verdict.model, spec)
        cost = self.registry.costs.estimate(tenant, verdict.model, verdict.input_bytes, request.parameters.max_tokens)
        expected_tokens = self.context.expected(tenant, request)
        return QueuedRequest(
            claim=claim,
            source=arrival.coordinate,
            tenant=tenant,
            request=request,
            model=verdict.model,
            arm=verdict.arm,
            pool=pool,
            reply_topic=verdict.reply_topic,
            cost_tokens=cost.total + expected_tokens,
            prompt_tokens=cost.prompt_tokens + expected_tokens,
            expected_tokens=expected_tokens,
            input_bytes=verdict.input_bytes,
            size_bytes=arrival.content_bytes,
            submitted_at_ms=arrival.timestamp_ms,
            admitted_at_ms=now_ms,
            deadline_at_ms=arrival.timestamp_ms + verdict.timeout_ms,
            latency_target_ms=self.registry.latency_target_ms(tenant, request.priority, verdict.timeout_ms),
            cautious_cost_tokens=cost.cautious_total + expected_tokens,
            is_backfill=backfill,
            quota_tokens=cost.total + expected_tokens,
            trace_headers=trace_headers(arrival.headers),
            max_prompt_tokens=None if spec is None else spec.max_prompt_tokens,
            encoded=encoded,
            cache=cache_mode(request, spec),
            guardrails=self.registry.guardrails(tenant),
        )

    def _refused(
        self, request: InferenceRequest, arrival: ReceivedRecord, tenant: str, refusal: Rejection, now_ms: int
    ) -> tuple[OutputRecord, ...]:
        self.counts.decided(tenant, Decision.REFUSED, refusal.code)
        return self.writer.refused(request, arrival, tenant, self.registry.tenants.get(tenant), refusal, now_ms)

    def _admitted_before(self, claim: Claim, arrival: ReceivedRecord) -> QueuedRequest | tuple[OutputRecord, ...]:
        """Work requeued by a consumer that could not take it, or a copy for evaluation. Raises DecodeError for an item
        no dispatcher can have sent: only services may write to these topics, yet every checkable field is checked."""
        item = self.codec.decode_any((WorkItem,), arrival.value, may_ask=False)
        fault = _fault_of(item, arrival.partition.topic)
        if fault is not None:
            raise DecodeError(DecodeProblem.INVALID_BODY, f"WorkItem.{fault}")
        self.counts.read(item.tenant)
        now_ms = self.clock()
        mark = item.evaluation
        owner = item.tenant if mark is None else mark.tenant
        found = self.registry.serving(
            item.model_version, item.arm, item.request, owner, now_ms, is_copy=mark is not None
        )
        if isinstance(found, Rejection):
            self.counts.decided(item.tenant, Decision.REFUSED, found.code)
            if mark is not None:
                return self.writer.copy_refused(item, found, now_ms)
            # It was admitted, so it gets a reply, with its original source coordinate.
            first = PartitionId(item.source.topic, item.source.partition)
            original = replace(arrival, partition=first, offset=item.source.offset, timestamp_ms=item.submitted_at_ms)
            spec = self.registry.tenants.get(item.tenant)
            return self.writer.refused(item.request, original, item.tenant, spec, found, now_ms)
        # Not necessarily the pool that requeued it: tenants or models may have been reassigned since.
        choice, pool = found
        return QueuedRequest(
            claim=claim,
            source=item.source,
            tenant=item.tenant,
            request=item.request,
            model=choice.model,
            arm=choice.arm,
            pool=pool,
            reply_topic=item.reply_topic,
            cost_tokens=item.cost_tokens,
            prompt_tokens=item.prompt_tokens,
            input_bytes=0,
            size_bytes=arrival.content_bytes,
            submitted_at_ms=item.submitted_at_ms,
            admitted_at_ms=item.admitted_at_ms,
            deadline_at_ms=item.deadline_at_ms,
            latency_target_ms=item.deadline_at_ms - item.submitted_at_ms,
            cautious_cost_tokens=item.cost_tokens,
            is_backfill=is_backfill(item.source.topic),
            degradations=item.degradations,
            passages=item.passages,
            retrieval_use=item.retrieval_use,
            history=item.history,
            history_use=item.history_use,
            handed_back=item.handed_back,
            unserved=item.unserved,
            budget=item.budget,
            trace_headers=trace_headers(arrival.headers),
            max_prompt_tokens=self.registry.tenants[owner].max_prompt_tokens,
            # A consumer of an older version drops the policy of what it hands back.
            guardrails=item.guardrails or self.registry.guardrails(item.tenant),
            evaluation=mark,
        )

    def broken(self, arrival: ReceivedRecord, error: Exception) -> tuple[OutputRecord, ...]:
        """The dead letter of a record on which our own code failed; none of a copy."""
        is_copy = arrival.partition.topic == EVALUATION_WORK
        if is_copy:
            metrics.COPIES_UNREADABLE.labels(problem="intake_failed").inc()
        else:
            metrics.DEAD_LETTERS.labels(topic=DEAD_LETTER_REQUESTS, problem="intake_failed").inc()
        # Log only type and line: the text of an unexpected exception may quote the record.
        *_, frame = extract_tb(error.__traceback__)
        log.error(
            "intake_failed",
            topic=arrival.partition.topic,
            offset=arrival.offset,
            error=type(error).__name__,
            raised_at=f"{frame.filename}:{frame.lineno}",
        )
        if is_copy:
            return ()
        problem = DecodeError(DecodeProblem.INTAKE_FAILED, type(error).__name__)
        return self.writer.dead_letter(arrival, _tenant_of(arrival), problem, self.clock())


def _tenant_of(arrival: ReceivedRecord) -> str:
    """The tenant of the topic; UNKNOWN_TENANT for requeue topics, EVALUATION_TENANT for copies."""
    topic = arrival.partition.topic
    if topic == EVALUATION_WORK:
        return EVALUATION_TENANT
    return UNKNOWN_TENANT if is_returned(topic) else tenant_of_request_topic(topic)


def _fault_of(item: WorkItem, topic: str) -> str | None:
    """The first field of requeued work, or of a copy, that contradicts its topic, source or itself, and how; None if
    consistent."""
    source, request = item.source, item.request
    try:
        tenant = tenant_of_request_topic(source.topic)
    except ValueError:
        return "source: no tenant's request topic"
    if source.partition < 0 or source.offset < 0:
        return "source: no place in a log"
    if request.tenant is not None and request.tenant != tenant:
        return "request.tenant: not that of its source"
    fault = _fault_of_request(item, topic, tenant) if item.evaluation is None else _fault_of_copy(item, topic, tenant)
    if fault is not None:
        return fault
    if request.priority not in _PRIORITIES or item.priority_class != request.priority:
        return "priority_class: not a class, or not that of its request"
    if not 0 <= item.prompt_tokens <= item.cost_tokens:
        return "cost_tokens: negative, or less than those of its prompt"
    if not 0 <= item.unserved <= item.handed_back:
        return "unserved: negative, or more than handed_back"
    return None


def _fault_of_request(item: WorkItem, topic: str, tenant: str) -> str | None:
    if item.tenant != tenant:
        return "tenant: not that of its source"
    if topic == EVALUATION_WORK:
        return "evaluation: missing"
    if returned_topic(item.pool) != topic:
        return "pool: not that of its topic"
    if not may_carry_replies_of(item.reply_topic, tenant):
        return "reply_topic: not its tenant's"
    return "handed_back: less than 1" if item.handed_back < 1 else None


def _fault_of_copy(item: WorkItem, topic: str, tenant: str) -> str | None:
    mark, is_new = item.evaluation, topic == EVALUATION_WORK
    if mark is None or mark.tenant != tenant:
        return "evaluation.tenant: not that of its source"
    if item.tenant != EVALUATION_TENANT:
        return f"tenant: of a copy it must be {EVALUATION_TENANT}"
    if item.reply_topic != EVALUATION_REPLIES:
        return f"reply_topic: of a copy it must be {EVALUATION_REPLIES}"
    if is_new:
        return "handed_back: not 0" if item.handed_back else None
    if returned_topic(item.pool) != topic:
        return "pool: not that of its topic"
    return "handed_back: less than 1" if item.handed_back < 1 else None

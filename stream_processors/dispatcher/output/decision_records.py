"""Output records of decisions: work items, replies, audit events, dead letters. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fairlane import headers, names
from fairlane.codec import Codec, DecodeError
from fairlane.dead_letters import DeadLetterError, LetterWriter, dead_letter_headers, letter_content
from fairlane.outcomes import CacheMode, Code, Decision, Outcome
from fairlane.records import (
    AuditEvent,
    Cancellation,
    CancelRequest,
    Cost,
    Feedback,
    InferenceReply,
    InferenceRequest,
    SourceCoordinate,
    TenantSpec,
    Timings,
    UsageEvent,
    WorkItem,
)
from fairlane.trace_context import TraceHeaders, trace_headers
from fairlane_server.costs.price_book import NO_PRICES, PriceBook, Used
from fairlane_server.evaluation.copies import copy_of
from fairlane_server.kafka.settlement import reply_record
from fairlane_server.kafka.transactions import OutputRecord, Settlement
from fairlane_server.models.routes import model_of
from stream_processors.dispatcher.evaluation.sampling import Sampled
from stream_processors.dispatcher.intake.validation import (
    MAX_ID_CHARS,
    Rejection,
    name_or_none,
    reply_topic_for_refusal,
)
from stream_processors.dispatcher.queued_request import CancelCommand, QueuedRequest, ReceivedRecord
from stream_processors.dispatcher.response_cache.lookup import CacheHit
from stream_processors.dispatcher.scheduling.in_flight import ANY_PARTITION
from stream_processors.dispatcher.scheduling.scheduler import Turn

Inputs = Mapping[str, object]
"""Inputs of a decision by name, for its audit event; units are in the names."""


_TOO_LARGE = frozenset({"MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE"})
"""Permanent errors: neither producer nor broker ever accepts such a record."""


_OUTCOMES = {
    Decision.EXPIRED: Outcome.EXPIRED,
    Decision.REFUSED: Outcome.REJECTED,
    Decision.CANCELLED: Outcome.CANCELLED,
}


class UnpublishableError(DeadLetterError):
    """A reply that its topic refuses for good."""


@dataclass(frozen=True, slots=True)
class DecisionWriter:
    """Turns decisions into records. ``dispatcher_id`` identifies the writer in all of them, dead letters also carry the
    consumer ``group``. ``prices`` returns the present prices; what they do not know costs None."""

    codec: Codec
    dispatcher_id: str
    group: str | None = None
    prices: Callable[[], PriceBook] = lambda: NO_PRICES

    def accepted(self, queued: QueuedRequest, inputs: Inputs, now_ms: int) -> OutputRecord:
        """The audit event of an admission."""
        return self._decision(queued, Decision.ACCEPTED, now_ms, inputs=inputs)

    def degraded(self, queued: QueuedRequest, steps: Sequence[str], inputs: Inputs, now_ms: int) -> OutputRecord:
        """The audit event of a degradation."""
        return self._decision(queued, Decision.DEGRADED, now_ms, inputs={"steps": " ".join(steps), **inputs})

    def dispatched(
        self,
        turn: Turn[QueuedRequest],
        now_ms: int,
        accepted: Inputs | None = None,
        reserved_nanos: int | None = None,
        sampled: Sampled | None = None,
    ) -> tuple[OutputRecord, ...]:
        """The work item for the pool and its audit event; a copy of it besides, if a shadow sampled the request and
        its bounds allow one. ``accepted`` adds the inputs of the admission: a request dispatched at once has one event
        instead of two. ``reserved_nanos`` of its tenant's budgets, if it has any."""
        queued, request = turn.item, turn.item.request
        topic, partition, offset = *queued.claim.partition, queued.claim.offset
        item = WorkItem(
            request=request,
            tenant=queued.tenant,
            pool=queued.pool,
            model_version=queued.model.version,
            priority_class=request.priority,
            cost_tokens=queued.cost_tokens,
            submitted_at_ms=queued.submitted_at_ms,
            admitted_at_ms=queued.admitted_at_ms,
            dispatched_at_ms=now_ms,
            deadline_at_ms=queued.deadline_at_ms,
            reply_topic=queued.reply_topic,
            dispatcher_id=self.dispatcher_id,
            source=queued.source,
            degradations=queued.degradations,
            passages=queued.passages,
            retrieval_use=queued.retrieval_use,
            history=queued.history,
            history_use=queued.history_use,
            cache_answer=queued.cache != CacheMode.NONE,
            prompt_tokens=queued.prompt_tokens,
            handed_back=queued.handed_back,
            max_prompt_tokens=queued.max_prompt_tokens,
            guardrails=queued.guardrails,
            budget=queued.budget,
            arm=queued.arm,
            unserved=queued.unserved,
            evaluation=queued.evaluation,
        )
        work = OutputRecord(
            names.priority_topic(queued.pool, request.priority),
            request.request_id.encode(),
            self._encoded(item, queued),
            (
                (headers.COST_TOKENS, b"%d" % queued.cost_tokens),
                (headers.TENANT, queued.tenant.encode()),
                (headers.DISPATCHER_ID, self.dispatcher_id.encode()),
                (headers.SOURCE_TOPIC, topic.encode()),
                (headers.SOURCE_PARTITION, b"%d" % partition),
                (headers.SOURCE_OFFSET, b"%d" % offset),
                *(() if reserved_nanos is None else _budget_headers(queued, reserved_nanos)),
                *queued.trace_headers,
            ),
            None if turn.partition == ANY_PARTITION else turn.partition,
        )
        inputs = {
            **(accepted or {}),
            "waited_ms": now_ms - queued.submitted_at_ms,
            "pool": queued.pool,
            "partition": turn.partition,
            "in_flight_tokens": turn.view.in_flight_tokens,
            "window_tokens": round(turn.view.window_tokens),
            "in_flight_items": turn.view.in_flight_items,
            "window_items": round(turn.view.window_items),
            "share": round(turn.view.share, 3),
            **_retrieval_inputs(queued),
            **_history_inputs(queued),
            **({} if reserved_nanos is None else {"reserved_nanos": reserved_nanos}),
            **({} if sampled is None else {"shadow_run": sampled.shadow.run, "shadow": sampled.result}),
        }
        dispatched = work, self._decision(queued, Decision.DISPATCHED, now_ms, inputs=inputs)
        if sampled is None or sampled.skipped is not None:
            return dispatched
        return *dispatched, self._copy(item, sampled, now_ms)

    def _copy(self, item: WorkItem, sampled: Sampled, now_ms: int) -> OutputRecord:
        """The copy of a dispatched work item. A topic that refuses it does not hold up the work."""
        shadow = sampled.shadow
        copy = copy_of(item, sampled.mark, shadow.candidate, now_ms, shadow.max_age_ms)
        key = copy.request.request_id.encode()
        return OutputRecord(names.EVALUATION_WORK, key, self.codec.encode(copy), is_optional=True)

    def _encoded(self, item: WorkItem, queued: QueuedRequest) -> bytes:
        if queued.encoded is not None and queued.encoded[0] is item.request:
            return self.codec.encode_around(item, queued.encoded[1])
        return self.codec.encode(item)

    def late(self, queued: QueuedRequest, retry_after_ms: int | None, now_ms: int) -> tuple[OutputRecord, ...]:
        """The reply and audit event of a request whose deadline passed while it waited, or can no longer be met."""
        waited_ms, code = now_ms - queued.submitted_at_ms, Code.DEADLINE_UNMEETABLE
        inputs = {"waited_ms": waited_ms, "deadline_at_ms": queued.deadline_at_ms, "cost_tokens": queued.cost_tokens}
        if now_ms > queued.deadline_at_ms:
            message = f"the deadline passed after {waited_ms} ms of waiting"
            return self._final(queued, Decision.EXPIRED, None, message, inputs, now_ms)
        message = f"after {waited_ms} ms of waiting the deadline can no longer be met"
        return self._final(queued, Decision.REFUSED, code, message, inputs, now_ms, retry_after_ms=retry_after_ms)

    def shed(
        self, queued: QueuedRequest, code: Code, message: str, retry_after_ms: int | None, inputs: Inputs, now_ms: int
    ) -> tuple[OutputRecord, ...]:
        """The reply and audit event of a valid request that is not admitted now."""
        inputs = {**inputs, "retry_after_ms": retry_after_ms}
        return self._final(
            queued, Decision.REFUSED, code, message, inputs, now_ms, retry_after_ms=retry_after_ms, was_admitted=False
        )

    def not_served(self, queued: QueuedRequest, refusal: Rejection, now_ms: int) -> tuple[OutputRecord, ...]:
        """The reply and audit event of a valid request that no pool may or can serve any more."""
        inputs = {"field": refusal.field, "waited_ms": now_ms - queued.submitted_at_ms, "pool": queued.pool}
        code, message, field = refusal.code, refusal.message, refusal.field
        return self._final(
            *(queued, Decision.REFUSED, code, message, inputs, now_ms),
            field=field,
            retry_after_ms=refusal.retry_after_ms,
            was_admitted=False,
        )

    def cancelled(
        self,
        queued: QueuedRequest,
        cancel: CancelCommand,
        now_ms: int,
        accepted: Inputs | None = None,
        *,
        was_admitted: bool = True,
    ) -> tuple[OutputRecord, ...]:
        """The reply and audit event of a cancelled request. ``accepted`` adds the inputs of its admission."""
        waited_ms, place = now_ms - queued.submitted_at_ms, cancel.claim
        inputs = {
            **(accepted or {}),
            "waited_ms": waited_ms,
            "pool": queued.pool,
            "requested_at_ms": cancel.requested_at_ms,
            "cancel_at": f"{place.partition.topic}-{place.partition.partition}@{place.offset}",
        }
        message = f"cancelled by its tenant after {waited_ms} ms of waiting"
        return self._final(queued, Decision.CANCELLED, None, message, inputs, now_ms, was_admitted=was_admitted)

    def cost_of_cached(self, known: CacheHit, now_ms: int) -> Cost | None:
        """The price of an answer from the response cache."""
        answer = known.answer
        return self.prices().cost(answer.model, answer.model_version, now_ms, Outcome.OK, Used(), cached=True)

    def cached(
        self, queued: QueuedRequest, known: CacheHit, cost: Cost | None, now_ms: int
    ) -> tuple[OutputRecord, ...]:
        """The reply of a request answered from the response cache, its usage event, and the audit event."""
        request, answer, use = queued.request, known.answer, known.use
        reply = InferenceReply(
            request_id=request.request_id,
            tenant=queued.tenant,
            outcome=Outcome.OK,
            model=answer.model,
            model_version=answer.model_version,
            arm=queued.arm,
            task=answer.task,
            engine=answer.engine,
            output=answer.output,
            finish_reason=answer.finish_reason,
            usage=answer.usage,
            timings=Timings(submitted_at_ms=queued.submitted_at_ms),
            passages=answer.passages,
            source=queued.source,
            replay_of=request.replay_of,
            cache_use=use,
            cost=cost,
            guardrails=answer.guardrails,
            budget=queued.budget,
        )
        usage = UsageEvent(
            request_id=request.request_id,
            tenant=queued.tenant,
            pool=queued.pool,
            model=answer.model,
            model_version=answer.model_version,
            priority_class=queued.priority_class,
            outcome=Outcome.OK,
            code=None,
            prompt_tokens=answer.usage.prompt_tokens,
            completion_tokens=answer.usage.completion_tokens,
            cached_tokens=answer.usage.cached_tokens,
            cost_tokens=0,
            engine_ms=0,
            occurred_at_ms=now_ms,
            work=queued.source,
            cached=True,
            batch_size=0,
            cost=cost,
            requested_by=request.requested_by,
        )
        inputs = {
            "cache": use.mode,
            "similarity": f"{use.similarity:.4f}",
            "answer_of": use.request_id,
            "answered_at_ms": use.answered_at_ms,
            "waited_ms": now_ms - queued.submitted_at_ms,
            "submitted_at_ms": queued.submitted_at_ms,
        }
        return (
            self._reply(queued.reply_topic, reply, queued.trace_headers),
            OutputRecord(names.LEDGER_USAGE, queued.tenant.encode(), self.codec.encode(usage)),
            self._decision(queued, Decision.CACHED, now_ms, inputs=inputs),
        )

    def cancellation(self, cancel: CancelCommand) -> OutputRecord:
        """The cancellation record for the consumers."""
        told = Cancellation(cancel.request_id, cancel.tenant, self.dispatcher_id, cancel.requested_at_ms)
        return OutputRecord(names.CONTROL_CANCELLATIONS, cancel.request_id.encode(), self.codec.encode(told))

    def cancel_refused(
        self, cancel: CancelRequest, arrival: ReceivedRecord, tenant: str, refusal: Rejection, now_ms: int
    ) -> tuple[OutputRecord, ...]:
        """The audit event of an invalid cancel, without a reply: that would be a second reply to the request it names,
        or one without a reader."""
        said = replace(refusal, message=f"cancel: {refusal.message}")
        about = cancel.request_id[:MAX_ID_CHARS]
        return (self._refusal(about, None, arrival, tenant, said, now_ms, Decision.CANCEL_REFUSED),)

    def feedback(self, feedback: Feedback) -> OutputRecord:
        """Valid feedback for the recorder. It names its tenant."""
        return OutputRecord(names.LEDGER_FEEDBACK, (feedback.tenant or "").encode(), self.codec.encode(feedback))

    def feedback_refused(
        self, feedback: Feedback, arrival: ReceivedRecord, tenant: str, refusal: Rejection, now_ms: int
    ) -> tuple[OutputRecord, ...]:
        """The audit event of invalid feedback, without a reply, as for a cancel."""
        said = replace(refusal, message=f"feedback: {refusal.message}")
        about = feedback.request_id[:MAX_ID_CHARS]
        return (self._refusal(about, None, arrival, tenant, said, now_ms, Decision.FEEDBACK_REFUSED),)

    def refused(
        self,
        request: InferenceRequest,
        arrival: ReceivedRecord,
        tenant: str,
        spec: TenantSpec | None,
        refusal: Rejection,
        now_ms: int,
    ) -> tuple[OutputRecord, ...]:
        """The reply naming the invalid field and the reason, and its audit event."""
        request_id, replay_of = request.request_id[:MAX_ID_CHARS], request.replay_of
        if replay_of is not None and not names.is_request_id(replay_of):
            replay_of = None
        reply = InferenceReply(
            request_id=request_id,
            tenant=tenant,
            outcome=Outcome.REJECTED,
            code=refusal.code,
            field=refusal.field,
            message=refusal.message,
            retry_after_ms=refusal.retry_after_ms,
            model=name_or_none(model_of(request.model)),
            task=name_or_none(request.task),
            timings=Timings(submitted_at_ms=arrival.timestamp_ms),
            source=arrival.coordinate,
            replay_of=replay_of,
            cost=self.prices().nothing(model_of(request.model)),
        )
        audit = self._refusal(request_id, replay_of, arrival, tenant, refusal, now_ms)
        topic = reply_topic_for_refusal(request, tenant, spec)
        return self._reply(topic, reply, trace_headers(arrival.headers)), audit

    def duplicate(
        self, queued: QueuedRequest, first: SourceCoordinate, replayed: tuple[str, InferenceReply] | None, now_ms: int
    ) -> tuple[OutputRecord, ...]:
        """The audit event of a duplicate, and a copy of the first request's reply if given.

        Without ``replayed`` there is no reply: that of the first request is still to come, or cannot be sent again.
        """
        source, message = (
            queued.claim.coordinate,
            f"first at {first.topic}-{first.partition}@{first.offset}",
        )
        inputs = {"replayed": str(replayed is not None).lower()}
        audit = self._audit(
            queued.request_id, queued.tenant, Decision.DUPLICATE, source, now_ms, message=message, inputs=inputs
        )
        return (audit,) if replayed is None else (self._reply(*replayed, queued.trace_headers), audit)

    def dead_letter(
        self, arrival: ReceivedRecord, tenant: str, error: DecodeError, now_ms: int
    ) -> tuple[OutputRecord, ...]:
        """The original bytes, with headers for their origin and the error, and the audit event."""
        audit = self._audit(
            "", tenant, Decision.DEAD_LETTERED, arrival.coordinate, now_ms, code=error.problem, message=str(error)
        )
        given = dead_letter_headers(arrival.coordinate, arrival.timestamp_ms, error, self._signature, tenant=tenant)
        letter = OutputRecord(names.DEAD_LETTER_REQUESTS, *letter_content(arrival.key, arrival.value or b"", given))
        return letter, audit

    def unpublishable(self, settlement: Settlement, reason: str) -> Settlement:
        """The replacement of a settlement whose first output the broker refuses.

        A refused reply becomes a dead letter; that of a copy is left out, as it would be the request of a tenant in one
        more place. A work item too large for its topic becomes a rejection. A dead letter too large is dropped; its
        audit event stays. Anything else is returned unchanged and waits in the blocked-topic retry queue, such as work
        whose topic does not exist yet.
        """
        first = settlement.outputs[0]
        too_large = reason in _TOO_LARGE
        if first.topic == names.EVALUATION_REPLIES:
            return Settlement(settlement.claim, settlement.outputs[1:])
        if names.is_replies(first.topic):
            return self._kept_reply(settlement, f"{first.topic}: {reason}")
        if too_large and names.is_priority(first.topic):
            return self._too_large_for_its_topic(settlement)
        if too_large and first.topic == names.DEAD_LETTER_REQUESTS:
            return Settlement(settlement.claim, settlement.outputs[1:])
        return settlement

    def _kept_reply(self, settlement: Settlement, why: str) -> Settlement:
        first = settlement.outputs[0]
        coordinate = settlement.claim.coordinate
        letter_headers = dead_letter_headers(coordinate, None, UnpublishableError(why), self._signature)
        letter = OutputRecord(names.DEAD_LETTER_REQUESTS, *letter_content(first.key, first.value, letter_headers))
        return Settlement(settlement.claim, (letter, *settlement.outputs[1:]))

    def _too_large_for_its_topic(self, settlement: Settlement) -> Settlement:
        """The rejection of an oversized work item: its topic allows smaller records than topics.yaml says."""
        work = settlement.outputs[0]
        item = self.codec.decode_as(WorkItem, work.value)
        message = f"its work item of {len(work.value)} bytes is larger than {work.topic} takes"
        refusal = Rejection(Code.INVALID, "input", message)
        outputs = self._item_refused(item, refusal, item.dispatched_at_ms, trace_headers(work.headers))
        return Settlement(settlement.claim, outputs)

    def copy_refused(self, item: WorkItem, refusal: Rejection, now_ms: int) -> tuple[OutputRecord, ...]:
        """The reply and the audit event of a copy whose version is not there, or that is not allowed any more."""
        return self._item_refused(item, refusal, now_ms, ())

    def _item_refused(
        self, item: WorkItem, refusal: Rejection, now_ms: int, trace: TraceHeaders
    ) -> tuple[OutputRecord, ...]:
        request = item.request
        reply = InferenceReply(
            request_id=request.request_id,
            tenant=item.tenant,
            outcome=Outcome.REJECTED,
            code=refusal.code,
            field=refusal.field,
            message=refusal.message,
            model=request.model,
            task=request.task,
            timings=Timings(submitted_at_ms=item.submitted_at_ms, admitted_at_ms=item.admitted_at_ms),
            degradations=item.degradations,
            source=item.source,
            replay_of=request.replay_of,
            cost=self.prices().nothing(request.model),
            budget=item.budget,
            evaluation=item.evaluation,
        )
        audit = self._audit(
            *(request.request_id, item.tenant, Decision.REFUSED, item.source, now_ms, refusal.code, refusal.message),
            {"field": refusal.field, "pool": item.pool},
            request.replay_of,
        )
        return self._reply(item.reply_topic, reply, trace), audit

    @property
    def _signature(self) -> LetterWriter:
        return LetterWriter(self.dispatcher_id, self.group)

    def _final(
        self,
        queued: QueuedRequest,
        decision: Decision,
        code: Code | None,
        message: str,
        inputs: Inputs,
        now_ms: int,
        *,
        field: str | None = None,
        retry_after_ms: int | None = None,
        was_admitted: bool = True,
    ) -> tuple[OutputRecord, ...]:
        """The reply and the audit event of a valid request that does not run."""
        reply = InferenceReply(
            request_id=queued.request_id,
            tenant=queued.tenant,
            outcome=_OUTCOMES[decision],
            code=code,
            field=field,
            message=message,
            retry_after_ms=retry_after_ms,
            model=queued.request.model,
            arm=queued.arm,
            task=queued.request.task,
            timings=Timings(queued.submitted_at_ms, queued.admitted_at_ms if was_admitted else None),
            degradations=queued.degradations,
            source=queued.source,
            replay_of=queued.request.replay_of,
            cost=self.prices().nothing(queued.request.model),
            budget=queued.budget,
            evaluation=queued.evaluation,
        )
        audit = self._decision(queued, decision, now_ms, code=code, message=message, inputs=inputs)
        return self._reply(queued.reply_topic, reply, queued.trace_headers), audit

    def _refusal(
        self,
        request_id: str,
        replay_of: str | None,
        arrival: ReceivedRecord,
        tenant: str,
        refusal: Rejection,
        now_ms: int,
        decision: Decision = Decision.REFUSED,
    ) -> OutputRecord:
        source, code, inputs = arrival.coordinate, refusal.code, {"field": refusal.field}
        return self._audit(request_id, tenant, decision, source, now_ms, code, refusal.message, inputs, replay_of)

    def _decision(
        self,
        queued: QueuedRequest,
        decision: Decision,
        now_ms: int,
        inputs: Inputs,
        code: Code | None = None,
        message: str | None = None,
    ) -> OutputRecord:
        request = queued.request
        return self._audit(
            request.request_id, queued.tenant, decision, queued.source, now_ms, code, message, inputs, request.replay_of
        )

    def _audit(
        self,
        request_id: str,
        tenant: str,
        decision: Decision,
        source: SourceCoordinate,
        now_ms: int,
        code: str | None = None,
        message: str | None = None,
        inputs: Inputs | None = None,
        replay_of: str | None = None,
    ) -> OutputRecord:
        given = {name: str(value) for name, value in (inputs or {}).items()}
        if replay_of is not None:
            given["replay_of"] = replay_of
        event = AuditEvent(request_id, tenant, decision, self.dispatcher_id, now_ms, source, code, message, given)
        return OutputRecord(names.LEDGER_AUDIT, tenant.encode(), self.codec.encode(event))

    def _reply(self, topic: str, reply: InferenceReply, trace: TraceHeaders) -> OutputRecord:
        return reply_record(topic, reply, self.codec.encode(reply), trace)


def _budget_headers(queued: QueuedRequest, reserved_nanos: int) -> tuple[tuple[str, bytes], ...]:
    caller = queued.request.requested_by
    named = () if caller is None else ((headers.REQUESTED_BY, caller.encode()),)
    batch = ((headers.BATCH_ROW, b"1"),) if queued.is_backfill else ()
    return (headers.RESERVED_NANOS, b"%d" % reserved_nanos), *named, *batch


def _retrieval_inputs(queued: QueuedRequest) -> dict[str, object]:
    use = queued.retrieval_use
    if use is None:
        return {}
    given: dict[str, object] = {
        "collection": use.collection,
        "retrieval_mode": use.mode,
        "retrieval_ms": use.took_ms,
        "passages": len(queued.passages),
    }
    if use.reason is not None:
        given["retrieval_reason"] = use.reason
    if use.collection_version is not None:
        given["collection_version"] = use.collection_version
    return given


def _history_inputs(queued: QueuedRequest) -> dict[str, object]:
    use = queued.history_use
    if use is None:
        return {}
    given: dict[str, object] = {"history_messages": use.messages, "history_ms": use.took_ms}
    return given if use.reason is None else {**given, "history_reason": use.reason}

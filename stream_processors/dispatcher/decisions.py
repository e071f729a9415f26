"""What a decision writes: work items, replies, audit events, dead letters. Pure: values in, records out."""

from dataclasses import dataclass

from fairlane import headers, names
from fairlane.codec import Codec, DecodeError
from fairlane.dead_letters import dead_letter_headers
from fairlane.outcomes import Decision, Outcome
from fairlane.ownership import PartitionId
from fairlane.records import (
    AuditEvent,
    InferenceReply,
    InferenceRequest,
    SourceCoordinate,
    TenantSpec,
    Timings,
    WorkItem,
)
from fairlane.transactions import OutRecord, Settlement
from stream_processors.dispatcher.validation import MAX_ID_CHARS, Refusal, reply_topic_for_refusal
from stream_processors.dispatcher.work_queue import QueuedRequest


class UnpublishableError(Exception):
    """A reply that its topic does not take."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A record as it was read from a tenant's topic."""

    partition: PartitionId
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()

    @property
    def coordinate(self) -> SourceCoordinate:
        return SourceCoordinate(self.partition.topic, self.partition.partition, self.offset)


@dataclass(frozen=True, slots=True)
class DecisionWriter:
    """Turns decisions into records; ``dispatcher_id`` signs them."""

    codec: Codec
    dispatcher_id: str

    def dispatched(self, queued: QueuedRequest, now_ms: int) -> tuple[OutRecord, ...]:
        """The work item for the model's pool."""
        request = queued.request
        topic, partition, offset = *queued.claim.partition, queued.claim.offset
        item = WorkItem(
            request=request,
            tenant=queued.tenant,
            pool=queued.model.pool,
            model_version=queued.model.version,
            priority_class=request.priority,
            cost_tokens=queued.cost_tokens,
            submitted_at_ms=queued.submitted_at_ms,
            admitted_at_ms=queued.admitted_at_ms,
            dispatched_at_ms=now_ms,
            deadline_at_ms=queued.deadline_at_ms,
            reply_topic=queued.reply_topic,
            dispatcher_id=self.dispatcher_id,
            source=SourceCoordinate(topic, partition, offset),
        )
        return (
            OutRecord(
                names.priority_topic(queued.model.pool, request.priority),
                request.request_id.encode(),
                self.codec.encode(item),
                (
                    (headers.COST_TOKENS, b"%d" % queued.cost_tokens),
                    (headers.SOURCE_TOPIC, topic.encode()),
                    (headers.SOURCE_PARTITION, b"%d" % partition),
                    (headers.SOURCE_OFFSET, b"%d" % offset),
                    *queued.trace_headers,
                ),
            ),
        )

    def expired(self, queued: QueuedRequest, now_ms: int) -> tuple[OutRecord, ...]:
        """The reply to a request whose deadline passed while it waited."""
        source = SourceCoordinate(*queued.claim.partition, queued.claim.offset)
        waited_ms = now_ms - queued.submitted_at_ms
        message = f"the deadline passed after {waited_ms} ms of waiting"
        reply = InferenceReply(
            request_id=queued.request.request_id,
            tenant=queued.tenant,
            outcome=Outcome.EXPIRED,
            message=message,
            model=queued.request.model,
            task=queued.request.task,
            timings=Timings(submitted_at_ms=queued.submitted_at_ms, admitted_at_ms=queued.admitted_at_ms),
            source=source,
        )
        audit = AuditEvent(
            request_id=queued.request.request_id,
            tenant=queued.tenant,
            decision=Decision.EXPIRED,
            actor=self.dispatcher_id,
            occurred_at_ms=now_ms,
            source=source,
            message=message,
            inputs={"deadline_at_ms": str(queued.deadline_at_ms), "cost_tokens": str(queued.cost_tokens)},
        )
        return self._reply(queued.reply_topic, reply), self._audit(audit)

    def refused(
        self,
        request: InferenceRequest,
        arrival: Arrival,
        tenant: str,
        spec: TenantSpec | None,
        refusal: Refusal,
        now_ms: int,
    ) -> tuple[OutRecord, ...]:
        """The reply that says which field and why, and its audit."""
        request_id = request.request_id[:MAX_ID_CHARS]
        reply = InferenceReply(
            request_id=request_id,
            tenant=tenant,
            outcome=Outcome.REJECTED,
            code=refusal.code,
            field=refusal.field,
            message=refusal.message,
            model=request.model[:MAX_ID_CHARS],
            task=request.task[:MAX_ID_CHARS],
            timings=Timings(submitted_at_ms=arrival.timestamp_ms),
            source=arrival.coordinate,
        )
        audit = AuditEvent(
            request_id=request_id,
            tenant=tenant,
            decision=Decision.REFUSED,
            actor=self.dispatcher_id,
            occurred_at_ms=now_ms,
            source=arrival.coordinate,
            code=refusal.code,
            message=refusal.message,
            inputs={"field": refusal.field},
        )
        return self._reply(reply_topic_for_refusal(request, tenant, spec), reply), self._audit(audit)

    def duplicate(
        self, queued: QueuedRequest, first: SourceCoordinate, replayed: tuple[str, InferenceReply] | None, now_ms: int
    ) -> tuple[OutRecord, ...]:
        """The audit of a repeated request id, and a copy of the first's reply if that is settled.

        Without a settled reply nothing is answered here: the first one's reply is still to come.
        """
        audit = AuditEvent(
            request_id=queued.request.request_id,
            tenant=queued.tenant,
            decision=Decision.DUPLICATE,
            actor=self.dispatcher_id,
            occurred_at_ms=now_ms,
            source=SourceCoordinate(*queued.claim.partition, queued.claim.offset),
            message=f"first at {first.topic}-{first.partition}@{first.offset}",
            inputs={"replayed": str(replayed is not None).lower()},
        )
        outputs = (self._audit(audit),)
        return outputs if replayed is None else (self._reply(*replayed), *outputs)

    def dead_letter(self, arrival: Arrival, tenant: str, error: DecodeError, now_ms: int) -> tuple[OutRecord, ...]:
        """The original bytes with headers that say where they stood and why they are here, and the audit."""
        audit = AuditEvent(
            request_id="",
            tenant=tenant,
            decision=Decision.DEAD_LETTERED,
            actor=self.dispatcher_id,
            occurred_at_ms=now_ms,
            source=arrival.coordinate,
            code=error.problem,
            message=str(error),
        )
        letter = OutRecord(
            names.DEAD_LETTER_REQUESTS,
            arrival.key,
            arrival.value or b"",
            dead_letter_headers(arrival.coordinate, arrival.timestamp_ms, error),
        )
        return letter, self._audit(audit)

    def unpublishable(self, settlement: Settlement, reason: str) -> Settlement:
        """The broker refuses this settlement's outputs for good. A reply that its topic does not take is kept as a dead
        letter; work is never given up: it waits until its pool's topic is there."""
        first = settlement.outputs[0]
        if not names.is_replies(first.topic):
            return settlement
        coordinate = SourceCoordinate(*settlement.claim.partition, settlement.claim.offset)
        error = UnpublishableError(f"{first.topic}: {reason}")
        letter = OutRecord(
            names.DEAD_LETTER_REQUESTS, first.key, first.value, dead_letter_headers(coordinate, 0, error)
        )
        return Settlement(settlement.claim, (letter,))

    def _reply(self, topic: str, reply: InferenceReply) -> OutRecord:
        return OutRecord(topic, reply.request_id.encode(), self.codec.encode(reply))

    def _audit(self, audit: AuditEvent) -> OutRecord:
        return OutRecord(names.LEDGER_AUDIT, audit.tenant.encode(), self.codec.encode(audit))

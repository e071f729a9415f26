"""Output records of a request answered from the response cache. Pure."""

from dataclasses import dataclass

from fairlane import names
from fairlane.codec import Codec
from fairlane.outcomes import Decision, Outcome
from fairlane.records import AuditEvent, InferenceReply, Timings, UsageEvent
from fairlane_server.kafka.settlement import reply_record
from fairlane_server.kafka.transactions import OutputRecord
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.response_cache.lookup import CacheHit


@dataclass(frozen=True, slots=True)
class CachedReplyWriter:
    """Builds the records of cached answers. ``dispatcher_id`` is the actor in the audit event."""

    codec: Codec
    dispatcher_id: str

    def answered(self, queued: QueuedRequest, known: CacheHit, now_ms: int) -> tuple[OutputRecord, ...]:
        """The reply, a usage event with cost 0, and the audit event."""
        request, answer, use = queued.request, known.answer, known.use
        reply = InferenceReply(
            request_id=request.request_id,
            tenant=queued.tenant,
            outcome=Outcome.OK,
            model=answer.model,
            model_version=answer.model_version,
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
        )
        audit = AuditEvent(
            request_id=request.request_id,
            tenant=queued.tenant,
            decision=Decision.CACHED,
            actor=self.dispatcher_id,
            occurred_at_ms=now_ms,
            source=queued.source,
            inputs={
                "cache": use.mode,
                "similarity": f"{use.similarity:.4f}",
                "answer_of": use.request_id,
                "answered_at_ms": str(use.answered_at_ms),
                "waited_ms": str(now_ms - queued.submitted_at_ms),
                "submitted_at_ms": str(queued.submitted_at_ms),
                **({} if request.replay_of is None else {"replay_of": request.replay_of}),
            },
        )
        tenant = queued.tenant.encode()
        return (
            reply_record(queued.reply_topic, reply, self.codec.encode(reply), queued.trace_headers),
            OutputRecord(names.LEDGER_USAGE, tenant, self.codec.encode(usage)),
            OutputRecord(names.LEDGER_AUDIT, tenant, self.codec.encode(audit)),
        )

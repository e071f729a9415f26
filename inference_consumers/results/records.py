"""Records of a result: replies, usage, dead letters. Pure: outcomes in, records out."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from fairlane import names
from fairlane.backoff import jittered_ms
from fairlane.codec import Codec
from fairlane.dead_letters import DeadLetterError, LetterWriter, dead_letter_headers, letter_content
from fairlane.frozen import frozen_dataclass
from fairlane.kafka_config import MAX_MESSAGE_BYTES
from fairlane.outcomes import Code, Decision, FinishReason, GuardrailResult, GuardrailStage, Outcome
from fairlane.ownership import Claim
from fairlane.records import (
    AuditEvent,
    ConversationTurn,
    Cost,
    InferenceReply,
    InferenceRequest,
    Message,
    PassageReference,
    Timings,
    TokenUsage,
    UsageEvent,
    WorkItem,
)
from fairlane.trace_context import trace_headers
from fairlane_server.costs.price_book import NO_PRICES, PriceBook, Used
from fairlane_server.kafka.settlement import reply_record
from fairlane_server.kafka.transactions import OutputRecord, Settlement
from inference_consumers.batching.received_work import ReceivedWork
from inference_consumers.engines.protocol import CancelledItem, Failure, Success
from inference_consumers.results.settled import EngineRun, SettledOutcome, Withheld

_MAX_REPLY_BYTES = MAX_MESSAGE_BYTES - 65_536
_REFUSALS = frozenset({Code.INVALID, Code.UNKNOWN_MODEL, Code.OVERLOADED})

_RETRY_AFTER_BATCHES = 2
"""The batch that ran and the one that was ready behind it: their memory is free again then."""

_CHECK_RETRY_MS = 5_000
"""A check whose process died is back by then, as a rule."""

_LEAST_RETRY_MS = 1_000
"""An engine without memory for an item fails at once, so that its own run says little of how long a batch takes."""

_MOST_RETRY_MS = 200_000
_RETRY_JITTER = 0.5


class PoisonError(DeadLetterError):
    """An item that no engine run survives."""


class UnreadableWorkError(DeadLetterError):
    """A record on a priority topic that is no work item."""


@frozen_dataclass(frozen=True, slots=True)
class Answered:
    """Records to commit for an item, and its reply. ``turn_left_out``: the conversation turn was omitted because the
    reply would have been too large."""

    settlement: Settlement
    reply: InferenceReply
    turn_left_out: bool = False


@dataclass(frozen=True, slots=True)
class AnswerWriter:
    """Turns outcomes into settlements; ``consumer_id`` signs them, and dead letters with the consumer ``group``.
    ``prices`` returns the present prices; what they do not know costs None."""

    codec: Codec
    consumer_id: str
    group: str | None = None
    prices: Callable[[], PriceBook] = lambda: NO_PRICES

    def answered(self, work: ReceivedWork, outcome: SettledOutcome, run: EngineRun) -> Answered:
        """The reply and the usage of an item that an engine ran. A poisonous one goes to the dead letters as well, but
        not a copy: it would be the request of a tenant in one more place."""
        usage = self._usage(work, outcome, run)
        reply = _reply(work, outcome, run, usage.cost)
        value = self.codec.encode(reply)
        turn_left_out = reply.turn is not None and len(value) > _MAX_REPLY_BYTES
        if turn_left_out:
            reply = replace(reply, turn=None)
            value = self.codec.encode(reply)
        if len(value) > _MAX_REPLY_BYTES:
            too_long = f"the answer takes {len(value)} bytes, more than {_MAX_REPLY_BYTES}"
            outcome = Failure(Code.ENGINE_ERROR, too_long)
            usage = self._usage(work, outcome, run)
            reply = _reply(work, outcome, run, usage.cost)
            value = self.codec.encode(reply)
        outputs = [self._reply_record(work, reply, value), self._usage_record(usage)]
        if isinstance(outcome, Failure) and outcome.code == Code.POISON and not work.is_copy:
            poison = PoisonError(outcome.message)
            key, value = work.original_key, work.original_value
            outputs.append(self._dead_letter(work.claim, key, value, work.appended_at_ms, poison, work.item))
        if isinstance(outcome, CancelledItem):
            why = reply.message or ""
            outputs.append(self._audit(work.item, work.claim, Decision.CANCELLED, None, why, run.finished_at_ms))
        if isinstance(outcome, Failure) and outcome.code == Code.OVERLOADED:
            refused = (Decision.REFUSED, Code.OVERLOADED, outcome.message)
            outputs.append(self._audit(work.item, work.claim, *refused, run.finished_at_ms))
        if any(one.verdict != GuardrailResult.PASSED for one in work.verdicts):
            outputs.append(self._guarded(work, outcome, run.finished_at_ms))
        return Answered(Settlement(work.claim, tuple(outputs)), reply, turn_left_out)

    def handed_back(self, work: ReceivedWork, returned: WorkItem, failure: Failure, run: EngineRun) -> Settlement:
        """Records of requeued work: no reply, no usage, and its audit event; dispatchers try it again."""
        topic, key = names.returned_topic(returned.pool), returned.request.request_id.encode()
        return Settlement(
            work.claim,
            (
                OutputRecord(topic, key, self.codec.encode(returned), work.trace_headers),
                self._usage_record(self._usage(work, failure, run)),
                self._audit(
                    *(returned, work.claim, Decision.HANDED_BACK, failure.code, failure.message, run.finished_at_ms)
                ),
            ),
        )

    def expired(self, work: ReceivedWork, now_ms: int) -> Settlement:
        """The reply to work whose deadline passed before it could run, and its usage of nothing."""
        late_ms = now_ms - work.item.deadline_at_ms
        item = work.item
        reply = InferenceReply(
            request_id=item.request.request_id,
            tenant=item.tenant,
            outcome=Outcome.EXPIRED,
            message=f"the deadline passed {late_ms} ms before an engine was free",
            model=item.request.model,
            model_version=item.model_version,
            arm=item.arm,
            task=item.request.task,
            timings=_timings(work, None),
            degradations=item.degradations,
            source=item.source,
            replay_of=item.request.replay_of,
            attempts=work.runs,
            cost=self.prices().nothing(item.request.model),
            guardrails=work.verdicts,
            budget=item.budget,
            evaluation=item.evaluation,
        )
        value = self.codec.encode(reply)
        usage = self._usage(work, None, None)
        return Settlement(work.claim, (self._reply_record(work, reply, value), self._usage_record(usage)))

    def unreadable(
        self, claim: Claim, key: bytes | None, value: bytes | None, timestamp_ms: int | None, why: str
    ) -> Settlement:
        """Dead letter of a record that is no work item, with its bytes; there is nobody to reply to."""
        error = UnreadableWorkError(why)
        return Settlement(claim, (self._dead_letter(claim, key, value or b"", timestamp_ms, error),))

    def unpublishable(self, settlement: Settlement, reason: str) -> Settlement:
        """The broker keeps refusing this settlement's outputs. Work that cannot be handed back is refused at once; a
        reply is kept where an operator finds it, but for that of a copy, which is left out."""
        first = settlement.outputs[0]
        if first.topic == names.EVALUATION_REPLIES:
            return Settlement(settlement.claim, settlement.outputs[1:])
        if names.is_returned(first.topic):
            return self._not_handed_back(settlement, f"cannot be handed back: {reason}")
        error = UnreadableWorkError(f"the reply could not be written: {reason}")
        letter = self._dead_letter(settlement.claim, first.key, first.value, None, error)
        return Settlement(settlement.claim, (letter, *settlement.outputs[1:]))

    def _dead_letter(
        self,
        claim: Claim,
        key: bytes | None,
        value: bytes,
        timestamp_ms: int | None,
        error: DeadLetterError,
        item: WorkItem | None = None,
    ) -> OutputRecord:
        letter_headers = dead_letter_headers(
            claim.coordinate,
            timestamp_ms,
            error,
            LetterWriter(self.consumer_id, self.group),
            tenant=None if item is None else item.tenant,
            model=None if item is None else item.request.model,
        )
        return OutputRecord(names.DEAD_LETTER_WORK, *letter_content(key, value, letter_headers))

    def _not_handed_back(self, settlement: Settlement, why: str) -> Settlement:
        item = self.codec.decode_as(WorkItem, settlement.outputs[0].value)
        usage_record = settlement.outputs[1]
        usage = self.codec.decode_as(UsageEvent, usage_record.value)
        reply = InferenceReply(
            request_id=item.request.request_id,
            tenant=item.tenant,
            outcome=Outcome(usage.outcome),
            code=usage.code,
            message=why,
            retry_after_ms=_retry_after_ms(item, usage.engine_ms),
            model=item.request.model,
            model_version=item.model_version,
            arm=item.arm,
            task=item.request.task,
            timings=Timings(item.submitted_at_ms, item.admitted_at_ms, item.dispatched_at_ms),
            degradations=item.degradations,
            source=item.source,
            replay_of=item.request.replay_of,
            cost=usage.cost,
            budget=item.budget,
            evaluation=item.evaluation,
        )
        return Settlement(
            settlement.claim,
            (
                reply_record(
                    item.reply_topic, reply, self.codec.encode(reply), trace_headers(settlement.outputs[0].headers)
                ),
                usage_record,
                self._audit(item, settlement.claim, Decision.REFUSED, Code.OVERLOADED, why, usage.occurred_at_ms),
            ),
        )

    def _guarded(self, work: ReceivedWork, outcome: SettledOutcome, now_ms: int) -> OutputRecord:
        """The audit event of verdicts of which one at least is not passed."""
        code = outcome.code if isinstance(outcome, Withheld) else None
        why = "; ".join(map(str, work.verdicts))
        return self._audit(work.item, work.claim, Decision.GUARDED, code, why, now_ms)

    def _audit(
        self, item: WorkItem, claim: Claim, decision: Decision, code: Code | None, why: str, now_ms: int
    ) -> OutputRecord:
        event = AuditEvent(
            request_id=item.request.request_id,
            tenant=item.tenant,
            decision=decision,
            actor=self.consumer_id,
            occurred_at_ms=now_ms,
            source=item.source,
            code=code,
            message=why,
            inputs={
                "pool": item.pool,
                "model": item.request.model,
                "work": f"{claim.partition.topic}-{claim.partition.partition}@{claim.offset}",
                "cost_tokens": str(item.cost_tokens),
                "prompt_tokens": str(item.prompt_tokens),
                "passages": str(len(item.passages)),
                "handed_back": str(item.handed_back),
            },
        )
        return OutputRecord(names.LEDGER_AUDIT, item.tenant.encode(), self.codec.encode(event))

    def _reply_record(self, work: ReceivedWork, reply: InferenceReply, value: bytes) -> OutputRecord:
        return reply_record(work.item.reply_topic, reply, value, work.trace_headers)

    def _usage(self, work: ReceivedWork, outcome: SettledOutcome | None, run: EngineRun | None) -> UsageEvent:
        """The usage of an outcome; both None: its deadline passed."""
        item = work.item
        tokens, code = TokenUsage(), None
        if isinstance(outcome, Failure | Withheld):
            code = outcome.code
        if outcome is not None and not isinstance(outcome, Failure):
            tokens = outcome.usage
        ended = Outcome.EXPIRED if outcome is None else outcome_of(outcome)
        engine_ms, batch_size, at_ms = 0, 0, work.received_at_ms
        if run is not None:
            engine_ms, batch_size = run.finished_at_ms - run.started_at_ms, run.batch_size
            at_ms = run.finished_at_ms
        images = int(item.request.input.image is not None and batch_size > 0)
        used = Used(tokens.prompt_tokens, tokens.completion_tokens, tokens.cached_tokens, images, engine_ms, batch_size)
        return UsageEvent(
            request_id=item.request.request_id,
            tenant=item.tenant,
            pool=item.pool,
            model=item.request.model,
            model_version=item.model_version,
            priority_class=item.priority_class,
            outcome=ended,
            code=code,
            prompt_tokens=tokens.prompt_tokens,
            completion_tokens=tokens.completion_tokens,
            cached_tokens=tokens.cached_tokens,
            cost_tokens=item.cost_tokens,
            engine_ms=engine_ms,
            occurred_at_ms=at_ms,
            work=work.claim.coordinate,
            images=images,
            batch_size=batch_size,
            cost=self.prices().cost(item.request.model, item.model_version, at_ms, ended, used),
            requested_by=item.request.requested_by,
        )

    def _usage_record(self, event: UsageEvent) -> OutputRecord:
        return OutputRecord(names.LEDGER_USAGE, event.tenant.encode(), self.codec.encode(event))


def outcome_of(outcome: SettledOutcome) -> Outcome:
    """The outcome in the reply."""
    if isinstance(outcome, Success):
        return Outcome.OK
    if isinstance(outcome, CancelledItem):
        return Outcome.CANCELLED
    if isinstance(outcome, Withheld):
        return Outcome.REJECTED if outcome.stage is GuardrailStage.INPUT else Outcome.FAILED
    # An engine may find an input invalid that only it can judge; everything else it reports is a failure.
    return Outcome.REJECTED if outcome.code in _REFUSALS else Outcome.FAILED


def turn_of(request: InferenceRequest) -> ConversationTurn | None:
    """The turn that a request adds to its conversation, without the answer. System messages are sent with every request
    and are not part of it. None without a conversation or new messages."""
    if request.conversation_id is None:
        return None
    said = request.input.messages or ()
    if not said and request.input.prompt:
        said = (Message("user", request.input.prompt),)
    added = tuple(message for message in said if message.role != "system")
    return ConversationTurn(request.conversation_id, added) if added else None


def _reply(work: ReceivedWork, outcome: SettledOutcome, run: EngineRun, cost: Cost | None) -> InferenceReply:
    item = work.item
    reply = InferenceReply(
        request_id=item.request.request_id,
        tenant=item.tenant,
        outcome=Outcome.OK,
        model=item.request.model,
        model_version=item.model_version,
        arm=item.arm,
        task=item.request.task,
        engine=run.engine,
        timings=_timings(work, run),
        batch_size=run.batch_size,
        degradations=item.degradations,
        passages=tuple(PassageReference(passage.passage_id, passage.score) for passage in item.passages),
        source=item.source,
        replay_of=item.request.replay_of,
        attempts=work.runs,
        retrieval_use=item.retrieval_use,
        history_use=item.history_use,
        cost=cost,
        guardrails=work.verdicts,
        budget=item.budget,
        evaluation=item.evaluation,
    )
    if isinstance(outcome, Success):
        answer = replace(reply, output=outcome.output, usage=outcome.usage, finish_reason=outcome.finish_reason)
        has_turn = outcome.output.text is not None and not work.is_copy
        return replace(answer, turn=turn_of(item.request)) if has_turn else answer
    if isinstance(outcome, CancelledItem):
        message = "cancelled while it waited for an engine" if work.runs == 0 else "cancelled while it ran"
        return replace(reply, outcome=Outcome.CANCELLED, message=message, usage=outcome.usage)
    if isinstance(outcome, Withheld):
        return _withheld(reply, outcome)
    if outcome.code == Code.OVERLOADED:
        reply = replace(reply, retry_after_ms=_retry_after_ms(item, run.finished_at_ms - run.started_at_ms))
    return replace(reply, outcome=outcome_of(outcome), code=outcome.code, field=outcome.field, message=outcome.message)


def _withheld(reply: InferenceReply, outcome: Withheld) -> InferenceReply:
    blocked = outcome.code != Code.GUARDRAIL_UNAVAILABLE
    after_run = outcome.stage is GuardrailStage.OUTPUT
    return replace(
        reply,
        outcome=outcome_of(outcome),
        code=outcome.code,
        message=outcome.message,
        usage=outcome.usage,
        finish_reason=FinishReason.CONTENT_FILTER if blocked and after_run else None,
        retry_after_ms=None if blocked else jittered_ms(_CHECK_RETRY_MS, _RETRY_JITTER, reply.request_id),
    )


def _retry_after_ms(item: WorkItem, engine_ms: int) -> int:
    """When an item that there was no memory for may come again, given how long the engine tried."""
    least_ms = min(max(_LEAST_RETRY_MS, _RETRY_AFTER_BATCHES * engine_ms), _MOST_RETRY_MS)
    return jittered_ms(least_ms, _RETRY_JITTER, item.request.request_id)


def _timings(work: ReceivedWork, run: EngineRun | None) -> Timings:
    item = work.item
    return Timings(
        submitted_at_ms=item.submitted_at_ms,
        admitted_at_ms=item.admitted_at_ms,
        dispatched_at_ms=item.dispatched_at_ms,
        received_at_ms=work.received_at_ms,
        engine_started_at_ms=None if run is None else run.started_at_ms,
        engine_finished_at_ms=None if run is None else run.finished_at_ms,
    )

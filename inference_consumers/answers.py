"""What becomes of work: replies, usage, dead letters. Pure: outcomes in, records out."""

from dataclasses import dataclass, replace

from fairlane import names
from fairlane.codec import Codec
from fairlane.dead_letters import dead_letter_headers
from fairlane.kafka import MAX_MESSAGE_BYTES
from fairlane.outcomes import Code, Outcome
from fairlane.ownership import Claim
from fairlane.records import InferenceReply, PassageReference, SourceCoordinate, Timings, UsageEvent
from fairlane.transactions import OutRecord, Settlement
from inference_consumers.engines.protocol import Failure, ItemOutcome, Success
from inference_consumers.micro_batch import ReceivedWork

_MAX_REPLY_BYTES = MAX_MESSAGE_BYTES - 65_536
_REFUSALS = frozenset({Code.INVALID, Code.UNKNOWN_MODEL})


class PoisonError(Exception):
    """An item that no engine run survives."""


class UnreadableWorkError(Exception):
    """A record on a priority topic that is no work item."""


@dataclass(frozen=True, slots=True)
class EngineRun:
    """The run an outcome came from; times in milliseconds since the epoch."""

    engine: str
    batch_size: int
    started_at_ms: int
    finished_at_ms: int


@dataclass(frozen=True, slots=True)
class AnswerWriter:
    """Turns outcomes into settlements."""

    codec: Codec

    def answered(self, work: ReceivedWork, outcome: ItemOutcome, run: EngineRun) -> Settlement:
        """The reply and the usage of an item that an engine ran; a poisonous one goes to the dead letters as well."""
        reply = _reply(work, outcome, run)
        value = self.codec.encode(reply)
        if len(value) > _MAX_REPLY_BYTES:
            too_long = f"the answer takes {len(value)} bytes, more than {_MAX_REPLY_BYTES}"
            outcome = Failure(Code.ENGINE_ERROR, too_long)
            reply = _reply(work, outcome, run)
            value = self.codec.encode(reply)
        outputs = [self._reply_record(work, reply, value), self._usage(work, reply, run)]
        if isinstance(outcome, Failure) and outcome.code == Code.POISON:
            poison = PoisonError(outcome.message)
            letter = self.dead_letter(work.claim, work.original_key, work.original_value, work.appended_at_ms, poison)
            outputs.append(letter)
        return Settlement(work.claim, tuple(outputs))

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
            task=item.request.task,
            timings=_timings(work, None),
            degradations=item.degradations,
            source=item.source,
        )
        value = self.codec.encode(reply)
        return Settlement(work.claim, (self._reply_record(work, reply, value), self._usage(work, reply, None)))

    def unreadable(
        self, claim: Claim, key: bytes | None, value: bytes | None, timestamp_ms: int, why: str
    ) -> Settlement:
        """A record that is no work item: nobody can be answered, so its bytes are kept."""
        error = UnreadableWorkError(why)
        return Settlement(claim, (self.dead_letter(claim, key, value or b"", timestamp_ms, error),))

    def unpublishable(self, settlement: Settlement, reason: str) -> Settlement:
        """The broker keeps refusing this settlement's outputs: keep the reply where an operator finds it."""
        error = UnreadableWorkError(f"the reply could not be written: {reason}")
        first = settlement.outputs[0]
        return Settlement(settlement.claim, (self.dead_letter(settlement.claim, first.key, first.value, 0, error),))

    def dead_letter(
        self, claim: Claim, key: bytes | None, value: bytes, timestamp_ms: int, error: Exception
    ) -> OutRecord:
        coordinate = SourceCoordinate(*claim.partition, claim.offset)
        return OutRecord(names.DEAD_LETTER_WORK, key, value, dead_letter_headers(coordinate, timestamp_ms, error))

    def _reply_record(self, work: ReceivedWork, reply: InferenceReply, value: bytes) -> OutRecord:
        return OutRecord(work.item.reply_topic, reply.request_id.encode(), value)

    def _usage(self, work: ReceivedWork, reply: InferenceReply, run: EngineRun | None) -> OutRecord:
        item = work.item
        event = UsageEvent(
            request_id=reply.request_id,
            tenant=item.tenant,
            pool=item.pool,
            model=item.request.model,
            model_version=item.model_version,
            priority_class=item.priority_class,
            outcome=reply.outcome,
            code=reply.code,
            prompt_tokens=reply.usage.prompt_tokens,
            completion_tokens=reply.usage.completion_tokens,
            cached_tokens=reply.usage.cached_tokens,
            cost_tokens=item.cost_tokens,
            engine_ms=0 if run is None else run.finished_at_ms - run.started_at_ms,
            occurred_at_ms=work.received_at_ms if run is None else run.finished_at_ms,
            work=SourceCoordinate(*work.claim.partition, work.claim.offset),
        )
        return OutRecord(names.LEDGER_USAGE, item.tenant.encode(), self.codec.encode(event))


def outcome_of(outcome: ItemOutcome) -> Outcome:
    """What the reply says became of the request."""
    if isinstance(outcome, Success):
        return Outcome.OK
    # An engine may find an input invalid that only it can judge; everything else it reports is a failure.
    return Outcome.REJECTED if outcome.code in _REFUSALS else Outcome.FAILED


def _reply(work: ReceivedWork, outcome: ItemOutcome, run: EngineRun) -> InferenceReply:
    item = work.item
    reply = InferenceReply(
        request_id=item.request.request_id,
        tenant=item.tenant,
        outcome=Outcome.OK,
        model=item.request.model,
        model_version=item.model_version,
        task=item.request.task,
        engine=run.engine,
        timings=_timings(work, run),
        batch_size=run.batch_size,
        degradations=item.degradations,
        passages=tuple(PassageReference(passage.passage_id, passage.score) for passage in item.passages),
        source=item.source,
    )
    if isinstance(outcome, Success):
        return replace(reply, output=outcome.output, usage=outcome.usage, finish_reason=outcome.finish_reason)
    return replace(reply, outcome=outcome_of(outcome), code=outcome.code, field=outcome.field, message=outcome.message)


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

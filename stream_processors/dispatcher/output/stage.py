"""Output stage: answers requests that are rejected or expired, each once, and writes the audit events of admissions."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from fairlane.backoff import jittered_ms
from fairlane.clock import ClockMs
from fairlane.frozen import frozen_dataclass
from fairlane.outcomes import Code, Decision
from fairlane.ownership import Claim
from fairlane_server.admission_rule import LEAST_RETRY_MS
from fairlane_server.kafka.transactions import OutputRecord, Settlement, TransactionLoop
from stream_processors.dispatcher.admission.quota_charges import QuotaCharges
from stream_processors.dispatcher.admission.rules import Shed
from stream_processors.dispatcher.budgets.gate import BudgetGate
from stream_processors.dispatcher.budgets.ledger import Judgement
from stream_processors.dispatcher.budgets.refusals import refusal_of
from stream_processors.dispatcher.deduplication.accepted_ids import AcceptedIds
from stream_processors.dispatcher.intake.validation import Rejection
from stream_processors.dispatcher.output.decision_records import DecisionWriter, Inputs
from stream_processors.dispatcher.output.tenant_counters import TenantCounters
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.scheduling.scheduler import Scheduler


@frozen_dataclass(frozen=True, slots=True)
class Admission:
    """An admitted request, the inputs of that decision, and the audit records of its degradation."""

    queued: QueuedRequest
    inputs: Inputs
    degraded: tuple[OutputRecord, ...] = ()


@dataclass(slots=True)
class OutputStage:
    """Expired requests are answered at once. Rejections are submitted by ``send``: their sender may retry the same id
    at once, so the id is removed from the duplicate index and the quota refunded first."""

    transactions: TransactionLoop
    writer: DecisionWriter
    counts: TenantCounters
    scheduler: Scheduler[QueuedRequest]
    charges: QuotaCharges
    budgets: BudgetGate
    accepted_ids: AcceptedIds
    clock: ClockMs
    _refused: list[tuple[QueuedRequest, Settlement]] = field(default_factory=list)
    """Rejected requests with their settlements, not submitted yet."""
    _answered: list[QueuedRequest] = field(default_factory=list)
    """Expired or cancelled requests whose quota is not refunded yet."""
    _admitted: dict[Claim, Admission] = field(default_factory=dict)
    """Admissions of the present batch without an audit event: one event covers admission and dispatch in one batch."""

    def answer_late(self, late: Sequence[QueuedRequest], now_ms: int) -> None:
        """Answer requests that have expired, and reject those that cannot finish in time."""
        expired: list[Settlement] = []
        for queued in late:
            settlement = self.late(queued, now_ms)
            if now_ms > queued.deadline_at_ms:
                expired.append(settlement)
                self._answered.append(queued)
            else:
                self._refused.append((queued, settlement))
        if expired:
            self.transactions.submit_many(expired)

    def answered(self, gone: Sequence[QueuedRequest]) -> None:
        """Refund the quotas of these answered requests with the next ``send``."""
        self._answered.extend(gone)

    def refuse(self, queued: QueuedRequest, refusal: Rejection, now_ms: int) -> None:
        """Reject a request that no pool serves any more, with the next ``send``."""
        self._refused.append((queued, Settlement(queued.claim, self.not_served(queued, refusal, now_ms))))

    def refuse_beyond_budget(self, queued: QueuedRequest, judgement: Judgement, now_ms: int) -> None:
        """Reject a queued request that no budget covers any more, with the next ``send``."""
        self._refused.append((queued, Settlement(queued.claim, self.beyond_budget(queued, judgement, now_ms))))

    async def send(self) -> None:
        """Delete the ids of pending rejections, refund quotas, then submit the rejections."""
        refused, self._refused = self._refused, []
        answered, self._answered = self._answered, []
        self.budgets.release(answered)
        self.budgets.release(queued for queued, _ in refused)
        if refused:
            await self.accepted_ids.forget([queued.seen for queued, _ in refused])
        await self.charges.refund([*answered, *(queued for queued, _ in refused)])
        if refused:
            self.transactions.submit_many([settlement for _, settlement in refused])

    @property
    def is_pending(self) -> bool:
        """Whether ``send`` has anything to do."""
        return bool(self._refused or self._answered)

    def discard(self, is_current: Callable[[Claim], bool]) -> list[QueuedRequest]:
        """Remove and return pending rejections of revoked partitions: the new owner decides again."""
        gone = [queued for queued, _ in self._refused if not is_current(queued.claim)]
        self._refused = [refused for refused in self._refused if is_current(refused[0].claim)]
        return gone

    def late(self, queued: QueuedRequest, now_ms: int) -> Settlement:
        """The settlement of a request that expired or cannot finish in time."""
        if now_ms > queued.deadline_at_ms:
            self.counts.decided(queued.tenant, Decision.EXPIRED)
        else:
            self.counts.shed(queued.tenant, queued.pool, Code.DEADLINE_UNMEETABLE, now_ms)
        return Settlement(queued.claim, self.writer.late(queued, self.retry_after_ms(queued, now_ms), now_ms))

    def not_served(self, queued: QueuedRequest, refusal: Rejection, now_ms: int) -> tuple[OutputRecord, ...]:
        """The outputs for a request that no pool serves any more."""
        self.counts.shed(queued.tenant, queued.pool, refusal.code, now_ms)
        return self.writer.not_served(queued, refusal, now_ms)

    def beyond_budget(self, queued: QueuedRequest, judgement: Judgement, now_ms: int) -> tuple[OutputRecord, ...]:
        """The outputs for a request that does not fit a hard budget, or of whose budget too little is known."""
        notice = judgement.refused
        code = Code.BUDGET_UNKNOWN if notice is None else Code.INSUFFICIENT_QUOTA
        self.counts.shed(queued.tenant, queued.pool, code, now_ms)
        message, retry_after_ms, inputs = refusal_of(judgement, queued)
        return self.writer.shed(replace(queued, budget=notice), code, message, retry_after_ms, inputs, now_ms)

    def retry_after_ms(self, queued: QueuedRequest, now_ms: int) -> int | None:
        """Retry hint of a late request: when it would be admitted if sent again now."""
        load, _ = self.scheduler.predict(queued)
        allowed_ms = queued.deadline_at_ms - queued.submitted_at_ms
        again = replace(queued, submitted_at_ms=now_ms, deadline_at_ms=now_ms + allowed_ms)
        verdict = self.scheduler.judge(again, load, now_ms)
        if isinstance(verdict, Shed):
            return verdict.retry_after_ms
        return jittered_ms(LEAST_RETRY_MS, self.scheduler.policy.admission.jitter, queued.request_id)

    def admit(self, admission: Admission) -> None:
        """Note an admission for its audit event."""
        self._admitted[admission.queued.claim] = admission

    def take_admission(self, claim: Claim) -> tuple[Inputs, tuple[OutputRecord, ...]]:
        """Remove the pending admission: its inputs, for the event of the next decision, and the audit records of its
        degradation. Empty without one."""
        admitted = self._admitted.pop(claim, None)
        return ({}, ()) if admitted is None else (admitted.inputs, admitted.degraded)

    def drop_admissions(self, revoked: Iterable[QueuedRequest]) -> None:
        """Forget the admissions of revoked partitions: the new owner decides again."""
        for queued in revoked:
            self._admitted.pop(queued.claim, None)

    def write_admissions(self) -> None:
        """Write the event of every admission still pending: its request stays queued, or was rejected since."""
        pending, self._admitted = self._admitted, {}
        notes: list[OutputRecord] = []
        for one in pending.values():
            notes.append(self.writer.accepted(one.queued, one.inputs, one.queued.admitted_at_ms))
            notes.extend(one.degraded)
        if notes:
            self.transactions.note(notes)

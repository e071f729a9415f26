"""Admission of request batches: each request is queued or answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fairlane.clock import ClockMs
from fairlane.ownership import Claim, Ownership
from fairlane.schema_registry import RegistryError
from fairlane_server.kafka.transactions import OutputRecord, Settlement, TransactionLoop
from stream_processors.dispatcher.admission.decision import AdmissionDecision, Admitted
from stream_processors.dispatcher.admission.quotas import Exceeded
from stream_processors.dispatcher.deduplication.accepted_ids import AcceptedIds
from stream_processors.dispatcher.enrichment.stage import Enrichment
from stream_processors.dispatcher.intake.arrival import ReceivedRecord
from stream_processors.dispatcher.intake.stage import Intake
from stream_processors.dispatcher.intake.validation import Rejection
from stream_processors.dispatcher.output.decision_records import DecisionWriter
from stream_processors.dispatcher.output.rejected_and_expired import RejectedAndExpired
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class AdmissionStage:
    """Checks deadline, quota and load of a batch, then queues or answers each request. Runs on the event loop.

    Raises RegistryError while the schema registry is unavailable. A single record never raises: it is dead-lettered.
    """

    ownership: Ownership
    transactions: TransactionLoop
    intake: Intake
    admitter: AdmissionDecision
    scheduler: Scheduler[QueuedRequest]
    enrichment: Enrichment
    writer: DecisionWriter
    unserved: RejectedAndExpired
    duplicates: AcceptedIds
    clock: ClockMs
    unaudited: dict[Claim, Admitted] = field(default_factory=dict)
    """Admitted requests whose admission is not audited yet."""

    async def admit(self, fresh: Sequence[QueuedRequest], arrivals: Mapping[Claim, ReceivedRecord]) -> None:
        """Queue each request or answer it. Requests of partitions that moved on are left to their new owner, which may
        have accepted them by now: their ids stay."""
        current = [queued for queued in fresh if self.ownership.is_current(queued.claim)]
        await self._admit(await self._in_time(current), arrivals)

    def audited(self, claim: Claim) -> Admitted | None:
        """Take out the admission not yet audited, if any: the caller writes it into the event of the next decision."""
        return self.unaudited.pop(claim, None)

    def note_waiting(self) -> None:
        """Audit the admissions of requests that stay queued after this batch's dispatch."""
        taken, self.unaudited = self.unaudited, {}
        notes: list[OutputRecord] = []
        for one in taken.values():
            notes.append(self.writer.accepted(one.queued, one.inputs, one.queued.admitted_at_ms))
            notes.extend(one.degraded)
        if notes:
            self.transactions.note(notes)

    def bury(self, claim: Claim, arrival: ReceivedRecord, error: Exception) -> None:
        """Dead-letter a record on which our own code failed."""
        self.transactions.submit(Settlement(claim, self.intake.broken(arrival, error)))

    async def _in_time(self, fresh: Sequence[QueuedRequest]) -> list[QueuedRequest]:
        """Return the requests within their deadline. Answer the others, forget their ids, and charge no quota."""
        now_ms = self.clock()
        late = [queued for queued in fresh if now_ms > queued.deadline_at_ms]
        if not late:
            return list(fresh)
        await self.duplicates.forget([queued.seen for queued in late])
        self.transactions.submit_many([self.unserved.late(queued, now_ms) for queued in late])
        return [queued for queued in fresh if now_ms <= queued.deadline_at_ms]

    async def _admit(self, fresh: Sequence[QueuedRequest], arrivals: Mapping[Claim, ReceivedRecord]) -> None:
        within_quota = await self.admitter.within_quota(fresh)
        self.scheduler.refresh(self.clock())
        answered: list[Settlement] = []
        may_try_again: list[QueuedRequest] = []
        not_taken: list[QueuedRequest] = []
        gone: list[QueuedRequest] = []
        for queued, exceeded in zip(fresh, within_quota, strict=True):
            verdict: Admitted | tuple[OutputRecord, ...] | None = None
            if self.ownership.is_current(queued.claim):
                now_ms = self.clock()
                try:
                    verdict = self._admitted(queued, exceeded, now_ms)
                    if isinstance(verdict, Admitted):
                        self.scheduler.push(verdict.queued)
                        self.enrichment.begin(verdict.queued)
                        self.unaudited[queued.claim] = verdict
                        continue
                except RegistryError:
                    # The schema registry is unavailable; the record is fine.
                    raise
                except Exception as error:  # noqa: BLE001 - one record must not end intake, which would re-read it at once
                    self.bury(queued.claim, arrivals[queued.claim], error)
                    if exceeded is not None:
                        self.admitter.debts.settle(queued.tenant, queued.claim)
                        continue
                    not_taken.append(queued)
                    continue
                answered.append(Settlement(queued.claim, verdict))
                may_try_again.append(queued)
                if exceeded is None:
                    not_taken.append(queued)
            elif exceeded is None:
                gone.append(queued)
        # Before the rejections go out: a sender may retry the same id as soon as it reads one.
        if may_try_again:
            await self.duplicates.forget([queued.seen for queued in may_try_again])
        await self.admitter.give_back(not_taken)
        await self.admitter.hand_over(gone)
        if answered:
            self.transactions.submit_many(answered)

    def _admitted(
        self, queued: QueuedRequest, exceeded: Exceeded | None, now_ms: int
    ) -> Admitted | tuple[OutputRecord, ...]:
        # Tenants or models may have changed during the Redis round trip or the duplicate look-up.
        now = self.intake.as_of_now(queued)
        if isinstance(now, Rejection):
            return self.unserved.not_served(queued, now, now_ms)
        return self.admitter.admit(now, exceeded, now_ms)

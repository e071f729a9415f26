"""Admissions that are not audited yet: one event covers the admission and a dispatch in the same batch."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from fairlane.ownership import Claim
from fairlane_server.kafka.transactions import OutputRecord, TransactionLoop
from stream_processors.dispatcher.output.decision_records import DecisionWriter, Inputs
from stream_processors.dispatcher.queued_request import QueuedRequest


@dataclass(frozen=True, slots=True)
class Admitted:
    """An admitted request, the inputs of that decision, and the audit records of its degradation."""

    queued: QueuedRequest
    inputs: Inputs
    degraded: tuple[OutputRecord, ...] = ()


@dataclass(slots=True)
class AdmissionAudits:
    """Audit events of admissions, by claim, until the end of their batch."""

    transactions: TransactionLoop
    writer: DecisionWriter
    _pending: dict[Claim, Admitted] = field(default_factory=dict)

    def add(self, admitted: Admitted) -> None:
        self._pending[admitted.queued.claim] = admitted

    def take(self, claim: Claim) -> Admitted | None:
        """Remove and return the pending one: the caller writes it into the event of the next decision."""
        return self._pending.pop(claim, None)

    def drop(self, revoked: Iterable[QueuedRequest]) -> None:
        """Forget the admissions of revoked partitions: the new owner decides again."""
        for queued in revoked:
            self._pending.pop(queued.claim, None)

    def write(self) -> None:
        """Write the event of every admission still pending: its request stays queued, or was rejected since."""
        pending, self._pending = self._pending, {}
        notes: list[OutputRecord] = []
        for one in pending.values():
            notes.append(self.writer.accepted(one.queued, one.inputs, one.queued.admitted_at_ms))
            notes.extend(one.degraded)
        if notes:
            self.transactions.note(notes)

"""Cancellation: answer requests still waiting here; publish the cancel to consumers otherwise."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from fairlane.clock import ClockMs
from fairlane.outcomes import Decision
from fairlane.ownership import Claim
from fairlane_server.kafka.transactions import Settlement, TransactionLoop
from stream_processors.dispatcher.admission.decision import Admitted
from stream_processors.dispatcher.deduplication.stage import DuplicateResolver
from stream_processors.dispatcher.intake.cancel import CancelCommand
from stream_processors.dispatcher.output.decision_records import DecisionWriter
from stream_processors.dispatcher.output.rejected_and_expired import RejectedAndExpired
from stream_processors.dispatcher.output.tenant_counters import TenantCounters
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class _Unfinished:
    """A cancelled request id: the requests that were found, and those whose settlements are not committed yet."""

    requests: set[Claim] = field(default_factory=set)
    cancels: list[Claim] = field(default_factory=list)


@dataclass(slots=True)
class CancellationService:
    """Carries out cancels. A cancel's own record is settled only after the settlements of the requests it found are
    committed: otherwise a crash in between could leave a request alive without its cancel.

    A request that waits nowhere here was dispatched, was requeued to another dispatcher, or was never sent: the cancel
    is published to the consumers, and any consumer that holds or receives the request stops it.
    """

    transactions: TransactionLoop
    scheduler: Scheduler[QueuedRequest]
    repeats: DuplicateResolver
    unserved: RejectedAndExpired
    writer: DecisionWriter
    counts: TenantCounters
    clock: ClockMs
    _unfinished: dict[tuple[str, str], _Unfinished] = field(default_factory=dict)
    """By tenant and request id."""
    _found_by: dict[Claim, tuple[str, str]] = field(default_factory=dict)
    """The requests of ``_unfinished``, with their key there."""

    def carry_out(
        self, cancel: CancelCommand, taken: dict[Claim, Admitted], undecided: Iterable[QueuedRequest]
    ) -> None:
        """Cancel all requests of this id sent before the cancel, wherever they wait.

        Args:
            cancel: its record is settled now, or once the requests it finds are committed.
            taken: admissions not audited yet; those of cancelled requests are removed.
            undecided: requests awaiting admission; the caller drops those that the cancel concerns.
        """
        now_ms = self.clock()
        waiting = [one for one in self.scheduler.find(cancel.tenant, cancel.request_id) if cancel.concerns(one)]
        undecided = [one for one in undecided if cancel.concerns(one)]
        answers = [self._answer(one, cancel, taken.pop(one.claim, None), now_ms) for one in waiting]
        answers += [
            Settlement(one.claim, self.writer.cancelled(one, cancel, now_ms, was_admitted=False)) for one in undecided
        ]
        told = self.writer.cancellation(cancel)
        # A duplicate's first request is elsewhere; the duplicate is settled once the outcome of the first is known.
        repeats = self.repeats.cancel(cancel)
        self.scheduler.discard([one.claim for one in waiting])
        self.unserved.answered(waiting)
        for _ in answers:
            self.counts.decided(cancel.tenant, Decision.CANCELLED)
        self.transactions.submit_many(answers)
        if not answers:
            self.counts.cancel_passed_on(cancel.tenant)
            if not repeats:
                self.transactions.submit(Settlement(cancel.claim, (told,)))
                return
            self.transactions.note((told,))
        self._await(cancel, {*(answer.claim for answer in answers), *repeats})

    def on_committed(self, settled: Iterable[Settlement]) -> None:
        """Settle the cancels whose requests are all committed now."""
        if not self._found_by:
            return
        for settlement in settled:
            key = self._found_by.pop(settlement.claim, None)
            if key is not None:
                unfinished = self._unfinished[key]
                unfinished.requests.discard(settlement.claim)
                if not unfinished.requests:
                    self._finish(key)

    def discard(self, is_current: Callable[[Claim], bool]) -> None:
        """Drop the claims of revoked partitions: their new owner reads the requests and cancels again."""
        for key, unfinished in list(self._unfinished.items()):
            unfinished.cancels = [claim for claim in unfinished.cancels if is_current(claim)]
            for claim in [claim for claim in unfinished.requests if not is_current(claim)]:
                unfinished.requests.discard(claim)
                del self._found_by[claim]
            if not unfinished.requests:
                self._finish(key)

    def _answer(self, queued: QueuedRequest, cancel: CancelCommand, taken: Admitted | None, now_ms: int) -> Settlement:
        if taken is None:
            return Settlement(queued.claim, self.writer.cancelled(queued, cancel, now_ms))
        outputs = self.writer.cancelled(queued, cancel, now_ms, taken.inputs)
        return Settlement(queued.claim, (*outputs, *taken.degraded))

    def _await(self, cancel: CancelCommand, requests: set[Claim]) -> None:
        key = cancel.tenant, cancel.request_id
        unfinished = self._unfinished.setdefault(key, _Unfinished())
        unfinished.cancels.append(cancel.claim)
        unfinished.requests |= requests
        self._found_by.update(dict.fromkeys(requests, key))

    def _finish(self, key: tuple[str, str]) -> None:
        self.transactions.submit_many([Settlement(claim) for claim in self._unfinished.pop(key).cancels])

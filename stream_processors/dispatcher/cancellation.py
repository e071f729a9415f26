"""Cancellation: answer requests still waiting here; publish the cancel to consumers otherwise."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fairlane.outcomes import Decision
from fairlane.ownership import Claim, Ownership
from fairlane.schema_registry import RegistryError
from fairlane_server.kafka.transactions import Settlement
from stream_processors.dispatcher.admission.stage import AdmissionInbox
from stream_processors.dispatcher.deduplication.stage import DeduplicationStage
from stream_processors.dispatcher.enrichment.stage import EnrichmentStage
from stream_processors.dispatcher.intake.classifier import RecordClassifier
from stream_processors.dispatcher.output.stage import OutputStage
from stream_processors.dispatcher.queued_request import CancelCommand, QueuedRequest, ReceivedRecord
from stream_processors.dispatcher.response_cache.stage import ResponseCacheStage
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

    ownership: Ownership
    classifier: RecordClassifier
    deduplication: DeduplicationStage
    response_cache: ResponseCacheStage
    inbox: AdmissionInbox
    scheduler: Scheduler[QueuedRequest]
    enrichment: EnrichmentStage
    output: OutputStage
    _unfinished: dict[tuple[str, str], _Unfinished] = field(default_factory=dict)
    """By tenant and request id."""
    _found_by: dict[Claim, tuple[str, str]] = field(default_factory=dict)
    """The requests of ``_unfinished``, with their key there."""

    async def submit(self, cancels: Sequence[tuple[CancelCommand, ReceivedRecord]]) -> None:
        """Carry out cancels. Pending rejections are sent first."""
        if not cancels:
            return
        while self.output.is_pending:
            await self.output.send()
        for cancel, record in cancels:
            if self.ownership.is_current(cancel.claim):
                try:
                    self._carry_out(cancel)
                except RegistryError:
                    raise
                except Exception as error:  # noqa: BLE001 - one record must not end intake, which would re-read it at once
                    self.output.transactions.submit(Settlement(cancel.claim, self.classifier.broken(record, error)))

    def _carry_out(self, cancel: CancelCommand) -> None:
        """Cancel all requests of this id sent before the cancel, wherever they wait."""
        now_ms = self.output.clock()
        for queued in self.enrichment.take_back(cancel.concerns):
            self.scheduler.refund(queued)
            self.scheduler.push(queued)
        waiting = [one for one in self.scheduler.find(cancel.tenant, cancel.request_id) if cancel.concerns(one)]
        looked_up = self.response_cache.find(cancel.tenant, cancel.request_id)
        not_admitted = [*(one.queued for one in self.inbox), *looked_up]
        not_admitted = [queued for queued in not_admitted if cancel.concerns(queued)]
        answers = []
        for one in waiting:
            admission_inputs, degraded = self.output.take_admission(one.claim)
            outputs = self.output.writer.cancelled(one, cancel, now_ms, admission_inputs)
            answers.append(Settlement(one.claim, (*outputs, *degraded)))
        answers += [
            Settlement(one.claim, self.output.writer.cancelled(one, cancel, now_ms, was_admitted=False))
            for one in not_admitted
        ]
        published = self.output.writer.cancellation(cancel)
        # A duplicate's first request is elsewhere; the duplicate is settled once the outcome of the first is known.
        duplicates = self.deduplication.cancel(cancel)
        self.scheduler.discard([one.claim for one in waiting])
        self.inbox.keep(lambda one: not cancel.concerns(one.queued))
        self.response_cache.drop(queued.claim for queued in not_admitted)
        self.output.answered(waiting)
        for _ in answers:
            self.output.counts.decided(cancel.tenant, Decision.CANCELLED)
        self.output.transactions.submit_many(answers)
        if not answers:
            self.output.counts.cancel_passed_on(cancel.tenant)
            if not duplicates:
                self.output.transactions.submit(Settlement(cancel.claim, (published,)))
                return
            self.output.transactions.note((published,))
        key, requests = (cancel.tenant, cancel.request_id), {*(answer.claim for answer in answers), *duplicates}
        unfinished = self._unfinished.setdefault(key, _Unfinished())
        unfinished.cancels.append(cancel.claim)
        unfinished.requests |= requests
        self._found_by.update(dict.fromkeys(requests, key))

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

    def _finish(self, key: tuple[str, str]) -> None:
        self.output.transactions.submit_many([Settlement(claim) for claim in self._unfinished.pop(key).cancels])

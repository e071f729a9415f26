"""What waited for its turn and is not served: too late, or by nobody any more. Each is answered once, with a reason."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fairlane.outcomes import Code, Decision
from fairlane.ownership import Claim
from fairlane_server.kafka.transactions import OutRecord, Settlement, TransactionLoop
from stream_processors.dispatcher.admitter import Admitter
from stream_processors.dispatcher.counts import DecisionCounts
from stream_processors.dispatcher.decisions import DecisionWriter
from stream_processors.dispatcher.duplicates import DuplicateIndex
from stream_processors.dispatcher.queued_request import QueuedRequest
from stream_processors.dispatcher.scheduling.tenant_stats import TenantStats
from stream_processors.dispatcher.validation import Refusal


@dataclass(slots=True)
class Unserved:
    """What expired is answered at once. A refusal goes out with ``send``: whoever reads it may send the same id again
    at once, so that is forgotten, and given back to its quota, before."""

    transactions: TransactionLoop
    admitter: Admitter
    writer: DecisionWriter
    counts: DecisionCounts
    stats: TenantStats
    duplicates: DuplicateIndex
    _refused: list[tuple[QueuedRequest, Settlement]] = field(default_factory=list)
    """With its answer, which was not sent yet."""
    _answered: list[QueuedRequest] = field(default_factory=list)
    """What expired or was cancelled, and has still to be given back to its quota."""

    def answer_late(self, late: Sequence[QueuedRequest], now_ms: int) -> None:
        """These cannot be done in time any more, or have expired."""
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
        """These waited, and are answered for good: what they took of quotas is given back with the next ``send``."""
        self._answered.extend(gone)

    def refuse(self, queued: QueuedRequest, refusal: Refusal, now_ms: int) -> None:
        """This one waited, and nobody serves it any more."""
        self._refused.append((queued, Settlement(queued.claim, self.not_served(queued, refusal, now_ms))))

    async def send(self) -> None:
        """Send what is still to be sent."""
        refused, self._refused = self._refused, []
        answered, self._answered = self._answered, []
        if refused:
            await self.duplicates.forget([queued.seen for queued, _ in refused])
        await self.admitter.give_back([*answered, *(queued for queued, _ in refused)])
        if refused:
            self.transactions.submit_many([settlement for _, settlement in refused])

    def discard(self, is_current: Callable[[Claim], bool]) -> list[QueuedRequest]:
        """Take out and return what was not sent yet, of partitions that moved on: who owns them decides again."""
        gone = [queued for queued, _ in self._refused if not is_current(queued.claim)]
        self._refused = [refused for refused in self._refused if is_current(refused[0].claim)]
        return gone

    def __bool__(self) -> bool:
        """Whether ``send`` has anything to do."""
        return bool(self._refused or self._answered)

    def late(self, queued: QueuedRequest, now_ms: int) -> Settlement:
        """The answer to one that is too late."""
        if now_ms > queued.deadline_at_ms:
            self.counts.decided(queued.tenant, Decision.EXPIRED)
        else:
            self.counts.decided(queued.tenant, Decision.REFUSED, Code.DEADLINE_UNMEETABLE)
            self.stats.shed(queued.tenant, queued.pool, Code.DEADLINE_UNMEETABLE, now_ms)
        return Settlement(queued.claim, self.writer.late(queued, self.admitter.retry_after_ms(queued, now_ms), now_ms))

    def not_served(self, queued: QueuedRequest, refusal: Refusal, now_ms: int) -> tuple[OutRecord, ...]:
        """The answer to one that nobody serves any more."""
        self.counts.decided(queued.tenant, Decision.REFUSED, refusal.code)
        self.stats.shed(queued.tenant, queued.pool, refusal.code, now_ms)
        return self.writer.not_served(queued, refusal, now_ms)

"""Deduplication stage: passes on first requests. A duplicate gets a copy of the first request's reply, no reply (the
first is still running, or its reply is gone) or a temporary rejection, or goes on to admission."""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from fairlane.backoff import Backoff, jittered_ms
from fairlane.outcomes import Code, Decision, Outcome
from fairlane.ownership import Claim, Ownership
from fairlane.records import InferenceReply, SourceCoordinate
from fairlane_server.kafka.transactions import Settlement
from stream_processors.dispatcher.admission.stage import AdmissionInbox
from stream_processors.dispatcher.deduplication.duplicates import (
    Duplicate,
    DuplicateQueues,
    RecentResult,
)
from stream_processors.dispatcher.output.stage import OutputStage
from stream_processors.dispatcher.queued_request import CancelCommand, Candidate, QueuedRequest
from stream_processors.dispatcher.response_cache.stage import ResponseCacheStage
from stream_processors.dispatcher.scheduling.scheduler import Scheduler

HELD_FOR_MS = 10_000
"""How long a duplicate may stay undecided. An undecided record holds back its partition's committed offset, and a
partition with 20,000 undone records behind it is paused."""

RETRY_AFTER_MS = 5_000
_RETRY_JITTER = 0.5
_LOOK_EVERY_MS = 500
_UNDER_WAY_FOR_MS = 500

_RETRYABLE_CODES = frozenset(
    {
        *(Code.OVERLOADED, Code.DEADLINE_UNMEETABLE, Code.QUOTA_EXCEEDED, Code.DRAINING),
        *(Code.INSUFFICIENT_QUOTA, Code.BUDGET_UNKNOWN, Code.GUARDRAIL_UNAVAILABLE),
    }
)
"""Codes of rejections after which the same request may be sent again."""


class ReplyUnknownError(Exception):
    """The look-up of a reply failed; the message says why."""


class ReplyGoneError(Exception):
    """The request was answered, and its reply is no longer readable from the log."""


class ReplyArchive(Protocol):
    """Look-up of committed replies."""

    async def find(self, tenant: str, request_id: str, source: SourceCoordinate) -> InferenceReply | None:
        """The committed reply to the request at ``source``; None if none is recorded yet.

        Raises ReplyUnknownError when the look-up fails, and ReplyGoneError when the request was answered but its reply
        is lost.
        """


@dataclass(slots=True)
class DeduplicationStage:
    """Looks up the first requests of duplicates, one after the other, in a task besides intake.

    Tenants take turns, each with its own queue. A duplicate is settled without a reply only when its first is known to
    be under way, or known to be answered with a reply that cannot be sent again. An unknown outcome is looked up again,
    and rejected for now after HELD_FOR_MS: a duplicate is never dropped, and never runs beside its first.

    A cancelled duplicate takes the same path, since its first may still be answered; but instead of being admitted or
    rejected for now it is answered as cancelled.
    """

    ownership: Ownership
    archive: ReplyArchive
    inbox: AdmissionInbox
    scheduler: Scheduler[QueuedRequest]
    response_cache: ResponseCacheStage
    output: OutputStage
    queues: DuplicateQueues = field(default_factory=DuplicateQueues)
    backoff: Backoff = field(default_factory=Backoff)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _deciding: Duplicate | None = None
    """Taken from its queue, look-up running."""
    _cancelled: dict[Claim, CancelCommand] = field(default_factory=dict)
    """Cancels by the claim of the waiting duplicate."""
    _failures: int = 0
    """Consecutive failed look-ups."""
    _resumes_at_ms: float = 0.0
    _under_way: frozenset[SourceCoordinate] = frozenset()
    _under_way_at_ms: float = float("-inf")
    _looked_at_ms: float = float("-inf")

    async def submit(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Return the requests whose id was not accepted before. Duplicates are queued for look-up; beyond the bounds,
        one of the tenant that holds most is rejected for now."""
        if not candidates:
            return []
        firsts = await self.output.accepted_ids.first_seen([one.queued.seen for one in candidates])
        fresh: list[Candidate] = []
        for candidate, first in zip(candidates, firsts, strict=True):
            if not self.ownership.is_current(candidate.claim):
                continue
            if first is None:
                fresh.append(candidate)
            else:
                self._put(Duplicate(candidate, first, self.output.clock()))
        return fresh

    def discard(self, is_current: Callable[[Claim], bool]) -> None:
        """Drop duplicates of revoked partitions; their new owner reads them again."""
        self.queues.take_where(lambda duplicate: not is_current(duplicate.queued.claim))
        self._cancelled = {claim: cancel for claim, cancel in self._cancelled.items() if is_current(claim)}

    def cancel(self, cancel: CancelCommand) -> list[Claim]:
        """Mark the duplicates this cancel concerns, so that they do not run. Returns their claims; each is settled once
        its first's outcome is known."""
        waiting = self.queues.find(cancel.tenant, cancel.request_id)
        if self._deciding is not None:
            waiting = (*waiting, self._deciding.queued)
        found = [queued.claim for queued in waiting if cancel.concerns(queued)]
        self._cancelled.update(dict.fromkeys(found, cancel))
        return found

    def crowded(self) -> set[str]:
        """Tenants with so many waiting duplicates that their backfill should be paused."""
        return self.queues.crowded()

    async def run(self) -> None:
        """Settle duplicates for ever. If the first was rejected for now, the duplicate replaces it in ``accepted_ids``
        and goes on to the inbox of admission."""
        while True:
            self._arrived.clear()
            now_ms = self.output.clock()
            if now_ms - self._looked_at_ms >= _LOOK_EVERY_MS:
                self._looked_at_ms = now_ms
                for held in self.queues.take_older(now_ms - HELD_FOR_MS):
                    self._give_up(held)
            duplicate = self._deciding = self.queues.take(now_ms) if now_ms >= self._resumes_at_ms else None
            if duplicate is not None:
                await self._decide(duplicate)
                self._deciding = None
            elif self.queues:
                # A duplicate waits for its next look-up or its give-up time.
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._arrived.wait(), self._wait_s(now_ms))
            else:
                await self._arrived.wait()

    async def _decide(self, duplicate: Duplicate) -> None:
        queued, first = duplicate.queued, duplicate.first
        try:
            reply = await self.archive.find(queued.tenant, queued.request_id, first)
        except ReplyGoneError:
            self._settle(queued, first, None)
            return
        except ReplyUnknownError:
            # The archive is unavailable: delay all look-ups, not this one only.
            self._failures += 1
            self._resumes_at_ms = self.output.clock() + self._delay_ms(self._failures)
            await self._ask_again(duplicate)
            return
        self._failures = 0
        if reply is None:
            await self._ask_again(duplicate)
        elif reply.outcome != Outcome.REJECTED or reply.code not in _RETRYABLE_CODES:
            self._settle(queued, first, reply)
        else:
            await self._try_again(duplicate)

    async def _ask_again(self, duplicate: Duplicate) -> None:
        """Handle an unknown reply: the first is under way, the recorder lags, or the archive is unavailable."""
        queued = duplicate.queued
        if self._is_under_way(duplicate.first):
            self._settle(queued, duplicate.first, None)
        elif self.response_cache.recent_results.get((queued.tenant, queued.request_id)) is RecentResult.REFUSED_FOR_NOW:
            await self._try_again(duplicate)
        else:
            tries = duplicate.tries + 1
            self._put(replace(duplicate, tries=tries, due_ms=self.output.clock() + self._delay_ms(tries)))

    async def _try_again(self, duplicate: Duplicate) -> None:
        queued, first = duplicate.queued, duplicate.first
        self.response_cache.recent_results.pop((queued.tenant, queued.request_id), None)
        await self.output.accepted_ids.forget([(queued.tenant, queued.request_id, first)])
        (now_first,) = await self.output.accepted_ids.first_seen([queued.seen])
        if now_first is None or now_first == first:
            # An index that still returns the first (failed deletion) must not cause an endless loop.
            cancel = self._cancelled.pop(queued.claim, None)
            if cancel is None:
                self.inbox.put(duplicate.candidate)
            else:
                self._answer_cancelled(queued, cancel)
        else:
            self._put(replace(duplicate, first=now_first, tries=0))

    def _put(self, duplicate: Duplicate) -> None:
        self._arrived.set()
        for pushed_out in self.queues.put(duplicate):
            self._give_up(pushed_out)

    def _give_up(self, duplicate: Duplicate) -> None:
        """Settle a duplicate whose first's reply cannot be looked up in time."""
        queued = duplicate.queued
        is_answered = (
            self.response_cache.recent_results.get((queued.tenant, queued.request_id)) is RecentResult.ANSWERED
        )
        if is_answered or self._is_under_way(duplicate.first):
            self._settle(queued, duplicate.first, None)
            return
        cancel = self._cancelled.pop(queued.claim, None)
        if cancel is not None:
            self._answer_cancelled(queued, cancel)
            return
        self.output.counts.decided(queued.tenant, Decision.REFUSED, Code.OVERLOADED)
        place = f"{duplicate.first.topic}-{duplicate.first.partition}@{duplicate.first.offset}"
        outputs = self.output.writer.shed(
            queued,
            Code.OVERLOADED,
            "this id was sent before, and what became of that cannot be looked up now",
            jittered_ms(RETRY_AFTER_MS, _RETRY_JITTER, queued.request_id),
            {"first": place, "look_ups": duplicate.tries, "held_ms": self.output.clock() - duplicate.since_ms},
            self.output.clock(),
        )
        self.output.transactions.submit(Settlement(queued.claim, outputs))

    def _answer_cancelled(self, queued: QueuedRequest, cancel: CancelCommand) -> None:
        self.output.counts.decided(queued.tenant, Decision.CANCELLED)
        outputs = self.output.writer.cancelled(queued, cancel, self.output.clock(), was_admitted=False)
        self.output.transactions.submit(Settlement(queued.claim, outputs))

    def _settle(self, queued: QueuedRequest, first: SourceCoordinate, reply: InferenceReply | None) -> None:
        self._cancelled.pop(queued.claim, None)
        self.output.counts.decided(queued.tenant, Decision.DUPLICATE)
        replayed = None if reply is None else (queued.reply_topic, replace(reply, replayed=True))
        outputs = self.output.writer.duplicate(queued, first, replayed, self.output.clock())
        self.output.transactions.submit(Settlement(queued.claim, outputs))

    def _is_under_way(self, first: SourceCoordinate) -> bool:
        """Whether the first waits here or is in flight anywhere: then its own reply is still to come."""
        now_ms = self.output.clock()
        if now_ms - self._under_way_at_ms >= _UNDER_WAY_FOR_MS:
            claims = (*self.scheduler.claims(), *(queued.claim for queued in self.response_cache.held()))
            waiting = (claim.coordinate for claim in claims)
            self._under_way = frozenset((*waiting, *self.scheduler.in_flight.sources()))
            self._under_way_at_ms = now_ms
        return first in self._under_way

    def _wait_s(self, now_ms: int) -> float:
        due_ms = max(self._resumes_at_ms, self.queues.next_due_ms)
        return min(_LOOK_EVERY_MS, max(1.0, due_ms - now_ms)) / 1_000

    def _delay_ms(self, failures: int) -> float:
        return self.backoff.delay_s(failures, random.random()) * 1_000  # noqa: S311 - jitter, no secret

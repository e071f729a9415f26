"""Retries of requests: the policy, and the requests that wait for their next try."""

import heapq
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

from fairlane.backoff import Backoff
from fairlane.client.handle import Handle
from fairlane.client.ports import KafkaHeaders
from fairlane.clock import ClockMs
from fairlane.errors import PublishFailed
from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply, InferenceRequest

_JITTER = 0.2


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and for how long a client tries again, by itself and under the same request id.

    Tried again are requests that were refused with a retry time, never before that time, and those of which the broker
    did not say whether they got into the log. The service runs one id once, so none of this runs anything twice. All
    else is final: a request that is wrong, expired, cancelled or failed.

    >>> with Client(tenant="acme", retries=RetryPolicy(tries=8, within_ms=120_000)) as patient:
    ...     once = patient.submit(model="smollm2-135m-instruct", prompt="2 + 2 = ?", retries=RetryPolicy(tries=1))
    ...     print(once.result(timeout=30).output.text)
    4

    Attributes:
        tries: how often a request is published at most, the first time included.
        within_ms: a request is not published again later than this after its submit, nor after its ``timeout_ms``.
        longest_wait_ms: who is told to come back later than this is given the refusal instead.

    Raises:
        ValueError: a bound is below 1.
    """

    tries: int = 5
    within_ms: int = 60_000
    longest_wait_ms: int = 30_000

    def __post_init__(self) -> None:
        for name in ("tries", "within_ms", "longest_wait_ms"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")

    def wait_after_refusal_ms(
        self, reply: InferenceReply, tries: int, elapsed_ms: int, timeout_ms: int | None, chance: float
    ) -> int | None:
        """How long to wait before a request that was answered like this is published again; None if it is not.

        ``tries`` were made in ``elapsed_ms`` since the submit, ``timeout_ms`` is the request's own, ``chance`` a random
        number in [0, 1): the wait is lengthened by up to a fifth, so that those refused together come back apart.
        """
        if reply.outcome != Outcome.REJECTED or reply.retry_after_ms is None:
            return None
        if reply.retry_after_ms > self.longest_wait_ms:
            return None
        # The backoff is the least: a service that says "at once" every time is not asked in a circle.
        least_ms = max(reply.retry_after_ms, _least_ms(tries, chance))
        return self._allowed(round(least_ms * (1 + _JITTER * chance)), tries, elapsed_ms, timeout_ms)

    def wait_after_lost_ms(self, tries: int, elapsed_ms: int, timeout_ms: int | None, chance: float) -> int | None:
        """The same for a request of which it is not known whether it is in the log."""
        return self._allowed(_least_ms(tries, chance), tries, elapsed_ms, timeout_ms)

    def _allowed(self, wait_ms: int, tries: int, elapsed_ms: int, timeout_ms: int | None) -> int | None:
        last_ms = self.within_ms if timeout_ms is None else min(self.within_ms, timeout_ms - 1)
        return wait_ms if tries < self.tries and elapsed_ms + wait_ms <= last_ms else None


NO_RETRIES = RetryPolicy(tries=1)
"""Every request is published once, and every refusal is the caller's. So it is by default."""


def _least_ms(tries: int, chance: float) -> int:
    return round(Backoff(first_s=0.1, longest_s=5.0).delay_s(tries, chance) * 1_000)


@dataclass(slots=True)
class Attempts:
    """What is needed to publish a request again, and what became of it so far.

    Attributes:
        ending: until its next try begins, what its handle gets if there is none; None while it is under way.
        due_ms: when that try is, by the clock of :class:`Retrier`.
        lost: whether the latest publication was not acknowledged, and will not be.
    """

    policy: RetryPolicy
    request: InferenceRequest
    headers: KafkaHeaders
    began_ms: int
    tries: int = 1
    ending: InferenceReply | PublishFailed | None = None
    due_ms: int = 0
    lost: bool = False

    def request_at(self, now_ms: int) -> InferenceRequest | None:
        """The request with what is left of its time: its deadline counts from the broker's receipt, and stays where it
        was. None when nothing is left."""
        timeout_ms = self.request.timeout_ms
        if timeout_ms is None:
            return self.request
        left_ms = timeout_ms - (now_ms - self.began_ms)
        return replace(self.request, timeout_ms=left_ms) if left_ms > 0 else None


class Retrier:
    """Which handles wait for their next try, and until when. Thread-safe; holds what ``max_in_flight`` bounds.

    Args:
        clock: never goes back.
        chance: a random number in [0, 1).
    """

    def __init__(self, clock: ClockMs, chance: Callable[[], float]) -> None:
        self._clock = clock
        self._chance = chance
        self._lock = threading.Lock()
        self._order = count()
        self._due: list[tuple[int, int, Handle]] = []
        self._closed = False
        self.retried = 0

    @property
    def now_ms(self) -> int:
        """By its clock."""
        return self._clock()

    def keeps_refused(self, handle: Handle, reply: InferenceReply) -> bool:
        """Whether this reply is not the end of the request: it is published again, or it waits for that already."""
        attempts = handle.attempts
        if attempts is None:
            return False
        with self._lock:
            elapsed_ms, chance = self._clock() - attempts.began_ms, self._chance()
            timeout_ms = attempts.request.timeout_ms
            wait_ms = attempts.policy.wait_after_refusal_ms(reply, attempts.tries, elapsed_ms, timeout_ms, chance)
            return wait_ms is not None and self._keeps(handle, attempts, reply, wait_ms)

    def keeps_lost(self, handle: Handle, failure: PublishFailed) -> bool:
        """Whether this failure is not the end of the request: it is published again."""
        attempts = handle.attempts
        if attempts is None:
            return False
        with self._lock:
            elapsed_ms, chance = self._clock() - attempts.began_ms, self._chance()
            timeout_ms = attempts.request.timeout_ms
            wait_ms = attempts.policy.wait_after_lost_ms(attempts.tries, elapsed_ms, timeout_ms, chance)
            attempts.lost = wait_ms is not None and self._keeps(handle, attempts, failure, wait_ms)
            return attempts.lost

    def take_due(self) -> list[Handle]:
        """Those whose time has come, for ``begin_try``; each is given out once."""
        if not self._due:
            return []
        taken, over = [], []
        with self._lock:
            now_ms = self._clock()
            while self._due and self._due[0][0] <= now_ms:
                due_ms, _, handle = heapq.heappop(self._due)
                attempts = handle.attempts
                # What was answered or given up meanwhile stands here until its time.
                if attempts is None or attempts.ending is None or attempts.due_ms != due_ms:
                    continue
                if handle.over:
                    attempts.ending = None
                    over.append(handle)
                else:
                    taken.append(handle)
        for handle in over:
            handle.keep_published(None, None)  # its reply came when it was taken for lost: it is in the log
        return taken

    def begin_try(self, handle: Handle) -> bool:
        """One more try from now on; False: this one waits for none any more."""
        attempts = handle.attempts
        if attempts is None:
            return False
        with self._lock:
            if attempts.ending is None:
                return False
            attempts.ending = None
            attempts.tries += 1
            attempts.lost = False
            self.retried += 1
            return True

    def give_up(self, handle: Handle) -> InferenceReply | PublishFailed | None:
        """No more tries of this one: what it ends with if it waited for one, None if it did not."""
        attempts = handle.attempts
        if attempts is None:
            return None
        with self._lock:
            ending, attempts.ending = attempts.ending, None
            return ending

    def close(self) -> list[Handle]:
        """No more tries at all; those that waited for one."""
        with self._lock:
            self._closed = True
            waiting = [handle for _, _, handle in self._due]
            self._due = []
        return waiting

    def _keeps(self, handle: Handle, attempts: Attempts, ending: InferenceReply | PublishFailed, wait_ms: int) -> bool:
        if self._closed or handle.over or handle.cancel_sent_at_ms is not None:
            return False
        if attempts.ending is None:
            attempts.ending = ending
            attempts.due_ms = self._clock() + wait_ms
            heapq.heappush(self._due, (attempts.due_ms, next(self._order), handle))
        return True

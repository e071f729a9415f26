"""Open requests of a client: by id with the room they take, and those that wait for their next try."""

import heapq
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

from fairlane.client.handle import Handle
from fairlane.client.ports import KafkaHeaders
from fairlane.client.retry_policies import RetryPolicy
from fairlane.client.window import Window
from fairlane.clock import ClockMs
from fairlane.errors import AnsweredElsewhere, FairlaneError, PublishFailed
from fairlane.records import InferenceReply, InferenceRequest


@dataclass(slots=True)
class Attempts:
    """State of a request that may be published again.

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


class OpenHandles:
    """Thread-safe. Who takes a handle out of it gives back its room: one place in flight, and what of its bytes it
    holds until it is over.

    Args:
        reply_topic: the one whose replies come here.
        window: what the room was taken from.
        retrier: knows which replies are not the end.
    """

    def __init__(self, reply_topic: str, window: Window, retrier: Retrier) -> None:
        self._reply_topic = reply_topic
        self._window = window
        self._retrier = retrier
        self._lock = threading.Lock()
        self._open: dict[str, list[Handle]] = {}
        self._ended: FairlaneError | None = None
        self.answered = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __len__(self) -> int:
        """Number of ids."""
        return len(self._open)

    def raise_if_ended(self) -> None:
        """Raises what ``end`` was given."""
        if self._ended is not None:
            raise self._ended

    def end(self, error: FairlaneError) -> None:
        """Take none in any more; the first error is the one that is raised for it."""
        with self._lock:
            self._ended = self._ended or error
        self._window.close(error)

    def enter(self, handle: Handle) -> None:
        """Take it in. Raises what ``end`` was given."""
        with self._lock:
            self.raise_if_ended()
            self._open.setdefault(handle.request_id, []).append(handle)
        if handle.reply_to != self._reply_topic:
            # It stays in the table until it is published, so that it fails with the client if the client fails.
            handle.break_reply(AnsweredElsewhere(handle.request_id, handle.reply_to))

    def leave(self, handle: Handle) -> bool:
        """Remove it and release its room; False if it was already removed."""
        with self._lock:
            same_id = self._open.get(handle.request_id, [])
            if handle not in same_id:
                return False
            same_id.remove(handle)
            if not same_id:
                del self._open[handle.request_id]
        self._give_back([handle])
        return True

    def finish(self, handle: Handle, ending: InferenceReply | PublishFailed, now_ms: int) -> bool:
        """Remove it and set its result; False if it was already removed."""
        if not self.leave(handle):
            return False
        if isinstance(ending, InferenceReply):
            with self._lock:
                self.answered += 1
            handle.keep_reply(ending, now_ms)
        else:
            handle.fail(ending)
        return True

    def published(self, handle: Handle) -> None:
        """It is in the log: one that is answered elsewhere is over."""
        if handle.reply_to != self._reply_topic:
            self.leave(handle)

    def settle(self, reply: InferenceReply, received_at_ms: int) -> None:
        """A reply came."""
        with self._lock:
            handles = self._open.pop(reply.request_id, [])
            kept = [handle for handle in handles if self._retrier.keeps_refused(handle, reply)]
            if kept:
                self._open[reply.request_id] = kept
                handles = [handle for handle in handles if handle not in kept]
            self.answered += len(handles)
        # The room first: whoever is told of the reply finds it free.
        self._give_back(handles)
        for handle in handles:
            self._retrier.give_up(handle)
            if handle.attempts is not None and handle.attempts.lost:
                handle.keep_published(None, None)  # and yet it is in the log
            handle.keep_reply(reply, received_at_ms)

    def fail_all(self, error: FairlaneError) -> None:
        """Fail all open handles with this error."""
        with self._lock:
            handles = [handle for same_id in self._open.values() for handle in same_id]
            self._open.clear()
        self._give_back(handles)
        for handle in handles:
            handle.fail(error)

    def _give_back(self, handles: list[Handle]) -> None:
        self._window.release(requests=len(handles), buffered_bytes=sum(handle.held_bytes for handle in handles))

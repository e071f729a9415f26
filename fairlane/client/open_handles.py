"""Open requests of a client by id, and the room they take."""

import threading

from fairlane.client.handle import Handle
from fairlane.client.retries import Retrier
from fairlane.client.window import Window
from fairlane.errors import AnsweredElsewhere, FairlaneError, PublishFailed
from fairlane.records import InferenceReply


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
        """How many ids."""
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
        """Take it out, with its room; False when somebody else did."""
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
        """Take it out and give it what it ends with; False when somebody else did."""
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
        """Nobody will hear of any of them any more."""
        with self._lock:
            handles = [handle for same_id in self._open.values() for handle in same_id]
            self._open.clear()
        self._give_back(handles)
        for handle in handles:
            handle.fail(error)

    def _give_back(self, handles: list[Handle]) -> None:
        self._window.release(requests=len(handles), buffered_bytes=sum(handle.held_bytes for handle in handles))

"""The client's bound on unanswered requests and unacknowledged bytes."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Waiter:
    """A place in the line of :class:`Window`. ``granted`` or ``error`` is set before ``wake`` is called."""

    size_bytes: int
    wake: Callable[[], None]
    granted: bool = False
    error: Exception | None = None


class Window:
    """Admits requests while fewer than ``max_in_flight`` are unanswered and ``max_buffered_bytes`` unpublished.

    First come, first served: released room goes to the head of the line at once. A
    request larger than the byte bound is admitted when nothing else is buffered. Thread-safe; no callback is called
    with the lock held.
    """

    def __init__(self, max_in_flight: int, max_buffered_bytes: int) -> None:
        self._max_in_flight = max_in_flight
        self._max_buffered_bytes = max_buffered_bytes
        self._lock = threading.Lock()
        self._line: deque[Waiter] = deque()
        self.in_flight = 0
        """Requests admitted and not released."""
        self.buffered_bytes = 0
        """Bytes admitted and not released."""
        self._error: Exception | None = None

    def try_acquire(self, size_bytes: int) -> bool:
        """Admit a request of this size if there is room and no queue. Raises the error that the window closed with."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._line or not self._has_room(size_bytes):
                return False
            self._take(size_bytes)
            return True

    def enqueue(self, size_bytes: int, wake: Callable[[], None]) -> Waiter:
        """Wait in line: ``wake`` is called once, from any thread, when the place is granted or the window closes."""
        place = Waiter(size_bytes, wake)
        with self._lock:
            self._line.append(place)
            woken = self._serve_waiters()
        _wake(woken)
        return place

    def dequeue(self, place: Waiter) -> None:
        """Give up waiting; what was granted meanwhile goes to the next in line."""
        with self._lock:
            if place.granted:
                self.in_flight -= 1
                self.buffered_bytes -= place.size_bytes
            elif place in self._line:
                self._line.remove(place)
            woken = self._serve_waiters()
        _wake(woken)

    def acquire(self, size_bytes: int, timeout_s: float) -> bool:
        """Like ``try_acquire``, waiting for room; False when there was none within ``timeout_s``."""
        if self.try_acquire(size_bytes):
            return True
        event = threading.Event()
        place = self.enqueue(size_bytes, event.set)
        try:
            event.wait(timeout_s)
        except BaseException:  # KeyboardInterrupt: the place in the line must not be lost with the caller
            self.dequeue(place)
            raise
        return self.claim(place)

    def claim(self, place: Waiter) -> bool:
        """End the wait: whether the place was granted; if not, it leaves the line. Raises the closing error."""
        with self._lock:
            if place.error is not None:
                raise place.error
            if place.granted:
                return True
        self.dequeue(place)
        return False

    def release(self, requests: int = 0, buffered_bytes: int = 0) -> None:
        """Give back what was acquired."""
        with self._lock:
            self.in_flight -= requests
            self.buffered_bytes -= buffered_bytes
            woken = self._serve_waiters() if self._line else ()
        _wake(woken)

    def close(self, error: Exception) -> None:
        """Admit nothing more; all waiting and later requests get this error."""
        with self._lock:
            if self._error is None:
                self._error = error
            woken = self._serve_waiters()
        _wake(woken)

    def _serve_waiters(self) -> list[Waiter]:
        woken = []
        while self._line:
            head = self._line[0]
            if self._error is not None:
                head.error = self._error
            elif self._has_room(head.size_bytes):
                self._take(head.size_bytes)
                head.granted = True
            else:
                break
            woken.append(self._line.popleft())
        return woken

    def _has_room(self, size_bytes: int) -> bool:
        if self.in_flight >= self._max_in_flight:
            return False
        return self.buffered_bytes == 0 or self.buffered_bytes + size_bytes <= self._max_buffered_bytes

    def _take(self, size_bytes: int) -> None:
        self.in_flight += 1
        self.buffered_bytes += size_bytes


def _wake(places: Iterable[Waiter]) -> None:
    for place in places:
        place.wake()

"""Work with a schema that is not loaded, held until the schema registry has answered."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import random
from time import monotonic

from confluent_kafka import Message

from fairlane import metrics
from fairlane.backoff import Backoff
from fairlane.codec import Codec
from fairlane.logs import get_logger
from fairlane.ownership import Claim
from fairlane.schema_registry import RegistryError

log = get_logger(__name__)

_AGAIN = Backoff(first_s=0.25, longest_s=10.0)
_EVERY_S = 1.0
_NEVER = float("-inf")


@dataclass(slots=True)
class SchemaWaits:
    """Records that wait, in order. All methods are called from the polling thread.

    One look-up reads all registered schemas, so it answers for every record that waited when it began. Each look-up has
    a daemon thread: an unavailable registry delays neither polling nor the exit of the process. Failed look-ups are
    retried with backoff, answered ones repeated at most once per second.
    """

    codec: Codec
    clock: Callable[[], float] = monotonic
    size_bytes: int = 0
    _records: deque[tuple[Claim, Message, float]] = field(default_factory=deque)
    """Each with the time it was added."""
    _look_up: Future[None] | None = None
    _began_at: float = _NEVER
    _answered_at: float = _NEVER
    """Start time of the last answered look-up."""
    _due_at: float = _NEVER
    _failures: int = 0

    def __len__(self) -> int:
        return len(self._records)

    def add(self, claim: Claim, message: Message) -> None:
        """Hold a record until ``take`` returns it."""
        self._records.append((claim, message, self.clock()))
        self._count(message, 1)

    def take(self) -> list[tuple[Claim, Message]]:
        """Remove the records whose schema is loaded or known to be unregistered; start a look-up if others remain.

        Raises whatever a look-up raised, except RegistryError.
        """
        self._finish_look_up()
        taken = self._remove(lambda entry: entry[2] <= self._answered_at or self.codec.is_loaded(entry[1].value()))
        if self._records and self._look_up is None and self.clock() >= self._due_at:
            self._began_at = self.clock()
            self._look_up = Future()
            threading.Thread(target=_refresh, args=(self.codec, self._look_up), name="schemas", daemon=True).start()
        return taken

    def discard(self, is_current: Callable[[Claim], bool]) -> None:
        """Drop records of revoked partitions; their new owner reads them again."""
        self._remove(lambda entry: not is_current(entry[0]))

    def _finish_look_up(self) -> None:
        if self._look_up is None or not self._look_up.done():
            return
        finished, self._look_up = self._look_up, None
        try:
            finished.result()
        except RegistryError as error:
            self._failures += 1
            self._due_at = self.clock() + _AGAIN.delay_s(self._failures, random())  # noqa: S311 - jitter, no secret
            metrics.SCHEMA_LOOKUPS.labels(outcome="failed").inc()
            log.warning("schemas_not_known", records=len(self._records), reason=str(error))
            return
        self._failures = 0
        self._answered_at, self._due_at = self._began_at, self._began_at + _EVERY_S
        metrics.SCHEMA_LOOKUPS.labels(outcome="answered").inc()

    def _remove(self, is_meant: Callable[[tuple[Claim, Message, float]], bool]) -> list[tuple[Claim, Message]]:
        removed: list[tuple[Claim, Message]] = []
        for _ in range(len(self._records)):
            entry = self._records.popleft()
            if is_meant(entry):
                removed.append((entry[0], entry[1]))
                self._count(entry[1], -1)
            else:
                self._records.append(entry)
        return removed

    def _count(self, message: Message, sign: int) -> None:
        self.size_bytes += sign * len(message.value() or b"")
        metrics.SCHEMA_WAITING_RECORDS.set(len(self._records))


def _refresh(codec: Codec, answer: Future[None]) -> None:
    try:
        codec.refresh()
    except Exception as error:  # noqa: BLE001 - raised again in ``take``
        answer.set_exception(error)
    else:
        answer.set_result(None)

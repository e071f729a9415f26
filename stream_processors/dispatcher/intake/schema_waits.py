"""Records waiting for an unknown schema, and the later records of their partitions. Other partitions do not wait.

One look-up reads all schemas registered under our subjects, so it answers for every record waiting when it began. There
is at most one per second: a flood of unknown ids costs the registry no more than one id. A look-up that began before a
record arrived does not answer for it, since its schema may have been registered in between. Unknown ids are therefore
not cached, and no tenant can make an id unusable for another by naming it too early.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import random
from time import monotonic

from fairlane import metrics
from fairlane.backoff import Backoff
from fairlane.codec import Codec
from fairlane.logs import get_logger
from fairlane.ownership import Claim, PartitionId
from fairlane.schema_registry import RegistryError
from stream_processors.dispatcher.queued_request import ReceivedRecord

log = get_logger(__name__)

_AGAIN = Backoff(first_s=0.25, longest_s=10.0)
_NEVER = float("-inf")
_ENOUGH_RECORDS, _ENOUGH_BYTES = 128, 1024 * 1024

ClaimedRecord = tuple[Claim, ReceivedRecord]


def _nothing() -> None: ...


@dataclass(slots=True)
class _Line:
    """A partition's waiting records in order, each with the time it was added."""

    records: deque[tuple[Claim, ReceivedRecord, float]] = field(default_factory=deque)
    size_bytes: int = 0


@dataclass(slots=True)
class SchemaWaitQueue:
    """Queues per partition. Runs on the event loop, except for the look-up itself, which has its own thread."""

    codec: Codec
    clock: Callable[[], float] = monotonic
    on_answer: Callable[[], None] = _nothing
    """Called when ``take`` may return records."""
    every_s: float = 1.0
    max_records: int = 16_384
    max_bytes: int = 64 * 1024 * 1024
    _lines: dict[PartitionId, _Line] = field(default_factory=dict)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _answered_at: float = _NEVER
    """Start time of the last answered look-up."""
    _count: int = 0
    _size_bytes: int = 0

    def __len__(self) -> int:
        return self._count

    def partitions(self) -> tuple[PartitionId, ...]:
        return tuple(self._lines)

    def crowded(self) -> set[PartitionId]:
        """The partitions to hold. Below the bounds reading goes on, since one look-up answers for all records."""
        return {
            partition
            for partition, line in self._lines.items()
            if len(line.records) >= _ENOUGH_RECORDS or line.size_bytes >= _ENOUGH_BYTES
        }

    def holds(self, partition: PartitionId) -> bool:
        """Whether new records of this partition must wait behind earlier ones."""
        return partition in self._lines

    def add(self, claim: Claim, arrival: ReceivedRecord) -> None:
        line = self._lines.setdefault(arrival.partition, _Line())
        line.records.append((claim, arrival, self.clock()))
        self._account(line, arrival, 1)
        self._arrived.set()

    def is_ready(self) -> bool:
        """Whether ``take`` would return a record."""
        return any(self._is_ready(line) for line in self._lines.values())

    def take(self, most: int) -> list[ClaimedRecord]:
        """Remove up to ``most`` records whose schema is loaded or known to be unregistered, an equal part per
        partition."""
        taken: list[ClaimedRecord] = []
        for partition, line in list(self._lines.items()):
            part = max(1, most // len(self._lines))
            while part and len(taken) < most and self._is_ready(line):
                taken.append(self._pop(line))
                part -= 1
            if not line.records:
                del self._lines[partition]
        return taken

    def take_excess(self) -> list[ClaimedRecord]:
        """Beyond the bounds, remove all records of the partitions with the most waiting bytes."""
        taken: list[ClaimedRecord] = []
        while self._count > self.max_records or self._size_bytes > self.max_bytes:
            partition = max(self._lines, key=lambda one: self._lines[one].size_bytes)
            line = self._lines.pop(partition)
            while line.records:
                taken.append(self._pop(line))
        return taken

    def discard(self, is_current: Callable[[Claim], bool]) -> None:
        """Drop records of revoked partitions; their new owner reads them again."""
        lines, self._lines = self._lines, {}
        self._count = self._size_bytes = 0
        for partition, line in lines.items():
            kept = _Line(deque(one for one in line.records if is_current(one[0])))
            for _, arrival, _ in kept.records:
                self._account(kept, arrival, 1)
            if kept.records:
                self._lines[partition] = kept
        metrics.SCHEMA_WAITING_RECORDS.set(self._count)

    async def run(self) -> None:
        """Look up schemas while records wait. Failed look-ups are retried with backoff."""
        failures = 0
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while any(not self._is_ready(line) for line in self._lines.values()):
                began = self.clock()
                try:
                    await self._look_up()
                except RegistryError as error:
                    failures += 1
                    metrics.SCHEMA_LOOKUPS.labels(outcome="failed").inc()
                    log.warning("schemas_not_known", partitions=len(self._lines), reason=str(error))
                    await asyncio.sleep(_AGAIN.delay_s(failures, random()))  # noqa: S311 - jitter, no secret
                    continue
                failures = 0
                metrics.SCHEMA_LOOKUPS.labels(outcome="answered").inc()
                self._answered_at = began
                self.on_answer()
                await asyncio.sleep(max(0.0, began + self.every_s - self.clock()))

    async def _look_up(self) -> None:
        """Refresh the codec's schemas on a daemon thread, so that a hanging registry does not delay process exit.
        Raises RegistryError."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def finish(error: Exception | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def look_up() -> None:
            failure: Exception | None = None
            try:
                self.codec.refresh()
            except Exception as error:  # noqa: BLE001 - raised again in ``run``
                failure = error
            with suppress(RuntimeError):  # the loop is closed: the result is not needed
                loop.call_soon_threadsafe(finish, failure)

        threading.Thread(target=look_up, name="schemas", daemon=True).start()
        await done

    def _is_ready(self, line: _Line) -> bool:
        if not line.records:
            return False
        _, arrival, since = line.records[0]
        return since <= self._answered_at or self.codec.is_loaded(arrival.value)

    def _pop(self, line: _Line) -> ClaimedRecord:
        claim, arrival, _ = line.records.popleft()
        self._account(line, arrival, -1)
        return claim, arrival

    def _account(self, line: _Line, arrival: ReceivedRecord, sign: int) -> None:
        size_bytes = sign * arrival.size_bytes
        line.size_bytes += size_bytes
        self._size_bytes += size_bytes
        self._count += sign
        metrics.SCHEMA_WAITING_RECORDS.set(self._count)

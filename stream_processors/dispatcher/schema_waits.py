"""Records whose schema has to be asked for, and what came behind them in their partition. Nobody else waits for them.

One look-up reads all that is registered under our own subjects, so it answers for every record that waits by then, and
there is at most one a second: a flood of unknown ids costs the registry no more than a single one. A look-up that began
before a record came says nothing about it, for its schema may have been registered in between; so nothing is remembered
of ids that are unknown, and no tenant can spoil an id for another by naming it too early.
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
from fairlane.registry import RegistryError
from stream_processors.dispatcher.arrival import Arrival

log = get_logger(__name__)

_AGAIN = Backoff(first_s=0.25, longest_s=10.0)
_NEVER = float("-inf")
_ENOUGH_RECORDS, _ENOUGH_BYTES = 128, 1024 * 1024

Waiting = tuple[Claim, Arrival]


def _nothing() -> None: ...


@dataclass(slots=True)
class _Line:
    """Of one partition, in the order of its records; each with the time when it came here."""

    records: deque[tuple[Claim, Arrival, float]] = field(default_factory=deque)
    size_bytes: int = 0


@dataclass(slots=True)
class SchemaWaits:
    """Everything here runs on the event loop but the look-up itself, which has a thread of its own."""

    codec: Codec
    clock: Callable[[], float] = monotonic
    on_answer: Callable[[], None] = _nothing
    """Told when there may be something to take."""
    every_s: float = 1.0
    max_records: int = 16_384
    max_bytes: int = 64 * 1024 * 1024
    _lines: dict[PartitionId, _Line] = field(default_factory=dict)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _answered_at: float = _NEVER
    """When the last look-up began that was answered."""
    _count: int = 0
    _size_bytes: int = 0

    def __len__(self) -> int:
        return self._count

    def partitions(self) -> tuple[PartitionId, ...]:
        """Those of which something waits."""
        return tuple(self._lines)

    def crowded(self) -> set[PartitionId]:
        """Those of which no more should be read for now. A few records more are one look-up's answer all the same."""
        return {
            partition
            for partition, line in self._lines.items()
            if len(line.records) >= _ENOUGH_RECORDS or line.size_bytes >= _ENOUGH_BYTES
        }

    def holds(self, partition: PartitionId) -> bool:
        """Whether what comes of this partition has to wait behind others."""
        return partition in self._lines

    def add(self, claim: Claim, arrival: Arrival) -> None:
        """It waits, behind what waits of its partition already."""
        line = self._lines.setdefault(arrival.partition, _Line())
        line.records.append((claim, arrival, self.clock()))
        self._account(line, arrival, 1)
        self._arrived.set()

    def is_ready(self) -> bool:
        """Whether ``take`` has something."""
        return any(self._is_ready(line) for line in self._lines.values())

    def take(self, most: int) -> list[Waiting]:
        """The next whose schemas are known, or known to be none; of no partition more than its part."""
        taken: list[Waiting] = []
        for partition, line in list(self._lines.items()):
            part = max(1, most // len(self._lines))
            while part and len(taken) < most and self._is_ready(line):
                taken.append(self._pop(line))
                part -= 1
            if not line.records:
                del self._lines[partition]
        return taken

    def take_excess(self) -> list[Waiting]:
        """What is beyond the bounds: of the partition of which most waits, all of it."""
        taken: list[Waiting] = []
        while self._count > self.max_records or self._size_bytes > self.max_bytes:
            partition = max(self._lines, key=lambda one: self._lines[one].size_bytes)
            line = self._lines.pop(partition)
            while line.records:
                taken.append(self._pop(line))
        return taken

    def discard(self, is_current: Callable[[Claim], bool]) -> None:
        """Drop what is of partitions that moved on; their new owner reads it again."""
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
        """Look up schemas while something waits for one. A registry that is away is asked again, ever more rarely."""
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
        """Raises RegistryError. On a daemon thread: the end of the process does not wait for a registry that hangs."""
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
            with suppress(RuntimeError):  # the loop is closed: nobody wants to know any more
                loop.call_soon_threadsafe(finish, failure)

        threading.Thread(target=look_up, name="schemas", daemon=True).start()
        await done

    def _is_ready(self, line: _Line) -> bool:
        if not line.records:
            return False
        _, arrival, since = line.records[0]
        return since <= self._answered_at or self.codec.is_loaded(arrival.value)

    def _pop(self, line: _Line) -> Waiting:
        claim, arrival, _ = line.records.popleft()
        self._account(line, arrival, -1)
        return claim, arrival

    def _account(self, line: _Line, arrival: Arrival, sign: int) -> None:
        size_bytes = sign * arrival.size_bytes
        line.size_bytes += size_bytes
        self._size_bytes += size_bytes
        self._count += sign
        metrics.SCHEMA_WAITING_RECORDS.set(self._count)

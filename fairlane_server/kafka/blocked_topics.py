"""Retry queue for topics that refuse records. Pure: the caller passes the time.

Each refused topic has its own queue. One of its settlements is tried per backoff, in a transaction of its own, until
one passes; then the queue is worked off in order, each probe twice as large as the last. A topic that refuses only some
records is searched by halving; a record refused alone is set aside and lets the others pass.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fairlane.ownership import Claim
from fairlane_server.kafka.settlement import OutputRecord, Settlement
from fairlane_server.kafka.transactional_producer import TopicRefusal, backoff_s

_TRIES = 3
_ALONE_RETRY_S = 10.0
_LONGEST_REST_S = 10.0
_RESTS_PER_COST = 4
"""Rest after a refused probe per second that it took: probes that time out must leave most of the time to other work.
"""
_MAX_LINES = 1_000
_SOURCE_PART = 16
"""One part in so many of the bound is what a single source topic may hold; see ``sources_held_up``."""

Fallback = Callable[[Settlement, str], Settlement]


@dataclass(slots=True)
class BlockedTopic:
    """Queue of one refused topic.

    Attributes:
        due_at: when the next of it may be tried.
        size: how many are tried at once.
        failures: consecutive refusals.
        given_up: settlements with a replacement do not wait here.
        closed: everything that goes to this topic joins the queue.
        alone: refused one by one; tried again when the queue is empty.
    """

    topic: str
    refusal: TopicRefusal
    since: float
    due_at: float
    size: int = 1
    failures: int = 0
    given_up: bool = False
    closed: bool = True
    notes: deque[OutputRecord] = field(default_factory=deque)
    waiting: deque[Settlement] = field(default_factory=deque)
    alone: deque[Settlement] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.notes) + len(self.waiting) + len(self.alone)

    def settlements(self) -> Iterator[Settlement]:
        yield from self.waiting
        yield from self.alone


@dataclass(slots=True)
class BlockedTopics:
    """The queues of all refused topics. Not thread-safe.

    ``refusal_timeout_s`` is how long a topic must have refused everything before its waiting settlements are replaced:
    a new topic is not known to all brokers at once.
    """

    max_count: int
    max_bytes: int
    refusal_timeout_s: float
    max_batch: int
    max_batch_bytes: int
    fallback: Fallback | None = None
    count: int = 0
    """Settlements and notes."""
    size_bytes: int = 0
    dropped_notes: int = 0
    """Notes that their topic did not take, since this counter was last read and reset."""
    _queues: dict[str, BlockedTopic] = field(default_factory=dict)
    _sources: Counter[str] = field(default_factory=Counter)
    """Number of blocked settlements by the topic of their source records."""
    _replaced: dict[Claim, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._queues)

    @property
    def due_at(self) -> float | None:
        """When the next attempt is due; None when nothing waits."""
        return min((queue.due_at for queue in self._queues.values() if queue), default=None)

    def divert(self, settlement: Settlement, now: float) -> Settlement | None:
        """Queue the settlement if one of its topics is closed. Returns what to commit now: the settlement, its
        replacement, or None."""
        for _ in range(_TRIES):
            queue = self._closed_queue(settlement)
            if queue is None:
                return settlement
            # Try one now and then although it could be replaced: the topic may exist by now.
            replaceable = queue.given_up and (now < queue.due_at or len(queue.waiting) > 0)
            instead = self._instead(settlement, queue.topic, queue.refusal.reason) if replaceable else None
            if instead is None:
                self._add(queue.waiting, settlement)
                return None
            settlement = instead
        return settlement

    def divert_note(self, note: OutputRecord) -> bool:
        """Queue or drop the note if its topic is closed. Returns whether it was."""
        queue = self._queues.get(note.topic)
        if queue is None or not queue.closed:
            return False
        if queue.given_up:
            self.dropped_notes += 1
        else:
            self._add_notes(queue, (note,))
        return True

    def probe(
        self, now: float, can_settle: Callable[[Claim], bool]
    ) -> tuple[str, list[OutputRecord], list[Settlement]]:
        """Take what to try now: a topic with its next notes and settlements; an empty topic when nothing is due."""
        due = [queue for queue in self._queues.values() if queue and queue.due_at <= now]
        for queue in sorted(due, key=lambda one: one.due_at):
            notes = [queue.notes.popleft() for _ in range(min(queue.size, len(queue.notes)))]
            room = queue.size - len(notes)
            settlements = self._pick(queue.waiting, room, can_settle)
            if not notes and not settlements and not queue.waiting:
                settlements = self._pick(queue.alone, 1, can_settle)
            self._account(settlements, -1)
            self.count -= len(notes)
            if notes or settlements:
                return queue.topic, notes, settlements
            queue.due_at = now + 1.0  # none of it can be settled before others are
        return "", [], []

    def put_back(self, topic: str, notes: Sequence[OutputRecord], settlements: Sequence[Settlement]) -> None:
        """Put back at the front what a probe took and did not commit."""
        queue = self._queues[topic]
        self._add_notes(queue, notes, front=True)
        self._add(queue.waiting, *settlements, front=True)

    def smaller(self, topic: str, size: int) -> None:
        """Limit probes of this topic to ``size`` notes and settlements."""
        self._queues[topic].size = max(1, size)

    def rest(self, topic: str, until: float) -> None:
        if topic in self._queues:
            self._queues[topic].due_at = until

    def passed(self, topic: str, now: float) -> None:
        """Note that a probe was committed: double the next one, and reopen the topic when its queue is empty."""
        queue = self._queues[topic]
        queue.failures, queue.given_up, queue.since, queue.due_at = 0, False, now, now
        queue.size = min(self.max_batch, queue.size * 2)
        if not queue.waiting and not queue.notes:
            if queue.alone and not queue.closed:
                # One that had been refused alone has passed: the others may pass too.
                queue.waiting, queue.alone = queue.alone, deque()
            queue.closed = bool(queue.waiting)
            if not queue.closed:
                queue.due_at = now + _ALONE_RETRY_S
        if not queue:
            del self._queues[topic]

    def refused(
        self,
        topic: str,
        refusal: TopicRefusal,
        notes: Sequence[OutputRecord],
        settlements: Sequence[Settlement],
        now: float,
        took_s: float,
    ) -> list[Settlement]:
        """Handle a refused transaction. Returns what to commit in place of its settlements for this topic."""
        queue = self._queues.get(topic)
        if queue is None:
            queue = self._queues[topic] = BlockedTopic(topic, refusal, now, now)
        queue.refusal = refusal
        tried = len(notes) + len(settlements)
        if not refusal.whole_topic and tried > 1:
            # Halving makes progress, so it needs no backoff.
            self.put_back(topic, notes, settlements)
            queue.closed, queue.size, queue.due_at = True, max(1, tried // 2), now
            return []
        if not refusal.whole_topic:
            return self._refused_alone(queue, settlements, len(notes), now)
        self.put_back(topic, notes, settlements)
        queue.closed, queue.size, queue.failures = True, 1, queue.failures + 1
        queue.due_at = now + max(backoff_s(queue.failures), min(took_s * _RESTS_PER_COST, _LONGEST_REST_S))
        if (
            refusal.lasting
            and refusal.certain
            and queue.failures >= _TRIES
            and now - queue.since >= self.refusal_timeout_s
        ):
            return self._give_up(queue)
        return []

    def move(self, source: str, topic: str) -> None:
        """Move settlements from the queue of ``source`` to that of ``topic`` if they go to both."""
        queue, other = self._queues.get(source), self._queues.get(topic)
        if queue is None or other is None or not other.closed:
            return
        moving = [one for one in queue.waiting if one.goes_to(topic)]
        queue.waiting = deque(one for one in queue.waiting if not one.goes_to(topic))
        self._account(moving, -1)
        self._add(other.waiting, *moving)

    def keep(self, is_current: Callable[[Claim], bool], now: float) -> int:
        """Drop settlements whose claim is void, and empty queues. Returns the number of dropped settlements.

        A given-up queue stays for a while, so that settlements for its topic are replaced at once.
        """
        before = sum(self._sources.values())
        self.count, self.size_bytes = 0, 0
        self._sources.clear()
        for topic, queue in list(self._queues.items()):
            queue.waiting = deque(one for one in queue.waiting if is_current(one.claim))
            queue.alone = deque(one for one in queue.alone if is_current(one.claim))
            self.count += len(queue.notes)
            self._account(queue.settlements(), 1)
            is_of_use = queue.given_up and now < queue.due_at + _LONGEST_REST_S and len(self._queues) <= _MAX_LINES
            if not queue and not is_of_use:
                del self._queues[topic]
        self._replaced = {claim: times for claim, times in self._replaced.items() if is_current(claim)}
        return before - sum(self._sources.values())

    @property
    def excess_count(self) -> int:
        return max(0, self.count - self.max_count)

    @property
    def excess_bytes(self) -> int:
        return max(0, self.size_bytes - self.max_bytes)

    def sources_held_up(self) -> frozenset[str]:
        """Source topics to stop reading for now, because too much of them is blocked.

        Far below the bounds: a single source from 1/16 of ``max_count`` on; all sources with blocked settlements once
        2/16 of ``max_count`` or 1/16 of ``max_bytes`` is blocked in all.
        """
        part = self.max_count // _SOURCE_PART
        if self.count >= 2 * part or self.size_bytes >= self.max_bytes // _SOURCE_PART:
            return frozenset(self._sources)
        return frozenset(source for source, count in self._sources.items() if count >= part)

    def _refused_alone(
        self, queue: BlockedTopic, settlements: Sequence[Settlement], notes: int, now: float
    ) -> list[Settlement]:
        """Replace or set aside a single record that was refused by a topic that may accept others."""
        self.dropped_notes += notes
        replacements = []
        for one in settlements:
            instead = self._instead(one, queue.topic, queue.refusal.reason)
            if instead is None:
                self._add(queue.alone, one)
            else:
                replacements.append(instead)
        queue.closed = bool(queue.waiting or queue.notes)
        queue.size, queue.due_at = 1, now if queue.closed else now + _ALONE_RETRY_S
        if not queue:
            del self._queues[queue.topic]
        return replacements

    def _give_up(self, queue: BlockedTopic) -> list[Settlement]:
        queue.given_up = True
        self.dropped_notes += len(queue.notes)
        self.count -= len(queue.notes)
        queue.notes.clear()
        replacements = []
        kept: deque[Settlement] = deque()
        for one in queue.waiting:
            instead = self._instead(one, queue.topic, queue.refusal.reason)
            if instead is None:
                kept.append(one)
            else:
                replacements.append(instead)
                self._account((one,), -1)
        queue.waiting = kept
        return replacements

    def _instead(self, settlement: Settlement, topic: str, reason: str) -> Settlement | None:
        """The fallback's replacement for a settlement whose first output goes to ``topic``.

        None when there is no such replacement, when it goes to the same topic, or when the claim had ``_TRIES`` of
        them.
        """
        if self.fallback is None or not settlement.outputs or settlement.outputs[0].topic != topic:
            return None
        times = self._replaced.get(settlement.claim, 0)
        if times >= _TRIES:
            return None
        instead = self.fallback(settlement, reason)
        if instead is settlement or instead.goes_to(topic):
            return None
        self._replaced[settlement.claim] = times + 1
        return instead

    def committed(self, settlements: Iterable[Settlement]) -> None:
        if self._replaced:
            for one in settlements:
                self._replaced.pop(one.claim, None)

    def _closed_queue(self, settlement: Settlement) -> BlockedTopic | None:
        if not self._queues:
            return None
        for record in settlement.outputs:
            queue = self._queues.get(record.topic)
            if queue is not None and queue.closed:
                return queue
        return None

    def _pick(self, waiting: deque[Settlement], limit: int, can_settle: Callable[[Claim], bool]) -> list[Settlement]:
        """Take the first that can be settled; those beyond the reach of the offset bitmaps keep their place."""
        picked: list[Settlement] = []
        passed_over: list[Settlement] = []
        size_bytes = 0
        while waiting and len(picked) < limit:
            one = waiting.popleft()
            if not can_settle(one.claim):
                passed_over.append(one)
                continue
            size_bytes += one.size_bytes
            if picked and size_bytes > self.max_batch_bytes:
                passed_over.append(one)
                break
            picked.append(one)
        waiting.extendleft(reversed(passed_over))
        return picked

    def _add(self, where: deque[Settlement], *settlements: Settlement, front: bool = False) -> None:
        if front:
            where.extendleft(reversed(settlements))
        else:
            where.extend(settlements)
        self._account(settlements, 1)

    def _add_notes(self, queue: BlockedTopic, notes: Sequence[OutputRecord], *, front: bool = False) -> None:
        self.count += len(notes)
        if front:
            queue.notes.extendleft(reversed(notes))
        else:
            queue.notes.extend(notes)

    def _account(self, settlements: Iterable[Settlement], sign: int) -> None:
        for one in settlements:
            self.count += sign
            self.size_bytes += sign * one.size_bytes
            source = one.claim.partition.topic
            self._sources[source] += sign
            if not self._sources[source]:
                del self._sources[source]

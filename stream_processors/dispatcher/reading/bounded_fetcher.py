"""aiokafka's fetcher with bounds: bytes in memory, turns per partition, and batches that cannot be read."""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from random import random
from typing import Any, Final

from aiokafka import errors
from aiokafka.consumer.fetcher import Fetcher, OffsetResetStrategy
from aiokafka.structs import ConsumerRecord, TopicPartition

from fairlane import metrics
from fairlane.backoff import Backoff
from fairlane.clock import now_ms
from fairlane.logs import get_logger
from stream_processors.dispatcher.reading.fetch_session import Answer, FetchRequest, FetchSession
from stream_processors.dispatcher.reading.fetched_partition import (
    BatchPlace,
    CommittedRecords,
    FetchedPartition,
)

log = get_logger(__name__)

MAX_FETCH_BYTES: Final = 16 * 1024 * 1024
"""Bound of one fetch response, plus one batch (KIP-74)."""

MAX_BUFFERED_BYTES: Final = 64 * 1024 * 1024
"""Bound of fetched or decompressed bytes not passed on yet; beyond it nothing is fetched, and the excess is
released."""

MAX_POLL_BYTES: Final = 16 * 1024 * 1024
MAX_TURN_BYTES: Final = 4 * 1024 * 1024
MAX_TURN_RECORDS: Final = 128
"""Bound of one partition's records in one poll: how much of a flood goes before other partitions."""

MAX_SLOW_TURN_RECORDS: Final = 16
"""Bound for a slowed partition: what is read of it before it can be paused."""

IDLE_WAIT_MS: Final = 200
"""Longest wait of a broker for data while nothing is buffered."""

# A partition whose records are used up is fetched again when the running request has ended: while others have buffered
# records, that must be soon. But for each request fetcher and broker look at every partition: a wait without result
# doubles the next one.
LEAST_BUSY_WAIT_MS: Final = 10
BUSY_INTERVAL_S_PER_PARTITION: Final = 0.0002

POLL_EXPECTED_WITHIN_S: Final = 0.01
"""Longest wait of the next request for a poll of the fetched records. The poll nearly always follows at once. A request
before the poll would leave out the partitions with records, and they would wait for its end."""

PAUSE_S_PER_RECORD: Final = 0.003
MAX_PAUSE_S: Final = 0.025
"""Pause from a response to the next request: per record beyond the first, and in all. Records that arrive during the
pause share a decision and two transactions, whose fixed cost equals that of 15 requests. A lone request causes no
pause."""

_REFUSED_AGAIN = Backoff(first_s=0.05, longest_s=5.0)


@dataclass(frozen=True, slots=True)
class RefusedPartition:
    """Takes the place of fetched data: until then this partition is not fetched; others are."""

    until_s: float


class BoundedFetcher(Fetcher):  # type: ignore[misc]  # aiokafka has no types
    """Replaces fetch requests, the parsing of responses and the delivery of records; positions and assignments are
    aiokafka's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._fetch_max_bytes = MAX_FETCH_BYTES
        self.slow: Collection[tuple[str, int]] = frozenset()
        """Partitions that take small turns."""
        self.held: Collection[tuple[str, int]] = frozenset()
        """Partitions whose records are not passed on; fetched data is kept."""
        self._refusals: dict[TopicPartition, int] = {}
        """Consecutive refusals by partition."""
        self._served_at_s: dict[TopicPartition, float] = {}
        """Time of the last fetched data by partition."""
        self._places: dict[TopicPartition, BatchPlace] = {}
        """Position inside a batch that must be fetched again, by partition."""
        self._busy_wait_ms = LEAST_BUSY_WAIT_MS
        self._next_busy_request_s = 0.0
        self._unpolled_since_s: float | None = None
        """Time of the response with records that no poll has taken from yet."""
        self._paused_until_s = 0.0
        self._sessions: dict[int, FetchSession] = {}
        """By node."""

    @property
    def buffered_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self._records.values() if isinstance(entry, FetchedPartition))

    def _get_actions_per_node(self, assignment: Any) -> tuple[Any, ...]:
        """The next actions for aiokafka's loop: requests by node, partitions to reset by node, the longest pause in
        seconds, whether the metadata is outdated, and futures that end the pause."""
        now_s = self._loop.time()
        for tp, entry in tuple(self._records.items()):
            if isinstance(entry, RefusedPartition) and entry.until_s <= now_s:
                del self._records[tp]
        wanted: defaultdict[int, dict[TopicPartition, int]] = defaultdict(dict)
        resets: defaultdict[int, list[TopicPartition]] = defaultdict(list)
        resumed, is_outdated = [], False
        leader_of, records, in_flight = self._client.cluster.leader_for_partition, self._records, self._in_flight
        for tp in assignment.tps:
            if tp in records:
                continue
            node_id = leader_of(tp)
            if node_id in in_flight:
                continue
            state = assignment.state_value(tp)
            if node_id is None or node_id < 0:
                is_outdated = True
            elif not state.has_valid_position:
                resets[node_id].append(tp)
            elif state.paused:
                resumed.append(state.resume_fut)
            else:
                wanted[node_id][tp] = state.position
        buffered_bytes, timeout_s, requests = self.buffered_bytes, self._fetcher_timeout, []
        next_request_s = self._next_busy_request_s if buffered_bytes else self._paused_until_s
        if self._unpolled_since_s is not None:
            next_request_s = max(next_request_s, self._unpolled_since_s + POLL_EXPECTED_WITHIN_S)
        pause_s = next_request_s - now_s
        if pause_s > 0:
            timeout_s = min(timeout_s, pause_s)
        elif buffered_bytes < MAX_BUFFERED_BYTES:
            # Offsets first: a partition that is reset is fetched from the new offset.
            requests = [
                (node_id, self._request(node_id, offsets, now_s, is_busy=buffered_bytes > 0))
                for node_id, offsets in wanted.items()
                if node_id not in resets
            ]
        return requests, resets, timeout_s, is_outdated, resumed

    def _request(
        self, node_id: int, offsets: Mapping[TopicPartition, int], now_s: float, *, is_busy: bool
    ) -> FetchRequest:
        """The next request to this broker.

        Longest-waiting partitions first: only for the first one does a broker send a batch above the limit, and the
        others share MAX_FETCH_BYTES in this order. Within a session the broker keeps the order, and moves a partition
        to the end whenever it sends data of it.
        """
        session = self._sessions.get(node_id)
        if session is None:
            session = self._sessions[node_id] = FetchSession()
        change = session.next_request(offsets)
        in_order = sorted(change.changed, key=lambda tp: self._served_at_s.get(tp, 0.0))
        change = change._replace(changed={tp: offsets[tp] for tp in in_order})
        self._next_busy_request_s = now_s + len(offsets) * BUSY_INTERVAL_S_PER_PARTITION
        wait_ms = self._busy_wait_ms if is_busy else IDLE_WAIT_MS
        return FetchRequest(
            change, wait_ms, self._fetch_max_bytes, self._max_partition_fetch_bytes, self._isolation_level
        )

    async def _proc_fetch_request(self, assignment: Any, node_id: int, request: Any) -> bool:
        """Send one request and keep the fetched data. Returns whether there are records to pass on."""
        session = self._sessions[node_id]
        try:
            response = await self._client.send(node_id, request)
        except errors.KafkaError as error:
            session.end()
            log.warning("fetch_failed", node=node_id, error=type(error).__name__)
            await asyncio.sleep(self._retry_backoff)
            return False
        except asyncio.CancelledError:
            session.end()
            return False  # closed, or the assignment changed: aiokafka awaits this task
        if response.error_code:
            # Usually the broker gave the session's place to another reader.
            session.end()
            log.info("fetch_session_ended", node=node_id, error=errors.for_code(response.error_code).__name__)
            await asyncio.sleep(self._retry_backoff)
            return False
        session.answered(response.session_id)
        if not assignment.active:
            return False
        found = [self._keep(assignment, answer, session.asked) for answer in response.answers]
        if not any(found):
            self._busy_wait_ms = min(2 * self._busy_wait_ms, IDLE_WAIT_MS)
            return False
        self._busy_wait_ms = LEAST_BUSY_WAIT_MS
        self._unpolled_since_s = self._loop.time()
        return True

    def _keep(self, assignment: Any, answer: Answer, asked: Mapping[TopicPartition, int]) -> bool:
        tp = answer.tp
        state = assignment.state_value(tp)
        offset = asked[tp]
        if not state.has_valid_position or state.position != offset:
            return False  # the position was changed meanwhile
        error = errors.for_code(answer.error_code)
        if error is not errors.NoError:
            return self._keep_error(tp, state, offset, error)
        self._refusals.pop(tp, None)
        # Faust logs partitions that were never fetched.
        state.highwater, state.lso, state.timestamp = answer.high_watermark, answer.last_stable_offset, now_ms()
        if not answer.records:
            return False
        self._served_at_s[tp] = self._loop.time()
        log_end = max(answer.high_watermark, answer.last_stable_offset)
        place = self._places.pop(tp, None)
        records = CommittedRecords(tp, answer.records, answer.aborted, offset, log_end, place)
        self._records[tp] = FetchedPartition(tp, assignment, records)
        return True

    def _keep_error(self, tp: TopicPartition, state: Any, offset: int, error: Any) -> bool:
        if error is errors.OffsetOutOfRangeError and self._default_reset_strategy != OffsetResetStrategy.NONE:
            state.await_reset(self._default_reset_strategy)
            return False
        if error is errors.OffsetOutOfRangeError:
            self._set_error(tp, errors.OffsetOutOfRangeError({tp: offset}))
            return True
        if error is errors.TopicAuthorizationFailedError:
            self._set_error(tp, errors.TopicAuthorizationFailedError(tp.topic))
            return True
        failures = self._refusals[tp] = self._refusals.get(tp, 0) + 1
        delay_s = _REFUSED_AGAIN.delay_s(failures, random())  # noqa: S311 - jitter, no secret
        self._records[tp] = RefusedPartition(self._loop.time() + delay_s)
        metrics.FETCHES_REFUSED.labels(error=error.__name__).inc()
        if error in {errors.NotLeaderForPartitionError, errors.UnknownTopicOrPartitionError}:
            self._client.force_metadata_update()
        else:
            # For instance a batch that the broker cannot read: until it is repaired, this partition makes no progress.
            log.warning(
                "fetch_refused",
                topic=tp.topic,
                partition=tp.partition,
                offset=offset,
                error=error.__name__,
                times=failures,
            )
        return False

    async def fetched_records(
        self, partitions: Any, timeout: float = 0, max_records: int | None = None
    ) -> dict[TopicPartition, list[ConsumerRecord]]:
        """Fetched records of these partitions: a bounded turn of each, after which it goes to the back. Waits up to
        ``timeout`` seconds if there are none."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (timeout or 0)
        while True:
            if self._subscriptions.reassignment_in_progress:
                await self._subscriptions.wait_for_assignment()
            drained = self._drain(partitions, max_records or 1)
            left_s = deadline - loop.time()
            if drained or left_s <= 0:
                return drained
            waiter = self._create_fetch_waiter()
            done, _ = await asyncio.wait([waiter], timeout=left_s)
            if not done or self._closed:
                waiter.cancel()
                return {}
            waiter.result()  # an authorization error of the group

    def wake(self) -> None:
        """Wake the poll after partitions were released."""
        for waiter in tuple(self._fetch_waiters):
            self._notify(waiter)

    def _drain(self, partitions: Any, max_records: int) -> dict[TopicPartition, list[ConsumerRecord]]:
        drained: dict[TopicPartition, list[ConsumerRecord]] = {}
        left_records, left_bytes = max_records, MAX_POLL_BYTES
        for tp, entry in tuple(self._records.items()):
            if tp not in partitions:
                self._set_aside(tp, entry)
                continue
            if tp in self.held:
                continue
            if isinstance(entry, RefusedPartition):
                continue
            if not isinstance(entry, FetchedPartition):
                if drained:
                    break  # raised by the next call
                self._forget(tp, entry)
                entry.check_raise()
                continue
            turn_records = MAX_SLOW_TURN_RECORDS if tp in self.slow else MAX_TURN_RECORDS
            taken = entry.take(min(left_records, turn_records), min(left_bytes, MAX_TURN_BYTES))
            if entry.has_more():
                self._records.move_to_end(tp)
            else:
                self._forget(tp, entry)
            if taken:
                drained[tp] = taken
                left_records -= len(taken)
            # Decompressed bytes count as well, to bound the time and the memory of a poll.
            left_bytes -= entry.turn_bytes
            if left_records <= 0 or left_bytes <= 0:
                break
        self._release_excess()
        if self._unpolled_since_s is not None:
            records = sum(map(len, drained.values()))
            self._paused_until_s = self._unpolled_since_s + min(MAX_PAUSE_S, (records - 1) * PAUSE_S_PER_RECORD)
            self._unpolled_since_s = None
            self._notify(self._wait_consume_future)
        return drained

    def _set_aside(self, tp: TopicPartition, entry: Any) -> None:
        """Release the data of a partition that is paused or revoked. Faust pauses without aiokafka's knowledge: the
        empty entry prevents another fetch."""
        if not self._subscriptions.is_assigned(tp):
            del self._records[tp]
        elif isinstance(entry, FetchedPartition):
            entry.release()

    def _forget(self, tp: TopicPartition, entry: Any) -> None:
        if isinstance(entry, FetchedPartition) and entry.place is not None:
            self._places[tp] = entry.place
        del self._records[tp]
        self._notify(self._wait_consume_future)

    def _release_excess(self) -> None:
        """Release data beyond the bound: of held partitions first, then of the largest that had a turn. A partition
        without a turn keeps its data."""
        excess = self.buffered_bytes - MAX_BUFFERED_BYTES
        if excess <= 0:
            return
        entries = [
            (tp, entry)
            for tp, entry in self._records.items()
            if isinstance(entry, FetchedPartition) and (entry.had_turn or tp in self.held)
        ]
        for _, entry in sorted(entries, key=lambda one: (one[0] in self.held, one[1].size_bytes), reverse=True):
            if excess <= 0:
                return
            excess -= entry.size_bytes
            entry.release()

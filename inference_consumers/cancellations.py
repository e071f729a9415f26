"""Known cancelled requests, and the feed that names them."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from fairlane.clock import ClockMs
from fairlane.codec import Codec, DecodeError
from fairlane.logs import get_logger
from fairlane.names import CONTROL_CANCELLATIONS
from fairlane.records import Cancellation
from fairlane.settings import KafkaSettings
from fairlane_server.kafka.feeds import TopicFollower

log = get_logger(__name__)

KNOWN_FOR_MS = 600_000
"""Work may lie in a pool's topics for so long after its cancel, and is still stopped."""

_MAX_KNOWN = 50_000
_LOOK_UP_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Cancellations:
    """The cancelled ids of the last KNOWN_FOR_MS, at most ``max_known``: beyond that the tenant with most of them loses
    its oldest. Any thread."""

    max_known: int = _MAX_KNOWN
    _known: OrderedDict[tuple[str, str], tuple[int, int]] = field(default_factory=OrderedDict)
    """When each was requested, and until when it is known; the oldest first."""
    _by_tenant: dict[str, OrderedDict[str, None]] = field(default_factory=dict)
    """The same, tenant by tenant."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __len__(self) -> int:
        return len(self._known)

    def add(self, tenant: str, request_id: str, now_ms: int, requested_at_ms: int | None = None) -> None:
        """The tenant cancelled this request at ``requested_at_ms`` by the broker's clock, or now. Forgets what is known
        for long enough."""
        requested_at_ms = now_ms if requested_at_ms is None else requested_at_ms
        with self._lock:
            before = self._known.get((tenant, request_id))
            if before is not None:
                requested_at_ms = max(requested_at_ms, before[0])
                self._forget(tenant, request_id)
            self._known[tenant, request_id] = requested_at_ms, now_ms + KNOWN_FOR_MS
            self._by_tenant.setdefault(tenant, OrderedDict())[request_id] = None
            while self._known[oldest := next(iter(self._known))][1] <= now_ms:
                self._forget(*oldest)
            if len(self._known) > self.max_known:
                largest, ids = max(self._by_tenant.items(), key=lambda entry: len(entry[1]))
                self._forget(largest, next(iter(ids)))

    def is_cancelled(self, tenant: str, request_id: str, submitted_at_ms: int = 0) -> bool:
        """Whether the tenant cancelled this id after sending it at ``submitted_at_ms`` by the broker's clock: an id
        sent again after a cancel is not cancelled."""
        with self._lock:
            known = self._known.get((tenant, request_id))
        return known is not None and submitted_at_ms <= known[0]

    def forget(self, tenant: str, request_id: str) -> None:
        """It is known no more; does nothing if it was not."""
        with self._lock:
            if (tenant, request_id) in self._known:
                self._forget(tenant, request_id)

    def _forget(self, tenant: str, request_id: str) -> None:
        del self._known[tenant, request_id]
        ids = self._by_tenant[tenant]
        del ids[request_id]
        if not ids:
            del self._by_tenant[tenant]


class CancellationFeed(TopicFollower):
    """Follows ``control.cancellations`` from KNOWN_FOR_MS ago: when ``start`` returns, all earlier cancellations are
    known. ``on_failure`` registers a callback for its failure."""

    def __init__(
        self,
        settings: KafkaSettings,
        codec: Codec,
        known: Cancellations,
        on_cancelled: Callable[[str, str], None],
        clock: ClockMs,
    ) -> None:
        """Writes what it hears into ``known`` and then calls ``on_cancelled`` with the tenant and the request id, both
        on the thread of the feed. A callback that raises ends it."""
        super().__init__(settings, CONTROL_CANCELLATIONS)
        self._codec = codec
        self._known = known
        self._on_cancelled = on_cancelled
        self._clock = clock

    def _first_offset(self, consumer: Consumer, partition: int, low: int, end: int) -> int:  # noqa: ARG002 - all are asked
        since = TopicPartition(self._topic, partition, self._clock() - KNOWN_FOR_MS)
        (found,) = consumer.offsets_for_times([since], timeout=_LOOK_UP_TIMEOUT_S)
        if found.error is not None:
            raise KafkaException(found.error)
        return found.offset if found.offset >= 0 else end

    def _take(self, message: Message) -> None:
        try:
            cancelled = self._codec.decode_as(Cancellation, message.value())
        except DecodeError as error:
            log.error("cancellation_undecodable", offset=message.offset(), problem=error.problem)
            return
        self._known.add(cancelled.tenant, cancelled.request_id, self._clock(), cancelled.requested_at_ms)
        self._on_cancelled(cancelled.tenant, cancelled.request_id)

"""Follower of heartbeats and tenants on the control topics, with a consumer outside all groups."""

import time
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from fairlane.clock import now_ms
from fairlane.cluster import LastConnectionError, quiet_config, reason_of
from fairlane.codec import Codec, DecodeError, SchemaNotLoadedError
from fairlane.kafka_config import read_committed_consumer
from fairlane.names import CONTROL_CAPACITY, CONTROL_DISPATCH, CONTROL_TENANTS, observer_group
from fairlane.records import CapacityReport, DispatchReport, TenantSpec
from fairlane.schema_registry import RegistryError
from fairlane.settings import KafkaSettings
from fairlane.skipping_consumer import SkippingConsumer
from fairlane_server.kafka.cluster_admin import CONNECT_TIMEOUT_S, ClusterAdmin, ClusterError
from fairlane_server.kafka.feeds import CatchUp
from fairlane_server.kafka.load_board import RATE_WINDOW_MS, LoadBoard

CATCH_UP_TIMEOUT_S = 20.0

_POLL_S = 0.1
_MAX_RECORDS = 500
_SILENT_S = 2.0
_RETRY_S = 0.1
_REGISTRY_REST_S = 5.0
"""Between two requests to a schema registry that failed: each blocks for seconds."""

RecordT = TypeVar("RecordT")


class LoadFeed:
    """Fills a board from the cluster. Used from one thread; ``close`` it."""

    def __init__(self, settings: KafkaSettings, codec: Codec, board: LoadBoard) -> None:
        """Connect and find where to begin: the tenants from their first record, heartbeats from a few seconds ago.

        Raises ClusterError: no broker answers, or a topic is not there.
        """
        self._codec = codec
        self._board = board
        self._errors = LastConnectionError()
        self._live = False
        self._heard_at = time.monotonic()
        self._registry_error: str | None = None
        self._ask_again_at = 0.0
        self._unread: dict[bytes | None, Message] = {}
        """Tenants' newest records with a schema that the registry did not give yet."""
        found = ClusterAdmin(settings).metadata().topics
        topics = (CONTROL_TENANTS, CONTROL_CAPACITY, CONTROL_DISPATCH)
        for topic in topics:
            if topic not in found:
                raise ClusterError(f"{topic}: no such topic; `fairlane topics apply` creates it")
        config = read_committed_consumer(settings, observer_group("top")) | {"enable.partition.eof": True}
        self._consumer = SkippingConsumer(quiet_config(config, self._errors), "top")
        try:
            deadline = time.monotonic() + CONNECT_TIMEOUT_S
            places = [
                self._place(topic, partition, deadline) for topic in topics for partition in found[topic].partitions
            ]
            self._consumer.assign([start for start, _ in places])
        except BaseException:
            self._consumer.close()
            raise
        self._catch_up = CatchUp(
            {(start.topic, start.partition): start.offset for start, _ in places},
            {(start.topic, start.partition): end for start, end in places},
        )

    @property
    def trouble(self) -> str | None:
        """Why records are missing: the schema registry's error, or after a while without records the client's last."""
        if self._registry_error is not None:
            return self._registry_error
        return self._errors.text if time.monotonic() - self._heard_at > _SILENT_S else None

    def catch_up(self) -> None:
        """Read to the present end. Raises ClusterError when that takes too long."""
        deadline = time.monotonic() + CATCH_UP_TIMEOUT_S
        while not self._catch_up.is_done:
            if time.monotonic() > deadline:
                reason = self._errors.text or "slow"
                raise ClusterError(
                    f"the control topics were not read to their ends in {CATCH_UP_TIMEOUT_S:g} s ({reason})"
                )
            self._read(_POLL_S)
        self._live = True

    def follow(self, duration_s: float) -> None:
        """Read what comes within this time. Raises ClusterError when the broker refuses for good."""
        deadline = time.monotonic() + duration_s
        while (left_s := deadline - time.monotonic()) > 0:
            self._read(min(_POLL_S, left_s))

    def close(self) -> None:
        self._consumer.close()

    def _place(self, topic: str, partition: int, deadline: float) -> tuple[TopicPartition, int]:
        while True:
            try:
                return self._ask(topic, partition)
            except KafkaException as error:
                # A topic that was made a moment ago is not known everywhere yet.
                if time.monotonic() > deadline:
                    raise ClusterError(f"{topic}: {reason_of(error)}") from None
                time.sleep(_RETRY_S)

    def _ask(self, topic: str, partition: int) -> tuple[TopicPartition, int]:
        bounds = self._consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=CONNECT_TIMEOUT_S)
        if bounds is None:
            raise ClusterError(f"{topic}: no answer within {CONNECT_TIMEOUT_S:g} s")
        low, high = bounds
        if topic == CONTROL_TENANTS:
            return TopicPartition(topic, partition, low), high
        since = TopicPartition(topic, partition, now_ms() - RATE_WINDOW_MS)
        (found,) = self._consumer.offsets_for_times([since], timeout=CONNECT_TIMEOUT_S)
        if found.error is not None:
            raise KafkaException(found.error)
        return TopicPartition(topic, partition, found.offset if found.offset >= 0 else high), high

    def _read(self, timeout_s: float) -> None:
        if self._registry_error is not None and time.monotonic() >= self._ask_again_at:
            self._registry_error = None
            for message in tuple(self._unread.values()):
                self._take(message)
        first = self._consumer.poll(timeout_s)
        if first is None:
            return
        for message in (first, *self._consumer.consume(_MAX_RECORDS, 0)):
            place, error = (message.topic() or "", message.partition() or 0), message.error()
            if error is None:
                self._heard_at = time.monotonic()
                self._take(message)
                self._catch_up.reached(place, (message.offset() or 0) + 1)
            elif error.code() == KafkaError._PARTITION_EOF:
                self._catch_up.ended(place)
            elif not error.retriable():
                raise ClusterError(f"{message.topic()}: {error.str()}")

    def _take(self, message: Message) -> None:
        is_tenant = message.topic() == CONTROL_TENANTS
        if is_tenant:
            self._unread.pop(message.key(), None)
        try:
            self._apply(message)
        except DecodeError:
            # A record that cannot be read, perhaps of a newer version, is left out.
            return
        except (RegistryError, SchemaNotLoadedError) as error:
            if isinstance(error, RegistryError):
                self._registry_error = str(error)
                self._ask_again_at = time.monotonic() + _REGISTRY_REST_S
            # The next heartbeat replaces this one; a tenant is not published again.
            if is_tenant:
                self._unread[message.key()] = message

    def _decoded(self, record_type: type[RecordT], message: Message) -> RecordT:
        return self._codec.decode_any((record_type,), message.value(), may_ask=self._registry_error is None)

    def _apply(self, message: Message) -> None:
        # By our clock; for records from before the start their own time is the best available.
        seen_at_ms = now_ms() if self._live else min(now_ms(), message.timestamp()[1])
        if message.topic() == CONTROL_CAPACITY:
            self._board.capacity(self._decoded(CapacityReport, message), seen_at_ms)
        elif message.topic() == CONTROL_DISPATCH:
            self._board.dispatch(self._decoded(DispatchReport, message), seen_at_ms)
        else:
            tenant = (message.key() or b"").decode(errors="replace")
            self._board.configure(tenant, None if message.value() is None else self._decoded(TenantSpec, message))

"""Faust application as a fenceable consumer: it reads and rebalances, and never commits.

Differences from stock Faust, each covered by a test on the real broker: ``read_committed`` fetching; a poll is passed
on whole, past Faust's streams, which handle one record at a time; start positions
and done sets come from a confluent consumer of the same group, because aiokafka cannot wait for offsets of a
transaction being committed; generation and member id are recorded with their assignment; records already polled of a
paused partition are kept; batches are read by ``reading/``, with bounds.
"""

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import faust
from aiokafka.helpers import create_ssl_context
from faust.app import BootStrategy
from faust.transport.drivers.aiokafka import Consumer, Transport
from faust.types import TP
from yarl import URL

from fairlane.committed import TopicIds
from fairlane.kafka_clients import KafkaConsumer
from fairlane.kafka_config import authorities, read_committed_consumer
from fairlane.logs import get_logger
from fairlane.names import dispatcher_group
from fairlane.ownership import Ownership, PartitionId
from fairlane.settings import Settings
from stream_processors.dispatcher.reading.fenced_thread import FencedThread, Poll

log = get_logger(__name__)

_RESUBSCRIBE_S = 0.1
# aiokafka leaves the group for good without a fetch for this long, and a member without partitions never fetches.
_MAX_POLL_INTERVAL_S = 365 * 86_400.0
_MAX_POLL_RECORDS = 2_000

_NO_RECORDS: tuple[Any, ...] = ()

Handler = Callable[[Poll], Awaitable[None]]


class _ConsumerBoot(BootStrategy):  # type: ignore[misc]  # Faust has no types
    """Starts no producer: Faust's own would be one more client of Kafka, which nothing uses."""

    enable_kafka_producer = False


class _ConsumerApp(faust.App):  # type: ignore[misc]  # Faust has no types
    BootStrategy = _ConsumerBoot


class RequestStream:
    """The Faust application over the tenants' topics.

    ``on_poll`` is awaited for the records of each poll, and the next poll waits for it; ``on_revoked`` is awaited
    before the group reassigns the partitions.
    """

    def __init__(
        self,
        settings: Settings,
        ownership: Ownership,
        *,
        on_poll: Handler,
        on_revoked: Callable[[], Awaitable[None]],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.group = dispatcher_group(settings.group_prefix)
        self._ownership = ownership
        self._on_poll = on_poll
        self._on_revoked = on_revoked
        self._on_failure = on_failure
        self._offsets = KafkaConsumer(read_committed_consumer(settings, self.group))
        self._app = self._build_app(settings)
        self._topic = self._app.topic("placeholder", key_serializer="raw", value_serializer="raw")
        self._topic.topics = []
        self._subscribed: frozenset[str] = frozenset()
        self._paused: set[PartitionId] = set()

        async def subscriber(stream: Any) -> None:
            async for _ in stream:
                raise RuntimeError("Faust was given a record: polls are passed on whole")

        # Its topics are what the application subscribes to.
        self._app.agent(self._topic, name="requests")(subscriber)

    def _build_app(self, settings: Settings) -> Any:
        session_s = settings.dispatcher_session_timeout_ms / 1000
        brokers = [URL(f"kafka://{server}") for server in settings.kafka_bootstrap_servers.split(",")]
        app = _ConsumerApp(
            self.group,
            broker=brokers,
            broker_credentials=_credentials(settings),
            broker_client_id=settings.instance_id,
            broker_session_timeout=session_s,
            broker_heartbeat_interval=session_s / 4,
            broker_request_timeout=max(40.0, session_s * 2),
            broker_max_poll_records=_MAX_POLL_RECORDS,
            broker_max_poll_interval=_MAX_POLL_INTERVAL_S,
            consumer_metadata_max_age_ms=2_000,
            # Never takes effect: every assignment begins with our own seek.
            consumer_auto_offset_reset="earliest",
            store="memory://",
            # Faust creates this folder although we store nothing in it.
            datadir=str(Path(tempfile.gettempdir()) / "fairlane-faust"),
            topic_disable_leader=True,
            topic_allow_declare=False,
            web_enabled=False,
            # The default waits for unacknowledged messages without a bound: the member then never rejoins.
            stream_wait_empty=False,
            # An option of Faust's own assignor. FencedThread replaces that assignor with ours, since it gives partition
            # 0 of every topic to one member.
            table_standby_replicas=0,
        )
        ownership, offsets, on_poll, on_failure = self._ownership, self._offsets, self._on_poll, self._on_failure

        class FencedConsumer(Consumer):  # type: ignore[misc]  # Faust has no types
            def _new_consumer_thread(self) -> FencedThread:
                thread = FencedThread(self, loop=self.loop, beacon=self.beacon)
                thread.ownership, thread.offsets, thread.on_failure = ownership, offsets, on_failure
                thread.topic_ids = TopicIds(settings)
                thread.credentials = settings.kafka_credentials if settings.kafka_credentials_may_change else None
                return thread

            async def getmany(self, timeout: float) -> AsyncIterator[Any]:
                """Pass one poll on. Yields nothing: Faust takes some 60 us for each record that it is given."""
                poll, _ = await self._wait_next_records(timeout)
                if self.should_stop or not isinstance(poll, Poll):
                    return
                if not self.flow_active:
                    # The records were fetched before a rebalance: they are read again from the seek after it.
                    await self.perform_seek()
                elif poll.records:
                    await self.wait_first(on_poll(poll), self.suspend_flow.wait())
                for record in _NO_RECORDS:
                    yield record

        transport = Transport(brokers, app)
        transport.Consumer = FencedConsumer
        app.transport = transport
        app.on_partitions_revoked.connect(self._revoked, weak=False)
        return app

    async def start(self, topics: Iterable[str]) -> None:
        """Join the group. ``topics`` must exist and not be empty: Faust never reads a topic subscribed to before its
        metadata was visible."""
        self._topic.topics = sorted(topics)
        self._subscribed = frozenset(self._topic.topics)
        self._app.topics._resubscribe_sleep_lock_seconds = _RESUBSCRIBE_S
        await self._app.start()

    async def stop(self) -> None:
        """Leave the group."""
        await self._app.stop()
        self._offsets.close()

    @property
    def subscribed(self) -> frozenset[str]:
        return self._subscribed

    async def subscribe(self, topics: Iterable[str]) -> None:
        """Replace the subscription without a restart. The topics must exist."""
        # In place: the agent reads a clone of the topic, which shares this list.
        self._topic.topics[:] = sorted(topics)
        self._subscribed = frozenset(self._topic.topics)
        conductor = self._app.topics
        names = await conductor._update_indices()
        await self._app.consumer.subscribe(names)

    @property
    def rebalancing(self) -> bool:
        return bool(self._app.rebalancing)

    @property
    def crashed(self) -> BaseException | None:
        """The error that stopped Faust, if any."""
        reason: BaseException | None = self._app.crash_reason
        return reason

    def refresh_membership(self) -> None:
        """Update the membership: a rebalance that left this member its partitions may have raised the generation
        without a callback.

        Every join revokes first, so a valid generation belongs to the partitions still owned.
        """
        thread = getattr(self._app.consumer, "_thread", None)
        if thread is not None and thread._consumer is not None and not self._app.rebalancing:
            membership = thread.membership()
            if membership.may_commit and not self._app.rebalancing:
                self._ownership.refresh(membership)

    def hold(self, partitions: Iterable[PartitionId], slow: Iterable[PartitionId] = ()) -> None:
        """Hold exactly these partitions, and read the ``slow`` ones in small turns, from the next poll on. Fetched
        records are kept; a pause would discard those not polled yet."""
        thread = getattr(self._app.consumer, "_thread", None)
        if thread is not None:
            thread.hold(frozenset(partitions), frozenset(slow))

    def apply_pauses(self, paused: Iterable[PartitionId]) -> None:
        """Pause exactly these partitions. Faust resumes all after a rebalance, so pauses are set again each time."""
        wanted = set(paused)
        consumer = self._app.consumer
        if wanted:
            consumer.pause_partitions({TP(*partition) for partition in wanted})
        resumed = self._paused - wanted
        if resumed:
            consumer.resume_partitions({TP(*partition) for partition in resumed} & consumer.assignment())
        self._paused = wanted

    async def _revoked(self, _app: Any, revoked: Iterable[Any], **_kwargs: object) -> None:
        log.info("revoked", partitions=len(list(revoked)))
        self._paused.clear()
        self._ownership.revoke_all()
        self._app.consumer._thread.allow_reset()
        await self._on_revoked()


def _credentials(settings: Settings) -> Any:
    """Those of the start: ``FencedThread`` replaces them."""
    if settings.kafka_security_protocol == "PLAINTEXT":
        return None
    context = None
    if settings.kafka_security_protocol.endswith("SSL"):
        context = create_ssl_context(**authorities(settings))
    if settings.kafka_security_protocol == "SSL":
        return faust.SSLCredentials(context)
    password = settings.kafka_sasl_password
    return faust.SASLCredentials(
        mechanism=settings.kafka_sasl_mechanism,
        username=settings.kafka_sasl_username,
        password=None if password is None else password.get_secret_value(),
        ssl_context=context,
    )

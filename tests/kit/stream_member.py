"""A dispatcher's consumer side alone, in this process: RequestStream and Ownership on the real broker."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from time import monotonic

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from faust.exceptions import ConsumerNotStarted

from fairlane.kafka_config import connection, transactional_producer
from fairlane.ownership import Claim, Ownership, PartitionId
from fairlane.settings import Settings
from fairlane_server.kafka.transactions import Settlement, TransactionLoop
from stream_processors.dispatcher.reading.fenced_thread import Poll
from stream_processors.dispatcher.reading.stream import RequestStream
from tests.kit.waiting import eventually_async

_INTERVAL_S = 0.02
_STOP_TIMEOUT_S = 30.0


class StreamMember:
    """Keeps what it is given and decides nothing; ``settle`` commits."""

    def __init__(self, settings: Settings, max_span: int = 1_000) -> None:
        self.settings = settings
        self.ownership = Ownership(max_span)
        self.delivered: list[Claim] = []
        self.revocations = 0
        self.failures: list[BaseException] = []
        self.stream = RequestStream(
            settings,
            self.ownership,
            on_poll=self._on_poll,
            on_revoked=self._on_revoked,
            on_failure=self.failures.append,
        )

    async def _on_poll(self, poll: Poll) -> None:
        for (topic, partition), records in poll.records.items():
            offsets = [record.offset for record in records]
            claims = self.ownership.deliver_many(PartitionId(topic, partition), offsets, poll.epoch)
            self.delivered += [claim for claim in claims if claim is not None]

    async def _on_revoked(self) -> None:
        self.revocations += 1

    @property
    def offsets(self) -> list[int]:
        return [claim.offset for claim in self.delivered]

    @property
    def current(self) -> list[Claim]:
        """What was delivered in the present assignment and is not settled."""
        return [claim for claim in self.delivered if self.ownership.is_current(claim)]

    @property
    def assigned(self) -> bool:
        """Whether the group gave it partitions, whether or not it knows yet where they were left."""
        try:
            return bool(self.stream._app.consumer.assignment())
        except ConsumerNotStarted:
            return False

    def settle(self, claims: Iterable[Claim]) -> None:
        """Commit these as done, in one go."""
        fatal: list[Exception] = []
        producer = Producer(transactional_producer(self.settings, f"{self.settings.instance_id}-settler", 10_000))
        transactions = TransactionLoop((producer,), self.ownership, on_fatal=fatal.append)
        transactions.start()
        transactions.submit_many([Settlement(claim) for claim in claims])
        assert transactions.drain(10)
        transactions.stop()
        assert not fatal, fatal

    async def upkeep(self) -> None:
        """What the dispatcher does again and again about pauses."""
        while True:
            if self.ownership.partitions() and not self.stream.rebalancing:
                self.stream.refresh_membership()
                self.ownership.flow()
                self.stream.apply_pauses(self.ownership.paused())
            await asyncio.sleep(_INTERVAL_S)


@asynccontextmanager
async def joined(
    settings: Settings, topics: Iterable[str], max_span: int = 1_000, *, wait: bool = True
) -> AsyncIterator[StreamMember]:
    """A member of the group; by default one that has its assignment already."""
    member = StreamMember(settings, max_span)
    # Faust starts once the first assignment is complete, and that may wait for an open transaction.
    starting = asyncio.create_task(member.stream.start(topics))
    upkeep = asyncio.create_task(member.upkeep())
    try:
        if wait:
            await starting
            await eventually_async(member.ownership.partitions, what="an assignment")
        yield member
    finally:
        upkeep.cancel()
        with suppress(asyncio.CancelledError):
            await upkeep
        await asyncio.wait_for(starting, _STOP_TIMEOUT_S)
        await asyncio.wait_for(member.stream.stop(), _STOP_TIMEOUT_S)


async def stays(condition: Callable[[], object], for_s: float = 0.7) -> None:
    """AssertionError if ``condition()`` is not true all the time."""
    deadline = monotonic() + for_s
    while monotonic() < deadline:
        assert condition()
        await asyncio.sleep(_INTERVAL_S)


def create_topics(settings: Settings, *topics: str) -> None:
    """Topics of one partition."""
    admin = AdminClient(connection(settings))
    for created in admin.create_topics([NewTopic(topic, 1, 1) for topic in topics]).values():
        created.result(10)

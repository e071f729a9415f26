"""A producer that follows a script: for error paths of a transaction that no broker can be made to take on demand."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from fairlane.offsets import CommitPoint
from fairlane.ownership import Membership, Ownership, PartitionId
from fairlane_server.kafka.transactions import OutputRecord, Settlement, TransactionLoop

WORK = PartitionId("work", 0)
OTHER = PartitionId("work", 1)
ME = Membership(7, "me", "group metadata of generation 7")

FAILED_DELIVERY = KafkaError(KafkaError._INCONSISTENT, txn_requires_abort=True)


@dataclass
class Delivered:
    """What a delivery callback is given."""

    name: str

    def topic(self) -> str:
        return self.name


@dataclass
class Transaction:
    """What one transaction held when it ended."""

    records: list[tuple[str, bytes]]
    offsets: dict[tuple[str, int], CommitPoint]
    group_metadata: object


@dataclass
class ScriptedProducer:
    """The transactional half of a producer: commits, unless an error stands in the script for the next such call."""

    script: dict[str, deque[KafkaError | Callable[[], None]]] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    """Topics whose records fail delivery, with the code."""
    committed: list[Transaction] = field(default_factory=list)
    aborted: list[Transaction] = field(default_factory=list)
    missing: dict[str, int] = field(default_factory=dict)
    """Topics that a look-up does not find, with the code."""
    before_delivery: Callable[[], None] | None = None
    """Called when a transaction is about to be committed and nothing of it was delivered."""
    begun: int = 0
    is_closed: bool = False
    _open: Transaction | None = None
    _callbacks: list[tuple[Callable[..., None], str]] = field(default_factory=list)

    def then(self, call: str, *steps: "KafkaError | Callable[[], None]") -> None:
        self.script.setdefault(call, deque()).extend(steps)

    def _follow(self, call: str) -> None:
        steps = self.script.get(call)
        if steps:
            step = steps.popleft()
            if isinstance(step, KafkaError):
                raise KafkaException(step)
            step()

    def init_transactions(self, timeout: float) -> None:
        self._follow("init")

    def close(self) -> bool:
        assert self._open is None
        self.is_closed = True
        return True

    def begin_transaction(self) -> None:
        self._follow("begin")
        assert self._open is None
        self.begun += 1
        self._open = Transaction([], {}, None)

    def produce(
        self,
        topic: str,
        value: bytes,
        key: bytes | None,
        headers: list[Any],
        on_delivery: Callable[..., None],
        partition: int,
    ) -> None:
        steps = self.script.get("produce")
        if steps and steps[0] is BUFFER_FULL:
            steps.popleft()
            raise BufferError
        self._follow("produce")
        assert self._open is not None
        self._open.records.append((topic, value))
        self._callbacks.append((on_delivery, topic))

    def list_topics(self, topic: str, timeout: float) -> Any:
        self._follow("look-up")
        code = self.missing.get(topic)
        found = SimpleNamespace(error=None if code is None else KafkaError(code))
        return SimpleNamespace(topics={topic: found})

    def poll(self, timeout: float) -> int:
        self._follow("poll")
        return 0

    def send_offsets_to_transaction(
        self, offsets: list[TopicPartition], group_metadata: object, timeout: float
    ) -> None:
        self._follow("send")
        assert self._open is not None
        self._open.offsets = {(p.topic, p.partition): CommitPoint.parse(p.offset, p.metadata) for p in offsets}
        self._open.group_metadata = group_metadata

    def commit_transaction(self, timeout: float) -> None:
        if self.before_delivery is not None:
            self.before_delivery()
        refused = False
        for on_delivery, topic in self._callbacks:
            code = self.refused.get(topic)
            refused = refused or code is not None
            on_delivery(None if code is None else KafkaError(code), Delivered(topic))
        self._callbacks.clear()
        if refused:
            raise KafkaException(FAILED_DELIVERY)
        self._follow("commit")
        assert self._open is not None
        self.committed.append(self._open)
        self._open = None

    def abort_transaction(self, timeout: float) -> None:
        for on_delivery, topic in self._callbacks:
            on_delivery(KafkaError(KafkaError._PURGE_QUEUE), Delivered(topic))
        self._callbacks.clear()
        self._follow("abort")
        if self._open is not None:
            self.aborted.append(self._open)
        self._open = None

    @property
    def values(self) -> list[bytes]:
        """Everything committed, in order."""
        return [value for transaction in self.committed for _topic, value in transaction.records]


def buffer_full() -> None:
    """Stands in the script for a full local queue."""


BUFFER_FULL = buffer_full


@dataclass
class Bench:
    """A loop that owns two partitions, and what it told."""

    producer: ScriptedProducer = field(default_factory=ScriptedProducer)
    ownership: Ownership = field(default_factory=Ownership)
    fatal: list[Exception] = field(default_factory=list)
    told: list[Settlement] = field(default_factory=list)
    loops: list[TransactionLoop] = field(default_factory=list)

    def loop(self, **options: Any) -> TransactionLoop:
        """A loop that was not started."""
        made = TransactionLoop(
            (cast(Producer, self.producer),),
            self.ownership,
            on_fatal=self.fatal.append,
            on_committed=self.told.extend,
            **options,
        )
        self.loops.append(made)
        return made

    def started(self, **options: Any) -> TransactionLoop:
        made = self.loop(**options)
        made.start()
        return made

    def settlements(self, *offsets: int, partition: PartitionId = WORK, topic: str = "out") -> list[Settlement]:
        """Delivered just now, each with an output that holds its offset."""
        return [
            Settlement(claim, (OutputRecord(topic, None, b"%d" % claim.offset),))
            for offset in offsets
            if (claim := self.ownership.deliver(partition, offset)) is not None
        ]

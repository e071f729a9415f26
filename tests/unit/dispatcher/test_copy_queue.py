"""The queue of copies keeps every copy once, in order, and gives each version its turn."""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fairlane.ownership import Claim, PartitionId
from stream_processors.dispatcher.scheduling.copy_queue import CopyQueue

PARTITION = PartitionId("evaluation.work", 0)


@dataclass(frozen=True, slots=True)
class Copy:
    """What the queue uses of a copy."""

    number: int
    pool: str = "gpu"
    version_key: str = "words/2"
    size_bytes: int = 10
    claim: Claim = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "claim", Claim(PARTITION, self.number, 1))


class CopyQueueMachine(RuleBasedStateMachine):
    """Against a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: CopyQueue[Copy] = CopyQueue()  # type: ignore[type-var]  # the fields that the queue uses
        self.model: list[Copy] = []
        self.number = 0

    @rule(pool=st.sampled_from(["gpu", "cpu"]), version=st.sampled_from(["words/2", "words/3"]))
    def push(self, pool: str, version: str) -> None:
        copy = Copy(self.number, pool, version, 10 + self.number % 3)
        self.number += 1
        self.queue.push(copy)
        self.model.append(copy)

    @rule(pool=st.sampled_from(["gpu", "cpu"]), last=st.booleans())
    def pop(self, pool: str, last: bool) -> None:
        heads = list(self.queue.heads(pool))
        expected = {one.version_key: one for one in reversed(self.model) if one.pool == pool}
        assert {one.version_key: one for one in heads} == expected
        if heads:
            popped = heads[-1 if last else 0]
            self.queue.pop(popped)
            self.model.remove(popped)

    @rule(divisor=st.integers(2, 4))
    def take(self, divisor: int) -> None:
        taken = self.queue.take(lambda one: one.number % divisor == 0)
        assert sorted(one.number for one in taken) == [one.number for one in self.model if one.number % divisor == 0]
        self.model = [one for one in self.model if one.number % divisor]

    @invariant()
    def holds_the_same(self) -> None:
        assert len(self.queue) == len(self.model)
        assert {one.number for one in self.queue} == {one.number for one in self.model}
        assert self.queue.size_bytes == sum(one.size_bytes for one in self.model)
        assert set(self.queue.pools()) == {one.pool for one in self.model}
        for pool in ("gpu", "cpu"):
            assert self.queue.count(pool) == sum(one.pool == pool for one in self.model)


TestCopyQueue = CopyQueueMachine.TestCase


def test_versions_take_turns() -> None:
    queue: CopyQueue[Copy] = CopyQueue()  # type: ignore[type-var]
    for number in range(4):
        queue.push(Copy(number))
    for number in range(4, 6):
        queue.push(Copy(number, version_key="words/3"))
    order = []
    while len(queue):
        head = next(queue.heads("gpu"))
        queue.pop(head)
        order.append(head.number)
    assert order == [0, 4, 1, 5, 2, 3]

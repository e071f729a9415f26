"""Values of scheduling: a schedulable request, and a request whose turn has come. Pure."""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from fairlane.ownership import Claim
from stream_processors.dispatcher.scheduling.backlog_statistics import Waiting


class Schedulable(Waiting, Protocol):
    """The fields of a request that the scheduler uses."""

    @property
    def claim(self) -> Claim: ...
    @property
    def pool(self) -> str: ...
    @property
    def model_name(self) -> str: ...
    @property
    def request_id(self) -> str: ...
    @property
    def submitted_at_ms(self) -> int: ...
    @property
    def input_bytes(self) -> int: ...
    @property
    def is_backfill(self) -> bool: ...


ItemT = TypeVar("ItemT", bound=Schedulable)


@dataclass(frozen=True, slots=True)
class View:
    """The inputs of a dispatch: work in flight on partitions that a live consumer owns, the pool's window, and this
    dispatcher's share of it."""

    in_flight_tokens: int
    window_tokens: float
    in_flight_items: int
    window_items: float
    share: float


@dataclass(frozen=True, slots=True)
class Turn(Generic[ItemT]):
    """A request whose turn has come. A late one cannot be answered in time and must not run. ``partition`` is that of
    the priority topic, ANY_PARTITION while they are unknown."""

    item: ItemT
    is_late: bool
    partition: int
    view: View


@dataclass(frozen=True, slots=True)
class Lateness:
    """Whether a request that starts at the earliest possible time would end after its deadline."""

    earliest_start_ms: int
    ms_per_token: float

    def __call__(self, item: Waiting) -> bool:
        return self.earliest_start_ms + item.cost_tokens * self.ms_per_token > item.deadline_at_ms

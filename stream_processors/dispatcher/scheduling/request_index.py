"""Index of queued requests by tenant and request id. Pure."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar


class Identified(Protocol):
    """A request found by tenant and id; the claim identifies it among those of the same id."""

    @property
    def claim(self) -> Hashable: ...
    @property
    def tenant(self) -> str: ...
    @property
    def request_id(self) -> str: ...


ItemT = TypeVar("ItemT", bound=Identified)


@dataclass(slots=True)
class RequestIndex(Generic[ItemT]):
    """A tenant may send an id any number of times. Every method is O(1) plus the size of its result."""

    _by_id: dict[tuple[str, str], dict[Hashable, ItemT]] = field(default_factory=dict)

    def add(self, item: ItemT) -> None:
        self._by_id.setdefault((item.tenant, item.request_id), {})[item.claim] = item

    def remove(self, item: ItemT) -> None:
        """Raises KeyError when it is missing."""
        key = item.tenant, item.request_id
        same_id = self._by_id[key]
        del same_id[item.claim]
        if not same_id:
            del self._by_id[key]

    def find(self, tenant: str, request_id: str) -> tuple[ItemT, ...]:
        """All requests of this id, in the order they were added."""
        return tuple(self._by_id.get((tenant, request_id), {}).values())

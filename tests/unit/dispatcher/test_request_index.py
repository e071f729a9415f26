"""What waits, found by tenant and request id."""

from dataclasses import dataclass

import pytest

from fairlane.ownership import Claim, PartitionId
from stream_processors.dispatcher.scheduling.tenant_occupancy import RequestIndex


@dataclass(frozen=True)
class Item:
    tenant: str
    request_id: str
    offset: int

    @property
    def claim(self) -> Claim:
        return Claim(PartitionId("requests", 0), self.offset, 1)


def test_all_of_an_id_are_found_and_no_others() -> None:
    index: RequestIndex[Item] = RequestIndex()
    first, again, others = Item("acme", "a", 1), Item("acme", "a", 2), (Item("other", "a", 3), Item("acme", "b", 4))
    for item in (first, again, *others):
        index.add(item)
    assert index.find("acme", "a") == (first, again)
    index.remove(first)
    assert index.find("acme", "a") == (again,)
    index.remove(again)
    assert index.find("acme", "a") == ()
    assert index.find("other", "a") == others[:1]
    with pytest.raises(KeyError):
        index.remove(again)


def test_nothing_is_kept_of_what_is_gone() -> None:
    index: RequestIndex[Item] = RequestIndex()
    item = Item("acme", "a", 1)
    index.add(item)
    index.remove(item)
    assert not index._by_id

"""What waits, found by tenant and request id."""

import pytest

from stream_processors.dispatcher.scheduling.tenant_occupancy import RequestIndex
from tests.kit.scheduler_kit import NamedRequest, claim


def item(tenant: str, request_id: str, offset: int) -> NamedRequest:
    return NamedRequest(claim(offset), tenant, name=request_id)


def test_all_of_an_id_are_found_and_no_others() -> None:
    index: RequestIndex[NamedRequest] = RequestIndex()
    first, again, others = item("acme", "a", 1), item("acme", "a", 2), (item("other", "a", 3), item("acme", "b", 4))
    for one in (first, again, *others):
        index.add(one)
    assert index.find("acme", "a") == (first, again)
    index.remove(first)
    assert index.find("acme", "a") == (again,)
    index.remove(again)
    assert index.find("acme", "a") == ()
    assert index.find("other", "a") == others[:1]
    with pytest.raises(KeyError):
        index.remove(again)


def test_nothing_is_kept_of_what_is_gone() -> None:
    index: RequestIndex[NamedRequest] = RequestIndex()
    one = item("acme", "a", 1)
    index.add(one)
    index.remove(one)
    assert not index._by_id

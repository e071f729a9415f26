"""What goes back to the dispatcher, and what is answered."""

from dataclasses import replace

import pytest

from fairlane.outcomes import Code
from inference_consumers.results.retries import requeued_item
from tests.kit.finished_item import ITEM


def test_what_is_too_large_for_the_memory_goes_back_once() -> None:
    returned = requeued_item(ITEM, Code.OVERLOADED)
    assert returned == replace(ITEM, handed_back=1)
    assert returned is not None
    assert requeued_item(returned, Code.OVERLOADED) is None


@pytest.mark.parametrize("code", [code for code in Code if code not in (Code.OVERLOADED, Code.UNKNOWN_MODEL)])
def test_nothing_else_goes_back(code: Code) -> None:
    assert requeued_item(ITEM, code) is None


def test_what_is_not_loaded_is_handed_back_often() -> None:
    item, times = ITEM, 0
    while (returned := requeued_item(item, Code.UNKNOWN_MODEL)) is not None:
        times += 1
        assert (returned.handed_back, returned.unserved) == (times, times)
        assert times <= 100
        item = returned
    assert times >= 10


def test_of_both_reasons_the_last_one_can_be_told() -> None:
    too_large = requeued_item(ITEM, Code.OVERLOADED)
    assert too_large is not None
    unserved = requeued_item(too_large, Code.UNKNOWN_MODEL)
    assert unserved == replace(ITEM, handed_back=2, unserved=2)
    assert requeued_item(unserved, Code.OVERLOADED) == replace(ITEM, handed_back=3, unserved=2)

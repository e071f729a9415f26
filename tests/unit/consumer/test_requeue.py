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


@pytest.mark.parametrize("code", [code for code in Code if code != Code.OVERLOADED])
def test_nothing_else_goes_back(code: Code) -> None:
    assert requeued_item(ITEM, code) is None

"""What goes back to the dispatcher, and what is answered."""

from dataclasses import replace

import pytest

from fairlane.outcomes import Code
from inference_consumers.results.retries import hand_back
from tests.kit.finished_item import ITEM


def test_what_is_too_large_for_the_memory_goes_back_once() -> None:
    returned = hand_back(ITEM, Code.OVERLOADED)
    assert returned == replace(ITEM, handed_back=1)
    assert returned is not None
    assert hand_back(returned, Code.OVERLOADED) is None


@pytest.mark.parametrize("code", [code for code in Code if code != Code.OVERLOADED])
def test_nothing_else_goes_back(code: Code) -> None:
    assert hand_back(ITEM, code) is None

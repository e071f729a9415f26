"""What the process of an engine makes of what its consumer sends."""

import os
import threading
from typing import Any, NoReturn

import msgspec
import pytest

from fairlane.records import Message, Parameters, Passage, RequestInput
from inference_consumers.engine_process.child import _at_low_priority, item_name, named_items
from inference_consumers.engine_process.messages import Run, to_engine
from inference_consumers.engines.protocol import EngineItem, EngineLoadError


def test_two_requests_of_the_same_id_are_two_items() -> None:
    """Ids are their tenants' own: a cancel of one must not stop the other."""
    item = EngineItem("same", "generate", RequestInput(prompt="hello"), Parameters())
    names = [one.item_id for run_id in (1, 12) for one in named_items(Run(run_id, (item,) * 12))]
    assert len(set(names)) == len(names)
    assert names == [item_name(run_id, index) for run_id in (1, 12) for index in range(12)]


def test_an_item_arrives_whole() -> None:
    item = EngineItem(
        "id",
        "generate",
        RequestInput(prompt="hello"),
        Parameters(),
        (Passage("p", "text", 0.5),),
        100,
        (Message("user", "before"), Message("assistant", "then")),
    )
    run = Run(1, (item,))
    assert to_engine.decode(msgspec.msgpack.encode(run)) == run


def test_a_load_beside_others_is_nice_and_what_runs_later_is_not() -> None:
    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = nice()
    given: Any = nice
    found: Any = _at_low_priority(given)
    assert found == min(19, before + 10)
    assert nice() == before


def test_an_error_of_a_load_beside_others_is_raised() -> None:
    def fail() -> NoReturn:
        raise EngineLoadError("m: no such file")

    with pytest.raises(EngineLoadError, match="no such file"):
        _at_low_priority(fail)
